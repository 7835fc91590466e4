"""Results kept by the content of arrays: asked twice, computed once, and never given for other arguments."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from optpipe.stats.remember import remember


@pytest.fixture
def asked():
    calls = []

    @remember
    def describe(*arguments: object, **named: object) -> str:
        calls.append(arguments)
        return repr((arguments, sorted(named.items())))

    return describe, calls


def test_the_same_content_is_computed_once(asked):
    describe, calls = asked
    values = np.arange(6.0)
    assert describe(values, 99.0) == describe(values.copy(), 99.0)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "others",
    [
        (np.arange(6.0)[::-1], 99.0),
        (np.arange(6.0).reshape(2, 3), 99.0),
        (np.arange(6), 99.0),
        (np.arange(6.0), 99),
        (np.arange(6.0), "99.0"),
        ([np.arange(2.0), np.arange(2.0, 6.0)], 99.0),
        ([np.arange(4.0), np.arange(4.0, 6.0)], 99.0),
        (np.arange(6.0), None),
    ],
    ids=str,
)
def test_other_arguments_are_computed(asked, others):
    describe, calls = asked
    describe(np.arange(6.0), 99.0)
    describe([np.arange(3.0), np.arange(3.0, 6.0)], 99.0)
    describe(*others)
    assert len(calls) == 3


def test_a_view_with_steps_has_the_content_of_its_values(asked):
    describe, calls = asked
    describe(np.arange(12.0)[::2])
    describe(np.arange(0.0, 12.0, 2.0))
    describe(np.arange(12.0)[1::2])
    assert len(calls) == 2


@given(arrays(np.int64, array_shapes(max_dims=2, min_side=0)), st.floats(0, 100))
def test_a_kept_result_is_the_computed_one(values, percent):
    def add(array: np.ndarray, more: float) -> float:
        return float(array.sum()) + more

    kept = remember(add)
    assert kept(values, percent) == kept(values.copy(), percent) == add(values, percent)
