"""Text models from JSON lines: a tiny network trained here, calibrated, built and judged from the command line."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import BadInputError, ExitStatus
from optpipe.core.records import read_record
from optpipe.evaluate.result import Evaluation
from optpipe.models.inputs.task_data import require_task_data
from optpipe.models.sources.libraries import HuggingFaceSource
from optpipe.quantize.ranges import METHODS
from tests.fakes.text_models import make_tokenizer, train
from tests.integration.conftest import Ran, optpipe, require_three_verdicts

transformers = pytest.importorskip("transformers", reason="needs transformers: uv sync --extra hf")

Run = Callable[..., Ran]
GOOD = ("fine", "bright", "clever", "warm", "superb", "moving")
BAD = ("dull", "loud", "broken", "slow", "cheap", "cold")
NOUNS = ("film", "phone", "soup", "book", "hotel", "song", "chair", "script")
LABELS = ("negative", "neutral", "positive")


def sentence(draw: random.Random) -> tuple[str, str]:
    """A made-up review and its label: by the count of good and bad words, wrong in one of thirty."""
    words, score = ["the", draw.choice(NOUNS), "was"], 0
    for _ in range(draw.randint(1, 9)):
        kind = draw.choice((GOOD, BAD, NOUNS))
        words.append(draw.choice(kind))
        score += (kind is GOOD) - (kind is BAD)
    label = LABELS[1 + (score > 0) - (score < 0)]
    return " ".join(words), label if draw.random() > 1 / 30 else draw.choice(LABELS)


def lines(path: Path, count: int, seed: int, *, labeled: bool = True) -> Path:
    draw = random.Random(seed)
    rows = [dict(zip(("text", "label"), sentence(draw), strict=True)) for _ in range(count)]
    rows = rows if labeled else [{"text": row["text"]} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train_reviews(folder: Path) -> None:
    import torch

    tokenizer, draw = (
        make_tokenizer(sorted({"the", "was", *GOOD, *BAD, *NOUNS}), ends=True),
        random.Random(1),
    )

    def compute_loss(model: Any) -> Any:
        pairs = [sentence(draw) for _ in range(32)]
        batch = tokenizer(
            [text for text, _ in pairs],
            padding=True,
            return_tensors="pt",
            return_token_type_ids=False,
        )
        return model(**batch, labels=torch.tensor([LABELS.index(label) for _, label in pairs])).loss

    train(
        folder,
        tokenizer,
        transformers.BertForSequenceClassification,
        compute_loss,
        120,
        num_labels=3,
        id2label=dict(enumerate(LABELS)),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shared: Callable[..., Path]) -> Path:
    place = tmp_path_factory.mktemp("text")
    shutil.copytree(shared("reviews", train_reviews), place / "reviews")
    lines(place / "train.jsonl", 520, seed=2)
    lines(place / "validation.jsonl", 400, seed=3)
    return place


@pytest.fixture
def run(folder: Path) -> Run:
    """Commands share the folder's workspace: the model is exported once."""
    return lambda *arguments: optpipe(*arguments, cwd=folder)


def test_from_texts_to_int8_its_accuracy_and_three_verdicts(
    run: Run, inside: Run, folder: Path
) -> None:
    model, train, validation = (
        f"hf:{folder / 'reviews'}",
        folder / "train.jsonl",
        folder / "validation.jsonl",
    )
    options = ("--data", train, "--sensitivity", "--set", "target=cpu", "--json")
    found = run("calibrate", model, *options).expect(0).document
    assert found["kind"] == "texts"
    assert found["set"]["count"] == 520
    assert found["tables"].keys() == set(METHODS)
    assert found["sensitivity"]
    assert all(row["cost"]["drop_ci"] for row in found["sensitivity"]["layers"])
    table = found["tables"][found["compared"]["best"]]
    built = run(
        "build",
        model,
        "--precision",
        "fp32,int8",
        "--backend",
        "onnxruntime",
        "--calibration",
        table,
        "--json",
    ).expect(0)
    assert {each["precision"] for each in built.document["artifacts"]} == {"fp32", "int8"}
    judged = run("evaluate", model, "--data", str(validation), "--accuracy-budget", "10%").expect(0)
    assert "400 texts of validation.jsonl" in judged.stdout
    assert "macro F1" in judged.stdout
    record = next((folder / ".optpipe" / "runs").glob("evaluate-*"))
    found = read_record(record / "evaluate.json", Evaluation)
    source, *rows = found.results
    assert source.precision == "source"
    assert 0.8 < source.accuracy.top1 < 1
    assert found.dataset.labeled
    assert {row.precision for row in rows} == {"fp32", "int8"}
    for row in rows:
        low, high = row.accuracy.macro_f1_drop_ci
        assert low <= row.accuracy.macro_f1_drop <= high
        assert row.verdict == "PASS"
    answers = pl.read_parquet(record / "predictions.parquet")
    assert answers["path"].to_list()[:2] == ["1", "2"]
    assert answers["label"].n_unique() == 3
    require_three_verdicts(inside, model, folder, found)


