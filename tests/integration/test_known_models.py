"""Sign-offs of other people's trained models: one is made again, and all of the gallery agree with both verifiers and with the README."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.known import table
from benchmarks.known.file_types import KINDS, Draw, read_ends
from benchmarks.known.text_lines import count_edits

ROOT = Path(__file__).parents[2]
FOLDERS = [table.GALLERY / name for name in table.ROWS if (table.GALLERY / name).is_dir()]


def run(*words, **variables):
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_table_of_the_readme_is_that_of_the_dossiers():
    text = table.README.read_text()
    assert table.make_table() in text
    assert len(FOLDERS) >= 6
    verdicts = [json.loads((each / "verdict.json").read_text())["verdict"] for each in FOLDERS]
    assert sum(each != "PASS" for each in verdicts) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda each: each.name)
def test_the_independent_verifier_agrees_with_each_dossier(folder):
    ran = run("verifier/verify_dossier.py", folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert sum(each.stat().st_size for each in folder.rglob("*") if each.is_file()) < 2e6


@pytest.mark.slow
def test_a_sign_off_is_made_again(tmp_path):
    """Files and weights as in the gallery; which verdict the speed of this machine gives is open."""
    made = run(
        "-m", "benchmarks.known.file_types", "--output", tmp_path / "dossier",
        OPTPIPE_WORKSPACE=str(tmp_path / "workspace"),
    )  # fmt: skip
    if "Failed to fetch" in made.stderr or "error sending request" in made.stderr:
        pytest.skip("the package of the weights cannot be reached")
    assert made.returncode == 0, made.stderr
    assert run("verifier/verify_dossier.py", tmp_path / "dossier").returncode == 0
    here, kept = (
        json.loads((folder / "verdict.json").read_text())
        for folder in (tmp_path / "dossier", table.GALLERY / "file-types")
    )
    shared = [
        next(one for one in each["criteria"] if one["name"] == "accuracy.maximum_drop")["about"]
        for each in (here, kept)
    ]
    assert shared[0] == shared[1], "the same samples, by their hash"


def test_files_are_made_alike_from_a_seed_and_are_read_at_both_ends():
    for kind, make in KINDS.items():
        assert make(Draw(5)) == make(Draw(5)), kind
        tokens = read_ends(make(Draw(5)))
        assert (tokens.shape, tokens.min() >= 0, tokens.max() <= 256) == ((2048,), True, True)


@pytest.mark.parametrize(
    ("found", "wanted", "edits"),
    [("", "abc", 3), ("abc", "abc", 0), ("abd", "abc", 1), ("xabc", "abc", 1), ("ac", "abc", 1)],
)
def test_edits_are_counted(found, wanted, edits):
    assert count_edits(found, wanted) == edits
