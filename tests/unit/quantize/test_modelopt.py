"""ModelOpt's conversion of models whose names, outputs, or operators it would lose."""

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from tests.fakes.graphs import onnx_model
from tests.unit.backends.test_graph_names import odd_names
from tests.unit.quantize.test_qdq_forms import draw, quantize, run, snr_db
from tests.unit.quantize.test_qdq_names import PLAIN, X, residual

from optpipe.backends.graph_names import PlainNames
from optpipe.core.errors import StageError
from optpipe.core.precision import Precision
from optpipe.quantize.modelopt import convert_by_modelopt, round_rest_to_half

pytestmark = pytest.mark.slow  # ModelOpt's import takes seconds


def product(outputs, nodes=(), **constants):
    return onnx_model(
        [("MatMul", "x w", "y"), *nodes],
        {"x": ["n", 16]},
        outputs,
        opset=19,
        w=draw(16, 16),
        **constants,
    )


Y = {"y": ["n", 16]}
OUTPUTS = {
    "constant": product({"c": [3], **Y}, c=np.arange(3, dtype=np.float32)),
    "constant integer": product({**Y, "c": ("INT64", [3])}, c=np.arange(3)),
    "weight": product({**Y, "w": [16, 16]}),
    "bias that a node reads": product({"c": [16], **Y}, c=draw(16), nodes=[("Add", "y c", "z")]),
    "computed constant": product({**Y, "k": [16]}, c=draw(16), nodes=[("Exp", "c", "k")]),
    "passed through": product({"x": ["n", 16], **Y}),
    "passed through and constant": product(
        {"x": ["n", 16], **Y, "c": [3]}, c=np.ones(3, np.float32)
    ),
}


@pytest.mark.parametrize("target", ["tensorrt"])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_that_no_node_computes_stay(kind, target, tmp_path) -> None:
    model, feeds = OUTPUTS[kind], {"x": draw(4, 16, seed=3)}
    graph, _ = quantize(model, target, feeds)
    half = round_rest_to_half(graph, "net", tmp_path)
    onnx.checker.check_model(half, full_check=True)
    assert list(half.graph.output) == list(model.graph.output)
    for expected, found in zip(run(model, feeds), run(half, feeds), strict=True):
        assert expected.dtype == found.dtype
        assert snr_db(expected, found) > 35


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(names=st.lists(odd_names, min_size=8, max_size=8, unique=True))
def test_any_names_give_the_same_half_graph(names, tmp_path) -> None:
    names = [name.replace("\n", "") + f"{at}" * (not name) for at, name in enumerate(names)]
    if len({*names, "out", "scalar"}) < 10:
        return
    results = []
    for each in (PLAIN, names):
        graph, _ = quantize(residual(each), "tensorrt", {each[0]: X})
        half = round_rest_to_half(graph, "net", tmp_path)
        onnx.checker.check_model(half, full_check=True)
        results.append(run(half, {each[0]: X})[0])
    assert np.array_equal(*results)


def test_whatever_modelopt_raises_is_an_error_of_two_lines(tmp_path) -> None:
    model = onnx_model([("MatMul", "x w", "y")], {"x": ["n", 16]}, Y, w=draw(16, 16))
    model.graph.node.append(helper.make_node("NoSuchOperator", ["y"], ["z"], name="odd"))
    model.graph.output.append(helper.make_tensor_value_info("z", 1, None))
    model.graph.initializer.append(numpy_helper.from_array(draw(2), "unused"))
    with pytest.raises(StageError) as raised:
        round_rest_to_half(model, "net", tmp_path)
    assert str(raised.value).startswith("ModelOpt cannot convert net to int8: ")
    assert len(str(raised.value).splitlines()) == 2


def test_an_error_without_text_names_what_raised_it(tmp_path) -> None:
    def fail() -> None:
        raise AssertionError

    plain = PlainNames(product(Y))
    with pytest.raises(StageError, match="AssertionError in fail: raise AssertionError"):
        convert_by_modelopt(plain, "net", Precision.FP16, tmp_path, fail)


INNER = helper.make_graph(
    [helper.make_node("CenterCropPad", ["y", "size"], ["inner"], axes=[1])],
    "inner",
    [],
    [helper.make_tensor_value_info("inner", 1, None)],
    value_info=[helper.make_tensor_value_info("inner", 1, None)],
)


@pytest.mark.parametrize("inside", [False, True])
def test_notes_on_types_without_shapes_do_not_matter(inside, tmp_path) -> None:
    crop = helper.make_node("CenterCropPad", ["y", "size"], ["z"], "crop", axes=[1])
    branch = helper.make_node("If", ["yes"], ["z"], "crop", then_branch=INNER, else_branch=INNER)
    model = product(
        {"z": ["n", 8]}, nodes=[branch if inside else crop], size=[8], yes=np.array(True)
    )
    model.graph.value_info.append(helper.make_tensor_value_info("z", 1, None))
    model.graph.value_info.append(helper.make_tensor_value_info("y", 1, ["n", 16]))
    feeds = {"x": draw(4, 16, seed=3)}
    half = round_rest_to_half(model, "net", tmp_path)
    assert snr_db(run(model, feeds)[0], run(half, feeds)[0]) > 50
