"""Packs artifacts and runs that travel between a cluster's driver and its nodes, and unpacks them where they arrive."""

import hashlib
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, cast

from optpipe.core.entries import ArtifactInfo, ModelInfo, VerificationInfo
from optpipe.core.errors import StageError, escape
from optpipe.models.artifacts.lookup import find_reference
from optpipe.sweep.ledger import take_in
from optpipe.workspace.entry import load_run
from optpipe.workspace.store import Store

CHUNK_BYTES = 32 << 20
_DIGEST_BYTES = 32


def list_needed(store: Store, artifact: str) -> tuple[str, ...]:
    """The entries that a bench of an artifact reads: it, its model, its reference and their verifications; every byte checked."""
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
    """Every entry, finished run and job of a task's workspace; every byte checked."""
    store = Store(workspace)
    for entry in store.list_entries():
        store.verify_entry(entry)
    for path in (workspace / "runs").glob("*/"):
        if (path / "manifest.json").is_file() and (problems := load_run(path).find_problems()):
            raise StageError(f"run {path.name}: {problems[0]}")
    paths = sorted(path for folder in ("store", "runs") for path in (workspace / folder).glob("*"))
    return tuple(str(path.relative_to(workspace)) for path in paths)


def pack(workspace: Path, names: Iterable[str]) -> Iterator[bytes]:
    """The named folders as a tar, in chunks of at most CHUNK_BYTES, each after its SHA-256."""
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for name in names:
                tar.add(workspace / name, arcname=name)
        file.seek(0)
        while chunk := file.read(CHUNK_BYTES):
            yield hashlib.sha256(chunk).digest() + chunk


def unpack(chunks: Iterable[bytes], store: Store) -> None:
    """Adds the chunks' content. Raises StageError if a byte changed in transfer, or does not match its manifest."""
    store.root.mkdir(parents=True, exist_ok=True)
    with store.scratch("received") as scratch, tempfile.TemporaryFile() as file:
        for number, chunk in enumerate(chunks, start=1):
            if hashlib.sha256(chunk[_DIGEST_BYTES:]).digest() != chunk[:_DIGEST_BYTES]:
                raise StageError(f"damaged in transfer: chunk {number} does not match its SHA-256")
            file.write(chunk[_DIGEST_BYTES:])
        if file.tell() == 0:
            return
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r") as tar:
                _extract(tar, scratch / "received")
        except (tarfile.TarError, EOFError) as error:
            raise StageError(f"damaged in transfer: {error}") from error
        if damaged := take_in(scratch / "received", store)["damaged"]:
            raise StageError(f"damaged in transfer: {damaged[0]}")


def _extract(tar: tarfile.TarFile, folder: Path) -> None:
    """Folders and plain files below `folder`, nothing else. `extractall` has no such filter before Python 3.11.4."""
    for member in tar:
        target = folder / member.name
        if not (member.isdir() or member.isfile()) or not target.resolve().is_relative_to(folder.resolve()):
            raise StageError(f"damaged in transfer: {escape(member.name)} is not a file of a workspace")
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as out:
            shutil.copyfileobj(cast("IO[bytes]", tar.extractfile(member)), out)
