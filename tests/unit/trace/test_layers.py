"""Tensor Cores and the roofline by layer, and the times of ONNX Runtime's nodes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.golden.nsys_export import US, Recording
from tests.golden.phenomena import GEMM, RELU

from optpipe.backends.onnxruntime_session import read_node_times
from optpipe.core.errors import StageError
from optpipe.trace.read import Trace
from optpipe.trace.report import profile_from_trace
from optpipe.trace.roofline import GraphCosts, NodeCost, Peaks

Read = Callable[[Recording], Trace]
DIRECT = "void convolve_common_engine_float_NHWC<__half, __half, (int)128, (int)5>(int)"
PEAKS = Peaks("a device", "measured", {"fp32": 1e12, "fp16": 1e13}, 1e12)
STEM = NodeCost(
    "stem", "Conv", "fp16", macs=10_000_000, bytes=1_000, channels=(3, 64)
)  # 2 µs of arithmetic


def _record_layers() -> Recording:
    """Two measured iterations with `stem` (no Tensor Cores), `conv`, and `act` in each."""
    trace = Recording()
    trace.range("optpipe.measure", 1000, 1400)
    for begin in (1001, 1201):
        trace.range("optpipe.iteration", begin, begin + 100)
        for at, name, kernel, length in (
            (2, "stem", DIRECT, 60),
            (12, "conv", GEMM, 20),
            (22, "act", RELU, 10),
        ):
            trace.range(name, begin + at, begin + at + 9)
            start = begin + at + 10
            trace.kernel(kernel, start, start + length, launch=(begin + at + 0.4, begin + at + 5))
    return trace


def test_each_kernel_belongs_to_the_layer_that_launched_it(read: Read) -> None:
    costs = (
        STEM,
        NodeCost("conv", "Conv", "fp16", macs=10_000_000, bytes=1_000, channels=(64, 64)),
        NodeCost("act", "Relu", "fp16", macs=0, bytes=5_000_000),
    )
    judged = profile_from_trace(read(_record_layers()), graph=GraphCosts(costs, PEAKS, 1))
    cores = judged.tensor_cores
    assert cores is not None
    assert (cores.basis, cores.iterations) == ("layers", 2)
    assert [(each.name, each.op, each.time_ns, each.share) for each in cores.layers] == [
        ("stem", "Conv", 120 * US, 120 / 180),
        ("conv", "Conv", 40 * US, 40 / 180),
        ("act", "Relu", 20 * US, 20 / 180),
    ]
    assert cores.named_ns == cores.kernel_ns == 180 * US
    assert (cores.eligible, cores.used, cores.missed) == (1, 1, ())
    [stem] = cores.ineligible
    assert stem.reason == "channels 3 and 64 are not multiples of 8"
    [finding] = [each for each in judged.findings if each.rule == "ineligible-for-tensor-cores"]
    assert (
        stem.could_save_ns == finding.gain_ns == 2 * (60 - 2) * US
    )  # two iterations, to the bound of 2 µs
    assert judged.roofline is not None
    assert {row.cost.name: row.measured_ns for row in judged.roofline.layers}["stem"] == 60 * US


def test_a_missed_layer_saves_at_most_what_lies_above_its_bound(read: Read) -> None:
    graph = GraphCosts(
        (NodeCost("stem", "Conv", "fp16", STEM.macs, STEM.bytes, channels=(8, 64)),), PEAKS, 1
    )
    cores = profile_from_trace(read(_record_layers()), graph=graph).tensor_cores
    assert cores is not None
    assert [(each.name, each.could_save_ns) for each in cores.missed] == [("stem", 116 * US)]


def test_median_times_of_the_nodes_in_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    events = [
        {"cat": "Session", "name": "model_run", "dur": 90},
        *({"cat": "Node", "name": "a_kernel_time", "dur": us} for us in (5, 9, 7)),
        {"cat": "Node", "name": "a_fence_before", "dur": 0},
    ]
    path.write_text(json.dumps(events))
    assert read_node_times(path) == {"a": 7_000}
    path.write_text('{"no": "list"}')
    with pytest.raises(StageError, match="not an ONNX Runtime profile"):
        read_node_times(path)
