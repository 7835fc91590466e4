"""A trace judged: quality first, then the views, then what limits the stage and what to do."""

from collections.abc import Mapping

import numpy as np
import polars as pl

from optpipe.trace.findings.bottleneck import (
    Bottleneck,
    LimitingFactor,
    compute_idle_scale,
    find_bottleneck,
    find_range_bottleneck,
)
from optpipe.trace.findings.context import RuleContext, StageFacts
from optpipe.trace.findings.gaps import find_gaps
from optpipe.trace.findings.quality import ABSOLUTE_TIMES, UNPROFILED, Quality, check_quality
from optpipe.trace.findings.records import (
    CallRow,
    CopyRow,
    Iterations,
    KernelRow,
    KindRow,
    MemoryRow,
    MetricRow,
    RangeRow,
    Totals,
    TraceProfile,
    TraceViews,
    rows_from_table,
)
from optpipe.trace.findings.rules import apply_rules
from optpipe.trace.layers.layers import select_layered_part
from optpipe.trace.layers.peaks import peaks_from_data_sheet
from optpipe.trace.layers.roofline import GraphCosts, Roofline, compute_roofline
from optpipe.trace.layers.tensor_cores import TensorCores, analyze_tensor_cores
from optpipe.trace.recording.frames import Trace
from optpipe.trace.timeline.analysis import Analysis, analysis_from_trace, select_measured_part

_RANGES_SHOWN = 100
_NO_FACTS = StageFacts()


def profile_from_trace(
    trace: Trace | Analysis,
    range_name: str | None = None,
    facts: StageFacts = _NO_FACTS,
    graph: GraphCosts | None = None,
) -> TraceProfile:
    """Judges `trace`: the part inside `range_name`, or inside optpipe's own measured range, or all of it.

    With the model's `graph` its layers are compared with the roofline. Several ranges of one trace are judged from one
    analysis of it.

    Raises:
        BadInputError: the trace has no range called `range_name`.
    """
    whole = trace if isinstance(trace, Analysis) else analysis_from_trace(trace)
    measured = select_measured_part(whole, range_name)
    quality = check_quality(measured, facts.unprofiled_iteration_ns, expects_gpu=facts.expects_gpu)
    cores = _analyze_tensor_cores(whole, measured, graph) if "tensor_cores" not in quality.withheld else None
    roofline = compute_roofline(graph, facts.unprofiled_iteration_ns, _get_layer_ns(cores)) if graph else None
    undisturbed_ns = _get_undisturbed_ns(measured, quality, facts)
    scale = compute_idle_scale(measured, undisturbed_ns)
    context = RuleContext(measured, facts, cores, roofline, undisturbed_ns, scale)
    with_gaps = "idle_by_cause" not in quality.withheld
    by_range = _judge_ranges(measured, roofline, scale) if with_gaps else {}
    everything = make_views(whole, quality, by_range)
    return TraceProfile(
        totals=everything.totals,
        kernels=everything.kernels,
        kernel_kinds=everything.kernel_kinds,
        api=everything.api,
        copies=everything.copies,
        os_runtime=everything.os_runtime,
        ranges=everything.ranges,
        source=whole.trace.source,
        tracer=whole.trace.tracer,
        gpus=whole.trace.gpus,
        trace_quality=quality,
        scope=measured.scope,
        measured=make_views(measured, quality, by_range),
        memory=rows_from_table(measured.memory, MemoryRow),
        gpu_metrics=rows_from_table(measured.metrics, MetricRow),
        iterations=_describe_iterations(measured, quality, facts),
        gaps=find_gaps(measured) if with_gaps and not quality.distorts_host else None,
        tensor_cores=cores,
        roofline=roofline,
        bottleneck=_judge_bottleneck(measured, quality, roofline, scale),
        findings=() if "totals" in quality.withheld else apply_rules(context, with_gaps=with_gaps),
    )


def _analyze_tensor_cores(whole: Analysis, measured: Analysis, graph: GraphCosts | None) -> TensorCores:
    gpus = whole.trace.gpus
    peaks = graph.peaks if graph else peaks_from_data_sheet(gpus[0].name) if gpus else None
    costs = {cost.name: cost for cost in graph.costs} if graph else {}
    return analyze_tensor_cores(select_layered_part(whole, measured), peaks, costs)


def _get_undisturbed_ns(measured: Analysis, quality: Quality, facts: StageFacts) -> float | None:
    if not quality.distorts_host or UNPROFILED in quality.withheld or not measured.iterations.height:
        return None
    return facts.unprofiled_iteration_ns


def _get_layer_ns(cores: TensorCores | None) -> dict[str, float]:
    """Kernel time of one iteration by layer; nothing where the recording names kernels only."""
    if cores is None or cores.basis != "layers":
        return {}
    return {each.name: each.time_ns / cores.iterations for each in cores.layers}


