"""2:4 structured sparsity: at most two values other than zero in each four along the axis that a product sums over.

Source: NVIDIA TensorRT documentation, "Structured Sparsity"; Mishra et al., Accelerating Sparse Deep Neural Networks, 2021.
"""

from typing import Any

import numpy as np

from optpipe.backends.onnx_graph import OnnxGraph, iterate_nodes

GROUP, KEPT = 4, 2
_SAME_ZEROS = ("Cast", "DequantizeLinear", "Identity", "QuantizeLinear")
"""Operators between a weight and its product that keep zeros: quantization of weights is symmetric."""


def list_sparse_products(model: Any) -> tuple[str, ...]:
    """The names of the convolutions and matrix products whose constant weights have the pattern."""
    from onnx import numpy_helper

    graph = OnnxGraph(model)
    found = []
    for node in iterate_nodes(model.graph):
        if node.op_type not in ("Conv", "Gemm", "MatMul"):
            continue
        name = node.input[1]
        while name in graph.producers and graph.producers[name].op_type in _SAME_ZEROS:
            name = graph.producers[name].input[0]
        if name in graph.weights:
            transposed = any(each.name == "transB" and each.i for each in node.attribute)
            axis = 1 if node.op_type == "Conv" or transposed else -2
            if has_pattern(numpy_helper.to_array(graph.weights[name]), axis):
                found.append(node.name or node.output[0])
    return tuple(found)


def has_pattern(weight: np.ndarray, axis: int) -> bool:
    """Whether `weight` has the pattern along `axis`, whose length has to be a multiple of four."""
    if weight.ndim < 2 or weight.shape[axis] % GROUP:
        return False
    groups = np.moveaxis(weight, axis, -1).reshape(-1, GROUP)
    return bool((np.count_nonzero(groups, axis=1) <= KEPT).all())
