"""The samples of a Python file, which `op.Data` takes too, wherever a command takes data; elsewhere a refusal with the way out."""

from pathlib import Path

import pytest

from tests.integration.conftest import Ran, optpipe
from tests.integration.test_states_of_the_world import QUICK, WHERE, write_folder

LABELED = """
import numpy as np

CALIBRATION = np.random.default_rng(2).standard_normal((24, 4)).astype(np.float32), np.arange(24) % 3
"""
ENDLESS = """
import numpy as np


def CALIBRATION():
    random = np.random.default_rng(3)
    while True:
        yield random.standard_normal((4, 4)).astype(np.float32), random.integers(0, 3, 4)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network with a build in FP32 and files of samples."""
    made = tmp_path_factory.mktemp("python") / "work"
    write_folder(made, 0)
    (made / "labeled.py").write_text(LABELED)
    (made / "endless.py").write_text(ENDLESS)
    run(made, "build", "--precision", "fp32", *WHERE).expect(0)
    return made


def run(folder: Path, verb: str, *words: object) -> Ran:
    return optpipe(verb, "three.toml", *words, "--json", cwd=folder, workspace=folder / "ws")


def test_they_are_evaluated_as_a_file_of_tensors_is(folder: Path) -> None:
    ran = run(folder, "evaluate", "--data", "labeled.py").expect(0)
    assert ran.document["dataset"]["count"] == 24
    assert all(row["accuracy"] is not None for row in ran.document["results"])
    limited = run(folder, "evaluate", "--data", "endless.py", "--count", "10").expect(0)
    assert limited.document["dataset"]["count"] == 10


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("calibrate", ("--data", "labeled.py", "--method", "max")),
        ("calibrate", ("--data", "endless.py", "--count", "24", "--method", "max")),
        ("build", ("--precision", "fp32", *WHERE, "--images", "labeled.py")),
        ("bench", ("--images", "endless.py", *QUICK)),
        ("evaluate", ("--layers", "all", "--data", "labeled.py")),
    ],
)
def test_other_commands_take_them(folder: Path, verb: str, words: tuple[str, ...]) -> None:
    assert run(folder, verb, *words).status in (0, 5)


def test_what_reads_pictures_says_what_to_give(folder: Path) -> None:
    ran = optpipe("preprocess", "digits", "--images", "labeled.py", cwd=folder).expect(2)
    assert "give a folder of images" in ran.stderr
