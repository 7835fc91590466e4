"""The largest part of a stage's time, from the split of its timeline."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import polars as pl

from optpipe.core.quantity import format_duration
from optpipe.core.verdict import Verdict, combine_verdicts
from optpipe.core.wording import Call
from optpipe.trace.analysis import (
    VERSION_SUFFIX,
    Analysis,
    IdleCause,
    TimeIntervals,
    Timeline,
    array_from_column,
    complement_intervals,
    intersect_intervals,
    intervals_from_disjoint,
    sum_within,
    unite_intervals,
)
from optpipe.trace.counters import CountedWork, Counters, weigh_counters
from optpipe.trace.details import OsCallKind, classify_os_call
from optpipe.trace.kernels import shorten_name
from optpipe.trace.nsys import ITERATION_RANGE
from optpipe.trace.read import match_names
from optpipe.trace.roofline import LIMITED_SHARE, Roofline

GAP_NS = 50_000
"""Longer than any framework takes from one launch to the next (5 to 30 µs)."""
_NEITHER = "of peak: kernel latency, occupancy, kernel selection, or elementwise work in separate kernels is the limit"
GAP_SHARE = 0.05
_SHOWN = 10


class LimitingFactor(StrEnum):
    CPU = "CPU"
    LAUNCH = "launch"
    IO = "I/O"
    """The host reads or writes files or the network; known only if OS calls were recorded."""
    COPY = "copy"
    SYNCHRONIZATION = "synchronization"
    MEMORY = "memory-bound GPU"
    MATH = "math-bound GPU"
    BELOW_PEAKS = "GPU below its peaks"
    """Kernels run below the peaks of memory and arithmetic: latency, occupancy, or efficiency limits them."""
    GPU = "GPU"
    """Kernels run, and the recording does not tell which of the three limits them."""
    WITHHELD = "withheld"


@dataclass(frozen=True, slots=True)
class Bottleneck:
    verdict: LimitingFactor
    share: float
    shares: Mapping[LimitingFactor, float]
    why: str
    idle_scale: float = 1.0
    """The part of the GPU's idle time that remains without the profiler; 1 unless the profiler distorts the host."""
    busy_share: float | None = None
    """Share of the time without the profiler in which a kernel runs; None if kernels are not known."""


def find_long_gaps(timeline: Timeline) -> TimeIntervals:
    """Gaps of at least 50 µs in which the host does other work than launching."""
    waits = timeline.idle[IdleCause.HOST_WAIT]
    kept = (waits.ends - waits.starts) >= GAP_NS
    return intervals_from_disjoint(waits.starts[kept], waits.ends[kept])


def find_bottleneck(
    measured: Analysis,
    roofs: Roofline | None = None,
    idle_scale: float = 1.0,
    counters: Counters | None = None,
) -> Bottleneck:
    """Chooses between math, memory, and neither by the counters of most kernel time, or else by the roofline.

    Without both, only `GPU` is known.
    """
    timeline = measured.timeline
    if measured.trace.kernels.is_empty():
        return _judge_without_gpu(measured)
    gaps, idle = find_long_gaps(timeline), timeline.idle_by_cause
    away, reading = gaps.total_ns, intersect_intervals(gaps, _find_io(measured)).total_ns
    known = roofs is not None and roofs.contradiction is None
    counted = weigh_counters(
        counters,
        measured.kernels.select("name", "total_ns", "count").iter_rows(),
        max(measured.iterations.height, 1),
    )
    if counted is not None and counted.representative:
        gpu, basis = _limit_as_counted(counted)
    elif roofs is not None and known and measured.iterations.height and timeline.busy.total_ns:
        gpu, basis = _limit_at_peaks(measured, roofs)
    else:
        by_kind = measured.kernels.group_by("kind").agg(pl.col("share").sum())
        largest = by_kind.sort("share", "kind", descending=[True, False]).head(3)
        kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in largest.iter_rows())
        gpu = LimitingFactor.GPU
        basis = f"by their names {kinds}; to see whether memory or arithmetic limits them, use "
        basis += "the model's graph (" + Call("profile", "MODEL") + ")"
    host_ns, kernel_ns = idle[IdleCause.HOST_WAIT] - away, idle[IdleCause.KERNEL_WAIT]
    parts = {
        gpu: float(timeline.busy.total_ns),
        LimitingFactor.LAUNCH: idle_scale * (host_ns + kernel_ns),
        LimitingFactor.CPU: idle_scale * (away - reading),
        **({LimitingFactor.IO: idle_scale * reading} if measured.trace.os_calls.height else {}),
        LimitingFactor.COPY: float(idle[IdleCause.COPY]),
        LimitingFactor.SYNCHRONIZATION: idle_scale * idle[IdleCause.SYNCHRONIZATION],
    }
    span = max(sum(parts.values()), 1)
    limit = max(parts, key=lambda part: parts[part])
    shares = {part: ns / span for part, ns in parts.items()}
    launch = "the GPU waits between kernels for the next launch"
    if kernel_ns > host_ns:
        launch = "the GPU waits for already launched kernels to start: for each other, or for their launch to arrive"
    if measured.kernels["name"].str.contains("nvjpeg").any():
        launch += "; or for its JPEG decoder, which recordings do not show"
    why = {
        LimitingFactor.LAUNCH: launch,
        LimitingFactor.CPU: "the GPU waits while the host does work other than launching",
        LimitingFactor.IO: "the GPU waits while the host reads or writes files or the network",
        LimitingFactor.COPY: "copies run while no kernel does",
        LimitingFactor.SYNCHRONIZATION: "the GPU is idle while the host returns from a synchronizing call",
    }.get(limit, "kernels run most of the time; " + basis)
    return Bottleneck(limit, shares[limit], shares, why, idle_scale, busy_share=shares[gpu])


