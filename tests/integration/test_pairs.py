"""`pairs`, a trained network whose accuracy tells calibration methods apart: `max` loses points, `percentile` does not."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from optpipe.core.card import card_from_file
from optpipe.core.entries import weights_from_text
from optpipe.core.events import SilentListener
from optpipe.models.export.exported import export_model
from optpipe.models.export.model import Model
from optpipe.models.inputs.image_set import image_set_from_path
from optpipe.models.inputs.images import preprocess_batches
from optpipe.models.sources.resolve import source_from_text
from optpipe.quantize.calibrate import quantize_graph
from optpipe.quantize.calibration_run import CalibrationPlan, run_calibration
from optpipe.quantize.ranges import read_table
from optpipe.workspace.file_names import CARD, ONNX
from optpipe.workspace.places import find_shipped_folder
from optpipe.workspace.store import Store


def measure_accuracy(graph, card, data):
    session = ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    batches = preprocess_batches(data.paths, card.transform, 250)
    scores = np.concatenate([session.run(None, {"image": rows})[0] for rows in batches])
    return float(np.mean(scores.argmax(axis=1) == [int(file.label) for file in data.files]))


@pytest.mark.slow
def test_max_loses_points_on_pairs_and_percentile_does_not(tmp_path):
    store = Store(tmp_path)
    model = Model(source_from_text("pairs", {}), weights_from_text("default", 0))
    entry, _ = export_model(model, store, SilentListener())
    card, graph = card_from_file(entry.file(CARD)), onnx.load(entry.file(ONNX))
    validation, _ = image_set_from_path(find_shipped_folder("calibration") / "pairs" / "validation.json")
    record = run_calibration(
        model, CalibrationPlan(None, None, 0, ("max", "percentile", "entropy")), store, SilentListener()
    )
    tables = {each.method: read_table(Path(each.path)) for each in record.tables}
    before = measure_accuracy(graph, card, validation)
    after = {
        method: measure_accuracy(quantize_graph(graph, table, "tensorrt")[0], card, validation)
        for method, table in tables.items()
    }
    assert before > 0.8
    assert before - after["max"] > 0.008
    assert abs(before - after["percentile"]) < 0.006
    assert before - after["entropy"] < 0.04
