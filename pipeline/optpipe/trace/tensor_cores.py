"""Tensor Cores by layer: eligible layers, layers that used them, and possible savings.

Layers are named by NVTX ranges inside an iteration, such as TensorRT's. A kernel belongs to the innermost range that
was open at its launch. A layer's own time is that of the kernels for which it is the innermost.

Eligible means matrix work whose element type has Tensor Cores on the device and whose channels are aligned (to 8 for
fp16 and bf16, to 16 for int8; NVIDIA, "Matrix Multiplication Background", Tensor Core requirements); a layer that did
use them is eligible whatever the rule, because a library may pad. Without a graph, only the kernels' names identify
matrix work, and the alignment is not known (`basis`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import polars as pl

from optpipe.trace.analysis import Analysis, TimeArray, array_from_column
from optpipe.trace.kernels import shorten_name
from optpipe.trace.nsys import LIBRARY_RANGES
from optpipe.trace.read import make_empty_frame
from optpipe.trace.roofline import (
    ALIGNMENT,
    GraphCosts,
    NodeCost,
    Peaks,
    compute_math_ns,
    compute_memory_ns,
    explain_ineligible,
)

_UNKNOWN_GAIN = 2.0
"""Low speedup assumed for a missed layer on a device with unknown peaks."""
_NAMED_SHARE = 0.5
"""Ranges that cover less of the kernel time (a stray range of a library) do not list the layers."""


def _locate_launches(measured: Analysis) -> pl.DataFrame:
    """One row per launched kernel: `called_ns`, innermost `range` (-1: none), `layer`, and the facts from its name."""
    ranges = make_empty_frame("ranges")
    if measured.iterations.height:
        # the ranges inside an iteration, without those of libraries, which have a domain (`cuBLAS:…`)
        depth, family, name = (
            measured.iterations["depth"][0],
            measured.iterations["family"][0],
            pl.col("family"),
        )
        deeper = (pl.col("depth") > depth) & (name != family) & ~name.str.contains(LIBRARY_RANGES)
        ranges = measured.projection.filter(deeper).sort(
            "start_ns", "end_ns", descending=[False, True]
        )
    launches = measured.launches.select(
        "called_ns", "kernel_ns", kernel=pl.col("name").cast(pl.String)
    )
    called, thread = (
        array_from_column(measured.launches, name) for name in ("called_ns", "thread")
    )
    index = find_innermost(ranges, called, thread)
    layers = ranges["name"].cast(pl.String).gather(pl.Series(index).replace(-1, None))
    located = launches.with_columns(layers.alias("layer"), pl.Series("range", index))
    known = measured.kernels.select("name", "kind", "tensor_core", "matrix")
    return located.join(known, left_on="kernel", right_on="name", how="left", maintain_order="left")


def _tabulate_layers(located: pl.DataFrame) -> pl.DataFrame:
    """Kernel time by layer, longest first; empty if no range lies below an iteration."""
    by_kernel = (
        located.filter(pl.col("range") >= 0)
        .group_by("layer", "kernel", "matrix", "tensor_core")
        .agg(pl.col("range").n_unique().cast(pl.Int64).alias("count"), pl.col("kernel_ns").sum())
        .sort("kernel_ns", "layer", "kernel", descending=[True, False, False])
    )
    return (
        by_kernel.group_by("layer")
        .agg(
            pl.col("count").max(),
            pl.col("kernel_ns").sum(),
            pl.col("kernel_ns").filter(pl.col("matrix")).sum().alias("matrix_ns"),
            pl.col("kernel_ns").filter(pl.col("tensor_core")).sum().alias("tensor_core_ns"),
            pl.col("tensor_core").is_null().any().alias("unknown"),
            pl.col("kernel").sort_by("kernel_ns", descending=True).first().alias("main_kernel"),
        )
        .sort("kernel_ns", "layer", descending=[True, False])
    )


def find_innermost(ranges: pl.DataFrame, at: TimeArray, thread: TimeArray) -> TimeArray:
    """The row of the innermost range of the same thread that is open at each time; -1 for none.

    Ranges are sorted by start, the longer one first: a range that lies inside another follows it.
    """
    result = np.full(at.size, -1, dtype=np.int64)
    owner, starts, ends = (
        array_from_column(ranges, name) for name in ("thread", "start_ns", "end_ns")
    )
    for number in np.unique(owner):
        mine, rows = np.flatnonzero(thread == number), np.flatnonzero(owner == number)
        mine = mine[np.argsort(at[mine], kind="stable")]
        first, last = (np.searchsorted(at[mine], edges[rows]) for edges in (starts, ends))
        for row, low, high in zip(rows.tolist(), first.tolist(), last.tolist(), strict=True):
            result[mine[low:high]] = row
    return result


@dataclass(frozen=True, slots=True)
class LayerUse:
    """Times are over all recorded iterations of the layers."""

    name: str
    op: str | None
    type: str | None
    """Operator and element type; None without a graph."""
    count: int
    time_ns: int
    share: float
    eligible: bool
    used: bool | None
    """None if the kernel's name does not tell."""
    could_save_ns: int
    """Upper bound for matrix work without Tensor Cores: to the roofline with a graph, otherwise by the device's peaks."""
    reason: str | None
    """The reason why a matrix layer is not eligible, or did not use them."""
    kernel: str