def _limit_at_peaks(measured: Analysis, roofs: Roofline) -> tuple[LimitingFactor, str]:
    """Compares the layers' time at the peaks, with elementwise operators fused, with the kernel time.

    Over 70%, arithmetic or memory limits, otherwise neither.
    """
    least_ns, busy_ns = (
        roofs.layers_ns,
        measured.timeline.busy.total_ns / measured.iterations.height,
    )
    why = f"at the device's peak rates, the layers take {format_duration(least_ns)} ({roofs.math_share:.0%} of it arithmetic), "
    why += f"{least_ns / busy_ns:.0%} of {format_duration(busy_ns)} per iteration"
    if least_ns / busy_ns >= LIMITED_SHARE:
        return (LimitingFactor.MATH if roofs.math_share >= 0.5 else LimitingFactor.MEMORY), why
    return LimitingFactor.BELOW_PEAKS, f"{why}; under {LIMITED_SHARE:.0%} {_NEITHER}"


def _limit_as_counted(counted: CountedWork) -> tuple[LimitingFactor, str]:
    dram, sm = counted.dram_peak_share, counted.sm_peak_share
    why = f"in the kernels that Nsight Compute counted ({counted.share:.0%} of kernel time), DRAM runs at {dram:.0%} "
    why += f"of its peak, the multiprocessors at {sm:.0%}"
    if max(dram, sm) >= LIMITED_SHARE:
        return (LimitingFactor.MEMORY if dram >= sm else LimitingFactor.MATH), why
    return LimitingFactor.BELOW_PEAKS, f"{why}; under {LIMITED_SHARE:.0%} {_NEITHER}"


def _judge_without_gpu(measured: Analysis) -> Bottleneck:
    if measured.trace.api.height or measured.trace.graph_launches_untraced:
        why = "CUDA calls but no GPU rows: the trace does not show what limits it"
        return Bottleneck(LimitingFactor.WITHHELD, 0.0, {}, why)
    if measured.trace.os_calls.is_empty():
        why = "no GPU work; time in files and locks counts as CPU"
        return Bottleneck(LimitingFactor.CPU, 1.0, {LimitingFactor.CPU: 1.0}, why)
    span_ns = max(measured.timeline.span_ns, 1)
    share = min(_find_io(measured).total_ns / span_ns, 1.0)
    shares = {LimitingFactor.CPU: 1 - share, LimitingFactor.IO: share}
    if share >= 0.5:
        why = "no GPU work; most of the time some thread of the stage reads or writes files or the network"
        return Bottleneck(LimitingFactor.IO, share, shares, why)
    return Bottleneck(LimitingFactor.CPU, 1 - share, shares, "no GPU work")


