"""Who, where and what in made-up contexts: a tiny model trained here, from SQuAD's JSON to INT8 and the verdict."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.fakes.text_models import make_tokenizer, train
from tests.integration.conftest import Ran, build_and_evaluate, optpipe, require_three_verdicts

transformers = pytest.importorskip("transformers", reason="needs transformers: uv sync --extra hf")

KINDS = {
    "who": ("ada", "grace", "alan", "emmy"),
    "where": ("paris", "oslo", "quito", "lima"),
    "what": ("acme", "globex", "initech", "hooli"),
}
SECOND = {"who": "smith", "where": "north", "what": "works"}
OTHERS = ("met", "left", "at", "talk", "and", "paid", "saw", "then")


def make_question(draw: random.Random, most: int = 12) -> tuple[str, str, str]:
    """A question of one word, a context with at most one name of each kind, and the answer, empty for a kind that is not there."""
    words = [draw.choice(OTHERS) for _ in range(draw.randint(4, most))]
    said = {}
    for kind in draw.sample(list(KINDS), 2):
        said[kind] = draw.choice(KINDS[kind]) + (f" {SECOND[kind]}" if draw.random() < 0.5 else "")
        words.insert(draw.randint(0, len(words)), said[kind])
    asked = draw.choice([*KINDS, *said])
    return asked, " ".join(words), said.get(asked, "")


def write_squad(path: Path, count: int, seed: int, most: int = 12, wrong: float = 0.0) -> Path:
    """As SQuAD 2.0 has it; a share of the answers is `wrong`, so that no model has them all."""
    draw, paragraphs = random.Random(seed), []
    for number in range(count):
        question, context, answer = make_question(draw, most)
        if answer and draw.random() < wrong:
            answer = draw.choice(context.split())
        answers = [{"text": answer, "answer_start": context.index(answer)}] if answer else []
        asked = {"id": str(number), "question": question, "answers": answers, "is_impossible": not answer}
        paragraphs.append({"context": context, "qas": [asked]})
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "names", "paragraphs": paragraphs}]}))
    return path


def train_reader(folder: Path) -> None:
    import torch

    names = [name for kind in KINDS.values() for name in kind]
    tokenizer, draw = make_tokenizer([*KINDS, *names, *SECOND.values(), *OTHERS], ends=True), random.Random(1)

    def compute_loss(model: Any) -> Any:
        rows = [make_question(draw, 20) for _ in range(64)]
        batch = tokenizer(
            [row[0] for row in rows], [row[1] for row in rows], padding=True, return_tensors="pt",
            return_token_type_ids=True,
        )  # fmt: skip
        begin = [3 + context[: context.index(answer)].count(" ") if answer else 0 for _, context, answer in rows]
        end = [place + row[2].count(" ") for place, row in zip(begin, rows, strict=True)]
        return model(**batch, start_positions=torch.tensor(begin), end_positions=torch.tensor(end)).loss

    train(folder, tokenizer, transformers.BertForQuestionAnswering, compute_loss, 600, attention_probs_dropout_prob=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("answers")
    train_reader(place / "reader")
    write_squad(place / "train.json", 200, seed=2)
    write_squad(place / "validation.json", 200, seed=3, most=40, wrong=0.1)
    return place


def test_from_squad_to_int8_and_three_verdicts(folder: Path, inside: Callable[..., Ran]) -> None:
    model = f"hf:{folder / 'reader'}"
    judged, found = build_and_evaluate(model, folder, folder / "train.json", folder / "validation.json")
    assert "are read in overlapping windows" in judged.stderr
    assert found.task == "question-answering"
    for row in found.results:
        assert row.scores is not None
        assert [each.name for each in row.scores.scores] == ["F1", "exact match"]
        assert row.scores.scores[0].value > 0.7
        assert [each.label for each in row.scores.classes] == ["with an answer", "without an answer"]
    run = next((folder / ".optpipe" / "runs").glob("evaluate-*"))
    assert pl.read_parquet(run / "predictions.parquet").height > 200
    assert (found.dataset.count, found.dataset.kind) == (200, "questions")
    require_three_verdicts(inside, model, folder, found)
    dossier = sorted((folder / ".optpipe" / "dossiers").iterdir())[-1]
    assert "200 questions" in (dossier / "report.md").read_text()
    assert inside("verify", dossier, cwd=folder).status == 5


def test_texts_without_a_question_are_refused(folder: Path) -> None:
    (folder / "texts.jsonl").write_text('{"text": "ada met alan"}\n')
    ran = optpipe("evaluate", f"hf:{folder / 'reader'}", "--data", folder / "texts.jsonl", cwd=folder)
    assert ran.status == 2
    assert 'line 1: reader answers questions, and needs a "question" with its "context"' in ran.stderr
