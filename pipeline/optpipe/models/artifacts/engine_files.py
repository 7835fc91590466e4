"""The files of an artifact that the runtime loads: their names, hash, and size; and the hash of its model."""

from optpipe.core.entries import ArtifactInfo
from optpipe.core.files import hash_value
from optpipe.workspace.entry import Entry, Manifest


def hash_model(manifest: Manifest) -> str:
    """Hash of everything that determines an exported model except batch sizes, shapes, and versions of tools."""
    return hash_value({**(manifest.recipe or {}).get("model", {}), "batch": None, "shapes": None})


def hash_engine(entry: Entry[ArtifactInfo]) -> str:
    """SHA-256 of the main file; with more files, a hash over all names and hashes."""
    names = list_engine_files(entry)
    return (
        entry.sha256(names[0])
        if len(names) == 1
        else hash_value({name: entry.sha256(name) for name in names})
    )


def measure_engine(entry: Entry[ArtifactInfo]) -> int:
    return sum(entry.manifest.files[name].size_bytes for name in list_engine_files(entry))


def list_engine_files(entry: Entry[ArtifactInfo]) -> tuple[str, ...]:
    """The files that `hash_engine` covers, the main one first."""
    return (entry.info.file, *entry.info.more_files)
