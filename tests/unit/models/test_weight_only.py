"""Files of which only the weights are quantized: they compute in floating point, and are described as what they are."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.unit.models.test_onnx_models import built

from optpipe.backends.onnx_layers import layers_from_onnx
from optpipe.backends.onnx_quantized import find_own_precision
from optpipe.build.records import document_from_build, result_from_build
from optpipe.core.card import card_from_file
from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.core.precision import Precision
from optpipe.models.export.exported import Model, export_model
from optpipe.models.sources.onnx_file import OnnxFileSource
from optpipe.quantize.precision_graph import write_half_graph
from optpipe.workspace.file_names import CARD, ONNX
from optpipe.workspace.store import Store

WIDTH, OUT = 128, 64
RANDOM = np.random.default_rng(0)


def quantize_weights(kind, block):
    """Weights (WIDTH, OUT) of a type, their scales, and the attributes of their DequantizeLinear."""
    low, high = {TensorProto.INT4: (-8, 8), TensorProto.UINT4: (0, 16)}.get(kind, (-127, 128))
    values = RANDOM.integers(low, high, (WIDTH, OUT)).ravel().tolist()
    shape = (WIDTH // block, OUT) if block else (OUT,)
    scale = (RANDOM.random(shape) * 0.02 + 0.01).astype(np.float32)
    attributes = {"axis": 0, "block_size": block} if block else {"axis": 1}
    return helper.make_tensor("q", kind, [WIDTH, OUT], values), scale, attributes


def save_network(path, kind, block, *, operator="MatMul"):
    """x (batch, WIDTH) through a product with quantized weights and two with FP32 weights."""
    quantized, scale, attributes = quantize_weights(kind, block)
    weights = {
        "s": scale,
        "v": (RANDOM.standard_normal((OUT, WIDTH)) / 8).astype(np.float32),
        "w": (RANDOM.standard_normal((WIDTH, OUT)) / 8).astype(np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "v"], ["b"], name="second"),
        helper.make_node("DequantizeLinear", ["q", "s"], ["d"], name="dequantize", **attributes),
        helper.make_node(operator, ["b", "d"], ["y"], name="third"),
    ]
    ends = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])]
        for name, size in (("x", WIDTH), ("y", OUT))
    )
    stored = [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "net", *ends, [quantized, *stored])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return path


def save_nbits(path, **level):
    """x (batch, WIDTH) through a MatMulNBits of ONNX Runtime, a GELU of its, and a product."""
    weights = {
        "q": RANDOM.integers(0, 256, (OUT, WIDTH // 32, 16), dtype=np.uint8),
        "s": (RANDOM.random(OUT * WIDTH // 32) * 0.02 + 0.01).astype(np.float32),
        "w": (RANDOM.standard_normal((OUT, OUT)) / 8).astype(np.float32),
    }
    many = {"K": WIDTH, "N": OUT, "bits": 4, "block_size": 32, **level}
    domain = {"domain": "com.microsoft"}
    nodes = [
        helper.make_node("MatMulNBits", ["x", "q", "s"], ["a"], name="nbits", **many, **domain),
        helper.make_node("FastGelu", ["a"], ["g"], name="gelu", **domain),
        helper.make_node("MatMul", ["g", "w"], ["y"], name="last"),
    ]
    ends = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])]
        for name, size in (("x", WIDTH), ("y", OUT))
    )
    stored = [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()]
    opsets = [helper.make_opsetid("", 19), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "net", *ends, stored)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


def describe(found):
    return str(document_from_build(result_from_build(found, "default", ())))


FORMS = {
    "int4 by block": (TensorProto.INT4, 32, "MatMul", "int4 (block 32)"),
    "uint4 by block": (TensorProto.UINT4, 32, "MatMul", "int4 (block 32)"),
    "int8 by block": (TensorProto.INT8, 32, "Gemm", "int8 (block 32)"),
    "int8 by channel": (TensorProto.INT8, 0, "MatMul", "int8 (block 32)"),
}


@pytest.mark.parametrize("case", FORMS)
def test_dequantized_weights_are_multiplied_in_fp32(tmp_path, case) -> None:
    kind, block, operator, form = FORMS[case]
    path = save_network(tmp_path / "net.onnx", kind, block, operator=operator)
    assert find_own_precision(onnx.load(path)) is None
    found = built(path, tmp_path, "fp32")
    (artifact,) = found.artifacts
    proof, checked = artifact.entry.info.precision_proof, artifact.verification.info
    assert proof.proven
    assert proof.share.macs == {"fp32": 1.0}
    assert proof.share.total_macs == 8 * (2 * WIDTH * OUT + OUT * WIDTH)
    assert checked.snr_db is None or checked.snr_db > 100, "ONNX Runtime's default is 45 dB"
    (stored,) = proof.share.stored
    assert stored.type == "fp32"
    assert stored.form == form
    assert "computed in fp32" in describe(found)


@pytest.mark.parametrize("level", [{}, {"accuracy_level": 1}, {"accuracy_level": 4}], ids=str)
def test_a_product_with_4_bit_weights_is_counted(tmp_path, level) -> None:
    found = built(save_nbits(tmp_path / "net.onnx", **level), tmp_path, "fp32")
    (artifact,) = found.artifacts
    proof = artifact.entry.info.precision_proof
    assert proof.share.total_macs == 8 * (WIDTH * OUT + OUT * OUT)
    assert [each.form for each in proof.share.stored] == ["int4 (block 32)"]
    quantizes = level.get("accuracy_level") == 4
    assert proof.proven == (not quantizes)
    assert (artifact.shortfall is not None) == quantizes
    if quantizes:
        assert proof.share.macs["int8"] == pytest.approx(2 / 3)


def test_layers_with_4_bit_weights_stay_out_of_int8(tmp_path) -> None:
    path = save_network(tmp_path / "net.onnx", TensorProto.INT4, 32)
    np.savez(tmp_path / "data.npz", x=RANDOM.standard_normal((48, WIDTH)).astype(np.float32))
    found = built(path, tmp_path, "int8", calibration=tmp_path / "data.npz")
    (artifact,) = found.artifacts
    share = artifact.entry.info.precision_proof.share
    assert share.macs == pytest.approx({"int8": 2 / 3, "fp32": 1 / 3})
    assert any(each.layer == "third" and "int4" in each.reason for each in artifact.kept)
    assert artifact.verification.info.snr_db > 20


@pytest.mark.parametrize("case", [*FORMS, "an operator of ONNX Runtime"])
@pytest.mark.slow
def test_fp16_keeps_the_form_of_the_weights_or_says_what_it_cannot_convert(tmp_path, case) -> None:
    if case in FORMS:
        kind, block, operator, _ = FORMS[case]
        path = save_network(tmp_path / "net.onnx", kind, block, operator=operator)
    else:
        path = save_nbits(tmp_path / "net.onnx")
    model = Model(OnnxFileSource(path), WeightsRequest())
    exported, _ = export_model(model, Store(tmp_path / ".optpipe"), SilentListener())
    card, graph = card_from_file(exported.file(CARD)), onnx.load(exported.file(ONNX))
    rows = {"x": RANDOM.standard_normal((8, WIDTH)).astype(np.float32)}
    if case not in FORMS:
        with pytest.raises(
            BadInputError, match=r"com.microsoft.MatMulNBits is not an operator of ONNX\nexport"
        ):
            write_half_graph(Precision.FP16, graph, card, rows, tmp_path)
        return
    write_half_graph(Precision.FP16, graph, card, rows, tmp_path)
    layers = layers_from_onnx(onnx.load(tmp_path / ONNX), card.inputs)
    third = next(each for each in layers if each.name == "third")
    assert third.type == "fp16"
    assert third.stored.startswith(case.partition(" ")[0])
