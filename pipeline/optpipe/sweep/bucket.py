"""A folder that fsspec opens (`s3://…`, `gs://…`): through it chunks travel between hosts that share no file system.

Each sweep writes to a folder of its own below it, so that several drivers may use one bucket, and removes that folder at its end.
"""

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from optpipe.core.errors import BadInputError, MissingError, StageError, first_line

REQUEST_S = 300
"""How long one request may take: gcsfs without this waits for ever for a server that does not respond; s3fs has limits of its own."""
REMOVAL_S = 600
"""How long the removal of a folder may take, over all its requests."""
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""The extra of optpipe that installs what opens a kind of address."""


def is_bucket(store: str) -> bool:
    """Whether `--store` names an address, not a folder."""
    return "://" in store


def require_bucket(url: str) -> None:
    """Writes, reads and removes a few bytes. Raises MissingError where a library is missing, BadInputError where it is not ours to use."""
    _require_library(url)
    name, content = f"{url.rstrip('/')}/optpipe-{secrets.token_hex(8)}", secrets.token_bytes(16)
    try:
        (written,) = put_chunks(name, [content])
        found = get_chunk(written)
        remove_folder(name)
    except StageError as error:
        raise BadInputError(f"--store {url}: {error}\ncheck its name, the credentials and the endpoint") from error
    if found != content:
        raise BadInputError(f"--store {url}: what was read is not what was written")


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
    """Writes each chunk to a new name in the folder, and yields its address. Raises StageError where it cannot."""
    token = secrets.token_hex(8)
    for at, chunk in enumerate(chunks):
        name = f"{folder}/{token}-{at:04}"
        with _explain(f"cannot write {name}"), _open(name, "wb") as file:
            file.write(chunk)
        yield name


def get_chunk(name: str) -> bytes:
    """The chunk at an address. Raises StageError where it cannot be read."""
    with _explain(f"cannot read {name}"), _open(name, "rb") as file:
        content: bytes = file.read()
    return content


def remove_folder(folder: str) -> None:
    """Removes the folder with all that is in it; none there is fine. Raises StageError where it cannot."""
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
    """Every library has its own errors: of credentials, of the network, of the bucket."""
    try:
        yield
    except FileNotFoundError as error:
        raise StageError(f"{what}: no such bucket or object") from error
    except TimeoutError as error:
        raise StageError(f"{what}: the server did not respond in time") from error
    except Exception as error:
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise StageError(f"{what}: {kind}{first_line(error)}") from error
