"""Biases of FP16 and BF16 convolutions as additions of their own, which ONNX Runtime's CUDA provider does faster.

A convolution's own bias goes through cudnnAddTensor there, a pass over the whole activation at about a quarter of the memory's
bandwidth. With the option `fuse_conv_bias` the provider asks cuDNN for one kernel that convolves and adds, and ONNX Runtime
puts the additions back into the convolutions before. ResNet-50 in FP16 under a CUDA graph on an H200, ONNX Runtime 1.31, ms:

    batch size                                        1      64     256
    bias of the convolution                        0.65    5.64    21.9
    addition of its own                            0.62    4.22    15.9
    `fuse_conv_bias`, the first convolution too    0.64    4.06    15.2    (837 us of the 4.06 are the first one's, 120 without)
"""

from typing import Any

from optpipe.backends.onnx_graph import OnnxGraph

BIAS_FUSION_PASS = "ConvAddFusion"
"""The pass of ONNX Runtime that would put the additions back into the convolutions."""

FUSED_CHANNEL_MULTIPLE = 8
"""cuDNN's kernels with an addition want a multiple of so many FP16 input channels per group for Tensor Cores; a first
convolution of three channels, or a depthwise one, has faster kernels without."""


def separate_biases(model: Any) -> int:
    """Takes the constant biases out of the half-precision convolutions of `model`, in place; returns how many there were."""
    from onnx import TensorProto, helper, numpy_helper

    graph, nodes, biases = OnnxGraph(model), [], {}
    for node in model.graph.node:
        nodes.append(node)
        if node.op_type != "Conv" or len(node.input) < 3:
            continue
        weight, bias = (graph.weights.get(name) for name in node.input[1:3])
        if weight is None or bias is None or bias.data_type not in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
            continue
        shaped = f"{bias.name}_over_{len(weight.dims)}d"
        if shaped not in biases:
            values = numpy_helper.to_array(bias).reshape(1, -1, *[1] * (len(weight.dims) - 2))
            biases[shaped] = numpy_helper.from_array(values, shaped)
        output = node.output[0]
        del node.input[2]
        node.output[0] = f"{output}_without_bias"
        terms = [node.output[0], shaped]
        if weight.dims[1] % FUSED_CHANNEL_MULTIPLE:
            terms.reverse()  # ConvAddFusion looks for the constant as the second input, so this one stays an addition
        nodes.append(helper.make_node("Add", terms, [output], name=f"{node.name or output}_bias"))
    count = len(nodes) - len(model.graph.node)
    _replace_nodes(model.graph, nodes, biases.values())
    return count


def _replace_nodes(graph: Any, nodes: list[Any], constants: Any) -> None:
    """The new nodes with their constants; initializers that nothing reads any more go."""
    del graph.node[:]
    graph.node.extend(nodes)
    read = {name for node in nodes for name in node.input} | {each.name for each in graph.output}
    kept = [each for each in graph.initializer if each.name in read]
    del graph.initializer[:]
    graph.initializer.extend([*kept, *constants])
