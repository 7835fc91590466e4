"""ONNX Runtime's nodes: when each ran by ONNX Runtime's own profile, which kernels it launched, which layer it is.

The published wheels are built without CUPTI and without NVTX ranges (neither is linked into onnxruntime-gpu 1.31.1), so
their profile has no kernels and a recording has no nodes. The profile does say when the host was inside each node, on
the system clock. Iterations that are marked in the recording and timed on that clock too tie the two clocks together;
a kernel then belongs to the node during which it was launched.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from optpipe.backends.base import NodeRun
from optpipe.core.errors import StageError
from optpipe.trace.ranges import ITERATION_RANGE, LAYERS_RANGE
from optpipe.trace.recording.frames import NAME_DTYPE, RANGE_SCHEMA, Trace
from optpipe.trace.timeline.timeline import array_from_column

_FUSED_DEPTH = 4
"""A fused convolution ends at most this many nodes behind its product: bias, sum, activation."""
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "MatMulInteger", "ConvInteger", "QLinearConv"})
_NHWC_SUFFIX = re.compile(r"_token_\d+$")
_STEP_NS = 100
_TICK_NS = 1_000
"""The profile's times are whole microseconds, cut off."""
_APART_NS = 50_000
"""Clocks that can only be tied together worse than this are not: launches follow each other faster."""


@dataclass(frozen=True, slots=True)
class ClockAnchor:
    """System-clock times taken just before a range opens, just inside it at both ends, and just after it closes."""

    before_ns: int
    entered_ns: int
    leaving_ns: int
    after_ns: int


def add_node_ranges(
    trace: Trace, runs: Sequence[NodeRun], anchors: Sequence[ClockAnchor], names: Mapping[str, str]
) -> Trace:
    """`trace` with a range for every node that ran inside the marked iterations, called by `names` where they know it.

    Raises:
        StageError: the recording does not hold these iterations, or its clock cannot be tied to the system's.
    """
    name = pl.col("name").cast(pl.String)
    layers = trace.ranges.filter(name == LAYERS_RANGE)
    if layers.is_empty():
        raise StageError("the recording has no layer iterations: it ended before them")
    within = (pl.col("start_ns") >= layers["start_ns"][0]) & (pl.col("end_ns") <= layers["end_ns"][0])
    iterations = trace.ranges.filter((name == ITERATION_RANGE) & within).sort("start_ns")
    offset_ns = _choose_offset_ns(trace, iterations, runs, estimate_clock_offsets_ns(iterations, anchors))
    thread = int(iterations["thread"][0])
    starts, ends = iterations["start_ns"].to_list(), iterations["end_ns"].to_list()
    rows = []
    for first, second in zip(runs, [*runs[1:], None], strict=True):
        start, end = first.start_ns - offset_ns, first.end_ns - offset_ns
        following = second.start_ns - offset_ns if second else end
        # The profile cuts its ticks off, at both ends; a node that holds others (If, Loop) stays whole.
        until = following if abs(end - following) <= 2 * _TICK_NS else end + _TICK_NS
        inside = next((i for i, begin in enumerate(starts) if begin <= start and until <= ends[i]), None)
        if inside is not None:
            rows.append((start, max(until, start + 1), thread, names.get(first.name, first.name)))
    added = pl.DataFrame(rows, schema={**RANGE_SCHEMA, "name": pl.String}, orient="row").with_columns(
        pl.col("name").cast(NAME_DTYPE)
    )
    return replace(trace, ranges=pl.concat([trace.ranges, added]).sort("start_ns", maintain_order=True))


