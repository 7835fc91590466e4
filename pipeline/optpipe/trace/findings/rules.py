"""Findings: one small function per type. Each gives numbers, rows of the trace, and the command to try next, or nothing.

Gains are upper bounds over the measured part: the time that would be gone if the cause were.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import polars as pl

from optpipe.core.units import bytes_text, duration_text
from optpipe.trace.findings.bottleneck import GAP_NS, long_gaps
from optpipe.trace.findings.gaps import gap_rows, together_matter
from optpipe.trace.findings.stage_rules import (
    Facts,
    Finding,
    busiest_operator,
    fusing,
    paid_once,
    saving_ns,
    slow_layers,
)
from optpipe.trace.layers.tensor_cores import LayerUse, TensorCores
from optpipe.trace.timeline.intervals import difference
from optpipe.trace.timeline.kernels import short_name
from optpipe.trace.timeline.timeline import WAITING_CALLS, Cause

_WORTH_SHARE = 0.02
"""Findings worth less than 2 % of the measured time are not worth a line."""
_WORTH_GAP_SHARE = 0.005
"""A gap may matter to one iteration of hundreds; below half a percent of all it is worth no line either."""
HOST_RULES = frozenset(
    {"launch-gaps", "host-gaps", "device-gaps", "synchronization", "allocations", "first-iteration", "operating-system"}
)
"""Rules whose evidence is times of the host, which a profiler's overhead distorts."""
_UNDER_PROFILER = frozenset({"allocations", "first-iteration", "operating-system", "busiest-operator"})
"""Rules whose gain was timed on the host under the profiler, so that it is a part of the time there."""
WITHOUT_PROFILER = "; without the profiler"
"""What follows in an evidence holds although the profiler slowed the host."""
_SMALL_COPY_BYTES = 64 * 1024
_ROWS = 5
__all__ = ["HOST_RULES", "WITHOUT_PROFILER", "Facts", "Finding", "findings"]
_FIRST_SHARE = 0.2
_ALLOCATIONS = (
    r"^(cudaMalloc|cudaFree|cudaHostAlloc|cudaFreeHost|cudaMallocHost|cuMemAlloc|cuMemFree|cuModuleLoad|cuLibraryLoad|"
    r"cudaStreamCreate|cudaEventCreate)"
)


Rule = Callable[[Facts], Finding | None]


def findings(facts: Facts, *, with_gaps: bool = True) -> tuple[Finding, ...]:
    """All findings that matter, the largest estimated gain first; those from gaps only where the trace supports these."""
    has_gpu = facts.measured.trace.kernels.height > 0
    found = [finding for rule in (_GPU_RULES if has_gpu else _CPU_RULES) if (finding := rule(facts)) is not None]
    kept = [finding for finding in found if finding.gain_ns >= _WORTH_SHARE * _time_of(finding.rule, facts)]
    if has_gpu and with_gaps:  # these have a threshold of their own
        gaps = [_undisturbed(gap, facts) for rule in _GAP_RULES if (gap := rule(facts)) is not None]
        kept += [gap for gap in gaps if gap.gain_ns >= _WORTH_GAP_SHARE * _time_of(gap.rule, facts)]
    if facts.stage == "preprocess":
        kept = [replace(each, advice=_PREPROCESS_ADVICE.get(each.rule, each.advice)) for each in kept]
    timed = [replace(finding, of_ns=_time_of(finding.rule, facts)) for finding in kept]
    return tuple(sorted(timed, key=lambda finding: (-finding.gain_ns / max(finding.of_ns, 1), finding.rule)))


def _time_of(rule: str, facts: Facts) -> float:
    """What a gain is a part of: where the profiler slowed the host, the time without it for what it did not slow."""
    if facts.undisturbed_ns is None or rule in _UNDER_PROFILER:
        return facts.measured.split.span_ns
    return facts.undisturbed_ns * facts.iterations


def _undisturbed(gap: Finding, facts: Facts) -> Finding:
    """A gap as long as an iteration without the profiler leaves room for: it delays launches, and hardly the kernels."""
    if facts.undisturbed_ns is None:
        return gap
    gain_ns = int(gap.gain_ns * facts.idle_scale)
    each = f"{WITHOUT_PROFILER}, {duration_text(gain_ns / facts.iterations)} of an iteration"
    return replace(gap, gain_ns=gain_ns, evidence=gap.evidence + each)


