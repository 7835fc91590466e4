"""ONNX Runtime's node times on the layers of the graph it was given: its fused nodes bear other names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FUSED_DEPTH = 4
"""A fused convolution ends at most this many nodes behind its product: bias, sum, activation."""
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "MatMulInteger", "ConvInteger", "QLinearConv"})


def layer_times(graph: Path, node_ns: Mapping[str, float]) -> dict[str, float]:
    """`node_ns` by the names of `graph`'s own nodes.

    A node that kept its name is that layer. The blocked convolutions of the CPU provider are called after the tensor that
    they write (`relu_3_nchwc`): their time goes to the product from which that tensor comes by elementwise steps.
    """
    import onnx

    nodes = list(onnx.load(graph, load_external_data=False).graph.node)
    by_name = {node.name: node for node in nodes}
    writers = {output: node for node in nodes for output in node.output}
    times: dict[str, float] = {}
    for name, ns in node_ns.items():
        plain = name.removeprefix("fused ")
        if plain in by_name:
            times[plain] = times.get(plain, 0.0) + ns
        elif (product := _product_behind(plain.removesuffix("_nchwc"), writers, times)) is not None:
            times[product] = ns
    return times


def _product_behind(tensor: str, writers: Mapping[str, Any], taken: Mapping[str, float]) -> str | None:
    """The nearest product that `tensor` comes from, which no other time was given to."""
    wave = [tensor]
    for _ in range(_FUSED_DEPTH):
        found = [writers[each] for each in wave if each in writers]
        for node in found:
            if node.op_type in _PRODUCTS and node.name not in taken:
                return str(node.name)
        wave = [each for node in found if node.op_type not in _PRODUCTS for each in node.input]
    return None
