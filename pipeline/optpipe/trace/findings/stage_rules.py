"""Findings about a stage as such: what it costs once, which operators and layers take its time. One function per type."""

import polars as pl

from optpipe.core.units import format_duration
from optpipe.trace.findings.context import FindingRow, ProfileFinding, RuleContext, StageFacts
from optpipe.trace.layers.tensor_cores import LayerUse
from optpipe.trace.ranges import Stage

_ROWS = 5
_OPERATOR = r"\[(?:CPU|GPU|Mixed|MIXED) op\] Run (.+)$"
"""DALI's own ranges around each of its operators."""
_KEPT_FOR = {
    Stage.EXPORT: "the model, its weights, shapes and opset",
    Stage.QUANTIZE: "the graph, precision, method and calibration images",
    Stage.BUILD: "the graph, backend and options",
}


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
    rows = tuple(FindingRow(*row) for row in parts.head(_ROWS).select("name", "wall_ns", "count").iter_rows())
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
    rows = tuple(FindingRow(*row) for row in table.head(_ROWS).select("name", "total_ns", "count").iter_rows())
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
        for each in timed[:_ROWS]
    )
    return ProfileFinding("slow-layers", evidence, int(above_ns * context.iterations), advice, rows)


def compute_saving_ns(context: RuleContext, layers: tuple[LayerUse, ...]) -> int:
    """What `layers` could save over the measured part, which may have other iterations than theirs."""
    iterations = context.tensor_cores.iterations if context.tensor_cores else 1
    return int(sum(each.could_save_ns for each in layers) / iterations * context.iterations)
