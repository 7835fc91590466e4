"""Graphs in FP16: whole ones, and single nodes rounded."""

import copy

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tests.fakes.graphs import onnx_model

from optpipe.backends.graph_names import PlainNames
from optpipe.backends.onnx_layers import infer_graph_types
from optpipe.backends.onnx_mends import drop_unknown_sizes
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.errors import StageError
from optpipe.core.precision import Precision
from optpipe.quantize.modelopt import translate_errors
from optpipe.quantize.precision_graph import (
    _find_wide_tensors,
    find_half_nodes,
    round_nodes,
    write_half_graph,
)
from optpipe.workspace.file_names import MODELOPT_LOG


def test_a_conversion_that_fails_names_its_reason_and_a_way_out(tmp_path) -> None:
    plain = PlainNames(onnx_model([("Relu", "odd", "y")], {"odd": [2]}, {"y": [2]}))
    hidden = plain.hide("v", "odd")
    (tmp_path / MODELOPT_LOG).write_text(
        f"[modelopt] - ERROR - Graph must be in SSA form: {hidden}\n"
    )
    said = r"net to fp16: Graph must be in SSA form: odd\nleave fp16 out of --precision"
    with (
        pytest.raises(StageError, match=said),
        translate_errors("net", Precision.FP16, tmp_path, plain),
    ):
        raise RuntimeError("1")


CLASS_TOKEN = """
<ir_version: 9, opset_import: ["": 19]>
net (float[batch, 4, 2] x) => (float[batch, 5, 2] y)
<int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] end = {99}, float[1, 1, 2] token = {5.0, 6.0}> {
    count = Shape<end = 1>(x)
    size = Concat<axis = 0>(count, one, two)
    tokens = Expand(token, size)
    all = Concat<axis = 1>(tokens, x)
    head = Slice(all, zero, one, one)
    gated = Relu(head)
    rest = Slice(all, one, end, one)
    turned = Neg(rest)
    joined = Concat<axis = 1>(gated, turned)
    y = Abs(joined)
}
"""
"""Sizes that follow from a tensor's values, as a class token's do: plain shape inference does not know them."""


@pytest.mark.slow
def test_sizes_that_cannot_be_inferred_do_not_share_memory() -> None:
    from modelopt.onnx.autocast import convert_to_f16

    graph = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(CLASS_TOKEN), data_prop=True)
    half = drop_unknown_sizes(convert_to_f16(graph, keep_io_types=True))
    x = np.arange(16, dtype=np.float32).reshape(2, 4, 2)
    np.testing.assert_array_equal(
        run(half, x), np.concatenate([np.full((2, 1, 2), [5, 6]), x], axis=1)
    )


INPUTS = (InputSpec("x", "float32", (1, 4), (3, 4), (8, 4)),)


def chain(*nodes, **constants):
    weights = {name: np.float32(value) for name, value in constants.items()}
    return onnx_model(nodes, {"x": ["n", 4]}, {nodes[-1][2]: None}, **weights)


def run(model, values):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: values})[0]


def half(value):
    with np.errstate(over="ignore"):
        return value.astype(np.float16).astype(np.float32)


values = arrays.arrays(np.float32, (3, 4), elements=st.floats(-7e4, 7e4, width=32))


@given(values, st.floats(-7e4, 7e4, width=32))
def test_a_rounded_node_computes_what_numpy_does_in_fp16_with_one_rounding(rows, constant) -> None:
    model = chain(("Add", "x c", "y"), c=constant)
    rounded = round_nodes(model, {"y"}, infer_graph_types(model, INPUTS))
    with np.errstate(invalid="ignore", over="ignore"):
        expected = half(half(rows) + half(np.float32(constant)))
    np.testing.assert_array_equal(run(rounded, rows), expected)


@given(values)
def test_what_is_not_named_stays_fp32(rows) -> None:
    model = chain(("Mul", "x c", "a"), ("Div", "a c", "y"), c=1e6)
    known = infer_graph_types(model, INPUTS)
    np.testing.assert_array_equal(run(round_nodes(model, (), known), rows), run(model, rows))


def test_values_beyond_fp16_overflow_where_they_are_rounded_and_only_there() -> None:
    model = chain(("Mul", "x c", "a"), ("Div", "a c", "y"), c=1e4)
    known, rows = infer_graph_types(model, INPUTS), np.full((3, 4), 9, np.float32)
    assert np.isinf(run(round_nodes(model, {"a"}, known), rows)).all()
    assert np.isinf(run(round_nodes(model, {"y"}, known), rows)).all()  # it reads what does not fit
    assert (run(model, rows) == 9).all()


