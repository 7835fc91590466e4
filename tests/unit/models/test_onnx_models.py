"""ONNX models as others make them, from the file to a verified build: states, single values, half precision, quantized."""

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from tests.fakes.graphs import onnx_model

from optpipe.backends.onnxruntime import OnnxRuntime
from optpipe.build.build import build_model
from optpipe.build.plan import BuildPlan
from optpipe.core.card import card_from_file
from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import BadInputError, GateError
from optpipe.core.events import SilentListener
from optpipe.core.precision import Precision
from optpipe.models.export.exported import (
    Model,
    compute_reference,
    export_model,
    reference_from_file,
)
from optpipe.models.sources.onnx_file import OnnxFileSource
from optpipe.quantize.calibrated_graph import calibrate_model, load_calibration_data
from optpipe.workspace.file_names import CARD, ONNX, REFERENCE
from optpipe.workspace.store import Store

RANDOM = np.random.default_rng(0)


def saved(folder, nodes, inputs, outputs, **constants):
    onnx_model(nodes, inputs, outputs, path=folder / "net.onnx", **constants)
    return folder / "net.onnx"


def normal(*shape, dtype=np.float32):
    return RANDOM.standard_normal(shape).astype(dtype)


def recurrent(folder, batch="batch", out="batch"):
    """x (batch, 6), the state (2, batch, 4) and a rate: what voice detectors look like."""
    nodes = [
        ("Unsqueeze", "x first", "steps"),
        ("Gather", "state zero", "h", {"axis": 0}),
        ("Gather", "state one", "c", {"axis": 0}),
        ("Unsqueeze", "h first", "h0"),
        ("Unsqueeze", "c first", "c0"),
        ("LSTM", ["steps", "w", "r", "", "", "h0", "c0"], "all hn cn", {"hidden_size": 4}),
        ("Concat", "hn cn", "next", {"axis": 0}),
        ("Squeeze", "hn first", "last"),
        ("Cast", "rate", "speed", {"to": TensorProto.FLOAT}),
        ("Mul", "last speed", "y"),
    ]
    inputs = {"x": ("FLOAT", [batch, 6]), "state": ("FLOAT", [2, batch, 4]), "rate": ("INT64", [])}
    outputs = {"y": ("FLOAT", [out, 4]), "next": ("FLOAT", [2, out, 4])}
    constants = {"first": [0], "zero": 0, "one": 1, "w": normal(1, 16, 6), "r": normal(1, 16, 4)}
    return saved(folder, nodes, inputs, outputs, **constants)


def exported(path, folder, images=None):
    model, store = Model(OnnxFileSource(path), WeightsRequest()), Store(folder / ".optpipe")
    entry, _ = export_model(model, store, SilentListener())
    return entry, compute_reference(model, entry, images, store, SilentListener())[0], store


@pytest.mark.parametrize(("batch", "out"), [("batch", "batch"), ("?", "?"), ("N", None), (1, 1)])
def test_a_state_whose_batch_is_not_the_first_axis(tmp_path, batch, out) -> None:
    entry, found, _ = exported(recurrent(tmp_path, batch, out), tmp_path)
    card = card_from_file(entry.file(CARD))
    assert [each.batch for each in card.inputs] == [0, 1, None]
    assert [each.batch for each in card.outputs] == [0, 1]
    tensors = reference_from_file(found.file(REFERENCE))
    count = len(tensors.inputs["x"])
    assert {name: value.shape for name, value in tensors.outputs.items()} == {
        "y": (count, 4),
        "next": (count, 2, 4),
    }


def plan(*precisions, calibration=None, images=None):
    return BuildPlan(
        precisions,
        (OnnxRuntime(),),
        named=True,
        device="cpu",
        calibration=calibration,
        images=images,
    )


def built(path, folder, *precisions, **more):
    model = Model(OnnxFileSource(path), WeightsRequest())
    return build_model(
        model,
        plan(*map(Precision, precisions), **more),
        Store(folder / ".optpipe"),
        SilentListener(),
    )


def outcome(found):
    return [
        (each.entry.info.precision_proof.proven, each.verification.info.passed)
        for each in found.artifacts
    ]


