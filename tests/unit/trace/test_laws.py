"""Laws that hold for every trace."""

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.golden.nsys_export import THREAD, Recording

from optpipe.core.records import json_from_record, record_from_json
from optpipe.trace.analysis import (
    Analysis,
    analysis_from_trace,
    complement_intervals,
    intersect_intervals,
    subtract_intervals,
    sum_before,
    sum_within,
    unite_intervals,
)
from optpipe.trace.read import trace_from_sqlite
from optpipe.trace.report import TraceProfile, profile_from_trace

SPANS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), max_size=12)
NAMES = ("sm90_xmma_gemm_f16f16_f16f32", "ampere_sgemm_128x64_tn", "void relu_kernel<float>(int)")


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    """Kernels, copies, waiting calls and ranges on up to three streams and two threads, overlapping as they like."""
    trace = Recording()
    for start, length in draw(SPANS):
        launched = start - draw(st.integers(0, 30))
        trace.kernel(
            draw(st.sampled_from(NAMES)),
            start,
            start + length,
            (launched, launched + draw(st.integers(0, 40))),
            stream=draw(st.integers(1, 3)),
            thread=THREAD + draw(st.integers(0, 1)),
        )
    for start, length in draw(SPANS):
        trace.copy(start, start + length, 100, launch=(start - 1, start))
    for start, length in draw(SPANS):
        trace.call(
            "cudaDeviceSynchronize_v3020",
            start,
            start + length,
            thread=THREAD + draw(st.integers(0, 1)),
        )
    for number, (start, length) in enumerate(draw(SPANS)):
        trace.range(f"range{number % 3}", start, start + length)
    trace.range("always", 0, 1)
    return trace


def _analysis(recording: Recording) -> Analysis:
    with TemporaryDirectory() as directory:
        return analysis_from_trace(
            trace_from_sqlite(recording.write(Path(directory) / "trace.sqlite"))
        )


@given(recordings(), st.integers(-50, 250), st.integers(0, 100))
def test_busy_and_idle_are_the_span(recording: Recording, start: int, length: int) -> None:
    analysis = _analysis(recording)
    timeline = analysis.timeline
    assert timeline.busy.total_ns + sum(timeline.idle_by_cause.values()) == timeline.span_ns
    begin = max(start * 1000, timeline.start_ns)
    end = min(max(begin, begin + length * 1000), timeline.end_ns)
    if begin <= end:
        edges = np.array([begin]), np.array([end])
        assert (
            sum(sum_within(each, *edges)[0] for each in (timeline.busy, *timeline.idle.values()))
            == end - begin
        )


@given(recordings(), st.randoms(use_true_random=False))
@pytest.mark.slow
def test_the_order_of_rows_and_stream_names_do_not_matter(
    recording: Recording, random: Random
) -> None:
    before = _analysis(recording)
    for rows in recording.rows.values():
        random.shuffle(rows)
    renamed: dict[object, int] = {1: 31, 2: 12, 3: 23}
    recording.rows["kernels"] = [
        (*row[:3], renamed[row[3]], *row[4:]) for row in recording.rows.get("kernels", [])
    ]
    if not recording.rows["kernels"]:
        del recording.rows["kernels"]
    after = _analysis(recording)
    assert before.timeline.idle_by_cause == after.timeline.idle_by_cause
    assert before.timeline.busy.total_ns == after.timeline.busy.total_ns
    for table in ("kernels", "api", "copies", "ranges"):
        assert getattr(before, table).equals(getattr(after, table)), table
    launches = [each.launches.cast({"name": pl.String}).sort(pl.all()) for each in (before, after)]
    assert launches[0].equals(launches[1])


def test_of_kernels_that_start_at_once_the_first_launched_ends_the_gap() -> None:
    """Whichever row comes first: nothing waits for a launch any more when the other was launched already."""
    splits = []
    for first in (True, False):
        trace = Recording()
        kernels = [(8, 9, (4, 7), 2, THREAD + 1), (8, 8, (8, 12), 1, THREAD)]
        for start, end, launch, stream, thread in kernels if first else kernels[::-1]:
            trace.kernel(NAMES[0], start, end, launch, stream=stream, thread=thread)
        splits.append(_analysis(trace).timeline.idle_by_cause)
    assert splits[0] == splits[1]
    assert {str(cause): ns for cause, ns in splits[0].items() if ns} == {
        "host_wait": 6000,
        "kernel_wait": 1000,
    }


@given(recordings())
def test_ranges_of_one_thread_project_no_more_than_was_launched(recording: Recording) -> None:
    analysis = _analysis(recording)
    total = analysis.trace.kernels.height
    assert (analysis.projection["kernels"] <= total).all()
    assert (analysis.projection["kernel_ns"] <= analysis.kernel_ns).all()


@given(SPANS, SPANS)
def test_interval_algebra_against_points(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    first, second = (unite_intervals(*_edges(spans)) for spans in (one, other))
    points = np.arange(-5, 250)
    held = [
        np.array([any(s <= p < s + n for s, n in spans) for p in points]) for spans in (one, other)
    ]

    def at(intervals) -> np.ndarray:
        return np.array(
            [bool(((intervals.starts <= p) & (p < intervals.ends)).any()) for p in points]
        )

    assert (at(first) == held[0]).all()
    assert (at(intersect_intervals(first, second)) == (held[0] & held[1])).all()
    assert (at(subtract_intervals(first, second)) == (held[0] & ~held[1])).all()
    assert (at(complement_intervals(first, -5, 250)) == ~held[0]).all()
    assert (sum_before(first, points) == np.concatenate([[0], np.cumsum(held[0])[:-1]])).all()


def _edges(spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    starts = np.array([start for start, _ in spans], dtype=np.int64)
    return starts, starts + np.array([length for _, length in spans], dtype=np.int64)


@given(recordings())
@pytest.mark.slow
def test_every_profile_comes_back_from_its_json(recording: Recording) -> None:
    with TemporaryDirectory() as directory:
        trace = trace_from_sqlite(recording.write(Path(directory) / "trace.sqlite"))
    found = profile_from_trace(trace)
    assert record_from_json(json_from_record(found), TraceProfile, "profile") == found
