"""A judged profile: quality first, then the views, then what limits the stage and what to do; and its JSON document."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl

from optpipe.trace.findings.bottleneck import (
    Bottleneck,
    LimitingFactor,
    compute_idle_scale,
    find_bottleneck,
    find_range_bottleneck,
)
from optpipe.trace.findings.gaps import Gaps, find_gaps
from optpipe.trace.findings.quality import (
    ABSOLUTE_TIMES,
    UNPROFILED,
    Quality,
    check_quality,
)
from optpipe.trace.findings.rules import (
    HOST_RULES,
    apply_rules,
)
from optpipe.trace.findings.stage_rules import ProfileFinding, RuleContext
from optpipe.trace.layers.layers import select_layered_part
from optpipe.trace.layers.peaks import peaks_from_data_sheet
from optpipe.trace.layers.roofline import GraphCosts, Roofline, compute_roofline
from optpipe.trace.layers.tensor_cores import TensorCores, analyze_tensor_cores
from optpipe.trace.recording.frames import Trace
from optpipe.trace.timeline.analysis import Analysis, analysis_from_trace, select_measured_part

_RANGES_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything said about one trace."""

    whole: Analysis
    measured: Analysis
    quality: Quality
    tensor_cores: TensorCores | None
    roofline: Roofline | None
    bottleneck: Bottleneck
    by_range: Mapping[str, Bottleneck]
    gaps: Gaps
    findings: tuple[ProfileFinding, ...]
    unprofiled_iteration_ns: float | None = None
    idle_scale: float = 1.0
    """What is left of the GPU's idle time without the profiler, where that slowed the host too much to be believed."""


