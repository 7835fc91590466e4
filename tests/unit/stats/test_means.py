"""Means over processes and runs, two speeds, and several hypotheses at once."""

from math import expm1, log, log1p

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from optpipe.stats.means import (
    SIMILAR_RUNS_FREEDOM,
    SPEED_GAP,
    OtherSpeed,
    compute_ratio_of_sums_interval,
    compute_t_quantile,
    count_runs_needed,
    mean_from_runs,
    mean_from_values,
    predict_next_upper_bound,
    reject_by_holm,
    split_scatter,
)

GENERATOR = np.random.default_rng(3)


@given(st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(0.1, 1e6)), min_size=3, max_size=40))
def test_the_interval_of_a_ratio_of_sums_holds_it_whatever_the_lengths_of_the_windows(pairs):
    times, images = np.array(pairs).T
    interval = compute_ratio_of_sums_interval(times, images)
    assume(interval is not None)  # windows of one ratio do not show their scatter
    low, high = interval
    assert low <= times.sum() / images.sum() * (1 + 1e-12)
    assert high >= times.sum() / images.sum() * (1 - 1e-12)


@pytest.mark.parametrize(
    ("level", "freedom", "value"), [(0.975, 4, 2.776445), (0.975, 9, 2.262157), (0.9, 30, 1.31042)]
)
def test_quantiles_of_the_tables(level, freedom, value):
    assert compute_t_quantile(level, freedom) == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("level", [0.4, 1.0, 5e20, float("inf"), float("nan")])
def test_a_level_that_is_no_probability_is_refused(level):
    with pytest.raises(ValueError, match="no quantile"):
        compute_t_quantile(level, 9)


@given(
    st.lists(st.floats(1, 10), min_size=3, max_size=9, unique=True),
    st.floats(1, 10),
    st.floats(0.6, 0.99),
)
def test_the_p_value_says_whether_the_interval_is_above_the_limit(values, limit, confidence):
    mean = mean_from_values(values)
    low, p_value = mean.interval(confidence)[0], mean.compute_p_value_above(limit)
    assert (low > limit) == (p_value < (1 - confidence) / 2) or low == pytest.approx(limit)


def test_runs_that_differ_are_the_unit_and_equal_ones_are_not():
    assert mean_from_runs([[1.0, 1.1, 0.9], [5.0, 5.1, 4.9]]).freedom == 1
    assert mean_from_runs([[1.0, 1.1, 0.9], [0.9, 1.0, 1.1]]).freedom == SIMILAR_RUNS_FREEDOM
    assert mean_from_runs([[1.0], [1.1]]) is None


def test_runs_that_are_needed_by_the_scatter_that_was_seen():
    alike, different = [[1.0, 1.1, 0.9], [0.9, 1.0, 1.1]], [[1.0, 1.01, 0.99], [1.1, 1.11, 1.09]]
    # 0.1 and 0.089 / sqrt(3 * runs) * t of 1.5 degrees of freedom for each run after the first
    assert count_runs_needed([[1.0, 1.1, 0.9]], 0.11, 0.95) == 7
    assert count_runs_needed(alike, 0.1, 0.95) == 7
    assert count_runs_needed(alike, 0.07, 0.95) == 12
    # 0.0707 / sqrt(runs) * t at the confidence of that look
    assert count_runs_needed(different, 0.3, 0.95) == 5
    assert count_runs_needed(different, 0.175, 0.95) == 7
    assert count_runs_needed(different, 0.001, 0.95) is None
    with pytest.raises(ValueError, match="2 processes"):
        count_runs_needed([[1.0], [1.1]], 0.1, 0.95)


def test_two_stages_make_the_interval_as_narrow_as_asked_and_cover():
    covered = []
    for _ in range(1000):
        first = GENERATOR.normal(10.0, 1.0, 5).tolist()
        more = GENERATOR.normal(10.0, 1.0, 4)
        low, high = mean_from_values([*first, *more], first).interval(0.95)
        covered.append(low <= 10.0 <= high)
    assert np.mean(covered) >= 0.93


def test_the_scatter_is_split_into_its_two_parts():
    offsets = GENERATOR.normal(10.0, 0.3, 400)
    values = (offsets + GENERATOR.normal(0, 0.1, 400)).tolist()
    between, inside = split_scatter(values, [1.96 * 0.1] * 400, 0.95) or (0.0, 0.0)
    assert between == pytest.approx(0.03, rel=0.15)
    assert inside == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize("count", [3, 5, 15])
