"""A model made hard for INT8: one channel of one layer fires rarely, and then a thousand times higher than the others.

Its FP32 answers are those of `digits`. `max` spends all of its levels on the outliers; the other methods do not; and
with `max` the layer that reads them is found and spared.
"""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from optpipe.backends.tensorrt import TENSORRT_RTX
from optpipe.build.artifact import build_artifact
from optpipe.core.card import card_from_file
from optpipe.core.entries import ModelInfo, weights_from_text
from optpipe.core.events import SilentListener, finish_steps
from optpipe.core.precision import Budget, Precision
from optpipe.models.export.exported import Model, export_model
from optpipe.models.inputs.image_set import image_set_from_path
from optpipe.models.inputs.images import preprocess_batches
from optpipe.models.inputs.task_data import find_label_indices
from optpipe.models.sources.resolve import source_from_text
from optpipe.quantize.calibrated_graph import (
    CalibrationPlan,
    graph_from_table,
    load_calibration_data,
    run_calibration,
)
from optpipe.quantize.qdq import quantize_graph
from optpipe.quantize.ranges import read_table
from optpipe.quantize.sensitivity import lower_by_table, select_kept_layers
from optpipe.workspace.file_names import CARD, ONNX
from optpipe.workspace.places import find_shipped_folder
from optpipe.workspace.store import Store
from tests.integration.conftest import write_digits_card

METHODS = ("max", "percentile", "mse")
OUTLIERS = 1000.0


def named_model(name: str) -> Model:
    return Model(source_from_text(name, {}), weights_from_text("default", 0))


def outliers_planted(graph, images):
    """`graph` with a rare, huge channel between the two convolutions of its third residual block; and the reader's name."""
    convolutions = [node for node in graph.graph.node if node.op_type == "Conv"]
    writer = next(
        c
        for c in convolutions
        if list(weights_of(graph, c.input[1]).shape[:2]) == [32, 16]
        and weights_of(graph, c.input[1]).shape[2] == 3
    )
    relu = next(node for node in graph.graph.node if writer.output[0] in node.input)
    reader = next(c for c in convolutions if c.input[0] == relu.output[0])
    graph.graph.output.append(onnx.helper.make_empty_tensor_value_info(writer.output[0]))
    session = ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    del graph.graph.output[1:]
    values = session.run([writer.output[0]], {"image": images})[0]
    others = np.maximum(values, 0).max()
    names = (writer.input[1], writer.input[2], reader.input[1])
    weight, bias, next_weight = (weights_of(graph, name).copy() for name in names)
    channel = int(np.argmin(np.abs(next_weight).sum(axis=(0, 2, 3))))
    threshold = np.quantile(
        values[:, channel], 1 - 2e-4
    )  # of one channel in 32: 0.0006 % of the tensor
    gain = OUTLIERS * others / (values[:, channel].max() - threshold)
    bias[channel] = (bias[channel] - threshold) * gain
    weight[channel] *= gain
    next_weight[:, channel] /= gain
    for name, value in (
        (writer.input[1], weight),
        (writer.input[2], bias),
        (reader.input[1], next_weight),
    ):
        kept = [each for each in graph.graph.initializer if each.name != name]
        del graph.graph.initializer[:]
        graph.graph.initializer.extend([*kept, numpy_helper.from_array(value, name)])
    return graph, reader.name


def weights_of(graph, name):
    return numpy_helper.to_array(
        next(each for each in graph.graph.initializer if each.name == name)
    )


@pytest.fixture(scope="module")
def digits(tmp_path_factory, exported):
    store = Store(exported(tmp_path_factory.mktemp("hard-store") / "workspace"))
    return export_model(named_model("digits"), store, SilentListener())[0], store


@pytest.fixture(scope="module")
def hard(digits, tmp_path_factory):
    """The card of the hard model, and the name of the layer that reads the outliers."""
    entry, _ = digits
    card = card_from_file(entry.file(CARD))
    found, _ = image_set_from_path(
        find_shipped_folder("calibration") / "digits" / "calibration.json"
    )
    images = next(preprocess_batches(found.paths, card.transform, 500))
    folder = tmp_path_factory.mktemp("hard")
    graph, reader = outliers_planted(onnx.load(entry.file(ONNX)), images)
    onnx.save(graph, folder / "hard.onnx")
    return write_digits_card(folder / "hard.toml"), reader


def accuracy(graph, card, data):
    session = ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    scores = np.concatenate(
        [
            session.run(None, {"image": rows})[0]
            for rows in preprocess_batches(data.paths, card.transform, 200)
        ]
    )
    return float(np.mean(scores.argmax(1) == find_label_indices(data, card, scores.shape[1])))


@pytest.fixture(scope="module")
def validation():
    return image_set_from_path(find_shipped_folder("calibration") / "digits" / "validation.json")[0]


