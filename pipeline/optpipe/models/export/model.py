"""A command's model: loaded at most once, and only when needed."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optpipe.backends.onnx_graph import find_own_precision
from optpipe.core.card import Shape
from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import BadInputError
from optpipe.core.events import Listener
from optpipe.core.files import hash_value
from optpipe.core.precision import Precision
from optpipe.models.sources.base import LoadedModel, NoWeightsError, Source
from optpipe.workspace.files import write_json
from optpipe.workspace.store import NOTES

PROBE_S = 0.3
"""Timeout for a host that had no weights before, after which it counts as unreachable again."""


@dataclass
class Model:
    source: Source
    weights: WeightsRequest
    batch: tuple[int, int, int] | None = None
    shapes: Mapping[str, tuple[Shape, Shape, Shape]] = field(default_factory=dict)
    fallback_reason: str | None = None
    """Why the default weights were replaced by random ones."""
    _loaded: LoadedModel | None = None

    def recipe(self) -> dict[str, Any]:
        """Everything that determines the exported model. Cheap, except for a user's code, which has to run."""
        made = {"made": dict(self.load().code_identity)} if self.source.runs_code else {}
        return {
            "source": dict(self.source.collect_identity()) | made,
            "weights": self.weights.recipe(),
            "batch": self.batch,
            "shapes": {name: [list(shape) for shape in shapes] for name, shapes in sorted(self.shapes.items())},
        }

    def load(self) -> LoadedModel:
        """The model in memory, with the requested shapes in its card."""
        if self._loaded is None:
            found = self.source.load(self.weights)
            card = found.card.with_profile(self.batch, self.shapes)
            if card.tokenization is not None and (longest := card.inputs[0].max[-1]) > card.tokenization.max_length:
                raise BadInputError(
                    f"--shape: {card.name} takes up to {card.tokenization.max_length} tokens, not {longest}\n"
                    "give shorter shapes, or a model with a larger position table"
                )
            self._loaded = replace(found, card=card)
        return self._loaded

    def is_quantized(self) -> bool:
        import onnx

        path = self.load().onnx
        return path is not None and find_own_precision(onnx.load(path, load_external_data=False)) is Precision.INT8

    def fresh_module(self) -> Any:
        """A new copy of the module, since backends change the types of parameters in place."""
        return self.source.load(self.weights).module


def choose_available_weights(model: Model, workspace: Path, listener: Listener) -> Model:
    """`model`, with random weights if the default ones cannot be downloaded; warns about it.

    A failed download is recorded in the workspace while its host does not answer, so that builds without a network are
    not slowed down each time.
    """
    if model.weights.kind != "default":
        return model
    memory = workspace / NOTES / f"unavailable-{hash_value(dict(model.source.collect_identity()))[:12]}.json"
    from optpipe.models.sources.hub import explain_unreachable

    reason = None
    with suppress(OSError, ValueError, KeyError):
        record = json.loads(memory.read_text(encoding="utf-8"))
        reason = str(record["reason"]) if explain_unreachable(f"https://{record['host']}", PROBE_S) else None
    if reason is None:
        try:
            model.load()
        except NoWeightsError as error:
            reason = str(error)
            write_json(memory, {"reason": reason, "host": error.host})
        else:
            memory.unlink(missing_ok=True)
            return model
    listener.warn(
        f"{reason}\nusing seeded random weights instead: speed is meaningful, accuracy is not (pass --weights FILE for real weights)"
    )
    return replace(
        model, weights=WeightsRequest(kind="random", seed=model.weights.seed), fallback_reason=reason, _loaded=None
    )
