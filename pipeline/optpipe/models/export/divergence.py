"""Where an exported graph leaves the module that it was exported from: the first tensor that both compute and that differs."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.onnx_graph import load_onnx
from optpipe.backends.rewrites import (
    Difference,
    Feeds,
    choose_limit,
    compare_values,
    run_exposed,
)
from optpipe.core import torch
from optpipe.core.card import ModelCard
from optpipe.models.export.onnx_export import convert_program
from optpipe.models.export.stable_selection import open_stable_selection


def find_first_divergence(
    module: Any, card: ModelCard, path: Path, feeds: Feeds, limit: float
) -> Difference | None:
    """The first tensor, in the order of the graph at `path`, that differs from the module's by more than `limit`.

    The module is converted once more, since torch's exporter names the graph's tensors after the steps of its program. None
    if that or one of both runs fails, or no tensor that both have differs.
    """
    graph = load_onnx(path)
    writers = {name: node for node in graph.graph.node for name in node.output if name}
    try:
        recorded = _record_values(convert_program(module, card).exported_program, card, feeds)
        names = [name for name in writers if name in recorded]
        outputs = run_exposed(graph, names, feeds)
    except Exception:  # noqa: BLE001 - this only explains an error, whatever a user's code or the exporter raises
        return None
    for name in names:
        if name in outputs:
            off = compare_values(recorded[name], outputs[name])
            if off > choose_limit(recorded[name], limit):
                return Difference(name, writers[name].op_type, off)
    return None


def _record_values(program: Any, card: ModelCard, feeds: Feeds) -> dict[str, NDArray[Any]]:
    """The value of each step of an exported program that is a tensor, by the step's name."""
    values: dict[str, NDArray[Any]] = {}

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n: Any) -> Any:
            value = super().run_node(n)
            if isinstance(value, torch.Tensor):
                whole = value.float() if value.dtype is torch.bfloat16 else value
                values[n.name] = np.asarray(whole.detach().numpy())
            return value

    given = iter([torch.from_numpy(feeds[spec.name]) for spec in card.inputs])
    held = {**program.state_dict, **program.constants}
    arguments = [
        held[spec.target] if spec.target in held else next(given)
        for spec in program.graph_signature.input_specs
    ]
    with torch.inference_mode(), open_stable_selection():
        Recorder(program.graph_module).run(*arguments)
    return values
