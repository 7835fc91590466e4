"""Reads the quantization of an ONNX graph: its operators, its precision as a whole, and the layers of a Q/DQ graph."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.backends.graph_names import iterate_graphs
from optpipe.backends.onnx_products import (
    QUANTIZES_ITS_DATA,
)
from optpipe.core import np, onnx
from optpipe.core.precision import Precision

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
from optpipe.backends.onnx_graph import (
    OnnxGraph,
    iterate_nodes,
    load_onnx,
    name_nodes,
    read_constants,
)
from optpipe.backends.onnx_layers import type_name_from_onnx

QUANTIZED = {
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger",
    "MatMulIntegerToFloat", "QLinearAdd", "QGemm", "QAttention", "MatMulInteger16", "QLinearMul", "QLinearSigmoid",
    "QLinearSoftmax", "QLinearConcat", "QLinearLeakyRelu", "QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearWhere",
    "QLinearReduceMean", *QUANTIZES_ITS_DATA,
}  # fmt: skip
"""Operators of quantized graphs. One whose only such operator dequantizes weights is not quantized: `is_weight_only`."""


FP8_NAMES = ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ")
"""ONNX's names for the 8-bit floating-point types."""
HALF_TYPES = {"fp16": 10, "bf16": 16}
"""ONNX's numbers for the half-precision types."""


def find_quantized_operators(model: Any) -> list[str]:
    return sorted({node.op_type for node in iterate_nodes(model.graph)} & QUANTIZED)


def is_quantized_dynamically(path: Path) -> bool:
    operators = find_quantized_operators(load_onnx(path, weights=False))
    return bool({"DynamicQuantizeLinear", *QUANTIZES_ITS_DATA} & set(operators))


def is_weight_only(model: Any) -> bool:
    """Whether a graph has quantized weights that are dequantized for floating-point products, and no quantized data.

    Such products compute in floating point, whatever the weights are stored in.
    """
    if (
        not {"DequantizeLinear"}
        <= {*find_quantized_operators(model)}
        <= {
            "QuantizeLinear",
            "DequantizeLinear",
        }
    ):
        return False
    stored = {tensor.name for inner in iterate_graphs(model.graph) for tensor in inner.initializer}
    for node in iterate_nodes(model.graph):
        if node.op_type == "Constant" or (node.op_type == "Identity" and node.input[0] in stored):
            stored.update(node.output)
        elif node.op_type == "QuantizeLinear" and node.input[0] in stored:
            stored.update(node.output)  # of weights that are stored in floating point
        elif node.op_type in ("QuantizeLinear", "DequantizeLinear") and node.input[0] not in stored:
            return False
    return True


def _quantizes_to_fp8(model: Any) -> bool:
    """Whether a graph has QuantizeLinear nodes, all of which make FP8."""
    types = {
        tensor.name: tensor.data_type
        for inner in iterate_graphs(model.graph)
        for tensor in inner.initializer
    } | {name: tensor.data_type for name, tensor in read_constants(model).items()}
    made = set[int]()
    for node in iterate_nodes(model.graph):
        if node.op_type != "QuantizeLinear":
            continue
        stated = next(
            (attribute.i for attribute in node.attribute if attribute.name == "output_dtype"), 0
        )
        zero = types.get(node.input[2]) if len(node.input) > 2 else None
        made.add(stated or zero or onnx.TensorProto.UINT8)
    return bool(made) and made <= {getattr(onnx.TensorProto, name) for name in FP8_NAMES}


def find_own_precision(graph: Any) -> Precision | None:
    """INT8 or FP8 for a quantized graph, FP16 or BF16 if most of its weight bytes have that type, None for FP32.

    A graph of which only weights are quantized has the type of its scales, which is that of its products.
    """
    weight_only = is_weight_only(graph)
    if find_quantized_operators(graph) and not weight_only:
        return Precision.FP8 if _quantizes_to_fp8(graph) else Precision.INT8
    sizes: dict[str, int] = {}
    for tensor in (tensor for inner in iterate_graphs(graph.graph) for tensor in inner.initializer):
        if tensor.data_type in (1, *HALF_TYPES.values()):
            kind = type_name_from_onnx(tensor.data_type)
            sizes[kind] = sizes.get(kind, 0) + tensor.ByteSize()
    largest = max(sizes, key=lambda kind: sizes[kind], default="fp32")
    return Precision(largest) if largest in HALF_TYPES else None


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A convolution or linear layer of a Q/DQ graph. A quantized number stands for itself times its scale."""

    name: str
    weight: "NDArray[Any]"
    """INT8 or E4M3: (output channels, input channels of a group, kernel …) or (output features, input features)."""
    weight_scale: "NDArray[np.float32]"
    """One scale per output."""
    scale: float
    """Scale of the input."""
    output_scale: float | None = None
    """Scale of the output before any activation, if the graph quantizes it, such as the shortcut of an addition."""
    kept: bool = False
    """Whether the layer stays in floating point and only shares its weight with a quantized one."""


def layers_from_qdq(
    model: Any, have_same_weights: "Callable[[NDArray[Any], QuantizedLayer], bool]"
) -> tuple[QuantizedLayer, ...]:
    """The layers of a Q/DQ graph whose data and weights are dequantized, in the graph's order.

    They include the floating-point layers that share a weight with one of them, by `have_same_weights(weights, layer)`.
    """
    graph = OnnxGraph(name_nodes(model))

    def read(name: str) -> "NDArray[Any]":
        return np.array(onnx.numpy_helper.to_array(graph.weights[name]))

    layers: dict[str, QuantizedLayer] = {}
    wide = {}
    for node in (node for node in model.graph.node if node.op_type in ("Conv", "Gemm", "MatMul")):
        straight = node.op_type == "Conv" or any(
            attribute.name == "transB" and attribute.i for attribute in node.attribute
        )
        data, held = (graph.producers.get(name) for name in node.input[:2])
        if data is None or held is None or {data.op_type, held.op_type} != {"DequantizeLinear"}:
            if node.input[1] in graph.weights:
                wide[node.name] = read(node.input[1]) if straight else read(node.input[1]).T
            continue
        weight = read(held.input[0]) if straight else np.ascontiguousarray(read(held.input[0]).T)
        weight_scale = np.resize(read(held.input[1]).astype(np.float32).reshape(-1), len(weight))
        after = [
            reader
            for reader in graph.consumers.get(node.output[0], [])
            if reader.op_type == "QuantizeLinear"
        ]
        output_scale = float(read(after[0].input[1])) if after else None
        layers[node.name] = QuantizedLayer(
            name=node.name,
            weight=weight,
            weight_scale=weight_scale,
            scale=float(read(data.input[1])),
            output_scale=output_scale,
        )
    for name, values in wide.items():
        twins = (layer for layer in layers.values() if have_same_weights(values, layer))
        if (twin := next(twins, None)) is not None:
            layers[name] = replace(twin, name=name, kept=True)
    return tuple(layers[node.name] for node in model.graph.node if node.name in layers)
