"""An ONNX graph whose intermediate tensors can be read, set, and saved with a script that runs their part alone."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe.backends.base import MarkedNetwork, Run
from optpipe.backends.graph_names import NameGiver, iterate_graphs
from optpipe.core import np, onnx
from optpipe.core.card import InputSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray
from optpipe.backends.onnx_graph import NO_ARITHMETIC, OnnxGraph, expose_tensors, list_read_names
from optpipe.backends.onnx_layers import infer_graph_types
from optpipe.backends.onnx_products import GraphTypes

_FLOATS = {"fp32": "float32", "fp16": "float16"}


class _Place(NamedTuple):
    """The tensor that holds a value, with its type; an integer is value / scale + zero."""

    tensor: str
    dtype: str = "float32"
    scale: float = 1.0
    zero: int = 0


REPRODUCER = """# {tensor}: by ONNX Runtime without optimizations, and compiled.

from pathlib import Path

import numpy as np
import onnxruntime as ort

graph, held = str(Path(__file__).with_name("subgraph.onnx")), np.load(Path(__file__).with_name("inputs.npz"))
options = ort.SessionOptions()
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
inputs = dict(zip([each.name for each in session.get_inputs()], held.values()))
expected = session.run(None, inputs)[0].astype("f8") - {zero}
{reproduce}
difference = found.astype("f8") - {zero} - expected
print(version, f"SNR {{10 * np.log10(np.square(expected).sum() / np.square(difference).sum()):.1f}} dB",
      f"largest difference {{np.abs(difference).max():.3g}}")
