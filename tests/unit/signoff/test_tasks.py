"""Scores of tasks other than classification: optpipe and the independent verifier agree on them, and on every forgery."""

import json
import shutil
from typing import Any

import numpy as np
import polars as pl
import pytest
from tests.fakes.dossiers import edit, examine, seal_anew
from tests.tiers import leave_to_slow_tier

from optpipe.evaluate.tasks.masks import encode_mask
from optpipe.signoff.verify import check_dossier

LIMITS = {
    "segmentation": 'maximum_drop = "9 mIoU"\nminimum_score = "80 pixel-accuracy"',
    "detection": 'maximum_drop = "9 points"\nminimum_score = "10 AP50"\nmaximum_f1_drop = "9 points"\nat_threshold = "40%"',
    "token-classification": 'maximum_drop = "9 F1"\nminimum_score = "50 points"',
    "embedding": 'maximum_drop = "9 Spearman"\nminimum_score = "50 points"',
    "multi-label-classification": 'maximum_drop = "9 F1"\nminimum_score = "50 precision"',
    "regression": 'maximum_drop = "9 RMSE"\nminimum_score = "50 points"',
    "question-answering": 'maximum_drop = "20 F1"\nminimum_score = "20 EM"',
    "user:words": 'maximum_drop = "9 points"\nminimum_score = "50 points"',
}
LABELS = {
    "segmentation": ("sky", "sea", "N/A", "land", "tower"),
    "detection": ("cat", "dog", "bird", "__background__", "toaster"),
}
"""Towers and toasters do not occur, and N/A and __background__ are no classes."""
COUNT = 40


