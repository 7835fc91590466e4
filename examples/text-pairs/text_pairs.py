"""Trains a tiny classifier of sentence pairs on entailments that are made by rule, and writes its data, in about half a minute.

usage: python examples/text-pairs/text_pairs.py FOLDER

FOLDER receives `entailment` (a model of transformers with its tokenizer), `train.jsonl`, and `validation.jsonl`, whose sentences
speak of other things than those of `train.jsonl`. Two sentences differ in their quantifier: "some films were dull" follows from
"all films were dull". One label in thirty is wrong, so that no build is perfect.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NOUNS = ("films", "phones", "hotels", "songs", "books", "chairs")
QUALITIES = ("fine", "dull", "loud", "cheap")
LABELS = ("entailment", "neutral", "contradiction")
FOLLOWS = {
    ("all", "all"): 0, ("all", "some"): 0, ("all", "no"): 2,
    ("some", "all"): 1, ("some", "some"): 0, ("some", "no"): 2,
    ("no", "all"): 2, ("no", "some"): 2, ("no", "no"): 0,
}  # fmt: skip
"""The label of a premise and a hypothesis that differ in their quantifiers alone."""
STEPS, PAIRS = 160, 32


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


def write_lines(path: Path, count: int, seed: int, nouns: Sequence[str]) -> None:
    draw = random.Random(seed)
    path.write_text("".join(json.dumps(make_pair(draw, nouns)) + "\n" for _ in range(count)))


def make_tokenizer() -> Any:
    """Whole words, with [CLS] and [SEP] around a pair, and token types that tell the sentences apart, as BERT has them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "all", "some", "no", "were", *NOUNS, *QUALITIES)
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(mark, vocabulary[mark]) for mark in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def train_entailment(folder: Path) -> None:
    """Trains a BERT of one layer on fresh pairs, and saves it with its tokenizer."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    torch.set_num_threads(1)  # more only wait for each other in a network of this size
    tokenizer, draw = make_tokenizer(), random.Random(1)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            num_labels=len(LABELS),
            id2label=dict(enumerate(LABELS)),
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for _ in range(STEPS):
        pairs = [make_pair(draw) for _ in range(PAIRS)]
        batch = tokenizer(
            [pair["premise"] for pair in pairs],
            [pair["hypothesis"] for pair in pairs],
            padding=True,
            return_tensors="pt",
        )
        truths = torch.tensor([LABELS.index(pair["label"]) for pair in pairs])
        loss = model(**batch, labels=truths).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_data(folder: Path) -> None:
    """No sentence is in both files: their nouns differ."""
    write_lines(folder / "train.jsonl", 200, seed=2, nouns=NOUNS[:2])
    write_lines(folder / "validation.jsonl", 400, seed=3, nouns=NOUNS[2:])


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    train_entailment(folder / "entailment")
    write_data(folder)
    print(f"wrote {folder}/entailment, train.jsonl, and validation.jsonl")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit((__doc__ or "").split("\n\n")[1])
    main(Path(sys.argv[1]))
