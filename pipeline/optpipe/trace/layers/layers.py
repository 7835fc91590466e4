"""Layers as NVTX names them: TensorRT's own ranges, torch modules, ONNX Runtime nodes; each with the kernels it launched.

A kernel belongs to the innermost range that was open when it was launched. A layer's own time is that of the kernels
for which it is the innermost; a group's time is that of everything below it.
"""

import numpy as np
import polars as pl

from optpipe.trace.ranges import LAYERS_RANGE, LIBRARY_RANGES
from optpipe.trace.recording.frames import RANGE_SCHEMA
from optpipe.trace.timeline.analysis import Analysis, select_measured_part
from optpipe.trace.timeline.intervals import TimeArray
from optpipe.trace.timeline.kernels import classify_kernels
from optpipe.trace.timeline.timeline import array_from_column

LAYER_SCHEMA = {
    "layer": pl.String,
    "depth": pl.Int64,
    "count": pl.Int64,
    "kernel": pl.String,
    "kernels": pl.Int64,
    "kernel_ns": pl.Int64,
}


def select_layered_part(whole: Analysis, measured: Analysis) -> Analysis:
    """Where the layers are marked: iterations apart, which optpipe adds to its own captures, or the measured ones."""
    return select_measured_part(whole, LAYERS_RANGE) if (whole.ranges["name"] == LAYERS_RANGE).any() else measured


def attribute_kernels(measured: Analysis) -> pl.DataFrame:
    """Kernel time by layer and kernel name; empty when no range lies below an iteration (or below the trace)."""
    return (
        list_launches(measured)
        .filter(pl.col("range") >= 0)
        .group_by("layer", "kernel")
        .agg(
            pl.col("depth").min(),
            pl.col("range").n_unique().cast(pl.Int64).alias("count"),
            pl.len().cast(pl.Int64).alias("kernels"),
            pl.col("kernel_ns").sum(),
        )
        .select(pl.col(column).cast(dtype) for column, dtype in LAYER_SCHEMA.items())
        .sort("kernel_ns", "layer", "kernel", descending=[True, False, False])
    )


def list_launches(measured: Analysis) -> pl.DataFrame:
    """Every kernel with its launch: `launch_ns`, `kernel`, `kernel_ns`, and its innermost range (-1: none), `layer` and `depth`."""
    ranges = _select_below_iterations(measured)
    operations = measured.timeline.operations
    launched = operations.is_kernel & (operations.api_row >= 0)
    api_row = operations.api_row[launched]
    launches = array_from_column(measured.trace.api, "start_ns")[api_row]
    thread = array_from_column(measured.trace.api, "thread")[api_row]
    index = find_innermost(ranges, launches, thread)
    at = pl.Series(index).replace(-1, None)
    return pl.DataFrame(
        {
            "launch_ns": launches,
            "layer": ranges["name"].cast(pl.String).gather(at),
            "depth": ranges["depth"].gather(at),
            "range": index,
            "kernel": measured.trace.kernels["name"].cast(pl.String).gather(pl.Series(operations.row[launched])),
            "kernel_ns": (operations.ends - operations.starts)[launched],
        }
    )


def tabulate_layers(kernels_by_layer: pl.DataFrame) -> pl.DataFrame:
    """One row per layer: its kernel time, how much of it is matrix work, and how much ran on Tensor Cores."""
    named = kernels_by_layer.join(
        classify_kernels(kernels_by_layer["kernel"]),
        left_on="kernel",
        right_on="name",
        how="left",
        maintain_order="left",
    )
    return (
        named.group_by("layer")
        .agg(
            pl.col("count").max(),
            pl.col("kernels").sum(),
            pl.col("kernel_ns").sum(),
            pl.col("kernel_ns").filter(pl.col("matrix")).sum().alias("matrix_ns"),
            pl.col("kernel_ns").filter(pl.col("tensor_core")).sum().alias("tensor_core_ns"),
            pl.col("tensor_core").is_null().any().alias("unknown"),
            pl.col("kernel").sort_by("kernel_ns", descending=True).first().alias("main_kernel"),
        )
        .sort("kernel_ns", "layer", descending=[True, False])
    )


def find_innermost(ranges: pl.DataFrame, at: TimeArray, thread: TimeArray) -> TimeArray:
    """The row of the innermost range (of the same thread) open at each time; -1 for none."""
    result = np.full(at.size, -1, dtype=np.int64)
    owner, starts, ends = (
        array_from_column(ranges, "thread"),
        array_from_column(ranges, "start_ns"),
        array_from_column(ranges, "end_ns"),
    )
    for each in np.unique(owner):
        rows = np.flatnonzero(owner == each)
        order = rows[np.lexsort((-ends[rows], starts[rows]))]
        mine = np.flatnonzero(thread == each)
        result[mine] = _find_innermost_of_thread(starts[order], ends[order], order, at[mine])
    return result


def _find_innermost_of_thread(starts: TimeArray, ends: TimeArray, rows: TimeArray, at: TimeArray) -> TimeArray:
    parents = _find_parents(starts, ends)
    index = np.searchsorted(starts, at, side="right") - 1
    while True:
        closed = (index >= 0) & (ends[np.maximum(index, 0)] <= at)
        if not closed.any():
            return np.where(index >= 0, rows[np.maximum(index, 0)], -1)
        index[closed] = parents[index[closed]]


def _find_parents(starts: TimeArray, ends: TimeArray) -> TimeArray:
    """The range that encloses each one, -1 for none; ranges in the order of their start, the longer one first."""
    parents = np.full(starts.size, -1, dtype=np.int64)
    open_ranges: list[int] = []
    for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        while (open_ranges and ends[open_ranges[-1]] < end) or (open_ranges and ends[open_ranges[-1]] <= start):
            open_ranges.pop()
        parents[index] = open_ranges[-1] if open_ranges else -1
        open_ranges.append(index)
    return parents


def _select_below_iterations(measured: Analysis) -> pl.DataFrame:
    """The ranges inside an iteration; library ranges with a domain of their own (`cuBLAS:…`) are not layers."""
    if measured.iterations.is_empty():
        return pl.DataFrame(schema={**RANGE_SCHEMA, "depth": pl.Int64})
    depth, family = measured.iterations["depth"][0], measured.iterations["family"][0]
    name = pl.col("family")
    deeper = measured.projection.filter(
        (pl.col("depth") > depth) & (name != family) & ~name.str.contains(LIBRARY_RANGES)
    )
    return deeper.sort("start_ns", "end_ns", descending=[False, True])
