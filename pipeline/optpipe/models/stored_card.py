"""The card of a stored model, and where its data lie now.

A stored card keeps the places of its data as the user wrote them, relative to the card's file, and the model's manifest keeps
the place of that file, relative to the workspace's folder if it lies there. So a workspace and its folder can be moved together.
"""

from dataclasses import replace
from pathlib import Path

from optpipe.core.card import ModelCard, card_from_file
from optpipe.core.entries import ModelInfo
from optpipe.models.sources.resolve import CardSource
from optpipe.workspace.entry import Entry
from optpipe.workspace.file_names import CARD


def read_stored_card(model: Entry[ModelInfo]) -> ModelCard:
    """The card of the stored model `model`, with the absolute places of its data as of now."""
    card, file = card_from_file(model.file(CARD)), find_card_file(model)
    if file is None or not card.data:
        return card
    places = {role: str((file.parent / place).resolve()) for role, place in card.data.items()}
    return replace(card, data=places)


def find_card_file(model: Entry[ModelInfo]) -> Path | None:
    """The absolute path of the card that `model` was exported from; None if it had none. The file may be gone."""
    if model.info.card is None:
        return None
    return _get_folder(model.path.parent.parent) / model.info.card


def format_card_place(card: Path, workspace: Path) -> str:
    """The path of a card's file as a manifest keeps it: relative to the workspace's folder if it lies there."""
    place, folder = card.resolve(), _get_folder(workspace)
    return place.relative_to(folder).as_posix() if place.is_relative_to(folder) else str(place)


def place_at_source(model: Entry[ModelInfo], source: object) -> Entry[ModelInfo]:
    """`model` with the place of the card `source`: the same model may have been exported from a copy elsewhere."""
    if not isinstance(source, CardSource):
        return model
    return replace(model, info=replace(model.info, card=str(source.path.resolve())))


def _get_folder(workspace: Path) -> Path:
    return workspace.resolve().parent