def draw_rows(task):
    """Truths, and the predictions of a good source model and of a worse build."""
    rng = np.random.default_rng(1)
    if task == "segmentation":
        truths = [np.sort(rng.integers(0, 4, (12, 17)), axis=1) for _ in range(COUNT)]
        masks = [
            np.where(rng.random(each.shape) < share, 3, each)
            for share in (0.02, 0.05)
            for each in truths
        ]
        truths = [np.where(each == 2, 255, each) for each in truths]
        pictures = [encode_mask(each.astype(np.uint8)) for each in (*truths, *masks)]
        return [pictures[at : at + COUNT] for at in range(0, 3 * COUNT, COUNT)]
    if task == "detection":
        boxes = [rng.uniform(1, 50, (rng.integers(1, 5), 4)) for _ in range(COUNT)]
        objects = [
            [[*box, float(at % 3), box[2] * box[3], float(at == 3)] for at, box in enumerate(row)]
            for row in boxes
        ]
        drawn = [
            [
                [*(box * rng.uniform(1, shift, 4)), rng.random(), float(at % 3)]
                for at, box in enumerate(row)
            ]
            for shift in (1.1, 1.2)
            for row in boxes
        ]
        return [objects, drawn[:COUNT], drawn[COUNT:]]
    if task == "token-classification":
        tags = np.array(["O", "B-PER", "I-PER", "E-PER", "S-LOC", "I-LOC"])
        texts = [list(rng.choice(tags, rng.integers(8))) for _ in range(COUNT)]
        return [
            texts,
            *(
                [[rng.choice([each, "O"], p=[share, 1 - share]) for each in row] for row in texts]
                for share in (0.95, 0.9)
            ),
        ]
    if task == "question-answering":
        answers = ["the red Fox", "a fox", "Fox, red!", "", "42", "the"]
        right = [[answers[at % 6], "red fox"][: at % 3] for at in range(COUNT)]
        given = [str(rng.choice(row[:1] + answers[:4])) for row in right]
        return [right, [row[0] if row else "" for row in right], given]
    if task == "embedding":
        rows = rng.normal(size=(COUNT, 8))
        rows[1::2] = (
            rows[::2] + rng.normal(size=(COUNT // 2, 8)) * np.linspace(0, 2, COUNT // 2)[:, None]
        )
        pairs = [[float(at // 2), float(5 - at // 8)] for at in range(COUNT - 2)] + 2 * [
            [-1.0, 0.0]
        ]
        return [pairs, rows.tolist(), (rows + 0.1 * rng.normal(size=rows.shape)).tolist()]
    if task == "multi-label-classification":
        levels = rng.random((COUNT, 5))
        shifted = (levels, levels + 0.05 * rng.normal(size=levels.shape), levels + 0.1)
        return [[np.flatnonzero(row > 0.6).tolist() for row in each] for each in shifted]
    if task == "regression":
        values = 100 + rng.normal(size=(COUNT, 3)) * [1, 20, 0.1]
        noise = rng.normal(size=values.shape) * [1, 20, 0.1]
        return [each.tolist() for each in (values, values + 0.1 * noise, values + 0.11 * noise)]
    given = rng.uniform(0.5, 1, (2, COUNT)).tolist()
    kinds: list[Any] = [
        round,
        float,
        lambda each: {"at": [round(each, 1), "x", None, True], "to": {}},
    ]
    scores = [
        [
            {"prediction": json.dumps(kinds[at % 3](each)), "score": each}
            for at, each in enumerate(row)
        ]
        for row in given
    ]
    return [["true"] * COUNT, *scores]


@pytest.fixture(scope="module", params=LIMITS)
def judged(request, make_workspace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    workspace = make_workspace(folder / "workspace")
    dataset = {"labels": LABELS.get(request.param, ())}
    workspace.evaluate(
        workspace.artifact(), task=request.param, rows=draw_rows(request.param), dataset=dataset
    )
    policy = f'schema = 1\n[accuracy]\nminimum_agreement = "1 %"\n{LIMITS[request.param]}\n'
    record, dossier = workspace.sign_off(policy, folder / "one")
    checked, verdict = examine(dossier)
    assert (checked.differs, checked.open, verdict) == ([], [], record.verdict)
    assert check_dossier(dossier).problems == ()
    judged = [one for one in record.criteria if one.name.startswith("accuracy.")]
    assert all(one.ci for one in judged)
    absent = {"segmentation": "tower", "detection": "toaster"}.get(request.param)
    named = [one.name for one in judged if absent and f"({absent})" in one.about]
    assert bool(named) == bool(absent)
    means = ("accuracy.maximum_drop.mIoU", "accuracy.maximum_drop", "accuracy.minimum_score.AP50")
    assert named == [one.name for one in judged if absent and one.name in means]
    return dossier


def reverse_predictions(folder):
    (path,) = folder.glob("runs/*/predictions.parquet")
    table = pl.read_parquet(path)
    table.with_columns(table[table.columns[-1]].reverse()).write_parquet(path)


def in_record(*steps):
    return lambda folder: edit(
        next(folder.glob("runs/*/evaluate.json")), "results", 1, *steps, value=0.999
    )


FORGED = {
    "predictions": reverse_predictions,
    "score": in_record("scores", "scores", 0, "value"),
    "drop": in_record("scores", "scores", 0, "drop"),
    "agreement": in_record("agreement", "share"),
    "samples": in_record("samples"),
    "observed": lambda folder: edit(
        folder / "verdict.json", "criteria", -1, "observed", value=0.0123
    ),
    "interval": lambda folder: edit(
        folder / "verdict.json", "criteria", -1, "ci", 0, value=-0.0123
    ),
}


@pytest.mark.parametrize("name", leave_to_slow_tier(FORGED, but=("drop", "interval")))
def test_both_verifiers_find_a_forged_score(judged, tmp_path, name):
    folder = shutil.copytree(judged, tmp_path / "one")
    FORGED[name](folder)
    seal_anew(folder)
    assert check_dossier(folder).problems
    assert examine(folder)[0].differs


@pytest.mark.parametrize("judged", ["detection"], indirect=True)
def test_a_huge_class_number_is_a_finding_and_takes_no_memory(judged, tmp_path):
    folder = shutil.copytree(judged, tmp_path / "one")
    (path,) = folder.glob("runs/*/predictions.parquet")
    table = pl.read_parquet(path)
    rows = table["truth"].to_list()
    rows[0][0][4] = 1e9
    table.with_columns(pl.Series("truth", rows, table["truth"].dtype)).write_parquet(path)
    seal_anew(folder)
    assert any("numbers would be counted" in each for each in check_dossier(folder).problems)
    assert examine(folder)[0].differs