def _find_io(measured: Analysis) -> TimeIntervals:
    """When the threads that launch work, or else those that open ranges, are in calls for files or the network."""
    trace = measured.trace
    owners = trace.api if trace.api.height else trace.ranges
    calls = trace.os_calls
    if owners.height:
        calls = calls.filter(pl.col("thread").is_in(owners["thread"].unique().implode()))
    names = calls["name"].cast(pl.String).unique().to_list()
    io = [
        name for name in names if classify_os_call(name) in (OsCallKind.FILES, OsCallKind.NETWORK)
    ]
    mine = calls.filter(pl.col("name").cast(pl.String).is_in(io)).sort("start_ns")
    low, high = measured.timeline.start_ns, measured.timeline.end_ns
    starts, ends = (
        np.clip(array_from_column(mine, column), low, high) for column in ("start_ns", "end_ns")
    )
    return unite_intervals(starts, ends)


@dataclass(frozen=True, slots=True)
class Gap:
    start_ns: int
    duration_ns: int
    by_cause: Mapping[IdleCause, int]
    """Adds up to `duration_ns`."""
    before: str | None
    """The kernel or copy that ends it; None at the end of the trace."""
    host: str


def find_gaps(measured: Analysis) -> tuple[Gap, ...]:
    """The longest times without a kernel that are not shorter than `choose_gap_threshold_ns`."""
    free = complement_intervals(
        measured.timeline.busy, measured.timeline.start_ns, measured.timeline.end_ns
    )
    kept = free.ends - free.starts >= choose_gap_threshold_ns(measured)
    starts, ends = free.starts[kept], free.ends[kept]
    longest = np.argsort(starts - ends, kind="stable")[:_SHOWN]
    starts, ends = starts[longest], ends[longest]
    causes = {
        cause: sum_within(measured.timeline.idle[cause], starts, ends).tolist()
        for cause in IdleCause
    }
    operations, trace = measured.timeline.operations, measured.trace
    gaps = []
    for place, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        following, before = int(np.searchsorted(operations.starts, end)), None
        if following < operations.starts.size:
            row = int(operations.row[following])
            is_kernel = operations.is_kernel[following]
            before = (
                shorten_name(str(trace.kernels["name"][row]))
                if is_kernel
                else str(trace.copies["kind"][row])
            )
        during = trace.api.filter((pl.col("end_ns") > start) & (pl.col("start_ns") < end))
        names = during.sort(
            pl.col("end_ns") - pl.col("start_ns"), descending=True, maintain_order=True
        )["name"]
        named = (
            names.cast(pl.String)
            .str.replace(VERSION_SUFFIX, "")
            .unique(maintain_order=True)
            .head(2)
        )
        by_cause = {cause: parts[place] for cause, parts in causes.items() if parts[place]}
        gaps.append(Gap(start, end - start, by_cause, before, ", ".join(named) or "no CUDA call"))
    return tuple(gaps)


def choose_gap_threshold_ns(measured: Analysis) -> int:
    iteration_ns = measured.iteration_ns
    return GAP_NS if iteration_ns is None else int(min(GAP_NS, GAP_SHARE * iteration_ns))


def has_notable_gaps(measured: Analysis, gaps: TimeIntervals) -> bool:
    """True if one gap matters, or all gaps of an iteration together: a hundred launches that each wait 3 µs."""
    if not gaps.starts.size:
        return False
    least_ns = choose_gap_threshold_ns(measured)
    iterations = max(measured.iterations.height, 1)
    return bool(
        (gaps.ends - gaps.starts).max() >= least_ns or gaps.total_ns >= least_ns * iterations
    )


LAUNCH_CALLS = r"^(cudaLaunchKernel|cudaLaunchCooperativeKernel|cuLaunchKernel|cuLaunchCooperativeKernel|cudaGraphLaunch|cuGraphLaunch)"
ABSOLUTE_TIMES = "absolute times"
"""Withheld if the profiler slowed the host; kernel times and shares still hold."""
UNPROFILED = "time without the profiler"
_OF_ALL_EVENTS = ("totals", "kernels", "idle_by_cause", "tensor_cores")
"""Views that are wrong when events are missing."""
_LOST_SHARE = 0.01
_CLOCKS_APART_NS = 1_000_000
_OVERHEAD_SHARE = 0.2
_PROJECTION_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class Check:
    """One question about the trace. PASS: reliable, FAIL: wrong, INCONCLUSIVE: unknown."""

    name: str
    verdict: Verdict
    detail: str
    withholds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Quality:
    verdict: Verdict
    checks: tuple[Check, ...]
    withheld: Mapping[str, str]

    @property
    def distorts_host(self) -> bool:
        """True if the profiler slowed the host so much that host times are not reliable."""
        return ABSOLUTE_TIMES in self.withheld


