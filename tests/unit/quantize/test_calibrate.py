"""Calibration: the data that it takes, and what is done with a table."""

import json

import numpy as np
import onnx
import pytest
from tests.fakes.console import assert_golden, text_of
from tests.fakes.entries import HASH, put

from optpipe.core.card import InputSpec, ModelCard, Task, TensorSpec
from optpipe.core.entries import ModelInfo, SampleSetSummary, SkippedLayer, WeightsRecord
from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.core.precision import PrecisionCost
from optpipe.core.transform import Decode, Pack, Transform
from optpipe.models.inputs.tensor_set import tensor_set_from_parts
from optpipe.quantize.calibrated_graph import (
    CalibrationResult,
    calibrate_model,
    document_from_calibration,
    graph_from_table,
    hold_out,
    resolve_data,
    tables_from_entry,
)
from optpipe.quantize.ranges import CalibrationTable, TensorRange
from optpipe.quantize.sensitivity import LayerCost, MethodsInfo, SensitivityInfo
from optpipe.workspace.file_names import CARD, ONNX
from optpipe.workspace.store import Store

TRANSFORM = Transform((Decode(), Pack(dtype="float32")))


@pytest.fixture
def export(residual_model, tmp_path):
    """Stores the small network as an exported model that takes images by a transform, or tensors."""

    def stored(transform=None):
        card = ModelCard(
            "net",
            "net.onnx",
            Task.OTHER,
            (InputSpec("x", "float32", (1, 16, 8, 8), (4, 16, 8, 8), (16, 16, 8, 8)),),
            outputs=(TensorSpec("y", "float32", ("n", 16, 8, 8)),),
            transform=transform,
        )

        info = ModelInfo(
            "net",
            "net.onnx",
            WeightsRecord("embedded", "0" * 64),
            simplified=True,
            own_precision=None,
        )
        files = {
            ONNX: residual_model.SerializeToString(),
            CARD: json.dumps(card.to_dict()).encode(),
        }
        return put(store, info, {"model": card.to_dict()}, files=files)

    store = Store(tmp_path / "workspace")
    return stored, store


def table_of(model, transform_sha256, **changes):
    nodes = onnx.load(model.file(ONNX)).graph.node
    return CalibrationTable(
        method="max",
        model="net",
        graph_sha256=model.sha256(ONNX),
        transform_sha256=transform_sha256,
        set=SampleSetSummary("images", "0" * 64, 8, 0),
        ranges={
            name: TensorRange(2.0, -1.0, 2.0)
            for node in nodes
            for name in (*node.input, *node.output)
        },
        **changes,
    )


@pytest.mark.parametrize(
    ("own", "of_table", "refused"),
    [
        (TRANSFORM, TRANSFORM.hash, False),
        (TRANSFORM, "0" * 64, True),
        (TRANSFORM, None, False),
        (None, "0" * 64, False),
    ],
)
def test_a_table_that_was_made_with_other_preprocessing_is_refused(export, own, of_table, refused):
    stored, store = export
    model = stored(own)
    table = table_of(model, of_table)
    if refused:
        with pytest.raises(
            BadInputError,
            match="made for different preprocessing than net's; pass the calibration data",
        ):
            graph_from_table(model, table, "cpu", (), store, SilentListener())
    else:
        graph, _ = graph_from_table(model, table, "cpu", (), store, SilentListener())
        assert graph.info.int8_layers


TENSORS = ModelCard(
    "net", "net.onnx", Task.OTHER, (InputSpec("x", "float32", (1, 3), (2, 3), (8, 3)),)
)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("data.py", "x = []", "has no CALIBRATION"),
        ("data.json", '{"a": [1', "holds no inputs of net"),
        ("nan.npz", np.full((2, 3), np.nan, np.float32), "'x' contains NaN or Inf"),
    ],
)
def test_what_does_not_fit_is_said(tmp_path, name, content, said) -> None:
    if isinstance(content, str):
        (tmp_path / name).write_text(content)
    else:
        np.savez(tmp_path / name, x=content)
    with pytest.raises(BadInputError, match=said):
        resolve_data(tmp_path / name, TENSORS, None, Store(tmp_path / "workspace"), calibrates=True)


def test_a_calibration():
    cost, constant = PrecisionCost(24.31, 0.0125, (0.004, 0.021)), PrecisionCost(200.0)
    found = CalibrationResult(
        model="digits",
        model_id="m",
        weights=WeightsRecord("file", HASH),
        set=SampleSetSummary("digits/calibration", HASH, 500, 0),
        kind="images",
        set_path="/w/set.json",
        unreadable=(),
        target="tensorrt",
        tables={"max": "/w/max.json", "mse": "/w/mse.json"},
        compared=MethodsInfo(128, {"max": constant, "mse": cost}, "mse"),
        skipped=tuple(
            SkippedLayer(f"conv{index}", "fewer than 16 channels") for index in range(14)
        ),
        sensitivity=SensitivityInfo(128, (LayerCost("conv1", cost, 1_200_000),), 10_000_000),
    )
    assert_golden(text_of(document_from_calibration(found)), "calibrate.txt")


@pytest.mark.parametrize(
    ("count", "methods", "apart"),
    [(256, ("max", "mse"), True), (255, ("max", "mse"), False), (256, ("max",), False)],
)
def test_ranges_come_from_other_samples_than_the_choice_if_there_are_enough(
    export, count, methods, apart
) -> None:
    stored, store = export
    rows = np.random.default_rng(0).standard_normal((count, 16, 8, 8)).astype(np.float32)
    drawn = hold_out(tensor_set_from_parts("rows", [{"x": rows}]), methods)[1]
    rows[[int(each.path.partition(":")[2]) for each in drawn.files]] *= 100
    samples = tensor_set_from_parts("rows", [{"x": rows}])
    ranged, judge = hold_out(samples, methods)
    assert (len(ranged.files), len(judge.files)) == (count - 64 * apart, 64)
    entry, _ = calibrate_model(stored(), samples, methods, ("cpu",), store, SilentListener())
    assert (tables_from_entry(entry)["max"].ranges["x"].high < 100) == apart
