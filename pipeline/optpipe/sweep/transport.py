"""How artifacts and runs travel between the driver of a cluster and its nodes: through Ray's object store, through a bucket, or
not at all, where all see one folder."""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from optpipe.core.errors import StageError
from optpipe.sweep.bucket import get_chunk, is_bucket, put_chunks, remove_folder
from optpipe.sweep.parcels import list_needed, pack
from optpipe.workspace.store import Store


class Transport:
    """The driver's side of `--store`, which is a workspace that all nodes see, the address of a folder that fsspec opens, or None."""

    def __init__(self, store: Store, shared: str | None) -> None:
        self.store = store
        self.bucket: str | None = None
        """The folder of this sweep in the bucket."""
        self.workspace: str | None = None
        """The workspace that all nodes see."""
        if shared is not None and is_bucket(shared):
            self.bucket = f"{shared.rstrip('/')}/optpipe-{secrets.token_hex(8)}"
        else:
            self.workspace = shared
        self._parcels: dict[str, list[Any]] = {}

    def send(self, artifact: str | None) -> list[Any]:
        """The chunks that hold an artifact and what a bench of it reads; the driver owns them, so that no worker's end loses them."""
        if artifact is None or self.workspace is not None:
            return []
        if artifact not in self._parcels:
            chunks = pack(self.store.workspace, list_needed(self.store, artifact))
            self._parcels[artifact] = list(_put(chunks) if self.bucket is None else put_chunks(self.bucket, chunks))
        return self._parcels[artifact]

    def fetch(self, chunks: Sequence[bytes]) -> Iterator[bytes]:
        """What a node handed back: chunks, or their addresses in the bucket."""
        return iter(chunks) if self.bucket is None else (get_chunk(name.decode()) for name in chunks)

    def close(self) -> str | None:
        """Removes what this sweep left in the bucket. Returns why it could not: no reason to lose what was measured."""
        try:
            if self.bucket is not None:
                remove_folder(self.bucket)
        except StageError as error:
            return f"{error}; remove it yourself, the results are in the workspace"
        return None


def _put(chunks: Iterator[bytes]) -> Iterator[Any]:
    import ray

    return (ray.put(chunk) for chunk in chunks)