def launch_gaps(facts: Facts) -> Finding | None:
    """Short waits between kernels for the next launch, which a CUDA graph removes."""
    timeline = facts.measured.timeline
    away = long_gaps(timeline)
    waits = timeline.idle[Cause.HOST_WAIT]
    short = difference(waits, away)
    gain, count = short.total_ns, short.starts.size
    if not together_matter(facts.measured, short):
        return None
    kernels = facts.measured.trace.kernels.height
    evidence = (
        f"{_gaps_text(count)} of {duration_text(gain / count)} on average while the host prepares the next launch; "
        f"{kernels} kernels of {duration_text(facts.measured.kernel_ns / max(kernels, 1))} on average"
    )
    graph = f"replay a CUDA graph (optpipe build --option {facts.backend or 'onnxruntime'}.cuda_graph=true), "
    advice = f"{'' if facts.options.get('cuda_graph') else graph}use a larger batch, or launch fewer kernels; {fusing(facts)}"
    return Finding("launch-gaps", evidence, gain, advice, gap_rows(facts.measured, short.starts, short.ends))


def host_gaps(facts: Facts) -> Finding | None:
    """Long waits in which the host does other work than launching."""
    away = long_gaps(facts.measured.timeline)
    if not away.starts.size:
        return None
    evidence = f"{_gaps_text(away.starts.size)} over {duration_text(GAP_NS)}, {duration_text(away.total_ns)} in all, "
    evidence += "in which the host launches nothing"
    advice = "see what the host does there: optpipe profile --osrt, or --record python; preprocess on the GPU (optpipe preprocess)"
    if facts.stage == "inference":
        advice = "launch the next batch before this one is waited for (optpipe bench --streams); --record python shows what the host does"
    return Finding("host-gaps", evidence, away.total_ns, advice, gap_rows(facts.measured, away.starts, away.ends))


def device_gaps(facts: Facts) -> Finding | None:
    """Waits between kernels that were launched already: dependent, short kernels."""
    waits = facts.measured.timeline.idle[Cause.KERNEL_WAIT]
    if not together_matter(facts.measured, waits):
        return None
    each = duration_text(waits.total_ns / waits.starts.size)
    evidence = f"{_gaps_text(waits.starts.size)} of {each} between kernels that were launched already"
    advice = f"use a larger batch, or fewer, larger kernels; {fusing(facts)}"
    return Finding("device-gaps", evidence, waits.total_ns, advice, gap_rows(facts.measured, waits.starts, waits.ends))


def synchronizations(facts: Facts) -> Finding | None:
    """Idle time while the host returns from waiting for the GPU."""
    idle = facts.measured.timeline.idle[Cause.SYNCHRONIZATION]
    if not together_matter(facts.measured, idle):
        return None
    calls = facts.measured.api.filter(pl.col("name").str.contains(WAITING_CALLS))
    named = ", ".join(f"{row['count']} {row['name']}" for row in calls.head(3).iter_rows(named=True))
    each = _sum(calls, "count") / facts.iterations
    evidence = f"{duration_text(idle.total_ns)} idle inside waiting calls ({named}; {each:.1f} per iteration)"
    advice = "wait once per iteration, not per step; keep several batches in flight (optpipe bench --streams)"
    return Finding("synchronization", evidence, idle.total_ns, advice, gap_rows(facts.measured, idle.starts, idle.ends))


def exposed_copies(facts: Facts) -> Finding | None:
    """Copies during which no kernel runs."""
    gain = facts.measured.split.copy_only_ns
    if not gain:
        return None
    evidence = f"{duration_text(gain)} in which only copies run, of {duration_text(facts.measured.copy_ns)} of copies"
    advice = "copy on a second stream while the last batch computes, or keep the data on the device (I/O binding, DALI output)"
    return Finding("exposed-copies", evidence, gain, advice, _rows(facts.measured.copies))


def pageable_copies(facts: Facts) -> Finding | None:
    """Copies between the device and memory that is not pinned."""
    copies = facts.measured.copies
    pageable, pinned = (
        copies.filter((pl.col("source_memory") == kind) | (pl.col("target_memory") == kind))
        for kind in ("Pageable", "Pinned")
    )
    total_ns, size = _sum(pageable, "total_ns"), _sum(pageable, "bytes")
    if not total_ns:
        return None
    rate = size / total_ns  # bytes per nanosecond
    better = _sum(pinned, "bytes") / _sum(pinned, "total_ns") if _sum(pinned, "total_ns") else 2 * rate
    basis = "the pinned copies of this trace" if pinned.height else "twice the rate, as pinned memory usually gives"
    evidence = (
        f"{_sum(pageable, 'count')} copies of {bytes_text(size)} through pageable memory at "
        f"{bytes_text(rate * 1e9)}/s; the gain is by {basis}"
    )
    advice = "allocate host buffers as pinned memory (torch: pin_memory=True)"
    return Finding("pageable-copies", evidence, max(0, int(total_ns - size / better)), advice, _rows(pageable))


