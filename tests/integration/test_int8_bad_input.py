"""Bad input to `calibrate` and `evaluate`, from the command line: one or two lines that say what, where and what mends it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from optpipe.core.errors import ExitStatus
from optpipe.workspace.places import find_shipped_folder
from tests.fakes.graphs import onnx_model
from tests.integration.conftest import Ran, optpipe, write_digits_card

Run = Callable[..., Ran]
DIGITS = find_shipped_folder("calibration") / "digits"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, exported: Callable[[Path], Path]) -> Path:
    """A working directory in which `digits` was calibrated once by `max`."""
    place = tmp_path_factory.mktemp("bad-int8")
    exported(place / ".optpipe")
    optpipe(
        "calibrate", "digits", "--method", "max", "--output", "made", "--json", cwd=place
    ).expect(0)
    return place


@pytest.fixture
def run(folder: Path, inside: Run) -> Run:
    return lambda *arguments: inside(*arguments, cwd=folder)


def refused(ran: Ran, *said: str, status: ExitStatus = ExitStatus.BAD_INPUT) -> None:
    """The command ended with `status`, said all of `said` in at most three lines, and showed no traceback."""
    assert ran.status == status, ran.stdout + ran.stderr
    lines = [line for line in ran.stderr.splitlines() if line.startswith("optpipe: ")]
    assert len(lines) == 1, ran.stderr
    text = " ".join(ran.stderr.split())
    assert all(each in text for each in said), ran.stderr
    assert json.loads(ran.stdout)["error"]["exit_status"] == int(status)


def pictures(folder: Path, count: int, size: int = 28) -> Path:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(len(folder.name))
    for index in range(count):
        Image.fromarray(rng.integers(0, 255, (size, size, 3), dtype=np.uint8)).save(
            folder / f"{index}.png"
        )
    return folder


def test_folders_that_hold_no_set(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(
        run("calibrate", "digits", "--images", tmp_path / "empty", "--json"),
        "no images in this folder",
    )
    refused(
        run("calibrate", "digits", "--images", tmp_path / "none", "--json"),
        "no such file or folder",
    )
    some = pictures(tmp_path / "some", 20)
    (some / "1.png").write_bytes(b"")
    (some / "2.png").write_bytes((some / "3.png").read_bytes()[:60])
    (some / "notes.txt").write_text("no picture")
    refused(
        run("calibrate", "digits", "--images", some, "--json"),
        "2 of 20 images cannot be read",
        "1.png",
    )
    (some / "2.png").unlink()
    one_bad = run("calibrate", "digits", "--images", some, "--method", "max", "--json").expect(0)
    assert {Path(each).name for each in one_bad.document["unreadable"]} == {"1.png", "notes.txt"}
    (some / "1.png").rename(os.fsdecode(bytes(some) + b"/\xff.png"))
    unnamed = run("calibrate", "digits", "--images", some, "--method", "max", "--json").expect(0)
    assert "its name is not UTF-8" in " ".join(unnamed.stderr.split())
    for index in range(30):
        (some / f"{index}.txt").write_text("")
    refused(run("calibrate", "digits", "--images", some, "--json"), "31 of 50 files are not images")


def test_tables_that_do_not_fit(run: Run, folder: Path, tmp_path: Path) -> None:
    table = json.loads((folder / "made" / "table-max.json").read_text())
    build = ("build", "digits", "--precision", "int8", "--backend", "tensorrt-rtx", "--calibration")

    def failed(value: object, said: str) -> None:
        (tmp_path / "table.json").write_text(value if isinstance(value, str) else json.dumps(value))
        ran = run(*build, tmp_path / "table.json", "--json").expect(ExitStatus.BAD_INPUT)
        assert said in ran.stdout + ran.stderr

    first = next(iter(table["ranges"]))
    failed(table | {"model": "resnet50"}, "the calibration table is for model resnet50, not digits")
    failed(table | {"ranges": {}}, "no range for")
    failed(
        table | {"ranges": table["ranges"] | {first: {"amax": 0, "low": 0, "high": 0}}},
        "finite positive amax",
    )
    failed(
        table | {"ranges": table["ranges"] | {first: {"amax": 1e400, "low": 0, "high": 1}}},
        "JSON is malformed",
    )
    failed(
        table | {"format": "optpipe.calibration-table/9"}, "has format optpipe.calibration-table/9"
    )
    failed(json.dumps(table)[:-40], "input data was truncated")
    failed(table | {"keep": ["no such layer"]}, "no such layer")


def test_activations_that_are_not_finite_are_named(folder: Path, tmp_path: Path) -> None:
    """`log` of a channel that is zero somewhere: -inf on real pictures."""
    rng = np.random.default_rng(0)
    sizes = {"w0": (16, 3, 3, 3), "w1": (10, 16, 3, 3)}
    weights = {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    nodes = [
        ("Conv", "image w0", "c0", {"pads": [1, 1, 1, 1]}),
        ("Relu", "c0", "r0"),
        ("Log", "r0", "log"),
        ("Conv", "log w1", "c1"),
        ("GlobalAveragePool", "c1", "p"),
        ("Flatten", "p", "logits"),
    ]
    shapes = {"image": ["n", 3, 32, 32]}, {"logits": ["n", 10]}
    onnx_model(nodes, *shapes, path=tmp_path / "log.onnx", **weights)
    ran = optpipe("calibrate", write_digits_card(tmp_path / "log.toml"), "--json", cwd=tmp_path)
    refused(
        ran,
        "tensor 'log' contains NaN or Inf on the calibration data",
    )


def test_models_that_cannot_be_evaluated_or_have_nothing_built(run: Run, tmp_path: Path) -> None:
    refused(
        run("evaluate", "digits", "--json", "--workspace", tmp_path / "fresh"),
        "has no build with these options",
        f"optpipe build digits --workspace {tmp_path / 'fresh'}",
    )
    assert not list((tmp_path / "fresh" / "store").glob("model-*")), (
        "nothing is exported only to say so"
    )
    (tmp_path / "file").write_text("")
    refused(run("calibrate", "digits", "--output", tmp_path / "file", "--json"), "is not a folder")


def test_accuracy_on_the_calibration_images_is_never_a_pass(folder: Path) -> None:
    optpipe(
        "build", "digits", "--precision", "int8", "--backend", "onnxruntime", "--json", cwd=folder
    ).expect(0)
    judged = optpipe(
        "evaluate",
        "digits",
        "--data",
        DIGITS / "calibration.json",
        "--accuracy-budget",
        "5%",
        "--json",
        cwd=folder,
    ).expect(ExitStatus.INCONCLUSIVE)
    row = next(each for each in judged.document["results"] if each["precision"] == "int8")
    assert row["calibrated_on"] == 500
    assert "evaluate on other data" in " ".join(judged.stderr.split())


def test_a_broken_artifact_does_not_hide_the_others(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / ".optpipe", tmp_path / ".optpipe", symlinks=True)
    built = optpipe(
        "build",
        "digits",
        "--precision",
        "fp32,int8",
        "--backend",
        "onnxruntime",
        "--json",
        cwd=tmp_path,
    ).expect(0)
    broken = Path(
        next(each["path"] for each in built.document["artifacts"] if each["precision"] == "int8")
    )
    (tmp_path / broken).write_bytes((tmp_path / broken).read_bytes()[:-10])
    ran = optpipe("evaluate", "digits", "--count", "50", "--json", cwd=tmp_path).expect(
        ExitStatus.STAGE_FAILED
    )
    rows = {row["precision"]: row for row in ran.document["results"]}
    assert rows["int8"]["failed"]
    assert "is damaged" in rows["int8"]["why_not"]
    assert rows["fp32"]["accuracy"]["top1"] > 0.9


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_an_interrupted_calibration_leaves_nothing_half_used(name, exported, tmp_path):
    """Stopped on the way to its table, wherever that is; then there is none, and the next calibration is whole."""
    exported(tmp_path / ".optpipe")
    images = pictures(tmp_path / "images", 40)
    for index in range(40, 3000):
        os.link(images / f"{index % 40}.png", images / f"{index}.png")
    command = [
        sys.executable,
        "-m",
        "optpipe",
        "calibrate",
        "digits",
        "--images",
        str(images),
        "--json",
    ]
    child = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".optpipe/tmp/calibration-*")) and time.monotonic() < deadline:
        assert child.poll() is None, child.stderr.read() if child.stderr else ""
        time.sleep(0.02)
    time.sleep(0.3)
    os.killpg(child.pid, getattr(signal, name))
    _, said = child.communicate(timeout=60)
    assert child.returncode != 0
    assert "Traceback" not in said
    if name == "SIGINT":
        assert child.returncode == ExitStatus.INTERRUPTED
        assert "interrupted" in said
    assert not list(tmp_path.glob(".optpipe/store/calibration-*"))
    assert not list(tmp_path.rglob("table-*.json"))
    optpipe(
        "calibrate", "digits", "--images", images, "--count", "40", "--method", "max", cwd=tmp_path
    ).expect(0)
    assert optpipe("store", "gc", "--json", cwd=tmp_path).status == 0
    assert not list(tmp_path.glob(".optpipe/tmp/*"))
