"""Sends artifacts and runs between a cluster's driver and its nodes: through Ray's object store, a bucket, or a shared folder."""

import hashlib
import secrets
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from optpipe.core.entries import ArtifactInfo, ModelInfo, VerificationInfo
from optpipe.core.errors import BadInputError, MissingError, StageError, escape, first_line
from optpipe.models.artifacts.lookup import find_reference
from optpipe.sweep.ledger import take_in
from optpipe.workspace.entry import load_run
from optpipe.workspace.store import Store

REQUEST_S = 300
"""Seconds of one request: gcsfs without a limit waits forever for a server that does not respond; s3fs has limits."""
REMOVAL_S = 600
"""Seconds of a folder's removal, over all its requests."""
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""The extra of optpipe with the library for each kind of address."""


def is_bucket(store: str) -> bool:
    return "://" in store


def require_bucket(url: str) -> None:
    """Writes, reads and removes a few bytes. Raises MissingError for a missing library, BadInputError if access fails."""
    _require_library(url)
    name, content = f"{url.rstrip('/')}/optpipe-{secrets.token_hex(8)}", secrets.token_bytes(16)
    try:
        (written,) = put_chunks(name, [content])
        found = get_chunk(written)
        remove_folder(name)
    except StageError as error:
        raise BadInputError(f"--store {url}: {error}\ncheck its name, the credentials and the endpoint") from error
    if found != content:
        raise BadInputError(f"--store {url}: the content read back differs from the content written")


def _require_library(url: str) -> None:
    import fsspec

    kind = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(kind)
    except ImportError as error:
        extra = _EXTRAS.get(kind)
        way_out = f"here and on every node: pip install 'optpipe[{extra}]'" if extra else first_line(error)
        raise MissingError(f"--store {url} requires a library that is not installed; {way_out}") from error
    except ValueError as error:
        raise BadInputError(f"--store {url}: {first_line(error)}; expected a folder, s3://… or gs://…") from error


def put_chunks(folder: str, chunks: Iterable[bytes]) -> Iterator[str]:
    """Writes each chunk to a new name in the folder, and yields its address. Raises StageError."""
    token = secrets.token_hex(8)
    for at, chunk in enumerate(chunks):
        name = f"{folder}/{token}-{at:04}"
        with _explain(f"cannot write {name}"), _open(name, "wb") as file:
            file.write(chunk)
        yield name


def get_chunk(name: str) -> bytes:
    """Raises StageError if it cannot be read."""
    with _explain(f"cannot read {name}"), _open(name, "rb") as file:
        content: bytes = file.read()
    return content


def remove_folder(folder: str) -> None:
    """Removes the folder if it exists. Raises StageError."""
    with _explain(f"cannot remove {folder}"), suppress(FileNotFoundError):
        system, path = _find(folder)
        system.invalidate_cache()  # others have written to it
        system.rm(path, recursive=True, **({"timeout": REMOVAL_S} if system.async_impl else {}))


def _open(name: str, mode: str) -> Any:
    system, path = _find(name)  # fsspec.open would create a bucket that is not there
    return system.open(path, mode)


def _find(name: str) -> tuple[Any, str]:
    import fsspec

    kind = name.partition("://")[0]
    options = (
        {"auto_mkdir": True} if kind == "file" else {"requests_timeout": REQUEST_S} if kind in ("gs", "gcs") else {}
    )
    system, path = fsspec.core.url_to_fs(name, **options)
    return system, str(path)


@contextmanager
def _explain(what: str) -> Iterator[None]:
    """Raises every library's errors as StageError."""
    try:
        yield
    except FileNotFoundError as error:
        raise StageError(f"{what}: no such bucket or object") from error
    except TimeoutError as error:
        raise StageError(f"{what}: the server did not respond in time") from error
    except Exception as error:
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise StageError(f"{what}: {kind}{first_line(error)}") from error


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
    return tuple(
        str(path.relative_to(workspace))
        for path in sorted(workspace.glob("*/*"))
        if path.parts[-2] in ("store", "runs")
    )


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


class Transport:
    """The driver's side of `--store`: a workspace that all nodes see, the address of a folder that fsspec opens, or None."""

    def __init__(self, store: Store, shared: str | None) -> None:
        self.store = store
        self.bucket: str | None = None
        self.workspace: str | None = None
        if shared is not None and is_bucket(shared):
            self.bucket = f"{shared.rstrip('/')}/optpipe-{secrets.token_hex(8)}"
        else:
            self.workspace = shared
        self._sent: dict[str, list[Any]] = {}

    def send(self, artifact: str | None) -> list[Any]:
        """The chunks that hold an artifact and what a bench of it reads; the driver owns them, so that they outlive the workers."""
        if artifact is None or self.workspace is not None:
            return []
        if artifact not in self._sent:
            chunks = pack(self.store.workspace, list_needed(self.store, artifact))
            if self.bucket is not None:
                self._sent[artifact] = list(put_chunks(self.bucket, chunks))
            else:
                import ray

                self._sent[artifact] = [ray.put(chunk) for chunk in chunks]
        return self._sent[artifact]

    def fetch(self, chunks: Sequence[bytes]) -> Iterator[bytes]:
        """A node's chunks, or their addresses in the bucket."""
        return iter(chunks) if self.bucket is None else (get_chunk(name.decode()) for name in chunks)

    def close(self) -> str | None:
        """Removes this sweep's folder from the bucket. Returns why it could not: the results are safe."""
        try:
            if self.bucket is not None:
                remove_folder(self.bucket)
        except StageError as error:
            return f"{error}; remove it yourself, the results are in the workspace"
        return None
