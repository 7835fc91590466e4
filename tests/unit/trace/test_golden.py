"""Each golden trace says what its phenomenon is; the figures are worked out by hand from tests/golden/phenomena.py."""

from collections.abc import Callable

import polars as pl
import pytest
from tests.golden import phenomena
from tests.golden.nsys_export import THREAD, Recording
from tests.unit.trace.conftest import Judged, judge

from optpipe.core.verdict import Verdict
from optpipe.trace.analysis import analysis_from_trace, select_measured_part
from optpipe.trace.bottleneck import LimitingFactor, find_range_bottleneck
from optpipe.trace.ranges import Stage
from optpipe.trace.read import Trace
from optpipe.trace.records import StageFacts
from optpipe.trace.report import DiffSide, diff_profiles
from optpipe.trace.roofline import GraphCosts, LayerCost, Peaks
from optpipe.trace.tensor_cores import select_layered_part
from optpipe.trace.timeline import IdleCause

US = 1_000
Judge = Callable[[Recording], Judged]


def _idle_us(profile: Judged) -> dict[str, float]:
    return {str(cause): ns / US for cause, ns in profile.measured.split.idle_by_cause.items()}


def _rules(profile: Judged) -> list[str]:
    return [finding.rule for finding in profile.findings]


def test_launch_bound(judged: Judge) -> None:
    profile = judged(phenomena.launch_bound())
    # 12 kernels of 2 µs in 0..290 µs; before each, 1 µs between its launch call's end and its start.
    assert profile.measured.split.busy_ns == 24 * US
    assert _idle_us(profile)["kernel_wait"] == 12
    assert profile.measured.split.span_ns == 290 * US
    assert profile.bottleneck.verdict is LimitingFactor.LAUNCH
    assert _rules(profile)[0] == "launch-gaps"
    assert profile.trace_quality.verdict is Verdict.PASS


def test_kernels_all_the_time_are_the_gpu_and_names_tell_no_more(judged: Judge) -> None:
    profile = judged(phenomena.gpu_bound())
    assert profile.bottleneck.verdict is LimitingFactor.GPU
    assert "by their names matrix 100%" in profile.bottleneck.why
    assert profile.measured.split.busy_ns == 270 * US
    bottleneck = find_range_bottleneck(profile.measured, "iter")
    assert bottleneck is not None
    assert bottleneck.share == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("reading", "writing", "issue", "tensor", "limit"),
    [
        (50, 25, 30, 10, LimitingFactor.MEMORY),
        (10, 10, 40, 75, LimitingFactor.MATH),
        (10, 10, 75, 5, LimitingFactor.MATH),
        (12, 13, 52, 8, LimitingFactor.BELOW_PEAKS),  # ResNet-50 fp16, batch 64, ONNX Runtime on an H200
    ],
)
def test_gpu_metrics_tell_memory_from_arithmetic(judged, reading, writing, issue, tensor, limit):
    trace = phenomena.gpu_bound()
    shares = {
        "DRAM Read Bandwidth": reading,
        "DRAM Write Bandwidth": writing,
        "SM Issue": issue,
        "Tensor Active": tensor,
    }
    for name, share in shares.items():
        trace.metric(50, f"{name} [Throughput %]", share)
        trace.metric(2, f"{name} [Throughput %]", 0)  # before the first kernel
    found = judged(trace).bottleneck
    assert found.verdict is limit
    assert f"Tensor Active {tensor} %" in found.why


def test_kernels_of_a_graph_share_one_launch(judged: Judge) -> None:
    profile = judged(phenomena.graph_replay())
    execution = profile.measured.executions.row(0, named=True)
    assert execution["count"] == 6
    assert execution["launch_ns"] == 2 * 4 * US  # the graph's launch call, once per replay
    assert execution["queue_ns"] == 2 * (1 + 22 + 43) * US
    assert {row.name: row.bottleneck for row in profile.profile.measured.ranges} == {"iter": LimitingFactor.GPU}
    assert "6 kernels of CUDA graphs" in {c.name: c.detail for c in profile.trace_quality.checks}["graph_mode"]


def test_idle_inside_a_waiting_call_is_synchronization(judged: Judge) -> None:
    profile = judged(phenomena.synchronizing())
    assert _idle_us(profile)["synchronization"] == 60
    assert profile.bottleneck.verdict is LimitingFactor.SYNCHRONIZATION
    assert _rules(profile)[0] == "synchronization"