"""


class MarkedGraph(MarkedNetwork):
    """A `MarkedNetwork` of the graph `model`, which a runtime optimized from `written`.

    `open_graph` returns the function that runs a graph, for example inputs; `reproduce` does the same in a `REPRODUCER`. A tensor
    that is only read in INT8 is read through its Q/DQ pair in `written`.
    """

    def __init__(
        self,
        model: Any,
        written: Any,
        inputs: Iterable[InputSpec],
        open_graph: Callable[[Any, Any], Run],
        reproduce: str = "",
    ) -> None:
        self._model = model
        self._open = open_graph
        self._reproduce = reproduce
        inputs = tuple(inputs)
        known = infer_graph_types(written, inputs)
        produced = OnnxGraph(model).producers.keys()
        self._places: dict[str, _Place] = {}
        self.layers = {}
        self.ranges = {}
        self._place_tensors(written, {spec.name for spec in inputs}, known, produced)
        self.layers = {
            name: op for name, op in self.layers.items() if self._places[name].tensor in produced
        }
        self.sizes = {name: math.prod(known.shapes.get(name, (0,))) for name in self.layers}
        inner = sum(len(graph.node) for graph in iterate_graphs(model.graph)) - len(
            model.graph.node
        )
        self.hidden = f"{inner} operators inside If, Loop or Scan" if inner else ""
        self.outputs = tuple(value.name for value in model.graph.output)

    def _place_tensors(
        self, written: Any, fed: set[str], known: GraphTypes, produced: Collection[str]
    ) -> None:
        """Finds the layers behind the inputs `fed`, where the tensor of each is held, and the ranges of quantized tensors."""
        stored = OnnxGraph(written).weights
        wide = {
            name
            for node in written.graph.node
            if node.op_type != "QuantizeLinear"
            for name in node.input
        }
        for node in written.graph.node:
            if not fed & list_read_names(node):
                continue
            fed.update(node.output)
            for name in node.output if node.op_type not in NO_ARITHMETIC else ():
                if (kind := known.types.get(name)) in _FLOATS:
                    self.layers[name] = node.op_type
                    self._places[name] = _Place(name, _FLOATS[kind])
            if (
                node.op_type == "QuantizeLinear"
                and len(node.input) > 2
                and {*node.input[1:]} <= stored.keys()
            ):
                source = node.input[0]
                scale, zero = (onnx.numpy_helper.to_array(stored[name]) for name in node.input[1:])
                if scale.size == 1 and zero.dtype.kind in "iu":
                    place = _Place(node.output[0], str(zero.dtype), float(scale), int(zero))
                    ends = np.iinfo(zero.dtype)
                    low, high = ((end - place.zero) * place.scale for end in (ends.min, ends.max))
                    self.ranges[source] = low, high
                    if source not in produced & self._places.keys() or (
                        source not in wide and place.tensor in produced
                    ):
                        self._places[source] = place

    def _cut_model(
        self, tensors: Iterable[str], given: Iterable[str]
    ) -> tuple[Any, list[str], dict[str, tuple[str, _Place]]]:
        """The graph that computes `tensors`, the names of `given` that it needs, and the output with the place of each tensor."""
        inner = {self._places[name].tensor: name for name in given}
        nodes = []
        places = {name: self._places.get(name, _Place(name)) for name in tensors}
        names = NameGiver(self._model)
        recomputed = {tensor: names.give(f"{tensor}_recomputed") for tensor in inner}
        outputs = {
            name: (recomputed.get(place.tensor, place.tensor), place)
            for name, place in places.items()
        }
        read = {output for output, _ in outputs.values()}
        for node in reversed(self._model.graph.node):
            own = onnx.NodeProto()
            own.CopyFrom(node)
            own.output[:] = [recomputed.get(name, name) for name in node.output]
            if read & {*own.output}:
                read |= list_read_names(node)
                nodes.append(own)
        needed = [name for tensor, name in inner.items() if tensor in read]
        inputs = [value for value in self._model.graph.input if value.name in read]
        weights = [tensor for tensor in self._model.graph.initializer if tensor.name in read]
        graph = onnx.helper.make_graph(nodes[::-1], "cut", inputs, [], weights)
        made = {"opset_imports": self._model.opset_import, "functions": self._model.functions}
        model = onnx.helper.make_model(graph, ir_version=self._model.ir_version, **made)
        return expose_tensors(model, [output for output, _ in outputs.values()]), needed, outputs

    def _feed(
        self, model: Any, needed: Iterable[str], values: "Mapping[str, NDArray[Any]]"
    ) -> "dict[str, NDArray[Any]]":
        """The inputs of a cut graph, which are added to it if they are intermediate tensors."""
        known = {value.name for value in model.graph.input}
        feeds = {name: values[name] for name in known & values.keys()}
        for place, value in ((self._places[name], values[name]) for name in needed):
            if place.dtype not in _FLOATS.values():
                ends = np.iinfo(place.dtype)
                value = np.clip(
                    np.rint(value / np.float32(place.scale)) + place.zero, ends.min, ends.max
                )
            feeds[place.tensor] = value.astype(place.dtype, copy=False)
            if place.tensor not in known:
                kind = onnx.helper.np_dtype_to_tensor_dtype(feeds[place.tensor].dtype)
                model.graph.input.append(
                    onnx.helper.make_tensor_value_info(place.tensor, kind, [None] * value.ndim)
                )
        return feeds

    def cut(self, tensors: Iterable[str], given: Iterable[str] = ()) -> tuple[tuple[str, ...], Run]:
        model, needed, outputs = self._cut_model(tensors, given)
        run_graph: Run | None = None

        def run(values: "Mapping[str, NDArray[Any]]") -> "dict[str, NDArray[Any]]":
            """Opens the graph at its first call, since some runtimes need its example inputs."""
            nonlocal run_graph
            feeds = self._feed(model, needed, values)
            if run_graph is None:
                run_graph = self._open(model, feeds)
            held = run_graph(feeds)
            read = {}
            for name, (output, place) in outputs.items():
                read[name] = held[output].astype(np.float32, copy=False)
                if place.scale != 1:
                    read[name] = (read[name] - np.float32(place.zero)) * np.float32(place.scale)
            return read

        return (*needed,), run

    def save(
        self, tensor: str, given: Iterable[str], values: "Mapping[str, NDArray[Any]]", folder: Path
    ) -> None:
        model, needed, outputs = self._cut_model((tensor,), given)
        feeds = self._feed(model, needed, values)
        for value in model.graph.input:
            kind = value.type.tensor_type.elem_type
            value.CopyFrom(
                onnx.helper.make_tensor_value_info(value.name, kind, feeds[value.name].shape)
            )
        folder.mkdir(parents=True, exist_ok=True)
        onnx.save(onnx.shape_inference.infer_shapes(model), folder / "subgraph.onnx")
        np.savez(folder / "inputs.npz", *[feeds[value.name] for value in model.graph.input])
        text = REPRODUCER.format(
            tensor=tensor, reproduce=self._reproduce, zero=outputs[tensor][1].zero
        )
        (folder / "reproduce.py").write_text(text, encoding="utf-8")
