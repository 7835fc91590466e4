"""The roofline by hand, the bottleneck that follows, and what fusion saves."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto
from tests.fakes.console import text_of
from tests.fakes.graphs import onnx_model
from tests.golden import phenomena
from tests.golden.nsys_export import Recording

from optpipe.core.card import InputSpec
from optpipe.report.document import make_document
from optpipe.trace.bottleneck import LimitingFactor
from optpipe.trace.document import _describe_roofline
from optpipe.trace.read import Trace
from optpipe.trace.report import profile_from_trace
from optpipe.trace.roofline import (
    GraphCosts,
    NodeCost,
    Peaks,
    compute_math_ns,
    compute_memory_ns,
    compute_roofline,
    explain_ineligible,
    graph_costs_from_onnx,
    sum_layer_times,
)

PEAKS = Peaks("a device", "measured", {"fp32": 1e11, "fp16": 2e11}, 1e10)
MATH = NodeCost(
    "conv", "Conv", "fp32", macs=5_000, bytes=500, channels=(64, 64)
)  # 100 ns of math, 50 ns of memory
MEMORY = NodeCost("relu", "Relu", "fp32", macs=0, bytes=1_000)  # 100 ns of memory


def test_bounds() -> None:
    assert (compute_math_ns(MATH, PEAKS), compute_memory_ns(MATH, PEAKS)) == (100, 50)
    found = compute_roofline(GraphCosts((MATH, MEMORY), PEAKS, 1), measured_ns=400.0)
    assert found.bound_ns == 100
    assert (found.layers_ns, found.math_share) == (200, 0.5)  # nothing is known to fuse
    assert found.times_bound == 4


def test_a_time_below_a_bound_leaves_no_bound() -> None:
    """A probe on a busy machine gives peaks that are too low: 0.2 times a least time is no finding."""
    graph = GraphCosts((MATH, MEMORY), PEAKS, 1)
    assert compute_roofline(graph, measured_ns=100.0).contradiction is None
    whole = compute_roofline(graph, measured_ns=20.0)
    assert whole.contradiction == (20, 100)
    assert whole.times_bound is None

    layers = compute_roofline(graph, measured_ns=400.0, layer_ns={"conv": 50.0, "relu": 300.0})
    assert layers.contradiction == (50, 100), "its layers show it, although the rest takes longer"
    cached = compute_roofline(graph, measured_ns=400.0, layer_ns={"conv": 150.0, "relu": 30.0})
    assert cached.contradiction is None, "a cache is faster than memory, and no peak is wrong"
    assert [row.cost.name for row in cached.layers if row.is_contradicted] == ["relu"]

    for found, hidden in ((whole, "× the bound"), (layers, "farthest above"), (cached, "relu")):
        assert hidden not in text_of(make_document(_describe_roofline(found)))
    assert "no bound" in text_of(make_document(_describe_roofline(layers)))


def test_what_tensor_cores_cannot_take() -> None:
    odd = NodeCost("odd", "Conv", "fp16", macs=10, bytes=10, channels=(3, 64))
    even = NodeCost("even", "Conv", "fp16", macs=10, bytes=10, channels=(8, 64))
    assert explain_ineligible(MATH) == "there are no Tensor Cores for fp32; use fp16 or tf32"
    assert explain_ineligible(even) is None
    assert explain_ineligible(odd) == "channels 3 and 64 are not multiples of 8"


def _graph(directory: Path) -> Path:
    nodes = [
        ("Conv", "x weight", "conv_out", {"name": "node_conv", "pads": [1, 1, 1, 1]}),
        ("Relu", "conv_out", "relu", {"name": "node_relu"}),
    ]
    path, weight = directory / "model.onnx", np.zeros((8, 3, 3, 3), np.float32)
    onnx_model(nodes, {"x": ["n", 3, 4, 4]}, {"relu": ["n", 8, 4, 4]}, path=path, weight=weight)
    return path


def test_costs_from_a_graph_by_hand(tmp_path: Path) -> None:
    spec = InputSpec("x", "float32", (1, 3, 4, 4), (1, 3, 4, 4), (8, 3, 4, 4))
    graph = graph_costs_from_onnx(_graph(tmp_path), [spec], 2, PEAKS)
    conv, relu = graph.costs
    assert conv.macs == 2 * 8 * 4 * 4 * 27
    assert (
        conv.bytes == graph.edge_bytes == 4 * (2 * 3 * 16 + 216 + 2 * 8 * 16)
    )  # all but the tensor between the two
    assert conv.channels == (3, 8)
    assert (relu.macs, relu.bytes) == (0, 4 * 2 * (2 * 8 * 16))


def test_a_graph_that_the_runtime_casts_has_the_costs_of_its_type(tmp_path: Path) -> None:
    """torch and AOTInductor build FP16 from the FP32 graph: at the rate of FP32 its bound would lie above the measured time."""
    spec = InputSpec("x", "float32", (1, 3, 4, 4), (1, 3, 4, 4), (8, 3, 4, 4))
    path = _graph(tmp_path)
    single, half, tf32 = (
        graph_costs_from_onnx(path, [spec], 2, PEAKS, precision=kind)
        for kind in ("fp32", "fp16", "tf32")
    )
    assert [each.costs[0].type for each in (single, half, tf32)] == ["fp32", "fp16", "tf32"]
    assert 2 * half.edge_bytes == single.edge_bytes == tf32.edge_bytes


def test_times_of_fused_nodes_go_to_their_product(tmp_path: Path) -> None:
    graph = _graph(tmp_path)
    assert sum_layer_times(graph, {"relu_nchwc": 10.0, "ReorderInput": 1.0}) == {"node_conv": 10.0}
    assert sum_layer_times(graph, {"node_conv": 5.0, "node_relu": 2.0}) == {
        "node_conv": 5.0,
        "node_relu": 2.0,
    }


@pytest.mark.parametrize(("edge_bytes", "bound_ns"), [(300, 100), (3_000, 300)])
def test_bound_if_everything_fused(edge_bytes: int, bound_ns: float) -> None:
    assert (
        compute_roofline(GraphCosts((MATH, MEMORY), PEAKS, 1, edge_bytes=edge_bytes)).bound_ns
        == bound_ns
    )


def test_arithmetic_of_a_type_without_a_peak_bounds_nothing() -> None:
    """A CPU's int8 may be faster than the fp32 that was probed."""
    quantized = NodeCost("int8", "Conv", "int8", macs=5_000, bytes=500)
    found = compute_roofline(GraphCosts((quantized,), PEAKS, 1, edge_bytes=10))
    assert (found.bound_ns, found.layers_ns) == (1, 100)
    assert found.types_without_peak == ("int8",)


