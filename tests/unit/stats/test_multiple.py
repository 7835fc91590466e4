from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.stats.means import compute_pairwise_confidence, compute_t_quantile, reject_by_holm

p_values = st.lists(st.floats(0, 1), max_size=12)


def test_by_hand():
    assert reject_by_holm([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]  # 0.0125, 0.0167, 0.025
    assert reject_by_holm([], 0.05) == []
    assert reject_by_holm([float("nan"), 0.9], 0.05) == [False, False]


@given(p_values, st.floats(0.001, 0.5))
def test_it_rejects_no_less_than_bonferroni_and_no_more_than_each_alone(values, level):
    found = reject_by_holm(values, level)
    for value, rejected in zip(values, found, strict=True):
        assert rejected or value > level / len(values)
        assert not rejected or value <= level


def test_a_true_hypothesis_is_rejected_as_rarely_as_asked():
    draws = np.random.default_rng(0).random((4000, 10))
    assert np.mean([any(reject_by_holm(list(row), 0.05)) for row in draws]) <= 0.06


@pytest.mark.parametrize(("means", "freedom", "table"), [(3, 10, 3.88), (8, 20, 4.77), (10, 60, 4.65)])
def test_all_pairs_hold_together_as_in_tables_of_the_studentized_range(means, freedom, table):
    each = compute_pairwise_confidence(means, freedom, 0.95)
    assert compute_t_quantile(0.5 + each / 2, freedom) * sqrt(2) == pytest.approx(table, abs=0.006)


def test_one_pair_needs_no_correction():
    assert compute_pairwise_confidence(2, 7, 0.95) == pytest.approx(0.95)