def test_every_method_keeps_digits_within_half_a_point(digits, validation, tmp_path) -> None:
    entry, store = digits
    record = run_calibration(
        named_model("digits"), CalibrationPlan(None, None, 0, METHODS), store, SilentListener()
    )
    card, graph = card_from_file(entry.file(CARD)), onnx.load(entry.file(ONNX))
    before = accuracy(graph, card, validation)
    assert before >= 0.98
    after = {
        method: accuracy(
            quantize_graph(graph, read_table(Path(path)), "tensorrt")[0], card, validation
        )
        for method, path in record.tables.items()
    }
    assert before - max(after.values()) <= 0.005
    assert min(after.values()) > 0.97


def test_max_loses_points_on_pairs_and_percentile_does_not(tmp_path) -> None:
    """`pairs` ships: a trained network whose accuracy tells the methods apart."""
    model, store, plan = (
        named_model("pairs"),
        Store(tmp_path),
        CalibrationPlan(None, None, 0, METHODS),
    )
    entry, _ = export_model(model, store, SilentListener())
    card, graph = card_from_file(entry.file(CARD)), onnx.load(entry.file(ONNX))
    data, _ = image_set_from_path(find_shipped_folder("calibration") / "pairs" / "validation.json")
    tables = run_calibration(model, plan, store, SilentListener()).tables
    before = accuracy(graph, card, data)
    after = {
        method: accuracy(quantize_graph(graph, read_table(Path(path)), "tensorrt")[0], card, data)
        for method, path in tables.items()
    }
    assert before > 0.8
    assert before - after["max"] > 0.008
    assert abs(before - after["percentile"]) < 0.006


def test_max_fails_on_outliers_and_the_others_recover(hard, digits, validation) -> None:
    path, _ = hard
    _, store = digits
    model = named_model(str(path))
    entry, _ = export_model(model, store, SilentListener())
    card, graph = card_from_file(entry.file(CARD)), onnx.load(entry.file(ONNX))
    before = accuracy(graph, card, validation)
    record = run_calibration(
        model, CalibrationPlan(None, None, 0, METHODS), store, SilentListener()
    )
    after = {
        method: accuracy(
            quantize_graph(graph, read_table(Path(path)), "tensorrt")[0], card, validation
        )
        for method, path in record.tables.items()
    }
    assert before >= 0.98
    assert before - after["max"] > 0.05
    assert before - after["percentile"] <= 0.01, (
        after
    )  # `mse` minds the outliers' squares: see its module
    assert record.compared.best != "max"


def test_the_search_finds_and_spares_the_layer(hard, digits) -> None:
    path, reader = hard
    _, store = digits
    plan, listener = CalibrationPlan(None, None, 0, ("max",), sensitivity=True), SilentListener()
    record = run_calibration(named_model(str(path)), plan, store, listener)
    assert any(
        "INT8 by max costs accuracy" in each and "--method all" in each
        for each in listener.warnings
    )
    assert record.sensitivity.layers[0].layer == reader
    first, second, *_ = record.sensitivity.layers
    assert first.cost.snr_db < second.cost.snr_db - 10
    entry, table = store.find(record.model_id, ModelInfo), read_table(Path(record.tables["max"]))
    samples, _ = load_calibration_data(entry, None, None, 0, listener)
    lowering = lower_by_table(entry, table, "tensorrt")
    chosen, _ = select_kept_layers(entry, lowering, samples, Budget(0.5, "points"), store, listener)
    assert chosen.info.keep == (reader,)
    tried = {each.kept: each.cost for each in chosen.info.tried}
    assert tried[0].drop > 0.05
    assert tried[1].drop <= 0.005
    assert len(tried) <= 6  # halving, not one build per layer


@pytest.mark.parametrize("method", METHODS)
def test_tensorrt_rtx_builds_every_graph_and_its_share_of_int8_is_proven(
    digits, method, tmp_path
) -> None:
    entry, store = digits
    if not TENSORRT_RTX.probe_capability("cuda").builds:
        pytest.skip(f"TensorRT-RTX: {TENSORRT_RTX.probe_capability('cuda').why_not}")
    record = run_calibration(
        named_model("digits"), CalibrationPlan(None, None, 0, METHODS), store, SilentListener()
    )
    table = read_table(Path(record.tables[method]))
    graph, _ = graph_from_table(entry, table, "tensorrt", (), store, SilentListener(), half=True)
    built, _ = finish_steps(
        build_artifact(
            TENSORRT_RTX, Precision.INT8, "cuda", graph, entry, None, {}, store, SilentListener()
        )
    )
    assert built.info.precision_proof.proven
    assert built.info.precision_proof.share.macs["int8"] > 0.95
