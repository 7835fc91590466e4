"""ONNX Runtime's nodes by hand: its profile's clock runs 5 s ahead of the recording's, and its ticks are microseconds."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.golden.nsys_export import US, Recording

from optpipe.backends.base import NodeCost, NodeRun
from optpipe.backends.onnxruntime_session import read_node_runs
from optpipe.core.errors import StageError
from optpipe.trace.analysis import analysis_from_trace, select_measured_part
from optpipe.trace.nsys import LAYERS_RANGE
from optpipe.trace.read import Trace, trace_from_sqlite
from optpipe.trace.report import TraceProfile, profile_from_trace
from optpipe.trace.roofline import ClockAnchor, GraphCosts, Peaks, Quadrant, add_node_ranges
from optpipe.trace.tensor_cores import attribute_kernels

Read = Callable[[Recording], Trace]
GOLDEN = Path(__file__).parents[2] / "golden" / "traces"
AHEAD_NS = 5_000_000_000
GEMM = "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel__5x_cublas"
DIRECT = "void convolve_common_engine_float_NHWC<__half, __half, (int)128, (int)5>(int)"
RELU = "void onnxruntime::cuda::_UnaryElementWise<__half, __half, onnxruntime::cuda::OP_Relu<__half> >(int)"
PEAKS = Peaks("a device", "measured", {"fp32": 1e12, "fp16": 1e13}, 1e12)


def _recording() -> tuple[Recording, list[NodeRun], list[ClockAnchor]]:
    """Two measured iterations of 70 µs, then two for the layers: `stem` (no Tensor Cores), `conv`, `act` in each."""
    trace, runs, anchors = Recording(), [], []
    trace.range("optpipe.measure", 0, 200)
    for begin in (1, 101):
        trace.range("optpipe.iteration", begin, begin + 80)
        trace.kernel(DIRECT, begin + 10, begin + 80, launch=(begin + 1, begin + 5))
    trace.range("optpipe.layers", 1000, 1400)
    for begin in (1001, 1201):
        trace.range("optpipe.iteration", begin, begin + 100)
        at = begin * US + AHEAD_NS
        anchors.append(ClockAnchor(at - 9_000, at + 1_000, at + 99_000, at + 109_000))
        for offset, name, op, kernel, length in (
            (2, "Conv_0", "Conv", DIRECT, 60),
            (12, "Conv_1_nhwc", "Conv", GEMM, 20),
            (22, "Relu_2", "Relu", RELU, 10),
        ):
            # The launch begins 0.4 µs after its node does, by the recording's clock.
            trace.kernel(
                kernel,
                begin + offset + 10,
                begin + offset + 10 + length,
                launch=(begin + offset + 0.4, begin + offset + 5),
            )
            runs.append(NodeRun(name, op, (begin + offset) * US + AHEAD_NS, (begin + offset + 9) * US + AHEAD_NS))
    return trace, runs, anchors


@pytest.fixture
def judged(read: Read) -> TraceProfile:
    recording, runs, anchors = _recording()
    trace = add_node_ranges(read(recording), runs, anchors, {"Conv_0": "stem", "Conv_1_nhwc": "conv", "Relu_2": "act"})
    costs = (
        NodeCost("stem", "Conv", "fp16", macs=10_000_000, bytes=1_000, channels=(3, 64)),  # 2 µs of arithmetic
        NodeCost("conv", "Conv", "fp16", macs=10_000_000, bytes=1_000, channels=(64, 64)),
        NodeCost("act", "Relu", "fp16", macs=0, bytes=5_000_000),  # 5 µs of memory
    )
    return profile_from_trace(trace, graph=GraphCosts(costs, PEAKS, 1))


def test_each_kernel_belongs_to_the_node_that_launched_it(judged: TraceProfile) -> None:
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
    assert stem.could_save_ns == finding.gain_ns == 2 * (60 - 2) * US  # two iterations, to the bound of 2 µs
    assert judged.roofline is not None
    layers = {row.cost.name: row for row in judged.roofline.layers}
    assert layers["stem"].measured_ns == 60 * US
    assert layers["act"].memory_peak_share == 0.5
    assert layers["act"].quadrant is Quadrant.MEMORY_BOUND_BELOW_PEAK


def test_a_missed_layer_saves_at_most_what_lies_above_its_bound(read: Read) -> None:
    recording, runs, anchors = _recording()
    trace = add_node_ranges(read(recording), runs, anchors, {"Conv_0": "stem"})
    costs = (NodeCost("stem", "Conv", "fp16", macs=10_000_000, bytes=1_000, channels=(8, 64)),)
    cores = profile_from_trace(trace, graph=GraphCosts(costs, PEAKS, 1)).tensor_cores
    assert cores is not None
    assert [(each.name, each.could_save_ns) for each in cores.missed] == [("stem", 116 * US)]
    assert {each.name for each in cores.layers} == {"stem", "Conv_1_nhwc", "Relu_2"}


def test_clocks_that_contradict_each_other_are_refused(read: Read) -> None:
    recording, runs, anchors = _recording()
    drifted = [
        anchors[0],
        anchors[1]._replace(before_ns=anchors[1].before_ns + 200 * US, entered_ns=anchors[1].entered_ns + 200 * US),
    ]
    trace = read(recording)
    with pytest.raises(StageError, match="can be aligned only to 190 µs"):
        add_node_ranges(trace, runs, drifted, {})
    with pytest.raises(StageError, match="has 2 layer iterations, but 1 were run"):
        add_node_ranges(trace, runs, anchors[:1], {})


# Of the real pair of recordings: when ONNX Runtime's profile began, and the system's clock around each iteration.
STARTED_NS = 1795256385366758150
ANCHORS = (
    ClockAnchor(1795256385977144696, 1795256385977162139, 1795256385978562198, 1795256385978665838),
    ClockAnchor(1795256385978667774, 1795256385978705512, 1795256385979969858, 1795256385980016246),
    ClockAnchor(1795256385980027078, 1795256385980058939, 1795256385981177820, 1795256385981213620),
)
KERNELS_OF = {
    "Conv": r"convolve|implicit_convolve_sgemm|cutlass_tensorop|op_generic_tensor_kernel",  # the last adds the bias
    "Relu": "OP_Relu",
    "Add": "OP_Add",
    "Cast": "OP_Cast",
    "Gemm": "gemv",
    "ReduceMean": "reduce_matrix_rows|OP_Div",
    "Transpose": "transpose",
}


def test_on_a_real_gpu_every_node_launches_kernels_of_its_own_operator() -> None:
    runs = list(read_node_runs(GOLDEN / "h200-digits-fp16-ort-nodes.json", STARTED_NS))
    trace = trace_from_sqlite(GOLDEN / "h200-digits-fp16-ort-nodes.sqlite")
    part = select_measured_part(analysis_from_trace(add_node_ranges(trace, runs, ANCHORS, {})), LAYERS_RANGE)
    table = attribute_kernels(part)
    assert table["kernel_ns"].sum() == part.kernel_ns == 464_576  # all 165 kernels belong to a node
    op_of = {run.name: run.op for run in runs}
    strange = [
        (name, kernel)
        for name, kernel in table.select("layer", "kernel").rows()
        if not re.search(KERNELS_OF[op_of[name]], kernel)
    ]
    assert strange == []
    by_op = Counter(op_of[name] for name in table["layer"].unique())
    assert by_op == {"Conv": 15, "Relu": 13, "Add": 6, "Cast": 2, "Gemm": 1, "ReduceMean": 1, "Transpose": 1}


def test_nodes_out_of_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    events = [
        {"cat": "Session", "name": "model_run", "ts": 1, "dur": 90},
        {"cat": "Node", "name": "b_kernel_time", "ts": 20, "dur": 5, "args": {"op_name": "Relu"}},
        {"cat": "Node", "name": "c_kernel_time", "ts": 20, "dur": 0, "args": {"op_name": "Relu"}},  # in one microsecond
        {"cat": "Node", "name": "a_kernel_time", "ts": 10, "dur": 9, "args": {"op_name": "Conv"}},
        {"cat": "Node", "name": "a_fence_before", "ts": 9, "dur": 0, "args": {"op_name": "Conv"}},
    ]
    path.write_text(json.dumps(events))
    found = [(run.name, run.op, run.start_ns, run.end_ns) for run in read_node_runs(path, 7_000)]
    assert (found[0], sorted(found[1:])) == (
        ("a", "Conv", 17_000, 26_000),
        [("b", "Relu", 27_000, 32_000), ("c", "Relu", 27_000, 27_000)],
    )
    path.write_text('{"no": "list"}')
    with pytest.raises(StageError, match="not an ONNX Runtime profile"):
        list(read_node_runs(path, 0))
