"""Resolves a user's MODEL: model cards (TOML), and the source that loads it."""

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from optpipe.core.card import ModelCard, Tokenization, card_from_dict
from optpipe.core.entries import WeightsRecord, WeightsRequest
from optpipe.core.errors import BadInputError, first_line, require_file
from optpipe.core.files import hash_file, hash_text, hash_value, read_user_text
from optpipe.core.suggestions import suggest_names
from optpipe.core.toml import parse_toml
from optpipe.core.wording import Argument
from optpipe.models.sources.exported_program import ProgramFileSource
from optpipe.models.sources.in_memory import PREFIX as IN_MEMORY
from optpipe.models.sources.libraries import (
    SOURCES,
    HuggingFaceSource,
    TimmSource,
    TorchvisionSource,
    make_folder_error,
)
from optpipe.models.sources.modules import LoadedModel, Source
from optpipe.models.sources.onnx_file import OnnxFileSource, ShapeRanges
from optpipe.models.sources.python_file import PythonFileSource
from optpipe.models.sources.text_tokenizer import read_tokenizer_source
from optpipe.workspace.file_names import require_name
from optpipe.workspace.places import find_shipped_folder

CARD_FIELDS: Mapping[str, type] = {
    "name": str, "task": str, "description": str, "source": str, "weights": str, "weights_sha256": str, "labels": list,
    "license": dict, "inputs": list, "outputs": list, "preprocessing": dict, "data": dict,
    "head": dict, "tokenizer": str, "pad_id": int,
}  # fmt: skip
DATA_ROLES = ("train", "calibration", "validation")
CHECKPOINTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
"""Endings of files that hold weights without the code of their module."""
PROGRAM = ".pt2"
_KINDS: Mapping[type, str] = {str: "a string", list: "a list", dict: "a table", int: "an integer"}


def _require_known(table: Mapping[str, Any], path: Path) -> None:
    """Raises BadInputError for an unknown field, a value of another kind, dates, and numbers that are not finite."""
    for field, value in table.items():
        if field not in CARD_FIELDS:
            hint = suggest_names(
                field, CARD_FIELDS, otherwise=f"valid fields are {', '.join(CARD_FIELDS)}"
            )
            raise BadInputError(f"{path}: a model card has no field '{field}': {hint}")
        if not isinstance(value, CARD_FIELDS[field]) or isinstance(value, bool):
            raise BadInputError(
                f"{path}: '{field}' must be {_KINDS[CARD_FIELDS[field]]}; see models/README.md"
            )
    _require_strings(table, path)
    if wrong := [role for role, file in table.get("data", {}).items() if not isinstance(file, str)]:
        raise BadInputError(f"{path}: [data] {wrong[0]} must be the path of a set manifest")
    if unknown := [role for role in table.get("data", {}) if role not in DATA_ROLES]:
        raise BadInputError(f"{path}: [data] has no '{unknown[0]}'; it has {', '.join(DATA_ROLES)}")
    try:
        json.dumps(table, allow_nan=False)
    except (TypeError, ValueError) as error:
        problem = (
            f"{path}: values of a model card are strings, finite numbers, true or false, and lists"
        )
        raise BadInputError(f"{problem} ({first_line(error)})") from error


def _require_strings(table: Mapping[str, Any], path: Path) -> None:
    """Raises BadInputError for a label, or a name or type of an input or output, that is not a string."""
    strings = [(f"labels[{place}]", label) for place, label in enumerate(table.get("labels", ()))]
    for field in ("inputs", "outputs"):
        for place, spec in enumerate(table.get(field, ())):
            if not isinstance(spec, dict):
                raise BadInputError(
                    f"{path}: {field}[{place}] must be a table; see models/README.md"
                )
            strings += [
                (f"{field}[{place}].{key}", spec[key]) for key in ("name", "dtype") if key in spec
            ]
    for where, value in strings:
        if not isinstance(value, str):
            problem = f"{path}: {where} is {json.dumps(value, default=str)[:80]}, not a string"
            raise BadInputError(f"{problem}; write it in quotes")


