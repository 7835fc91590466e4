"""Values without a scatter or without a number: an interval is withheld or spans its range, and is never empty or NaN."""

import numpy as np
import pytest

from optpipe.stats.means import (
    compute_ratio_of_sums_interval,
    mean_from_runs,
    mean_from_values,
    predict_next_upper_bound,
)
from optpipe.stats.paired import (
    compare_macro_f1,
    compute_snr_interval,
    groups_from_names,
    mean_from_samples,
)

BAD = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("bad", BAD)
def test_a_value_that_is_no_number_withholds_the_interval_of_a_mean(bad):
    values = [1.0, 2.0, 3.0, bad, 5.0]
    assert mean_from_values(values) is None
    assert predict_next_upper_bound(values, 0.95) is None
    assert mean_from_runs([values, [1.0, 2.0, 3.0]]) is None


@pytest.mark.parametrize("bad", BAD)
def test_a_window_that_is_no_number_withholds_the_interval_of_a_rate(bad):
    windows, ones = np.array([1.0, 2.0, 3.0, bad, 5.0]), np.ones(5)
    assert compute_ratio_of_sums_interval(windows, ones) is None
    assert compute_ratio_of_sums_interval(ones, windows) is None


GROUPS = {
    "none": None,
    "of one": [str(at) for at in range(40)],
    "of two": [str(at // 2) for at in range(40)],
    "of everything": ["clip"] * 40,
}


@pytest.mark.parametrize("names", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("value", [*BAD, 0.0, 0.3, 1.0])
def test_samples_that_are_constant_or_no_numbers_have_no_interval_of_width_zero(value, names):
    groups = groups_from_names(names or [])
    low, high = mean_from_samples(np.full(40, value), groups).interval(0.95)
    assert 0 <= low < high <= 1
    if not np.isfinite(value) or names == GROUPS["of everything"]:
        assert (low, high) == (0, 1)


@pytest.mark.parametrize("count", [1, 19, 59])
def test_few_samples_give_no_narrow_interval(count):
    low, high = mean_from_samples(np.ones(count)).interval(0.95)
    assert low <= 0.94
    labels = np.arange(count) % 3
    assert compare_macro_f1(labels, labels, labels, 3).interval(0.95)[1] > 0.02
    rows = {"difference_square": np.ones(count), "reference_square": np.ones(count)}
    assert compute_snr_interval(rows, 0.95) is None
    assert high == 1


def test_one_sample_of_a_class_decides_nothing_of_macro_f1():
    labels = np.arange(200) % 3
    labels[0] = 5
    assert compare_macro_f1(labels, labels, labels, 6).interval(0.95) == (-1, 1)
