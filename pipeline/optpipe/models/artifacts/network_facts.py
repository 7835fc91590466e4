"""Facts of a network that survive retraining."""

import math

from optpipe.backends.onnx_graph import load_onnx
from optpipe.core.entries import ModelInfo
from optpipe.models.stored_card import read_stored_card
from optpipe.workspace.entry import Entry
from optpipe.workspace.file_names import CARD, ONNX


def describe_network(model: Entry[ModelInfo]) -> str | None:
    """Facts that survive retraining and rarely agree between namesakes: task, inputs, outputs, number of weights.

    None if the store no longer has its files.
    """
    if not {CARD, ONNX} <= set(model.manifest.files):
        return None
    card = read_stored_card(model)
    inputs = [
        (each, [low if low == high else "n" for low, high in zip(each.min, each.max, strict=True)])
        for each in card.inputs
    ]
    sides = [
        ", ".join(
            f"{each.name} {'×'.join(str(size) if isinstance(size, int) and axis != each.batch else 'n' for axis, size in enumerate(shape))}"
            for each, shape in side
        )
        for side in (inputs, [(each, each.shape) for each in card.outputs])
    ]
    tensors = load_onnx(model.file(ONNX), weights=False).graph.initializer
    # whether other initializers are folded depends on the exporter
    count = sum(math.prod(each.dims) for each in tensors if len(each.dims) > 1)
    return f"{card.task}, {' to '.join(sides)}, {count:,} weights"
