"""ONNX graphs in torch: each operator gives onnx's own expected results, and what has no gradient is named."""

import numpy as np
import pytest
from tests.fakes.graphs import onnx_model
from tests.unit.quantize.test_recovery import WIDTH, make_convolutions, make_transformer, run

from optpipe.core import torch
from optpipe.quantize.recovery.torch_graph import TorchGraph
from optpipe.quantize.recovery.torch_operators import OPERATORS, UnknownOperatorError


def run_torch(model, feeds, tensors):
    held = {name: torch.from_numpy(np.array(value)) for name, value in feeds.items()}
    found = TorchGraph(model, "cpu").run(held, tensors)
    return {name: value.detach().numpy() for name, value in found.items()}


@pytest.mark.parametrize("make", [make_convolutions, make_transformer])
def test_all_tensors_are_those_of_the_runtime(make) -> None:
    random = np.random.default_rng(0)
    model = make(random)
    shape = (4, WIDTH, 6, 6) if make is make_convolutions else (4, 5, WIDTH)
    feeds = {"x": random.standard_normal(shape).astype(np.float32)}
    names = [node.output[0] for node in model.graph.node]
    expected, found = run(model, feeds, tuple(names)), run_torch(model, feeds, names)
    for name in names:
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_operators_give_the_results_of_onnx_itself() -> None:
    """The first output of all of onnx's cases whose operators are here, but for those that are refused."""
    from onnx.backend.test.case.node import collect_testcases

    types = {np.dtype(np.float32), np.dtype(np.int64), np.dtype(bool)}
    tried, seen = 0, set[str]()
    for case in collect_testcases(None):
        graph = case.model.graph
        operators = {node.op_type for node in graph.node}
        given, wanted = case.data_sets[0]
        if (
            not operators <= OPERATORS.keys()
            or not {np.asarray(each).dtype for each in given} <= types
        ):
            continue
        feeds = {each.name: value for each, value in zip(graph.input, given, strict=True)}
        output = graph.output[0].name
        try:
            found = run_torch(case.model, feeds, [output])[output]
        except UnknownOperatorError:
            continue
        assert found.shape == np.shape(wanted[0]), case.name
        np.testing.assert_allclose(found, wanted[0], rtol=1e-3, atol=1e-5, err_msg=case.name)
        tried, seen = tried + 1, seen | operators
    assert tried > 350
    assert len(seen) > 0.9 * len(OPERATORS)


def test_sizes_are_computed_and_pass_no_gradient() -> None:
    nodes = [
        ("Shape", "x", "s"),
        ("ReduceProd", "s", "p", {"keepdims": 0}),
        ("Cast", "p", "f", {"to": 1}),
        ("Div", "x f", "y"),
    ]
    model = onnx_model(nodes, {"x": ["n", 3]}, {"y": ["n", 3]}, opset=18)
    x = torch.ones(2, 3, requires_grad=True)
    found = TorchGraph(model, "cpu").run({"x": x}, ["y"])["y"]
    assert float(found.detach().sum()) == 1.0
    found.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), np.full((2, 3), 1 / 6))


def test_an_operator_without_gradient_is_named() -> None:
    nodes = [("Det", "x", "y")]
    model = onnx_model(nodes, {"x": [2, 2]}, {"y": []}, opset=18)
    plain = run_torch(model, {"x": np.eye(2, dtype=np.float32)}, ["y"])
    assert plain["y"] == 1
    with pytest.raises(UnknownOperatorError, match="Det"):
        TorchGraph(model, "cpu").run({"x": torch.eye(2, requires_grad=True)}, ["y"])


def test_a_call_of_a_function_is_refused_not_skipped() -> None:
    model = onnx_model([("Relu", "x", "y")], {"x": [2]}, {"y": [2]}, opset=18)
    model.graph.node[0].domain = "someone.else"
    with pytest.raises(UnknownOperatorError):
        TorchGraph(model, "cpu").run({"x": torch.ones(2)}, ["y"])
