"""Two texts in a sample: entailments made by rule, a tiny model trained on them here, from JSON lines to a verdict."""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optpipe.core.entries import WeightsRequest
from optpipe.core.events import SilentListener
from optpipe.core.records import read_record
from optpipe.evaluate.result import Evaluation
from optpipe.models.export.exported import Model, export_model
from optpipe.models.inputs.task_data import iterate_rows, load_sample_set
from optpipe.models.sources.libraries import HuggingFaceSource
from optpipe.workspace.store import Store
from tests.fakes.text_models import make_tokenizer, train
from tests.integration.conftest import Ran, require_three_verdicts

transformers = pytest.importorskip("transformers", reason="needs transformers: uv sync --extra hf")

NOUNS = ("films", "phones", "hotels", "songs", "books", "chairs")
QUALITIES = ("fine", "dull", "loud", "cheap")
LABELS = ("entailment", "neutral", "contradiction")
FOLLOWS = {
    ("all", "all"): 0, ("all", "some"): 0, ("all", "no"): 2,
    ("some", "all"): 1, ("some", "some"): 0, ("some", "no"): 2,
    ("no", "all"): 2, ("no", "some"): 2, ("no", "no"): 0,
}  # fmt: skip
"""The label of a premise and a hypothesis that differ in their quantifiers alone."""
Inside = Callable[..., Ran]


def make_pair(draw: random.Random, nouns: Sequence[str] = NOUNS) -> dict[str, str]:
    """Two sentences of the same things, and whether the second follows from the first; wrong in one of thirty."""
    label = draw.choice(LABELS)
    first, second = draw.choice([pair for pair, name in FOLLOWS.items() if LABELS[name] == label])
    things = f"{draw.choice(nouns)} were {draw.choice(QUALITIES)}"
    return {
        "premise": f"{first} {things}",
        "hypothesis": f"{second} {things}",
        "label": label if draw.random() > 1 / 30 else draw.choice(LABELS),
    }


def write_lines(path: Path, count: int, seed: int, nouns: Sequence[str]) -> Path:
    draw = random.Random(seed)
    path.write_text("".join(json.dumps(make_pair(draw, nouns)) + "\n" for _ in range(count)))
    return path


def train_entailment(folder: Path) -> None:
    import torch

    words = ("all", "some", "no", "were", *NOUNS, *QUALITIES)
    tokenizer, draw = make_tokenizer(words, ends=True, types=True), random.Random(1)

    def compute_loss(model: Any) -> Any:
        pairs = [make_pair(draw) for _ in range(32)]
        batch = tokenizer(
            [pair["premise"] for pair in pairs],
            [pair["hypothesis"] for pair in pairs],
            padding=True,
            return_tensors="pt",
        )
        truths = torch.tensor([LABELS.index(pair["label"]) for pair in pairs])
        return model(**batch, labels=truths).loss

    labels = dict(enumerate(LABELS))
    make = transformers.BertForSequenceClassification
    train(folder, tokenizer, make, compute_loss, 160, num_labels=3, id2label=labels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shared: Callable[..., Path]) -> Path:
    place = tmp_path_factory.mktemp("pairs")
    shutil.copytree(shared("entailment", train_entailment), place / "entailment")
    write_lines(place / "train.jsonl", 200, seed=2, nouns=NOUNS[:2])
    write_lines(place / "validation.jsonl", 400, seed=3, nouns=NOUNS[2:])  # no text is in both
    return place


def test_from_pairs_to_int8_and_a_verdict(inside: Inside, folder: Path) -> None:
    model = f"hf:{folder / 'entailment'}"
    calibration = ("--calibration", folder / "train.jsonl")
    build = ("build", model, "--precision", "fp32,int8", "--backend", "onnxruntime", *calibration)
    inside(*build, cwd=folder).expect(0)

    validation = ("--data", folder / "validation.jsonl")
    limits = ("--accuracy-budget", "10%")
    inside("evaluate", model, *validation, *limits, cwd=folder).expect(0)
    record = read_record(
        next((folder / ".optpipe" / "runs").glob("evaluate-*")) / "evaluate.json", Evaluation
    )
    assert record.dataset.labeled
    assert [row.precision for row in record.results] == ["source", "fp32", "int8"]
    assert all(row.accuracy.top1 > 0.75 for row in record.results)

    require_three_verdicts(inside, model, folder, record)


def test_tokens_and_types_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    model = Model(HuggingFaceSource(str(folder / "entailment")), WeightsRequest())
    entry, _ = export_model(model, Store(tmp_path / "work"), SilentListener())
    card = model.load().card
    assert [each.name for each in card.inputs] == ["input_ids", "attention_mask", "token_type_ids"]

    data = folder / "validation.jsonl"
    samples, _ = load_sample_set(entry, card, data, None, 0, SilentListener())
    (rows,) = iterate_rows(entry, card, samples, 400)
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    expected = transformers.AutoTokenizer.from_pretrained(folder / "entailment")(
        [line["premise"] for line in lines],
        [line["hypothesis"] for line in lines],
        padding=True,
        return_tensors="np",
    )
    assert expected.keys() == rows.keys()
    for name, values in expected.items():
        assert np.array_equal(rows[name], values)