def describe_quality(quality: Quality) -> str:
    """`VALID`, or `INVALID (lost_events)` with the checks that the trace did not pass."""
    checks = [check.name for check in quality.checks if check.verdict is not Verdict.PASS]
    return f"INVALID ({', '.join(checks)})" if checks else "VALID"


def check_quality(
    measured: Analysis, unprofiled_iteration_ns: float | None = None, *, expects_gpu: bool = True
) -> Quality:
    """Checks `measured`; `unprofiled_iteration_ns` gives the profiler's overhead."""
    trace, kernels, needs_kernels = (
        measured.trace,
        measured.trace.kernels,
        ("kernels", "idle_by_cause", "tensor_cores"),
    )
    checks = []
    if kernels.height:
        checks.append(Check("gpu_rows", Verdict.PASS, f"{kernels.height} kernels"))
    elif not expects_gpu and trace.api.is_empty():
        detail = "no GPU rows, and none expected: the stage runs on the CPU"
        checks.append(Check("gpu_rows", Verdict.PASS, detail, needs_kernels))
    else:
        why = "neither CUDA calls nor kernels were recorded"
        if trace.api.height:
            why = "CUDA calls were recorded, but no kernels"
        checks.append(Check("gpu_rows", Verdict.INCONCLUSIVE, f"no GPU rows: {why}", needs_kernels))
    if count := trace.graph_launches_untraced:
        detail = f"{count} CUDA graph launches are one opaque row each; record with --cuda-graph-trace=node"
        checks.append(Check("graph_mode", Verdict.FAIL, detail, needs_kernels))
    else:
        graphs = kernels["graph_node"].is_not_null().sum()
        detail = (
            f"node: {graphs} kernels of CUDA graphs have their own rows"
            if graphs
            else "no CUDA graph"
        )
        checks.append(Check("graph_mode", Verdict.PASS, detail))
    checks += [
        _check_lost_events(measured),
        _check_constant_kernel_count(measured),
        _check_projection_against_wall(measured),
        _check_overhead(measured, unprofiled_iteration_ns),
    ]
    devices = kernels["device"].n_unique()
    if devices > 1:
        detail = f"kernels of {devices} GPUs, whose busy times would mix; record one GPU with CUDA_VISIBLE_DEVICES"
        checks.append(Check("one_gpu", Verdict.INCONCLUSIVE, detail, ("idle_by_cause",)))
    withheld = {view: check.detail for check in checks for view in check.withholds}
    return Quality(combine_verdicts(check.verdict for check in checks), tuple(checks), withheld)


def _check_lost_events(measured: Analysis) -> Check:
    trace, api_row = measured.trace, measured.timeline.operations.api_row
    if trace.diagnostics:
        return Check("lost_events", Verdict.FAIL, trace.diagnostics[0], _OF_ALL_EVENTS)
    if disorder := _find_disorder(measured):
        return Check("lost_events", Verdict.FAIL, disorder, _OF_ALL_EVENTS)
    launching = match_names(trace.api, LAUNCH_CALLS).to_numpy()
    answered = np.zeros(trace.api.height, dtype=np.bool_)
    answered[api_row[api_row >= 0]] = True
    # launches into a graph under capture run nothing and do not count
    begins, ends = (
        np.sort(
            array_from_column(
                trace.api.filter(match_names(trace.api, rf"^(cuda|cu)Stream{edge}Capture")), column
            )
        )
        for edge, column in (("Begin", "start_ns"), ("End", "end_ns"))
    )
    following = np.searchsorted(ends, begins)
    known = following < ends.size
    captures = unite_intervals(begins[known], ends[following[known]])
    starts = array_from_column(trace.api, "start_ns")
    launching = launching & (answered | (sum_within(captures, starts, starts + 1) == 0))
    launches, lost = int(launching.sum()), int((launching & ~answered).sum())
    if (
        launches
        and lost / launches > _LOST_SHARE
        and trace.kernels.height
        and not trace.graph_launches_untraced
    ):
        detail = f"{lost} of {launches} launches have no kernel: events were lost; record a shorter range"
        return Check("lost_events", Verdict.FAIL, detail, _OF_ALL_EVENTS)
    if not launches and trace.kernels.height:
        detail = "the launching API calls were not recorded; trace with -t cuda"
        return Check("lost_events", Verdict.INCONCLUSIVE, detail, ("executions", "idle_by_cause"))
    return Check(
        "lost_events", Verdict.PASS, f"{launches - lost} of {launches} launches have their kernels"
    )


