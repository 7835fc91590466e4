"""Random steps of an INT8 network, and a small network as ONNX."""

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from optpipe.backends.onnx_graph import infer_graph_types, name_nodes
from optpipe.backends.torch_int8 import steps
from optpipe.backends.torch_int8.lowering import lower_graph
from optpipe.core.card import InputSpec
from optpipe.quantize.placement import place_qdq
from optpipe.quantize.qdq import ActivationRange, qdq_from_onnx


def random_convolution(seed=0, channels=32, outputs=32, kernel=3, stride=1, activation="relu", half=False, added=False):
    """Values of about a third of the INT8 range, so that few are clamped."""
    rng = np.random.default_rng(seed)
    scale = (rng.random(outputs, np.float32) + np.float32(0.5)) / np.float32(50 * kernel * np.sqrt(channels))
    return steps.Convolution(
        name="layer",
        given="x",
        output="y",
        weight=rng.integers(-127, 128, (outputs, kernel, kernel, channels)).astype(np.int8),
        scale=scale,
        bias=rng.standard_normal(outputs, np.float32) * 10,
        stride=stride,
        padding=(kernel // 2,) * 4,
        activation=activation,
        half=half,
        added="z" if added else None,
        added_scale=0.37 if added else 0.0,
    )


def random_depthwise(seed=0, channels=48, kernel=3, stride=1, activation="", half=True, spare=0):
    """Sums of about 1."""
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((channels, kernel, kernel)) / kernel).astype(np.float16)
    bias = rng.standard_normal(channels).astype(np.float32)
    sides = (kernel // 2,) * 4 if stride == 1 else (kernel // 2 - 1, kernel // 2 - 1, kernel // 2, kernel // 2)
    return steps.Depthwise(
        "layer", "x", "y", weight, bias, stride, sides, activation, half, 1.0 if half else 30.0, spare
    )


def random_half(seed, *shape):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float16)
    return torch.from_numpy(values).contiguous(memory_format=torch.channels_last)


def random_int8(seed, *shape):
    values = np.random.default_rng(seed).integers(-128, 128, shape).astype(np.int8)
    return torch.from_numpy(values).contiguous(memory_format=torch.channels_last)


