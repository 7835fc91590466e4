"""Findings: one small function per type. Each gives numbers, rows of the trace, and the command to try next, or nothing.

Gains are upper bounds over the measured part: the time that would be gone if the cause were.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from optpipe.core.units import format_bytes, format_duration
from optpipe.trace.findings.bottleneck import GAP_NS, describe_gaps, find_long_gaps, has_notable_gaps
from optpipe.trace.findings.records import FindingRow, ProfileFinding, StageFacts
from optpipe.trace.layers.roofline import Roofline
from optpipe.trace.layers.tensor_cores import LayerUse, TensorCores
from optpipe.trace.ranges import Stage
from optpipe.trace.timeline.analysis import Analysis
from optpipe.trace.timeline.kernels import shorten_name
from optpipe.trace.timeline.timeline import WAITING_CALLS, IdleCause, TimeIntervals, subtract_intervals

_WORTH_SHARE = 0.02
"""Findings worth less than 2 % of the measured time are not worth a line."""
_WORTH_GAP_SHARE = 0.005
"""A gap may matter to one iteration of hundreds; below half a percent of all it is worth no line either."""
_HOST_RULES = frozenset(
    {"launch-gaps", "host-gaps", "device-gaps", "synchronization", "allocations", "first-iteration", "operating-system"}
)
"""Rules whose evidence is times of the host, which a profiler's overhead distorts."""
_UNDER_PROFILER = frozenset({"allocations", "first-iteration", "operating-system", "busiest-operator"})
"""Rules whose gain was timed on the host under the profiler, so that it is a part of the time there."""
WITHOUT_PROFILER = "; without the profiler"
"""What follows in an evidence holds although the profiler slowed the host."""
_SMALL_COPY_BYTES = 64 * 1024
ROWS_SHOWN = 5
_FIRST_SHARE = 0.2
_ALLOCATIONS = (
    r"^(cudaMalloc|cudaFree|cudaHostAlloc|cudaFreeHost|cudaMallocHost|cuMemAlloc|cuMemFree|cuModuleLoad|cuLibraryLoad|"
    r"cudaStreamCreate|cudaEventCreate)"
)
_OPERATOR = r"\[(?:CPU|GPU|Mixed|MIXED) op\] Run (.+)$"
"""DALI's own ranges around each of its operators."""
_KEPT_FOR = {
    Stage.EXPORT: "the model, its weights, shapes and opset",
    Stage.QUANTIZE: "the graph, precision, method and calibration images",
    Stage.BUILD: "the graph, backend and options",
}


@dataclass(frozen=True, slots=True)
class RuleContext:
    """What a rule may look at."""

    measured: Analysis
    facts: StageFacts
    tensor_cores: TensorCores | None
    roofline: Roofline | None
    undisturbed_ns: float | None
    """One iteration without the profiler, where it slowed the host too much for the times under it to be trusted."""
    idle_scale: float
    """What is left of the GPU's waiting without the profiler."""

    @property
    def iterations(self) -> int:
        """How many iterations were recorded, at least 1."""
        return max(self.measured.iterations.height, 1)

    @property
    def multiprocessors(self) -> int | None:
        """Of the trace's first GPU."""
        gpus = self.measured.trace.gpus
        return gpus[0].multiprocessors if gpus else None


Rule = Callable[[RuleContext], ProfileFinding | None]


def apply_rules(context: RuleContext, *, with_gaps: bool = True) -> tuple[ProfileFinding, ...]:
    """All findings that matter, the largest estimated gain first; those from gaps only where the trace supports these."""
    has_gpu = context.measured.trace.kernels.height > 0
    found = [finding for rule in (_GPU_RULES if has_gpu else _CPU_RULES) if (finding := rule(context)) is not None]
    kept = [finding for finding in found if finding.gain_ns >= _WORTH_SHARE * _time_base_ns(finding.rule, context)]
    if has_gpu and with_gaps:  # these have a threshold of their own
        gaps = [_correct_for_profiler(gap, context) for rule in _GAP_RULES if (gap := rule(context)) is not None]
        kept += [gap for gap in gaps if gap.gain_ns >= _WORTH_GAP_SHARE * _time_base_ns(gap.rule, context)]
    if context.facts.stage is Stage.PREPROCESS:
        kept = [replace(each, advice=_PREPROCESS_ADVICE.get(each.rule, each.advice)) for each in kept]
    shared = [
        replace(
            each,
            gain_share=each.gain_ns / max(_time_base_ns(each.rule, context), 1),
            host_times=each.rule in _HOST_RULES,
        )
        for each in kept
    ]
    return tuple(sorted(shared, key=lambda each: (-each.gain_share, each.rule)))