def _judge_bottleneck(measured: Analysis, quality: Quality, roofline: Roofline | None, scale: float) -> Bottleneck:
    withheld = quality.withheld
    if "idle_by_cause" in withheld and (measured.trace.kernels.height or measured.trace.api.height):
        return Bottleneck(LimitingFactor.WITHHELD, 0.0, {}, withheld["idle_by_cause"])
    return find_bottleneck(measured, roofline, scale)


def _judge_ranges(measured: Analysis, roofline: Roofline | None, scale: float) -> dict[str, LimitingFactor]:
    """What limits each range name, outermost first; layers are too short to have a limit of their own."""
    depth = int(measured.iterations["depth"][0]) if measured.iterations.height else 1
    shallow = measured.ranges.filter(pl.col("depth") <= depth).sort("depth", "first_start_ns")
    names = shallow["name"].head(_RANGES_SHOWN).to_list()
    found = {name: find_range_bottleneck(measured, name, roofline, scale) for name in names}
    return {name: bottleneck.verdict for name, bottleneck in found.items() if bottleneck is not None}


def make_views(analysis: Analysis, quality: Quality, by_range: Mapping[str, LimitingFactor]) -> TraceViews:
    """The tables of `analysis` without what `quality` withholds; `by_range` is what limits each range."""
    kernels = analysis.kernels.clear() if "kernels" in quality.withheld else analysis.kernels
    ranges = analysis.ranges.head(_RANGES_SHOWN).with_columns(
        pl.col("name").replace_strict(by_range, default=None, return_dtype=pl.String).alias("bottleneck")
    )
    return TraceViews(
        totals=_sum_totals(analysis, quality),
        kernels=rows_from_table(_add_waits(kernels, analysis), KernelRow),
        kernel_kinds=rows_from_table(analysis.kinds, KindRow),
        api=rows_from_table(analysis.api, CallRow),
        copies=rows_from_table(analysis.copies, CopyRow),
        os_runtime=rows_from_table(analysis.os_runtime, CallRow),
        ranges=rows_from_table(ranges, RangeRow),
    )


def _add_waits(kernels: pl.DataFrame, analysis: Analysis) -> pl.DataFrame:
    """`kernels` with the time in their launching calls, and in the queue behind these; null for those of CUDA graphs."""
    in_graphs = analysis.trace.kernels.filter(pl.col("graph_node").is_not_null())["name"].cast(pl.String).unique()
    waits = analysis.executions.select("name", "launch_ns", "queue_ns").filter(
        ~pl.col("name").is_in(in_graphs.implode())
    )
    return kernels.join(waits, on="name", how="left", maintain_order="left")


def _sum_totals(analysis: Analysis, quality: Quality) -> Totals:
    known = "totals" not in quality.withheld
    # Without a kernel there is no telling a GPU that idles from one that was not traced.
    is_split = analysis.trace.kernels.height > 0 and "idle_by_cause" not in quality.withheld
    is_memset, split = pl.col("kind") == "Memset", analysis.split
    return Totals(
        kernels=analysis.trace.kernels.height,
        streams=analysis.trace.kernels.select("device", "stream").n_unique(),
        kernel_ns=analysis.kernel_ns if known else None,
        api_ns=int(analysis.api["total_ns"].sum()) if known else None,
        memcpy_ns=int(analysis.copies.filter(~is_memset)["total_ns"].sum()) if known else None,
        memset_ns=int(analysis.copies.filter(is_memset)["total_ns"].sum()) if known else None,
        copy_beside_compute_ns=analysis.overlapped_copy_ns if known else None,
        streams_concurrent_ns=analysis.concurrent_ns if known else None,
        span_ns=split.span_ns,
        busy_ns=split.busy_ns if is_split else None,
        idle_ns=split.idle_ns if is_split else None,
        idle_by_cause=split.idle_by_cause if is_split else {},
    )


def _describe_iterations(measured: Analysis, quality: Quality, facts: StageFacts) -> Iterations | None:
    rows, withheld = measured.iterations, quality.withheld
    if rows.is_empty() or "iterations" in withheld:
        return None
    walls, known = rows["wall_ns"].to_numpy(), ABSOLUTE_TIMES not in withheld
    on_gpu = (rows["gpu_end_ns"] - rows["gpu_start_ns"]).fill_null(0).to_numpy()
    return Iterations(
        range=str(rows["family"][0]),
        count=rows.height,
        first_wall_ns=int(walls[0]) if known else None,
        median_other_wall_ns=float(np.median(walls[1:])) if known else None,
        median_wall_ns=float(np.median(walls)) if known else None,
        median_projected_ns=float(np.median(on_gpu)) if known else None,
        period_ns=measured.iteration_ns if known else None,
        unprofiled_ns=None if UNPROFILED in withheld else facts.unprofiled_iteration_ns,
        median_gpu_ns=float(np.median(rows["gpu_ns"].to_numpy())),
        kernels=float(np.median(rows["kernels"].to_numpy())),
    )
