"""Which artifact a recipe gave in an environment, so that a sweep that goes on starts no process to find out.

Only for models that a name or a file's hash pins: a library's network or an ONNX file. Python files and cards are built, which
finds out by itself whether anything changed.
"""

from dataclasses import dataclass
from pathlib import Path

from optpipe import __version__
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError
from optpipe.core.files import hash_value
from optpipe.core.records import json_from_record, plain_from_record, read_record
from optpipe.models.sources.resolve import find_model_cards
from optpipe.sweep.job import Recipe
from optpipe.workspace.files import write_bytes
from optpipe.workspace.store import NOTES, Store


@dataclass(frozen=True, slots=True)
class _Built:
    artifact: str


def note_built(workspace: Path, recipe: Recipe, fingerprint: str, artifact: str) -> None:
    """Notes what was built."""
    if _is_pinned(recipe):
        write_bytes(_path(workspace, recipe, fingerprint), json_from_record(_Built(artifact)))


def find_built(workspace: Path, recipe: Recipe, fingerprint: str) -> str | None:
    """The artifact, whole; None where the recipe has to be built."""
    if not _is_pinned(recipe):
        return None
    try:
        artifact = read_record(_path(workspace, recipe, fingerprint), _Built).artifact
        entry = Store(workspace).find(artifact, ArtifactInfo)
    except BadInputError:
        return None
    return artifact if entry.find_damage() is None else None


def _path(workspace: Path, recipe: Recipe, fingerprint: str) -> Path:
    decisive = {"optpipe": __version__, "recipe": plain_from_record(recipe), "environment": fingerprint}
    return workspace / NOTES / f"built-{hash_value(decisive)[:16]}.json"


def _is_pinned(recipe: Recipe) -> bool:
    name = recipe.model
    if recipe.calibration is not None:
        return False
    if name.endswith(".onnx"):
        return name in recipe.files
    return name.isidentifier() and not Path(name).exists() and name not in find_model_cards()