def test_long_texts_are_refused_before_anything_runs_or_truncated_on_request(
    run, inside, folder, tmp_path
):
    model, data = f"hf:{folder / 'reviews'}", tmp_path / "long.jsonl"
    assert run("build", model, "--precision", "fp32", "--backend", "onnxruntime").status == 0
    lines(data, 60, seed=4)
    with data.open("a") as file:
        file.write(json.dumps({"text": "the film was fine " * 12, "label": "positive"}) + "\n")
    message = "line 61: 50 tokens exceed the maximum input length of 32"
    empty = ("--workspace", tmp_path / "empty")
    build = ("build", model, "--precision", "int8", "--backend", "onnxruntime", "--device", "cpu")
    for words in (
        (*build, "--calibration", data, *empty),
        ("calibrate", model, "--data", data, "--method", "max", *empty),
        ("evaluate", model, "--data", data),
    ):
        refused = inside(*words, cwd=folder).expect(ExitStatus.BAD_INPUT)
        assert message in refused.stderr
        assert "export" not in refused.stderr
    ran = run("evaluate", model, "--data", data, "--truncate").expect(0)
    assert "61 texts (1 truncated) of long.jsonl" in ran.stdout


def test_a_folder_without_vocabulary_has_no_tokenizer(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / "reviews" / name).read_bytes())
    loaded = HuggingFaceSource(str(tmp_path)).load(WeightsRequest("default"))
    assert loaded.tokenizer is None  # transformers itself makes one of five words up
    with pytest.raises(BadInputError, match="has no tokenizer"):
        require_task_data(loaded.card)


def test_two_lengths_are_measured_apart_with_tokens_per_second(run: Run, folder: Path) -> None:
    model = f"hf:{folder / 'reviews'}"
    assert run("build", model, "--precision", "fp32", "--backend", "onnxruntime").status == 0
    quick = (
        "--batch",
        "2",
        "--processes",
        "1",
        "--min-time",
        "0.1",
        "--set",
        "warm-up=0.1",
        "--percentile",
        "50",
        "--json",
    )
    found = run("bench", "reviews", "--precision", "fp32", "--length", "8,32", *quick)
    assert found.status in {0, ExitStatus.STAGE_FAILED}, found.stderr
    by_length = {each["load"]["length"]: each for each in found.document["measurements"]}
    assert set(by_length) == {8, 32}
    assert len(found.document["groups"]) == 2
    for length, each in by_length.items():
        assert each["inputs"]["padding"] == 0
        assert each["inputs"]["lengths"] == [8, 32]
        assert each["output_check"]["passed"]
        images, tokens = each["throughput_images_per_s"], each["throughput_tokens_per_s"]
        assert tokens["value"] == pytest.approx(length * images["value"])
    padded = run("bench", "reviews", "--precision", "fp32", *quick).document["measurements"][0]
    assert padded["inputs"]["padding"] > 0
    share = 1 - padded["inputs"]["padding"]
    expected = padded["load"]["length"] * share * padded["throughput_images_per_s"]["value"]
    assert padded["throughput_tokens_per_s"]["value"] == pytest.approx(expected)
    compared = run("compare", "reviews", "--json").document
    assert {row["load"]["length"] for row in compared["rows"]} >= {8, 32, padded["load"]["length"]}
    assert "sequence lengths are compared" in compared["best_reason"]["throughput"]


@pytest.mark.skipif(
    shutil.which("nsys") is None, reason="nsys is not installed: sudo .ci/install-nsys"
)
def test_a_profile_is_of_the_length_that_was_asked_for(run: Run, folder: Path) -> None:
    model = f"hf:{folder / 'reviews'}"
    which = (
        model,
        "--precision",
        "fp32",
        "--backend",
        "onnxruntime",
        "--device",
        "cpu",
        "--stage",
        "inference",
    )
    how = ("--iterations", "3", "--set", "warm-up=1", "--json")
    found = run("profile", *which, "--length", "8,32", *how).expect(0)
    subjects = [each["subject"] for each in found.document["stages"]]
    assert [each["length"] for each in subjects] == [8, 32]
    assert [each["name"] for each in subjects] == [
        f"onnxruntime fp32 batch 1 length {length}" for length in (8, 32)
    ]
    short, long = (each["profile"]["roofline"]["macs"] for each in found.document["stages"])
    assert long > 4 * short, "the layers' costs are those of the length that ran"
    refused = run(
        "profile", *which, "--length", "4096", *how, "--workspace", folder / "empty"
    ).expect(2)
    message = "length 4096 is outside the profile 8…32 of reviews\nwiden it with --shape input_ids=1x8:8x32:64x4096"
    assert message in refused.stderr
    assert "export" not in refused.stderr
