"""Two texts in a sample: entailments made by rule, a tiny model trained on them here, from JSON lines to a verdict."""

import json
import runpy
import shutil
from collections.abc import Callable
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
from tests.integration.conftest import Ran, require_three_verdicts

transformers = pytest.importorskip("transformers", reason="needs transformers: uv sync --extra hf")

EXAMPLE = Path(__file__).parents[2] / "examples/text-pairs"
Inside = Callable[..., Ran]


def train_entailment(folder: Path) -> None:
    run_example()["train_entailment"](folder)


def run_example() -> dict[str, Any]:
    """The functions of the script that a user runs."""
    return runpy.run_path(str(EXAMPLE / "text_pairs.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shared: Callable[..., Path]) -> Path:
    place = tmp_path_factory.mktemp("pairs")
    shutil.copytree(shared("entailment", train_entailment), place / "entailment")
    write_data = run_example()["write_data"]
    write_data(place)
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