def test_a_waiting_call_of_another_thread_explains_nothing(judged: Judge) -> None:
    # Up to the last kernel's end the launching thread never waits; what follows has no launching thread.
    idle = _idle_us(judged(phenomena.two_threads()))
    assert idle == {"host_wait": 8 + 38, "kernel_wait": 2 + 2, "copy": 0, "synchronization": 30}


def test_exposed_pageable_copies(judged: Judge) -> None:
    profile = judged(phenomena.copying())
    assert _idle_us(profile)["copy"] == 120
    assert profile.bottleneck.verdict is LimitingFactor.COPY
    assert _rules(profile)[0] == "exposed-copies"
    pageable = next(finding for finding in profile.findings if finding.rule == "pageable-copies")
    assert pageable.gain_ns == pytest.approx(60 * US, abs=2)  # twice the rate, without a pinned copy to go by
    copies = profile.measured.copies.row(0, named=True)
    assert (copies["kind"], copies["source_memory"], copies["bytes"]) == ("Host-to-Device", "Pageable", 2_000_000)


def test_overlap_and_concurrency(judged: Judge) -> None:
    measured = judged(phenomena.overlapping()).measured
    assert measured.kernel_ns == 60 * US
    assert measured.split.busy_ns == 50 * US
    assert measured.concurrent_ns == 10 * US
    assert measured.overlapped_copy_ns == 20 * US
    assert measured.split.idle_by_cause[IdleCause.COPY] == 0


def test_a_host_that_is_away_is_cpu_bound(judged: Judge) -> None:
    profile = judged(phenomena.host_busy())
    assert profile.bottleneck.verdict is LimitingFactor.CPU
    assert _rules(profile)[0] == "host-gaps"
    assert profile.findings[0].rows[0].total_ns == 225 * US  # from 280 to the end of the next launch at 505


def test_a_gap_matters_from_a_twentieth_of_the_iteration(judged: Judge) -> None:
    profile = judged(phenomena.gaps_of_many_lengths())
    # the median of 400, 400, 400 and 405 µs, the last to the end of its last kernel
    assert profile.measured.iteration_ns == 400 * US
    gaps = profile.gaps
    assert (gaps.least_ns, gaps.count) == (20 * US, 8)  # 25 and 60 µs, four times; never the 10 and 5 µs
    assert gaps.total_ns == 4 * (25 + 60) * US
    assert [gap.duration_ns for gap in gaps.longest] == [60 * US] * 4 + [25 * US] * 4
    assert gaps.longest[0].by_cause == {IdleCause.KERNEL_WAIT: 60 * US}
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
    assert profile.gaps.least_ns == 50 * US
    assert profile.gaps.count == 0
    assert not {"launch-gaps", "host-gaps", "device-gaps", "synchronization"} & set(_rules(profile))


def test_tensor_cores_by_layer(judged: Judge) -> None:
    cores = judged(phenomena.missed_tensor_cores()).tensor_cores
    assert cores is not None
    assert (cores.basis, cores.eligible, cores.used) == ("layers", 2, 1)
    assert (cores.used_ns, cores.kernel_ns) == (60 * US, 180 * US)
    assert [(each.name, each.time_ns) for each in cores.missed] == [("fc", 120 * US)]
    # H200's data sheet: tf32 494.7, fp32 67 TFLOP/s
    assert cores.missed[0].could_save_ns == pytest.approx(120 * US * (1 - 67 / 494.7), abs=1)


def test_a_changing_kernel_count_withholds_the_iterations(judged: Judge) -> None:
    profile = judged(phenomena.changing_kernel_count())
    assert profile.trace_quality.verdict is Verdict.FAIL
    assert "between 1 and 3 kernels" in profile.trace_quality.withheld["iterations"]
    assert profile.iterations is None


def test_opaque_graphs_withhold_the_verdict(judged: Judge) -> None:
    profile = judged(phenomena.opaque_graph())
    assert profile.bottleneck.verdict is LimitingFactor.WITHHELD
    assert "--cuda-graph-trace=node" in profile.trace_quality.withheld["tensor_cores"]
    assert profile.tensor_cores is None


