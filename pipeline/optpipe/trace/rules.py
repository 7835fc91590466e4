"""One function for each kind of finding: figures, and the command to try next.

Gains are upper bounds over the measured part: the time that a trace without the cause would save.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import polars as pl

from optpipe.backends.registry import list_fusing_backends
from optpipe.core.quantity import format_bytes, format_duration
from optpipe.core.wording import Argument, Call
from optpipe.trace.analysis import WAITING_CALLS, Analysis, IdleCause, subtract_intervals
from optpipe.trace.bottleneck import GAP_NS, find_long_gaps, has_notable_gaps
from optpipe.trace.loops import find_data_waits
from optpipe.trace.nsys import Stage
from optpipe.trace.read import Trace
from optpipe.trace.roofline import Roofline
from optpipe.trace.tensor_cores import LayerUse, TensorCores

_WORTH_SHARE = 0.02
_WORTH_GAP_SHARE = 0.005
"""A gap may matter to one iteration of hundreds; below 0.5% of the whole time it is left out."""
WITHOUT_PROFILER = "; without the profiler"
"""Evidence after this text holds even if the profiler slowed the host."""
_Find = TypeVar("_Find", bound="Callable[[RuleContext], _Found | None]")
_TUNING = (
    Call("preprocess")
    + " tunes threads, prefetching, and the share of the hardware JPEG decoder, which recordings do not show"
)
_LARGER_BATCH = "use a larger batch; " + _TUNING
_SMALLER_TYPES = (
    Call("build", precision="fp16")
    + ", or "
    + Argument("precision", "tf32")
    + " where fp32 must stay"
)
_PREFETCH = "prefetch more batches: " + _TUNING
_BENCH, _STREAMS = Call("bench"), Call("bench") + " " + Argument("streams")
_OWN_GRAPH = 'torch.compile(mode="reduce-overhead"), or '
"""In a program of the user's, which no command here builds."""
_ALLOCATIONS = (
    r"^(cudaMalloc|cudaFree|cudaHostAlloc|cudaFreeHost|cudaMallocHost|cuMemAlloc|cuMemFree|cuModuleLoad|cuLibraryLoad|"
    r"cudaStreamCreate|cudaEventCreate)"
)
_UNALIGNED = r"(?i)_align(1|2|4)(_|>|$)"
_OPERATOR = r"\[(?:CPU|GPU|Mixed|MIXED) op\] Run (.+)$"
"""DALI's ranges around each of its operators."""


@dataclass(frozen=True, slots=True)
class ProfileFinding:
    rule: str
    evidence: str
    gain_ns: int
    """An upper bound, over the measured part."""
    advice: str
    gain_share: float = 0.0
    host_times: bool = False
    """True if the evidence is host times, which a profiler's overhead distorts."""


@dataclass(frozen=True, slots=True)
class StageFacts:
    """Facts about a stage that are not in its recording; the defaults are for other programs' recordings."""

    stage: Stage | None = None
    backend: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    expects_gpu: bool = True
    """If false, as for a CPU stage, missing GPU rows are not a defect of the trace."""
    unprofiled_iteration_ns: float | None = None
    """One iteration in the same process without a recording."""


class RuleContext(NamedTuple):
    measured: Analysis
    facts: StageFacts
    tensor_cores: TensorCores | None
    roofline: Roofline | None
    undisturbed_ns: float | None
    """One iteration without the profiler, if the times under it are not reliable."""
    idle_scale: float
    """Share of the GPU's waiting time that remains without the profiler."""

    @property
    def backend(self) -> str:
        """The backend of the stage; ONNX Runtime for a recording that does not name it."""
        return self.facts.backend or "onnxruntime"

    @property
    def iterations(self) -> int:
        return max(self.measured.iterations.height, 1)


class _Found(NamedTuple):
    """A finding before it is weighed; `gain_ns` is an upper bound."""

    evidence: str
    gain_ns: int
    advice: str


class _Rule(NamedTuple):
    name: str
    find: Callable[[RuleContext], _Found | None]
    on_gpu: bool = True
    """The rule applies to traces with kernels."""
    on_cpu: bool = False
    """The rule applies to traces without kernels, which have no gaps or copies."""
    gaps: bool = False
    host_times: bool = False
    """The evidence is host times, which a profiler's overhead distorts."""
    under_profiler: bool = False
    """The gain is host time under the profiler, and a part of the time there."""
    advice_in_preprocessing: str | None = None
    """Replaces the advice if no engine runs: no graph to capture, and no compiler that fuses."""


