"""Calls on tensors where they lie: what fitted once is not checked again, and everything else still is."""

import itertools
from math import prod
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from optpipe.api.calling import CallContract
from optpipe.backends.onnxruntime_calls import NO_GRAPH, make_run_options
from optpipe.backends.onnxruntime_session import OnnxRuntimeSession
from optpipe.backends.torch_session import TorchSession
from optpipe.core.card import InputSpec, ModelCard, Task, TensorSpec
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError

INPUT = InputSpec("x", "float32", (1, 3), (2, 3), (4, 3))


@pytest.fixture
def contract() -> CallContract:
    return CallContract(ModelCard("net", "torch:net", Task.OTHER, (INPUT,)))


def test_inputs_that_fit_pass_again(contract) -> None:
    for value in (torch.zeros(2, 3), torch.ones(2, 3), np.zeros((2, 3), np.float32)):
        given, device = contract.read((value,), {})
        assert given["x"] is value
        assert device == (value.device if torch.is_tensor(value) else None)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(5, 3),
        torch.zeros(2, 4),
        np.zeros((2, 3)),
        "text",
        [[0.0, 0.0, 0.0]],
        None,
    ],
)
def test_others_are_refused_after_inputs_that_fitted(contract, wrong) -> None:
    contract.read((torch.zeros(2, 3),), {})
    for _ in range(2):
        with pytest.raises(BadInputError):
            contract.read((wrong,), {})


def test_inputs_in_different_places_are_refused_each_time() -> None:
    two = (INPUT, InputSpec("y", "float32", (1, 3), (2, 3), (4, 3)))
    contract = CallContract(ModelCard("net", "torch:net", Task.OTHER, two))
    contract.read((torch.zeros(2, 3), torch.zeros(2, 3)), {})
    for other in (torch.zeros(2, 3, device="meta"), np.zeros((2, 3), np.float32)):
        with pytest.raises(BadInputError, match="different places"):
            contract.read((torch.zeros(2, 3), other), {})
    with pytest.raises(BadInputError, match="batch sizes"):
        contract.read((torch.zeros(2, 3), torch.zeros(1, 3)), {})


def test_many_shapes_do_not_fill_the_memory() -> None:
    wide = InputSpec("x", "float32", (1, 3), (2, 3), (999, 3))
    contract = CallContract(ModelCard("net", "torch:net", Task.OTHER, (wide,)))
    for size in range(1, 300):
        contract.read((torch.zeros(size, 3),), {})
    assert len(contract._fitting) <= 64


@pytest.fixture
def session():
    shape = ["batch", 3]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"]), helper.make_node("Neg", ["x"], ["z"])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "yz"],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.checker.check_model(model)
    with OnnxRuntimeSession(model.SerializeToString(), "cpu", {}) as opened:
        yield opened


def test_onnx_runtime_takes_tensors_of_any_layout_and_changing_shapes(session) -> None:
    kept = []
    for value in (
        torch.randn(2, 3),
        torch.randn(3, 4).T,
        torch.randn(2, 6)[:, ::2],
        torch.randn(2, 3),
    ):
        outputs = session.run_on({"x": value})
        kept.append((value, outputs))
    for value, outputs in kept:  # no later call wrote into the outputs of an earlier one
        assert torch.equal(outputs["y"], value * 2)
        assert torch.equal(outputs["z"], -value)


def test_bindings_of_addresses_that_come_back_give_the_answers_of_this_call(
    session, monkeypatch
) -> None:
    torch.manual_seed(0)
    memory = itertools.cycle([torch.empty(100) for _ in range(4)])
    monkeypatch.setattr(torch, "empty", lambda shape, **_: next(memory)[: prod(shape)].view(shape))
    bound = set()
    for number in range(40):
        value = torch.randn(1 + number % 3, 3)
        outputs = session.run_on({"x": value})
        bound.add(tuple(each.data_ptr() for each in outputs.values()))
        assert torch.equal(outputs["y"], value * 2)
        assert torch.equal(outputs["z"], -value)
    assert len(bound) == 2


