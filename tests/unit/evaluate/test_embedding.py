import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core.card import ModelCard, Task, TensorSpec
from optpipe.core.errors import BadInputError
from optpipe.evaluate.tasks.embedding import ALONE, ROUNDING, Embedding
from optpipe.models.inputs.sample_set import draw_subset
from optpipe.models.inputs.text_set import text_set_from_path

TASK = Embedding()


def make_card(shape=(1, 8)) -> ModelCard:
    return ModelCard(
        "m", "s", Task.EMBEDDING, (), (TensorSpec("embedding", "float32", shape),), head={"pooling": "mean"}
    )


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
    found = TASK.score_predictions(truths, rows, [rows[0]] * len(rows)).scores[0]
    assert found.value == 0.0
    assert found.ci[0] < 0 < found.ci[1]
    assert found.drop > 0.5


def test_the_correlation_is_scipys_and_so_is_that_of_every_replicate() -> None:
    from scipy.stats import spearmanr

    truths, rows = draw()
    gathered = cosine, stated = TASK.gather(truths, rows)
    weights = np.random.default_rng(0).multinomial(40, np.full(40, 1 / 40), size=20).astype(float)
    found = TASK.compute_scores(gathered, np.concatenate([np.ones((1, 40)), weights]))[:, 0]
    assert found[0] == pytest.approx(spearmanr(cosine, stated).statistic)
    for value, counts in zip(found[1:], weights.astype(int), strict=True):
        drawn = np.repeat(np.arange(40), counts)
        assert value == pytest.approx(spearmanr(cosine[drawn], stated[drawn]).statistic)


@given(
    kinds=st.lists(st.integers(0, 12), min_size=4, max_size=30).filter(lambda kinds: len(set(kinds)) > 1),
    seed=st.integers(0, 99),
)
def test_cosines_that_rounding_tells_apart_are_tied(kinds, seed) -> None:
    """Pairs of one kind are the same two texts, whose embeddings FP32 rounds in another way each time."""
    rng = np.random.default_rng(seed)
    angles = np.repeat(np.array(kinds) / 10, 2) * np.tile([0, 1], len(kinds))
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    truths = [[float(number), float(value)] for number, value in enumerate(rng.normal(size=len(kinds))) for _ in "ab"]
    rounded = rows * (1 + rng.uniform(-1, 1, rows.shape) * np.finfo(np.float32).eps)
    exact, noisy = (TASK.score_predictions(truths, rows.tolist(), each.tolist()).scores[0] for each in (rows, rounded))
    assert (noisy.drop, noisy.drop_ci, noisy.ci) == (0, exact.drop_ci, exact.ci)


def test_a_chain_of_near_cosines_keeps_its_order() -> None:
    angles = np.sqrt(2 * 0.4 * ROUNDING * np.arange(1, 101))
    rows = np.stack([np.ones(200), np.repeat(np.tan(angles), 2) * np.tile([0, 1], 100)], axis=1)
    truths = [[float(number), -float(number)] for number in range(100) for _ in "ab"]
    assert TASK.score_predictions(truths, rows.tolist(), rows.tolist()).scores[0].value > 0.99


def test_without_pairs_neighbors_are_compared_with_the_source() -> None:
    _, rows = draw()
    cost = TASK.measure_drop(TASK.take_as_truths(rows), rows, rows)
    assert cost is not None
    assert cost.value == 0
    assert TASK.measure_drop(TASK.take_as_truths(rows[:3]), rows[:3], rows[:3]) is None


def write_lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return text_set_from_path(path)[0]


def test_pairs_are_read_from_lines(tmp_path) -> None:
    values = [{"text": f"text {n}", "pair": n // 2, "score": n // 2} for n in range(8)] + [{"text": "alone"}]
    truths = TASK.read_truths(write_lines(tmp_path / "a.jsonl", values), make_card(), None)
    assert truths == [[float(n // 2), float(n // 2)] for n in range(8)] + [ALONE]
    assert TASK.read_truths(write_lines(tmp_path / "b.jsonl", [{"text": "x"}]), make_card(), None) is None
    assert TASK.read_truths(write_lines(tmp_path / "c.jsonl", values[:4]), make_card(), None) is None


def test_the_texts_of_a_pair_are_drawn_together(tmp_path) -> None:
    values = [{"text": f"text {n}", "pair": n % 40, "score": n % 40} for n in range(80)]
    whole = write_lines(tmp_path / "a.jsonl", values)
    for drawn in (text_set_from_path(tmp_path / "a.jsonl", 21)[0], draw_subset(whole, 21)):
        truths = TASK.read_truths(drawn, make_card(), None)
        assert truths is not None
        assert (len(truths), TASK.count_units(truths), TASK.describe_left_out(truths)) == (22, 11, "")
        assert [int(each.path) for each in drawn.files] == sorted(int(each.path) for each in drawn.files)
    assert TASK.describe_left_out([*truths, ALONE]) == "1 of 23 texts belong to no pair; only their agreement is judged"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([{"pair": 1, "score": 1}] * 3, "pair '1' has 3 texts; a pair has two"),
        ([{"pair": n // 2, "score": n} for n in range(6)], "pair '0' has two scores, 0 and 1"),
        ([{"pair": n // 2, "score": "high"} for n in range(6)], r"pair '0' has no number as its score \('high'\)"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(tmp_path, values, message) -> None:
    samples = write_lines(tmp_path / "a.jsonl", [{"text": f"text {n}", **each} for n, each in enumerate(values)])
    with pytest.raises(BadInputError, match=message):
        TASK.read_truths(samples, make_card(), None)


def test_outputs_that_are_no_embeddings_are_refused() -> None:
    with pytest.raises(BadInputError, match="has shape 1×16×8; pool it over tokens"):
        TASK.require_model(make_card((1, 16, 8)))
    assert TASK.describe_scoring(make_card()) == "mean pooling over tokens inside the engine"
