"""Change points: what is found depends on the order of the values alone, and quiet series show nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.stats.changes import LEAST_RUNS, RISK, count_runs_to_show, find_changes, find_split

SERIES = st.lists(st.floats(0.1, 100.0), max_size=16)


def draw_runs(seed, *levels, runs=20, scatter=0.01):
    generator = np.random.default_rng(seed)
    return [
        float(level * (1 + scatter * generator.standard_normal()))
        for level in levels
        for _ in range(runs)
    ]


@settings(deadline=None, max_examples=40)
@given(SERIES)
def test_a_split_lies_inside_and_its_probability_is_one(values):
    found = find_split(values)
    assert (found is None) == (len(values) < 2 * LEAST_RUNS)
    if found is not None:
        assert LEAST_RUNS <= found.at <= len(values) - LEAST_RUNS
        assert 0 < found.p_value <= 1


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.floats(0.01, 100.0))
def test_the_unit_of_a_figure_changes_nothing(seed, unit):
    values = draw_runs(seed, 1.0, 1.05, runs=10)
    assert find_split([unit * each for each in values]) == pytest.approx(find_split(values))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000))
def test_the_reversed_series_splits_at_the_same_place(seed):
    values = draw_runs(seed, 1.0, 1.2, runs=8)
    assert find_split(values).at + find_split(values[::-1]).at == len(values)


def test_equal_values_show_nothing():
    assert find_changes([[3.0] * 50]) == [[]]


def test_each_of_two_steps_is_found_where_it_is():
    (found,) = find_changes([draw_runs(1, 1.0, 1.1, 1.0)])
    assert [each.at for each in found] == [20, 40]


def test_one_slow_run_is_no_change():
    values = draw_runs(2, 1.0, runs=30)
    values[-1] *= 3
    assert find_changes([values]) == [[]]


def test_a_step_is_found_beside_quiet_series():
    quiet = [draw_runs(seed, 1.0, runs=40) for seed in range(10)]
    *others, mine = find_changes([*quiet, draw_runs(11, 1.0, 1.1)])
    assert others == [[]] * 10
    assert [each.at for each in mine] == [20]


def test_from_the_stated_number_of_runs_on_a_change_can_show():
    runs = count_runs_to_show(1)
    halves = [*range(runs // 2), *range(1000, 1000 + runs - runs // 2)]
    assert find_split([float(each) for each in halves]).p_value <= RISK
    short = [*range(runs // 2 - 2), *range(1000, 1000 + runs // 2 - 2)]
    assert find_split([float(each) for each in short]).p_value > RISK


@pytest.mark.slow
def test_a_step_of_three_percent_is_found_within_five_runs():
    """The light form of `benchmarks/change_points.py`: 20 runs before, a scatter of 1%."""
    found = 0
    for seed in range(60):
        before, after = draw_runs(seed, 1.0), draw_runs(1000 + seed, 1.03, runs=5)
        found += any(find_changes([[*before, *after[:count]]])[0] for count in (3, 4, 5))
    assert found >= 50  # of 60: 90%, less two standard errors


@pytest.mark.slow
def test_quiet_histories_rarely_show_a_change():
    shown = sum(bool(find_changes([draw_runs(seed, 1.0, runs=100)])[0]) for seed in range(200))
    assert shown <= 6  # of 200: 1%, and two and a half standard errors
