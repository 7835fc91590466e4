"""Percentiles, steadiness, drift, second speeds, and what a correlated series is worth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.stats.percentiles import (
    choose_sample_count,
    count_samples_needed,
    find_order_statistic,
    interval_ranks,
    summary_from_ns,
)
from optpipe.stats.stability import compute_effective_count, find_trend, find_two_modes, is_steady

GENERATOR = np.random.default_rng(3)


def lognormal(level, count=1000, spread=0.02):
    return level * np.exp(spread * GENERATOR.standard_normal(count))


@pytest.mark.parametrize(
    ("medians", "expected"),
    [
        ([10, 5, 3], False),
        ([100, 30, 12, 11, 10.1, 10.0, 10.05, 10.02], True),
        ([10.0, 10.0, 10.0, 20.0], False),
        ([10.4, 10.3, 10.2, 10.1], False),  # still falling
        ([10.1, 10.4, 10.2, 10.3], True),
    ],
)
def test_warm_up_ends_when_windows_agree(medians, expected):
    assert is_steady(medians) is expected


def test_drift_is_found_with_its_size():
    change, p_value = find_trend(lognormal(1.0) * np.linspace(1.0, 1.10, 1000))
    assert p_value < 0.001
    assert change == pytest.approx(0.095, abs=0.02)


def test_no_drift_in_noise():
    findings = [find_trend(lognormal(1.0)) for _ in range(200)]
    assert sum(p_value < 0.01 for _, p_value in findings) <= 6


def test_too_few_samples_have_no_trend():
    assert find_trend(np.ones(20)) is None


@given(st.floats(1.15, 5.0), st.floats(0.15, 0.85))
def test_two_speeds_are_found(factor, share):
    slow = GENERATOR.random(1000) < share
    fast_at, slow_at, slow_share = find_two_modes(np.where(slow, lognormal(factor), lognormal(1.0)))
    assert slow_at / fast_at == pytest.approx(factor, rel=0.03)
    assert slow_share == pytest.approx(share, abs=0.06)


@pytest.mark.parametrize(
    "values",
    [
        lognormal(1.0),
        lognormal(1.0, spread=0.3),
        1.0 + GENERATOR.exponential(0.5, 2000),
        GENERATOR.uniform(1, 2, 2000),
        1.0 + GENERATOR.pareto(2.0, 2000),
        np.concatenate([lognormal(1.0, 980), lognormal(10.0, 20)]),  # outliers
        np.ones(100),
    ],
)
def test_one_speed_with_a_tail_is_one_speed(values):
    assert find_two_modes(values) is None


def autoregressive(generator, phi, count):
    from scipy.signal import lfilter

    return lfilter([1], [1, -phi], generator.standard_normal(count + 500))[500:]


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9, 0.98])
def test_an_autoregressive_series_is_worth_what_theory_says(phi):
    """n (1 − φ) / (1 + φ), for the mean of a process xₖ = φ xₖ₋₁ + noise."""
    generator = np.random.default_rng(0)
    found = [compute_effective_count(autoregressive(generator, phi, 20_000)) for _ in range(20)]
    assert np.mean(found) == pytest.approx(20_000 * (1 - phi) / (1 + phi), rel=0.1)


def test_it_is_never_worth_more_than_it_has():
    assert compute_effective_count(np.tile([1.0, -1.0], 500)) == 1000
    assert compute_effective_count(np.ones(300)) == 300
    assert compute_effective_count(np.arange(3.0)) == 3


def test_a_shift_or_another_unit_changes_nothing():
    series = autoregressive(np.random.default_rng(1), 0.8, 5000)
    assert compute_effective_count(5 + 1e6 * series) == pytest.approx(
        compute_effective_count(series)
    )


def test_blocks_of_equal_values_are_worth_one_each():
    blocks = np.repeat(np.random.default_rng(0).integers(0, 2, 40), 100).astype(float)
    assert compute_effective_count(blocks) < 60


durations = st.lists(st.integers(1, 10**10), min_size=1, max_size=400).map(np.array)


@pytest.mark.parametrize(
    ("percent", "needed"), [(50.0, 11), (90.0, 64), (95.0, 130), (99.0, 662), (99.9, 6636)]
)
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
    assert [find_order_statistic(values, percent) for percent in (10, 50, 90, 91, 100)] == [
        1,
        5,
        9,
        10,
        10,
    ]


def test_ranks_by_hand():
    # n = 11, median: P(2 <= rank < 10) = 0.988; P(3 <= rank < 9) = 0.935 is under 95 %
    assert interval_ranks(11, 50.0) == (2, 10)
    assert interval_ranks(3, 50.0) is None


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
    assert "so correlated" in summary.withheld["p99"]
    assert summary.withheld["p99.9"]
    assert choose_sample_count(slow, 99.9, 10**6) > len(slow)