@dataclass(frozen=True, slots=True)
class TensorCores:
    """The sums, and the layers sorted by time, longest first."""

    basis: Literal["layers", "kernels"]
    eligible: int
    used: int
    unknown: int
    """Eligible layers whose kernel's name does not tell."""
    eligible_ns: int
    used_ns: int
    kernel_ns: int
    named_ns: int
    time_share: float
    """Share of all kernel time on Tensor Cores."""
    iterations: int
    layers: tuple[LayerUse, ...]
    eligible_ns_by_iteration: tuple[int, ...] = ()
    used_ns_by_iteration: tuple[int, ...] = ()

    @property
    def missed(self) -> tuple[LayerUse, ...]:
        """Eligible and not used, largest saving first."""
        return _sort_by_saving(
            layer for layer in self.layers if layer.eligible and layer.used is False
        )

    @property
    def ineligible(self) -> tuple[LayerUse, ...]:
        """Matrix layers that cannot use them, largest saving first."""
        return _sort_by_saving(
            layer for layer in self.layers if not layer.eligible and layer.reason
        )


def analyze_tensor_cores(measured: Analysis, graph: GraphCosts | None = None) -> TensorCores:
    """Counts by layer if ranges name layers, otherwise by kernel; the costs of layers come from the `graph`."""
    costs, peaks = ({cost.name: cost for cost in graph.costs}, graph.peaks) if graph else ({}, None)
    located = _locate_launches(measured)
    table = _tabulate_layers(located)
    named_ns = int(table["kernel_ns"].sum())
    basis: Literal["layers", "kernels"] = "layers"
    if table.is_empty() or named_ns < _NAMED_SHARE * max(measured.kernel_ns, 1):
        basis, named_ns, ns = "kernels", measured.kernel_ns, pl.col("total_ns")
        table = measured.kernels.select(
            "count",
            layer="name",
            kernel_ns=ns,
            matrix_ns=pl.when(pl.col("matrix").fill_null(value=False)).then(ns).otherwise(0),
            tensor_core_ns=pl.when(pl.col("tensor_core").fill_null(value=False))
            .then(ns)
            .otherwise(0),
            unknown=pl.col("tensor_core").is_null(),
            main_kernel="name",
        )
    iterations = max(measured.iterations.height, 1)
    rows = table.iter_rows(named=True)
    layers = tuple(
        _judge_layer(row, measured.kernel_ns, peaks, costs.get(row["layer"]), iterations)
        for row in rows
    )
    eligible = [layer for layer in layers if layer.eligible]
    used_ns = int(table["tensor_core_ns"].sum())
    by, names = "layer" if basis == "layers" else "kernel", [layer.name for layer in eligible]
    eligible_ns_by_iteration, used_ns_by_iteration = _split_by_iteration(
        located, measured.iterations, by, names
    )
    return TensorCores(
        basis=basis,
        eligible=len(eligible),
        used=sum(layer.used is True for layer in layers),
        unknown=sum(layer.used is None for layer in eligible),
        eligible_ns=sum(layer.time_ns for layer in eligible),
        used_ns=used_ns,
        kernel_ns=measured.kernel_ns,
        named_ns=named_ns,
        time_share=used_ns / measured.kernel_ns if measured.kernel_ns else 0.0,
        iterations=iterations,
        layers=layers,
        eligible_ns_by_iteration=eligible_ns_by_iteration,
        used_ns_by_iteration=used_ns_by_iteration,
    )


