"""Whether the trace can be trusted, before anything is concluded from it; what it cannot support is withheld by name."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from optpipe.core.quantity import format_duration
from optpipe.core.verdict import Verdict, combine_verdicts
from optpipe.trace.recording.frames import Trace
from optpipe.trace.timeline.analysis import Analysis
from optpipe.trace.timeline.timeline import array_from_column, match_names, sum_within, unite_intervals

LAUNCH_CALLS = r"^(cudaLaunchKernel|cudaLaunchCooperativeKernel|cuLaunchKernel|cuLaunchCooperativeKernel|cudaGraphLaunch|cuGraphLaunch)"
ABSOLUTE_TIMES = "absolute times"
"""What is withheld where the profiler slowed the host: its times. Kernel times and shares still hold."""
UNPROFILED = "time without the profiler"
_OF_ALL_EVENTS = ("totals", "kernels", "idle_by_cause", "tensor_cores")
"""What is wrong when a part of the events is missing."""
_LOST_SHARE = 0.01
_OVERHEAD_SHARE = 0.2
_PROJECTION_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class Check:
    """One question about the trace: PASS it can be relied on, FAIL it is wrong, INCONCLUSIVE it cannot tell."""

    name: str
    verdict: Verdict
    detail: str
    withholds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Quality:
    """All checks, and what is withheld because of them."""

    verdict: Verdict
    checks: tuple[Check, ...]
    withheld: Mapping[str, str]

    @property
    def distorts_host(self) -> bool:
        """Whether the profiler slowed the host so much that its times say nothing; shares and kernel times still do."""
        return ABSOLUTE_TIMES in self.withheld


def check_quality(
    measured: Analysis, unprofiled_iteration_ns: float | None = None, *, expects_gpu: bool = True
) -> Quality:
    """Checks `measured`; with the time of an iteration outside the profiler, its overhead is a measured one."""
    checks = [
        _check_gpu_rows(measured, expects_gpu=expects_gpu),
        _check_graph_mode(measured),
        _check_lost_events(measured),
        _check_constant_kernel_count(measured),
        _check_projection_against_wall(measured),
        _check_overhead(measured, unprofiled_iteration_ns),
    ]
    devices = measured.trace.kernels["device"].n_unique()
    if devices > 1:
        detail = f"kernels of {devices} GPUs, whose busy times would mix; record one GPU with CUDA_VISIBLE_DEVICES"
        checks.append(Check("one_gpu", Verdict.INCONCLUSIVE, detail, ("idle_by_cause",)))
    withheld = {view: check.detail for check in checks for view in check.withholds}
    return Quality(combine_verdicts(check.verdict for check in checks), tuple(checks), withheld)


def _check_gpu_rows(measured: Analysis, *, expects_gpu: bool) -> Check:
    if measured.trace.kernels.height:
        return Check("gpu_rows", Verdict.PASS, f"{measured.trace.kernels.height} kernels")
    withheld = ("kernels", "idle_by_cause", "tensor_cores")
    if not expects_gpu and measured.trace.api.is_empty():
        return Check("gpu_rows", Verdict.PASS, "no GPU rows, and none expected: the stage runs on the CPU", withheld)
    calls = measured.trace.api.height
    why = "CUDA calls were recorded, but no kernels" if calls else "neither CUDA calls nor kernels were recorded"
    return Check("gpu_rows", Verdict.INCONCLUSIVE, f"no GPU rows: {why}", withheld)


def _check_graph_mode(measured: Analysis) -> Check:
    count = measured.trace.graph_launches_untraced
    if count:
        detail = f"{count} CUDA graph launches are one opaque row each; record with --cuda-graph-trace=node"
        return Check("graph_mode", Verdict.FAIL, detail, ("kernels", "idle_by_cause", "tensor_cores"))
    graphs = measured.trace.kernels["graph_node"].is_not_null().sum()
    return Check(
        "graph_mode",
        Verdict.PASS,
        f"node: {graphs} kernels of CUDA graphs have their own rows" if graphs else "no CUDA graph",
    )


def _check_lost_events(measured: Analysis) -> Check:
    if measured.trace.diagnostics:
        return Check("lost_events", Verdict.FAIL, measured.trace.diagnostics[0], _OF_ALL_EVENTS)
    trace, api_row = measured.trace, measured.timeline.operations.api_row
    launching = match_names(trace.api, LAUNCH_CALLS)
    answered = np.zeros(trace.api.height, dtype=np.bool_)
    answered[api_row[api_row >= 0]] = True
    # Launches into a graph under capture run nothing and do not count.
    launching &= answered | ~_find_captured_calls(trace)
    launches, lost = int(launching.sum()), int((launching & ~answered).sum())
    if (
        launches
        and lost / launches > _LOST_SHARE
        and measured.trace.kernels.height
        and not measured.trace.graph_launches_untraced
    ):
        detail = f"{lost} of {launches} launches have no kernel: events were lost; record a shorter range"
        return Check("lost_events", Verdict.FAIL, detail, _OF_ALL_EVENTS)
    if not launches and measured.trace.kernels.height:
        detail = "the launching API calls were not recorded; trace with -t cuda"
        return Check("lost_events", Verdict.INCONCLUSIVE, detail, ("executions", "idle_by_cause"))
    return Check("lost_events", Verdict.PASS, f"{launches - lost} of {launches} launches have their kernels")


def _find_captured_calls(trace: Trace) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    begins = np.sort(
        array_from_column(
            trace.api.filter(match_names(trace.api, r"^(cudaStreamBeginCapture|cuStreamBeginCapture)")), "start_ns"
        )
    )
    ends = np.sort(
        array_from_column(
            trace.api.filter(match_names(trace.api, r"^(cudaStreamEndCapture|cuStreamEndCapture)")), "end_ns"
        )
    )
    if begins.size == 0 or ends.size == 0:
        return np.zeros(trace.api.height, dtype=np.bool_)
    following = np.searchsorted(ends, begins)
    known = following < ends.size
    captures = unite_intervals(begins[known], ends[following[known]])
    starts = array_from_column(trace.api, "start_ns")
    return np.asarray(sum_within(captures, starts, starts + 1) > 0)


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
        return Check("constant_kernel_count", Verdict.PASS, f"{counts[0]} kernels in each of {len(counts)} iterations")
    if len(set(counts[1:])) == 1 and len(counts) > 2:
        detail = f"{counts[0]} kernels in the first of {len(counts)} iterations, {counts[1]} in each of the others; warm up longer"
        return Check("constant_kernel_count", Verdict.PASS, detail)
    detail = f"between {min(counts)} and {max(counts)} kernels per iteration: iterations do different work, or events were lost"
    return Check("constant_kernel_count", Verdict.FAIL, detail, ("iterations",))


def _check_projection_against_wall(measured: Analysis) -> Check:
    """An iteration that only enqueues ends on the host long before it does on the GPU: its wall time is not a latency."""
    iterations = measured.iterations.filter(pl.col("gpu_end_ns").is_not_null())
    if iterations.is_empty():
        return Check("projection_against_wall", Verdict.PASS, "no iteration launches GPU work")
    on_gpu = int((iterations["gpu_end_ns"] - iterations["start_ns"]).sum())
    after = on_gpu / max(int(iterations["wall_ns"].sum()), 1)
    detail = f"iterations end on the GPU after {after:.2f}× their wall time on the host"
    if after > _PROJECTION_RATIO:
        return Check(
            "projection_against_wall",
            Verdict.INCONCLUSIVE,
            f"{detail}: they only enqueue work",
            ("iterations.wall_ns as latency",),
        )
    return Check("projection_against_wall", Verdict.PASS, detail)


def _check_overhead(measured: Analysis, unprofiled_iteration_ns: float | None) -> Check:
    profiled = measured.iteration_ns
    if unprofiled_iteration_ns and profiled:
        share = profiled / unprofiled_iteration_ns - 1
        times_text = (
            f"{format_duration(profiled)} under the profiler, {format_duration(unprofiled_iteration_ns)} without"
        )
        detail = f"an iteration takes {times_text} ({share:+.0%})"
    else:
        share = measured.trace.overhead_ns / max(measured.split.span_ns, 1)
        own = format_duration(measured.trace.overhead_ns)
        detail = f"the profiler reports {own} of overhead; no run without it was measured"
    if share < -_OVERHEAD_SHARE:
        detail = f"{detail}: other work disturbed one of the two runs, so neither is trusted"
        return Check("overhead", Verdict.INCONCLUSIVE, detail, (ABSOLUTE_TIMES, UNPROFILED))
    if share > _OVERHEAD_SHARE:
        return Check("overhead", Verdict.INCONCLUSIVE, detail, (ABSOLUTE_TIMES,))
    return Check("overhead", Verdict.PASS, detail)