_RULES: list[_Rule] = []


def _rule(name: str, **facts: Any) -> Callable[[_Find], _Find]:
    def register(find: _Find) -> _Find:
        _RULES.append(_Rule(name, find, **facts))
        return find

    return register


def apply_rules(context: RuleContext, *, with_gaps: bool = True) -> tuple[ProfileFinding, ...]:
    """All findings that matter, largest gain first; those from gaps only with `with_gaps`."""
    has_gpu = context.measured.trace.kernels.height > 0
    kept = []
    for rule in _RULES:
        applies = (rule.on_gpu if has_gpu else rule.on_cpu) and (with_gaps or not rule.gaps)
        if not applies or (finding := rule.find(context)) is None:
            continue
        evidence, gain_ns, advice = finding
        base_ns: float = context.measured.timeline.span_ns
        if context.undisturbed_ns is not None:
            if (
                rule.gaps
            ):  # the profiler delays launches more than kernels: scale to the iteration without it
                gain_ns = int(gain_ns * context.idle_scale)
                evidence += f"{WITHOUT_PROFILER}, {format_duration(gain_ns / context.iterations)} of an iteration"
            if not rule.under_profiler:
                base_ns = context.undisturbed_ns * context.iterations
        if gain_ns < (_WORTH_GAP_SHARE if rule.gaps else _WORTH_SHARE) * base_ns:
            continue
        if context.facts.stage is Stage.PREPROCESS and rule.advice_in_preprocessing:
            advice = rule.advice_in_preprocessing
        kept.append(
            ProfileFinding(
                rule.name, evidence, gain_ns, advice, gain_ns / max(base_ns, 1), rule.host_times
            )
        )
    return tuple(sorted(kept, key=lambda finding: (-finding.gain_share, finding.rule)))


@_rule("launch-gaps", gaps=True, host_times=True, advice_in_preprocessing=_LARGER_BATCH)
def find_launch_gaps(context: RuleContext) -> _Found | None:
    """A CUDA graph removes short waits for the next launch."""
    timeline = context.measured.timeline
    short = subtract_intervals(timeline.idle[IdleCause.HOST_WAIT], find_long_gaps(timeline))
    gain, count = short.total_ns, short.starts.size
    if not has_notable_gaps(context.measured, short):
        return None
    kernels = context.measured.trace.kernels.height
    evidence = (
        f"{_format_gap_count(count)} of {format_duration(gain / count)} on average while the host prepares the next launch; "
        f"{kernels} kernels of {format_duration(context.measured.kernel_ns / max(kernels, 1))} on average"
    )
    advice = "use a larger batch, or launch fewer kernels; " + _advise_fusion(context)
    if not context.facts.options.get("cuda_graph"):
        graph = {context.backend: {"cuda_graph": "true"}}
        ways = _OWN_GRAPH if context.facts.backend is None else ""
        advice = f"replay a CUDA graph ({ways}" + Call("build", option=graph) + "), " + advice
    return _Found(evidence, gain, advice)


@_rule(
    "host-gaps",
    gaps=True,
    host_times=True,
    advice_in_preprocessing="the host cannot feed the GPU: " + _TUNING,
)
def find_host_gaps(context: RuleContext) -> _Found | None:
    """Long waits in which the host does other work than launching."""
    away = find_long_gaps(context.measured.timeline)
    if not away.starts.size:
        return None
    evidence = f"{_format_gap_count(away.starts.size)} over {format_duration(GAP_NS)}, {format_duration(away.total_ns)} in total, "
    evidence += "during which the host launches nothing"
    if context.facts.stage is Stage.INFERENCE:
        advice = "launch the next batch before waiting for this one (" + _STREAMS + ")"
        return _Found(evidence, away.total_ns, advice)
    waits = None if context.facts.stage else find_data_waits(context.measured)
    if waits is not None and away.total_ns:
        elsewhere = subtract_intervals(away, waits.times).total_ns
        evidence += (
            f"; {1 - elsewhere / away.total_ns:.0%} of it in {waits.name}, the wait for data"
        )
    return _Found(evidence, away.total_ns, _advise_looking(context.measured.trace))


