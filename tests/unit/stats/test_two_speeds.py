import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.stats.means import (
    SPEED_GAP,
    compute_unseen_p_value,
    compute_unseen_reach,
    count_processes_for_reach,
)


@given(st.integers(1, 200), st.floats(1e-4, 0.5))
def test_the_p_value_at_the_reach_is_the_level_and_the_processes_for_it_are_those(processes, level):
    reach = compute_unseen_reach(processes, level)
    assert 0 < reach < SPEED_GAP
    assert compute_unseen_p_value(reach, processes) == pytest.approx(level)
    assert count_processes_for_reach(reach, level) == processes


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 50))
def test_farther_is_less_probable_and_more_processes_reach_less_far(one, other, processes):
    near, far = sorted((one, other))
    assert compute_unseen_p_value(far, processes) <= compute_unseen_p_value(near, processes)
    assert compute_unseen_p_value(near, processes + 1) <= compute_unseen_p_value(near, processes)


def test_the_ends():
    assert compute_unseen_p_value(0.0, 5) == 1.0
    assert compute_unseen_p_value(SPEED_GAP, 5) == 0.0
    assert count_processes_for_reach(0.0, 0.025) == float("inf")
    assert count_processes_for_reach(1.0, 0.025) == 1


@pytest.mark.parametrize("share", [0.1, 0.4, 0.5, 0.6, 0.9])
@pytest.mark.parametrize("processes", [3, 5, 10, 30])
def test_processes_that_agree_lie_within_reach_of_the_long_run(share, processes):
    slow = np.random.default_rng(7).random((20_000, processes)) < share
    agree = slow.all(axis=1) | ~slow.any(axis=1)
    away = SPEED_GAP * np.abs(slow.mean(axis=1) - share)
    assert np.mean(agree & (away > compute_unseen_reach(processes, 0.025))) < 0.03