def estimate_clock_offsets_ns(iterations: pl.DataFrame, anchors: Sequence[ClockAnchor]) -> tuple[int, int]:
    """Least and most of the system's clock minus the recording's that all `anchors` of the same `iterations` allow.

    Raises:
        StageError: they are not as many, or contradict each other by more than 50 µs.
    """
    if iterations.height != len(anchors) or not anchors:
        raise StageError(f"the recording has {iterations.height} layer iterations, but {len(anchors)} were run")
    starts, ends = iterations["start_ns"].to_list(), iterations["end_ns"].to_list()
    places = list(zip(anchors, starts, ends, strict=True))
    least = max(max(each.before_ns - start, each.leaving_ns - end) for each, start, end in places)
    most = min(min(each.entered_ns - start, each.after_ns - end) for each, start, end in places)
    if abs(most - least) > _APART_NS:
        raise StageError(f"the profiler and system clocks can be aligned only to {abs(most - least) / 1e3:.0f} µs")
    return min(least, most), max(least, most)


def _choose_offset_ns(trace: Trace, iterations: pl.DataFrame, runs: Sequence[NodeRun], allowed: tuple[int, int]) -> int:
    """The offset, of those allowed, at which most launches lie inside one node: nothing is launched between nodes.

    The anchors leave some microseconds open, and nodes follow each other within one.
    """
    inside = (pl.col("start_ns") >= iterations["start_ns"].min()) & (pl.col("end_ns") <= iterations["end_ns"].max())
    launches = trace.api.filter(inside).join(trace.kernels.select("correlation_id"), on="correlation_id", how="semi")
    candidates = np.arange(allowed[0], allowed[1] + 1, _STEP_NS)
    if launches.is_empty() or not runs:
        return int(candidates[candidates.size // 2])
    starts, ends = (np.array([getattr(run, name) for run in runs], dtype=np.int64) for name in ("start_ns", "end_ns"))
    called, returned = array_from_column(launches, "start_ns"), array_from_column(launches, "end_ns")

    def held(offset: int) -> int:
        node = np.maximum(np.searchsorted(starts - offset, called, side="right") - 1, 0)
        return int(((starts[node] - offset <= called) & (returned <= ends[node] - offset + _TICK_NS)).sum())

    counts = np.array([held(int(offset)) for offset in candidates])
    best = candidates[counts == counts.max()]
    return int(best[best.size // 2])


def match_source_names(graph: Path, runtime_names: Sequence[str]) -> dict[str, str]:
    """The names of ONNX Runtime's own nodes (`runtime_names`) by the names of `graph`'s, where one can be told.

    A node that kept its name is that layer, also where the CUDA provider's NHWC conversion numbered it (`_token_12`). The
    blocked convolutions of the CPU provider are called after the tensor that they write (`relu_3_nchwc`): they are the
    product from which that tensor comes by elementwise steps.
    """
    import onnx

    nodes = list(onnx.load(graph, load_external_data=False).graph.node)
    known = {node.name for node in nodes}
    writers = {output: node for node in nodes for output in node.output}
    found: dict[str, str] = {}
    for name in dict.fromkeys(runtime_names):
        plain = _NHWC_SUFFIX.sub("", name.removeprefix("fused "))
        if plain in known:
            found[name] = plain
        elif (product := _find_product_behind(plain.removesuffix("_nchwc"), writers, set(found.values()))) is not None:
            found[name] = product
    return found


def sum_layer_times(graph: Path, node_ns: Mapping[str, float]) -> dict[str, float]:
    """`node_ns` by the names of `graph`'s own nodes."""
    times: dict[str, float] = {}
    for runtime_name, name in match_source_names(graph, list(node_ns)).items():
        times[name] = times.get(name, 0.0) + node_ns[runtime_name]
    return times


def _find_product_behind(tensor: str, writers: Mapping[str, Any], taken: set[str]) -> str | None:
    """The nearest product that `tensor` comes from, which no other time was given to."""
    wave = [tensor]
    for _ in range(_FUSED_DEPTH):
        found = [writers[each] for each in wave if each in writers]
        for node in found:
            if node.op_type in _PRODUCTS and node.name not in taken:
                return str(node.name)
        wave = [each for node in found if node.op_type not in _PRODUCTS for each in node.input]
    return None
