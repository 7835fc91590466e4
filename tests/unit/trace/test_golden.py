"""Each golden trace says what its phenomenon is; the figures are worked out by hand from tests/golden/phenomena.py."""

from collections.abc import Callable

import pytest
from tests.golden import phenomena
from tests.golden.nsys_export import THREAD, Recording
from tests.unit.trace.conftest import Judged, judge

from optpipe.core.verdict import Verdict
from optpipe.trace.analysis import IdleCause
from optpipe.trace.bottleneck import LimitingFactor
from optpipe.trace.nsys import Stage
from optpipe.trace.read import Trace
from optpipe.trace.roofline import GraphCosts, NodeCost, Peaks
from optpipe.trace.rules import StageFacts

US = 1_000
Judge = Callable[[Recording], Judged]


def _rules(profile: Judged) -> list[str]:
    return [finding.rule for finding in profile.findings]


@pytest.mark.parametrize(
    ("build", "limit", "first", "busy_us", "idle_us"),
    [
        # 12 kernels of 2 µs in 0..290 µs; before each, 1 µs between its launch call's end and its start
        (phenomena.launch_bound, LimitingFactor.LAUNCH, "launch-gaps", 24, (254, 12, 0, 0)),
        (phenomena.gpu_bound, LimitingFactor.GPU, "launch-gaps", 270, (26, 3, 0, 0)),
        (phenomena.graph_replay, LimitingFactor.GPU, "launch-gaps", 120, (73, 6, 0, 0)),
        (
            phenomena.synchronizing,
            LimitingFactor.SYNCHRONIZATION,
            "synchronization",
            20,
            (16, 2, 0, 60),
        ),
        # up to the last kernel's end the launching thread never waits; what follows has no launching thread
        (phenomena.two_threads, LimitingFactor.LAUNCH, "launch-gaps", 20, (8 + 38, 2 + 2, 0, 30)),
        (phenomena.copying, LimitingFactor.COPY, "exposed-copies", 40, (33, 2, 120, 0)),
        (phenomena.overlapping, LimitingFactor.GPU, "unfused-kernels", 50, (1, 9, 0, 0)),
        (phenomena.host_busy, LimitingFactor.CPU, "host-gaps", 210, (665, 15, 0, 0)),
        # setup and warm-up of somebody's program decide nothing
        (
            phenomena.setup_ahead_of_numbered_iterations,
            LimitingFactor.LAUNCH,
            "launch-gaps",
            18,
            (263, 9, 0, 0),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_where_the_time_of_each_phenomenon_goes(judged, build, limit, first, busy_us, idle_us):
    """Idle time by cause: the host, the launched kernel, a copy, a synchronizing call."""
    profile = judged(build())
    timeline = profile.measured.timeline
    assert timeline.busy.total_ns == busy_us * US
    assert tuple(timeline.idle_by_cause[cause] / US for cause in IdleCause) == idle_us
    assert (profile.bottleneck.verdict, _rules(profile)[0]) == (limit, first)


def test_pageable_copies(judged: Judge) -> None:
    profile = judged(phenomena.copying())
    pageable = next(finding for finding in profile.findings if finding.rule == "pageable-copies")
    assert pageable.gain_ns == pytest.approx(
        60 * US, abs=2
    )  # twice the rate, without a pinned copy to go by
    copies = profile.measured.copies.row(0, named=True)
    assert (copies["kind"], copies["source_memory"], copies["bytes"]) == (
        "Host-to-Device",
        "Pageable",
        2_000_000,
    )


def test_overlap_and_concurrency(judged: Judge) -> None:
    measured = judged(phenomena.overlapping()).measured
    assert (measured.kernel_ns, measured.overlapped_copy_ns) == (60 * US, 20 * US)


def test_a_gap_matters_from_a_twentieth_of_the_iteration(judged: Judge) -> None:
    profile = judged(phenomena.gaps_of_many_lengths())
    # the median of 400, 400, 400 and 405 µs, the last to the end of its last kernel
    assert profile.measured.iteration_ns == 400 * US
    # 25 and 60 µs, four times; never the 10 and 5 µs
    assert [gap.duration_ns for gap in profile.gaps] == [60 * US] * 4 + [25 * US] * 4
    assert profile.gaps[0].by_cause == {IdleCause.KERNEL_WAIT: 60 * US}
    assert "device-gaps" in _rules(profile)


def test_gaps_that_do_not_matter_are_no_finding(judged: Judge) -> None:
    """2 µs between kernels of 98 µs: 2 % of the iteration, and never a gap of its own."""
    trace = Recording()
    for iteration in range(3):
        begin = 1000 * iteration
        trace.range("iter", begin, begin + 999)
        for number in range(10):
            at = begin + 100 * number
            trace.kernel(phenomena.GEMM, at + 4, at + 102, launch=(at + 0.5, at + 1))
    profile = judged(trace)
    assert profile.gaps == ()
    assert not {"launch-gaps", "host-gaps", "device-gaps", "synchronization"} & set(_rules(profile))


def test_tensor_cores_by_layer(judged: Judge) -> None:
    profile = judged(phenomena.missed_tensor_cores())
    assert profile.measured.iterations.height == 2
    assert profile.measured.kernel_ns == 180 * US
    cores = profile.tensor_cores
    assert (cores.basis, cores.eligible, cores.used, cores.used_ns) == ("layers", 2, 1, 60 * US)
    assert [(each.name, each.time_ns) for each in cores.missed] == [("fc", 120 * US)]
    assert cores.missed[0].could_save_ns == 60 * US  # no peaks are known


def _end_before_start(table: str) -> Recording:
    trace = phenomena.copying() if table == "copies" else phenomena.launch_bound()
    rows = trace.rows[table]
    rows[0] = (rows[0][1], rows[0][0], *rows[0][2:])
    return trace


def _with_complaint() -> Recording:
    trace = phenomena.gpu_bound()
    trace.diagnostic("CUDA device: 12 events were lost")
    return trace


ALL_EVENTS = ("totals", "kernels", "idle_by_cause", "tensor_cores")


@pytest.mark.parametrize(
    ("trace", "views", "said"),
    [
        (phenomena.opaque_graph(), ALL_EVENTS[1:], "--cuda-graph-trace=node"),
        (phenomena.lost_events(), ALL_EVENTS, "5 of 10 launches have no kernel"),
        (_with_complaint(), ALL_EVENTS, "12 events were lost"),
        *(
            (_end_before_start(table), ALL_EVENTS, f"1 rows of {table} end before they start")
            for table in ("kernels", "copies", "api", "ranges")
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_missing_or_impossible_withholds_what_rests_on_it(judged, trace, views, said):
    profile = judged(trace)
    assert profile.trace_quality.verdict is Verdict.FAIL
    assert all(said in profile.trace_quality.withheld[view] for view in views)
    assert profile.bottleneck.verdict is LimitingFactor.WITHHELD
    assert profile.profile.measured.kernels == profile.findings == ()
    assert profile.tensor_cores is None
    if "totals" in views:
        for totals in (profile.profile.measured.totals,):
            assert {totals.kernel_ns, totals.api_ns, totals.busy_ns, totals.idle_ns} == {None}
    for frame in (profile.whole.trace.kernels, profile.whole.trace.api):
        assert frame["end_ns"].ge(frame["start_ns"]).all()


def test_a_changing_kernel_count_withholds_the_iterations(judged: Judge) -> None:
    profile = judged(phenomena.changing_kernel_count())
    assert profile.trace_quality.verdict is Verdict.FAIL
    assert "between 1 and 3 kernels" in profile.trace_quality.withheld["iterations"]
    assert profile.iterations is None


def test_two_gpus_have_no_busy_time_in_common(judged: Judge) -> None:
    trace = phenomena.launch_bound()
    trace.rows["kernels"] = [
        (*row[:2], number % 2, *row[3:]) for number, row in enumerate(trace.rows["kernels"])
    ]
    profile = judged(trace)
    assert profile.bottleneck.verdict is LimitingFactor.WITHHELD
    assert "kernels of 2 GPUs" in profile.trace_quality.withheld["idle_by_cause"]
    assert "launch-gaps" not in _rules(profile)
    assert profile.profile.measured.totals.kernel_ns == 24 * US


def test_without_gpu_rows_only_the_cpu_side_is_judged(judged: Judge) -> None:
    profile = judged(phenomena.without_gpu())
    assert profile.trace_quality.verdict is Verdict.INCONCLUSIVE
    assert profile.bottleneck.verdict is LimitingFactor.CPU
    assert profile.profile.measured.totals.busy_ns is None


def test_capture_of_a_graph_is_no_lost_event(judged: Judge) -> None:
    recording = phenomena.gpu_bound()
    recording.call("cudaStreamBeginCapture_v10000", 400, 401)
    for number in range(20):
        recording.call("cudaLaunchKernel_v7000", 402 + number, 403 + number)
    recording.call("cudaStreamEndCapture_v10000", 430, 431)
    assert judged(recording).trace_quality.verdict is Verdict.PASS


@pytest.mark.parametrize(
    "name",
    ["DALI:[DALI][CPU op] Run decoders__Image", "GIL Trace:Holding GIL"],
    ids=["library", "lock"],
)
def test_ranges_of_libraries_on_other_threads_are_no_iterations(judged: Judge, name: str) -> None:
    recording = phenomena.gpu_bound()
    for number in range(50):
        recording.range(name, 5 * number, 5 * number + 4, thread=THREAD + 3)
    assert judged(recording).measured.iterations["family"].to_list() == ["iter"] * 3


def test_setup_and_warm_up_are_outside_of_what_is_measured(judged: Judge) -> None:
    profile = judged(phenomena.setup_ahead_of_numbered_iterations())
    assert profile.measured.scope == "iterations 2 to 4 (iteration N)"
    assert profile.measured.iterations["kernels"].to_list() == [3, 3, 3]
    assert profile.measured.timeline.span_ns == 290 * US  # from 1200 to 1490
    assert (
        profile.whole.timeline.span_ns == 650 * US
    )  # the first launch is the first thing recorded, at 840


def test_numbered_layers_are_no_iterations(judged: Judge) -> None:
    trace = Recording()
    for number in range(3):
        trace.range(f"layer{number}", 100 * number, 100 * number + 90)
        trace.kernel(
            phenomena.GEMM,
            100 * number + 6,
            100 * number + 8,
            launch=(100 * number + 1, 100 * number + 5),
        )
    profile = judged(trace)
    assert (profile.measured.scope, profile.measured.iterations.height) == ("trace", 0)


def test_kernels_launched_by_other_threads_are_not_counted_by_iteration(judged: Judge) -> None:
    recording = Recording()
    for iteration in range(3):
        begin = 100 * iteration
        recording.range("iter", begin, begin + 90)
        recording.kernel(
            phenomena.GEMM, begin + 6, begin + 80, launch=(begin + 1, begin + 5), thread=THREAD + 1
        )
    quality = judged(recording).trace_quality
    assert quality.verdict is Verdict.INCONCLUSIVE
    assert "threads other than" in quality.withheld["iterations.kernels"]


def test_layers_above_their_bound_on_a_cpu(read: Callable[[Recording], Trace]) -> None:
    """Layers noted one by one take longer than they do together: 30 µs against 10, where all takes 12 µs, or 9."""
    trace = Recording()
    trace.range("optpipe.measure", 0, 100)
    for begin in (1, 51):
        trace.range("optpipe.iteration", begin, begin + 48)
    recorded, peaks = read(trace), Peaks("CPU", "measured", {"fp32": 1e11}, 1e10)
    costs = (NodeCost("conv", "Conv", "fp32", 500_000, 10), NodeCost("relu", "Relu", "fp32", 0, 10))
    graph = GraphCosts(
        costs, peaks, 1, layer_ns={"conv": 30_000.0, "relu": 0.5}
    )  # bounds: 10 µs and 1 ns
    for whole_ns, gain_us in ((None, 20), (12_000, 2), (9_000, None)):
        facts = StageFacts(Stage.INFERENCE, expects_gpu=False, unprofiled_iteration_ns=whole_ns)
        found = judge(recorded, None, facts, graph).findings
        assert [(each.rule, each.gain_ns) for each in found] == (
            [("slow-layers", 2 * gain_us * US)] if gain_us else []
        )
        assert all("--precision int8" in each.advice for each in found)


def test_idle_time_that_the_profiler_made_limits_nothing_and_saves_nothing(
    read: Callable[[Recording], Trace],
) -> None:
    """24 of 290 µs are work and 266 gaps; where an iteration takes 40 µs without the profiler, 96 of 120 µs remain."""
    trace, taken = read(phenomena.launch_bound()), (None, 40_000, 10_000, 8_000)
    profiles = {ns: judge(trace, facts=StageFacts(unprofiled_iteration_ns=ns)) for ns in taken}
    under, without, nothing = (
        {each.rule: each for each in profiles[ns].findings} for ns in (None, 40_000, 8_000)
    )
    assert set(without) <= set(under)
    idle_ns = sum(profiles[None].measured.timeline.idle_by_cause.values())
    for rule, found in without.items():
        assert found.gain_share == pytest.approx(found.gain_ns / (3 * 40 * US))
        assert found.gain_ns == pytest.approx(under[rule].gain_ns * (96 * US) / idle_ns, abs=2)
        assert "without the profiler" in found.evidence
    assert sum(each.gain_ns for each in without.values()) <= 96 * US
    assert not set(nothing) & set(
        without
    )  # with 8 µs, all of it kernels, nothing remains to be gained
    # with 10 µs the GPU has 2 to wait
    bottleneck = profiles[10_000].bottleneck
    assert (profiles[None].bottleneck.verdict, profiles[None].bottleneck.idle_scale) == (
        LimitingFactor.LAUNCH,
        1,
    )
    assert bottleneck.verdict is LimitingFactor.GPU
    assert bottleneck.share == bottleneck.busy_share == pytest.approx(24 / 30)
    assert sum(bottleneck.shares.values()) == pytest.approx(1)
    assert (
        sum(each.gain_share for each in profiles[10_000].findings if each.host_times)
        <= 6 / 30 + 1e-3
    )