def test_more_bindings_than_are_kept_give_the_answers_of_this_call(session) -> None:
    torch.manual_seed(0)
    kept = [session.run_on({"x": torch.full((1, 3), float(number))}) for number in range(40)]
    for number, outputs in enumerate(kept):
        assert torch.equal(outputs["z"], torch.full((1, 3), -float(number)))


def test_compiled_code_gets_contiguous_tensors_and_gives_ordinary_ones() -> None:
    strides = []

    def program(x: torch.Tensor) -> torch.Tensor:
        strides.append(x.is_contiguous())
        return x * 2

    tensor = TensorSpec("x", "float32", ("batch", 3))
    info = _record_build(tensor, TensorSpec("y", "float32", ("batch", 3)))
    with TorchSession(program, info, {}) as opened:
        output = opened.run_on({"x": torch.ones(3, 4).T})["y"]
    assert strides == [True]
    output += 1  # refused for a tensor of inference mode
    assert torch.equal(output, torch.full((4, 3), 3.0))


def _record_build(given: TensorSpec, made: TensorSpec) -> ArtifactInfo:
    from dataclasses import MISSING, fields

    from optpipe.core.precision import Precision

    known: dict[str, Any] = {
        "device": "cpu",
        "precision": Precision.FP32,
        "details": {"inputs": [given.to_dict()], "outputs": [made.to_dict()]},
    }
    required = [
        each.name
        for each in fields(ArtifactInfo)
        if each.default is MISSING and each.default_factory is MISSING
    ]
    return ArtifactInfo(**{**dict.fromkeys(required, ""), **known})


@pytest.mark.parametrize("named", [False, True])
def test_names_and_positions_in_any_order_are_the_same_call(named) -> None:
    two = (INPUT, InputSpec("y", "float32", (1, 3), (2, 3), (4, 3)))
    contract = CallContract(ModelCard("net", "torch:net", Task.OTHER, two))
    x, y = torch.zeros(2, 3), torch.ones(2, 3)
    calls = [((x, y), {}), ((x,), {"y": y}), ((), {"y": y, "x": x}), (({"y": y, "x": x},), {})]
    for inputs, names in calls[named:]:
        given, _ = contract.read(inputs, names)
        assert list(given) == ["x", "y"]
        assert given["x"] is x
        assert given["y"] is y
    for wrong in ((x,), (x, y, x)):
        with pytest.raises(BadInputError):
            contract.read(wrong, {})
    with pytest.raises(BadInputError, match="given twice"):
        contract.read((x, y), {"x": x})


def test_each_run_names_its_graph_so_that_no_launch_raises_inside() -> None:
    for waits in (True, False):
        options = make_run_options(NO_GRAPH, waits=waits)
        assert options.get_run_config_entry("gpu_graph_id") == "-1"


def test_a_prepared_call_reads_its_inputs_where_they_lie_and_keeps_its_outputs(session) -> None:
    value = torch.ones(2, 3)
    call = session.prepare({"x": value})
    first = call()
    assert torch.equal(first["y"], torch.full((2, 3), 2.0))
    value.fill_(3.0)
    other = session.run_on({"x": torch.zeros(4, 3)})  # a call between does not take its memory
    again = call()
    assert torch.equal(again["z"], torch.full((2, 3), -3.0))
    assert first["y"].data_ptr() == again["y"].data_ptr()
    assert torch.equal(other["y"], torch.zeros(4, 3))


def test_a_prepared_program_gives_ordinary_tensors() -> None:
    tensor = TensorSpec("x", "float32", ("batch", 3))
    info = _record_build(tensor, TensorSpec("y", "float32", ("batch", 3)))
    value = torch.ones(4, 3)
    with TorchSession(lambda x: x * 2, info, {}) as opened:
        call = opened.prepare({"x": value})
        assert torch.equal(call()["y"], torch.full((4, 3), 2.0))
        value.zero_()
        assert not call()["y"].any()