def small_copies(facts: Facts) -> Finding | None:
    """Many copies too small to be worth their launch."""
    small = facts.measured.trace.copies.filter(pl.col("bytes") < _SMALL_COPY_BYTES)
    if small.height < 10 * facts.iterations:
        return None
    evidence = (
        f"{small.height} copies under {bytes_text(_SMALL_COPY_BYTES)} ({small.height / facts.iterations:.0f} per iteration), "
        f"{bytes_text(_sum(small, 'bytes'))} in all"
    )
    gain = _sum(small, "end_ns") - _sum(small, "start_ns")
    return Finding("small-copies", evidence, gain, "gather them into one copy, or keep these tensors on the device")


def missed_tensor_cores(facts: Facts) -> Finding | None:
    """Matrix work on the ordinary units."""
    found = facts.tensor_cores
    if found is None or not found.missed:
        return None
    missed_ns = sum(each.time_ns for each in found.missed) // found.iterations
    evidence = (
        f"{len(found.missed)} of {found.eligible} eligible {found.basis} do not use Tensor Cores: {duration_text(missed_ns)}"
        f"{_each(found)}"
    )
    advice = "optpipe build --precision fp16, or --precision tf32 where fp32 must stay"
    if any(each.type in ("fp16", "bf16", "int8") for each in found.missed):
        advice = "another kernel: optpipe build --backend onnxruntime,inductor,torch and bench them; onnxruntime.cudnn_search=EXHAUSTIVE"
    return Finding("missed-tensor-cores", evidence, saving_ns(facts, found.missed), advice, _use_rows(found.missed))


def ineligible_for_tensor_cores(facts: Facts) -> Finding | None:
    """Matrix layers that their type or their channels keep from Tensor Cores."""
    found = facts.tensor_cores
    if found is None or not found.ineligible:
        return None
    shut_ns = sum(each.time_ns for each in found.ineligible) // found.iterations
    first, count = found.ineligible[0], len(found.ineligible)
    evidence = (
        f"{count} matrix {'layer' if count == 1 else 'layers'} cannot use Tensor Cores as they are: {duration_text(shut_ns)}"
        f"{_each(found)}; "
        f"{first.name}: {first.reason}"
    )
    by_type = first.reason is not None and "no Tensor Cores" in first.reason
    advice = (
        "optpipe build --precision fp16, or --precision tf32 where fp32 must stay"
        if by_type
        else "pad the channels with zeros, weights too, to the multiple (3 input channels to 8); or a backend that pads: "
        "optpipe build --backend torch,inductor and bench them"
    )
    gain = saving_ns(facts, found.ineligible)
    return Finding("ineligible-for-tensor-cores", evidence, gain, advice, _use_rows(found.ineligible))


def unfused_kernels(facts: Facts) -> Finding | None:
    """Normalization, casts and elementwise work in kernels of their own: a compiler puts them into their neighbours."""
    kernels = facts.measured.kernels.filter(pl.col("kind").is_in(["normalization", "elementwise", "cast"]))
    count, total_ns = _sum(kernels, "count"), _sum(kernels, "total_ns")
    evidence = (
        f"{count} kernels ({count / facts.iterations:.0f} per iteration) only normalize, cast or compute elementwise: "
        f"{duration_text(total_ns)}"
    )
    return Finding("unfused-kernels", evidence, total_ns, fusing(facts), _kernel_rows(kernels)) if count else None


def layout_changes(facts: Facts) -> Finding | None:
    """Kernels that only change the layout of tensors."""
    layouts = facts.measured.kernels.filter(pl.col("kind") == "layout")
    count, total_ns = _sum(layouts, "count"), _sum(layouts, "total_ns")
    evidence = f"{count} kernels only change the layout of tensors: {duration_text(total_ns)}"
    advice = "keep one layout: NHWC for Tensor Cores (onnxruntime.nhwc=true; torch channels_last)"
    if facts.options.get("nhwc"):
        advice = "the layout is NHWC already; what is left converts the model's inputs and outputs, which stay NCHW"
    return Finding("layout-changes", evidence, total_ns, advice, _kernel_rows(layouts)) if count else None


def underfilled(facts: Facts) -> Finding | None:
    """Kernels with fewer blocks than the GPU has multiprocessors."""
    if not facts.multiprocessors:
        return None
    duration, blocks = pl.col("end_ns") - pl.col("start_ns"), pl.col("blocks")
    small = facts.measured.trace.kernels.filter((blocks < facts.multiprocessors) & (blocks > 0)).select(
        duration.alias("total_ns"), (duration * (1 - blocks / facts.multiprocessors)).alias("unused_ns")
    )
    share = _sum(small, "total_ns") / max(facts.measured.kernel_ns, 1)
    evidence = f"{share:.0%} of kernel time runs in kernels with fewer blocks than the GPU's {facts.multiprocessors} multiprocessors"
    advice = "use a larger batch, or several streams at once: optpipe bench finds the knee"
    return Finding("underfilled-gpu", evidence, _sum(small, "unused_ns"), advice) if small.height else None


