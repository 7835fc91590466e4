"""Processes that do not count: what a figure over processes owes to those that were left out, and to what none of them showed."""

from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from tests.fakes.measurements import planted

from optpipe.core.measurement import Reason, Subject
from optpipe.measure.groups import ProcessGroup, RecordedMeasurement, compare_groups
from optpipe.stats.percentiles import (
    STALL_REQUESTS,
    count_stretches_for_stalls,
    invert_clustered_share,
    pool_percentile,
    summary_from_ns,
)

SUBJECT = Subject("a", "fake", "fp32", "cpu")
GENERATOR = np.random.default_rng(54)


def make_try(latencies_ns, process, *codes, run="r"):
    reasons = [Reason(code, "seen", "", True) for code in codes]
    one = planted(SUBJECT, 1, 10.0, reasons=reasons, process=process, samples=len(latencies_ns))
    summary = summary_from_ns(latencies_ns, (50.0, 90.0, 99.0)) if len(latencies_ns) else None
    one = replace(one, latency_ns=summary)
    return RecordedMeasurement(one, run, latencies=latencies_ns)


def draw(level=10e6, count=700):
    return level * np.exp(0.01 * GENERATOR.standard_normal(count))


def test_a_stalled_process_whose_p99_is_withheld_still_counts_by_its_raw_p99():
    stalled = draw()
    stalled[300:330] *= 1.4
    valid = [make_try(draw(), at) for at in range(10)]
    spoilt = make_try(stalled, 10, "dispersion")
    spoilt = replace(
        spoilt,
        measurement=replace(
            spoilt.measurement, latency_ns=replace(spoilt.measurement.latency_ns, percentiles={})
        ),
    )
    group = ProcessGroup((*valid, spoilt))
    assert group.count_left_out_without("p99") == 0
    assert group.estimate("p99").high > 13.5e6
    assert ProcessGroup(tuple(valid)).estimate("p99").high < 12.5e6


@pytest.mark.parametrize("code", ["drift", "throttled", "clocks-moved", "hot", "loaded-host"])
@pytest.mark.parametrize("name", ["p50", "p90", "mean_p90", "throughput"])
def test_the_interval_reaches_farther_the_more_were_left_out(code, name):
    valid = [make_try(draw(), at) for at in range(5)]
    widths = []
    for count in range(4):
        slow = [make_try(draw(12e6), 5 + at, code) for at in range(count)]
        slow = [
            replace(
                one,
                measurement=replace(
                    one.measurement,
                    throughput_images_per_s=one.measurement.throughput_images_per_s.scale(1 / 1.2),
                ),
            )
            for one in slow
        ]
        found = ProcessGroup((*valid, *slow)).estimate(name)
        widths.append(found.high - found.low)
    assert widths == sorted(widths)
    assert widths[1] > 1.2 * widths[0]


def test_a_process_without_any_request_is_unknown():
    group = ProcessGroup(
        (*(make_try(draw(), at) for at in range(5)), make_try(draw()[:0], 5, "died"))
    )
    assert group.count_left_out_without("p50") == 1
    other = ProcessGroup(tuple(make_try(draw(), at) for at in range(5)))
    assert isinstance(compare_groups(group, other, "p50", None), str)


def test_a_coefficient_of_variation_has_no_second_speed_but_counts_those_left_out():
    valid = [make_try(draw(), at) for at in range(5)]
    assert ProcessGroup(tuple(valid)).find_other_speed("cv").gap == 0
    wild = make_try(10e6 * np.exp(0.1 * GENERATOR.standard_normal(700)), 5, "dispersion")
    before, after = (ProcessGroup(each).estimate("cv") for each in ((*valid,), (*valid, wild)))
    assert after.high > 3 * before.high


def test_without_valid_processes_nothing_is_estimated():
    group = ProcessGroup(tuple(make_try(draw(), at, "drift") for at in range(5)))
    assert group.estimate("p50") is None
    assert group.find_other_speed("p50").bound_share(0.025) == 1.0
    one = ProcessGroup((make_try(draw(), 0), *(make_try(draw(), at, "drift") for at in (1, 2))))
    assert one.estimate("p50").low is None


def test_few_requests_may_have_missed_stalls():
    assert ceil(STALL_REQUESTS * count_stretches_for_stalls(99.0)) == 11_012
    few = ProcessGroup(tuple(make_try(draw(), at) for at in range(5)))
    many = ProcessGroup(tuple(make_try(draw(count=3000), at) for at in range(5)))
    assert few.estimate("p99").high > 1.14 * few.estimate("p99").value
    assert many.estimate("p99").high < 1.08 * many.estimate("p99").value


def draw_slowly(process, count=700, correlation=0.99):
    noise = np.random.default_rng(process).standard_normal(count) * np.sqrt(1 - correlation**2)
    noise[0] /= np.sqrt(1 - correlation**2)
    for at in range(1, count):
        noise[at] += correlation * noise[at - 1]
    return 10e6 * np.exp(0.01 * noise)


def test_slow_noise_widens_a_percentile_and_does_not_withhold_it():
    tries = tuple(make_try(draw_slowly(at), at) for at in range(5))
    assert all("p99" in one.measurement.latency_ns.withheld for one in tries)
    group = ProcessGroup(tries)
    assert group.count_showing("p99") == 5
    found = group.estimate("p99")
    assert found.low < 10e6 * np.exp(0.01 * 2.326) < found.high
    assert ProcessGroup(tries[:2]).estimate("p99") is None  # processes do not show their scatter


def test_too_few_samples_still_withhold_a_percentile():
    group = ProcessGroup(tuple(make_try(draw(count=300), at) for at in range(5)))
    assert group.estimate("p99") is None


def test_many_requests_with_slow_noise_are_few_stretches():
    tries = tuple(make_try(draw_slowly(at, 5000), at) for at in range(3))
    assert sum(len(one.latencies) for one in tries) > 11_012
    assert (
        ProcessGroup(tries).estimate("p99").high > 1.14 * ProcessGroup(tries).estimate("p99").value
    )


def test_the_percentile_at_a_jump_has_an_interval_that_spans_it():
    """0.9% of requests are slow, which 1.1% of the long run are: the jackknife sees the fast requests alone."""
    processes = [draw() for _ in range(5)]
    for each in processes:
        each[:6] *= 1.12
    low, high = invert_clustered_share([processes], 99.0, 0.95)
    value = sum(pool_percentile(processes, 99.0)) / 5
    assert low <= value < 10.6e6
    assert high > 11e6


def test_the_share_of_equal_values_and_of_few_processes():
    same = [np.full(700, 5.0) for _ in range(5)]
    assert invert_clustered_share([same], 99.0, 0.95) == (5.0, 5.0)
    assert invert_clustered_share([same[:2]], 99.0, 0.95) is None
    assert invert_clustered_share([same[:2], same[2:]], 99.0, 0.95) == (5.0, 5.0)
