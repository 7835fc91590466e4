"""What a stored model is called: the words that name it on the command line and in messages, and the place that it came from."""

from collections.abc import Sequence
from pathlib import Path

from optpipe.core.card import name_from_factory
from optpipe.core.entries import ModelInfo
from optpipe.core.errors import BadInputError
from optpipe.core.wording import IN_MEMORY, Call
from optpipe.models.sources.resolve import find_model_cards
from optpipe.models.stored_card import find_card_file
from optpipe.workspace.entry import Entry, drop_folder
from optpipe.workspace.environment import get_package_version
from optpipe.workspace.store import Store


def choose_way(call: Call, source: str) -> str:
    """`call`, whose MODEL is of `source`; for a module in memory the library's wording, empty if the library lacks it."""
    if not source.startswith(IN_MEMORY):
        return call
    return Call(call.verb, source, **call.options).find_library_call() or ""


def list_names(name: str, source: str) -> tuple[str, ...]:
    """Names of a model: its own, its source with and without folder, and its name in a library (`hf:reader`, `resnet50`)."""
    file, _, inside = source.partition(":")
    library = () if file.endswith(".py") or not inside else (inside, f"{file}:{name}")
    return (name, source, drop_folder(source), *library)


def format_model_argument(name: str, source: str) -> str:
    """The MODEL of a `build` that means the model of this name and source, as far as they tell."""
    named = source.startswith(("timm:", "hf:"))
    return source if named or is_named_by_source(name, source) else name


def find_stored_source(text: str, store: Store) -> str | None:
    """The MODEL of the newest stored model called `text`; None if `text` is a MODEL by itself.

    Messages and dossiers name a model without its library, folder or card: `reader` and `hf:reader` for
    `hf:/srv/models/reader`, `two axes` for `cards/two.toml`, `light` and `light.onnx` for `/srv/light.onnx`.
    """
    prefix, _, rest = text.rpartition(":")
    here = Path(prefix if prefix.endswith(".py") else rest)
    if (
        "/" in text
        or prefix in ("timm", "torchvision")
        or here.exists()
        or text in find_model_cards()
    ):
        return None
    places = [
        (place, model.info)
        for model in store.list_entries(ModelInfo)
        if text in _list_model_names(model.info) and (place := find_stored_place(model)) is not None
    ]
    if all(place == f"torchvision:{text}" for place, _ in places):  # found without its import
        return None
    if text.isidentifier() and get_package_version("torchvision"):
        from torchvision.models import list_models

        if text in list_models():
            return None
    _require_one_place(text, places, store)
    return places[-1][0] if places else None


def _require_one_place(text: str, known: Sequence[tuple[str, ModelInfo]], store: Store) -> None:
    """Raises BadInputError if `text` names models of several places that are not the same content."""
    places: dict[str, tuple[str, str]] = {}
    for place, info in known:
        file, colon, rest = place.rpartition(":")
        where = str(Path(file).resolve()) + colon + rest if file.endswith(".py") else place
        where = str(Path(place).resolve()) if place.endswith((".onnx", ".toml")) else where
        places[where] = place, info.content or place
    if len({content for _, content in places.values()}) > 1 and len(places) > 1:
        listed = ", ".join(place for place, _ in places.values())
        raise BadInputError(
            f"{len(places)} models in {store.workspace} are called {text}: {listed}\n"
            "give the one that you mean instead of the name"
        )


def _list_model_names(model: ModelInfo) -> tuple[str, ...]:
    return (model.name,) if model.card else list_names(model.name, model.source)


def find_stored_place(model: Entry[ModelInfo]) -> str | None:
    """The MODEL that a stored one was exported from; None if its file is gone."""
    card, info = find_card_file(model), model.info
    file = str(card or info.source)
    if info.source.startswith(("hf:", "timm:", "torchvision:")):
        return file
    if card is None and not is_named_by_source(info.name, info.source):
        return None
    exists = Path(file if file.endswith((".onnx", ".toml")) else file.rpartition(":")[0]).is_file()
    return file if exists else None


def is_named_by_source(name: str, source: str) -> bool:
    """Whether it is a file or factory without a card, whose name follows from the source."""
    return name == (Path(source).stem if source.endswith(".onnx") else name_from_factory(source))