def allocations(facts: Facts) -> Finding | None:
    """Allocating, freeing and loading code inside the measured part."""
    calls = facts.measured.api.filter(pl.col("name").str.contains(_ALLOCATIONS))
    count, total_ns = _sum(calls, "count"), _sum(calls, "total_ns")
    evidence = f"{count} calls that allocate, free or load code inside the measured part: {duration_text(total_ns)}"
    advice = "allocate once and reuse (I/O binding); warm up until nothing is loaded any more"
    return Finding("allocations", evidence, total_ns, advice, _rows(calls)) if count else None


def first_iteration(facts: Facts) -> Finding | None:
    """What the first iteration costs over the others."""
    walls = facts.measured.iterations["wall_ns"].to_list()
    if len(walls) < 3:
        return None
    others = float(np.median(walls[1:]))
    if walls[0] <= (1 + _FIRST_SHARE) * others:
        return None
    evidence = (
        f"the first of {len(walls)} iterations takes {duration_text(walls[0])}, the others {duration_text(others)}"
    )
    on_gpu = facts.measured.trace.kernels.height > 0
    advice = "warm up before serving" + ("; a CUDA graph uploads on its first replay" if on_gpu else " (--warm-up)")
    return Finding("first-iteration", evidence, int(walls[0] - others), advice)


def operating_system(facts: Facts) -> Finding | None:
    """Time in calls to the operating system, where these were traced and no GPU is waiting."""
    calls = facts.measured.os_runtime
    if calls.is_empty():
        return None
    evidence = f"{_sum(calls, 'count')} calls to the operating system, {duration_text(_sum(calls, 'total_ns'))} over all threads"
    advice = "read files ahead in another thread; keep them in the page cache"
    return Finding("operating-system", evidence, int(calls["total_ns"][0]), advice, _rows(calls))


_FEED = "optpipe preprocess tunes threads, prefetch and the share of the hardware's JPEG decoder, whose work no recording shows"
_PREPROCESS_ADVICE = {
    "host-gaps": f"the host cannot feed the GPU: {_FEED}",
    "launch-gaps": f"a larger batch; {_FEED}",
    "device-gaps": f"a larger batch; {_FEED}",
    "synchronization": f"more batches ahead: {_FEED}",
    "exposed-copies": f"more batches ahead: {_FEED}",
    "small-copies": f"a larger batch; {_FEED}",
    "underfilled-gpu": f"a larger batch; {_FEED}",
}
"""What to try where no engine runs: nothing to capture into a graph, and no compiler that fuses."""
_GAP_RULES: tuple[Rule, ...] = (launch_gaps, host_gaps, device_gaps, synchronizations)
_GPU_RULES: tuple[Rule, ...] = (
    exposed_copies, pageable_copies, small_copies,
    missed_tensor_cores, ineligible_for_tensor_cores, unfused_kernels, layout_changes, underfilled, allocations, first_iteration,
    busiest_operator,
)  # fmt: skip
_CPU_RULES: tuple[Rule, ...] = (first_iteration, operating_system, paid_once, slow_layers, busiest_operator)
"""Without GPU rows nothing can be said about gaps, copies or kernels."""


def _gaps_text(count: int) -> str:
    return "1 gap" if count == 1 else f"{count} gaps"


def _each(found: TensorCores) -> str:
    return " per iteration" if found.iterations > 1 else ""


def _use_rows(layers: tuple[LayerUse, ...]) -> tuple[dict[str, Any], ...]:
    return tuple(asdict(each) for each in layers[:_ROWS])


def _sum(frame: pl.DataFrame, column: str) -> int:
    return int(frame[column].sum())


def _rows(table: pl.DataFrame) -> tuple[dict[str, Any], ...]:
    wanted = ("name", "kind", "source_memory", "target_memory", "count", "total_ns", "bytes")
    return tuple(table.head(_ROWS).select(column for column in wanted if column in table.columns).iter_rows(named=True))


def _kernel_rows(kernels: pl.DataFrame) -> tuple[dict[str, Any], ...]:
    head = kernels.head(_ROWS).select("name", "count", "total_ns")
    return tuple({**row, "name": short_name(row["name"])} for row in head.iter_rows(named=True))