def _time_base_ns(rule: str, context: RuleContext) -> float:
    """What a gain is a part of: where the profiler slowed the host, the time without it for what it did not slow."""
    if context.undisturbed_ns is None or rule in _UNDER_PROFILER:
        return context.measured.split.span_ns
    return context.undisturbed_ns * context.iterations


def _correct_for_profiler(gap: ProfileFinding, context: RuleContext) -> ProfileFinding:
    """A gap as long as an iteration without the profiler leaves room for: it delays launches, and hardly the kernels."""
    if context.undisturbed_ns is None:
        return gap
    gain_ns = int(gap.gain_ns * context.idle_scale)
    each = f"{WITHOUT_PROFILER}, {format_duration(gain_ns / context.iterations)} of an iteration"
    return replace(gap, gain_ns=gain_ns, evidence=gap.evidence + each)


def find_launch_gaps(context: RuleContext) -> ProfileFinding | None:
    """Short waits between kernels for the next launch, which a CUDA graph removes."""
    timeline = context.measured.timeline
    away = find_long_gaps(timeline)
    waits = timeline.idle[IdleCause.HOST_WAIT]
    short = subtract_intervals(waits, away)
    gain, count = short.total_ns, short.starts.size
    if not has_notable_gaps(context.measured, short):
        return None
    kernels = context.measured.trace.kernels.height
    evidence = (
        f"{_format_gap_count(count)} of {format_duration(gain / count)} on average while the host prepares the next launch; "
        f"{kernels} kernels of {format_duration(context.measured.kernel_ns / max(kernels, 1))} on average"
    )
    graph = f"replay a CUDA graph (optpipe build --option {context.facts.backend or 'onnxruntime'}.cuda_graph=true), "
    advice = f"{'' if context.facts.options.get('cuda_graph') else graph}use a larger batch, or launch fewer kernels; "
    advice += advise_fusion(context.facts)
    return ProfileFinding("launch-gaps", evidence, gain, advice, _gap_rows(context, short))


def find_host_gaps(context: RuleContext) -> ProfileFinding | None:
    """Long waits in which the host does other work than launching."""
    away = find_long_gaps(context.measured.timeline)
    if not away.starts.size:
        return None
    evidence = f"{_format_gap_count(away.starts.size)} over {format_duration(GAP_NS)}, {format_duration(away.total_ns)} in total, "
    evidence += "during which the host launches nothing"
    advice = "find out what the host does there: optpipe profile --record os-calls; preprocess on the GPU (optpipe preprocess)"
    if context.facts.stage is Stage.INFERENCE:
        advice = "launch the next batch before waiting for this one (optpipe bench --streams)"
    return ProfileFinding("host-gaps", evidence, away.total_ns, advice, _gap_rows(context, away))


def find_device_gaps(context: RuleContext) -> ProfileFinding | None:
    """Waits between kernels that were launched already: dependent, short kernels."""
    waits = context.measured.timeline.idle[IdleCause.KERNEL_WAIT]
    if not has_notable_gaps(context.measured, waits):
        return None
    each = format_duration(waits.total_ns / waits.starts.size)
    evidence = f"{_format_gap_count(waits.starts.size)} of {each} between already launched kernels"
    advice = f"use a larger batch, or fewer, larger kernels; {advise_fusion(context.facts)}"
    return ProfileFinding("device-gaps", evidence, waits.total_ns, advice, _gap_rows(context, waits))


def find_synchronizations(context: RuleContext) -> ProfileFinding | None:
    """Idle time while the host returns from waiting for the GPU."""
    idle = context.measured.timeline.idle[IdleCause.SYNCHRONIZATION]
    if not has_notable_gaps(context.measured, idle):
        return None
    calls = context.measured.api.filter(pl.col("name").str.contains(WAITING_CALLS))
    named = ", ".join(f"{row['count']} {row['name']}" for row in calls.head(3).iter_rows(named=True))
    each = _sum(calls, "count") / context.iterations
    evidence = f"{format_duration(idle.total_ns)} idle inside waiting calls ({named}; {each:.1f} per iteration)"
    advice = (
        "synchronize once per iteration, not once per step; keep several batches in flight (optpipe bench --streams)"
    )
    return ProfileFinding("synchronization", evidence, idle.total_ns, advice, _gap_rows(context, idle))


