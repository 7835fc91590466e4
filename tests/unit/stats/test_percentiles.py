import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.stats.percentiles import (
    count_samples_needed,
    find_order_statistic,
    interval_ranks,
    plan_sample_count,
    summary_from_ns,
)

durations = st.lists(st.integers(1, 10**10), min_size=1, max_size=400).map(np.array)


@pytest.mark.parametrize(("percent", "needed"), [(50.0, 11), (90.0, 64), (95.0, 130), (99.0, 662), (99.9, 6636)])
def test_sample_counts_are_those_of_loadgen(percent, needed):
    assert count_samples_needed(percent) == needed


@given(durations)
def test_percentiles_are_monotone_and_were_measured(values):
    summary = summary_from_ns(values)
    found = [one.value for one in summary.percentiles.values()]
    assert found == sorted(found)
    assert {round(value) for value in found} <= set(values.tolist())
    for one in summary.percentiles.values():
        assert summary.minimum <= one.low <= one.value <= one.high <= summary.maximum


@given(durations)
def test_every_percentile_is_given_or_withheld_with_the_reason(values):
    summary = summary_from_ns(values, percents=(50.0, 99.0))
    assert len(summary.percentiles) + len(summary.withheld) == 2
    if len(values) < 662:
        assert summary.withheld["p99"] == f"needs 662 samples, has {len(values):,}"


@given(durations, st.floats(0.5, 1000))
def test_scaling_time_scales_the_summary(values, factor):
    plain, scaled = summary_from_ns(values), summary_from_ns(values * factor)
    for before, after in zip(plain.percentiles.values(), scaled.percentiles.values(), strict=True):
        assert after.value == pytest.approx(before.value * factor)


def test_order_statistics_by_hand():
    values = np.arange(1.0, 11.0)
    assert [find_order_statistic(values, percent) for percent in (10, 50, 90, 91, 100)] == [1, 5, 9, 10, 10]


def test_ranks_by_hand():
    # n = 11, median: P(2 <= rank < 10) = 0.988; P(3 <= rank < 9) = 0.935 is under 95 %
    assert interval_ranks(11, 50.0) == (2, 10)
    assert interval_ranks(3, 50.0) is None


@pytest.mark.parametrize("percent", [50.0, 90.0, 99.0])
@pytest.mark.parametrize("correlation", [0.0, 0.7])
@pytest.mark.slow
def test_intervals_cover_also_when_samples_are_correlated(percent, correlation):
    generator = np.random.default_rng(7)
    truth = 1e6 * float(np.exp(0.1 * {50.0: 0.0, 90.0: 1.281552, 99.0: 2.326348}[percent]))
    covered = 0
    for _ in range(200):
        noise = generator.standard_normal(3000) * np.sqrt(1 - correlation**2)
        for index in range(1, len(noise)):
            noise[index] += correlation * noise[index - 1]
        one = summary_from_ns(np.exp(0.1 * noise[50:]) * 1e6, (percent,)).percentile(percent)
        covered += one.low <= truth <= one.high
    assert covered >= 0.90 * 200


def test_nothing_measured_is_no_summary():
    with pytest.raises(ValueError, match="no samples"):
        summary_from_ns(np.array([]))


def test_nothing_above_a_percentile_that_cannot_be_shown():
    """One burst of slow samples, which p99 shows to be one event, and a few lone ones far above it."""
    slow = np.full(8_000, 1e6)
    slow[3_000:3_120] = 2e6 + np.arange(120)
    slow[500::1_000] = 9e6
    summary = summary_from_ns(slow, (50.0, 99.0, 99.9))
    assert list(summary.percentiles) == ["p50"]
    assert "too closely" in summary.withheld["p99"]
    assert summary.withheld["p99.9"]
    assert plan_sample_count(slow, 99.9, 10**6) > len(slow)
