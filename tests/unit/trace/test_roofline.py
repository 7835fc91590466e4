"""The roofline by hand: a device of 100 operations and 10 bytes per nanosecond."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.graphs import onnx_model

from optpipe.core.card import InputSpec
from optpipe.trace.graph import graph_costs_from_onnx, sum_layer_times
from optpipe.trace.roofline import (
    GraphCosts,
    LayerCost,
    Peaks,
    Quadrant,
    compute_roofline,
    graph_costs_from_roofline,
    peaks_from_data_sheet,
)

PEAKS = Peaks("a device", "measured", {"fp32": 1e11, "fp16": 2e11}, 1e10)
MATH = LayerCost(
    "conv", "Conv", "fp32", macs=5_000, bytes=500, channels=(64, 64)
)  # 100 ns of arithmetic, 50 ns of memory
MEMORY = LayerCost("relu", "Relu", "fp32", macs=0, bytes=1_000)  # 100 ns of memory


def test_bounds() -> None:
    assert (MATH.math_ns(PEAKS), MATH.memory_ns(PEAKS), MATH.bound_ns(PEAKS)) == (100, 50, 100)
    found = compute_roofline(GraphCosts((MATH, MEMORY), PEAKS, 1), measured_ns=400.0)
    assert found.bound_ns == 100
    assert (found.unfused.bytes, found.unfused.ns, found.unfused.math_share) == (1_500, 200, 0.5)
    assert found.fused == found.unfused  # nothing is known to fuse
    assert found.times_bound == 4
    assert found.layers[0].quadrant is None  # no layer times, so nothing is said of where it stands


@pytest.mark.parametrize(
    ("cost", "measured_ns", "expected"),
    [
        (MATH, 120.0, Quadrant.MATH_LIMITED),
        (MATH, 200.0, Quadrant.MATH_BOUND_BELOW_PEAK),
        (MEMORY, 120.0, Quadrant.MEMORY_LIMITED),
        (MEMORY, 200.0, Quadrant.MEMORY_BOUND_BELOW_PEAK),
    ],
)
def test_quadrants(cost: LayerCost, measured_ns: float, expected: Quadrant) -> None:
    [layer] = compute_roofline(GraphCosts((cost,), PEAKS, 1), layer_ns={cost.name: measured_ns}).layers
    assert layer.quadrant is expected


def test_what_tensor_cores_cannot_take() -> None:
    odd = LayerCost("odd", "Conv", "fp16", macs=10, bytes=10, channels=(3, 64))
    even = LayerCost("even", "Conv", "fp16", macs=10, bytes=10, channels=(8, 64))
    assert (MATH.ineligible, even.ineligible) == ("there are no Tensor Cores for fp32; use fp16 or tf32", None)
    assert odd.ineligible == "channels 3 and 64 are not multiples of 8"


def test_known_devices() -> None:
    h200 = peaks_from_data_sheet("NVIDIA H200")
    assert h200 is not None
    assert (h200.flops("fp16"), h200.bytes_per_s, h200.source) == (989.4e12, 4.8e12, "data sheet")
    assert peaks_from_data_sheet("some other GPU") is None


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
    assert conv.bytes == graph.edge_bytes == 4 * (2 * 3 * 16 + 216 + 2 * 8 * 16)  # all but the tensor between the two
    assert conv.channels == (3, 8)
    assert (relu.macs, relu.bytes) == (0, 4 * 2 * (2 * 8 * 16))


def test_times_of_fused_nodes_go_to_their_product(tmp_path: Path) -> None:
    graph = _graph(tmp_path)
    assert sum_layer_times(graph, {"relu_nchwc": 10.0, "ReorderInput": 1.0}) == {"node_conv": 10.0}
    assert sum_layer_times(graph, {"node_conv_token_12": 3.0}) == {"node_conv": 3.0}
    assert sum_layer_times(graph, {"node_conv": 5.0, "node_relu": 2.0}) == {"node_conv": 5.0, "node_relu": 2.0}


@pytest.mark.parametrize(("edge_bytes", "bound_ns"), [(300, 100), (3_000, 300)])
def test_bound_if_everything_fused(edge_bytes: int, bound_ns: float) -> None:
    assert compute_roofline(GraphCosts((MATH, MEMORY), PEAKS, 1, edge_bytes=edge_bytes)).bound_ns == bound_ns


def test_arithmetic_of_a_type_without_a_peak_bounds_nothing() -> None:
    """A CPU's int8 may be faster than the fp32 that was probed."""
    quantized = LayerCost("int8", "Conv", "int8", macs=5_000, bytes=500)
    found = compute_roofline(GraphCosts((quantized,), PEAKS, 1, edge_bytes=10))
    assert (found.bound_ns, found.fused.ns) == (1, 100)
    assert found.types_without_peak == ("int8",)


def test_a_roofline_holds_what_the_figures_were_made_of() -> None:
    graph = GraphCosts((MATH, replace(MEMORY, fused_bytes=0)), PEAKS, 1, edge_bytes=300)
    found = compute_roofline(graph, 400.0, {"conv": 150.0})
    assert compute_roofline(graph_costs_from_roofline(found), 400.0) == found
