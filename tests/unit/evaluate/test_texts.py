"""Entities of tags against seqeval 1.2.2 (conlleval's reading), and embeddings against scipy."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core.card import InputSpec, ModelCard, Task, TensorSpec
from optpipe.core.errors import BadInputError
from optpipe.evaluate.tasks.texts import (
    ALONE,
    ROUNDING,
    Embedding,
    TokenClassification,
    find_entities,
)
from optpipe.models.inputs.sample_set import draw_subset
from optpipe.models.inputs.text_set import text_set_from_path
from optpipe.models.inputs.tokens import find_first_tokens, tokenize

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
    assert scores == pytest.approx(
        (0.6968152866242039, 0.6959287531806616, 0.6977040816326531), abs=1e-12
    )
    assert TASK.name_classes(true, ()) == ["ORG", "PER"]
    by_class = TASK.compute_class_scores(gathered, np.ones((1, 200)))[0]
    assert by_class == pytest.approx((0.70876289, 0.68513854), abs=1e-8)
    assert sum(len(find_entities(each)) for each in true) == 784
    assert sum(len(find_entities(each)) for each in found) == 786


@pytest.mark.parametrize(("tags", "entities"), [
    (["I-PER", "I-PER", "O"], {("PER", 0, 1)}),
    (["B-PER", "B-PER"], {("PER", 0, 0), ("PER", 1, 1)}),
    (["B-PER", "I-ORG", "I-ORG"], {("PER", 0, 0), ("ORG", 1, 2)}),
    (["S-PER", "S-PER", "O", "B-LOC", "E-LOC", "S-LOC"], {("PER", 0, 0), ("PER", 1, 1), ("LOC", 3, 4), ("LOC", 5, 5)}),
    (["U-PER", "U-PER", "B-LOC", "I-LOC", "L-LOC", "I-LOC"], {("PER", 0, 0), ("PER", 1, 1), ("LOC", 2, 4), ("LOC", 5, 5)}),
    (["DATE", "DATE", "O", "DATE"], {("DATE", 0, 1), ("DATE", 3, 3)}),
    (["O", "B-E-MAIL", "I-E-MAIL"], {("E-MAIL", 1, 2)}),
    ([], set()),
])  # fmt: skip
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
    with pytest.raises(
        BadInputError, match="line 1: tag 'B-LOC' is not a label of tagger: O, B-PER"
    ):
        TASK.read_truths(text_set_from_path(file)[0], CARD, 5)
    file.write_text(json.dumps(good | {"tags": ["O"]}))
    with pytest.raises(BadInputError, match='needs "tokens" and as many "tags"'):
        TASK.read_truths(text_set_from_path(file)[0], CARD, 5)
    file.write_text(json.dumps({"text": "Ada wrote"}))
    assert TASK.read_truths(text_set_from_path(file)[0], CARD, 5) is None


def make_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    pieces = ["[UNK]", "[CLS]", "[SEP]", "Ada", "Love", "##lace", "wrote", "."]
    tokenizer = Tokenizer(
        models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
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
    whole, cut = (
        list(map(find_first_tokens, texts, tokenize(texts, tokenizer, longest)))
        for longest in (16, 4)
    )
    assert whole == [[1, 2, 4], [1, 2, 3]]
    assert cut == [[1, 2, -1], [1, 2, -1]], "[CLS] and [SEP] take two of four"


PAIRS = Embedding()


def make_card(shape=(1, 8)) -> ModelCard:
    embedding = TensorSpec("embedding", "float32", shape)
    return ModelCard("m", "s", Task.EMBEDDING, (), (embedding,), head={"pooling": "mean"})


def draw(pairs: int = 40, noise: float = 0.3, seed: int = 0):
    """Truths, and embeddings whose cosines follow the stated similarity, which has ties."""
    rng = np.random.default_rng(seed)
    truths, rows = [], []
    for number in range(pairs):
        similarity = float(rng.integers(0, 6))
        first, other = rng.normal(size=(2, 8))
        second = first * similarity / 5 + other * (1 - similarity / 5) + noise * rng.normal(size=8)
        truths += [[float(number), similarity]] * 2
        rows += [first.tolist(), second.tolist()]
    return truths, rows


def test_embeddings_that_order_nothing_have_no_correlation() -> None:
    truths, rows = draw()
    found = PAIRS.score_predictions(truths, rows, [rows[0]] * len(rows)).scores[0]
    assert found.value == 0.0
    assert found.ci[0] < 0 < found.ci[1]
    assert found.drop > 0.5


def test_the_correlation_is_scipys_and_so_is_that_of_every_replicate() -> None:
    from scipy.stats import spearmanr

    truths, rows = draw()
    gathered = cosine, stated = PAIRS.gather(truths, rows)
    weights = np.random.default_rng(0).multinomial(40, np.full(40, 1 / 40), size=20).astype(float)
    found = PAIRS.compute_scores(gathered, np.concatenate([np.ones((1, 40)), weights]))[:, 0]
    assert found[0] == pytest.approx(spearmanr(cosine, stated).statistic)
    for value, counts in zip(found[1:], weights.astype(int), strict=True):
        drawn = np.repeat(np.arange(40), counts)
        assert value == pytest.approx(spearmanr(cosine[drawn], stated[drawn]).statistic)


@given(
    kinds=st.lists(st.integers(0, 12), min_size=4, max_size=30).filter(
        lambda kinds: len(set(kinds)) > 1
    ),
    seed=st.integers(0, 99),
)
def test_cosines_that_rounding_tells_apart_are_tied(kinds, seed) -> None:
    """Pairs of one kind are the same two texts, whose embeddings FP32 rounds in another way each time."""
    rng = np.random.default_rng(seed)
    angles = np.repeat(np.array(kinds) / 10, 2) * np.tile([0, 1], len(kinds))
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    truths = [
        [float(number), float(value)]
        for number, value in enumerate(rng.normal(size=len(kinds)))
        for _ in "ab"
    ]
    rounded = rows * (1 + rng.uniform(-1, 1, rows.shape) * np.finfo(np.float32).eps)
    exact, noisy = (
        PAIRS.score_predictions(truths, rows.tolist(), each.tolist()).scores[0]
        for each in (rows, rounded)
    )
    assert (noisy.drop, noisy.drop_ci, noisy.ci) == (0, exact.drop_ci, exact.ci)


def test_a_chain_of_near_cosines_keeps_its_order() -> None:
    angles = np.sqrt(2 * 0.4 * ROUNDING * np.arange(1, 101))
    rows = np.stack([np.ones(200), np.repeat(np.tan(angles), 2) * np.tile([0, 1], 100)], axis=1)
    truths = [[float(number), -float(number)] for number in range(100) for _ in "ab"]
    assert PAIRS.score_predictions(truths, rows.tolist(), rows.tolist()).scores[0].value > 0.99


def test_without_pairs_neighbors_are_compared_with_the_source() -> None:
    _, rows = draw()
    cost = PAIRS.measure_drop(PAIRS.take_as_truths(rows), rows, rows)
    assert cost is not None
    assert cost.value == 0
    assert PAIRS.measure_drop(PAIRS.take_as_truths(rows[:3]), rows[:3], rows[:3]) is None


def write_lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return text_set_from_path(path)[0]


def test_pairs_are_read_from_lines(tmp_path) -> None:
    values = [{"text": f"text {n}", "pair": n // 2, "score": n // 2} for n in range(8)] + [
        {"text": "alone"}
    ]
    truths = PAIRS.read_truths(write_lines(tmp_path / "a.jsonl", values), make_card(), None)
    assert truths == [[float(n // 2), float(n // 2)] for n in range(8)] + [ALONE]
    assert (
        PAIRS.read_truths(write_lines(tmp_path / "b.jsonl", [{"text": "x"}]), make_card(), None)
        is None
    )
    assert (
        PAIRS.read_truths(write_lines(tmp_path / "c.jsonl", values[:4]), make_card(), None) is None
    )


def test_the_texts_of_a_pair_are_drawn_together(tmp_path) -> None:
    values = [{"text": f"text {n}", "pair": n % 40, "score": n % 40} for n in range(80)]
    whole = write_lines(tmp_path / "a.jsonl", values)
    for drawn in (text_set_from_path(tmp_path / "a.jsonl", 21)[0], draw_subset(whole, 21)):
        truths = PAIRS.read_truths(drawn, make_card(), None)
        assert truths is not None
        assert (len(truths), PAIRS.count_units(truths), PAIRS.describe_left_out(truths)) == (
            22,
            11,
            "",
        )
        assert [int(each.path) for each in drawn.files] == sorted(
            int(each.path) for each in drawn.files
        )
    said = PAIRS.describe_left_out([*truths, ALONE])
    assert said == "1 of 23 texts belong to no pair; only their agreement is judged"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([{"pair": 1, "score": 1}] * 3, "pair '1' has 3 texts; a pair has two"),
        ([{"pair": n // 2, "score": n} for n in range(6)], "pair '0' has two scores, 0 and 1"),
        (
            [{"pair": n // 2, "score": "high"} for n in range(6)],
            r"pair '0' has no number as its score \('high'\)",
        ),
    ],
)
def test_pairs_that_do_not_fit_are_refused(tmp_path, values, message) -> None:
    samples = write_lines(
        tmp_path / "a.jsonl", [{"text": f"text {n}", **each} for n, each in enumerate(values)]
    )
    with pytest.raises(BadInputError, match=message):
        PAIRS.read_truths(samples, make_card(), None)