def test_lost_events_withhold_the_totals(judged: Judge) -> None:
    profile = judged(phenomena.lost_events())
    assert profile.trace_quality.verdict is Verdict.FAIL
    assert "5 of 10 launches have no kernel" in profile.trace_quality.withheld["totals"]
    assert {"totals", "kernels", "idle_by_cause", "tensor_cores"} <= set(profile.trace_quality.withheld)
    for totals in (profile.totals, profile.profile.measured.totals):
        assert {totals.kernel_ns, totals.api_ns, totals.busy_ns, totals.idle_ns} == {None}
    assert profile.profile.measured.kernels == profile.findings == ()
    assert profile.tensor_cores is None
    assert profile.bottleneck.verdict is LimitingFactor.WITHHELD


@pytest.mark.parametrize("table", ["kernels", "copies", "api", "ranges"])
def test_what_ends_before_it_starts_is_left_out_and_nothing_is_judged(judged: Judge, table: str) -> None:
    trace = phenomena.copying() if table == "copies" else phenomena.launch_bound()
    rows = trace.rows[table]
    rows[0] = (rows[0][1], rows[0][0], *rows[0][2:])
    profile = judged(trace)
    assert profile.trace_quality.verdict is Verdict.FAIL
    assert f"1 rows of {table} end before they start" in profile.trace_quality.withheld["totals"]
    assert profile.bottleneck.verdict is LimitingFactor.WITHHELD
    assert profile.profile.measured.kernels == profile.findings == ()
    assert all(
        frame["end_ns"].ge(frame["start_ns"]).all() for frame in (profile.whole.trace.kernels, profile.whole.trace.api)
    )


def test_two_gpus_have_no_busy_time_in_common(judged: Judge) -> None:
    trace = phenomena.launch_bound()
    trace.rows["kernels"] = [(*row[:2], number % 2, *row[3:]) for number, row in enumerate(trace.rows["kernels"])]
    profile = judged(trace)
    assert profile.bottleneck.verdict is LimitingFactor.WITHHELD
    assert "kernels of 2 GPUs" in profile.trace_quality.withheld["idle_by_cause"]
    assert "launch-gaps" not in _rules(profile)
    assert profile.totals.kernel_ns == 24 * US


def test_the_profilers_own_complaint_is_shown(judged: Judge) -> None:
    recording = phenomena.gpu_bound()
    recording.diagnostic("CUDA device: 12 events were lost")
    assert "12 events were lost" in judged(recording).trace_quality.withheld["totals"]


def test_without_gpu_rows_only_the_cpu_side_is_judged(judged: Judge) -> None:
    profile = judged(phenomena.without_gpu())
    assert profile.trace_quality.verdict is Verdict.INCONCLUSIVE
    assert profile.bottleneck.verdict is LimitingFactor.CPU
    assert profile.totals.busy_ns is None
    assert profile.iterations.median_wall_ns == 95 * US


def test_reading_files_is_io_bound(judged: Judge) -> None:
    profile = judged(phenomena.reading_files())
    assert profile.bottleneck.verdict is LimitingFactor.IO
    assert profile.bottleneck.share == pytest.approx(0.8)


def test_many_threads_that_read_are_io_bound_by_their_own_time(judged: Judge) -> None:
    """Four threads that read all the time are no 400 %."""
    trace = phenomena.reading_files()
    for thread in range(1, 4):
        for iteration in range(3):
            trace.os_call("read", 100 * iteration + 5, 100 * iteration + 85, thread=THREAD + thread)
    profile = judged(trace)
    assert profile.bottleneck.verdict is LimitingFactor.IO
    assert profile.bottleneck.shares == pytest.approx({"I/O": 0.8, "CPU": 0.2})


def test_calls_that_were_traced_and_did_not_happen_are_not_asked_for_again(judged: Judge) -> None:
    trace = phenomena.without_gpu()
    trace.os_call("OS runtime libraries profiling started", 0, 0)
    profile = judged(trace)
    assert profile.bottleneck.verdict is LimitingFactor.CPU
    assert "os-calls" not in profile.bottleneck.why
    assert profile.measured.os_runtime.is_empty()


def test_capture_of_a_graph_is_no_lost_event(judged: Judge) -> None:
    recording = phenomena.gpu_bound()
    recording.call("cudaStreamBeginCapture_v10000", 400, 401)
    for number in range(20):
        recording.call("cudaLaunchKernel_v7000", 402 + number, 403 + number)
    recording.call("cudaStreamEndCapture_v10000", 430, 431)
    assert judged(recording).trace_quality.verdict is Verdict.PASS


