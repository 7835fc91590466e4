"""What fusion saves, by hand on small graphs, and the order of the three figures on graphs of any form."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto
from tests.fakes.graphs import onnx_model

from optpipe.backends.base import NodeCost, ProgramCosts
from optpipe.core.card import InputSpec
from optpipe.trace.graph import graph_costs_from_onnx, graph_costs_from_program
from optpipe.trace.roofline import GraphCosts, Peaks, compute_roofline

PEAKS = Peaks("a device", "measured", {"fp32": 1e11, "int8": 4e11}, 1e10)
SIZE = 4 * 2 * 8 * 4 * 4
"""Bytes of every activation: batch 2, 8 channels of 4 times 4."""
WEIGHT = 4 * 8 * 8


def _graph(nodes: Sequence[Any], results: Sequence[str] = ("y",), **constants: Any) -> GraphCosts:
    """The costs of `nodes` between the input x and `results`, all of one shape, at batch 2."""
    shape, weights = ["n", 8, 4, 4], {"w": np.zeros((8, 8, 1, 1), np.float32), **constants}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.onnx"
        onnx_model(nodes, {"x": shape}, dict.fromkeys(results, shape), path=path, **weights)
        spec = InputSpec("x", "float32", *((size, 8, 4, 4) for size in (1, 1, 8)))
        return graph_costs_from_onnx(path, [spec], 2, PEAKS)


def _fused(graph: GraphCosts) -> dict[str, int | None]:
    return {each.name: each.fused_bytes for each in graph.costs}


def test_a_skip_connection_is_read_by_the_convolution_that_adds_it() -> None:
    block = [
        ("Conv", "x w", "first"),
        ("Relu", "first", "skip"),
        ("Conv", "skip w", "second"),
        ("Add", "second skip", "sum"),
        ("Relu", "sum", "y"),
    ]
    graph = _graph(block)
    assert _fused(graph) == {
        "first": SIZE + WEIGHT + SIZE,  # reads x, writes skip
        "skip": 0,
        "second": SIZE + WEIGHT + SIZE,  # reads skip once for both, writes y
        "sum": 0,
        "y": 0,
    }
    assert [each.is_fused_away for each in graph.costs] == [False, True, False, True, True]
    assert graph.edge_bytes == SIZE + WEIGHT + SIZE
    assert sum(each.bytes for each in graph.costs) == 2 * (2 * SIZE + WEIGHT) + (2 + 3 + 2) * SIZE


@pytest.mark.parametrize(
    ("nodes", "fused"),
    [
        pytest.param(
            [("Conv", "x w", "left"), ("Conv", "x w", "right"), ("Add", "left right", "y")],
            {"left": 2 * SIZE + WEIGHT, "right": 3 * SIZE + WEIGHT, "y": 0},
            id="a branch is added where the last of its producers is computed",
        ),
        pytest.param(
            [
                ("Conv", "x w", "conv"),
                ("Relu", "conv", "relu"),
                ("Softmax", "relu", "pool"),
                ("Conv", "relu w", "other"),
                ("Add", "pool other", "y"),
            ],
            {"conv": 2 * SIZE + WEIGHT, "relu": 0, "pool": 2 * SIZE, "other": 3 * SIZE + WEIGHT, "y": 0},
            id="a tensor that leaves the group is written once and read by each group",
        ),
        pytest.param(
            [("Conv", "x w", "conv"), ("Identity", "conv", "same"), ("Relu", "same", "y")],
            {"conv": 2 * SIZE + WEIGHT, "y": 0},
            id="views are the same tensor",
        ),
        pytest.param(
            [("MatMul", "x x", "product"), ("Softmax", "product", "scores"), ("MatMul", "scores x", "y")],
            {"product": SIZE, "scores": 0, "y": 2 * SIZE},
            id="the scores of an attention are not moved",
        ),
        pytest.param(
            [("Conv", "x w", "conv"), ("Softmax", "conv", "y")],
            {"conv": 2 * SIZE + WEIGHT, "y": 2 * SIZE},
            id="a softmax that is no attention has a kernel of its own",
        ),
    ],
)
def test_what_each_group_moves(nodes: list[tuple[str, str, str]], fused: dict[str, int]) -> None:
    assert _fused(_graph(nodes)) == fused


def test_weights_are_read_as_they_are_kept() -> None:
    """One byte each where they are quantized, though the graph has them as fp32 too."""
    nodes = [
        ("QuantizeLinear", "x scale", "xq"),
        ("DequantizeLinear", "xq scale", "xd"),
        ("DequantizeLinear", "q scale", "wd"),
        ("Conv", "xd wd", "y"),
    ]
    graph = _graph(nodes, q=np.zeros((8, 8, 1, 1), np.int8), scale=np.float32(1))
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
    graph = _graph(nodes, table=np.zeros((1000, 2), np.float32), axis=[-1])
    rows, index = 2 * SIZE, 2 * SIZE
    assert _fused(graph) == {"index": SIZE + index, "rows": rows + index + rows, "y": rows + 8 + SIZE}
    assert graph.edge_bytes == SIZE + rows + 8 + SIZE  # of the table's 8000 bytes, the rows


@st.composite
def _any_graph(draw: st.DrawFn) -> GraphCosts:
    tensors, nodes = ["x"], []
    for number in range(draw(st.integers(1, 12))):
        op = draw(st.sampled_from(["Conv", "Relu", "Add", "Identity", "Softmax", "MatMul", "MaxPool"]))
        given = [draw(st.sampled_from(tensors)) for _ in range(2 if op in ("Add", "MatMul") else 1)]
        attributes = {"kernel_shape": [1, 1]} if op == "MaxPool" else {}
        nodes.append((op, " ".join([*given, *(["w"] if op == "Conv" else [])]), f"t{number}", attributes))
        tensors.append(f"t{number}")
    results = draw(st.lists(st.sampled_from(tensors[1:]), min_size=1, max_size=3, unique=True))
    return _graph(nodes, results=results)


@given(_any_graph())
def test_no_figure_is_above_the_next(graph: GraphCosts) -> None:
    found = compute_roofline(graph)
    rounding = 1 + 1e-12
    assert found.bound_ns <= found.fused.ns * rounding
    assert found.fused.ns <= found.unfused.ns * rounding
    assert found.fused.bytes <= found.unfused.bytes
    assert graph.edge_bytes <= found.unfused.bytes


@pytest.mark.parametrize("tf32", [True, False])
def test_a_torch_program_is_its_own_graph(*, tf32: bool) -> None:
    conv = NodeCost("conv1", "Conv", "fp32", macs=100, bytes=40, channels=(3, 64))
    pool = NodeCost("pool", "max_pool2d", "fp32", macs=0, bytes=30, channels=None)
    peaks = Peaks("GPU", "measured", {"fp32": 1e12, "tf32": 8e12}, 1e12)
    graph = graph_costs_from_program(ProgramCosts((conv, pool), 50), 2, peaks, tf32=tf32)
    assert [each.type for each in graph.costs] == ["tf32" if tf32 else "fp32", "fp32"]
    assert graph.costs[0].channels == (3, 64)
    roofs = compute_roofline(graph)
    assert roofs.fused == roofs.unfused  # what is one kernel in it is one node
    assert roofs.unfused.bytes == 70
    assert roofs.edge_bytes == 50