WEAK_PEAKS = Peaks("a device", "measured", {"fp32": 1e12}, 1e9)
RELU = NodeCost("relu", "Relu", "fp32", macs=0, bytes=20_000, fused_bytes=0)


def _conv(math_us: int, bytes_alone: int, fused_bytes: int) -> NodeCost:
    return NodeCost("conv", "Conv", "fp32", math_us * 500_000, bytes_alone, fused_bytes=fused_bytes)


@pytest.mark.parametrize(
    ("conv", "limit"),
    [
        (_conv(10, 60_000, 30_000), LimitingFactor.BELOW_PEAKS),  # fused, 30 of 90 µs
        (_conv(10, 60_000, 64_000), LimitingFactor.MEMORY),
        (_conv(64, 60_000, 30_000), LimitingFactor.MATH),
    ],
)
def test_seventy_percent_of_a_peak_limits(
    read: Callable[[Recording], Trace], conv: NodeCost, limit: object
) -> None:
    graph = GraphCosts((conv, RELU), WEAK_PEAKS, 1)
    assert profile_from_trace(read(phenomena.gpu_bound()), graph=graph).bottleneck.verdict is limit


TYPED_PEAKS = Peaks("a device", "measured", {"fp32": 1e11, "int8": 4e11}, 1e10)
SIZE = 4 * 2 * 8 * 4 * 4
"""Bytes of every activation: batch 2, 8 channels of 4 times 4."""
WEIGHT = 4 * 8 * 8


def _costs_of(
    nodes: Sequence[Any], results: Sequence[str] = ("y",), **constants: Any
) -> GraphCosts:
    """The costs of `nodes` between the input x and `results`, all of one shape, at batch 2."""
    shape, weights = ["n", 8, 4, 4], {"w": np.zeros((8, 8, 1, 1), np.float32), **constants}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.onnx"
        onnx_model(nodes, {"x": shape}, dict.fromkeys(results, shape), path=path, **weights)
        spec = InputSpec("x", "float32", *((size, 8, 4, 4) for size in (1, 1, 8)))
        return graph_costs_from_onnx(path, [spec], 2, TYPED_PEAKS)


def _fused(graph: GraphCosts) -> dict[str, int | None]:
    return {each.name: each.fused_bytes for each in graph.costs}


