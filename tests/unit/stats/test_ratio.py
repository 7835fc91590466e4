import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.stats.ratio import (
    Change,
    compute_exchange_p_value,
    count_rounds_needed,
    ratio_from_rounds,
)

rounds = st.lists(st.tuples(st.floats(0.01, 1e4), st.floats(0.01, 1e4)), min_size=4, max_size=30)
MIRROR = {
    Change.FASTER: Change.SLOWER,
    Change.SLOWER: Change.FASTER,
    Change.NO_DIFFERENCE: Change.NO_DIFFERENCE,
}


@given(rounds)
def test_nothing_differs_from_itself(pairs):
    values = [first for first, _ in pairs]
    ratio = ratio_from_rounds(values, values)
    assert ratio.value == pytest.approx(1)
    assert ratio.change is Change.NO_DIFFERENCE


@given(rounds)
def test_exchanging_the_two_mirrors_the_answer(pairs):
    first, second = zip(*pairs, strict=True)
    there, back = ratio_from_rounds(first, second), ratio_from_rounds(second, first)
    assert back.value == pytest.approx(1 / there.value)
    assert back.ci == pytest.approx((1 / there.ci[1], 1 / there.ci[0]))
    assert back.change is MIRROR[there.change]
    assert back.p_value == pytest.approx(there.p_value)


@given(rounds, st.floats(0.01, 100))
def test_units_do_not_matter(pairs, factor):
    first, second = zip(*pairs, strict=True)
    plain = ratio_from_rounds(first, second)
    scaled = ratio_from_rounds(
        [value * factor for value in first], [value * factor for value in second]
    )
    assert scaled.value == pytest.approx(plain.value)


def simulated(generator, truth, count=10, process_noise=0.01, machine_noise=0.05):
    machine = machine_noise * generator.standard_normal(count)  # shared by the pair of a round
    return (
        np.exp(machine + process_noise * generator.standard_normal(count)),
        truth * np.exp(machine + process_noise * generator.standard_normal(count)),
    )


def test_the_interval_covers_and_claims_no_more_than_its_error_rate():
    generator = np.random.default_rng(11)
    found = [ratio_from_rounds(*simulated(generator, 1.0)) for _ in range(1000)]
    claims = np.mean([each.change is not Change.NO_DIFFERENCE for each in found])
    assert 0.03 <= claims <= 0.07


def test_a_five_percent_slow_down_is_found():
    generator = np.random.default_rng(12)
    found = [ratio_from_rounds(*simulated(generator, 1.05)) for _ in range(300)]
    assert np.mean([each.change is Change.SLOWER for each in found]) > 0.95
    assert np.mean([each.ci[0] <= 1.05 <= each.ci[1] for each in found]) > 0.92


def test_too_few_rounds_and_nonsense_are_refused():
    with pytest.raises(ValueError, match="4 or more"):
        ratio_from_rounds([1, 2], [1, 2])
    with pytest.raises(ValueError, match="positive"):
        ratio_from_rounds([1, 2, 3, 0], [1, 2, 3, 4])


def test_the_first_rounds_give_the_scatter():
    first, second = [1.0, 1.1, 0.9, 1.0, 3.0, 0.3], [1.0] * 6
    assert ratio_from_rounds(second, first, first=4).ci[1] < ratio_from_rounds(second, first).ci[1]
    assert ratio_from_rounds(second, first, first=6).ci == pytest.approx(
        ratio_from_rounds(second, first).ci
    )


def test_rounds_needed_by_hand():
    ratio = ratio_from_rounds([1.0, 1.02, 0.98, 1.01, 0.99], [1.0] * 5)
    assert count_rounds_needed(ratio, ratio.smallest_visible) == 5
    assert count_rounds_needed(ratio, np.expm1(np.log1p(ratio.smallest_visible) / 2)) == 20


def test_exchanging_by_hand():
    assert compute_exchange_p_value([1.0] * 8, [2.0] * 8) == 1 / 2**7
    assert compute_exchange_p_value([1.0, 2.0] * 4, [2.0, 1.0] * 4) == 1
    assert compute_exchange_p_value([1.0] * 40, [2.0] * 40) == 0