def test_it_is_built_verified_and_calibrated_on_tensors(tmp_path) -> None:
    tensors = {"x": normal(40, 6), "state": np.zeros((2, 40, 4), np.float32), "rate": np.array(3)}
    np.savez(tmp_path / "data.npz", **tensors)
    found = built(recurrent(tmp_path), tmp_path, "fp32", images=tmp_path / "data.npz")
    assert outcome(found) == [(True, True)]
    assert found.artifacts[0].entry.info.precision_proof.share.total_macs == 8 * 16 * (6 + 4)
    assert found.artifacts[0].verification.info.samples == 40


def product(folder, **more):
    """x (batch, 32) through two products."""
    nodes = [("MatMul", "x v", "h"), ("Relu", "h", "a"), ("MatMul", "a w", "y")]
    constants = {"v": normal(32, 64), "w": normal(64, 16), **more}
    return saved(folder, nodes, {"x": ["batch", 32]}, {"y": ["batch", 16]}, **constants)


def beside_constant(folder, axis):
    """x (axis, 32) to a sum over its first axis where that is no batch, a product, and anchors that no input changes."""
    nodes: list[Any] = [("MatMul", "x v", "y"), ("Mul", "grid two", "anchors")]
    outputs = {"anchors": [20, 2], "y": [axis, 64]}
    if axis == "time":
        nodes.append(("ReduceSum", "y zero", "sum", {"keepdims": 0}))
        outputs = {"sum": [64], **outputs}
    constants = {
        "v": normal(32, 64),
        "grid": normal(20, 2),
        "two": np.array(2, np.float32),
        "zero": np.array([0]),
    }
    return saved(folder, nodes, {"x": [axis, 32]}, outputs, **constants)


@pytest.mark.parametrize("axis", ["batch", 4, "time"])
def test_outputs_whose_size_no_batch_changes(tmp_path, axis) -> None:
    shapes = {"x": ((12, 32),) * 3} if axis == "time" else {}
    np.savez(tmp_path / "data.npz", x=normal(12, 32))
    model = Model(OnnxFileSource(beside_constant(tmp_path, axis), shapes=shapes), WeightsRequest())
    found = build_model(
        model,
        plan(
            Precision.FP32,
            Precision.INT8,
            calibration=tmp_path / "data.npz",
            images=tmp_path / "data.npz",
        ),
        Store(tmp_path / ".optpipe"),
        SilentListener(),
    )
    assert outcome(found) == [(True, True)] * 2


@pytest.mark.slow
def test_int8_around_branches_that_read_weights(tmp_path) -> None:
    def branch(operator):
        output = helper.make_tensor_value_info(operator, TensorProto.FLOAT, ["batch", 64])
        return helper.make_graph(
            [helper.make_node(operator, ["h", "s"], [operator])], operator, [], [output]
        )

    nodes: list[Any] = [
        ("MatMul", "x v", "h"),
        ("ReduceMax", "x", "most", {"keepdims": 0}),
        ("Greater", "most limit", "large"),
        ("If", "large", "a", {"then_branch": branch("Mul"), "else_branch": branch("Add")}),
        ("MatMul", "a w", "y"),
    ]
    constants = {
        "v": normal(32, 64),
        "w": normal(64, 16),
        "s": normal(64),
        "limit": np.array(-100, np.float32),
    }
    path = saved(tmp_path, nodes, {"x": ["batch", 32]}, {"y": ["batch", 16]}, **constants)
    np.savez(tmp_path / "data.npz", x=normal(60, 32))
    assert outcome(built(path, tmp_path, "int8", calibration=tmp_path / "data.npz")) == [
        (True, True)
    ]


def test_a_graph_that_depends_on_the_batch_size_is_built_for_one(tmp_path) -> None:
    nodes = [
        ("Shape", "x", "s"),
        ("Gather", "s zero", "n"),
        ("Cast", "n", "f", {"to": TensorProto.FLOAT}),
        ("Mul", "x f", "y"),
    ]
    path = saved(tmp_path, nodes, {"x": ["batch", 6]}, {"y": ["batch", 6]}, zero=0)
    with pytest.raises(GateError, match=r"at batch size 1: .*\n.*build it for one: --batch N"):
        exported(path, tmp_path)


def test_without_calibration_data_fp32_is_built_alone(tmp_path) -> None:
    found = built(branching(tmp_path), tmp_path, "fp32", "int8")
    assert [each.entry.info.precision for each in found.artifacts] == [Precision.FP32]
    assert "INT8 needs real inputs" in found.failed[0].reason


def test_without_calibration_data_nothing_is_exported(tmp_path) -> None:
    with pytest.raises(
        BadInputError, match=r"calibrate net on: give a .npz with an array per input"
    ):
        built(product(tmp_path), tmp_path, "int8")
    assert not list((tmp_path / ".optpipe").glob("store/model-*"))


