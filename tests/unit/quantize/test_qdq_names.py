"""Q/DQ graphs of models whose names are those that optpipe would give, or that no exporter writes."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from tests.tiers import leave_to_slow_tier
from tests.unit.backends.test_graph_names import odd_names
from tests.unit.quantize.test_qdq_forms import draw, quantize, run, snr_db

from optpipe.backends.graph_names import collect_names, rename_values
from optpipe.backends.onnx_graph import name_nodes
from optpipe.backends.onnx_products import GraphTypes
from optpipe.backends.onnxruntime import separate_biases
from optpipe.quantize.precision_graph import round_nodes


def residual(names):
    """Two convolutions with biases, a Relu, an addition and a scalar; its values and nodes have `names`."""
    x, w, v, b, r, s, y, z = names
    nodes = [
        helper.make_node("Conv", [x, w, b], [s], name=b),
        helper.make_node("Relu", [s], [r], name=w),
        helper.make_node("Conv", [r, v, b], [y], name=x),
        helper.make_node("Mul", [y, "scalar"], [z], name=f"{z}_bias"),
        helper.make_node("Add", [z, x], ["out"], name="add"),
    ]
    constants = {w: draw(16, 16, 1, 1) / 4, v: draw(16, 16, 1, 1, seed=1) / 4, b: draw(16, seed=2)}
    constants["scalar"] = np.array(1.5, np.float32)
    shape = [None, 16, 4, 4]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(x, 1, shape)],
        [helper.make_tensor_value_info("out", 1, shape)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


X = draw(2, 16, 4, 4, seed=5)
PLAIN = ["x", "w", "v", "b", "r", "s", "y", "z"]
TAKEN = [
    f"{name}_{end}"
    for name in PLAIN[:6]
    for end in ("scale", "zero_point", "q", "dq", "QuantizeLinear", "DequantizeLinear", "2d")
] + [
    "x_bias",
    "b_bias",
    "x_bias_dq",
    "b_bias_q",
    "axes",
    "w_q0",
    "w_dq0",
    "w_scale0",
    "x_half",
    "s_exact",
    "y_without_bias",
    "b_over_4d",
]


@pytest.mark.parametrize("target", ["tensorrt", "cpu"])
@pytest.mark.parametrize("kind", ["scalar", "result", "weight"])
@pytest.mark.parametrize("name", leave_to_slow_tier(TAKEN, but=TAKEN[::8]))
def test_a_name_that_a_pair_would_have_belongs_to_the_model(target, kind, name) -> None:
    """A constant `r1_scale` beside a tensor `r1` was replaced by the scale of `r1`."""
    model = residual(PLAIN)
    expected = run(quantize(model, target, {"x": X})[0], {"x": X})[0]
    old = {"scalar": "scalar", "result": "z", "weight": "v"}[kind]
    rename_values(model.graph, lambda each: name if each == old else each)
    graph, _ = quantize(model, target, {"x": X})
    assert np.array_equal(run(graph, {"x": X})[0], expected)


@pytest.mark.slow
@settings(max_examples=130, deadline=None)
@given(
    st.lists(odd_names, min_size=8, max_size=8, unique=True), st.sampled_from(["tensorrt", "cpu"])
)
def test_any_names_give_the_same_integers(names, target) -> None:
    names = [name.replace("\n", "") + f"{at}" * (not name) for at, name in enumerate(names)]
    if len({*names, "out", "scalar"}) < 10:
        return
    expected = run(quantize(residual(PLAIN), target, {"x": X})[0], {"x": X})[0]
    graph, placed = quantize(residual(names), target, {names[0]: X})
    assert len(placed.layers) == 2
    assert np.array_equal(run(graph, {names[0]: X})[0], expected)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(odd_names, min_size=8, max_size=8, unique=True))
def test_any_names_give_the_same_rounded_and_separated_graphs(names) -> None:
    names = [name.replace("\n", "") for name in names]
    if len({*names, "out", "scalar"}) < 10:
        return
    found = []
    for each in (PLAIN, names):
        model = name_nodes(residual(each))
        known = GraphTypes(dict.fromkeys(collect_names(model), "fp32"), {})
        rounded = round_nodes(model, [node.name for node in model.graph.node], known)
        onnx.checker.check_model(rounded)
        found.append(run(rounded, {each[0]: X})[0])
    assert np.array_equal(*found)


def test_separated_biases_take_free_names() -> None:
    model = residual(["x", "w", "v", "b", "b_over_4d", "s_without_bias", "y", "b_bias"])
    for each in model.graph.initializer:
        each.CopyFrom(
            numpy_helper.from_array(numpy_helper.to_array(each).astype(np.float16), each.name)
        )
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    expected = run(model, {"x": X.astype(np.float16)})[0]
    assert separate_biases(model) == 2
    onnx.checker.check_model(model, full_check=True)
    assert snr_db(expected, run(model, {"x": X.astype(np.float16)})[0]) > 50
    nodes = [node.name for node in model.graph.node]
    assert len({*nodes}) == len(nodes)