def profile_from_trace(
    trace: Trace | Analysis,
    range_name: str | None = None,
    *,
    graph: GraphCosts | None = None,
    unprofiled_iteration_ns: float | None = None,
    expects_gpu: bool = True,
    stage: str | None = None,
    backend: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Profile:
    """Judges `trace`: the part inside `range_name`, or inside optpipe's own measured range, or all of it.

    With the model's `graph` its layers are held against the roofline. Without `expects_gpu`, a stage of the CPU, missing
    GPU rows are no defect of the trace. `stage` is the kind of stage that was recorded, `backend` and `options` the runtime
    of an inference, where they are known. Several ranges of one trace are judged from one analysis of it.
    """
    whole = trace if isinstance(trace, Analysis) else analysis_from_trace(trace)
    gpus = whole.trace.gpus
    measured = select_measured_part(whole, range_name)
    checked = check_quality(measured, unprofiled_iteration_ns, expects_gpu=expects_gpu)
    peaks = graph.peaks if graph else peaks_from_data_sheet(gpus[0].name) if gpus else None
    costs = {cost.name: cost for cost in graph.costs} if graph else {}
    has_gpu = "tensor_cores" not in checked.withheld
    cores = analyze_tensor_cores(select_layered_part(whole, measured), peaks, costs) if has_gpu else None
    roofs = compute_roofline(graph, unprofiled_iteration_ns, _layer_ns(cores)) if graph else None
    undisturbed_ns = _undisturbed_ns(measured, checked, unprofiled_iteration_ns)
    scale = compute_idle_scale(measured, undisturbed_ns)
    facts = RuleContext(
        measured,
        cores,
        gpus[0].multiprocessors if gpus else None,
        stage,
        roofs,
        undisturbed_ns,
        scale,
        backend,
        options or {},
    )
    return Profile(
        whole=whole,
        measured=measured,
        quality=checked,
        tensor_cores=cores,
        roofline=roofs,
        bottleneck=_judge_bottleneck(measured, checked, roofs, scale),
        by_range=_judge_ranges(measured, roofs, scale) if "idle_by_cause" not in checked.withheld else {},
        gaps=find_gaps(measured),
        findings=()
        if "totals" in checked.withheld
        else apply_rules(facts, with_gaps="idle_by_cause" not in checked.withheld),
        unprofiled_iteration_ns=unprofiled_iteration_ns,
        idle_scale=scale,
    )


def _undisturbed_ns(measured: Analysis, checked: Quality, unprofiled_iteration_ns: float | None) -> float | None:
    if ABSOLUTE_TIMES not in checked.withheld or UNPROFILED in checked.withheld or not measured.iterations.height:
        return None
    return unprofiled_iteration_ns


def _layer_ns(cores: TensorCores | None) -> dict[str, float]:
    """Kernel time of one iteration by layer; nothing where the recording names kernels only."""
    if cores is None or cores.basis != "layers":
        return {}
    return {each.name: each.time_ns / cores.iterations for each in cores.layers}


def _judge_bottleneck(measured: Analysis, checked: Quality, roofs: Roofline | None, scale: float) -> Bottleneck:
    withheld = checked.withheld
    if "idle_by_cause" in withheld and (measured.trace.kernels.height or measured.trace.api.height):
        return Bottleneck(LimitingFactor.WITHHELD, 0.0, {}, withheld["idle_by_cause"])
    return find_bottleneck(measured, roofs, scale)


def _judge_ranges(measured: Analysis, roofs: Roofline | None, scale: float) -> dict[str, Bottleneck]:
    """The verdict on each range name, outermost first; layers are too short to have one of their own."""
    shallow = measured.ranges.filter(pl.col("depth") <= _iteration_depth(measured)).sort("depth", "first_start_ns")
    found = (
        (name, find_range_bottleneck(measured, name, roofs, scale))
        for name in shallow["name"].head(_RANGES_SHOWN).to_list()
    )
    return {name: verdict for name, verdict in found if verdict is not None}


def _iteration_depth(measured: Analysis) -> int:
    return int(measured.iterations["depth"][0]) if measured.iterations.height else 1


def document_from_profile(profile: Profile) -> dict[str, Any]:
    """The JSON document of one profile.

    `totals`, `kernels`, `api`, `copies`, `executions`, `streams`, `os_runtime` and `compute_ranges` are of the whole trace, as
    `nsys stats` has them; `measured` has the totals of the part that is judged, `measured_views` its tables.
    """
    whole, measured, withheld = profile.whole, profile.measured, profile.quality.withheld
    return {
        "source": whole.trace.source,
        "tracer": whole.trace.tracer,
        "gpus": [asdict(gpu) for gpu in whole.trace.gpus],
        "trace_quality": _quality_document(profile.quality),
        "scope": measured.scope,
        "totals": _totals(whole, withheld),
        "measured": _totals(measured, withheld),
        **_tables(whole, profile),
        "kernel_kinds": whole.kinds.select("kind", "count", "total_ns", "share").to_dicts(),
        "executions": whole.executions.to_dicts(),
        "streams": whole.streams.to_dicts(),
        "measured_views": _measured_views(profile),
        "memory": measured.memory.to_dicts(),
        "gpu_metrics": measured.metrics.to_dicts(),
        "functions": measured.functions.to_dicts(),
        "iterations": _iterations(profile),
        "gaps": _gaps_document(profile),
        "tensor_cores": _tensor_core_document(profile),
        "roofline": profile.roofline.document()
        if profile.roofline
        else {"withheld": "the model's graph was not given"},
        "bottleneck": _bottleneck_document(profile),
        "findings": [_finding_document(finding) for finding in profile.findings],
    }


def _quality_document(checked: Quality) -> dict[str, Any]:
    checks = {check.name: {"verdict": str(check.verdict), "detail": check.detail} for check in checked.checks}
    return {**checks, "withheld": checked.withheld, "verdict": str(checked.verdict)}


def _totals(analysis: Analysis, withheld: Mapping[str, str]) -> dict[str, Any]:
    """Null is what the trace cannot support, and what `trace_quality.withheld` gives the reason of."""
    sums = {
        "kernel_ns": analysis.kernel_ns,
        "api_ns": int(analysis.api["total_ns"].sum()),
        "memcpy_ns": int(analysis.copies.filter(pl.col("kind") != "Memset")["total_ns"].sum()),
        "memset_ns": int(analysis.copies.filter(pl.col("kind") == "Memset")["total_ns"].sum()),
        "copy_beside_compute_ns": analysis.overlapped_copy_ns,
        "streams_concurrent_ns": analysis.concurrent_ns,
    }
    # Without a kernel there is no telling a GPU that idles from one that was not traced.
    is_split = analysis.trace.kernels.height > 0 and "idle_by_cause" not in withheld
    return {
        **(dict.fromkeys(sums) if "totals" in withheld else sums),
        "kernels": analysis.trace.kernels.height,
        "span_ns": analysis.split.span_ns,
        "busy_ns": analysis.split.busy_ns if is_split else None,
        "idle_ns": analysis.split.idle_ns if is_split else None,
        "idle_by_cause": {str(cause): ns for cause, ns in analysis.split.idle_by_cause.items()} if is_split else {},
    }


def _tables(analysis: Analysis, profile: Profile) -> dict[str, Any]:
    """What is given both of the whole trace and of the part that is judged."""
    return {
        "kernels": [] if "kernels" in profile.quality.withheld else _kernel_rows(analysis),
        "api": analysis.api.select("name", "count", "total_ns", "share", "in_classic_list").to_dicts(),
        "copies": analysis.copies.to_dicts(),
        "os_runtime": analysis.os_runtime.select("name", "count", "total_ns", "share").to_dicts(),
        "ranges": _range_rows(analysis, profile.by_range),
    }


def _measured_views(profile: Profile) -> dict[str, Any]:
    """The tables of the part that is judged; kernels with the time in their launching calls and in the queue behind these.

    Both are null for kernels of CUDA graphs: these have one launch for all, and wait for each other.
    """
    measured = profile.measured
    in_graphs = set(measured.trace.kernels.filter(pl.col("graph_node").is_not_null())["name"].unique().to_list())
    waits = {
        row["name"]: {"launch_ns": row["launch_ns"], "queue_ns": row["queue_ns"]}
        for row in measured.executions.iter_rows(named=True)
        if row["name"] not in in_graphs
    }
    unknown = {"launch_ns": None, "queue_ns": None}
    tables = _tables(measured, profile)
    kernels = [{**row, **waits.get(row["name"], unknown)} for row in tables["kernels"]]
    return {**tables, "kernels": kernels, "streams": measured.streams.height}


def _kernel_rows(analysis: Analysis) -> list[dict[str, Any]]:
    columns = (
        "name",
        "count",
        "total_ns",
        "share",
        "tensor_core",
        "kind",
        "mean_ns",
        "median_ns",
        "min_ns",
        "max_ns",
        "in_classic_list",
    )
    return analysis.kernels.select(columns).to_dicts()


def _range_rows(analysis: Analysis, by_range: Mapping[str, Bottleneck]) -> list[dict[str, Any]]:
    columns = ("name", "count", "wall_ns", "gpu_ns", "kernel_ns", "kernels", "projected_ns", "busy_ns")
    rows = analysis.ranges.head(_RANGES_SHOWN).select(columns).to_dicts()
    return [
        {**row, "bottleneck": str(by_range[row["name"]].limit) if row["name"] in by_range else None} for row in rows
    ]


def _iterations(profile: Profile) -> dict[str, Any]:
    """Of the measured iterations; host times are null where the profiler slowed the host too much to give them."""
    rows, withheld = profile.measured.iterations, profile.quality.withheld
    if rows.is_empty() or "iterations" in withheld:
        return {"withheld": withheld.get("iterations", "nothing repeats")}
    walls = rows["wall_ns"].to_numpy()
    gpu = (rows["gpu_end_ns"] - rows["gpu_start_ns"]).fill_null(0).to_numpy()
    host = {
        "first_wall_ns": int(walls[0]),
        "median_other_wall_ns": float(np.median(walls[1:])),
        "median_wall_ns": float(np.median(walls)),
        "median_projected_ns": float(np.median(gpu)),
        "period_ns": profile.measured.iteration_ns,
    }
    return {
        "range": str(rows["family"][0]),
        "count": rows.height,
        **(dict.fromkeys(host) if ABSOLUTE_TIMES in withheld else host),
        "unprofiled_ns": None if UNPROFILED in withheld else profile.unprofiled_iteration_ns,
        "median_gpu_ns": float(np.median(rows["gpu_ns"].to_numpy())),
        "kernels": float(np.median(rows["kernels"].to_numpy())),
    }


def _tensor_core_document(profile: Profile) -> dict[str, Any]:
    cores = profile.tensor_cores
    if cores is None:
        why = profile.quality.withheld.get("tensor_cores", "")
        return {"eligible": None, "used": None, "missed": [], "withheld": why}
    return {
        "basis": cores.basis,
        "eligible": cores.eligible,
        "used": cores.used,
        "unknown": cores.unknown,
        "eligible_ns": cores.eligible_ns,
        "used_ns": cores.used_ns,
        "kernel_ns": cores.kernel_ns,
        "time_share": cores.time_share,
        "named_ns": cores.named_ns,
        "iterations": cores.iterations,
        "missed": [asdict(each) for each in cores.missed],
        "ineligible": [asdict(each) for each in cores.ineligible],
        "layers": [asdict(each) for each in cores.layers] if cores.basis == "layers" else [],
        "groups": list(cores.groups),
    }


def _bottleneck_document(profile: Profile) -> dict[str, Any]:
    """`idle_scale` is there where it is not 1: the shares, and `busy_share`, are of the time without the profiler then."""
    found, count = profile.bottleneck, profile.measured.iterations.height
    document = {"verdict": str(found.limit), "share": found.share, "shares": found.shares, "why": found.why}
    if profile.idle_scale == 1.0 or not profile.unprofiled_iteration_ns:
        return document
    busy_share = min(1.0, profile.measured.split.busy_ns / (profile.unprofiled_iteration_ns * count))
    return {**document, "idle_scale": profile.idle_scale, "busy_share": busy_share}


def _gaps_document(profile: Profile) -> dict[str, Any]:
    withheld = profile.quality.withheld
    why = withheld.get("idle_by_cause") or withheld.get(ABSOLUTE_TIMES)
    return {"withheld": why} if why else asdict(profile.gaps)


def _finding_document(finding: ProfileFinding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "evidence": finding.evidence,
        "host_times": finding.rule in HOST_RULES,
        "gain_ns": finding.gain_ns,
        "gain_share": finding.gain_ns / max(finding.of_ns, 1),
        "advice": finding.advice,
        "rows": list(finding.rows),
    }
