"""A profile as people read it: every golden trace can be shown, the answer comes first, and whole texts are compared."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.console import assert_golden, text_of
from tests.golden import phenomena
from tests.golden.nsys_export import Recording
from tests.unit.trace.conftest import Judged

from optpipe.trace.analysis import analysis_from_trace, select_measured_part
from optpipe.trace.document import document_from_profile, document_from_stages
from optpipe.trace.document_details import draw_metrics
from optpipe.trace.read import Trace
from optpipe.trace.report import (
    ModelProfileDocument,
    StageProfile,
    StageSubject,
    TraceProfile,
    profile_from_trace,
)
from optpipe.trace.roofline import GraphCosts, NodeCost, Peaks
from optpipe.trace.rules import StageFacts

BUILDERS = [
    value
    for value in vars(phenomena).values()
    if callable(value) and value.__module__ == phenomena.__name__
]


def _profile_with_graph(trace: Trace) -> TraceProfile:
    """20 µs of arithmetic in 100; 30 µs of memory where the ReLU is fused, 80 where it is not."""
    peaks = Peaks("a device", "measured", {"fp32": 1e12}, 1e9)
    conv = NodeCost("conv", "Conv", "fp32", macs=10_000_000, bytes=60_000, fused_bytes=30_000)
    relu = NodeCost("relu", "Relu", "fp32", macs=0, bytes=20_000, fused_bytes=0)
    graph = GraphCosts((conv, relu), peaks, 1, edge_bytes=10_000, layer_ns={"conv": 80_000.0})
    return profile_from_trace(trace, facts=StageFacts(unprofiled_iteration_ns=100_000), graph=graph)


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_the_answer_comes_first(
    build: Callable[[], Recording], read: Callable[[Recording], Trace]
) -> None:
    text = text_of(document_from_profile(profile_from_trace(read(build()))))
    assert text.startswith(("limited by ", "no verdict: "))


@pytest.mark.parametrize(
    "build",
    [
        phenomena.overlapping,
        phenomena.lost_events,
        phenomena.graph_replay,
        phenomena.setup_ahead_of_numbered_iterations,
    ],
    ids=lambda build: build.__name__,
)
def test_profiles_of_golden_traces(
    build: Callable[[], Recording], read: Callable[[Recording], Trace]
) -> None:
    text = text_of(document_from_profile(profile_from_trace(read(build()))))
    assert_golden(text, f"profile-{build.__name__.replace('_', '-')}.txt")


def test_the_profile_of_a_real_gpu_and_one_with_a_roofline(
    sample: Judged, read: Callable[[Recording], Trace]
) -> None:
    assert_golden(text_of(document_from_profile(sample.profile)), "profile-h200.txt")
    profile = _profile_with_graph(read(phenomena.gpu_bound()))
    assert_golden(text_of(document_from_profile(profile)), "profile-roofline.txt")


@pytest.mark.parametrize(
    ("unprofiled_ns", "name"), [(50_000, "distorted"), (200_000, "contradiction")]
)
def test_times_that_cannot_be_trusted_are_not_printed(read, unprofiled_ns, name):
    """Iterations of 100 µs under the profiler, and 50 µs without: shares stay, times of the host go; or 200 µs."""
    facts = StageFacts(unprofiled_iteration_ns=unprofiled_ns)
    profile = profile_from_trace(read(phenomena.launch_bound()), facts=facts)
    assert profile.iterations is not None
    assert (profile.iterations.period_ns, profile.gaps) == (None, ())
    assert_golden(text_of(document_from_profile(profile)), f"profile-{name}.txt")


def test_stages_of_one_model(read: Callable[[Recording], Trace]) -> None:
    subject, facts = (
        StageSubject("onnxruntime fp32 batch 1", "inference"),
        StageFacts(unprofiled_iteration_ns=50_000),
    )
    first = StageProfile(
        subject, "a", None, facts, _profile_with_graph(read(phenomena.gpu_bound()))
    )
    slowed = profile_from_trace(read(phenomena.launch_bound()), facts=facts)
    second = replace(
        first, subject=replace(subject, name="onnxruntime fp16 batch 1"), profile=slowed
    )
    doubtful = profile_from_trace(
        read(phenomena.launch_bound()), facts=StageFacts(unprofiled_iteration_ns=200_000)
    )
    third = replace(
        first, subject=replace(subject, name="onnxruntime int8 batch 1"), profile=doubtful
    )
    failed = {"preprocess dali batch 1": "no space left"}
    record = ModelProfileDocument((first, second, third), failed, run_dir=Path("runs/profile-1"))
    assert_golden(text_of(document_from_stages(record)), "profile-stages.txt")
    assert f"{subject.name} in full" in text_of(
        document_from_stages(replace(record, main=subject.name))
    )


def test_a_gain_on_the_gpu_is_a_share_of_the_time_without_the_profiler(
    read: Callable[[Recording], Trace],
) -> None:
    """12 kernels of 2 µs with ten blocks each, for a GPU of 132: of 290 µs recorded, or 150 µs as it really takes."""
    recording = phenomena.launch_bound()
    recording.rows["kernels"] = [(*row[:7], 10, *row[8:]) for row in recording.rows["kernels"]]
    trace = read(recording)
    unused_ns = 12 * 2_000 * (1 - 10 / 132)
    for unprofiled_ns, time_ns in ((None, 290_000), (50_000, 150_000)):
        found = profile_from_trace(
            trace, facts=StageFacts(unprofiled_iteration_ns=unprofiled_ns)
        ).findings
        share = {each.rule: each.gain_share for each in found}
        assert share["underfilled-gpu"] == pytest.approx(unused_ns / time_ns, rel=1e-3)
        assert share["launch-gaps"] < 0.9  # host times are a share of what was recorded


def test_gpu_metrics_are_drawn_over_the_measured_time(read: Callable[[Recording], Trace]) -> None:
    trace = phenomena.gpu_bound()
    for at in range(0, 400, 5):
        trace.metric("SMs Active [Throughput %]", at, 80)
        trace.metric("DRAM Read Bandwidth [Throughput %]", at, 0)
        trace.metric("GPC Clock Frequency [MHz]", at, 1980)
    measured = select_measured_part(analysis_from_trace(read(trace)))
    [figure] = draw_metrics(measured, ())
    assert figure.title == "GPU activity"
    assert [name for name, *_ in figure.legend] == ["SMs Active"], "what is always 0 has no line"
    without = select_measured_part(analysis_from_trace(read(phenomena.gpu_bound())))
    assert list(draw_metrics(without, ())) == []