def _advise_looking(trace: Trace) -> str:
    """How to see what the host does: in the sources that were recorded, or by recording them."""
    if trace.stacks.height or trace.os_calls.height:
        return "the Python lines, CPU functions, and OS calls that take the time are below"
    sources = Argument("record", "python,cpu,os-calls")
    return "see in which lines, functions, and OS calls the host spends that time: " + sources


@_rule("device-gaps", gaps=True, host_times=True, advice_in_preprocessing=_LARGER_BATCH)
def find_device_gaps(context: RuleContext) -> _Found | None:
    """Waits between launched kernels: dependent, short kernels."""
    waits = context.measured.timeline.idle[IdleCause.KERNEL_WAIT]
    if not has_notable_gaps(context.measured, waits):
        return None
    average = format_duration(waits.total_ns / waits.starts.size)
    evidence = (
        f"{_format_gap_count(waits.starts.size)} of {average} between already launched kernels"
    )
    advice = "use a larger batch, or fewer, larger kernels; " + _advise_fusion(context)
    return _Found(evidence, waits.total_ns, advice)


@_rule("synchronization", gaps=True, host_times=True, advice_in_preprocessing=_PREFETCH)
def find_synchronizations(context: RuleContext) -> _Found | None:
    idle = context.measured.timeline.idle[IdleCause.SYNCHRONIZATION]
    if not has_notable_gaps(context.measured, idle):
        return None
    calls = context.measured.api.filter(pl.col("name").str.contains(WAITING_CALLS))
    named = ", ".join(
        f"{row['count']} {row['name']}" for row in calls.head(3).iter_rows(named=True)
    )
    count = _sum(calls, "count") / context.iterations
    evidence = f"{format_duration(idle.total_ns)} idle inside waiting calls ({named}; {count:.1f} per iteration)"
    advice = "synchronize once per iteration, not once per step; "
    advice += "keep several batches in flight (" + _STREAMS + ")"
    return _Found(evidence, idle.total_ns, advice)


@_rule("input-wait", on_cpu=True, host_times=True)
def find_input_wait(context: RuleContext) -> _Found | None:
    """A loop of a user's program that waits for its data while the GPU, if there is one, is idle."""
    waits = None if context.facts.stage else find_data_waits(context.measured)
    if waits is None:
        return None
    timeline = context.measured.timeline
    idle = subtract_intervals(waits.times, timeline.busy)
    each_ns = waits.times.total_ns / context.iterations
    evidence = f"{waits.name}: {format_duration(each_ns)} per iteration"
    if timeline.busy.total_ns:
        evidence += f", {idle.total_ns / max(waits.times.total_ns, 1):.0%} of it with an idle GPU"
    advice = "load in more processes and ahead of time (torch: DataLoader with num_workers, prefetch_factor, "
    advice += (
        "pin_memory, persistent_workers); images: decode on the GPU (" + Call("preprocess") + ")"
    )
    return _Found(evidence, idle.total_ns, advice)


