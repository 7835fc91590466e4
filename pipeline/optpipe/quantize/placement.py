"""Chooses the layers for INT8 or FP8, and the tensors of their Q/DQ pairs.

TensorRT and ONNX Runtime need different INT8 graphs. TensorRT fuses a convolution with the ReLU and the residual addition
after it when only *inputs* are quantized: no Q/DQ between convolution, addition and ReLU, and one on the shortcut's branch
of the addition, so that the fused kernel reads it as INT8 (TensorRT developer guide, "Q/DQ placement recommendations"). ONNX
Runtime's CPU provider fuses an operator only if its *output* is quantized too. The target `fp8` is torch's: the inputs of
linear layers, in E4M3.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from optpipe.backends.onnx_graph import WEIGHTED_OPS, OnnxGraph, name_nodes
from optpipe.core.entries import SkippedLayer

Target = Literal["tensorrt", "cpu", "fp8"]
_ACTIVATIONS = ("Relu", "Clip")
FP8_MULTIPLE = 16
"""Divides a weight's sizes (PyTorch, `torch._scaled_mm`)."""
_MIN_CHANNELS: dict[Target, int] = {"tensorrt": 16, "cpu": 1}
"""Input channels of a group below which a convolution stays in floating point. INT8 Tensor Core kernels take 16 at a time; a
CPU's take any number, and with depthwise and narrow ones in INT8 no tensor is converted between them: 0.62 to 1.01 of the
time (`benchmarks/README.md`).
"""


@dataclass(frozen=True, slots=True)
class Placement:
    """`layers` by name; `edges` are the (node, input position) pairs that read a dequantized tensor."""

    target: Target
    layers: tuple[str, ...]
    edges: tuple[tuple[str, int], ...]
    tensors: tuple[str, ...]
    """The activations that need a range, in the graph's order, each once."""
    skipped: tuple[SkippedLayer, ...]
    after: tuple[str, ...] = ()
    """Tensors whose Q/DQ serves every consumer: on `cpu`, the outputs of quantized layers."""


def place_qdq(
    model: Any, target: Target, keep: Callable[[str], bool] = lambda _: False, unseen: Collection[str] = ()
) -> Placement:
    """Decides for every layer of `model`. Layers for which `keep` holds stay in floating point.

    So do readers of the tensors `unseen`, which were zero in all calibration data: any other value would be clipped to zero.
    """
    graph = OnnxGraph(name_nodes(model))
    layers, skipped = [], []
    for node in model.graph.node:
        if node.op_type not in WEIGHTED_OPS:
            continue
        obstacle = _find_obstacle(node, graph, target) or (
            "its input was zero in all calibration data" if node.input[0] in unseen else None
        )
        reason = "kept in floating point by request" if keep(node.name) else obstacle
        skipped.append(SkippedLayer(node.name, reason)) if reason else layers.append(node)
    skipped += _list_inner_layers(model.graph)
    edges = [(node.name, 0) for node in layers]
    after: list[str] = []
    if target == "tensorrt":
        edges += _find_shortcuts(layers, graph)
    elif target == "cpu":
        after = [name for name in _find_outputs(layers, graph) if name not in unseen]
    by_name = {node.name: node for node in model.graph.node}
    edges = [(name, position) for name, position in edges if by_name[name].input[position] not in unseen]
    needed = {by_name[name].input[position] for name, position in edges} | set(after)
    order = [each.name for each in model.graph.input] + [out for node in model.graph.node for out in node.output]
    return Placement(
        target=target,
        layers=tuple(node.name for node in layers),
        edges=tuple(edges),
        tensors=tuple(name for name in order if name in needed),
        skipped=tuple(skipped),
        after=tuple(after),
    )


def _list_inner_layers(graph: Any) -> Iterator[SkippedLayer]:
    """The layers in the subgraphs of If, Loop and Scan."""
    for outer in graph.node:
        for inner in (attribute.g for attribute in outer.attribute if attribute.HasField("g")):
            for node in inner.node:
                if node.op_type in WEIGHTED_OPS:
                    name = f"{outer.name}/{node.name or node.output[0]}"
                    yield SkippedLayer(name, f"inside {outer.op_type}: subgraphs stay in floating point")
            yield from _list_inner_layers(inner)