def _split_by_iteration(
    launches: pl.DataFrame, iterations: pl.DataFrame, by: str, eligible: list[str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """By iteration that launched any: time of the eligible layers or kernels, and of kernels on Tensor Cores."""
    iteration = (
        np.searchsorted(
            iterations["start_ns"].to_numpy(), launches["called_ns"].to_numpy(), side="right"
        )
        - 1
    )
    times = (
        launches.with_columns(pl.Series("iteration", iteration))
        .filter(pl.col("iteration") >= 0, pl.col("range") >= 0 if by == "layer" else True)
        .group_by("iteration", maintain_order=True)
        .agg(
            pl.col("kernel_ns").filter(pl.col(by).is_in(eligible)).sum().alias("eligible"),
            pl.col("kernel_ns").filter(pl.col("tensor_core")).sum().alias("used"),
        )
    )
    return tuple(times["eligible"].to_list()), tuple(times["used"].to_list())


def _sort_by_saving(layers: Iterable[LayerUse]) -> tuple[LayerUse, ...]:
    return tuple(sorted(layers, key=lambda layer: (-layer.could_save_ns, layer.name)))


def _judge_layer(
    row: Mapping[str, Any],
    kernel_ns: int,
    peaks: Peaks | None,
    cost: NodeCost | None,
    iterations: int,
) -> LayerUse:
    is_matrix = bool(cost.macs) if cost else row["matrix_ns"] > 0
    used = bool(row["tensor_core_ns"]) or (None if row["unknown"] else False)
    reason = explain_ineligible(cost) if cost and is_matrix and not used else None
    eligible = is_matrix and reason is None
    without = is_matrix and used is False
    kernel, time_ns = str(row["main_kernel"]), int(row["kernel_ns"])
    return LayerUse(
        name=str(row["layer"]),
        op=cost.op if cost else None,
        type=cost.type if cost else None,
        count=int(row["count"]),
        time_ns=time_ns,
        share=time_ns / kernel_ns if kernel_ns else 0.0,
        eligible=eligible,
        used=used if is_matrix else False,
        could_save_ns=_estimate_saving_ns(row, peaks, cost, iterations) if without else 0,
        reason=reason
        or (_explain_missed(kernel, cost.type if cost else None) if without else None),
        kernel=shorten_name(kernel),
    )


def _estimate_saving_ns(
    row: Mapping[str, Any], peaks: Peaks | None, cost: NodeCost | None, iterations: int
) -> int:
    if cost is not None and peaks is not None:
        kind = (
            cost.type
            if cost.type in ALIGNMENT
            else "tf32"
            if "tf32" in peaks.flops_per_s
            else "fp16"
        )
        reachable_ns = max(
            compute_math_ns(replace(cost, type=kind), peaks), compute_memory_ns(cost, peaks)
        )
        return max(0, int(row["kernel_ns"] - iterations * reachable_ns))
    rates = peaks.flops_per_s if peaks is not None else {}
    fast = rates.get("tf32") or rates.get("fp16")
    return int(
        row["matrix_ns"] * (1 - 1 / max(fast / rates["fp32"] if fast else _UNKNOWN_GAIN, 1.0))
    )


def _explain_missed(kernel: str, element_type: str | None) -> str:
    lower = kernel.lower()
    if "winograd" in lower:
        return "a Winograd kernel on the FMA units was selected"
    if "depthwise" in lower or "grouped" in lower:
        return "a depthwise or grouped kernel without Tensor Cores"
    if "gemv" in lower:
        return "a matrix-vector product, which reads its matrix once: memory-bound"
    if any(
        word in lower
        for word in ("sgemm", "scudnn", "f32f32", "ffma", "simt", "convolve_common_engine")
    ):
        if element_type in ALIGNMENT and element_type != "tf32":
            return f"a kernel on the FMA units was selected, although the layer is {element_type}"
        return "computes in fp32 on the FMA units: build it in fp16, or allow TF32"
    return "no sign of Tensor Cores in the kernel's name"
