"""What the steps read and write of an FP32 graph: weights and biases of layers, and the values of tensors on samples."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.base import Device
from optpipe.backends.graph_names import NameGiver
from optpipe.backends.onnx_graph import OnnxGraph, expose_tensors, replace_nodes
from optpipe.backends.onnx_products import read_attributes
from optpipe.core import onnx
from optpipe.core.card import ModelCard
from optpipe.core.entries import ModelInfo
from optpipe.models.inputs.sample_set import SampleSet
from optpipe.models.inputs.task_data import fit_batch_size, iterate_input_batches
from optpipe.quantize.qdq import find_weight
from optpipe.quantize.ranges import open_model_session
from optpipe.workspace.entry import Entry

BATCH = 8


class Bias(NamedTuple):
    """Where a layer's constant bias is: an input of the layer, or of the addition behind a MatMul."""

    node: Any
    position: int
    values: NDArray[np.float32] | None
    """(channels,); None for a layer without one, which may get one at `position`."""


class EditedGraph:
    """A copy of a graph whose constants are changed for one node at a time: others may read the same ones."""

    def __init__(self, model: Any) -> None:
        self.model = onnx.ModelProto()
        self.model.CopyFrom(model)
        self.graph = OnnxGraph(self.model)
        self.nodes = {node.name: node for node in self.model.graph.node}
        self._names, self._new = NameGiver(self.model), list[Any]()
        self._own: dict[str, NDArray[Any]] = {}

    def read(self, name: str) -> NDArray[Any] | None:
        """The values of a constant, (as the graph has them after all changes so far)."""
        if name in self._own:
            return self._own[name]
        held = self.graph.weights.get(name)
        return None if held is None else np.asarray(onnx.numpy_helper.to_array(held))

    def read_weight(self, node: Any) -> NDArray[np.float32] | None:
        """A layer's FP32 weight as the layer reads it; None if it is no such constant."""
        name = node.input[1]
        if name in self._own:
            return self._own[name]
        weight = find_weight(name, self.graph)
        if weight is None or weight.tensor.data_type != onnx.TensorProto.FLOAT:
            return None
        return weight.read()

    def write(self, node: Any, position: int, values: NDArray[Any]) -> None:
        """Lets `node` read `values`, in FP32, at an input."""
        name = self._names.give(f"{node.name}_recovered")
        self._own[name] = np.ascontiguousarray(values, np.float32)
        self._new.append(onnx.numpy_helper.from_array(self._own[name], name))
        while len(node.input) <= position:
            node.input.append("")
        node.input[position] = name

    def find_bias(self, node: Any) -> Bias | None:
        """None for a layer whose bias is computed, or that cannot have one."""
        if node.op_type == "MatMul":
            readers = self.graph.consumers.get(node.output[0], [])
            if (
                len(readers) != 1
                or readers[0].op_type != "Add"
                or node.output[0] in self.graph.outputs
            ):
                return None
            position = 1 if readers[0].input[0] == node.output[0] else 0
            values = self.read(readers[0].input[position])
            if values is None or values.dtype != np.float32 or values.size != values.shape[-1:][0]:
                return None
            return Bias(readers[0], position, values.reshape(-1))
        attributes = read_attributes(node)
        if node.op_type == "Gemm" and (
            attributes.get("beta", 1.0) != 1.0 or attributes.get("alpha", 1.0) != 1.0
        ):
            return None
        if len(node.input) < 3 or not node.input[2]:
            return Bias(node, 2, None)
        values = self.read(node.input[2])
        if values is None or values.dtype != np.float32 or values.size != values.shape[-1:][0]:
            return None
        return Bias(node, 2, values.reshape(-1))

    def finish(self) -> Any:
        replace_nodes(self.model.graph, list(self.model.graph.node), self._new)
        return self.model


def find_output_axis(node: Any) -> int:
    """The axis of the output channels in a layer's weight, in the order in which the layer reads it."""
    transposed = node.op_type == "Gemm" and bool(read_attributes(node).get("transB", 0))
    return 0 if node.op_type == "Conv" or transposed else 1


def find_channel_axis(node: Any) -> int:
    """The axis of the channels in a layer's data and result."""
    return 1 if node.op_type in ("Conv", "ConvTranspose") else -1


def iterate_tensors(
    model: Entry[ModelInfo],
    card: ModelCard,
    graph: Any,
    samples: SampleSet,
    tensors: Sequence[str],
    device: Device,
) -> Iterator[Mapping[str, NDArray[Any]]]:
    """The values of tensors of `graph`, an altered graph of `model`, on each batch of samples."""
    fed = {value.name for value in graph.graph.input}
    copy = onnx.ModelProto()
    copy.CopyFrom(graph)
    session = open_model_session(expose_tensors(copy, tensors), device)
    wanted = [name for name in dict.fromkeys(tensors) if name not in fed]
    smallest, _, size = card.batch_range
    if smallest < size:
        size = fit_batch_size(card, BATCH)
    for batch, count in iterate_input_batches(model, card, samples, size):
        values = dict(zip(wanted, session.run(wanted, dict(batch)), strict=True))
        for name in fed & {*tensors}:
            values[name] = batch[name]
        yield {name: _drop_fill(value, batch, count, card) for name, value in values.items()}


def _drop_fill(
    value: NDArray[Any], batch: Mapping[str, NDArray[Any]], count: int, card: ModelCard
) -> NDArray[Any]:
    """Without the rows that fill a batch up, if the tensor's first axis is the batch."""
    first = card.inputs[0]
    size = batch[first.name].shape[first.batch] if first.batch is not None else 0
    return value[:count] if value.ndim and value.shape[0] == size and count < size else value
