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
        (spec, [low if low == high else "n" for low, high in zip(spec.min, spec.max, strict=True)])
        for spec in card.inputs
    ]
    sides = [
        ", ".join(
            f"{spec.name} {'×'.join(str(size) if isinstance(size, int) and axis != spec.batch else 'n' for axis, size in enumerate(shape))}"
            for spec, shape in side
        )
        for side in (inputs, [(spec, spec.shape) for spec in card.outputs])
    ]
    tensors = load_onnx(model.file(ONNX), weights=False).graph.initializer
    # whether other initializers are folded depends on the exporter
    count = sum(math.prod(tensor.dims) for tensor in tensors if len(tensor.dims) > 1)
    return f"{card.task}, {' to '.join(sides)}, {count:,} weights"
