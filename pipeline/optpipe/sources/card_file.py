"""A model card: TOML that names a factory or an ONNX file, its weights, inputs, preprocessing, labels and data."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from optpipe.core.card import ModelCard, card_from_dict
from optpipe.core.hashing import file_sha256, value_sha256
from optpipe.core.weights import WeightsRecord, WeightsRequest
from optpipe.errors import BadInputError
from optpipe.sources.base import Loaded
from optpipe.sources.onnx_file import OnnxFileSource
from optpipe.sources.python_file import PythonFileSource

FIELDS: Mapping[str, type] = {
    "name": str, "task": str, "description": str, "source": str, "weights": str, "weights_sha256": str, "labels": list,
    "licence": dict, "inputs": list, "outputs": list, "preprocessing": dict, "data": dict,
}  # fmt: skip
"""What a card may hold."""
_KINDS: Mapping[type, str] = {str: "a text", list: "a list", dict: "a table"}


def _require_known(table: Mapping[str, Any], path: Path) -> None:
    """Raises BadInputError for a field that no card has, as one that is mistyped, and for one of another kind."""
    for field, value in table.items():
        if field not in FIELDS:
            near = get_close_matches(field, FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it may have {', '.join(FIELDS)}"
            raise BadInputError(f"{path}: a model card has no field '{field}': {hint}")
        if not isinstance(value, FIELDS[field]):
            raise BadInputError(f"{path}: '{field}' has to be {_KINDS[FIELDS[field]]}; models/README.md has the form")
    if wrong := [role for role, file in table.get("data", {}).items() if not isinstance(file, str)]:
        raise BadInputError(f"{path}: [data] {wrong[0]} has to be the path of a set's manifest")


@dataclass(frozen=True)
class CardSource:
    """One card on disk. Paths in it are relative to the card."""

    path: Path

    @property
    def name(self) -> str:
        """The card's path."""
        return str(self.path)

    @cached_property
    def _table(self) -> Mapping[str, Any]:
        try:
            table = tomllib.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise BadInputError(f"{self.path} is not a readable model card: {error}") from error
        _require_known(table, self.path)
        return table

    @cached_property
    def card(self) -> ModelCard:
        """The card's values, with data folders made absolute."""
        card = card_from_dict(self._table)
        return replace(card, data={role: str(self._beside(folder)) for role, folder in card.data.items()})

    def _beside(self, name: str) -> Path:
        return (self.path.parent / name).resolve()

    @cached_property
    def _inner(self) -> PythonFileSource | OnnxFileSource:
        file, _, factory = self.card.source.rpartition(":")
        if factory and file.endswith(".py"):
            return PythonFileSource(self._beside(file), factory, card=self.card)
        if self.card.source.endswith(".onnx"):
            return OnnxFileSource(self._beside(self.card.source), card=self.card)
        raise BadInputError(f"{self.path}: source '{self.card.source}' is neither FILE.py:FACTORY nor FILE.onnx")

    def _weights(self) -> Path | None:
        if self._table.get("weights", "default") in ("default", "random"):
            return None
        path = self._beside(str(self._table["weights"]))
        if not path.is_file():
            raise BadInputError(f"{self.path}: its weights {path} are missing")
        stated = self._table.get("weights_sha256")
        if stated is not None and file_sha256(path) != stated:
            raise BadInputError(f"{self.path}: {path.name} does not have the sha256 that the card states")
        return path

    @property
    def has_module(self) -> bool:
        """Whether it loads as a torch module."""
        return self._inner.has_module

    @property
    def runs_code(self) -> bool:
        """Whether a user's code makes it."""
        return self._inner.runs_code

    def identity(self) -> Mapping[str, Any]:
        """The card's values, with the places of its data, which the stored model keeps; the file it names; its weights' hash."""
        weights, stated = self._weights(), self._table.get("weights_sha256")  # which the file was just held against
        return {
            "card": value_sha256(self.card.to_dict()),
            "weights": (stated or file_sha256(weights)) if weights else self._table.get("weights"),
            **self._inner.identity(),
        }

    def load(self, weights: WeightsRequest) -> Loaded:
        """Loads what the card names; its own weights are the `default` ones."""
        own = self._weights()
        if weights.kind == "default" and self._table.get("weights") == "random":
            weights = replace(weights, kind="random")
        if weights.kind != "default" or own is None:
            return self._inner.load(weights)
        loaded = self._inner.load(WeightsRequest(kind="file", path=own))
        record = WeightsRecord(f"default:{own.name}", loaded.weights.sha256)
        return replace(loaded, weights=record)