def test_layers_may_be_marked_in_iterations_apart(judged: Judge) -> None:
    profile = judged(phenomena.layers_apart())
    assert profile.measured.iterations.height == 2
    assert profile.measured.kernel_ns == 140 * US  # what the layers' own iterations take is not counted
    cores = profile.tensor_cores
    assert cores is not None
    assert (cores.basis, cores.eligible, cores.used) == ("layers", 2, 1)
    assert [each.name for each in cores.missed] == ["fc"]


def test_layers_apart_are_compared_too(read: Callable[[Recording], Trace]) -> None:
    """One recording against itself: the layers lie in iterations of their own, outside the measured range."""
    whole = analysis_from_trace(read(phenomena.layers_apart()))
    measured = select_measured_part(whole)
    side = DiffSide(measured, select_layered_part(whole, measured))
    assert {(row.name, row.change) for row in diff_profiles(side, side).layers} == {("conv1", "same"), ("fc", "same")}
    assert diff_profiles(DiffSide(measured), DiffSide(measured)).layers == ()


def test_what_only_the_host_did_is_compared_by_range_and_by_the_times_of_its_layers(read):
    measured = select_measured_part(analysis_from_trace(read(phenomena.without_gpu())))
    before = DiffSide(measured, layer_ns={"conv": 30_000.0, "fc": 8_000.0}, unprofiled_iteration_ns=90_000.0)
    after = DiffSide(measured, layer_ns={"conv": 15_000.0, "fc": 8_000.0}, unprofiled_iteration_ns=60_000.0)
    found = diff_profiles(before, after)
    assert (found.host_ns, found.unprofiled) == ((90_000.0, 60_000.0), True)
    assert [(row.name, row.change) for row in found.layers] == [("conv", "faster"), ("fc", "same")]
    assert diff_profiles(DiffSide(measured), after).host_ns == (
        100_000.0,
        100_000.0,
    )  # not both are known without the profiler


def test_ranges_of_libraries_on_other_threads_are_no_iterations(judged: Judge) -> None:
    """DALI opens ranges of its own on its worker threads, outside of anything on this one."""
    recording = phenomena.gpu_bound()
    for number in range(50):
        recording.range("DALI:[DALI][CPU op] Run decoders__Image", 5 * number, 5 * number + 4, thread=THREAD + 3)
    iterations = judged(recording).measured.iterations
    assert iterations["name"].cast(pl.String).unique().to_list() == ["iter"]
    assert iterations.height == 3


def test_setup_and_warm_up_of_somebodys_program_decide_nothing(judged: Judge) -> None:
    profile = judged(phenomena.setup_ahead_of_numbered_iterations())
    assert profile.measured.scope == "iterations 2 to 4 (iteration N)"
    assert profile.measured.iterations["kernels"].to_list() == [3, 3, 3]
    assert profile.measured.split.span_ns == 290 * US  # from 1200 to 1490
    assert profile.measured.split.busy_ns == 18 * US
    assert profile.bottleneck.verdict is LimitingFactor.LAUNCH
    assert profile.whole.split.span_ns == 650 * US  # the first launch is the first thing recorded, at 840
    assert profile.whole.ranges.filter(pl.col("name") == "iteration N")["count"].item() == 4


@pytest.mark.parametrize("name", ["iteration N", "iteration 2"])
def test_numbered_iterations_are_asked_for_together_or_one_by_one(read, name):
    part = judge(read(phenomena.setup_ahead_of_numbered_iterations()), name).measured
    assert part.trace.kernels.height == (12 if name == "iteration N" else 3)


def test_numbered_layers_are_no_iterations(judged: Judge) -> None:
    trace = Recording()
    for number in range(3):
        trace.range(f"layer{number}", 100 * number, 100 * number + 90)
        trace.kernel(phenomena.GEMM, 100 * number + 6, 100 * number + 8, launch=(100 * number + 1, 100 * number + 5))
    profile = judged(trace)
    assert (profile.measured.scope, profile.measured.iterations.height) == ("trace", 0)


def test_who_holds_pythons_lock_is_no_iteration(judged: Judge) -> None:
    trace = phenomena.launch_bound()
    for number in range(4):
        trace.range("GIL Trace:Holding GIL", 70 * number, 70 * number + 69, thread=THREAD + 1)
    assert judged(trace).measured.iterations["family"].unique().to_list() == ["iter"]


