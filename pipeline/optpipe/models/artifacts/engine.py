"""The files that an artifact loads, which are signed off together."""

from optpipe.core.entries import ArtifactInfo
from optpipe.core.files import hash_value
from optpipe.workspace.entry import Entry


def hash_engine(entry: Entry[ArtifactInfo]) -> str:
    """SHA-256 of the main file; with more files, a hash over all names and hashes."""
    names = _list_files(entry)
    return entry.sha256(names[0]) if len(names) == 1 else hash_value({name: entry.sha256(name) for name in names})


def measure_engine(entry: Entry[ArtifactInfo]) -> int:
    return sum(entry.manifest.files[name].size_bytes for name in _list_files(entry))


def _list_files(entry: Entry[ArtifactInfo]) -> tuple[str, ...]:
    return (entry.info.file, *entry.info.more_files)