@_rule("unaligned-shapes")
def find_unaligned_shapes(context: RuleContext) -> _Found | None:
    """16-bit matrix kernels of a user's program whose names tell that sizes are no multiples of 8 elements."""
    if context.facts.stage:
        return None
    name = pl.col("name")
    kernels = context.measured.kernels.filter(
        name.str.contains(_UNALIGNED) & name.str.contains(r"(?i)f16|bf16|half|s16816|s1688")
    )
    if kernels.is_empty():
        return None
    total_ns = _sum(kernels, "total_ns")
    evidence = f"{kernels.height} matrix kernels for sizes that are not multiples of 8: {format_duration(total_ns)}"
    advice = "pad channels, features, and sequence lengths to multiples of 8 (FP16, BF16) or 16 (INT8, FP8)"
    return _Found(evidence, total_ns // 2, advice)


@_rule("exposed-copies", advice_in_preprocessing=_PREFETCH)
def find_exposed_copies(context: RuleContext) -> _Found | None:
    gain = context.measured.timeline.copy_only_ns
    if not gain:
        return None
    whole = format_duration(_sum(context.measured.copies, "total_ns"))
    evidence = f"{format_duration(gain)} in which only copies run, of {whole} of copies"
    advice = "copy on a second stream while the previous batch computes, or keep the data on the device (I/O binding, DALI output)"
    return _Found(evidence, gain, advice)


@_rule("pageable-copies")
def find_pageable_copies(context: RuleContext) -> _Found | None:
    copies = context.measured.copies
    source, target = pl.col("source_memory"), pl.col("target_memory")
    pageable, pinned = (
        copies.filter((source == kind) | (target == kind)) for kind in ("Pageable", "Pinned")
    )
    total_ns, size = _sum(pageable, "total_ns"), _sum(pageable, "bytes")
    if not total_ns:
        return None
    rate = size / total_ns  # bytes per nanosecond
    better = (
        _sum(pinned, "bytes") / _sum(pinned, "total_ns") if _sum(pinned, "total_ns") else 2 * rate
    )
    basis = (
        "the pinned copies in this trace"
        if pinned.height
        else "twice the rate, typical of pinned memory"
    )
    copied = f"{_sum(pageable, 'count')} copies of {format_bytes(size)} through pageable memory"
    evidence = f"{copied} at {format_bytes(rate * 1e9)}/s; gain estimated from {basis}"
    advice = "allocate host buffers as pinned memory (torch: pin_memory=True)"
    return _Found(evidence, max(0, int(total_ns - size / better)), advice)


@_rule("missed-tensor-cores")
def find_missed_tensor_cores(context: RuleContext) -> _Found | None:
    cores = context.tensor_cores
    if cores is None or not cores.missed:
        return None
    said = f"{len(cores.missed)} of {cores.eligible} eligible {cores.basis} do not use Tensor Cores"
    advice = _SMALLER_TYPES
    if any(layer.type in ("fp16", "bf16", "int8") for layer in cores.missed):
        others = Argument("backend", ["onnxruntime", "inductor", "torch"])
        advice = "other kernels: build with " + others + ", then " + _BENCH
        advice += "; onnxruntime.cudnn_search=EXHAUSTIVE"
    gain = sum(layer.could_save_ns for layer in cores.missed)
    return _Found(f"{said}: {_format_time(cores, cores.missed)}", gain, advice)


@_rule("ineligible-for-tensor-cores")
def find_ineligible_layers(context: RuleContext) -> _Found | None:
    cores = context.tensor_cores
    if cores is None or not cores.ineligible:
        return None
    first, count = cores.ineligible[0], len(cores.ineligible)
    evidence = f"{count} matrix {'layer' if count == 1 else 'layers'} cannot use Tensor Cores as they are: "
    evidence += f"{_format_time(cores, cores.ineligible)}; {first.name}: {first.reason}"
    by_type = first.reason is not None and "no Tensor Cores" in first.reason
    pad = "pad channels and weights with zeros to that multiple (3 input channels to 8), or use a backend that pads: "
    pad += Call("build", backend=["torch", "inductor"]) + ", then " + _BENCH
    gain = sum(layer.could_save_ns for layer in cores.ineligible)
    return _Found(evidence, gain, _SMALLER_TYPES if by_type else pad)


@_rule("unfused-kernels")
def find_unfused_kernels(context: RuleContext) -> _Found | None:
    """A compiler fuses normalization, casts, and elementwise work into other kernels."""
    kernels = context.measured.kernels.filter(
        pl.col("kind").is_in(["normalization", "elementwise", "cast"])
    )
    count, total_ns = _sum(kernels, "count"), _sum(kernels, "total_ns")
    work = f"only normalization, casts, or elementwise work: {format_duration(total_ns)}"
    evidence = f"{count} kernels ({count / context.iterations:.0f} per iteration) do {work}"
    return _Found(evidence, total_ns, _advise_fusion(context)) if count else None


@_rule("layout-changes")
def find_layout_changes(context: RuleContext) -> _Found | None:
    layouts = context.measured.kernels.filter(pl.col("kind") == "layout")
    count, total_ns = _sum(layouts, "count"), _sum(layouts, "total_ns")
    evidence = f"{count} kernels only change tensor layouts: {format_duration(total_ns)}"
    advice = "keep one layout: NHWC for Tensor Cores (onnxruntime.nhwc=true; torch channels_last)"
    if context.facts.options.get("nhwc"):
        advice = "the layout is already NHWC; what is left converts the model's inputs and outputs, which stay NCHW"
    return _Found(evidence, total_ns, advice) if count else None


@_rule("underfilled-gpu", advice_in_preprocessing=_LARGER_BATCH)
def find_underfilled_gpu(context: RuleContext) -> _Found | None:
    gpus = context.measured.trace.gpus
    multiprocessors = gpus[0].multiprocessors if gpus else None
    if not multiprocessors:
        return None
    duration, blocks = pl.col("end_ns") - pl.col("start_ns"), pl.col("blocks")
    small = context.measured.trace.kernels.filter((blocks < multiprocessors) & (blocks > 0)).select(
        duration.alias("total_ns"), (duration * (1 - blocks / multiprocessors)).alias("unused_ns")
    )
    share = _sum(small, "total_ns") / max(context.measured.kernel_ns, 1)
    where = f"kernels with fewer blocks than the GPU's {multiprocessors} multiprocessors"
    evidence = f"{share:.0%} of kernel time runs in {where}"
    advice = "use a larger batch or several concurrent streams; " + _BENCH + " finds the knee"
    return _Found(evidence, _sum(small, "unused_ns"), advice) if small.height else None


@_rule("allocations", host_times=True, under_profiler=True)
def find_allocations(context: RuleContext) -> _Found | None:
    calls = context.measured.api.filter(pl.col("name").str.contains(_ALLOCATIONS))
    count, total_ns = _sum(calls, "count"), _sum(calls, "total_ns")
    evidence = f"{count} calls in the measured part allocate, free, or load code: {format_duration(total_ns)}"
    advice = "allocate once and reuse (I/O binding); warm up until nothing more is loaded"
    return _Found(evidence, total_ns, advice) if count else None


@_rule("busiest-operator", on_cpu=True, under_profiler=True)
def find_busiest_operator(context: RuleContext) -> _Found | None:
    name = pl.col("name").cast(pl.String)
    operators = context.measured.trace.ranges.filter(name.str.contains(_OPERATOR))
    if context.facts.stage is not Stage.PREPROCESS or operators.is_empty():
        return None
    table = (
        operators.group_by(name.str.extract(_OPERATOR).alias("name"))
        .agg(
            (pl.col("end_ns") - pl.col("start_ns")).sum().alias("total_ns"),
            pl.col("thread").n_unique(),
        )
        .sort("total_ns", "name", descending=[True, False])
    )
    first, total_ns, threads = table.row(0)
    share = total_ns / max(_sum(table, "total_ns"), 1)
    evidence = f"{first} takes {share:.0%} of the operators' time, on {threads} threads"
    return _Found(
        evidence,
        int(total_ns / threads),
        Call("preprocess") + " tunes threads, prefetching, and the decoder",
    )


@_rule("slow-layers", on_gpu=False, on_cpu=True)
def find_slow_layers(context: RuleContext) -> _Found | None:
    roofline = context.roofline
    if roofline is None or roofline.contradiction or context.measured.trace.kernels.height:
        return None
    timed = [
        layer
        for layer in roofline.layers
        if layer.measured_ns is not None and layer.measured_ns > layer.bound_ns
    ]
    above_ns = sum(layer.above_bound_ns for layer in timed)
    if roofline.measured_ns is not None:
        # at most the excess of the whole inference
        above_ns = min(above_ns, roofline.measured_ns - roofline.bound_ns)
    if above_ns <= 0:
        return None
    evidence = (
        f"{len(timed)} layers take up to {format_duration(above_ns)} more per inference than their arithmetic and memory traffic require; "
        f"{timed[0].cost.op} {timed[0].cost.name} the most"
    )
    advice = "more threads or larger batches: "
    advice += Call("bench", option={context.backend: {"threads": "N"}}, batch=[1, 8, 32])
    if not any(layer.cost.type == "int8" for layer in timed):
        smaller = Call("build", precision="int8", backend="onnxruntime")
        advice += "; INT8 if accuracy allows: " + smaller
    return _Found(evidence, int(above_ns * context.iterations), advice)


def _advise_fusion(context: RuleContext) -> str:
    others = [name for name in list_fusing_backends("cuda") if name != context.facts.backend]
    build = Call("build", backend=others)
    own = "torch.compile, or " if context.facts.backend is None else ""
    return f"fuse elementwise work into the matrix kernels: {own}" + build + ", then " + _BENCH


def _format_gap_count(count: int) -> str:
    return "1 gap" if count == 1 else f"{count} gaps"


def _format_time(cores: TensorCores, layers: tuple[LayerUse, ...]) -> str:
    ns = sum(layer.time_ns for layer in layers) // cores.iterations
    return f"{format_duration(ns)}{' per iteration' if cores.iterations > 1 else ''}"


def _sum(frame: pl.DataFrame, column: str) -> int:
    return int(frame[column].sum())
