"""From the MODEL that a user types to the source that loads it."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from optpipe.core.errors import BadInputError
from optpipe.core.tensors import Shape
from optpipe.models.sources.base import Source
from optpipe.models.sources.card_file import CardSource
from optpipe.models.sources.huggingface import HuggingFaceSource
from optpipe.models.sources.onnx_file import OnnxFileSource
from optpipe.models.sources.python_file import PythonFileSource
from optpipe.models.sources.timm import TimmSource
from optpipe.models.sources.torchvision import TorchvisionSource
from optpipe.workspace.shipped import find_shipped_folder


def source_from_text(model: str, shapes: Mapping[str, tuple[Shape, Shape, Shape]] | None = None) -> Source:
    """The source that MODEL names; whether a library knows the name shows when it loads."""
    prefix, _, rest = model.partition(":")
    if prefix == "timm" and rest:
        return TimmSource(rest)
    if prefix == "hf" and rest:
        return HuggingFaceSource(rest)
    if prefix == "torchvision" and rest:
        return TorchvisionSource(rest)
    file, _, factory = model.rpartition(":")
    if file.endswith(".py"):
        return PythonFileSource(_require_existing(file), factory)
    if model.endswith(".py"):
        raise BadInputError(f"{model}: add the name of the factory: {model}:FACTORY")
    if model.endswith(".onnx"):
        return OnnxFileSource(_require_existing(model), shapes=shapes)
    if model.endswith(".toml"):
        return CardSource(_require_existing(model), shapes)
    if Path(model).is_file():
        return OnnxFileSource(Path(model), shapes=shapes)
    module, _, factory = model.rpartition(".")
    if factory.isidentifier() and Path(f"{module}.py").is_file():  # as builds and messages name it
        return PythonFileSource(Path(f"{module}.py"), factory)
    cards = find_model_cards()
    return CardSource(cards[model]) if model in cards else TorchvisionSource(model, also_known=tuple(cards))


def format_source(source: Source) -> str:
    """The MODEL that means `source`, as it can be pasted into a command: of a card in `models/` its name."""
    known = {path: name for name, path in find_model_cards().items()}
    return shlex.quote(known.get(Path(source.name), source.name).removeprefix("torchvision:"))


def find_model_cards() -> dict[str, Path]:
    """Model cards by name: those in `models/` of the working directory first, then those that optpipe ships."""
    folders = (find_shipped_folder("models"), Path("models"))
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


def _require_existing(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise BadInputError(f"{text}: no such file")
    return path