SPEC = InputSpec("x", "float32", (1, 16, 8, 8), (4, 16, 8, 8), (16, 16, 8, 8))


def test_every_node_of_a_network(residual_model) -> None:
    rows = np.random.default_rng(0).standard_normal((4, 16, 8, 8)).astype(np.float32)
    names = {node.name for node in residual_model.graph.node}
    rounded = round_nodes(residual_model, names, infer_graph_types(residual_model, (SPEC,)))
    onnx.checker.check_model(rounded, full_check=True)
    wanted, found = run(residual_model, rows), run(rounded, rows)
    assert 0 < np.abs(found - wanted).max() < 0.01 * np.abs(wanted).max()


@pytest.mark.parametrize("kept", [0, 1])
def test_a_converted_graph_tells_its_fp16_nodes(residual_model, kept) -> None:
    from onnxconverter_common import float16  # type: ignore[import-untyped]

    names = [node.name for node in residual_model.graph.node]
    converted = float16.convert_float_to_float16(
        copy.deepcopy(residual_model), keep_io_types=True, node_block_list=names[:kept]
    )
    assert find_half_nodes(converted, (SPEC,)) == {*names[kept:]}


@given(
    arrays.arrays(np.float32, (3, 4), elements=st.floats(width=32)),
    st.sampled_from([11, 13, 17, 18, 22]),
)
def test_wide_tensors_hold_nan_or_a_value_near_the_largest_of_fp16(rows, opset) -> None:
    nodes = [
        ("Neg", "x", "y"),
        ("Reshape", "y all", "f"),
        ("Gather", "f i", "s"),
        ("Gather", "f no", "e"),
    ]
    model = onnx_model(
        nodes,
        {"x": ["n", 4]},
        dict.fromkeys("yse"),
        opset=opset,
        all=[-1],
        i=0,
        no=np.zeros(0, int),
    )
    wide = ~(np.abs(rows) <= 65504 / 8)  # NaN too
    found = _find_wide_tensors(model, ModelCard("net", "net.onnx", Task.OTHER, INPUTS), {"x": rows})
    assert found == {*("xyf" if wide.any() else ""), *("s" if wide[0, 0] else "")}


LOOP = """
<ir_version: 9, opset_import: ["": 19]>
net (float[1, 4] x) => (float[1, 4] y, float[times, 1, 4] all)
<int64 three = {3}, float[4, 4] w = {1, 0, 2, 0, 0, 1, 0, 3, 4, 0, 1, 0, 0, 5, 0, 1}> {
    start = MatMul(x, w)
    [loop] y, all = Loop(three, , start) <body = body (int64 at, bool go, float[1, 4] v)
        => (bool on, float[1, 4] next, float[1, 4] seen) {
        on = Identity(go)
        step = Constant<value = float[4] {1.0, 2.0, 3.0, 4.0}>()
        next = Add(v, STEP)
        seen = Identity(next)
    }>
}
"""


def convert_to_half(model, folder):
    spec = InputSpec("x", "float32", (1, 4), (1, 4), (1, 4))
    card = ModelCard("net", "net.onnx", Task.OTHER, (spec,))
    rows = {"x": np.array([[1, 2, 3, 4]], np.float32)}
    reasons = write_half_graph(Precision.FP16, model, card, rows, folder)
    return onnx.load(folder / "model.onnx"), reasons, rows


@pytest.mark.slow
@pytest.mark.parametrize("step", ["step", "x"])
def test_a_converted_loop_is_valid_or_refused(tmp_path, step) -> None:
    """ModelOpt 0.47 makes a loop's state FP16 and what is added to it not, which no runtime loads."""
    model = onnx.parser.parse_model(LOOP.replace("STEP", step))
    refusal = ""
    try:
        half, reasons, feeds = convert_to_half(model, tmp_path)
    except StageError as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith("ModelOpt converts net to fp16 wrongly: ")
        assert len(refusal.splitlines()) == 2
        return
    onnx.checker.check_model(half, full_check=True)
    assert reasons == {"loop": "ModelOpt cannot convert the graph inside it"}
    np.testing.assert_allclose(run(half, feeds["x"]), run(model, feeds["x"]), rtol=1e-3)
