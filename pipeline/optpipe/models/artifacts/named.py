"""The model that a user names: a library's name, a file, a card, or the name of a stored model."""

from collections.abc import Mapping

from optpipe.core.card import Shape
from optpipe.core.entries import WeightsRequest
from optpipe.models.artifacts.lookup import find_stored_source
from optpipe.models.export.exported import Model
from optpipe.models.sources.resolve import source_from_text
from optpipe.workspace.store import Store


def model_from_text(
    text: str,
    store: Store,
    *,
    weights: WeightsRequest | None = None,
    batch: tuple[int, int, int] | None = None,
    shapes: Mapping[str, tuple[Shape, Shape, Shape]] | None = None,
) -> Model:
    """The model of the MODEL `text`, not loaded yet, with the given weights, batch range, and shapes of inputs.

    Raises BadInputError for a file that does not exist.
    """
    ranges = dict(shapes or {})
    source = source_from_text(find_stored_source(text, store) or text, ranges)
    return Model(source, weights or WeightsRequest(), batch, ranges)