def find_exposed_copies(context: RuleContext) -> ProfileFinding | None:
    """Copies during which no kernel runs."""
    gain = context.measured.split.copy_only_ns
    if not gain:
        return None
    evidence = (
        f"{format_duration(gain)} in which only copies run, of {format_duration(context.measured.copy_ns)} of copies"
    )
    advice = "copy on a second stream while the previous batch computes, or keep the data on the device (I/O binding, DALI output)"
    return ProfileFinding("exposed-copies", evidence, gain, advice, _copy_rows(context.measured.copies))


def find_pageable_copies(context: RuleContext) -> ProfileFinding | None:
    """Copies between the device and memory that is not pinned."""
    copies = context.measured.copies
    pageable, pinned = (
        copies.filter((pl.col("source_memory") == kind) | (pl.col("target_memory") == kind))
        for kind in ("Pageable", "Pinned")
    )
    total_ns, size = _sum(pageable, "total_ns"), _sum(pageable, "bytes")
    if not total_ns:
        return None
    rate = size / total_ns  # bytes per nanosecond
    better = _sum(pinned, "bytes") / _sum(pinned, "total_ns") if _sum(pinned, "total_ns") else 2 * rate
    basis = "the pinned copies in this trace" if pinned.height else "twice the rate, typical of pinned memory"
    evidence = (
        f"{_sum(pageable, 'count')} copies of {format_bytes(size)} through pageable memory at "
        f"{format_bytes(rate * 1e9)}/s; gain estimated from {basis}"
    )
    advice = "allocate host buffers as pinned memory (torch: pin_memory=True)"
    return ProfileFinding(
        "pageable-copies", evidence, max(0, int(total_ns - size / better)), advice, _copy_rows(pageable)
    )


def find_small_copies(context: RuleContext) -> ProfileFinding | None:
    """Many copies too small to be worth their launch."""
    small = context.measured.trace.copies.filter(pl.col("bytes") < _SMALL_COPY_BYTES)
    if small.height < 10 * context.iterations:
        return None
    evidence = (
        f"{small.height} copies under {format_bytes(_SMALL_COPY_BYTES)} ({small.height / context.iterations:.0f} per iteration), "
        f"{format_bytes(_sum(small, 'bytes'))} in total"
    )
    gain = _sum(small, "end_ns") - _sum(small, "start_ns")
    return ProfileFinding(
        "small-copies", evidence, gain, "combine them into one copy, or keep these tensors on the device"
    )


def find_missed_tensor_cores(context: RuleContext) -> ProfileFinding | None:
    """Matrix work on the ordinary units."""
    found = context.tensor_cores
    if found is None or not found.missed:
        return None
    missed_ns = sum(each.time_ns for each in found.missed) // found.iterations
    evidence = (
        f"{len(found.missed)} of {found.eligible} eligible {found.basis} do not use Tensor Cores: {format_duration(missed_ns)}"
        f"{_each(found)}"
    )
    advice = "optpipe build --precision fp16, or --precision tf32 where fp32 must stay"
    if any(each.type in ("fp16", "bf16", "int8") for each in found.missed):
        advice = "other kernels: build with --backend onnxruntime,inductor,torch, then optpipe bench; onnxruntime.cudnn_search=EXHAUSTIVE"
    return ProfileFinding(
        "missed-tensor-cores", evidence, compute_saving_ns(context, found.missed), advice, _use_rows(found.missed)
    )


def find_ineligible_layers(context: RuleContext) -> ProfileFinding | None:
    """Matrix layers that their type or their channels keep from Tensor Cores."""
    found = context.tensor_cores
    if found is None or not found.ineligible:
        return None
    shut_ns = sum(each.time_ns for each in found.ineligible) // found.iterations
    first, count = found.ineligible[0], len(found.ineligible)
    evidence = (
        f"{count} matrix {'layer' if count == 1 else 'layers'} cannot use Tensor Cores as they are: {format_duration(shut_ns)}"
        f"{_each(found)}; "
        f"{first.name}: {first.reason}"
    )
    by_type = first.reason is not None and "no Tensor Cores" in first.reason
    advice = (
        "optpipe build --precision fp16, or --precision tf32 where fp32 must stay"
        if by_type
        else "pad channels and weights with zeros to that multiple (3 input channels to 8), or use a backend that pads: "
        "optpipe build --backend torch,inductor, then optpipe bench"
    )
    gain = compute_saving_ns(context, found.ineligible)
    return ProfileFinding("ineligible-for-tensor-cores", evidence, gain, advice, _use_rows(found.ineligible))


