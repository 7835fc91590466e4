"""The model that a user names: a library's name, a file, a card, the name of a stored model, or the ID of a build or model."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optpipe.core.card import Shape
from optpipe.core.entries import ArtifactInfo, ModelInfo, WeightsRequest
from optpipe.core.errors import BadInputError
from optpipe.core.wording import Argument, Call
from optpipe.models.artifacts.changed_source import has_changed_source
from optpipe.models.artifacts.missing_builds import can_be_id, require_id
from optpipe.models.artifacts.model_names import (
    find_stored_place,
    find_stored_source,
    format_model_argument,
)
from optpipe.models.export.exported import Model
from optpipe.models.sources.modules import LoadedModel, Source
from optpipe.models.sources.resolve import find_model_cards, source_from_text
from optpipe.workspace.entry import Entry
from optpipe.workspace.store import Store


@dataclass(frozen=True)
class StoredSource:
    """The source of a stored model that was named by an ID: it is loaded only if it is still the same."""

    exported: Entry[ModelInfo]
    place: str
    """The MODEL that the stored one was exported from."""
    inner: Source | None
    """None if it is not here any more."""

    @property
    def name(self) -> str:
        return self.place

    @property
    def has_module(self) -> bool:
        return self.inner is not None and self.inner.has_module

    @property
    def runs_code(self) -> bool:
        return False  # its identity is the stored one

    def collect_identity(self) -> Mapping[str, Any]:
        return dict(self.exported.recipe["model"]["source"])

    def load(self, weights: WeightsRequest) -> LoadedModel:
        """Raises BadInputError if the source has changed, is gone, or was given weights from a file."""
        ident, recipe = self.exported.id, self.exported.recipe["model"]
        if self.place.startswith("memory:"):
            source_from_text(self.place)  # refuses it
        if self.inner is None:
            problem = f"model {ident} was exported from {self.place}, which is not here"
            raise BadInputError(f"{problem}\nput it back, or build the model again")
        if has_changed_source(self.exported):
            problem = f"{self.place} is not what model {ident} was exported from: it has changed, or it is another file"
            raise BadInputError(problem, remedy="build it again: " + Call("build", self.place))
        if "file" in recipe["weights"]:
            problem = f"the weights of model {ident} came from a file, whose place is not stored"
            raise BadInputError(
                problem,
                remedy=f"give the model itself: {self.place} " + Argument("weights", "FILE"),
            )
        return self.inner.load(weights)


def model_from_text(
    text: str,
    store: Store,
    *,
    weights: WeightsRequest | None = None,
    batch: tuple[int, int, int] | None = None,
    shapes: Mapping[str, tuple[Shape, Shape, Shape]] | None = None,
) -> Model:
    """The model of the MODEL `text`, not loaded yet, with the given weights, batch range, and shapes of inputs.

    The ID of a stored build or model means that model with its weights and profile. Raises BadInputError for a file that does not
    exist, and for weights, a batch range, or shapes beside an ID.
    """
    ranges, asked = dict(shapes or {}), weights or WeightsRequest()
    exported = find_model_by_id(text, store)
    if exported is None:
        return Model(source_from_text(_find_place(text, store), ranges), asked, batch, ranges)
    if asked != WeightsRequest() or batch is not None or ranges:
        problem = f"{text} is a stored build or model, whose weights and profile are fixed"
        model = format_model_argument(exported.info.name, exported.info.source)
        raise BadInputError(
            problem,
            remedy="leave out "
            + Argument("weights")
            + ", "
            + Argument("batch")
            + ", and "
            + Argument("shape")
            + f", or give {shlex.quote(model)} instead",
        )
    return model_from_entry(exported)


def model_from_entry(exported: Entry[ModelInfo]) -> Model:
    """The model of a stored export, with the weights and the profile that it was exported with."""
    recipe = exported.recipe["model"]
    shapes = {
        name: (tuple(low), tuple(usual), tuple(high))
        for name, (low, usual, high) in recipe["shapes"].items()
    }
    place = find_stored_place(exported)
    source = StoredSource(
        exported,
        place or exported.info.source,
        None if place is None else source_from_text(place, shapes),
    )
    weights = WeightsRequest()
    if "random" in recipe["weights"]:
        weights = WeightsRequest(kind="random", seed=recipe["weights"]["random"])
    batch = recipe["batch"] and tuple(recipe["batch"])
    return Model(source, weights, batch, shapes, exported=exported)


def find_buildable_source(text: str, store: Store) -> str:
    """The MODEL of a `build` of what `text`, a name, file, or ID, means.

    Raises BadInputError for the ID of a model whose source has changed or is gone, or that took weights or a profile besides.
    """
    exported = find_model_by_id(text, store)
    if exported is None:
        return _find_place(text, store)
    place, recipe = find_stored_place(exported), exported.recipe["model"]
    if place is None or has_changed_source(exported):
        source = place or exported.info.source
        problem = f"{source} is not what {text} was built from: it has changed, or it is not here"
        raise BadInputError(f"{problem}\ngive a MODEL instead of the ID")
    if recipe["weights"] != WeightsRequest().recipe() or recipe["batch"] or recipe["shapes"]:
        problem = f"{text} was built with weights or a profile besides {place}"
        raise BadInputError(f"{problem}\ngive {place} and the options instead of the ID")
    return place


def _find_place(text: str, store: Store) -> str:
    """The MODEL of the stored model called `text`, or `text` itself. Raises BadInputError for an ID, which `text` is not here."""
    place = find_stored_source(text, store)
    if place is None and not Path(text).exists() and text not in find_model_cards():
        require_id(text, store)
    return place or text


def find_model_by_id(text: str, store: Store) -> Entry[ModelInfo] | None:
    """The stored model whose ID, or one of whose builds' IDs, begins with `text`; None if `text` is no ID.

    Files and model cards are meant before an ID. Raises BadInputError if several models fit.
    """
    if not can_be_id(text) or Path(text).exists() or text in find_model_cards():
        return None
    models = {model.id: model for model in store.list_entries(ModelInfo)}
    meant = {
        model.id: model
        for model in models.values()
        if model.matches_id(text) or model.info.content.startswith(text)
    }
    for build in find_builds_by_id(text, store):
        parent = build.manifest.parents[0]
        meant |= {parent: models[parent]} if parent in models else {}
    contents = {model.info.content or model.id for model in meant.values()}
    if len(contents) > 1:
        listed = ", ".join(f"{model.id} ({model.info.name})" for model in meant.values())
        raise BadInputError(f"{text} is the beginning of several IDs: {listed}\ngive more digits")
    return next(reversed(meant.values()), None)


def find_builds_by_id(text: str, store: Store) -> list[Entry[ArtifactInfo]]:
    """The builds whose own ID begins with `text`; none if `text` is no ID of a build."""
    if not can_be_id(text) or Path(text).exists() or text in find_model_cards():
        return []
    return [build for build in store.list_entries(ArtifactInfo) if build.matches_id(text)]
