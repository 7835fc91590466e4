"""Files of a newer onnx package than the runtime, and inputs that no output depends on, of every type."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.fakes.graphs import onnx_model

from optpipe.backends.plain_session import PlainSession
from optpipe.core.card import card_from_file
from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.models.export.exported import Model, compute_reference, export_model
from optpipe.models.sources.onnx_file import OnnxFileSource, onnx_from_file
from optpipe.workspace.file_names import CARD
from optpipe.workspace.store import Store

X, Y = {"x": [2, 3]}, {"y": [2, 3]}
ONES = np.ones((2, 3), np.float32)
RELU = [("Relu", "x", "y")]
TYPES = (
    "DOUBLE", "FLOAT8E4M3FN", "FLOAT8E5M2FNUZ", "FLOAT4E2M1", "BFLOAT16", "FLOAT16", "UINT16",
    "UINT64", "INT4", "UINT2", "STRING", "BOOL",
)  # fmt: skip


def save(path, *, ir=9, opset=17, inputs=X):
    model = onnx_model(RELU, inputs, Y, opset=opset)
    model.ir_version = ir
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("opsets", [{"": 27}, {"": 28}, {"": 18, "ai.onnx.ml": 6}])
def test_an_opset_that_the_runtime_lacks_is_refused_with_the_newest(tmp_path, opsets) -> None:
    with pytest.raises(BadInputError, match=r"runs up to opset \d+\nexport the model") as refused:
        onnx_from_file(save(tmp_path / "net.onnx", opset=opsets, ir=13))
    assert str(refused.value).startswith(
        f"{tmp_path / 'net.onnx'} is opset {max(opsets.values()) if len(opsets) == 1 else 6}"
    )


def test_a_file_in_a_newer_format_is_run_as_it_is(tmp_path) -> None:
    path = save(tmp_path / "net.onnx", ir=onnx.IR_VERSION)
    for given in (path, path.read_bytes(), onnx.load(path)):
        with PlainSession(given) as session:
            assert np.array_equal(session.run({"x": ONES})["y"], ONES)
    model = Model(OnnxFileSource(path), WeightsRequest())
    store, listener = Store(tmp_path / "work"), SilentListener()
    entry, _ = export_model(model, store, listener)
    compute_reference(model, entry, None, store, listener)


@pytest.mark.parametrize("kind", TYPES)
def test_an_unread_input_of_any_type_needs_no_value(kind) -> None:
    model = onnx_model(RELU, {**X, "u": (kind, ["k", 3])}, Y, opset=25)
    model.ir_version = 13
    with PlainSession(model) as session:
        assert np.array_equal(session.run({"x": ONES})["y"], ONES)


@pytest.mark.parametrize("make", [helper.make_sequence_type_proto, helper.make_optional_type_proto])
def test_an_unread_sequence_or_optional_needs_no_value(make) -> None:
    model = onnx_model(RELU, X, Y)
    kind = make(helper.make_tensor_type_proto(TensorProto.FLOAT, [2, 3]))
    model.graph.input.append(helper.make_value_info("u", kind))
    with PlainSession(model) as session:
        assert np.array_equal(session.run({"x": ONES})["y"], ONES)


def test_a_shape_for_an_unread_input_has_no_effect(tmp_path) -> None:
    path = save(tmp_path / "net.onnx", inputs={**X, "u": ["k", 3]})
    shapes = {"u": ((1, 3), (2, 3), (4, 3))}
    model = Model(OnnxFileSource(path, shapes=shapes), WeightsRequest(), shapes=shapes)
    listener = SilentListener()
    entry, _ = export_model(model, Store(tmp_path / "work"), listener)
    assert [each.name for each in card_from_file(entry.file(CARD)).inputs] == ["x"]
    assert any("no output depends on input 'u'" in each for each in listener.warnings)

    unknown = {"v": ((1, 3),) * 3}
    with pytest.raises(BadInputError, match="unknown input 'v'"):
        Model(OnnxFileSource(path, shapes=unknown), WeightsRequest(), shapes=unknown).load()


@pytest.mark.parametrize("kind", ["FLOAT8E4M3FN", "FLOAT8E5M2FNUZ", "INT4", "UINT4", "UINT2"])
def test_an_output_of_a_type_that_numpy_lacks_is_refused(tmp_path, kind) -> None:
    nodes = [("Cast", "x", "y", {"to": getattr(TensorProto, kind)})]
    model = onnx_model(nodes, X, {"y": (kind, [2, 3])}, opset=25)
    onnx.save(model, tmp_path / "net.onnx")
    with pytest.raises(BadInputError, match="which NumPy lacks\ncast it"):
        onnx_from_file(tmp_path / "net.onnx")
