"""Tags and answers in made-up texts: tiny models trained here, from words or questions to INT8 and the verdict."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from optpipe.core.entries import WeightsRequest
from optpipe.models.sources.libraries import HuggingFaceSource
from tests.fakes.text_models import make_tokenizer, train
from tests.integration.conftest import Ran, build_and_evaluate, optpipe, require_three_verdicts

transformers = pytest.importorskip("transformers", reason="needs transformers: uv sync --extra hf")

PEOPLE, FIRMS, LAST = ("ada", "grace", "alan", "emmy"), ("acme", "globex", "initech"), ("smith", "jones", "works")
OTHERS = ("met", "left", "the", "at", "a", "talk", "and", "paid")
LABELS = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG")
SWAPPED = dict(zip(LABELS, ("O", "B-ORG", "I-ORG", "B-PER", "I-PER"), strict=True))


def make_line(draw: random.Random) -> dict[str, list[str]]:
    """Ordinary words with one to three names among them; `smith`, `jones` and `works` belong to whatever stands before them."""
    words, tags = [draw.choice(OTHERS)], ["O"]
    for _ in range(draw.randint(1, 3)):
        names, kind = draw.choice(((PEOPLE, "PER"), (FIRMS, "ORG")))
        words.append(draw.choice(names))
        tags.append(f"B-{kind}")
        if draw.random() < 0.5:
            words.append(draw.choice(LAST))
            tags.append(f"I-{kind}")
        words.append(draw.choice(OTHERS))
        tags.append("O")
    return {"tokens": words, "tags": tags}


def write_lines(path: Path, count: int, seed: int, swapped: int = 0) -> Path:
    """PER and ORG of the first `swapped` lines are swapped: as a model with two labels swapped looks, or one that is not perfect."""
    draw = random.Random(seed)
    lines = [make_line(draw) for _ in range(count)]
    for line in lines[:swapped]:
        line["tags"] = [SWAPPED[tag] for tag in line["tags"]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def train_tagger(folder: Path) -> None:
    tokenizer = make_tokenizer([*PEOPLE, *FIRMS, *LAST, *OTHERS], ends=False)
    draw, labels = random.Random(1), dict(enumerate(LABELS))

    def compute_loss(model: Any) -> Any:
        import torch

        lines = [make_line(draw) for _ in range(64)]
        ids, truths = torch.zeros(64, 16, dtype=torch.long), torch.full((64, 16), -100)
        for row, line in enumerate(lines):
            ids[row, : len(line["tokens"])] = torch.tensor(tokenizer.convert_tokens_to_ids(line["tokens"]))
            truths[row, : len(line["tags"])] = torch.tensor([LABELS.index(tag) for tag in line["tags"]])
        return model(ids, attention_mask=(ids > 0).long(), labels=truths).loss

    train(
        folder, tokenizer, transformers.BertForTokenClassification, compute_loss, 500,
        attention_probs_dropout_prob=0.0, id2label=labels, label2id={label: index for index, label in labels.items()},
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tagger")
    train_tagger(place / "tagger")
    write_lines(place / "train.jsonl", 300, seed=2)
    write_lines(place / "validation.jsonl", 200, seed=3, swapped=8)
    return place


def test_from_tags_to_int8_and_its_entities(folder: Path) -> None:
    model = f"hf:{folder / 'tagger'}"
    judged, found = build_and_evaluate(model, folder, folder / "train.jsonl", folder / "validation.jsonl")
    assert "the first token of a word decides" in judged.stdout
    assert "F1 drop, points" in judged.stdout
    assert found.task == "token-classification"
    for row in found.results:
        assert row.scores is not None
        assert row.scores.scores[0].value > 0.9
        assert [each.label for each in row.scores.classes] == ["ORG", "PER"]


def test_swapped_tags_fail_the_budget(folder: Path) -> None:
    loaded = HuggingFaceSource(str(folder / "tagger")).load(WeightsRequest("default"))
    assert loaded.card.labels == LABELS
    write_lines(folder / "swapped.jsonl", 200, seed=3, swapped=200)
    ran = optpipe(
        "evaluate", f"hf:{folder / 'tagger'}", "--data", folder / "swapped.jsonl", "--json", cwd=folder
    ).expect(0)
    assert json.loads(ran.stdout)["results"][0]["scores"]["scores"][0]["value"] < 0.05


KINDS = {
    "who": ("ada", "grace", "alan", "emmy"),
    "where": ("paris", "oslo", "quito", "lima"),
    "what": ("acme", "globex", "initech", "hooli"),
}
SECOND = {"who": "smith", "where": "north", "what": "works"}
FILLERS = ("met", "left", "at", "talk", "and", "paid", "saw", "then")


def make_question(draw: random.Random, most: int = 12) -> tuple[str, str, str]:
    """A question of one word, a context with at most one name of each kind, and the answer, empty for a kind that is not there."""
    words = [draw.choice(FILLERS) for _ in range(draw.randint(4, most))]
    said = {}
    for kind in draw.sample(list(KINDS), 2):
        said[kind] = draw.choice(KINDS[kind]) + (f" {SECOND[kind]}" if draw.random() < 0.5 else "")
        words.insert(draw.randint(0, len(words)), said[kind])
    asked = draw.choice([*KINDS, *said])
    return asked, " ".join(words), said.get(asked, "")


def write_questions(path: Path, count: int, seed: int, most: int = 12, wrong: float = 0.0) -> Path:
    """As SQuAD 2.0 has them, in JSON lines; a share of the answers is `wrong`, so that no model has them all."""
    draw, lines = random.Random(seed), []
    for _ in range(count):
        question, context, answer = make_question(draw, most)
        if answer and draw.random() < wrong:
            answer = draw.choice(context.split())
        answers = {"text": [answer] if answer else []}
        lines.append(json.dumps({"question": question, "context": context, "answers": answers}))
    path.write_text("\n".join(lines))
    return path


def train_reader(answers: Path) -> None:
    import torch

    names = [name for kind in KINDS.values() for name in kind]
    tokenizer, draw = make_tokenizer([*KINDS, *names, *SECOND.values(), *FILLERS], ends=True), random.Random(1)

    def compute_loss(model: Any) -> Any:
        rows = [make_question(draw, 20) for _ in range(64)]
        batch = tokenizer(
            [row[0] for row in rows], [row[1] for row in rows], padding=True, return_tensors="pt",
            return_token_type_ids=True,
        )  # fmt: skip
        begin = [3 + context[: context.index(answer)].count(" ") if answer else 0 for _, context, answer in rows]
        end = [place + row[2].count(" ") for place, row in zip(begin, rows, strict=True)]
        return model(**batch, start_positions=torch.tensor(begin), end_positions=torch.tensor(end)).loss

    train(
        answers,
        tokenizer,
        transformers.BertForQuestionAnswering,
        compute_loss,
        600,
        attention_probs_dropout_prob=0.0,
    )


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("answers")
    train_reader(place / "reader")
    write_questions(place / "train.jsonl", 200, seed=2)
    write_questions(place / "validation.jsonl", 200, seed=3, most=40, wrong=0.1)
    return place


def test_from_questions_to_int8_and_three_verdicts(answers: Path, inside: Callable[..., Ran]) -> None:
    model = f"hf:{answers / 'reader'}"
    judged, found = build_and_evaluate(model, answers, answers / "train.jsonl", answers / "validation.jsonl")
    assert "are read in overlapping windows" in judged.stderr
    assert found.task == "question-answering"
    for row in found.results:
        assert row.scores is not None
        assert [each.name for each in row.scores.scores] == ["F1", "exact match"]
        assert row.scores.scores[0].value > 0.7
        assert [each.label for each in row.scores.classes] == ["with an answer", "without an answer"]
    run = next((answers / ".optpipe" / "runs").glob("evaluate-*"))
    assert pl.read_parquet(run / "predictions.parquet").height > 200
    assert (found.dataset.count, found.dataset.kind) == (200, "questions")
    require_three_verdicts(inside, model, answers, found)
    dossier = sorted((answers / ".optpipe" / "dossiers").iterdir())[-1]
    assert "200 questions" in (dossier / "report.md").read_text()
    assert inside("verify", dossier, cwd=answers).status == 5


def test_texts_without_a_question_are_refused(answers: Path) -> None:
    (answers / "texts.jsonl").write_text('{"text": "ada met alan"}\n')
    ran = optpipe("evaluate", f"hf:{answers / 'reader'}", "--data", answers / "texts.jsonl", cwd=answers).expect(2)
    assert 'line 1: reader answers questions, and needs a "question" with its "context"' in ran.stderr