def find_unfused_kernels(context: RuleContext) -> ProfileFinding | None:
    """Normalization, casts and elementwise work in kernels of their own: a compiler puts them into their neighbours."""
    kernels = context.measured.kernels.filter(pl.col("kind").is_in(["normalization", "elementwise", "cast"]))
    count, total_ns = _sum(kernels, "count"), _sum(kernels, "total_ns")
    evidence = (
        f"{count} kernels ({count / context.iterations:.0f} per iteration) do only normalization, casts, or elementwise work: "
        f"{format_duration(total_ns)}"
    )
    return (
        ProfileFinding("unfused-kernels", evidence, total_ns, advise_fusion(context.facts), _name_rows(kernels))
        if count
        else None
    )


def find_layout_changes(context: RuleContext) -> ProfileFinding | None:
    """Kernels that only change the layout of tensors."""
    layouts = context.measured.kernels.filter(pl.col("kind") == "layout")
    count, total_ns = _sum(layouts, "count"), _sum(layouts, "total_ns")
    evidence = f"{count} kernels only change tensor layouts: {format_duration(total_ns)}"
    advice = "keep one layout: NHWC for Tensor Cores (onnxruntime.nhwc=true; torch channels_last)"
    if context.facts.options.get("nhwc"):
        advice = "the layout is already NHWC; what is left converts the model's inputs and outputs, which stay NCHW"
    return ProfileFinding("layout-changes", evidence, total_ns, advice, _name_rows(layouts)) if count else None


def find_underfilled_gpu(context: RuleContext) -> ProfileFinding | None:
    """Kernels with fewer blocks than the GPU has multiprocessors."""
    if not context.multiprocessors:
        return None
    duration, blocks = pl.col("end_ns") - pl.col("start_ns"), pl.col("blocks")
    small = context.measured.trace.kernels.filter((blocks < context.multiprocessors) & (blocks > 0)).select(
        duration.alias("total_ns"), (duration * (1 - blocks / context.multiprocessors)).alias("unused_ns")
    )
    share = _sum(small, "total_ns") / max(context.measured.kernel_ns, 1)
    evidence = f"{share:.0%} of kernel time runs in kernels with fewer blocks than the GPU's {context.multiprocessors} multiprocessors"
    advice = "use a larger batch or several concurrent streams; optpipe bench finds the knee"
    return ProfileFinding("underfilled-gpu", evidence, _sum(small, "unused_ns"), advice) if small.height else None


def find_allocations(context: RuleContext) -> ProfileFinding | None:
    """Allocating, freeing and loading code inside the measured part."""
    calls = context.measured.api.filter(pl.col("name").str.contains(_ALLOCATIONS))
    count, total_ns = _sum(calls, "count"), _sum(calls, "total_ns")
    evidence = f"{count} calls in the measured part allocate, free, or load code: {format_duration(total_ns)}"
    advice = "allocate once and reuse (I/O binding); warm up until nothing more is loaded"
    return ProfileFinding("allocations", evidence, total_ns, advice, _name_rows(calls)) if count else None


def find_slow_first_iteration(context: RuleContext) -> ProfileFinding | None:
    """What the first iteration costs over the others."""
    walls = context.measured.iterations["wall_ns"].to_list()
    if len(walls) < 3:
        return None
    others = float(np.median(walls[1:]))
    if walls[0] <= (1 + _FIRST_SHARE) * others:
        return None
    evidence = (
        f"the first of {len(walls)} iterations takes {format_duration(walls[0])}, the others {format_duration(others)}"
    )
    on_gpu = context.measured.trace.kernels.height > 0
    advice = "warm up before serving" + ("; a CUDA graph is uploaded on its first replay" if on_gpu else " (--warm-up)")
    return ProfileFinding("first-iteration", evidence, int(walls[0] - others), advice)