def _find_epilogue(graph: OnnxGraph, tensor: str) -> str:
    """The output of the activation that is the only reader of `tensor`, which a fused kernel writes; otherwise `tensor`."""
    readers = graph.consumers.get(tensor, [])
    if len(readers) == 1 and readers[0].op_type in _ACTIVATIONS and tensor not in graph.outputs:
        return str(readers[0].output[0])
    return tensor


def _find_obstacle(node: Any, graph: OnnxGraph, target: Target) -> str | None:
    """Why the target's precision would not pay or not work for a layer; None if it fits."""
    weight = graph.weights.get(node.input[1]) if len(node.input) > 1 else None
    attributes = {each.name: each for each in node.attribute}
    if weight is None or node.input[0] in graph.weights:
        return "its weights are not constant"
    if weight.data_type != 1:
        return "its weights are not FP32"
    if node.op_type == "MatMul" and len(weight.dims) != 2:
        return "its weights are not a matrix"
    if node.op_type == "Gemm" and "transA" in attributes and attributes["transA"].i:
        return "its data is transposed"
    if node.op_type in ("MatMul", "Gemm"):
        if target == "fp8" and any(size % FP8_MULTIPLE for size in weight.dims):
            sizes = " × ".join(map(str, weight.dims))
            return f"a matrix of {sizes}: FP8 kernels take multiples of {FP8_MULTIPLE}"
        return None
    if target == "fp8":
        return "a convolution; FP8 is for linear layers"
    groups = attributes["group"].i if "group" in attributes else 1
    per_group = weight.dims[0] // groups if node.op_type == "ConvTranspose" else weight.dims[1]
    if per_group >= _MIN_CHANNELS[target]:
        return None
    if groups > 1:
        kind = "depthwise" if per_group == 1 else f"grouped, {per_group} channels per group"
        return f"{kind}: memory-bound; without a Tensor Core kernel INT8 loses accuracy for no speedup"
    return f"{per_group} input channels: INT8 kernels pad them to {_MIN_CHANNELS[target]}"


def _find_shortcuts(layers: list[Any], graph: OnnxGraph) -> list[tuple[str, int]]:
    """The inputs of residual additions that do not come directly from the convolution fused with the addition."""
    quantized = {node.input[0] for node in layers}
    writers = {node.output[0] for node in layers if node.op_type in ("Conv", "ConvTranspose")}
    depth = _compute_depths(graph)
    found = []
    for node in graph.model.graph.node:
        if node.op_type != "Add" or any(name in graph.weights for name in node.input):
            continue
        fusable = [name for name in node.input if name in writers and len(graph.consumers[name]) == 1]
        end = _find_epilogue(graph, node.output[0])
        # quantized for a layer, itself or as the shortcut of the next addition
        reaches = end in quantized or any(each.op_type in ("Add", "MaxPool") for each in graph.consumers.get(end, []))
        if not fusable or not reaches or node.input[0] == node.input[1]:
            continue
        kept = max(fusable, key=lambda name: depth[name])  # the convolution that runs last is fused with the addition
        found += [(node.name, position) for position, name in enumerate(node.input) if name != kept]
    return found


def _compute_depths(graph: OnnxGraph) -> dict[str, int]:
    """The longest path from an input to each tensor, in nodes. ONNX graphs are sorted."""
    depth: dict[str, int] = {}
    for node in graph.model.graph.node:
        level = 1 + max((depth.get(name, 0) for name in node.input), default=0)
        depth.update(dict.fromkeys(node.output, level))
    return depth


def _find_outputs(layers: list[Any], graph: OnnxGraph) -> list[str]:
    """The outputs that ONNX Runtime needs quantized: those of the layers, and additions and max pools of such outputs."""
    convolutions = {node.name for node in layers if node.op_type in ("Conv", "ConvTranspose")}
    done: dict[str, None] = {node.input[0]: None for node in layers}
    inputs = set(done)
    for node in graph.model.graph.node:
        fits = node.name in convolutions or (
            node.op_type in ("Add", "MaxPool") and all(name in done for name in node.input)
        )
        end = _find_epilogue(graph, node.output[0]) if fits else ""
        if fits and end not in graph.outputs:
            done[end] = None
    return [name for name in done if name not in inputs or name in graph.producers]
