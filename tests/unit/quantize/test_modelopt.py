"""ModelOpt's conversion of models whose names, outputs, or operators it would lose."""

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tests.fakes.graphs import onnx_model
from tests.unit.backends.test_graph_names import odd_names
from tests.unit.quantize.test_qdq_forms import draw, quantize, run, snr_db
from tests.unit.quantize.test_qdq_names import PLAIN, X, residual

from optpipe.backends.graph_names import PlainNames
from optpipe.core.errors import StageError
from optpipe.core.precision import Precision
from optpipe.quantize.modelopt import convert_by_modelopt, round_rest_to_half, state_constant_types

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


@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_a_bag_of_embeddings_is_refused_in_two_lines(mode, tmp_path) -> None:
    """torch's exporter writes a loop over a sequence, which ModelOpt does not convert; FP32 and ONNX Runtime take it."""
    import torch

    from optpipe.core.card import InputSpec, ModelCard, Task
    from optpipe.models.export.onnx_export import onnx_from_torch

    class Bag(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = torch.nn.EmbeddingBag(50, 16, mode=mode), torch.nn.Linear(16, 16)

        def forward(self, ids):
            return self.head(self.bag(ids)), torch.arange(3.0)

    ids = InputSpec("ids", "int64", *((n, 6) for n in (1, 4, 8)))
    card = ModelCard("bag", "bag.py:make", Task.OTHER, (ids,))
    torch.manual_seed(0)
    model = onnx_from_torch(Bag().eval(), card, tmp_path / "bag.onnx").graph
    feeds = {"ids": np.random.default_rng(0).integers(0, 50, (4, 6))}
    graph, placed = quantize(model, "tensorrt", feeds)
    assert placed.layers
    expected, found = run(model, feeds), run(quantize(model, "cpu", feeds)[0], feeds)
    assert snr_db(expected[0], found[0]) > 30
    assert np.array_equal(expected[1], found[1])
    with pytest.raises(StageError, match="ModelOpt cannot convert bag to int8") as raised:
        round_rest_to_half(graph, "bag", tmp_path)
    assert len(str(raised.value).splitlines()) == 2


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


CONSTANTS: dict[str, dict[str, Any]] = {
    "one number": {"value_float": 2.5},
    "numbers": {"value_floats": [2.5, -1.0]},
    "one integer": {"value_int": 2**40},
    "integers": {"value_ints": [3, -4]},
    "a tensor": {"value": numpy_helper.from_array(np.array([1.5], np.float16))},
}


@pytest.mark.parametrize("case", CONSTANTS)
@pytest.mark.parametrize("inside", [False, True])
def test_constants_keep_their_values_as_tensors(case, inside) -> None:
    node = helper.make_node("Constant", [], ["c"], "c", **CONSTANTS[case])
    zeros = helper.make_node("ConstantOfShape", ["two"], ["z"], "z")
    kind = 1 if "float" in str(list(CONSTANTS[case])) else 10 if case == "a tensor" else 7
    outputs = [helper.make_tensor_value_info("c", kind, None)]
    outputs.append(helper.make_tensor_value_info("z", 1, None))
    two = numpy_helper.from_array(np.array([2]), "two")
    graph = helper.make_graph([node, zeros], "g", [], outputs, [two])
    if inside:
        yes = numpy_helper.from_array(np.array(True), "yes")
        branch = helper.make_node("If", ["yes"], ["c", "z"], then_branch=graph, else_branch=graph)
        graph = helper.make_graph([branch], "g", [], outputs, [yes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)

    expected = ReferenceEvaluator(model).run(None, {})
    state_constant_types(model)
    for one, two in zip(expected, ReferenceEvaluator(model).run(None, {}), strict=True):
        assert np.asarray(one).dtype == np.asarray(two).dtype
        np.testing.assert_array_equal(one, two)
    nodes = model.graph.node[0].attribute[0].g.node if inside else model.graph.node
    assert [each.attribute[0].name for each in nodes] == ["value", "value"]