def test_kernels_launched_by_other_threads_are_not_counted_by_iteration(judged: Judge) -> None:
    recording = Recording()
    for iteration in range(3):
        begin = 100 * iteration
        recording.range("iter", begin, begin + 90)
        recording.kernel(phenomena.GEMM, begin + 6, begin + 80, launch=(begin + 1, begin + 5), thread=THREAD + 1)
    quality = judged(recording).trace_quality
    assert quality.verdict is Verdict.INCONCLUSIVE
    assert "threads other than" in quality.withheld["iterations.kernels"]


def test_what_a_stage_costs_once_and_its_longest_part(read: Callable[[Recording], Trace]) -> None:
    trace = Recording()
    trace.range("optpipe.quantize", 0, 100)
    trace.range("calibrate on 500 images", 10, 80)
    profile = judge(read(trace), "optpipe.quantize", StageFacts(Stage.QUANTIZE, expects_gpu=False))
    [finding] = profile.findings
    assert (finding.rule, finding.gain_ns) == ("paid-once", 100 * US)
    assert finding.evidence == "100 µs on the CPU, of which calibrate on 500 images 70.0 µs"
    assert "--method max" in finding.advice


def test_the_busiest_operator_of_a_pipeline(read: Callable[[Recording], Trace]) -> None:
    """Decoding for 60 µs on each of two threads, resizing for 40 µs on one."""
    trace = Recording()
    trace.range("optpipe.measure", 0, 100)
    for thread in (THREAD, THREAD + 1):
        trace.range("DALI:[DALI][CPU op] Run decoders__Image", 10, 70, thread)
    trace.range("DALI:[DALI][CPU op] Run Resize", 70, 90)
    trace.range("DALI:[DALI][CPU op] Run Resize", 91, 111)
    profile = judge(read(trace), facts=StageFacts(Stage.PREPROCESS, expects_gpu=False))
    [finding] = profile.findings
    assert (finding.rule, finding.gain_ns) == ("busiest-operator", 60 * US)
    assert "decoders__Image takes 75% of the operators' time, on 2 threads" in finding.evidence


def test_idle_time_that_the_profiler_made_limits_nothing(read: Callable[[Recording], Trace]) -> None:
    """Three iterations of 100 µs, 8 of them busy: 10 µs without the profiler leave the GPU 2 µs to wait."""
    recorded = read(phenomena.launch_bound())
    assert judge(recorded).bottleneck.verdict is LimitingFactor.LAUNCH
    profile = judge(recorded, facts=StageFacts(unprofiled_iteration_ns=10_000))
    assert profile.bottleneck.verdict is LimitingFactor.GPU
    assert profile.bottleneck.share == pytest.approx(24 / 30)
    assert profile.bottleneck.busy_share == pytest.approx(24 / 30)
    assert sum(profile.bottleneck.shares.values()) == pytest.approx(1)
    assert sum(each.gain_share for each in profile.findings if each.host_times) <= 6 / 30 + 1e-3
    assert judge(recorded).bottleneck.idle_scale == 1


@pytest.mark.parametrize(
    ("backend", "options", "said", "unsaid"),
    [
        ("onnxruntime", {"cuda_graph": False}, "onnxruntime.cuda_graph=true", "--backend onnxruntime"),
        ("onnxruntime", {"cuda_graph": True}, "--backend torch,inductor", "cuda_graph"),
        ("torch", {"cuda_graph": True, "fuse": False}, "torch.fuse=true", "onnxruntime"),
        (None, {}, "torch.compile", "another runtime"),
    ],
)
def test_advice_is_not_what_is_done_already(read, backend, options, said, unsaid):
    trace = phenomena.launch_bound()
    trace.kernel(phenomena.RELU, 250, 280, launch=(240, 245))
    found = judge(read(trace), facts=StageFacts(Stage.INFERENCE, backend, options)).findings
    assert {"launch-gaps", "unfused-kernels"} <= {each.rule for each in found}
    advice = " ".join(each.advice for each in found if each.rule in ("launch-gaps", "unfused-kernels", "device-gaps"))
    assert said in advice
    assert unsaid not in advice