@dataclass(frozen=True)
class CardSource:
    """A card on disk. Its paths are relative to it."""

    path: Path
    shapes: ShapeRanges | None = None
    """From `--shape`: for open dimensions of an ONNX file whose inputs the card does not describe."""

    @property
    def name(self) -> str:
        return str(self.path)

    @cached_property
    def _table(self) -> Mapping[str, Any]:
        try:
            table = parse_toml(read_user_text(self.path))
        except (OSError, RecursionError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise BadInputError(f"{self.path} is not a readable model card: {error}") from error
        _require_known(table, self.path)
        return table

    @cached_property
    def card(self) -> ModelCard:
        """The card's values, with absolute data folders; the file that it names may complete them."""
        card = card_from_dict(self._table)
        require_name(card.name, f"{self.path}: name")
        return replace(
            card,
            data={role: str(self._resolve_beside(folder)) for role, folder in card.data.items()},
        )

    @property
    def data_as_written(self) -> Mapping[str, str]:
        """The places of its data, relative to the card if the user wrote them so."""
        return dict(self._table.get("data", {}))

    def _resolve_beside(self, name: str) -> Path:
        return (self.path.parent / name).resolve()

    @cached_property
    def _inner(self) -> PythonFileSource | OnnxFileSource:
        file, _, factory = self.card.source.rpartition(":")
        if factory and file.endswith(".py"):
            return PythonFileSource(self._resolve_beside(file), factory, card=self.card)
        if self.card.source.endswith(".onnx"):
            return OnnxFileSource(
                self._resolve_beside(self.card.source), card=self.card, shapes=self.shapes
            )
        raise BadInputError(
            f"{self.path}: source '{self.card.source}' is neither FILE.py:FACTORY nor FILE.onnx"
        )

    @cached_property
    def _tokenizer(self) -> str | None:
        """The content that the stored model keeps of the card's tokenizer; None without one."""
        named = self._table.get("tokenizer")
        return None if named is None else read_tokenizer_source(named, self.path.parent)

    def _add_tokenizer(self, loaded: LoadedModel) -> LoadedModel:
        """`loaded` with the card's tokenizer; texts hold as many tokens as the first input."""
        if self._tokenizer is None:
            return loaded
        first = loaded.card.inputs[0]
        if len(first.max) != 2:
            problem = f"{self.path}: a tokenizer gives (texts, tokens)"
            raise BadInputError(f"{problem}, but input {first.name} is {first.format_profile()}")
        tokenization = Tokenization(
            sha256=hash_text(self._tokenizer),
            max_length=first.max[1],
            pad_id=int(self._table.get("pad_id", 0)),
        )
        card = replace(loaded.card, tokenization=tokenization)
        return replace(loaded, card=card, tokenizer=self._tokenizer)

    def _find_weights(self) -> Path | None:
        if self._table.get("weights", "default") in ("default", "random"):
            return None
        path = self._resolve_beside(str(self._table["weights"]))
        if not path.is_file():
            raise BadInputError(f"{self.path}: weights file {path} is missing")
        stated = self._table.get("weights_sha256")
        if stated is not None and hash_file(path) != stated:
            raise BadInputError(f"{self.path}: {path.name} does not match the sha256 in the card")
        return path

    @property
    def has_module(self) -> bool:
        return self._inner.has_module

    @property
    def runs_code(self) -> bool:
        return self._inner.runs_code

    def collect_identity(self) -> Mapping[str, Any]:
        """The card's values with the places of its data as written; its file; the hash of its weights.

        No absolute place counts unless the user wrote one, so that the card can be moved with its files.
        """
        weights, stated = (
            self._find_weights(),
            self._table.get("weights_sha256"),
        )  # the file was checked against it
        return {
            "card": hash_value(replace(self.card, data=self.data_as_written).to_dict()),
            "weights": (stated or hash_file(weights)) if weights else self._table.get("weights"),
            **(
                {"tokenizer": [hash_text(self._tokenizer), self._table.get("pad_id", 0)]}
                if self._tokenizer
                else {}
            ),
            **self._inner.collect_identity(),
        }

    def load(self, weights: WeightsRequest) -> LoadedModel:
        return self._add_tokenizer(self._load(weights))

    def _load(self, weights: WeightsRequest) -> LoadedModel:
        own = self._find_weights()
        if weights.kind == "default" and self._table.get("weights") == "random":
            weights = replace(weights, kind="random")
        if weights.kind != "default" or own is None:
            return self._inner.load(weights)
        loaded = self._inner.load(WeightsRequest(kind="file", path=own))
        return replace(loaded, weights=WeightsRecord(f"default:{own.name}", loaded.weights.sha256))


def source_from_text(model: str, shapes: ShapeRanges | None = None) -> Source:
    """The source that MODEL names. Unknown names in a library are found only on loading.

    Raises BadInputError for what can be none: a folder, a pipe, the path of a file that does not exist.
    """
    prefix, _, rest = model.partition(":")
    if prefix == "timm" and rest:
        return TimmSource(rest)
    if prefix == "hf" and rest:
        return HuggingFaceSource(rest)
    if prefix == "torchvision" and rest:
        return TorchvisionSource(rest)
    if prefix == IN_MEMORY and rest:
        problem = (
            f"{model} is a module in memory, which only the Python program that holds it can build"
        )
        raise BadInputError(
            f"{problem}\nbench, compare, signoff, verify, and deploy find its builds: {rest}"
        )
    file, _, factory = model.rpartition(":")
    if file.endswith(".py"):
        return PythonFileSource(require_file(file), factory)
    if model.endswith(".py"):
        raise BadInputError(f"{model}: add the name of the factory: {model}:FACTORY")
    if model.endswith(".onnx"):
        return OnnxFileSource(require_file(model), shapes=shapes)
    if model.endswith(PROGRAM):
        return ProgramFileSource(require_file(model), shapes)
    if model.endswith(".toml"):
        return CardSource(require_file(model), shapes)
    if Path(model).is_file() and Path(model).suffix in CHECKPOINTS:
        raise BadInputError(
            "weights alone are not a model",
            place=model,
            remedy="give the code of their module too: FILE.py:FACTORY "
            + Argument("weights", model),
        )
    if Path(model).is_file():
        return OnnxFileSource(Path(model), shapes=shapes)
    module, _, factory = model.rpartition(".")
    if factory.isidentifier() and Path(f"{module}.py").is_file():  # the name in builds and messages
        return PythonFileSource(Path(f"{module}.py"), factory)
    cards = find_model_cards()
    if model in cards:
        return CardSource(cards[model])
    require_library_name(model)
    return TorchvisionSource(model, also_known=tuple(cards))


def require_library_name(model: str) -> None:
    """Raises BadInputError if `model`, which is no file and no card, cannot be the name of a library's model either."""
    path = Path(model)
    if not model.strip():
        raise BadInputError("MODEL is empty", remedy=f"give {SOURCES}")
    if path.is_dir() and not model.isidentifier():  # a library's model may be called as a folder
        raise make_folder_error(model)
    if path.suffix or "/" in model or (path.exists() and not path.is_dir()):
        on_hub = re.fullmatch(r"[\w-]+/[\w.-]+", model)
        hint = f"hf:{model} for a model of Hugging Face, or " if on_hub else ""
        require_file(model, f"\ngive {hint}{SOURCES}")


def format_source(source: Source) -> str:
    """The MODEL that means `source`, as it can be pasted into a command; a card in `models/` by its name."""
    known = {path: name for name, path in find_model_cards().items()}
    return shlex.quote(known.get(Path(source.name), source.name).removeprefix("torchvision:"))


def find_model_cards() -> dict[str, Path]:
    """Model cards by name; those in `models/` of the working directory replace shipped ones."""
    folders = (find_shipped_folder("models"), Path("models"))
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}