def small_network():
    """Stem with max pooling, a block with a shortcut, one whose shortcut the graph keeps in floating point, mean, linear."""
    make, rng = helper.make_node, np.random.default_rng(7)

    def weight(*shape):
        return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    same = {"pads": [1, 1, 1, 1]}
    nodes = [
        make("Conv", ["image", "w0", "b0"], ["c0"], name="stem", strides=[2, 2], pads=[3, 3, 3, 3]),
        make("Relu", ["c0"], ["r0"], name="relu0"),
        make("MaxPool", ["r0"], ["p0"], name="pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        make("Conv", ["p0", "w1", "b1"], ["c1"], name="conv1", **same),
        make("Relu", ["c1"], ["r1"], name="relu1"),
        make("Conv", ["p0", "wd", "b1"], ["d"], name="down"),
        make("Conv", ["r1", "w2", "b1"], ["c2"], name="conv2", **same),
        make("Add", ["c2", "d"], ["s2"], name="add2"),
        make("Relu", ["s2"], ["r2"], name="relu2"),
        make("Conv", ["r2", "w3", "b1"], ["c3"], name="conv3", **same),
        make("Add", ["c3", "r2"], ["s3"], name="add3"),
        make("Relu", ["s3"], ["r3"], name="relu3"),
        make("GlobalAveragePool", ["r3"], ["m"], name="mean"),
        make("Flatten", ["m"], ["f"], name="flatten"),
        make("Gemm", ["f", "w4", "b4"], ["logits"], name="head", transB=1),
    ]
    weights = {
        "w0": weight(32, 3, 7, 7), "b0": weight(32), "w1": weight(64, 32, 3, 3), "b1": weight(64), "wd": weight(64, 32, 1, 1),
        "w2": weight(64, 64, 3, 3), "w3": weight(64, 64, 3, 3), "w4": weight(10, 64), "b4": weight(10),
    }  # fmt: skip
    return make_model(nodes, weights)


def shuffled_network():
    """Split, concatenation, batch normalization ahead of ReLU, channel shuffle, and squeeze and excitation."""
    make, rng = helper.make_node, np.random.default_rng(11)

    def weight(*shape):
        return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    nodes = [
        make("Conv", ["image", "w0", "b0"], ["c0"], name="first", pads=[1, 1, 1, 1]),
        make("Split", ["c0", "sizes"], ["left", "right"], name="split", axis=1),
        make("Conv", ["left", "w1", "b1"], ["c1"], name="conv1"),
        make("Concat", ["c1", "right"], ["joined"], name="concat", axis=1),
        make("BatchNormalization", ["joined", "gamma", "beta", "mean", "variance"], ["n"], name="norm", epsilon=1e-3),
        make("Relu", ["n"], ["r"], name="relu"),
        make("Conv", ["r", "w2", "b2"], ["c2"], name="conv2"),
        make("Reshape", ["c2", "grouped"], ["g"], name="group"),
        make("Transpose", ["g"], ["t"], name="shuffle", perm=[0, 2, 1, 3, 4]),
        make("Reshape", ["t", "whole"], ["s"], name="ungroup"),
        make("GlobalAveragePool", ["s"], ["squeezed"], name="squeeze"),
        make("Conv", ["squeezed", "w3", "b2"], ["e"], name="excite"),
        make("HardSigmoid", ["e"], ["h"], name="gate"),
        make("Mul", ["h", "s"], ["scaled"], name="scale"),
        make("GlobalAveragePool", ["scaled"], ["m"], name="mean"),
        make("Flatten", ["m"], ["f"], name="flatten"),
        make("Gemm", ["f", "w4", "b4"], ["logits"], name="head", transB=1),
    ]
    weights = {
        "w0": weight(48, 3, 3, 3), "b0": weight(48), "w1": weight(32, 16, 1, 1), "b1": weight(32), "w2": weight(64, 64, 1, 1),
        "b2": weight(64), "w3": weight(64, 64, 1, 1), "w4": weight(10, 64), "b4": weight(10),
        "gamma": rng.uniform(0.5, 2, 64).astype(np.float32), "beta": weight(64), "mean": weight(64),
        "variance": rng.uniform(0.2, 3, 64).astype(np.float32), "sizes": np.array([16, 32]),
        "grouped": np.array([0, 2, 32, 32, 32]), "whole": np.array([0, 64, 32, 32]),
    }  # fmt: skip
    return make_model(nodes, weights)


def narrow_network():
    """Widths that fill no 16 channels: a block with a shortcut, outputs that stay in FP16, a shortcut to be dequantized, a linear layer."""
    make, rng = helper.make_node, np.random.default_rng(17)

    def weight(*shape):
        return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    same = {"pads": [1, 1, 1, 1]}
    nodes = [
        make("Conv", ["image", "w0"], ["c0"], name="first", **same),
        make("Relu", ["c0"], ["r0"], name="relu0"),
        make("Conv", ["r0", "w1"], ["c1"], name="conv1", **same),
        make("Relu", ["c1"], ["r1"], name="relu1"),
        make("Conv", ["r1", "w2"], ["c2"], name="conv2", **same),
        make("Conv", ["r0", "wd"], ["d"], name="down"),
        make("Add", ["c2", "d"], ["s"], name="add"),
        make("Relu", ["s"], ["r2"], name="relu2"),
        make("Conv", ["r2", "w3"], ["c3"], name="conv3", strides=[2, 2], **same),
        make("HardSwish", ["c3"], ["h"], name="swish"),
        make("Conv", ["h", "w4"], ["c4"], name="conv4"),
        make("GlobalAveragePool", ["c4"], ["m"], name="mean"),
        make("Flatten", ["m"], ["f"], name="flatten"),
        make("Gemm", ["f", "w5", "b5"], ["logits"], name="head", transB=1),
    ]
    weights = {
        "w0": weight(24, 3, 3, 3), "w1": weight(40, 24, 3, 3), "w2": weight(20, 40, 3, 3), "wd": weight(20, 24, 1, 1),
        "w3": weight(26, 20, 3, 3), "w4": weight(72, 26, 1, 1), "w5": weight(10, 72), "b5": weight(10),
    }  # fmt: skip
    return make_model(nodes, weights)


def varied_network():
    """Kernels of one row and of one column, a dilated one, groups, and a stride padded on two sides."""
    make, rng = helper.make_node, np.random.default_rng(19)

    def weight(*shape):
        return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    nodes = [
        make("Conv", ["image", "w0"], ["c0"], name="first", pads=[1, 1, 1, 1]),
        make("Conv", ["c0", "w1"], ["c1"], name="row", pads=[0, 3, 0, 3]),
        make("Conv", ["c1", "w2"], ["c2"], name="column", pads=[3, 0, 3, 0]),
        make("Relu", ["c2"], ["r2"], name="relu2"),
        make("Conv", ["r2", "w3"], ["c3"], name="dilated", pads=[2, 2, 2, 2], dilations=[2, 2]),
        make("Conv", ["c3", "w4"], ["c4"], name="grouped", pads=[1, 1, 1, 1], group=4),
        make("Conv", ["c4", "w8"], ["c8"], name="odd", group=4),
        make("Conv", ["c8", "w5"], ["c5"], name="strided", pads=[0, 0, 1, 1], strides=[2, 2]),
        make("Conv", ["c5", "w6"], ["c6"], name="border", pads=[1, 1, 1, 1]),
        make("GlobalAveragePool", ["c6"], ["m"], name="mean"),
        make("Flatten", ["m"], ["f"], name="flatten"),
        make("Gemm", ["f", "w7", "b7"], ["logits"], name="head", transB=1),
    ]
    weights = {
        "w0": weight(32, 3, 3, 3), "w1": weight(48, 32, 1, 7), "w2": weight(32, 48, 7, 1), "w3": weight(64, 32, 3, 3),
        "w4": weight(128, 16, 3, 3), "w8": weight(96, 32, 1, 1), "w5": weight(32, 96, 3, 3), "w6": weight(64, 32, 1, 1),
        "w7": weight(10, 64), "b7": weight(10),
    }  # fmt: skip
    return make_model(nodes, weights)


def sequence_network():
    """Convolutions over a sequence: of the input itself, wide ones with a stride, and one of odd width."""
    make, rng = helper.make_node, np.random.default_rng(23)

    def weight(*shape):
        return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    nodes = [
        make("Reshape", ["image", "samples"], ["s"], name="samples"),
        make("Conv", ["s", "w0"], ["c0"], name="first", strides=[2], pads=[1, 1]),
        make("Conv", ["c0", "w1"], ["c1"], name="wide", strides=[2], pads=[0, 1]),
        make("Relu", ["c1"], ["r1"], name="relu"),
        make("Conv", ["r1", "w2"], ["c2"], name="odd", dilations=[2]),
        make("Gelu", ["c2"], ["g2"], name="gelu"),
        make("Conv", ["g2", "w3"], ["c3"], name="last"),
        make("ReduceMean", ["c3", "axis"], ["logits"], name="mean", keepdims=0),
    ]
    weights = {
        "samples": np.array([0, 3, 1024]), "w0": weight(32, 3, 3), "w1": weight(64, 32, 3), "w2": weight(26, 64, 3),
        "w3": weight(10, 26, 1), "axis": np.array([2]),
    }  # fmt: skip
    return make_model(nodes, weights)


def token_network():
    """Patches as tokens, layer normalization, a hidden layer with a bias and GELU, one of 10 features, and the mean over tokens."""
    make, rng = helper.make_node, np.random.default_rng(13)

    def weight(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    nodes = [
        make("Reshape", ["image", "tokens"], ["t"], name="tokens"),
        make("LayerNormalization", ["t", "gamma", "beta"], ["n"], name="norm"),
        make("MatMul", ["n", "w1"], ["p1"], name="up"),
        make("Add", ["b1", "p1"], ["h1"], name="bias1"),
        make("Gelu", ["h1"], ["g"], name="gelu"),
        make("MatMul", ["g", "w2"], ["p2"], name="down"),
        make("Add", ["p2", "b2"], ["h2"], name="bias2"),
        make("Relu", ["h2"], ["r"], name="relu"),
        make("Transpose", ["r"], ["c"], name="transpose", perm=[0, 2, 1]),
        make("MatMul", ["c", "w3"], ["p3"], name="mix"),
        make("ReduceMean", ["p3", "axis"], ["logits"], name="mean", keepdims=0),
    ]
    weights = {
        "tokens": np.array([0, 32, 96]), "gamma": 1 + weight(96), "beta": weight(96), "w1": weight(96, 64), "b1": weight(64),
        "w2": weight(64, 10), "b2": weight(10), "w3": weight(32, 32), "axis": np.array([2]),
    }  # fmt: skip
    return make_model(nodes, weights)


def smooth_network(kind, depthwise=False):
    """The layer `wide`, SiLU or HardSwish, and the layer `second`; with `depthwise` a depthwise layer and the same between."""
    make, rng = helper.make_node, np.random.default_rng(17)

    def weight(*shape):
        return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    def bend(given, output):
        if kind == "HardSwish":
            return [make("HardSwish", [given], [output], name=f"bend_{given}")]
        gate = make("Sigmoid", [given], [f"{given}_gate"], name=f"gate_{given}")
        return [gate, make("Mul", [f"{given}_gate", given], [output], name=f"bend_{given}")]

    between = [make("Conv", ["b", "w4", "b3"], ["d"], name="deep", group=32, pads=[1, 1, 1, 1]), *bend("d", "a")]
    nodes = [
        make("Conv", ["image", "w0", "b0"], ["c0"], name="first", pads=[1, 1, 1, 1]),
        make("Conv", ["c0", "w3", "b3"], ["w"], name="wide"),
        *(bend("w", "b") + between if depthwise else bend("w", "a")),
        make("Conv", ["a", "w1"], ["c1"], name="second", pads=[1, 1, 1, 1]),
        make("GlobalAveragePool", ["c1"], ["m"], name="mean"),
        make("Flatten", ["m"], ["f"], name="flatten"),
        make("Gemm", ["f", "w2", "b2"], ["logits"], name="head", transB=1),
    ]
    weights = {
        "w0": weight(32, 3, 3, 3), "b0": weight(32), "w1": weight(64, 32, 3, 3), "w2": weight(10, 64), "b2": weight(10),
        "w3": weight(32, 32, 1, 1), "b3": weight(32), "w4": weight(32, 1, 3, 3),
    }  # fmt: skip
    return make_model(nodes, weights)


def gated_network(gate="HardSigmoid", alpha=1 / 6):
    """A stem that ends in HardSwish and stays in floating point, a depthwise layer, and a gate from its mean before `second`."""
    make, rng = helper.make_node, np.random.default_rng(23)

    def weight(*shape):
        return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    slope = {"alpha": alpha} if gate == "HardSigmoid" else {}
    nodes = [
        make("Conv", ["image", "w0", "b0"], ["c0"], name="first", strides=[2, 2], pads=[1, 1, 1, 1]),
        make("HardSwish", ["c0"], ["a"], name="bend"),
        make("Conv", ["a", "w1", "b0"], ["d"], name="deep", group=32, pads=[1, 1, 1, 1]),
        make("Conv", ["a", "w2", "b3"], ["t"], name="wide"),
        make("GlobalAveragePool", ["t"], ["m"], name="squeeze"),
        make("Conv", ["m", "w3", "b4"], ["s"], name="reduce"),
        make("Relu", ["s"], ["r"], name="bend_reduce"),
        make("Conv", ["r", "w4", "b3"], ["e"], name="expand"),
        make(gate, ["e"], ["g"], name="gate", **slope),
        make("Mul", ["g", "t"], ["p"], name="product"),
        make("Conv", ["p", "w5"], ["c1"], name="second"),
        make("Conv", ["d", "w6"], ["c2"], name="third"),
        make("Add", ["c1", "c2"], ["c3"], name="sum"),
        make("GlobalAveragePool", ["c3"], ["q"], name="mean"),
        make("Flatten", ["q"], ["f"], name="flatten"),
        make("Gemm", ["f", "w7", "b7"], ["logits"], name="head", transB=1),
    ]
    weights = {
        "w0": weight(32, 3, 3, 3), "b0": weight(32), "w1": weight(32, 1, 3, 3), "w2": weight(40, 32, 1, 1),
        "b3": weight(40), "w3": weight(16, 40, 1, 1), "b4": weight(16), "w4": weight(40, 16, 1, 1),
        "w5": weight(64, 40, 1, 1), "w6": weight(64, 32, 1, 1), "w7": weight(10, 64), "b7": weight(10),
    }  # fmt: skip
    return make_model(nodes, weights)


def make_model(nodes, weights):
    """A classifier of 32x32 pixels into 10 classes."""
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, ["n", 3, 32, 32])],
        [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["n", 10])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def quantize(model, keep=()):
    """The Q/DQ graph for a GPU, its ranges wide enough for normal inputs."""
    placed = place_qdq(model, "tensorrt", keep.__contains__)
    return qdq_from_onnx(model, placed, dict.fromkeys(placed.tensors, ActivationRange(6.0)))


def lower(model):
    inputs = (InputSpec("image", "float32", (1, 3, 32, 32), (4, 3, 32, 32), (8, 3, 32, 32)),)
    return lower_graph(model, infer_graph_types(name_nodes(model), inputs))
