"""Figures of a measurement, of a group of processes, and of the machine."""

import os
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fakes.measurements import planted

from optpipe.core.load import LoadSpec, Scenario
from optpipe.core.measurement import Measurement, Subject, Validity
from optpipe.core.metrics.measured import ENERGY, THROUGHPUT
from optpipe.core.metrics.sections import Sense
from optpipe.core.quantity import Dimension, Estimate
from optpipe.measure.figures import GROUPS, PARTS, SampledWindow, judge_measurement
from optpipe.measure.groups import ProcessGroup, RecordedMeasurement, summarize_group
from optpipe.measure.process import MachineSampler, read_busy_ticks
from optpipe.measure.validity import ValidityEvidence
from optpipe.models.artifacts.judged_build import JudgedBuild
from optpipe.signoff.build_evidence import BuildEvidence, observe_group
from optpipe.signoff.policy import Criterion

CALLS = st.lists(
    st.tuples(st.integers(0, 10**15) | st.just(1_000_000), st.integers(1, 512)),
    min_size=1,
    max_size=45,
)


def frame(durations_ns, images=1, idle_ns=0):
    """Calls one after another, `idle_ns` between them."""
    durations = np.asarray(durations_ns).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(durations + idle_ns)[:-1]]).astype(np.int64)
    sizes = np.broadcast_to(images, len(durations)).astype(np.int64)
    return pl.DataFrame({"images": sizes, "start_ns": starts, "end_ns": starts + durations})


def estimate_throughput(measured, scenario, confidence=0.95):
    window = SampledWindow(LoadSpec(1, scenario), measured, pl.DataFrame(), confidence=confidence)
    return THROUGHPUT.compute(window)


@given(CALLS, st.sampled_from(Scenario), st.integers(0, 10**6), st.floats(0.5, 0.999))
@example(
    [(1_000_000, 4)] * 100, Scenario.SINGLE_STREAM, 0, 0.95
)  # constant: the interval is the figure
@example([(333_333, 3)] * 7, Scenario.SERVER, 777, 0.95)
@example(
    [(1_000, 1)] * 30 + [(10**15, 1)], Scenario.SINGLE_STREAM, 0, 0.99
)  # one call longer than all others
@example(
    [(0, 8)] * 4 + [(5_000, 8)] * 3, Scenario.OFFLINE, 0, 0.95
)  # several answers at one moment
def test_the_interval_holds_the_figure_and_no_rate_is_negative(
    calls, scenario, idle_ns, confidence
):
    durations, images = zip(*calls, strict=True)
    measured = frame(durations, images, idle_ns)
    found = estimate_throughput(measured, scenario, confidence)
    assert found.value > 0
    if found.low is not None:
        assert 0 <= found.low <= found.value <= found.high < float("inf")


@given(CALLS, st.integers(0, 10**6))
def test_the_figure_is_all_images_over_all_time(calls, idle_ns):
    durations, images = zip(*calls, strict=True)
    measured = frame(durations, images, idle_ns)
    whole_ns = measured["end_ns"][-1]
    answering = estimate_throughput(measured, Scenario.SINGLE_STREAM).value
    assert answering * max(sum(durations), 1) == pytest.approx(sum(images) * 1e9)
    assert estimate_throughput(measured, Scenario.OFFLINE).value * max(
        whole_ns, 1
    ) == pytest.approx(sum(images) * 1e9)


def test_a_query_of_several_streams_is_as_many_batches():
    blank = Measurement(
        "m",
        Subject("a", "fake", "fp32", "cpu"),
        LoadSpec(4, Scenario.MULTI_STREAM, streams=2),
        Validity.VALID,
        (),
    )
    whole = frame([2_000_000] * 100, images=8).with_columns(
        pl.col("start_ns").alias("scheduled_ns"),
        *(pl.lit(None, pl.Int64).alias(f"{part}_ns") for part in PARTS),
    )
    found = judge_measurement(blank, (), ValidityEvidence(blank, whole, pl.DataFrame()))
    assert found.throughput_images_per_s.value == pytest.approx(4000)
    assert found.throughput_batches_per_s == pytest.approx(1000)


@pytest.mark.parametrize(
    ("calls", "has_one"), [(1, False), (2, False), (3, True), (GROUPS + 1, True)]
)
def test_fewer_than_three_calls_have_no_interval(calls, has_one):
    durations = [10**6 + at % 7 for at in range(calls)]
    found = estimate_throughput(frame(durations), Scenario.SINGLE_STREAM)
    assert (found.low is not None) is has_one
    assert estimate_throughput(frame([10**6] * calls), Scenario.SINGLE_STREAM).low is None


def counter(watts, seconds, step_s=0.2):
    times = np.arange(0, seconds, step_s)
    return pl.DataFrame(
        {
            "time_ns": (times * 1e9).astype(np.int64),
            "gpu_energy_mj": (times * watts * 1e3).astype(np.int64),
        }
    )


def estimate_energy(machine, images, seconds):
    ends = {"images": [images], "start_ns": [0], "end_ns": [round(seconds * 1e9)]}
    return ENERGY.compute(SampledWindow(LoadSpec(1), pl.DataFrame(ends), machine))