def test_compiled_code_is_not_told_to_compile(read: Callable[[Recording], Trace]) -> None:
    trace = phenomena.launch_bound()
    trace.kernel("triton_poi_fused_add_relu_0", 250, 280, launch=(240, 245))
    advice = " ".join(each.advice for each in judge(read(trace)).findings)
    assert "torch.compile" not in advice
    assert "the code is compiled" in advice


def test_a_preprocessing_stage_on_a_gpu_gets_advice_of_its_own(read: Callable[[Recording], Trace]) -> None:
    """Short kernels of nvJPEG, each launched long before it starts: no graph and no compiler helps there."""
    trace = Recording()
    for number in range(6):
        at = 30 * number
        trace.kernel("void nvjpeg::ycbcr_to_format_kernel_roi<1>(int)", at + 26, at + 28, launch=(at, at + 2))
    recorded = read(trace)
    profile = judge(recorded, facts=StageFacts(Stage.PREPROCESS))
    assert profile.bottleneck.verdict is LimitingFactor.LAUNCH
    advice, elsewhere = ({each.rule: each.advice for each in found.findings} for found in (profile, judge(recorded)))
    assert "optpipe preprocess" in advice["device-gaps"]
    assert "cuda_graph" not in " ".join(advice.values())
    assert "fewer, larger kernels" in elsewhere["device-gaps"]


def test_layers_above_their_bound_on_a_cpu(read: Callable[[Recording], Trace]) -> None:
    trace = Recording()
    trace.range("optpipe.measure", 0, 100)
    for begin in (1, 51):
        trace.range("optpipe.iteration", begin, begin + 48)
    peaks = Peaks("CPU", "measured", {"fp32": 1e11}, 1e10)
    costs = (LayerCost("conv", "Conv", "fp32", 500_000, 10), LayerCost("relu", "Relu", "fp32", 0, 10))
    graph = GraphCosts(costs, peaks, 1, layer_ns={"conv": 30_000.0, "relu": 0.5})  # bounds: 10 µs and 1 ns
    profile = judge(read(trace), None, StageFacts(Stage.INFERENCE, expects_gpu=False), graph)
    [finding] = profile.findings
    assert (finding.rule, finding.gain_ns) == ("slow-layers", 2 * 20 * US)
    assert "--precision int8" in finding.advice


def test_gaps_are_no_longer_than_an_iteration_without_the_profiler_leaves_room_for(read):
    """24 of 290 µs are work and 266 gaps; where an iteration takes 40 µs without the profiler, 96 of 120 µs remain."""
    recorded = read(phenomena.launch_bound())
    under, without = (
        {each.rule: each for each in judge(recorded, facts=StageFacts(unprofiled_iteration_ns=ns)).findings}
        for ns in (None, 40_000)
    )
    assert set(without) <= set(under)
    for rule, found in without.items():
        assert found.gain_share == pytest.approx(found.gain_ns / (3 * 40 * US))
        assert found.gain_ns == pytest.approx(
            under[rule].gain_ns * (96 * US) / judge(recorded).measured.split.idle_ns, abs=2
        )
        assert "without the profiler" in found.evidence
    assert sum(each.gain_ns for each in without.values()) <= 96 * US
    # with 8 µs, all of it kernels, nothing remains to be gained
    nothing = judge(recorded, facts=StageFacts(unprofiled_iteration_ns=8_000)).findings
    assert not {each.rule for each in nothing} & set(without)


def test_layers_cannot_gain_more_than_the_whole_is_above_its_bound(read: Callable[[Recording], Trace]) -> None:
    """Layers noted one by one take longer than they do together: 30 µs against 10, where all takes 12 µs, or 9."""
    trace = Recording()
    trace.range("optpipe.measure", 0, 100)
    for begin in (1, 51):
        trace.range("optpipe.iteration", begin, begin + 48)
    costs = (LayerCost("conv", "Conv", "fp32", 500_000, 10),)
    graph = GraphCosts(costs, Peaks("CPU", "measured", {"fp32": 1e11}, 1e10), 1, layer_ns={"conv": 30_000.0})
    recorded = read(trace)
    shorter, longer = (
        StageFacts(Stage.INFERENCE, expects_gpu=False, unprofiled_iteration_ns=ns) for ns in (9_000, 12_000)
    )
    [finding] = judge(recorded, None, longer, graph).findings
    assert finding.gain_ns == 2 * 2 * US
    assert judge(recorded, None, shorter, graph).findings == ()
