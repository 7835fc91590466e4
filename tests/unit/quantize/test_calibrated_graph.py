"""Which calibration tables a graph is made from."""

import json

import onnx
import pytest

from optpipe.core.card import ModelCard, Task
from optpipe.core.entries import ModelInfo, SampleSetSummary
from optpipe.core.events import SilentListener
from optpipe.core.tensors import InputSpec
from optpipe.core.transform import Decode, Pack, Transform
from optpipe.core.weights import WeightsRecord
from optpipe.errors import BadInputError
from optpipe.quantize.calibrated_graph import graph_from_table
from optpipe.quantize.table import CalibrationTable, TensorRange
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
            transform=transform,
        )

        def make(folder):
            onnx.save(residual_model, folder / ONNX)
            (folder / CARD).write_text(json.dumps(card.to_dict()))
            return ModelInfo(
                "net", "net.onnx", WeightsRecord("embedded", "0" * 64), simplified=True, own_precision=None
            )

        return store.produce(ModelInfo, {"model": card.to_dict()}, make, listener=SilentListener())[0]

    store = Store(tmp_path / "workspace")
    return stored, store


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
    nodes = onnx.load(model.file(ONNX)).graph.node
    table = CalibrationTable(
        method="max",
        model="net",
        graph_sha256=model.sha256(ONNX),
        transform_sha256=of_table,
        set=SampleSetSummary("images", "0" * 64, 8, 0),
        ranges={name: TensorRange(2.0, -1.0, 2.0) for node in nodes for name in (*node.input, *node.output)},
    )
    if refused:
        with pytest.raises(
            BadInputError, match="made for different preprocessing than net's; pass the calibration data"
        ):
            graph_from_table(model, table, "cpu", (), store, SilentListener())
    else:
        graph, _ = graph_from_table(model, table, "cpu", (), store, SilentListener())
        assert graph.info.int8_layers
