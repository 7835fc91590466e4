"""Means of processes that ran at two speeds: laws, and the rate at which a build on its limit passes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.stats.means import mean_from_values, subtract_means
from optpipe.stats.seen_speeds import SpeedMean, SpeedRatio, seen_speeds_from_values

values = st.lists(st.floats(1.0, 2.0), min_size=3, max_size=30).filter(
    lambda drawn: seen_speeds_from_values(drawn) is not None
)
confidences = st.floats(0.5, 0.999)


def make_mean(drawn):
    return SpeedMean(mean_from_values(drawn), seen_speeds_from_values(drawn))


def make_ratio(new, old):
    means = mean_from_values(new), mean_from_values(old)
    change = subtract_means(*(each.take_logarithm() for each in means))
    speeds = (seen_speeds_from_values(each) for each in (new, old))
    return SpeedRatio(change, means[0].value, means[1].value, *speeds)


def test_two_speeds_are_parted_at_the_widest_gap():
    speeds = seen_speeds_from_values([10.8, 10.0, 10.1, 10.9, 10.0])
    assert (speeds.count, speeds.larger) == (5, 2)
    assert (speeds.lower, speeds.upper) == pytest.approx((10.0333333, 10.85))
    assert "2 of 5 processes are 8.1% above the others" in speeds.describe(0.95)


@pytest.mark.parametrize("drawn", [[], [1.0, 2.0], [1.0] * 5, [1.0, float("nan"), 2.0]])
def test_few_equal_or_undefined_values_have_no_two_speeds(verifier, drawn):
    assert seen_speeds_from_values(drawn) is None
    if len(set(map(str, drawn))) == len(drawn) < 3 or len(set(drawn)) == 1:
        assert verifier.find_speeds(drawn) is None


@given(values, confidences)
def test_the_interval_holds_that_of_the_mean_and_stays_inside_the_speeds(drawn, confidence):
    found = make_mean(drawn)
    low, high = found.interval(confidence)
    least, most = found.mean.interval(confidence)
    assert low <= least <= most <= high
    assert bool(found.explain(confidence)) == ((low, high) != (least, most))
    low, high = found.speeds.interval(confidence)
    assert found.speeds.lower <= low <= high <= found.speeds.upper
    assert low - 1e-9 <= float(np.mean(drawn)) <= high + 1e-9


@given(values, confidences, st.floats(0.9, 2.1))
def test_p_values_agree_with_intervals(drawn, confidence, limit):
    found, level = make_mean(drawn), (1 - confidence) / 2
    low, high = found.interval(confidence)
    above, below = found.compute_p_value_above(limit), found.compute_p_value_below(limit)
    if abs(above - level) > 1e-9:
        assert (above < level) == (low > limit)
    if abs(below - level) > 1e-9:
        assert (below < level) == (high < limit)


@given(values, values, confidences, st.floats(-0.2, 0.2))
def test_p_values_of_ratios_agree_with_intervals(new, old, confidence, limit):
    found, level = make_ratio(new, old), (1 - confidence) / 2
    low, high = found.interval(confidence)
    above, below = found.compute_p_value_above(limit), found.compute_p_value_below(limit)
    if abs(above - level) > 1e-6 and abs(low - limit) > 1e-9:
        assert (above < level) == (low > limit)
    if abs(below - level) > 1e-6 and abs(high - limit) > 1e-9:
        assert (below < level) == (high < limit)


@given(values, values, confidences)
def test_the_ratio_turned_around_has_the_opposite_interval(new, old, confidence):
    low, high = make_ratio(new, old).interval(confidence)
    assert make_ratio(old, new).interval(confidence) == pytest.approx((-high, -low), abs=1e-12)


@given(values, values, confidences)
def test_the_independent_verifier_finds_the_same(verifier, new, old, confidence):
    speeds = [seen_speeds_from_values(each) for each in (new, old)]
    theirs = [verifier.find_speeds(each) for each in (new, old)]
    for mine, other in zip(speeds, theirs, strict=True):
        assert other(confidence) == pytest.approx(mine.interval(confidence), rel=1e-9)
    sides = [(float(np.mean(each)), one) for each, one in zip((new, old), theirs, strict=True)]
    low, high = make_ratio(new, old).interval(confidence)
    apart = make_ratio(new, old).change.interval(confidence)
    least, most = verifier.compare_speeds(*sides)(confidence)
    assert (min(least, apart[0]), max(most, apart[1])) == pytest.approx((low, high), abs=1e-9)


@pytest.mark.parametrize(("count", "slow", "gap"), [(19, 0.2, 0.08), (40, 0.1, 0.12)])
@pytest.mark.parametrize("faster", [False, True])
def test_a_mean_on_its_limit_is_rarely_beyond_its_interval(count, slow, gap, faster):
    """Student's t alone misses the truth in 8% of these draws on one side; and so does a ratio to a build with one speed."""
    generator, wrong = np.random.default_rng(54), []
    for _ in range(300):
        late = generator.random(count) < slow
        drawn = np.exp(0.003 * generator.standard_normal(count)) * (1 + gap * late)
        drawn = list(drawn / (1 + gap * slow))
        drawn = [2 - each for each in drawn] if faster else drawn
        steady = list(np.exp(0.003 * generator.standard_normal(count)))
        low, high = make_mean(drawn).interval(0.95)
        least, most = make_ratio(drawn, steady).interval(0.95)
        wrong.append((low > 1 or least > 0) if faster else (high < 1 or most < 0))
    assert np.mean(wrong) <= 0.04
