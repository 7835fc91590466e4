"""Scores of tasks other than classification: optpipe and the independent verifier agree on them, and on every forgery."""

import json
import shutil
from contextlib import suppress
from typing import Any

import numpy as np
import polars as pl
import pytest
from tests.fakes.dossiers import edit, examine, seal_anew
from tests.tiers import leave_to_slow_tier
from tests.unit.signoff.test_forgeries import put_right

from optpipe.core.errors import BadInputError
from optpipe.core.records import plain_from_record
from optpipe.evaluate.recompute import read_evaluation, recompute_evaluation
from optpipe.evaluate.tasks.masks import encode_mask
from optpipe.signoff.verify import check_dossier
from optpipe.workspace.entry import load_run

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
    labels = LABELS.get(request.param, ())
    dataset = {"labels": labels, "classes": len(labels) or 10}
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


def change_rows(column, change, first=0):
    """What `change` makes of the truth or of both predictions of the samples up to `first`."""

    def forge(folder):
        (path,) = folder.glob("runs/*/predictions.parquet")
        table = pl.read_parquet(path)
        for name in [each for each in table.columns if each.endswith(column)]:
            rows = table[name].to_list()
            rows[: first + 1] = [change(row) for row in rows[: first + 1]]
            table = table.with_columns(pl.Series(name, rows, table[name].dtype))
        table.write_parquet(path)
        state_again(path.parent)

    return forge


def state_again(folder):
    """What the predictions of an evaluation give, in its record; unchanged if they give nothing."""
    run = load_run(folder)
    stated = read_evaluation(run).results
    with suppress(BadInputError, ValueError, TypeError, IndexError, AttributeError):
        found = [each for _, one, each in recompute_evaluation(run) if one in stated]
        edit(folder / "evaluate.json", "results", value=[plain_from_record(each) for each in found])


def put_into(place, value):
    """Of each box."""
    return lambda boxes: [[*box[:place], value, *box[place + 1 :]] for box in boxes]


ANSWER, TRUTH, NAN, INF = ":prediction", "truth", float("nan"), float("inf")
MASK = encode_mask(np.full((12, 17), 200, np.uint8))
IMPOSSIBLE = {
    "detection": {
        "a width below zero": change_rows(ANSWER, put_into(2, -5.0)),
        "no height": change_rows(TRUTH, put_into(3, 0.0)),
        "a place that is no number": change_rows(ANSWER, put_into(0, NAN)),
        "an infinite height": change_rows(TRUTH, put_into(3, INF)),
        "a box outside of every image": change_rows(ANSWER, put_into(0, -1e9)),
        "a box as wide as no image": change_rows(TRUTH, put_into(2, 1e12)),
        "a score below zero": change_rows(ANSWER, put_into(4, -0.5)),
        "a score that is no number": change_rows(ANSWER, put_into(4, NAN)),
        "half a class": change_rows(ANSWER, put_into(5, 0.5)),
        "half a true class": change_rows(TRUTH, put_into(4, 0.5)),
        "a class below zero": change_rows(TRUTH, put_into(4, -1.0)),
        "an area below zero": change_rows(TRUTH, put_into(5, -1.0)),
        "half a crowd": change_rows(TRUTH, put_into(6, 0.5)),
        "seven crowds": change_rows(TRUTH, put_into(6, 7.0)),
        "boxes without a class": change_rows(ANSWER, lambda boxes: [box[:5] for box in boxes]),
        "no answer": change_rows(ANSWER, lambda _: None),
    },
    "segmentation": {
        "a class that there is not": change_rows(ANSWER, lambda _: MASK),
        "a true class that there is not": change_rows(TRUTH, lambda _: MASK),
    },
    "token-classification": {
        "more tags than words": change_rows(ANSWER, lambda tags: [*tags, "O"]),
        "a tag without a letter": change_rows(TRUTH, lambda tags: [*tags[:-1], ""], 9),
        "a tag that clears the screen": change_rows(
            TRUTH, lambda tags: ["\x1b[2J" for _ in tags], 9
        ),
    },
    "embedding": {
        "half a pair": change_rows(TRUTH, lambda pair: [0.5, pair[1]], 1),
        "a pair of three": change_rows(TRUTH, lambda pair: [0.0, pair[1]], 2),
        "two ratings of a pair": change_rows(TRUTH, lambda pair: [pair[0], pair[1] + 1.0]),
        "a rating that is no number": change_rows(TRUTH, lambda pair: [pair[0], NAN], 1),
        "an infinite answer": change_rows(ANSWER, lambda row: [INF for _ in row]),
    },
    "multi-label-classification": {
        "one class twice": change_rows(ANSWER, lambda _: [1, 1]),
        "a class below zero": change_rows(ANSWER, lambda _: [-1]),
        "a class that there is not": change_rows(TRUTH, lambda _: [5000]),
        "classes in another order": change_rows(TRUTH, lambda _: [3, 1]),
    },
    "regression": {
        "an infinite answer": change_rows(ANSWER, lambda row: [INF for _ in row]),
        "a truth that is no number": change_rows(TRUTH, lambda row: [NAN for _ in row]),
        "fewer values": change_rows(TRUTH, lambda row: row[:1]),
    },
    "question-answering": {"no answer": change_rows(ANSWER, lambda _: None)},
    "user:words": {
        "a score above all": change_rows(ANSWER, lambda row: row | {"score": 7.0}),
        "a score below none": change_rows(ANSWER, lambda row: row | {"score": -0.5}),
        "an answer that is no JSON": change_rows(ANSWER, lambda row: row | {"prediction": "{"}),
    },
}
ANSWERS = {
    f"{task}: {name}": (task, forge)
    for task, some in IMPOSSIBLE.items()
    for name, forge in some.items()
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("judged", "name"), [(task, name) for name, (task, _) in ANSWERS.items()], indirect=["judged"]
)
def test_answers_that_no_model_gives_are_refused_by_both_verifiers(judged, tmp_path, name):
    folder = shutil.copytree(judged, tmp_path / "one")
    ANSWERS[name][1](folder)
    seal_anew(folder)
    said = (
        f"is not possible for {name.partition(':')[0]}",
        "do not fit",
        "that are not of two",
        "null",
    )
    problems, differs = check_dossier(folder).problems, examine(folder)[0].differs
    assert any(words in each for words in said for each in problems), problems
    assert any("§8.1.2" in each or "not in the format" in each for each in differs) or any(
        "cannot be recomputed" in each for each in problems
    ), differs
    assert differs


@pytest.mark.parametrize("judged", ["detection"], indirect=True)
def test_one_sample_that_decides_all_is_judged_alike(judged, tmp_path):
    """Its lean is that of a figure whose bound ends before the limit."""
    folder = shutil.copytree(judged, tmp_path / "one")
    change_rows(ANSWER, lambda boxes: [boxes[0]] * 200)(folder)
    put_right(folder)
    assert check_dossier(folder).problems == ()
    assert examine(folder)[0].differs == []


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
