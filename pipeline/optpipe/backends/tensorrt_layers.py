"""The layers of a strongly typed TensorRT network, each with its type and its multiply-adds."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from optpipe.backends.base import BuildRequest
from optpipe.backends.onnx_layers import count_graph_macs, describe_graph_weights, infer_graph_types
from optpipe.core.precision import UNATTRIBUTED, LayerType, Precision

_TYPES = {
    "FLOAT": "fp32",
    "HALF": "fp16",
    "BF16": "bf16",
    "INT8": "int8",
    "FP8": "fp8",
    "FP4": "fp4",
    "INT4": "int4",
}
_METADATA = "[ONNX Layer: "
PRODUCT_LAYERS = (
    "ATTENTION_INPUT",
    "CONVOLUTION",
    "DECONVOLUTION",
    "EINSUM",
    "MATRIX_MULTIPLY",
    "MOE",
    "PLUGIN",
    "PLUGIN_V2",
    "PLUGIN_V3",
)
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


def layers_from_network(
    trt: Any, network: Any, model: Any, request: BuildRequest
) -> tuple[LayerType, ...]:
    """The layers of a strongly typed network with the type of their data input; `model` is the ONNX graph that it was parsed from.

    The MACs are those of the ONNX node of a layer; several products of one node, as in an LSTM, share them. A product of an unknown
    node is unattributed and of unknown cost: no share is proven with it.
    """
    macs = count_graph_macs(model, infer_graph_types(model, request.card.inputs))
    stored = describe_graph_weights(model)
    owned = _find_owners([network.get_layer(index) for index in range(network.num_layers)])
    products = Counter(owner for layer, owner in owned if _is_product(layer))
    dequantized = {
        layer.get_output(0).name: _TYPES.get(get_enum_name(layer.get_input(0).dtype), "int8")
        for layer, _ in owned
        if layer.type == trt.LayerType.DEQUANTIZE
    }

    layers = []
    for layer, owner in owned:
        op, data = get_enum_name(layer.type), layer.get_input(0)
        if data is None or op in _NO_ARITHMETIC:
            continue
        theirs = get_enum_name(data.dtype)
        kind = _TYPES.get(theirs, theirs.lower())

        if not _is_product(layer):
            if kind in _TYPES.values():
                layers.append(LayerType(layer.name, op, kind, 0, ""))
            continue

        if kind == "fp32" and request.precision is Precision.TF32:
            kind = "tf32"
        kind = dequantized.get(data.name, kind)
        amount = macs.get(owner)
        if amount is not None:
            amount //= products[owner]
        elif owner not in macs or op.startswith("PLUGIN"):
            kind = UNATTRIBUTED
        layers.append(LayerType(layer.name, op, kind, amount, stored.get(owner, "")))
    return tuple(layers)


def _find_owners(layers: Sequence[Any]) -> list[tuple[Any, str]]:
    """Each layer with the ONNX node that it was parsed from, which the parser writes as `[ONNX Layer: NAME | ...]`.

    The parser proceeds node by node, so a layer without a name belongs to the previous layer's node.
    """
    owned, owner = [], ""
    for layer in layers:
        metadata = str(layer.metadata or "")
        if metadata.startswith(_METADATA):
            owner = metadata.removeprefix(_METADATA).removesuffix("]").split(" | ")[0]
        owned.append((layer, owner))
    return owned


def _is_product(layer: Any) -> bool:
    return get_enum_name(layer.type) in PRODUCT_LAYERS


def get_enum_name(value: Any) -> str:
    """`CONVOLUTION` for `LayerType.CONVOLUTION`."""
    return str(value).rpartition(".")[2]
