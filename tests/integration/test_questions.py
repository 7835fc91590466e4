"""Questions about passages: a tiny network trained here, from SQuAD's JSON to INT8, F1 and exact match, and a verdict."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from optpipe.core.records import read_record
from optpipe.evaluate.result import Evaluation
from tests.fakes.dossiers import examine
from tests.fakes.text_models import make_tokenizer, train
from tests.integration.conftest import Ran, require_three_verdicts

transformers = pytest.importorskip("transformers", reason="needs transformers: uv sync --extra hf")

Inside = Callable[..., Ran]
KINDS = {"who": ("ada", "grace", "alan", "emmy"), "where": ("paris", "london", "rome", "bern")}
SECOND = {"who": "smith", "where": "city"}
FILLERS = ("met", "left", "saw", "at", "talk", "and", "paid", "there", "once", "then")


def make_passage(draw: random.Random, most: int) -> tuple[str, dict[str, str]]:
    """Fillers with the answer to one or two of the questions among them; and the answers."""
    words = [draw.choice(FILLERS) for _ in range(draw.randint(4, most))]
    answers = {}
    for kind in draw.sample(list(KINDS), draw.randint(1, 2)):
        answers[kind] = draw.choice(KINDS[kind]) + (
            f" {SECOND[kind]}" if draw.random() < 0.5 else ""
        )
        words.insert(draw.randint(0, len(words)), answers[kind])
    return " ".join(words), answers


def write_squad(path: Path, passages: int, seed: int, most: int = 12, wrong: float = 0.0) -> Path:
    """As SQuAD 2.0 has them, two questions for each passage; a share of the answers is `wrong`, so that no model has them all."""
    draw, paragraphs = random.Random(seed), []
    for _ in range(passages):
        context, answers = make_passage(draw, most)
        asked = []
        for kind in KINDS:
            text = answers.get(kind, "")
            text = draw.choice(context.split()) if text and draw.random() < wrong else text
            right = [{"text": text, "answer_start": context.index(text)}] if text else []
            asked.append(
                {
                    "id": str(len(asked)),
                    "question": kind,
                    "answers": right,
                    "is_impossible": not text,
                }
            )
        paragraphs.append({"context": context, "qas": asked})
    value = {"version": "v2.0", "data": [{"title": "Meetings", "paragraphs": paragraphs}]}
    path.write_text(json.dumps(value))
    return path


def train_reader(folder: Path) -> None:
    import torch

    names = [name for kind in KINDS.values() for name in kind]
    words = [*KINDS, *names, *SECOND.values(), *FILLERS]
    tokenizer, draw = make_tokenizer(words, ends=True, types=True), random.Random(1)

    def compute_loss(model: Any) -> Any:
        rows = [(draw.choice([*KINDS]), *make_passage(draw, 20)) for _ in range(64)]
        batch = tokenizer(
            [question for question, _, _ in rows],
            [context for _, context, _ in rows],
            padding=True,
            return_tensors="pt",
        )
        right = [(context, answers.get(question, "")) for question, context, answers in rows]
        begin = [
            3 + context[: context.index(text)].count(" ") if text else 0 for context, text in right
        ]
        end = [place + text.count(" ") for place, (_, text) in zip(begin, right, strict=True)]
        return model(
            **batch, start_positions=torch.tensor(begin), end_positions=torch.tensor(end)
        ).loss

    make = transformers.BertForQuestionAnswering
    train(folder, tokenizer, make, compute_loss, 400, attention_probs_dropout_prob=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shared: Callable[..., Path]) -> Path:
    place = tmp_path_factory.mktemp("questions")
    shutil.copytree(shared("reader", train_reader), place / "reader")
    write_squad(place / "train.json", 100, seed=2)
    write_squad(place / "validation.json", 150, seed=3, most=40, wrong=0.1)
    return place


def test_from_squad_to_int8_and_three_verdicts(inside: Inside, folder: Path) -> None:
    model = f"hf:{folder / 'reader'}"
    calibration = ("--calibration", "train.json")
    build = ("build", model, "--precision", "fp32,int8", "--backend", "onnxruntime", *calibration)
    inside(*build, cwd=folder).expect(0)
    judged = inside("evaluate", model, "--data", "validation.json", cwd=folder).expect(0)
    assert "windows, which overlap" in judged.stderr

    run = next((folder / ".optpipe" / "runs").glob("evaluate-*"))
    found = read_record(run / "evaluate.json", Evaluation)
    assert (found.task, found.dataset.count, found.dataset.groups) == (
        "question-answering",
        300,
        150,
    )
    assert [row.precision for row in found.results] == ["source", "fp32", "int8"]
    for row in found.results:
        assert row.scores is not None
        assert [score.name for score in row.scores.scores] == ["F1", "EM"]
        assert row.scores.scores[0].value > 0.75
    assert found.results[1].scores.scores[0].drop_ci[1] < 0.2
    table = pl.read_parquet(run / "predictions.parquet")
    assert table.height == 300
    assert table.filter(pl.col("truth").list.len() == 0).height > 20

    require_three_verdicts(inside, model, folder, found)
    for dossier in (folder / ".optpipe" / "dossiers").iterdir():
        checked, _ = examine(dossier)  # from the rows alone
        assert (checked.differs, checked.open) == ([], [])


def test_texts_without_a_question_are_refused_before_anything_runs(
    inside: Inside, folder: Path
) -> None:
    (folder / "texts.jsonl").write_text('{"premise": "ada met alan", "hypothesis": "alan left"}\n')
    model = f"hf:{folder / 'reader'}"
    ran = inside("build", model, "--precision", "int8", "--calibration", "texts.jsonl", cwd=folder)
    assert "answers questions, but its lines have no question" in ran.expect(2).stderr