def find_os_calls(context: RuleContext) -> ProfileFinding | None:
    """Time in calls to the operating system, where these were traced and no GPU is waiting."""
    calls = context.measured.os_runtime
    if calls.is_empty():
        return None
    evidence = (
        f"{_sum(calls, 'count')} operating-system calls, {format_duration(_sum(calls, 'total_ns'))} over all threads"
    )
    advice = "prefetch files in another thread; keep them in the page cache"
    return ProfileFinding("operating-system", evidence, int(calls["total_ns"][0]), advice, _name_rows(calls))


def advise_fusion(facts: StageFacts) -> str:
    """How elementwise work gets into the kernels beside it, with the runtime that is used, or with another."""
    if facts.backend == "torch" and not facts.options.get("fuse", True):
        return "optpipe build --option torch.fuse=true fuses elementwise work into the matrix kernels; so does --backend inductor"
    if facts.backend == "onnxruntime":
        said = "optpipe build --backend torch,inductor, then optpipe bench: both fuse elementwise work into the matrix kernels (torch for "
        return said + "FP16 and BF16 convolutions); onnxruntime.fuse_conv_bias=true fuses biases"
    others = ",".join(each for each in ("torch", "inductor", "onnxruntime") if each != facts.backend)
    if facts.backend is None:
        return f"fuse elementwise work into the matrix kernels: torch.compile, TensorRT, or optpipe build --backend {others}"
    return f"another runtime may fuse elementwise work into the matrix kernels: optpipe build --backend {others}, then optpipe bench"


def find_one_time_cost(context: RuleContext) -> ProfileFinding | None:
    """A stage whose result is kept: all of it is saved the next time, and its longest part is named."""
    kept_for = _KEPT_FOR.get(context.facts.stage) if context.facts.stage else None
    if kept_for is None:
        return None
    measured, span_ns = context.measured, context.measured.split.span_ns
    parts = measured.ranges.filter((pl.col("name") != measured.scope) & (pl.col("wall_ns") < 0.98 * span_ns))
    rows = tuple(FindingRow(*row) for row in parts.head(ROWS_SHOWN).select("name", "wall_ns", "count").iter_rows())
    longest = f", of which {rows[0].name} {format_duration(rows[0].total_ns)}" if rows else ""
    advice = (
        f"cached in the workspace: paid once per combination of {kept_for}; keep --workspace between runs (also in CI)"
    )
    if rows and rows[0].name.startswith(("calibrate", "optpipe.calibrate")):
        advice += "; fewer images or --method max make calibration faster"
    return ProfileFinding("paid-once", f"{format_duration(span_ns)} on the CPU{longest}", span_ns, advice, rows)


def find_busiest_operator(context: RuleContext) -> ProfileFinding | None:
    """The operator of a preprocessing pipeline that takes the most time of its threads."""
    name = pl.col("name").cast(pl.String)
    operators = context.measured.trace.ranges.filter(name.str.contains(_OPERATOR))
    if context.facts.stage is not Stage.PREPROCESS or operators.is_empty():
        return None
    table = (
        operators.group_by(name.str.extract(_OPERATOR).alias("name"))
        .agg(
            (pl.col("end_ns") - pl.col("start_ns")).sum().alias("total_ns"),
            pl.len().alias("count"),
            pl.col("thread").n_unique(),
        )
        .sort("total_ns", "name", descending=[True, False])
    )
    rows = tuple(FindingRow(*row) for row in table.head(ROWS_SHOWN).select("name", "total_ns", "count").iter_rows())
    first, threads = rows[0], int(table["thread"][0])
    share = first.total_ns / max(int(table["total_ns"].sum()), 1)
    evidence = f"{first.name} takes {share:.0%} of the operators' time, on {threads} threads"
    advice = "optpipe preprocess tunes threads, prefetching, and the decoder, and reports the rate of decoding alone"
    return ProfileFinding("busiest-operator", evidence, int(first.total_ns / threads), advice, rows)