def _find_disorder(measured: Analysis) -> str | None:
    """What no GPU does: work before its call, beyond the accuracy of both clocks; iterations of one thread at the same time."""
    operations, api = measured.timeline.operations, measured.trace.api
    known = operations.api_row >= 0
    called = array_from_column(api, "start_ns")[operations.api_row[known]]
    early = int((operations.starts[known] < called - _CLOCKS_APART_NS).sum())
    if early:
        return f"{early} kernels or copies start before the calls that launch them"
    turns = measured.trace.ranges.filter(pl.col("name").cast(pl.String) == ITERATION_RANGE)
    ordered = turns.sort("thread", "start_ns", "end_ns")
    overlap = pl.col("start_ns") < pl.col("end_ns").shift(1).over("thread")
    if not ordered.filter(overlap).is_empty():
        return "iterations of one thread overlap"
    return None


def _check_constant_kernel_count(measured: Analysis) -> Check:
    counts = measured.iterations["kernels"].to_list()
    if len(counts) < 2:
        detail = "nothing repeats in the trace, so iterations cannot be compared"
        needed = Verdict.INCONCLUSIVE if measured.trace.kernels.height else Verdict.PASS
        return Check("constant_kernel_count", needed, detail, ("iterations",))
    if not any(counts) and measured.trace.kernels.height:
        detail = "threads other than the iterations' own launch the kernels, so they cannot be counted per iteration"
        return Check("constant_kernel_count", Verdict.INCONCLUSIVE, detail, ("iterations.kernels",))
    if len(set(counts)) == 1:
        return Check(
            "constant_kernel_count",
            Verdict.PASS,
            f"{counts[0]} kernels in each of {len(counts)} iterations",
        )
    if len(set(counts[1:])) == 1 and len(counts) > 2:
        detail = f"{counts[0]} kernels in the first of {len(counts)} iterations, {counts[1]} in each of the others; warm up longer"
        return Check("constant_kernel_count", Verdict.PASS, detail)
    detail = f"between {min(counts)} and {max(counts)} kernels per iteration: iterations do different work, or events were lost"
    return Check("constant_kernel_count", Verdict.FAIL, detail, ("iterations",))


def _check_projection_against_wall(measured: Analysis) -> Check:
    """An iteration that only enqueues work ends on the host long before the GPU: its wall time is not a latency."""
    iterations = measured.iterations.filter(pl.col("gpu_end_ns").is_not_null())
    if iterations.is_empty():
        return Check("projection_against_wall", Verdict.PASS, "no iteration launches GPU work")
    on_gpu = int((iterations["gpu_end_ns"] - iterations["start_ns"]).sum())
    after = on_gpu / max(int(iterations["wall_ns"].sum()), 1)
    detail = f"iterations end on the GPU after {after:.2f}× their wall time on the host"
    if after > _PROJECTION_RATIO:
        detail += ": they only enqueue work"
        return Check(
            "projection_against_wall",
            Verdict.INCONCLUSIVE,
            detail,
            ("iterations.wall_ns as latency",),
        )
    return Check("projection_against_wall", Verdict.PASS, detail)


def _check_overhead(measured: Analysis, unprofiled_iteration_ns: float | None) -> Check:
    profiled = measured.iteration_ns
    if unprofiled_iteration_ns and profiled:
        share = profiled / unprofiled_iteration_ns - 1
        slow, usual = (format_duration(time_ns) for time_ns in (profiled, unprofiled_iteration_ns))
        detail = f"an iteration takes {slow} under the profiler, {usual} without ({share:+.0%})"
    else:
        share = measured.trace.overhead_ns / max(measured.timeline.span_ns, 1)
        own = format_duration(measured.trace.overhead_ns)
        detail = f"the profiler reports {own} of overhead; no run without it was measured"
    if share < -_OVERHEAD_SHARE:
        detail = f"{detail}: other work disturbed one of the two runs, so neither is trusted"
        return Check("overhead", Verdict.INCONCLUSIVE, detail, (ABSOLUTE_TIMES, UNPROFILED))
    if share > _OVERHEAD_SHARE:
        return Check("overhead", Verdict.INCONCLUSIVE, detail, (ABSOLUTE_TIMES,))
    return Check("overhead", Verdict.PASS, detail)
