"""What travels between hosts: parts of a workspace as a tar in chunks, hashes checked where they leave and where they arrive."""

import hashlib
import io
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

from optpipe.core.entries import ArtifactInfo, ModelInfo, VerificationInfo
from optpipe.core.errors import StageError, escape
from optpipe.models.artifacts.lookup import find_reference
from optpipe.sweep.merge import take_in
from optpipe.workspace.runs import load_run
from optpipe.workspace.store import Store

CHUNK_BYTES = 32 << 20
_DIGEST_BYTES = 32


def list_needed(store: Store, artifact: str) -> tuple[str, ...]:
    """The entries that a bench of an artifact reads: it, its model, its reference and the verifications on it; every byte checked."""
    entry = store.verify_entry(store.find(artifact, ArtifactInfo))
    model = store.verify_entry(store.find(entry.manifest.parents[0], ModelInfo))
    reference = find_reference(entry, model, store)
    paths = [entry.path, model.path]
    if reference is not None:
        pair = {entry.id, reference.id}
        verified = [each for each in store.list_entries(VerificationInfo) if pair <= set(each.manifest.parents)]
        paths += [store.verify_entry(reference).path, *(store.verify_entry(each).path for each in verified)]
    return tuple(f"store/{path.name}" for path in paths)


def list_all(workspace: Path) -> tuple[str, ...]:
    """Every entry, finished run and job of a workspace that was made for one task; every byte checked."""
    store = Store(workspace)
    for entry in store.list_entries():
        store.verify_entry(entry)
    for path in (workspace / "runs").glob("*/"):
        if (path / "manifest.json").is_file() and (problems := load_run(path).find_problems()):
            raise StageError(f"run {path.name}: {problems[0]}")
    return tuple(str(path.relative_to(workspace)) for path in sorted(workspace.glob("*/*")) if path.parts[-2] in _KEPT)


_KEPT = ("store", "runs", "jobs")


def pack(workspace: Path, names: Sequence[str]) -> Iterator[bytes]:
    """The named folders as a tar, in chunks of CHUNK_BYTES at most, each behind its SHA-256."""
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for name in names:
                tar.add(workspace / name, arcname=name)
        file.seek(0)
        while chunk := file.read(CHUNK_BYTES):
            yield hashlib.sha256(chunk).digest() + chunk


def unpack(chunks: Iterable[bytes], store: Store) -> None:
    """Adds what the chunks hold. Raises StageError where a byte changed on the way, or is not as its manifest says."""
    store.root.mkdir(parents=True, exist_ok=True)
    with store.scratch("parcel") as scratch, tempfile.TemporaryFile() as file:
        for number, chunk in enumerate(chunks, start=1):
            if hashlib.sha256(chunk[_DIGEST_BYTES:]).digest() != chunk[:_DIGEST_BYTES]:
                raise StageError(f"damaged in transfer: chunk {number} does not match its SHA-256")
            file.write(chunk[_DIGEST_BYTES:])
        if file.tell() == 0:
            return
        file.seek(0)
        try:
            with tarfile.open(fileobj=_as_bytes(file), mode="r") as tar:
                _extract(tar, scratch / "parcel")
        except (tarfile.TarError, EOFError) as error:
            raise StageError(f"damaged in transfer: {error}") from error
        if damaged := take_in(scratch / "parcel", store, [0, 0]):
            raise StageError(f"damaged in transfer: {damaged[0]}")


def _extract(tar: tarfile.TarFile, folder: Path) -> None:
    """Folders and plain files below `folder`, nothing else. `extractall` has no filter for that before Python 3.11.4."""
    for member in tar:
        target = folder / member.name
        if not (member.isdir() or member.isfile()) or not target.resolve().is_relative_to(folder.resolve()):
            raise StageError(f"damaged in transfer: {escape(member.name)} is not a file of a workspace")
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as out:
            shutil.copyfileobj(cast("io.BufferedReader", tar.extractfile(member)), out)


def _as_bytes(file: object) -> io.BufferedRandom:
    assert isinstance(file, io.BufferedRandom)
    return file
