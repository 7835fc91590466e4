"""A card's tokenizer: a tokenizer.json, or a Python function that is part of the model's identity."""

import json
import subprocess
import sys

import numpy as np
import pytest

from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.models.export.exported import Model, export_model
from optpipe.models.inputs.task_data import iterate_rows, load_sample_set
from optpipe.models.sources import text_tokenizer
from optpipe.models.sources.resolve import CardSource
from optpipe.workspace.store import Store

NET = """
import torch
from torch import nn
INPUTS = [dict(name="input_ids", dtype="int64", min=[1, 4], opt=[2, 8], max=[8, 16], below=300)]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(300, 4), nn.Linear(4, 2)
    def forward(self, input_ids):
        return self.linear(self.table(input_ids).mean(1))
"""
TOKENIZE = """
from pathlib import Path
OFFSET = int((Path(__file__).parent / "offset.txt").read_text())
def tokenize(text):
    return [OFFSET + byte for byte in text.encode()]
"""
CARD = """name = "net"
task = "text-classification"
source = "net.py:Net"
labels = ["no", "yes"]
pad_id = 7
tokenizer = "{tokenizer}"
"""


def write_card(folder, tokenizer="words.py:tokenize", code=TOKENIZE):
    (folder / "net.py").write_text(NET)
    (folder / "words.py").write_text(code)
    (folder / "offset.txt").write_text("10")
    (folder / "net.toml").write_text(CARD.format(tokenizer=tokenizer))
    lines = [{"text": "yes", "label": "yes"}, {"text": "never", "label": "no"}]
    (folder / "texts.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    return CardSource(folder / "net.toml")


@pytest.mark.slow
def test_texts_are_tokenized_by_the_function(tmp_path):
    source, store = write_card(tmp_path), Store(tmp_path / "work")
    model = Model(source, WeightsRequest())
    entry, _ = export_model(model, store, SilentListener())
    card = model.load().card
    texts, _ = load_sample_set(entry, card, tmp_path / "texts.jsonl", None, 0, SilentListener())
    (rows,) = iterate_rows(entry, card, texts, 2)
    assert rows["input_ids"].tolist() == [
        [10 + byte for byte in b"yes"] + [7, 7],
        [10 + byte for byte in b"never"],
    ]
    assert rows["input_ids"].dtype == np.int64

    stored = entry.file("tokenizer.json").read_text()
    assert str(tmp_path) not in stored, "a workspace can be moved"
    text_tokenizer._FUNCTIONS.clear()
    with pytest.raises(BadInputError, match="name the model by its card"):
        text_tokenizer.encode_by_function(stored, ["yes"])


def test_what_the_function_reads_is_part_of_the_model(tmp_path):
    found = []
    for name, offset in (("a", "10"), ("b", "11"), ("c", "10")):
        folder = tmp_path / name
        folder.mkdir()
        source = write_card(folder)
        (folder / "offset.txt").write_text(offset)
        found.append(source.collect_identity()["tokenizer"])
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize(
    ("tokenizer", "code", "said"),
    [
        ("gone.py:tokenize", TOKENIZE, "no such file"),
        ("words.py:split", TOKENIZE, "defines no function 'split'"),
        ("words.txt", TOKENIZE, "expected the path of a tokenizer.json, or file.py:function"),
        (
            "words.py:tokenize",
            "def tokenize(text): return text.split()",
            "returns a list of integers",
        ),
        ("words.py:tokenize", "def tokenize(text): return None", "returns a list of integers"),
        ("words.py:tokenize", "def tokenize(text): return [-1]", "are not negative"),
        (
            "words.py:tokenize",
            "def tokenize(text): raise KeyError('x')",
            "tokenize raised KeyError",
        ),
        ("words.py:tokenize", "import nowhere_at_all", "cannot be imported"),
    ],
)
def test_what_is_no_tokenizer_is_refused(tmp_path, tokenizer, code, said):
    with pytest.raises(BadInputError, match=said):
        write_card(tmp_path, tokenizer, code).load(WeightsRequest())


READS_THE_PROGRAM = """
import linecache, sys
linecache.getlines(sys.modules["__main__"].__file__)  # as an import of torch does
tokenize = lambda text: [10 + byte for byte in text.encode()]
"""
PROGRAM = """
from pathlib import Path
from optpipe.models.sources.resolve import CardSource
print(CardSource(Path(__file__).parent.parent / "net.toml").collect_identity()["tokenizer"])
"""


@pytest.mark.slow
def test_the_program_that_runs_is_no_part_of_a_model(tmp_path):
    write_card(tmp_path, code=READS_THE_PROGRAM)
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.py").write_text(PROGRAM + f"# {name}\n")
        ran = subprocess.run(
            [sys.executable, tmp_path / name / "run.py"], capture_output=True, text=True, check=True
        )
        found.append(ran.stdout)
    assert found[0] == found[1] != ""


def test_a_tokenizer_of_the_library_is_taken_from_a_card(tmp_path):
    pytest.importorskip("tokenizers")
    from tests.fakes.text_models import make_tokenizer

    backend = make_tokenizer(["yes", "never"], ends=False).backend_tokenizer
    source = write_card(tmp_path, "own.json")
    (tmp_path / "own.json").write_text(backend.to_str())
    loaded = source.load(WeightsRequest())
    assert loaded.card.tokenization.max_length == 16
    assert loaded.tokenizer == backend.to_str()
    (tmp_path / "own.json").write_text("{}")
    with pytest.raises(BadInputError, match="tokenizer"):
        CardSource(tmp_path / "net.toml").load(WeightsRequest())


PAIRED = """
def tokenize(text, text_pair=None):
    first = [10 + byte for byte in text.encode()]
    if text_pair is None:
        return first
    second = [10 + byte for byte in text_pair.encode()]
    return {"input_ids": first + second, "token_type_ids": [0] * len(first) + [1] * len(second)}
"""


def encode_with(folder, code, texts):
    folder.mkdir()
    content = write_card(folder, code=code)._tokenizer
    return text_tokenizer.encode_by_function(content, texts)


def test_a_function_takes_two_texts_and_gives_their_types(tmp_path):
    single, pair = encode_with(tmp_path / "a", PAIRED, ["no", ("no", "a")])
    assert (single.ids, single.types) == ((120, 121), (0, 0))
    assert (pair.ids, pair.types) == ((120, 121, 107), (0, 0, 1))
    assert pair.cut(2).types == (0, 0)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (TOKENIZE, "two, for pairs"),
        (PAIRED.replace("[1] * len(second)", "[]"), "2 token types for 3 tokens"),
        (PAIRED.replace("[1] *", "[-1] *"), "not negative"),
        (PAIRED.replace('"input_ids"', '"ids"'), "input_ids"),
    ],
)
def test_what_a_function_cannot_do_with_two_texts_is_said(tmp_path, code, words):
    with pytest.raises(BadInputError, match=words):
        encode_with(tmp_path / "a", code, [("no", "a")])
