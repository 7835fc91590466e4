"""An ONNX graph as a function of torch tensors, which can be differentiated with respect to its constants."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from optpipe.backends.onnx_graph import list_read_names
from optpipe.core import onnx, torch
from optpipe.quantize.recovery.torch_operators import (
    OPERATORS,
    UnknownOperatorError,
    call_from_node,
)

STANDARD = ("", "ai.onnx")
WITHOUT_GRADIENT = frozenset(
    [
        "ArgMax",
        "ArgMin",
        "Ceil",
        "Equal",
        "Floor",
        "Greater",
        "GreaterOrEqual",
        "IsInf",
        "IsNaN",
        "Less",
        "LessOrEqual",
        "NonZero",
        "Not",
        "Round",
        "Shape",
        "Sign",
        "Size",
    ]
)
"""Operators whose results are sizes, indices, truths, or whole numbers, and change in steps with their data."""

Read = Callable[[Any, int, Any], Any]
"""Gives the value that a node reads at an input, from the node, the position, and the value as the graph has it."""


def read_as_is(_node: Any, _position: int, value: Any) -> Any:
    return value


class TorchGraph:
    """Runs a graph node by node; tensors that nothing reads any more are let go.

    >>> graph = TorchGraph(onnx.load("net.onnx"), "cpu")
    >>> graph.run({"x": torch.zeros(1, 3)}, ["y"])["y"]
    """

    def __init__(self, model: Any, device: str) -> None:
        self._nodes = list(model.graph.node)
        self._opset = next(
            (opset.version for opset in model.opset_import if opset.domain in STANDARD), 1
        )
        self._device = device
        self._calls = [call_from_node(node, self._opset) for node in self._nodes]
        self._evaluators: dict[int, Any] = {}
        self._last = {
            name: at for at, node in enumerate(self._nodes) for name in list_read_names(node)
        }
        self.constants: dict[str, Any] = {
            tensor.name: torch.from_numpy(np.array(onnx.numpy_helper.to_array(tensor))).to(device)
            for tensor in model.graph.initializer
        }

    def run(
        self, inputs: Mapping[str, Any], outputs: Collection[str], read: Read = read_as_is
    ) -> dict[str, Any]:
        """The tensors `outputs`. Raises UnknownOperatorError for a node that cannot be computed, or has no gradient here."""
        values: dict[str, Any] = {**self.constants, **inputs}
        computed = {name: values[name] for name in outputs if name in values}
        for at, node in enumerate(self._nodes):
            given = [
                read(node, position, values[name]) if name else None
                for position, name in enumerate(node.input)
            ]
            results = self._compute(at, given)
            for name, value in zip(node.output, results, strict=False):
                values[name] = value
                if name in outputs:
                    computed[name] = value
            for name in {*node.input, *node.output}:
                if self._last.get(name, -1) <= at:
                    values.pop(name, None)
            if len(computed) == len({*outputs}):
                break
        if missing := sorted({*outputs} - computed.keys()):
            raise UnknownOperatorError(f"no operator here computes '{missing[0]}'")
        return computed

    def _compute(self, at: int, given: list[Any]) -> tuple[Any, ...]:
        node, call = self._nodes[at], self._calls[at]
        if node.domain in STANDARD and (operator := OPERATORS.get(node.op_type)) is not None:
            try:
                made = operator(call, *given)
            except (RuntimeError, TypeError, IndexError, ValueError) as error:
                raise UnknownOperatorError(f"{node.op_type} '{node.name}': {error}") from error
            return made if isinstance(made, tuple) else (made,)
        passes = node.op_type not in WITHOUT_GRADIENT
        if passes and any(tensor is not None and tensor.requires_grad for tensor in given):
            raise UnknownOperatorError(f"{node.op_type} '{node.name}' has no gradient here")
        return self._evaluate(at, given)

    def _evaluate(self, at: int, given: list[Any]) -> tuple[Any, ...]:
        """A node of sizes, indices, or masks, by onnx's reference implementation."""
        node = self._nodes[at]
        if at not in self._evaluators:
            self._evaluators[at] = _open_evaluator(node, self._opset)
        feeds = {
            name: value.detach().cpu().numpy()
            for name, value in zip(node.input, given, strict=True)
            if name and value is not None
        }
        try:
            made = self._evaluators[at].run(None, feeds)
        except Exception as error:
            raise UnknownOperatorError(f"{node.op_type} '{node.name}': {error}") from error
        return tuple(torch.from_numpy(np.array(array)).to(self._device) for array in made)


def _open_evaluator(node: Any, opset: int) -> Any:
    from onnx.reference import ReferenceEvaluator

    undefined = onnx.TypeProto()
    inputs = [
        onnx.helper.make_value_info(name, undefined) for name in dict.fromkeys(node.input) if name
    ]
    outputs = [onnx.helper.make_value_info(name, undefined) for name in node.output if name]
    graph = onnx.helper.make_graph([node], "node", inputs, outputs)
    imports = [onnx.helper.make_opsetid(node.domain, opset)]
    try:
        return ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=imports))
    except Exception as error:
        raise UnknownOperatorError(f"{node.op_type} '{node.name}'") from error
