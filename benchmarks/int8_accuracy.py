"""INT8 of `digits` by each method against FP32, on all validation images: accuracy, and the drop with its interval.

usage: python benchmarks/int8_accuracy.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path

import onnx

from optpipe.core.entries import weights_from_text
from optpipe.core.events import SilentListener
from optpipe.models.export.exported import Model, export_model
from optpipe.models.inputs.image_set import image_set_from_path
from optpipe.models.sources.resolve import source_from_text
from optpipe.models.stored_card import read_stored_card
from optpipe.quantize.calibrated_graph import (
    TARGETS,
    calibrate_model,
    load_calibration_data,
    tables_from_entry,
)
from optpipe.quantize.qdq import quantize_graph
from optpipe.quantize.ranges import METHODS
from optpipe.quantize.sensitivity import Fp32Reference
from optpipe.workspace.file_names import ONNX
from optpipe.workspace.store import Store


def main(name: str = "digits") -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as workspace:
        store = Store(Path(workspace))
        model, _ = export_model(
            Model(source_from_text(name, {}), weights_from_text("default", 0)),
            store,
            SilentListener(),
        )
        card, graph = read_stored_card(model), onnx.load(model.file(ONNX))
        data, _ = load_calibration_data(model, None, None, 0, SilentListener())
        tables = tables_from_entry(
            calibrate_model(model, data, tuple(METHODS), TARGETS, store, SilentListener())[0]
        )
        validation = image_set_from_path(Path(card.data["validation"]))[0]
        against = Fp32Reference(model, validation)
        predicted = against.task.take_as_truths(against.reference.values)
        right = sum(one == truth for one, truth in zip(predicted, against.truths, strict=True))
        print(
            f"FP32: {right} of {len(validation.files)} right, {right / len(validation.files):.2%}"
        )
        print(
            "| Q/DQ for | method | drop, points | 95 % interval | SNR to FP32 |\n|---|---|---|---|---|"
        )
        for target in TARGETS:
            for method, table in tables.items():
                row = against.measure_cost(quantize_graph(graph, table, target)[0])
                low, high = row.drop_ci or (0.0, 0.0)
                drop = f"{100 * (row.drop or 0.0):+.3f} | {100 * low:+.2f} … {100 * high:+.2f}"
                print(f"| {target} | {method} | {drop} | {row.snr_db:.1f} dB |")


if __name__ == "__main__":
    main(*sys.argv[1:])
