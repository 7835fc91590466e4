"""Shares and macro F1 of two classifiers on the same samples."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from optpipe.stats.paired import (
    compute_difference_interval,
    compute_difference_p_value,
    compute_macro_f1,
    compute_macro_f1_difference,
    compute_mcnemar_p_value,
    compute_share_interval,
    compute_share_p_value,
)

counts = st.integers(0, 60)


@given(counts, counts, st.integers(0, 2000), st.floats(0.5, 0.999))
def test_the_interval_holds_the_estimate_and_mirrors(lost, won, same, confidence) -> None:
    n = lost + won + same + 1
    found = compute_difference_interval(lost, won, n, confidence)
    assert -1 <= found.low <= (lost - won) / n + 1e-9
    assert (lost - won) / n - 1e-9 <= found.high <= 1
    other = compute_difference_interval(won, lost, n, confidence)
    assert found.low == pytest.approx(-other.high, abs=1e-9)


@given(counts, counts, st.integers(1, 2000))
def test_more_confidence_is_a_wider_interval(lost, won, same) -> None:
    narrow, wide = (compute_difference_interval(lost, won, lost + won + same, level) for level in (0.8, 0.99))
    assert wide.low <= narrow.low + 1e-9
    assert narrow.high <= wide.high + 1e-9


def test_classifiers_that_never_differ_are_not_proven_equal() -> None:
    z2 = 1.959964**2
    found = compute_difference_interval(0, 0, 800)
    assert found.high == pytest.approx(z2 / (800 + z2), rel=1e-4)  # closed form of the score interval without pairs
    assert found.low == pytest.approx(-found.high)


@pytest.mark.parametrize(("p_lost", "p_won"), [(0.01, 0.01), (0.03, 0.01), (0.004, 0.0)])
def test_coverage(p_lost, p_won) -> None:
    rng = np.random.default_rng(0)
    draws = rng.multinomial(800, [p_lost, p_won, 1 - p_lost - p_won], size=1500)
    held = 0
    for lost, won, _ in draws:
        found = compute_difference_interval(int(lost), int(won), 800)
        held += found.low <= p_lost - p_won <= found.high
    assert held / 1500 > 0.935


def test_share_interval_against_published_values() -> None:
    found = compute_share_interval(81, 263)  # Newcombe 1998, table I, method 5: 0.2527 to 0.3676
    assert (round(found.low, 4), round(found.high, 4)) == (0.2527, 0.3676)
    assert compute_share_interval(0, 20).low == 0
    assert compute_share_interval(20, 20).high == 1
    assert compute_share_interval(0, 40).high == pytest.approx(1 - 0.025 ** (1 / 40))  # by hand


@given(st.integers(1, 60), st.floats(0.001, 0.999), st.floats(0.5, 0.999))
def test_neither_end_of_a_share_errs_more_often_than_it_says(n, share, confidence) -> None:
    from scipy.stats import binom

    chances = binom.pmf(np.arange(n + 1), n, share)
    found = [compute_share_interval(hits, n, confidence) for hits in range(n + 1)]
    for missed in ([each.low > share for each in found], [each.high < share for each in found]):
        assert chances[missed].sum() <= (1 - confidence) / 2 + 1e-9


@given(st.integers(1, 500), st.floats(0, 1), st.floats(0.01, 0.99))
def test_a_share_is_below_a_limit_where_its_p_value_says_so(n, where, limit) -> None:
    hits = int(where * n)
    p_value = compute_share_p_value(hits, n, limit)
    assert (compute_share_interval(hits, n).high < limit) == (p_value < 0.025) or p_value == pytest.approx(0.025)


@given(counts, counts, st.integers(1, 2000), st.floats(-0.5, 0.5))
@example(lost=0, won=0, same=1, limit=-1.9e-221)
def test_a_difference_is_above_a_limit_where_its_p_value_says_so(lost, won, same, limit) -> None:
    n = lost + won + same
    p_value = compute_difference_p_value(lost, won, n, limit)
    low = compute_difference_interval(lost, won, n).low
    assert (low > limit) == (p_value < 0.025) or low == pytest.approx(limit, abs=1e-6)


def test_no_samples_have_no_share() -> None:
    with pytest.raises(ValueError, match="no samples"):
        compute_share_interval(0, 0)


def test_mcnemar_is_the_sign_test() -> None:
    assert compute_mcnemar_p_value(0, 0) == 1
    assert compute_mcnemar_p_value(5, 5) == 1
    assert compute_mcnemar_p_value(6, 0) == pytest.approx(2 / 2**6)
    assert compute_mcnemar_p_value(10, 2) == compute_mcnemar_p_value(2, 10) == pytest.approx(0.0385742, rel=1e-4)


def test_macro_f1_against_scikit_learn() -> None:
    from sklearn.metrics import f1_score

    rng = np.random.default_rng(0)
    labels, found = rng.integers(0, 4, 200), rng.integers(0, 5, 200)
    expected = f1_score(labels, found, average="macro", zero_division=0)
    assert compute_macro_f1(labels, found, 7) == pytest.approx(expected)


def test_two_that_never_differ_are_not_proven_equal() -> None:
    labels = np.arange(60) % 3
    found = compute_macro_f1_difference(labels, labels, labels, 3)
    assert found.low == pytest.approx(-found.high)
    assert found.high > 0.02
    worse = np.where(np.arange(60) < 20, 0, labels)
    assert compute_macro_f1_difference(labels, labels, worse, 3).low > 0


def drawn(generator, n, classes, loses):
    """Labels, a classifier that is right in about 95 of 100, and one that loses `loses` of what the first has right."""
    labels = generator.integers(0, classes, n)
    first = np.where(generator.random(n) < 0.95, labels, generator.integers(0, classes, n))
    lost = (first == labels) & (generator.random(n) < loses)
    return labels, first, np.where(lost, generator.integers(0, classes, n), first)


@pytest.mark.parametrize(("n", "classes", "loses"), [(100, 10, 0.004), (800, 10, 0.012), (800, 100, 0.034)])
def test_the_interval_covers(n, classes, loses) -> None:
    generator = np.random.default_rng(0)
    labels, first, second = drawn(generator, 1_000_000, classes, loses)
    truth = compute_macro_f1(labels, first, classes) - compute_macro_f1(labels, second, classes)
    draws = (drawn(generator, n, classes, loses) for _ in range(500))
    found = [compute_macro_f1_difference(labels, first, second, classes) for labels, first, second in draws]
    assert np.mean([each.low <= truth <= each.high for each in found]) >= 0.92


@given(st.integers(1, 200), st.integers(1, 8), st.integers(0, 2**32))
def test_the_interval_holds_the_difference_and_is_never_empty(n, classes, seed) -> None:
    generator = np.random.default_rng(seed)
    labels, first, second = (generator.integers(0, classes, n) for _ in range(3))
    found = compute_macro_f1_difference(labels, first, second, classes)
    value = compute_macro_f1(labels, first, classes) - compute_macro_f1(labels, second, classes)
    assert -1 <= found.low <= value <= found.high <= 1
    assert found.low < found.high
