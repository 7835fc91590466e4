"""Tags in made-up texts: a tiny model trained here, from words to INT8 and its entities."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from optpipe.core.entries import WeightsRequest
from optpipe.models.sources.libraries import HuggingFaceSource
from tests.fakes.text_models import make_tokenizer, train
from tests.integration.conftest import build_and_evaluate, optpipe

transformers = pytest.importorskip("transformers", reason="needs transformers: uv sync --extra hf")

PEOPLE, FIRMS, LAST = (
    ("ada", "grace", "alan", "emmy"),
    ("acme", "globex", "initech"),
    ("smith", "jones", "works"),
)
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
            ids[row, : len(line["tokens"])] = torch.tensor(
                tokenizer.convert_tokens_to_ids(line["tokens"])
            )
            truths[row, : len(line["tags"])] = torch.tensor(
                [LABELS.index(tag) for tag in line["tags"]]
            )
        return model(ids, attention_mask=(ids > 0).long(), labels=truths).loss

    train(
        folder,
        tokenizer,
        transformers.BertForTokenClassification,
        compute_loss,
        500,
        attention_probs_dropout_prob=0.0,
        id2label=labels,
        label2id={label: index for index, label in labels.items()},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tagger")
    train_tagger(place / "tagger")
    write_lines(place / "train.jsonl", 300, seed=2)
    write_lines(place / "validation.jsonl", 200, seed=3, swapped=8)
    return place


def test_from_tags_to_int8_and_its_entities(folder: Path) -> None:
    model = f"hf:{folder / 'tagger'}"
    judged, found = build_and_evaluate(
        model, folder, folder / "train.jsonl", folder / "validation.jsonl"
    )
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
        "evaluate", f"hf:{folder / 'tagger'}", "--data", "swapped.jsonl", "--json", cwd=folder
    ).expect(0)
    assert json.loads(ran.stdout)["results"][0]["scores"]["scores"][0]["value"] < 0.05
