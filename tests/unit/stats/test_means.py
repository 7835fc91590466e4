import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from optpipe.stats.means import compute_mean_interval, compute_ratio_of_sums_interval

GENERATOR = np.random.default_rng(3)


def test_the_mean_interval_covers():
    intervals = [compute_mean_interval(GENERATOR.normal(5.0, 1.0, 10)) for _ in range(400)]
    assert 0.92 <= np.mean([low <= 5.0 <= high for low, high in intervals]) <= 0.98
    assert compute_mean_interval(np.ones(2)) is None


@given(st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(0.1, 1e6)), min_size=3, max_size=40))
def test_the_interval_of_a_ratio_of_sums_holds_it_whatever_the_lengths_of_the_windows(pairs):
    times, images = np.array(pairs).T
    low, high = compute_ratio_of_sums_interval(times, images)
    assert low <= times.sum() / images.sum() * (1 + 1e-12)
    assert high >= times.sum() / images.sum() * (1 - 1e-12)


def test_the_interval_of_a_ratio_of_sums_covers():
    intervals = []
    for _ in range(400):
        images = GENERATOR.integers(5, 8, 10).astype(float)
        intervals.append(compute_ratio_of_sums_interval(3.0 * images + GENERATOR.normal(0, 1, 10), images))
    assert 0.92 <= np.mean([low <= 3.0 <= high for low, high in intervals]) <= 0.98
    assert compute_ratio_of_sums_interval(np.ones(2), np.ones(2)) is None
    assert compute_ratio_of_sums_interval(np.ones(5), np.zeros(5)) is None
