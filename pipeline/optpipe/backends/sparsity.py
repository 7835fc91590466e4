"""2:4 structured sparsity of an ONNX graph's weights: at most two of each four values along the axis that a product sums over are not 0.

Sparse Tensor Cores (Ampere and newer) skip the zeros. Source: NVIDIA TensorRT documentation, "Structured Sparsity"; Mishra et al.,
Accelerating Sparse Deep Neural Networks, 2021.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from optpipe.backends.onnx_graph import OnnxGraph, iterate_nodes
from optpipe.backends.onnx_products import read_attributes
from optpipe.core import np, onnx

GROUP, KEPT = 4, 2
_PRODUCTS = ("Conv", "Gemm", "MatMul")
_SAME_ZEROS = ("Cast", "DequantizeLinear", "Identity", "QuantizeLinear", "Transpose")
"""Operators between a weight and its product that move no value to or from 0: weights are quantized symmetrically."""
_SPARSE_KERNELS = ("sparse", "sptensorop")
"""Parts of the names of TensorRT's and CUTLASS's sparse kernels."""


@dataclass(frozen=True, slots=True)
class Sparsity:
    """The products of a graph with constant weights, and the names of those whose weights have the pattern."""

    sparse: tuple[str, ...]
    products: int

    def describe(self) -> str:
        """`8 of 21 convolutions and matrix products have 2:4 sparse weights`; empty without any."""
        if not self.sparse:
            return ""
        has = "has" if self.products == 1 else "have"
        return f"{len(self.sparse)} of {self.products} convolutions and matrix products {has} 2:4 sparse weights"


def find_sparsity(model: Any) -> Sparsity:
    """Reads the weights of an ONNX model's products, and names the products whose weights are 2:4 sparse."""
    graph, names, products = OnnxGraph(model), [], 0
    for node in iterate_nodes(model.graph):
        if node.op_type not in _PRODUCTS:
            continue
        name, turned = node.input[1], False
        while name in graph.producers and graph.producers[name].op_type in _SAME_ZEROS:
            turned ^= graph.producers[name].op_type == "Transpose"
            name = graph.producers[name].input[0]
        if name not in graph.weights:
            continue
        products += 1
        weight = onnx.numpy_helper.to_array(graph.weights[name])
        if has_pattern(weight, _find_axis(node, turned=turned)):
            names.append(node.name or node.output[0])
    return Sparsity(tuple(names), products)


def _find_axis(node: Any, *, turned: bool) -> int:
    """The axis of the stored weight that the product sums over: the input channels."""
    if node.op_type == "Conv":
        return 1
    turned ^= bool(read_attributes(node).get("transB"))
    return -1 if turned else -2


def has_pattern(weight: NDArray[Any], axis: int) -> bool:
    """Whether `weight` has the pattern along `axis`, with a value that is not 0; False if the axis is no multiple of four."""
    if weight.ndim < 2 or weight.shape[axis] % GROUP or not weight.any():
        return False
    groups = np.moveaxis(weight, axis, -1).reshape(-1, GROUP)
    return bool((np.count_nonzero(groups, axis=1) <= KEPT).all())


def list_sparse_kernels(inspected: str) -> Sequence[str]:
    """The layers of TensorRT's engine inspector (JSON) whose tactic is a sparse kernel."""
    layers = [layer for layer in json.loads(inspected).get("Layers", ()) if isinstance(layer, dict)]
    return [
        str(layer.get("Name", ""))
        for layer in layers
        if any(part in str(layer.get("TacticName", "")).lower() for part in _SPARSE_KERNELS)
    ]