def test_calibration_data_of_another_model_is_refused_before_the_export(tmp_path) -> None:
    np.savez(tmp_path / "data.npz", x=normal(60, 31))
    with pytest.raises(BadInputError, match="'x' is 60x31, and the model takes"):
        built(product(tmp_path), tmp_path, "int8", calibration=tmp_path / "data.npz")
    assert not list((tmp_path / ".optpipe").glob("store/model-*"))


def quantized(folder, dynamic=False):
    """`product`, quantized by ONNX Runtime's own tool."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        quantize_dynamic,
        quantize_static,
    )

    class Reader(CalibrationDataReader):
        left = iter([{"x": normal(16, 32)} for _ in range(4)])

        def get_next(self):
            return next(self.left, None)

    (folder / "float").mkdir()
    path, target = product(folder / "float"), folder / "net.onnx"
    if dynamic:
        quantize_dynamic(path, target)
    else:
        quantize_static(path, target, Reader(), quant_format=QuantFormat.QDQ)
    return target


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_model_that_is_quantized_already_is_built_as_it_is(tmp_path, dynamic) -> None:
    path = quantized(tmp_path, dynamic)
    found = built(path, tmp_path, "int8", "fp16" if dynamic else "fp32")
    assert outcome(found)[0] == (True, True)
    assert found.artifacts[0].entry.info.precision_proof.share.macs == {"int8": 1.0}
    tensors = reference_from_file(exported(path, tmp_path)[1].file(REFERENCE))
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    expected = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(
        None, tensors.inputs
    )[0]
    assert np.square(tensors.outputs["y"] - expected).sum() < 1e-4 * np.square(expected).sum()


def half(folder):
    """FP16 throughout, inputs and outputs too."""
    inputs, outputs = {"x": ("FLOAT16", ["batch", 32])}, {"y": ("FLOAT16", ["batch", 64])}
    nodes = [("MatMul", "x v", "h"), ("Relu", "h", "y")]
    return saved(folder, nodes, inputs, outputs, v=normal(32, 64, dtype=np.float16))


def test_half_precision_is_kept_and_becomes_nothing_else(tmp_path) -> None:
    from optpipe.quantize.precision_graph import convert_to_precision

    entry, found, store = exported(half(tmp_path), tmp_path)
    kept, _ = convert_to_precision(
        Precision.FP16, "cuda", entry, found, None, store, SilentListener()
    )
    for precision in (Precision.FP32, Precision.INT8):
        with pytest.raises(
            BadInputError, match=f"built in fp16 alone; give the model in fp32 for {precision}"
        ):
            convert_to_precision(precision, "cpu", entry, found, None, store, SilentListener())
    assert kept is entry


def test_a_quantized_model_cannot_become_fp16(tmp_path) -> None:
    from optpipe.quantize.precision_graph import convert_to_precision

    entry, found, store = exported(quantized(tmp_path), tmp_path)
    with pytest.raises(
        BadInputError,
        match=r"net is quantized to int8 already .*\n--precision int8 builds it as it is",
    ):
        convert_to_precision(Precision.FP16, "cuda", entry, found, None, store, SilentListener())
    assert found.info.origin == "the file as given, on ONNX Runtime without optimizations"
    np.savez(tmp_path / "tensors.npz", x=normal(16, 32))
    data, _ = load_calibration_data(entry, tmp_path / "tensors.npz", None, 0, SilentListener())
    with pytest.raises(
        BadInputError, match="net is quantized already; `optpipe build` with --precision int8"
    ):
        calibrate_model(entry, data, ("max",), ("cpu",), store, SilentListener())
    folded, _ = convert_to_precision(
        Precision.INT8, "cuda", entry, found, None, store, SilentListener()
    )
    assert TensorProto.INT32 not in {
        each.data_type for each in onnx.load(folded.file(ONNX)).graph.initializer
    }


def test_a_product_behind_an_operator_of_the_runtime_counts(tmp_path) -> None:
    """ONNX Runtime fuses x·sigmoid(x) into an operator of its own, behind which ONNX infers no shapes."""
    nodes = [
        ("MatMul", "x v", "h"),
        ("Sigmoid", "h", "s"),
        ("Mul", "h s", "a"),
        ("MatMul", "a w", "y"),
    ]
    path = saved(
        tmp_path,
        nodes,
        {"x": ["batch", 32]},
        {"y": ["batch", 16]},
        v=normal(32, 64),
        w=normal(64, 16),
    )
    found = built(path, tmp_path, "fp32")
    assert found.artifacts[0].entry.info.precision_proof.share.total_macs == 8 * 64 * (32 + 16)


def branching(folder, **constants):
    """An If over the sampling rate with the layers inside, and a state whose output has no shape: silero VAD."""

    def branch(name, scale):
        made = [
            helper.make_node("MatMul", ["x", "w"], [f"{name}_y"]),
            helper.make_node("Mul", ["state", scale], [f"{name}_next"]),
        ]
        outputs = [helper.make_empty_tensor_value_info(f"{name}_{each}") for each in ("y", "next")]
        return helper.make_graph(made, name, [], outputs)

    branches = {"then_branch": branch("wide", "two"), "else_branch": branch("narrow", "one")}
    nodes: list[Any] = [("Equal", "sr wide", "is_wide"), ("If", "is_wide", "y next", branches)]
    inputs = {
        "x": ("FLOAT", ["batch", 64]),
        "state": ("FLOAT", [2, "batch", 4]),
        "sr": ("INT64", []),
    }
    outputs = {"y": ("FLOAT", ["batch", 64]), "next": ("FLOAT", [None, None, None])}
    numbers = {
        "wide": np.array(16000),
        "one": normal(1),
        "two": normal(1),
        "w": normal(64, 64),
        **constants,
    }
    return saved(folder, nodes, inputs, outputs, **numbers)


def test_a_state_behind_an_if_has_its_own_axis_and_what_int8_leaves_out_is_said(tmp_path) -> None:
    rows = {"x": normal(32, 64), "state": normal(2, 32, 4), "sr": np.repeat([16000, 8000], 16)}
    np.savez(tmp_path / "rows.npz", **rows)
    found = built(branching(tmp_path), tmp_path, "fp32", "int8", calibration=tmp_path / "rows.npz")
    assert [each.batch for each in card_from_file(found.model.file(CARD)).outputs] == [0, 1]
    assert found.artifacts[0].verification.info.passed
    assert "inside If: subgraphs stay in floating point" in found.failed[0].reason


def test_an_input_that_is_compared_with_a_constant_is_drawn_as_that(tmp_path) -> None:
    _, found, _ = exported(branching(tmp_path), tmp_path)
    assert set(reference_from_file(found.file(REFERENCE)).inputs["sr"]) == {16000}


def test_a_loop_that_never_ends_is_refused_before_it_runs(tmp_path) -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", [a], [b]) for a, b in (("more", "again"), ("h", "next"))],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("more", TensorProto.BOOL, []),
            helper.make_tensor_value_info("h", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("again", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, None),
        ],
    )
    nodes: list[Any] = [("Loop", ["count", "", "x"], ["y"], {"body": body})]
    dims = ("FLOAT", ["n", 8])
    path = saved(tmp_path, nodes, {"x": dims}, {"y": dims}, count=np.array(2**40))
    with pytest.raises(BadInputError, match="a Loop in it runs 1099511627776 times"):
        Model(OnnxFileSource(path), WeightsRequest()).load()


def test_shapes_are_proposed_as_the_given_tensors_have_them(tmp_path) -> None:
    path = saved(
        tmp_path,
        [("Relu", ["x"], ["y"], {})],
        {"x": ("FLOAT", ["n", 3, "h", "w"])},
        {"y": ("FLOAT", ["n", 3, "h", "w"])},
    )
    np.savez(tmp_path / "rows.npz", x=normal(5, 3, 48, 320))
    with pytest.raises(BadInputError, match="--shape x=1x3x48x320:8x3x48x320:64x3x48x320"):
        built(path, tmp_path, "fp32", images=tmp_path / "rows.npz")


def test_an_output_whose_shape_depends_on_the_data_is_refused_by_that_shape(tmp_path) -> None:
    path = saved(
        tmp_path,
        [("NonZero", "x", "places")],
        {"x": ["batch", 8]},
        {"places": ("INT64", [2, "found"])},
    )
    np.savez(tmp_path / "rows.npz", x=np.tri(8, dtype=np.float32)[RANDOM.permutation(8)])
    said = r"the shape of output 'places' depends on the data: \(2, \d\) for one input, \(2, \d\) for another"
    with pytest.raises(BadInputError, match=said):
        built(path, tmp_path, "fp32", images=tmp_path / "rows.npz")
