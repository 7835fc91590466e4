"""Findings about a stage as such: what it costs once, which operators and layers take its time. One function per type."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from optpipe.core.units import format_duration
from optpipe.trace.layers.roofline import Roofline
from optpipe.trace.layers.tensor_cores import LayerUse, TensorCores
from optpipe.trace.timeline.analysis import Analysis

_ROWS = 5
_OPERATOR = r"\[(?:CPU|GPU|Mixed|MIXED) op\] Run (.+)$"
"""DALI's own ranges around each of its operators."""
_KEPT_FOR = {
    "export": "the model, its weights, shapes and opset",
    "quantize": "the graph, precision, method and calibration images",
    "build": "the graph, backend and options",
}


@dataclass(frozen=True, slots=True)
class ProfileFinding:
    """Something that costs time, with the evidence and the next thing to try."""

    rule: str
    evidence: str
    gain_ns: int
    advice: str
    rows: tuple[dict[str, Any], ...] = ()
    of_ns: float = 0.0
    """What the gain is a part of."""


@dataclass(frozen=True, slots=True)
class RuleContext:
    """What a rule may look at."""

    measured: Analysis
    tensor_cores: TensorCores | None
    multiprocessors: int | None
    stage: str | None = None
    """`export`, `quantize`, `build_model`, `derive_preprocessing` or `inference`; None for a recording made by someone else."""
    roofline: Roofline | None = None
    undisturbed_ns: float | None = None
    """One iteration without the profiler, where it slowed the host too much for the times under it to be trusted."""
    idle_scale: float = 1.0
    """What is left of the GPU's waiting without the profiler."""
    backend: str | None = None
    """The runtime of an inference, with its options; None for a recording made by someone else."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def iterations(self) -> int:
        """How many iterations were recorded, at least 1."""
        return max(self.measured.iterations.height, 1)


def advise_fusion(facts: RuleContext) -> str:
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


def find_one_time_cost(facts: RuleContext) -> ProfileFinding | None:
    """A stage whose result is kept: all of it is saved the next time, and its longest part is named."""
    if facts.stage not in _KEPT_FOR:
        return None
    span_ns = facts.measured.split.span_ns
    parts = facts.measured.ranges.filter(
        (pl.col("name") != facts.measured.scope) & (pl.col("wall_ns") < 0.98 * span_ns)
    )
    rows = tuple(parts.head(_ROWS).select("name", "count", "wall_ns").iter_rows(named=True))
    longest = f", of which {rows[0]['name']} {format_duration(rows[0]['wall_ns'])}" if rows else ""
    advice = f"cached in the workspace: paid once per combination of {_KEPT_FOR[facts.stage]}; keep --workspace between runs (also in CI)"
    if rows and rows[0]["name"].startswith(("calibrate", "optpipe.calibrate")):
        advice += "; fewer images or --method max make calibration faster"
    return ProfileFinding("paid-once", f"{format_duration(span_ns)} on the CPU{longest}", span_ns, advice, rows)


def find_busiest_operator(facts: RuleContext) -> ProfileFinding | None:
    """The operator of a preprocessing pipeline that takes the most time of its threads."""
    name = pl.col("name").cast(pl.String)
    operators = (
        facts.measured.trace.ranges.filter(name.str.contains(_OPERATOR)) if facts.stage == "preprocess" else None
    )
    if operators is None or operators.is_empty():
        return None
    table = (
        operators.group_by(name.str.extract(_OPERATOR).alias("name"))
        .agg(
            pl.len().alias("count"),
            (pl.col("end_ns") - pl.col("start_ns")).sum().alias("wall_ns"),
            pl.col("thread").n_unique(),
        )
        .sort("wall_ns", "name", descending=[True, False])
    )
    first = table.row(0, named=True)
    share = first["wall_ns"] / max(int(table["wall_ns"].sum()), 1)
    evidence = f"{first['name']} takes {share:.0%} of the operators' time, on {first['thread']} threads"
    advice = "optpipe preprocess tunes threads, prefetching, and the decoder, and reports the rate of decoding alone"
    gain_ns = int(first["wall_ns"] / first["thread"])
    return ProfileFinding("busiest-operator", evidence, gain_ns, advice, tuple(table.head(_ROWS).iter_rows(named=True)))


def find_slow_layers(facts: RuleContext) -> ProfileFinding | None:
    """Layers of a CPU's inference that take longer than the roofline says they must."""
    roofs = facts.roofline.layers if facts.roofline else ()
    timed = [each for each in roofs if each.measured_ns is not None and each.measured_ns > each.bound_ns]
    if not timed or facts.measured.trace.kernels.height:
        return None
    above_ns = sum(each.above_bound_ns for each in timed)
    assert facts.roofline is not None
    if facts.roofline.measured_ns is not None:
        # No more than the whole inference is above its bound; one that is below it says that the peaks are too low.
        above_ns = min(above_ns, facts.roofline.measured_ns - facts.roofline.bound_ns)
    if above_ns <= 0:
        return None
    evidence = (
        f"{len(timed)} layers take up to {format_duration(above_ns)} more per inference than their arithmetic and memory traffic require; "
        f"{timed[0].cost.op} {timed[0].cost.name} the most"
    )
    advice = "optpipe bench with --option onnxruntime.threads=N and larger batches"
    if not any(each.cost.type == "int8" for each in timed):
        advice += "; INT8 if accuracy allows: optpipe build --precision int8 --backend onnxruntime"
    rows = tuple(
        {"name": each.cost.name, "op": each.cost.op, "measured_ns": each.measured_ns, "bound_ns": each.bound_ns}
        for each in timed[:_ROWS]
    )
    return ProfileFinding("slow-layers", evidence, int(above_ns * facts.iterations), advice, rows)


def compute_saving_ns(facts: RuleContext, layers: tuple[LayerUse, ...]) -> int:
    """What `layers` could save over the measured part, which may have other iterations than theirs."""
    per_iteration = sum(each.could_save_ns for each in layers) / (
        facts.tensor_cores.iterations if facts.tensor_cores else 1
    )
    return int(per_iteration * facts.iterations)