def find_slow_layers(context: RuleContext) -> ProfileFinding | None:
    """Layers of a CPU's inference that take longer than the roofline says they must."""
    found = context.roofline
    if found is None or context.measured.trace.kernels.height:
        return None
    timed = [each for each in found.layers if each.measured_ns is not None and each.measured_ns > each.bound_ns]
    above_ns = sum(each.above_bound_ns for each in timed)
    if found.measured_ns is not None:
        # No more than the whole inference is above its bound; one that is below it says that the peaks are too low.
        above_ns = min(above_ns, found.measured_ns - found.bound_ns)
    if above_ns <= 0:
        return None
    evidence = (
        f"{len(timed)} layers take up to {format_duration(above_ns)} more per inference than their arithmetic and memory traffic require; "
        f"{timed[0].cost.op} {timed[0].cost.name} the most"
    )
    advice = "more threads or larger batches: optpipe bench --option onnxruntime.threads=N --batch 1,8,32"
    if not any(each.cost.type == "int8" for each in timed):
        advice += "; INT8 if accuracy allows: optpipe build --precision int8 --backend onnxruntime"
    rows = tuple(
        FindingRow(
            each.cost.name, each.measured_ns or 0.0, detail=f"{each.cost.op}, bound {format_duration(each.bound_ns)}"
        )
        for each in timed[:ROWS_SHOWN]
    )
    return ProfileFinding("slow-layers", evidence, int(above_ns * context.iterations), advice, rows)


def compute_saving_ns(context: RuleContext, layers: tuple[LayerUse, ...]) -> int:
    """What `layers` could save over the measured part, which may have other iterations than theirs."""
    iterations = context.tensor_cores.iterations if context.tensor_cores else 1
    return int(sum(each.could_save_ns for each in layers) / iterations * context.iterations)


_TUNING_ADVICE = "optpipe preprocess tunes threads, prefetching, and the share of the hardware JPEG decoder, which recordings do not show"
_PREPROCESS_ADVICE = {
    "host-gaps": f"the host cannot feed the GPU: {_TUNING_ADVICE}",
    "launch-gaps": f"use a larger batch; {_TUNING_ADVICE}",
    "device-gaps": f"use a larger batch; {_TUNING_ADVICE}",
    "synchronization": f"prefetch more batches: {_TUNING_ADVICE}",
    "exposed-copies": f"prefetch more batches: {_TUNING_ADVICE}",
    "small-copies": f"use a larger batch; {_TUNING_ADVICE}",
    "underfilled-gpu": f"use a larger batch; {_TUNING_ADVICE}",
}
"""What to try where no engine runs: nothing to capture into a graph, and no compiler that fuses."""
_GAP_RULES: tuple[Rule, ...] = (find_launch_gaps, find_host_gaps, find_device_gaps, find_synchronizations)
_GPU_RULES: tuple[Rule, ...] = (
    find_exposed_copies,
    find_pageable_copies,
    find_small_copies,
    find_missed_tensor_cores,
    find_ineligible_layers,
    find_unfused_kernels,
    find_layout_changes,
    find_underfilled_gpu,
    find_allocations,
    find_slow_first_iteration,
    find_busiest_operator,
)
_CPU_RULES: tuple[Rule, ...] = (
    find_slow_first_iteration,
    find_os_calls,
    find_one_time_cost,
    find_slow_layers,
    find_busiest_operator,
)
"""Without GPU rows nothing can be said about gaps, copies or kernels."""


def _format_gap_count(count: int) -> str:
    return "1 gap" if count == 1 else f"{count} gaps"


def _each(found: TensorCores) -> str:
    return " per iteration" if found.iterations > 1 else ""


def _use_rows(layers: tuple[LayerUse, ...]) -> tuple[FindingRow, ...]:
    return tuple(
        FindingRow(each.name, each.time_ns, each.count, detail=each.reason or "") for each in layers[:ROWS_SHOWN]
    )


def _gap_rows(context: RuleContext, gaps: TimeIntervals) -> tuple[FindingRow, ...]:
    longest = describe_gaps(context.measured, gaps.starts, gaps.ends, most=ROWS_SHOWN)
    return tuple(
        FindingRow(each.before or "end of trace", each.duration_ns, 1, each.start_ns, each.host) for each in longest
    )


def _sum(frame: pl.DataFrame, column: str) -> int:
    return int(frame[column].sum())


def _copy_rows(copies: pl.DataFrame) -> tuple[FindingRow, ...]:
    columns = ("kind", "total_ns", "count", "source_memory", "target_memory", "bytes")
    return tuple(
        FindingRow(kind or "unknown", total_ns, count, detail=f"{source} to {target}, {format_bytes(size)}")
        for kind, total_ns, count, source, target, size in copies.head(ROWS_SHOWN).select(columns).iter_rows()
    )


def _name_rows(table: pl.DataFrame) -> tuple[FindingRow, ...]:
    rows = table.head(ROWS_SHOWN).select("name", "total_ns", "count").iter_rows()
    return tuple(FindingRow(shorten_name(name), total_ns, count) for name, total_ns, count in rows)
