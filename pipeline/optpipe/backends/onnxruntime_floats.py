"""What a Q/DQ graph leaves in floating point, kept from a pass of ONNX Runtime that quantizes it on the CPU.

The pass takes convolutions and linear layers with FP32 weights between DequantizeLinear and QuantizeLinear for unfinished, and
quantizes their weights with one scale for all channels (onnxruntime, pull request 22969). In a graph made here these are the
layers that `--budget` or a calibration table keeps out of INT8.
"""

from typing import Any

from optpipe.backends.onnx_graph import OnnxGraph

WEIGHT_PASS = "WeightBiasQuantization"
_FLOAT = 1
"""`TensorProto.FLOAT`."""


def needs_weight_pass(model: Any) -> bool:
    """Whether a layer with INT8 weights has a bias in FP32, as other tools write it: only the pass makes an INT8 kernel of it."""
    graph = OnnxGraph(model)
    return any(
        len(node.input) > 2
        and node.input[2] in graph.weights
        and (producer := graph.producers.get(node.input[1])) is not None
        and producer.op_type == "DequantizeLinear"
        for node in model.graph.node
        if node.op_type in ("Conv", "ConvTranspose", "Gemm")
    )


def protect_convolutions(model: Any) -> int:
    """Makes the FP32 convolutions between Q/DQ pairs FusedConv without an activation, in place; returns how many.

    That is the same kernel, and the pass leaves it alone wherever the graph is loaded, also by a server.
    """
    from onnx import helper

    graph, found = OnnxGraph(model), []
    for node in model.graph.node:
        producer, weight = graph.producers.get(node.input[0] if node.input else ""), None
        if node.op_type == "Conv" and producer is not None and producer.op_type == "DequantizeLinear":
            weight = graph.weights.get(node.input[1])
        if weight is not None and weight.data_type == _FLOAT:
            found.append(node)
    for node in found:
        node.op_type, node.domain = "FusedConv", "com.microsoft"
    if found and not any(each.domain == "com.microsoft" for each in model.opset_import):
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return len(found)
