"""What products of ONNX operators cost, against counts by hand; what nobody counts is unknown and never nothing."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.fakes.graphs import onnx_model

from optpipe.backends.onnx_layers import layers_from_onnx
from optpipe.backends.onnx_products import GraphTypes, count_node_macs
from optpipe.core.card import InputSpec
from optpipe.core.precision import UNATTRIBUTED

MICROSOFT = "com.microsoft"
COUNTED: dict[str, tuple[Any, ...]] = {
    "MatMul": ("MatMul", "", {"0": (2, 5, 8), "1": (8, 3), "y": (2, 5, 3)}, {}, 240),
    "FusedMatMul, transposed": ("FusedMatMul", MICROSOFT, {"0": (8, 5), "1": (8, 3), "y": (5, 3)}, {"transA": 1}, 120),
    "FusedMatMul, batch last": (
        "FusedMatMul", MICROSOFT, {"0": (8, 2, 5), "1": (2, 8, 3), "y": (2, 5, 3)}, {"transA": 1, "transBatchA": 1}, 240,
    ),
    "FusedConv": ("FusedConv", MICROSOFT, {"0": (1, 4, 6, 6), "1": (8, 2, 3, 3), "y": (1, 8, 4, 4)}, {"group": 2}, 8 * 16 * 18),
    "QLinearConv": ("QLinearConv", "", {"0": (1, 4, 6, 6), "3": (8, 4, 3, 3), "y": (1, 8, 4, 4)}, {}, 8 * 16 * 36),
    "QLinearConvTranspose": ("QLinearConvTranspose", "com.ms.internal.nhwc", {"0": (1, 6, 6, 4), "3": (4, 8, 3, 3)}, {}, 144 * 72),
    "MatMulNBits": ("MatMulNBits", MICROSOFT, {"0": (7, 64), "1": (16, 2, 16), "y": (7, 16)}, {"K": 64, "N": 16, "bits": 4}, 7 * 64 * 16),
    "LSTM": ("LSTM", "", {"0": (5, 2, 6), "1": (1, 16, 6), "2": (1, 16, 4)}, {"hidden_size": 4}, 10 * 160),
    "einsum of a product": ("Einsum", "", {"0": (2, 3, 4), "1": (2, 4, 5)}, {"equation": "bij,bjk->bik"}, 2 * 3 * 4 * 5),
    "einsum without a sum": ("Einsum", "", {"0": (2, 3), "1": (4,)}, {"equation": "ij,k->ijk"}, 0),
    "einsum of one factor": ("Einsum", "", {"0": (3, 3)}, {"equation": "ii->i"}, 0),
    "einsum of three": (
        "Einsum", "", {"0": (2, 3), "1": (3, 4), "2": (4, 5)}, {"equation": "ij,jk,kl->il"}, 2 * 3 * 4 + 2 * 4 * 5,
    ),
    "einsum, implicit": ("Einsum", "", {"0": (2, 3), "1": (3, 4)}, {"equation": "ij,jk"}, 24),
    "Attention of ONNX, 4-D": (
        "Attention", "", {"0": (2, 4, 5, 8), "1": (2, 2, 7, 8), "2": (2, 2, 7, 6), "y": (2, 4, 5, 6)}, {}, 2 * 4 * 5 * 7 * 14,
    ),
    "Attention of ONNX, 3-D with a past": (
        "Attention", "", {"0": (2, 5, 32), "1": (2, 7, 16), "2": (2, 7, 16), "3": (1,), "4": (2, 2, 3, 8), "y": (2, 5, 32)}, {},
        2 * 5 * 10 * 64,
    ),
    "Attention of ONNX Runtime": (
        "Attention", MICROSOFT, {"0": (2, 5, 8), "1": (8, 24), "y": (2, 5, 8)}, {"num_heads": 2}, 10 * 8 * 24 + 10 * 5 * 16,
    ),
    "MultiHeadAttention": (
        "MultiHeadAttention", MICROSOFT, {"0": (2, 5, 8), "1": (2, 7, 8), "2": (2, 7, 6), "y": (2, 5, 6)}, {"num_heads": 2}, 10 * 7 * 14,
    ),
    "MoE": (
        "MoE", MICROSOFT, {"0": (3, 8), "1": (3, 4), "2": (4, 16, 8), "3": (4, 16), "4": (4, 8, 16), "y": (3, 8)}, {"k": 2},
        3 * 2 * (128 + 128),
    ),
    "a GELU": ("FastGelu", MICROSOFT, {"0": (3, 8), "y": (3, 8)}, {}, 0),
    "unknown sizes": ("MatMul", "", {"0": (3, 8)}, {}, None),
    "an FFT": ("DFT", "", {"0": (3, 8, 1), "y": (3, 8, 2)}, {}, None),
    "a determinant": ("Det", "", {"0": (3, 8, 8), "y": (3,)}, {}, None),
    "an operator of a later release": ("Brandnew", "", {"0": (3, 8), "y": (3, 8)}, {}, None),
    "a contributed one of a later release": ("Brandnew", MICROSOFT, {"0": (3, 8), "y": (3, 8)}, {}, None),
    "another domain's MatMul": ("MatMul", "acme", {"0": (3, 8), "1": (8, 2), "y": (3, 2)}, {}, None),
    "another domain's Relu": ("Relu", "acme", {"0": (3, 8), "y": (3, 8)}, {}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", COUNTED)
def test_products_are_counted_or_unknown(case) -> None:
    operator, domain, shapes, attributes, macs = COUNTED[case]
    inputs = [name for name in map(str, range(9)) if name in shapes]
    last = int(inputs[-1])
    given = [str(at) if str(at) in shapes else f"open_{at}" for at in range(last + 1)]
    node = helper.make_node(operator, given, ["y"], domain=domain, **attributes)
    assert count_node_macs(node, GraphTypes({}, shapes)) == macs


def count(nodes, inputs, outputs, **constants):
    """The layers with products of a graph, by name: type, MACs, and form of the weights."""
    made = [
        helper.make_node(op, ins, outs, name=name, domain=domain, **more)
        for op, ins, outs, name, domain, more in nodes
    ]
    values = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    ends = [
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in side.items()
        ]
        for side in (inputs, outputs)
    ]
    domains = {domain for *_, domain, _ in nodes} | {""}
    opsets = [helper.make_opsetid(each, 21 if not each else 1) for each in sorted(domains)]
    model = helper.make_model(helper.make_graph(made, "net", *ends, values), opset_imports=opsets)
    specs = [
        InputSpec(name, "float32", tuple(shape), tuple(shape), tuple(shape))
        for name, shape in inputs.items()
    ]
    layers = layers_from_onnx(model, specs)
    return {each.name: (each.type, each.macs, each.stored) for each in layers if each.macs != 0}


def test_sizes_are_known_behind_operators_of_onnx_runtime() -> None:
    nodes = [
        ("MatMulNBits", ["x", "q", "s"], ["h"], "nbits", MICROSOFT, {"K": 64, "N": 16, "bits": 4, "block_size": 32}),
        ("FastGelu", ["h"], ["g"], "gelu", MICROSOFT, {}),
        ("SkipLayerNormalization", ["g", "h", "one"], ["n", "", "", "sum"], "norm", MICROSOFT, {}),
        ("FusedMatMul", ["sum", "w"], ["f"], "fused", MICROSOFT, {"transB": 1}),
        ("Add", ["n", "f"], ["a"], "add", "", {}),
        ("MatMul", ["a", "w"], ["y"], "last", "", {}),
    ]  # fmt: skip
    constants = {
        "q": np.zeros((16, 2, 16), np.uint8),
        "s": np.ones(32, np.float32),
        "one": np.ones(16, np.float32),
        "w": np.zeros((16, 16), np.float32),
    }
    found = count(nodes, {"x": [3, 64]}, {"y": [3, 16]}, **constants)
    assert found == {
        "nbits": ("fp32", 3 * 64 * 16, "int4 (block 32)"),
        "fused": ("fp32", 3 * 16 * 16, ""),
        "last": ("fp32", 3 * 16 * 16, ""),
    }


@pytest.mark.parametrize(
    ("level", "kind"),
    [({}, "fp32"), ({"accuracy_level": 1}, "fp32"), ({"accuracy_level": 4}, "int8")],
)
def test_a_level_that_quantizes_data_is_int8(level, kind) -> None:
    attributes = {"K": 64, "N": 16, "bits": 4, "block_size": 32, **level}
    nodes = [("MatMulNBits", ["x", "q", "s"], ["y"], "nbits", MICROSOFT, attributes)]
    constants = {"q": np.zeros((16, 2, 16), np.uint8), "s": np.ones(32, np.float32)}
    assert count(nodes, {"x": [3, 64]}, {"y": [3, 16]}, **constants)["nbits"][0] == kind


def test_an_operator_of_another_domain_is_unattributed() -> None:
    nodes = [("Mystery", ["x"], ["y"], "odd", "acme", {}), ("Pad", ["y"], ["z"], "pad", "acme", {})]
    assert count(nodes, {"x": [3, 8]}, {"z": [3, 8]}) == {
        "odd": (UNATTRIBUTED, None, ""),
        "pad": (UNATTRIBUTED, None, ""),
    }


def test_a_call_of_a_function_is_unattributed() -> None:
    body = [helper.make_node("MatMul", ["a", "b"], ["c"])]
    block = helper.make_function(
        "mine", "Relu", ["a", "b"], ["c"], body, [helper.make_opsetid("", 17)]
    )
    model = onnx_model([("Flatten", "x", "y")], {"x": [2, 3]}, {"y": [2, 3]})
    model.graph.node[0].op_type, model.graph.node[0].domain = "Relu", "mine"
    model.functions.append(block)
    model.opset_import.append(helper.make_opsetid("mine", 1))
    (layer,) = layers_from_onnx(model, [InputSpec("x", "float32", (2, 3), (2, 3), (2, 3))])
    assert (layer.type, layer.macs) == (UNATTRIBUTED, None)


@pytest.mark.parametrize(
    ("kind", "scale", "attributes", "form"),
    [
        (TensorProto.INT4, (2, 8), {"axis": 0, "block_size": 32}, "int4 (block 32)"),
        (TensorProto.UINT4, (2, 8), {"axis": 0, "block_size": 32}, "uint4 (block 32)"),
        (TensorProto.INT8, (8,), {"axis": 1}, "int8 (per channel)"),
        (TensorProto.INT8, (), {}, "int8 (per tensor)"),
        (TensorProto.FLOAT8E4M3FN, (), {}, "fp8 (per tensor)"),
        (TensorProto.FLOAT4E2M1, (2, 8), {"axis": 0, "block_size": 32}, "fp4 (block 32)"),
    ],
)
def test_weights_are_described_as_they_are_stored(kind, scale, attributes, form) -> None:
    from optpipe.backends.onnx_quantized import find_own_precision

    weight = helper.make_tensor("q", kind, [64, 8], [0] * 512)
    nodes = [
        ("DequantizeLinear", "q s", "w", attributes),
        ("Cast", "w", "c", {"to": 1}),
        ("MatMul", "x c", "y"),
    ]
    model = onnx_model(nodes, {"x": [3, 64]}, {"y": [3, 8]}, s=np.ones(scale, np.float32))
    model.graph.initializer.append(weight)
    model.opset_import[0].version = 23
    (layer,) = (
        each
        for each in layers_from_onnx(model, [InputSpec("x", "float32", (3, 64), (3, 64), (3, 64))])
        if each.macs
    )
    assert (layer.type, layer.macs, layer.stored) == ("fp32", 3 * 64 * 8, form)
    assert find_own_precision(model) is None, "its products are in floating point"
