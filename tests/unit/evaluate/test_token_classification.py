"""Entities of tags, held against figures of seqeval 1.2.2 (its default, conlleval's reading), and the words' first tokens."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core.card import InputSpec, ModelCard, Task, TensorSpec
from optpipe.core.errors import BadInputError
from optpipe.evaluate.tasks.token_classification import TokenClassification, find_entities
from optpipe.models.inputs.text_set import find_first_tokens, text_set_from_path, tokenize

TASK = TokenClassification()
TAGS = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG")
CARD = ModelCard(
    "tagger", "hf:tagger", Task.TOKEN_CLASSIFICATION, (InputSpec("input_ids", "int64", (1, 4), (2, 8), (4, 16)),),
    (TensorSpec("logits", "float32", ("batch", "tokens", 5)),), labels=TAGS,
)  # fmt: skip
sentences = st.lists(st.lists(st.sampled_from(TAGS), max_size=9), min_size=1, max_size=9)


def test_scores_are_those_of_seqeval():
    draw = random.Random(5)
    true = [[draw.choice(TAGS) for _ in range(draw.randrange(1, 12))] for _ in range(200)]
    found = [[tag if draw.random() < 0.7 else draw.choice(TAGS) for tag in each] for each in true]
    gathered = TASK.gather(true, found)
    scores = TASK.compute_scores(gathered, np.ones((1, 200)))[0]
    assert scores == pytest.approx((0.6968152866242039, 0.6959287531806616, 0.6977040816326531), abs=1e-12)
    assert TASK.name_classes(true, ()) == ["ORG", "PER"]
    assert TASK.compute_class_scores(true, gathered) == pytest.approx((0.70876289, 0.68513854), abs=1e-8)
    assert sum(len(find_entities(each)) for each in true) == 784
    assert sum(len(find_entities(each)) for each in found) == 786


@pytest.mark.parametrize(
    ("tags", "entities"),
    [
        (["I-PER", "I-PER", "O"], {("PER", 0, 1)}),
        (["B-PER", "B-PER"], {("PER", 0, 0), ("PER", 1, 1)}),
        (["B-PER", "I-ORG", "I-ORG"], {("PER", 0, 0), ("ORG", 1, 2)}),
        (
            ["S-PER", "S-PER", "O", "B-LOC", "E-LOC", "S-LOC"],
            {("PER", 0, 0), ("PER", 1, 1), ("LOC", 3, 4), ("LOC", 5, 5)},
        ),
        (
            ["U-PER", "U-PER", "B-LOC", "I-LOC", "L-LOC", "I-LOC"],
            {("PER", 0, 0), ("PER", 1, 1), ("LOC", 2, 4), ("LOC", 5, 5)},
        ),
        (["DATE", "DATE", "O", "DATE"], {("DATE", 0, 1), ("DATE", 3, 3)}),
        (["O", "B-E-MAIL", "I-E-MAIL"], {("E-MAIL", 1, 2)}),
        ([], set()),
    ],
)
def test_where_entities_begin_and_end(tags, entities):
    assert find_entities(tags) == entities


@given(sentences)
def test_the_truth_scores_one_and_swapped_types_score_less(truths):
    if not any(find_entities(each) for each in truths):
        return
    swap = {"B-PER": "B-ORG", "I-PER": "I-ORG", "B-ORG": "B-PER", "I-ORG": "I-PER", "O": "O"}
    ones = np.ones((1, len(truths)))
    assert TASK.compute_scores(TASK.gather(truths, truths), ones)[0] == pytest.approx((1, 1, 1))
    swapped = [[swap[tag] for tag in each] for each in truths]
    right, found, true = TASK.gather(truths, swapped).sum((0, 1))
    assert (right, found) == (0, true)


@given(sentences, st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_a_weight_counts_a_text_that_often(truths, weights):
    found = [list(reversed(each)) for each in truths]
    times = np.array(weights[: len(truths)], float)
    repeated = [place for place, count in enumerate(times) for _ in range(int(count))]
    if not repeated:
        return
    weighted = TASK.compute_scores(TASK.gather(truths, found), times[None])
    again = TASK.gather([truths[place] for place in repeated], [found[place] for place in repeated])
    plain = TASK.compute_scores(again, np.ones((1, len(repeated))))
    np.testing.assert_allclose(weighted, plain)


def test_tags_are_read_and_those_that_do_not_fit_are_refused(tmp_path):
    file = tmp_path / "lines.jsonl"
    good = {"tokens": ["Ada", "wrote"], "tags": ["B-PER", "O"]}
    file.write_text(json.dumps(good) + "\n" + json.dumps({"tokens": ["a b"], "tags": ["O"]}) + "\n")
    found, bad = text_set_from_path(file)
    assert TASK.read_truths(found, CARD, 5) == [["B-PER", "O"]]
    assert [reason for _, reason in bad] == ['its "tokens" are not a list of words without spaces']
    file.write_text(json.dumps(good | {"tags": ["B-PER", "B-LOC"]}))
    with pytest.raises(BadInputError, match="line 1: tag 'B-LOC' is not a label of tagger: O, B-PER"):
        TASK.read_truths(text_set_from_path(file)[0], CARD, 5)
    file.write_text(json.dumps(good | {"tags": ["O"]}))
    with pytest.raises(BadInputError, match='needs "tokens" and as many "tags"'):
        TASK.read_truths(text_set_from_path(file)[0], CARD, 5)
    file.write_text(json.dumps({"text": "Ada wrote"}))
    assert TASK.read_truths(text_set_from_path(file)[0], CARD, 5) is None


def test_another_output_is_refused():
    pooled = ModelCard(
        "pooled", "hf:pooled", Task.TOKEN_CLASSIFICATION, CARD.inputs, (TensorSpec("logits", "float32", ("batch", 5)),)
    )
    with pytest.raises(
        BadInputError, match=r"\(n, tokens, tags\), but logits has shape batch×5; task = .classification. would fit"
    ):
        TASK.require_model(pooled)


def make_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    pieces = ["[UNK]", "[CLS]", "[SEP]", "Ada", "Love", "##lace", "wrote", "."]
    tokenizer = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_the_first_token_of_each_word(tmp_path):
    pytest.importorskip("tokenizers")
    tokenizer = make_tokenizer(tmp_path)
    texts = ["Ada Lovelace wrote.", "Ada wrote Lovelace"]
    whole, cut = (list(map(find_first_tokens, texts, tokenize(texts, tokenizer, longest))) for longest in (16, 4))
    assert whole == [[1, 2, 4], [1, 2, 3]]
    assert cut == [[1, 2, -1], [1, 2, -1]], "[CLS] and [SEP] take two of four"
