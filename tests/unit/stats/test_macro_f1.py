import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.stats.paired import compute_macro_f1, compute_macro_f1_difference


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