def test_joules_per_image_are_mean_power_times_the_time_per_image():
    found = estimate_energy(counter(400.0, 12.0), images=24_000, seconds=12.0)
    assert isinstance(found, Estimate)
    assert found.value == pytest.approx(400 * 12 / 24_000, rel=1e-3)
    assert found.low < found.value < found.high
    assert "approximate" in found.note


@pytest.mark.parametrize(
    "frame", [counter(400.0, 3.0), pl.DataFrame({"time_ns": [1, 2]}), counter(400, 12).clear()]
)
def test_a_short_window_or_no_counter_says_why(frame):
    assert isinstance(estimate_energy(frame, images=10, seconds=3.0), str)


WHY = "samples follow each other too closely: 2,648 are worth 12 independent ones"


def group_of(*figures: tuple[float, tuple[str, ...]], percentile: float = 99.0) -> ProcessGroup:
    """One process for each median in ms, with the percentiles that it withholds, measured for `percentile`."""
    found = []
    for number, (milliseconds, withheld) in enumerate(figures):
        one = planted(Subject("a", "onnxruntime", "fp32", "cpu"), 8, milliseconds)
        latency = replace(
            one.latency_ns,
            percentiles={
                name: each
                for name, each in one.latency_ns.percentiles.items()
                if name not in withheld
            },
            withheld=dict.fromkeys(withheld, WHY),
            median=milliseconds * 1e6,
        )
        one = replace(
            one, latency_ns=latency, process=number, load=replace(one.load, percentile=percentile)
        )
        found.append(RecordedMeasurement(one, f"run for p{percentile:g}"))
    return ProcessGroup(tuple(found))


def observe(group: ProcessGroup, name: str):
    limit = Criterion("latency", name, Sense.AT_MOST, 3e6, Dimension.TIME)
    return observe_group(
        limit, group, name, BuildEvidence(JudgedBuild("m", "a", "onnxruntime", "fp32"))
    )


def test_the_medians_of_disturbed_processes_count() -> None:
    group = group_of((2.4, ()), (2.6, ()), (3.8, ("p50",)), (3.4, ("p50",)))
    assert group.list_values("p50") == [[2.4e6, 2.6e6, 3.8e6, 3.4e6]]
    assert group.estimate("p50", 0.95).value == pytest.approx(3.05e6)
    assert len(summarize_group(group).figures["p50"].processes) == 4
    assert observe(group, "p50").blockers == ()


def test_of_one_or_two_processes_a_withheld_median_stays_withheld() -> None:
    assert group_of((2.4, ("p50",)), (2.6, ("p50",))).list_values("p50") == []


def test_a_percentile_that_some_processes_withhold_decides_nothing() -> None:
    seen = observe(group_of((2.4, ()), (2.6, ()), (2.5, ()), (3.8, ("p99",))), "p99")
    (blocker,) = seen.blockers
    assert blocker.reason == f"p99 could not be estimated in 1 of 4 VALID processes: {WHY}"
    assert blocker.remedy.startswith("measure longer: optpipe bench")


def test_processes_that_were_measured_for_a_lower_percentile_count_all_or_not_at_all() -> None:
    quick, slow = (2.4, ()), (3.8, ("p99",))
    asked = group_of((2.6, ()), (2.5, ()), (2.7, ())).tries
    seen = observe(ProcessGroup((*group_of(quick, slow, percentile=90.0).tries, *asked)), "p99")
    assert seen.blockers == ()
    assert seen.processes == 3
    assert "3 processes; 2 not measured for p99; single processes: 2.50 ms to 2.70 ms" in seen.about
    assert (
        observe(
            ProcessGroup((*group_of(quick, quick, percentile=90.0).tries, *asked)), "p99"
        ).processes
        == 5
    )
    assert observe(group_of(quick, slow, percentile=90.0), "p99").blockers, (
        "nothing was measured for it"
    )


def test_the_processors_add_up_to_the_machine():
    every = os.cpu_count() or 1
    before, parts, after = read_busy_ticks(), read_busy_ticks(range(every)), read_busy_ticks()
    assert before - 8 * every <= parts <= after + 8 * every, (
        "each of seven counters is rounded for itself"
    )
    assert read_busy_ticks([]) == 0
    assert read_busy_ticks([0]) <= after


def test_work_on_other_processors_is_not_seen():
    nobody = MachineSampler(os.getpid(), cpus=[])
    assert sum(value * value for value in range(300_000)) > 0
    assert nobody.sample()["other_cpu_cores"] == 0.0


def test_a_percentile_is_that_of_all_requests_and_the_mean_over_processes_has_its_own_name():
    samples = [np.arange(1, 1001) * 1e4 * speed for speed in (1, 1, 3)]
    subject = Subject("a", "net", "fp32", "cpu")
    measured = [
        planted(subject, 1, one[989] / 1e6, process=number) for number, one in enumerate(samples)
    ]
    tries = (
        RecordedMeasurement(each, "run", latencies=one)
        for each, one in zip(measured, samples, strict=True)
    )
    group = ProcessGroup(tuple(tries))
    assert group.estimate("p99").value == pytest.approx(
        np.quantile(np.concatenate(samples), 0.99), rel=0.01
    )
    assert group.estimate("mean_p99").value == pytest.approx(np.mean([one[989] for one in samples]))
