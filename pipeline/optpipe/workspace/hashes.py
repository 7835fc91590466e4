"""Lists of hashes: what every file of a folder was when it was stored, and what differs from that now."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from optpipe.core.files import Files
from optpipe.core.hashing import hash_file


@dataclass(frozen=True, slots=True)
class FileHash:
    """A file as it was when it was stored."""

    sha256: str
    size_bytes: int


def list_files(folder: Path, leave_out: Collection[str] = ()) -> dict[str, Path]:
    """The regular files below `folder` by POSIX path relative to it, in its order, but those named in `leave_out`."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: found[name] for name in sorted(found) if name not in leave_out and not found[name].is_symlink()}


def hash_files(folder: Path, leave_out: Collection[str] = ()) -> dict[str, FileHash]:
    """The hash and size of every file that `list_files` lists."""
    return {
        name: FileHash(hash_file(path), path.stat().st_size) for name, path in list_files(folder, leave_out).items()
    }


def find_changed_files(files: Files, hashes: Mapping[str, str]) -> list[str]:
    """`NAME: missing` or `NAME: changed` for every file whose SHA-256 is not as `hashes` has it."""
    found = []
    for name, sha256 in hashes.items():
        if not files.has(name):
            found.append(f"{name}: missing")
        elif files.hash(name) != sha256:
            found.append(f"{name}: changed")
    return found


def find_problems(files: Files, hashes: Mapping[str, str], list_name: str, leave_out: Collection[str]) -> list[str]:
    """What `find_changed_files` finds, and `NAME: not in LIST` for every file that is not listed; sorted."""
    unlisted = [f"{name}: not in {list_name}" for name in list_files(files.folder, leave_out) if name not in hashes]
    return sorted(find_changed_files(files, hashes) + unlisted)
