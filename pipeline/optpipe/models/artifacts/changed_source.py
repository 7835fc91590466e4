"""Whether the source that a stored model was made of has changed since."""

from contextlib import suppress
from pathlib import Path

from optpipe.core.entries import ArtifactInfo, ModelInfo
from optpipe.core.errors import BadInputError
from optpipe.core.files import hash_file
from optpipe.models.sources.onnx_file import hash_onnx_file
from optpipe.models.sources.resolve import CardSource
from optpipe.models.stored_card import find_card_file
from optpipe.workspace.entry import Entry
from optpipe.workspace.store import Store


def has_changed_source(model: Entry[ModelInfo]) -> bool:
    """Whether the source that a stored model was made of is here with another content; runs no code.

    False if its files are gone, or if the model is a library's or was made in memory.
    """
    info, stored = model.info, model.recipe.get("model", {}).get("source", {})
    file, _, factory = info.source.rpartition(":")
    with suppress(BadInputError, OSError):
        if (path := find_card_file(model)) is not None:
            source = CardSource(path)
            identity = source.collect_identity() if source.path.is_file() else {}
            versions = ("torch",)
            return any(
                stored.get(name) != value
                for name, value in identity.items()
                if name not in versions
            )
        if factory and file.endswith(".py") and Path(file).is_file():
            known = bool(stored.get("made", {}).get("files"))
            return known and not has_same_files(model, Path(file).resolve().parent)
        if info.weights.source == "embedded" and Path(info.source).is_file():
            return hash_onnx_file(Path(info.source)) != info.weights.sha256
    return False


def explain_changed_source(artifact: Entry[ArtifactInfo], store: Store) -> str | None:
    """A message if the source of a build that was named by its ID has changed since; None otherwise."""
    made_of = artifact.manifest.parents[:1]
    models = [model for model in store.list_entries(ModelInfo) if model.id in made_of]
    return explain_changed_model(models[0], artifact.id) if models else None


def explain_changed_model(model: Entry[ModelInfo], ident: str) -> str | None:
    """A message if the source of the stored `model`, which was named by the ID `ident`, has changed since; None otherwise."""
    if not has_changed_source(model):
        return None
    source = find_card_file(model) or model.info.source
    return f"{source} is not what {ident} was built from: it has changed, or it is another file; the stored build is used"


def has_same_files(model: Entry[ModelInfo], folder: Path) -> bool:
    """Whether the source files of a factory's stored model are the same in `folder`, where its file lies now; runs no code.

    They are the file, the modules that it imported, and the files that it read, such as weights.
    """
    source = model.recipe.get("model", {}).get("source", {})
    files = source.get("made", {}).get("files", {})
    with suppress(OSError):
        return bool(files) and all(
            hash_file(folder / name) == digest for name, digest in files.items()
        )
    return False