def test_the_next_value_stays_below_its_bound_as_often_as_claimed(count):
    values = np.random.default_rng(count).normal(100.0, 1.0, (2000, count + 1))
    above = sum(row[-1] > predict_next_upper_bound(list(row[:-1]), 0.95) for row in values)
    assert 0.01 < above / len(values) < 0.04
    assert predict_next_upper_bound([7.0] * count, 0.95) == 7.0
    assert predict_next_upper_bound([1.0, 2.0], 0.95) is None


@given(st.integers(1, 200), st.integers(0, 20), st.floats(1e-4, 0.5), st.floats(0.01, 2.0))
def test_the_p_value_at_the_reach_is_the_level(processes, left_out, level, gap):
    speed = OtherSpeed(processes, left_out, gap)
    (low, high), _ = speed.widen(1.0, (1.0, 1.0), 1 - 2 * level)
    assert low == pytest.approx(1 / high)
    assert 0 < log(high) <= gap
    assert speed.compute_p_value(log(high)) == pytest.approx(level)


@given(st.integers(1, 200), st.floats(1e-4, 0.5))
def test_the_processes_for_a_reach_are_those(processes, level):
    speed = OtherSpeed(processes)
    assert speed.count_processes_for_reach(speed.compute_reach(level), level) == processes


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 50), st.integers(0, 9))
def test_farther_is_less_probable_and_more_processes_reach_less_far(one, other, count, left_out):
    near, far = sorted((one, other))
    speed = OtherSpeed(count, left_out)
    assert speed.compute_p_value(far) <= speed.compute_p_value(near)
    more = OtherSpeed(count + 1, left_out)
    assert more.compute_p_value(near) <= speed.compute_p_value(near) + 1e-12
    assert OtherSpeed(count, left_out + 1).compute_reach(0.025) > speed.compute_reach(0.025)


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 50), st.integers(0, 9), st.floats(0.01, 1))
def test_two_builds_of_one_long_run_are_as_far_apart_no_more_often(fast, slow, count, lost, gap):
    """`fast`: the share of processes that one build has at a slower speed, of which it shows few; `slow`: the other's, mirrored."""
    speed = OtherSpeed(count, lost, gap)
    distance = log1p((fast + slow) * expm1(gap))
    probability = 1.0
    for share in (fast, slow):
        probability *= stats.binom.cdf(lost, count + lost, share)
    assert probability <= speed.compute_pair_p_value(distance) * (1 + 1e-6) + 1e-12


def test_the_ends():
    speed = OtherSpeed(5)
    assert speed.compute_pair_p_value(0.0) == 1.0
    assert speed.compute_pair_p_value(2 * SPEED_GAP) == 0.0
    assert speed.compute_p_value(0.0) == 1.0
    assert speed.compute_p_value(SPEED_GAP) == 0.0
    assert speed.count_processes_for_reach(0.0, 0.025) == float("inf")
    assert speed.count_processes_for_reach(1.0, 0.025) == 1
    assert OtherSpeed(0).bound_share(0.025) == 1.0


def test_more_processes_do_not_help_against_a_share_that_is_always_left_out():
    half = OtherSpeed(processes=10, left_out=10, gap=log(1.1))
    assert half.count_processes_for_reach(log(1.04), 0.025) == float("inf")
    assert 10 < half.count_processes_for_reach(log(1.06), 0.025) < float("inf")


p_values = st.lists(st.floats(0, 1), max_size=12)


def test_by_hand():
    assert reject_by_holm([0.01, 0.04, 0.03, 0.005], 0.05) == [
        True,
        False,
        False,
        True,
    ]  # 0.0125, 0.0167, 0.025
    assert reject_by_holm([], 0.05) == []
    assert reject_by_holm([float("nan"), 0.9], 0.05) == [False, False]


@given(p_values, st.floats(0.001, 0.5))
def test_it_rejects_no_less_than_bonferroni_and_no_more_than_each_alone(values, level):
    found = reject_by_holm(values, level)
    for value, rejected in zip(values, found, strict=True):
        assert rejected or value > level / len(values)
        assert not rejected or value <= level
