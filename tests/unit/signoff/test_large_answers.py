"""Answers of an evaluation that ask for hours or gigabytes are refused by what they declare, in both verifiers."""

import shutil

import numpy as np
import polars as pl
import pytest
from tests.fakes.dossiers import examine, seal_anew
from tests.unit.signoff.test_leaves_of_every_record import make_evaluated

from optpipe.evaluate.tasks.answers import score_answer
from optpipe.signoff.verify import check_dossier

LARGEST = 2**20 - 1


def draw_boxes(count):
    places = np.random.default_rng(0).uniform(1, 50, (count, 4))
    return np.c_[places, np.full(count, 0.9), np.zeros(count)].tolist()


LARGE = {
    "12,000 boxes in one image": ("detection", lambda _: draw_boxes(12_000)),
    "millions of numbers in JSON": (
        "user:words",
        lambda row: row | {"prediction": f"[{'1,' * 5_000_000}1]"},
    ),
    "JSON of 100,000 levels": (
        "user:words",
        lambda row: row | {"prediction": "[" * 100_000 + "]" * 100_000},
    ),
    "the largest class among 40 samples": ("multi-label-classification", lambda _: [LARGEST]),
    "20 million words of one answer": ("question-answering", lambda _: "a " * 20_000_000),
    "a million different tags": (
        "token-classification",
        lambda _: [f"B-{at}" for at in range(900_000)],
    ),
}


@pytest.fixture(scope="module")
def made(make_workspace, tmp_path_factory):
    """A dossier of each task, made once."""
    known = {}

    def make(task):
        if task not in known:
            folder = tmp_path_factory.mktemp("large")
            known[task] = make_evaluated(make_workspace(folder / "workspace"), folder, task)
        return known[task]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_what_asks_for_too_much_is_refused_by_both_verifiers(made, tmp_path, name):
    task, enlarge = LARGE[name]
    folder = shutil.copytree(made(task), tmp_path / "one")
    (path,) = folder.glob("runs/evaluate-*/predictions.parquet")
    table = pl.read_parquet(path)
    columns = {}
    for column in (each for each in table.columns if each.endswith(":prediction")):
        rows = table[column].to_list()
        rows[0] = enlarge(rows[0])
        columns[column] = pl.Series(column, rows, table[column].dtype)
    table.with_columns(**columns).write_parquet(path)
    seal_anew(folder)
    (problem, *_) = check_dossier(folder).problems
    assert "at most" in problem or "too deep" in problem, problem
    found = " ".join(examine(folder)[0].differs)
    assert any(word in found for word in ("too large", "too deep", "impossible")), found


@pytest.mark.slow
def test_vectors_of_two_lengths_are_refused_by_both_verifiers(made, tmp_path):
    folder = shutil.copytree(made("embedding"), tmp_path / "one")
    (path,) = folder.glob("runs/evaluate-*/predictions.parquet")
    table = pl.read_parquet(path)
    vectors = table["source:prediction"].to_list()
    vectors[0] = [*vectors[0], 0.0]
    table.with_columns(pl.Series("source:prediction", vectors)).write_parquet(path)
    seal_anew(folder)
    assert check_dossier(folder).problems
    assert examine(folder)[0].differs


def test_an_answer_is_scored_as_before_with_many_right_ones():
    """The words of an answer are counted once, not once for each right one."""
    truths = [f"word{at} the red fox" for at in range(20_000)]
    answer = "red " * 20_000 + "fox"
    f1, exact = score_answer(answer, truths)
    assert exact == 0.0
    assert f1 == pytest.approx(2 * 2 / (20_001 + 3))
    assert score_answer("The red fox!", ["red fox"]) == (1.0, 1.0)
    assert score_answer("a", []) == (1.0, 1.0)
    assert score_answer("fox", []) == (0.0, 0.0)
