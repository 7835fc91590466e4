"""The layers of a network that TensorRT's ONNX parser made: their types, and the MACs of the nodes they came from."""

from collections import Counter
from math import prod
from typing import Any

from optpipe.backends.base import BuildRequest
from optpipe.backends.onnx_graph import count_node_macs, infer_graph_types, iterate_nodes
from optpipe.core.precision import LayerType, Precision

_TYPES = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16", "INT8": "int8", "FP8": "fp8", "FP4": "fp4", "INT4": "int4"}
_METADATA = "[ONNX Layer: "
PRODUCT_LAYERS = ("CONVOLUTION", "DECONVOLUTION", "MATRIX_MULTIPLY")
_NO_ARITHMETIC = (
    "CAST",
    "CONCATENATION",
    "CONSTANT",
    "DEQUANTIZE",
    "GATHER",
    "IDENTITY",
    "QUANTIZE",
    "SHAPE",
    "SHUFFLE",
    "SLICE",
)


def layers_from_network(trt: Any, network: Any, request: BuildRequest) -> tuple[LayerType, ...]:
    """The layers of a strongly typed network by the type of their data input.

    The MACs come from the ONNX node that a layer was made of; several layers of one node, as the two products of
    an LSTM, share them. The parser goes node by node: a layer without a name belongs to the node of the layer before it.
    A product whose node is not known is `unattributed`: its share is not proven.
    """
    import onnx

    model = onnx.load(request.graph)
    known = infer_graph_types(model, request.card.inputs)
    macs = {node.name: count_node_macs(node, known) for node in iterate_nodes(model.graph)}
    owners = _find_owners(network)
    products = Counter(
        owners[index]
        for index in range(network.num_layers)
        if get_enum_name(network.get_layer(index).type) in PRODUCT_LAYERS
    )
    tf32 = request.precision is Precision.TF32
    dequantized = _find_outputs(network, trt.LayerType.DEQUANTIZE)
    layers = []
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        op = get_enum_name(layer.type)
        data = layer.get_input(0)
        if data is None or op in _NO_ARITHMETIC:
            continue
        kind = get_type_name(data.dtype)
        amount = 0
        if op in PRODUCT_LAYERS:
            kind = "int8" if data.name in dequantized else "tf32" if kind == "fp32" and tf32 else kind
            amount = macs.get(owners[index], 0) // products[owners[index]]
            if owners[index] not in macs:
                kind, amount = "unattributed", max(1, _count_known_macs(layer))
        elif kind not in _TYPES.values():
            continue
        layers.append(LayerType(layer.name, op, kind, amount))
    return tuple(layers)


def get_enum_name(value: Any) -> str:
    """`CONVOLUTION` for `LayerType.CONVOLUTION`."""
    return str(value).rpartition(".")[2]


def get_type_name(dtype: Any) -> str:
    """`fp16` for the library's HALF; its own word in small letters where we have none."""
    name = get_enum_name(dtype)
    return _TYPES.get(name, name.lower())


def _find_owners(network: Any) -> list[str]:
    """For each layer the name of the ONNX node that it was made of: the parser writes it as `[ONNX Layer: NAME | ...]`."""
    found, owner = [], ""
    for index in range(network.num_layers):
        metadata = str(network.get_layer(index).metadata or "")
        if metadata.startswith(_METADATA):
            owner = metadata.removeprefix(_METADATA).removesuffix("]").split(" | ")[0]
        found.append(owner)
    return found


def _count_known_macs(layer: Any) -> int:
    """The MACs of a matrix product as far as its sizes are known."""
    sizes = [*layer.get_output(0).shape, layer.get_input(0).shape[-1]]
    return prod(size for size in sizes if size > 0)


def _find_outputs(network: Any, kind: Any) -> frozenset[str]:
    layers = (network.get_layer(index) for index in range(network.num_layers))
    return frozenset(layer.get_output(0).name for layer in layers if layer.type == kind)