GROUPS = {
    "a branch is added where the last of its producers is computed": (
        [("Conv", "x w", "left"), ("Conv", "x w", "right"), ("Add", "left right", "y")],
        {"left": 2 * SIZE + WEIGHT, "right": 3 * SIZE + WEIGHT, "y": 0},
    ),
    "a skip connection is read by the convolution that adds it": (
        [("Conv", "x w", "a"), ("Relu", "a", "skip"), ("Conv", "skip w", "b"), ("Add", "b skip", "sum"), ("Relu", "sum", "y")],
        {"a": 2 * SIZE + WEIGHT, "skip": 0, "b": 2 * SIZE + WEIGHT, "sum": 0, "y": 0},
    ),
    "a tensor that leaves the group is written once and read by each group": (
        [("Conv", "x w", "conv"), ("Relu", "conv", "relu"), ("Softmax", "relu", "pool"), ("Conv", "relu w", "other"),
         ("Add", "pool other", "y")],
        {"conv": 2 * SIZE + WEIGHT, "relu": 0, "pool": 2 * SIZE, "other": 3 * SIZE + WEIGHT, "y": 0},
    ),
    "views are the same tensor": (
        [("Conv", "x w", "conv"), ("Identity", "conv", "same"), ("Relu", "same", "y")],
        {"conv": 2 * SIZE + WEIGHT, "y": 0},
    ),
    "the scores of an attention are not moved": (
        [("MatMul", "x x", "product"), ("Softmax", "product", "scores"), ("MatMul", "scores x", "y")],
        {"product": SIZE, "scores": 0, "y": 2 * SIZE},
    ),
    "a softmax that is no attention has a kernel of its own": (
        [("Conv", "x w", "conv"), ("Softmax", "conv", "y")],
        {"conv": 2 * SIZE + WEIGHT, "y": 2 * SIZE},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "fused"), GROUPS.values(), ids=GROUPS)
def test_what_each_group_moves(nodes: list[tuple[str, str, str]], fused: dict[str, int]) -> None:
    assert _fused(_costs_of(nodes)) == fused


def test_weights_are_read_as_they_are_kept() -> None:
    """One byte each where they are quantized, though the graph has them as fp32 too."""
    nodes = [
        ("QuantizeLinear", "x scale", "xq"),
        ("DequantizeLinear", "xq scale", "xd"),
        ("DequantizeLinear", "q scale", "wd"),
        ("Conv", "xd wd", "y"),
    ]
    graph = _costs_of(nodes, q=np.zeros((8, 8, 1, 1), np.int8), scale=np.float32(1))
    costs = {each.name: each for each in graph.costs}
    assert costs["y"].type == "int8"
    assert {name: each.fused_bytes for name, each in costs.items()} == {
        "xq": SIZE + 4 + SIZE // 4,
        "xd": 0,
        "wd": 0,
        "y": SIZE // 4 + 64 + SIZE,
    }
    assert graph.edge_bytes == SIZE + 4 + 64 + SIZE


def test_rows_picked_from_a_table_are_all_that_is_read() -> None:
    nodes = [
        ("Cast", "x", "index", {"to": TensorProto.INT64}),
        ("Gather", "table index", "rows"),
        ("ReduceSum", "rows axis", "y", {"keepdims": 0}),
    ]
    graph = _costs_of(nodes, table=np.zeros((1000, 2), np.float32), axis=[-1])
    rows, index = 2 * SIZE, 2 * SIZE
    assert _fused(graph) == {
        "index": SIZE + index,
        "rows": rows + index + rows,
        "y": rows + 8 + SIZE,
    }
    assert graph.edge_bytes == SIZE + rows + 8 + SIZE  # of the table's 8000 bytes, the rows


@st.composite
def _any_graph(draw: st.DrawFn) -> GraphCosts:
    tensors, nodes = ["x"], []
    for number in range(draw(st.integers(1, 12))):
        op = draw(
            st.sampled_from(["Conv", "Relu", "Add", "Identity", "Softmax", "MatMul", "MaxPool"])
        )
        given = [draw(st.sampled_from(tensors)) for _ in range(2 if op in ("Add", "MatMul") else 1)]
        attributes = {"kernel_shape": [1, 1]} if op == "MaxPool" else {}
        nodes.append(
            (op, " ".join([*given, *(["w"] if op == "Conv" else [])]), f"t{number}", attributes)
        )
        tensors.append(f"t{number}")
    results = draw(st.lists(st.sampled_from(tensors[1:]), min_size=1, max_size=3, unique=True))
    return _costs_of(nodes, results=results)


@given(_any_graph())
def test_no_figure_is_above_the_next(graph: GraphCosts) -> None:
    found = compute_roofline(graph)
    assert found.bound_ns <= found.layers_ns * (1 + 1e-12)
    fused = [each.bytes if each.fused_bytes is None else each.fused_bytes for each in graph.costs]
    assert sum(fused) <= sum(each.bytes for each in graph.costs)
