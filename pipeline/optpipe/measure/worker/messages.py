"""Messages between parent and worker, as JSON: how to start, a session, points to measure, and reports; and the samples.

Samples are in a memory-mapped file: writing one costs no system call, and they outlive the process. The page cache belongs
to the kernel, so that everything written before a crash or a kill can be read back. Space is reserved ahead, because a write
to a mapped page on a full disk would kill the process.

Layout, little-endian: a 64-byte header (magic, version, record size, count, stop flag), then records of 72 bytes.
"""

import mmap
import os
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from optpipe.core import pl
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import StageError
from optpipe.core.load import LoadSpec
from optpipe.core.measurement import SAMPLE_COLUMNS, OutputCheck
from optpipe.core.wording import Argument
from optpipe.stats.selected_rows import EMPTY, Selection

if TYPE_CHECKING:
    from optpipe.backends.base import Session


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """Work of a worker before it has a session, while another one measures."""

    affinity: tuple[int, ...] | None = None
    """The processors it may use, set before any library counts them."""
    imports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionSpec:
    loader: str
    """`module:function`; called with `arguments`, returns a backends.base.Session."""
    arguments: Mapping[str, Any]
    inputs: Mapping[str, str]
    """Input name → .npy file of a pool of inputs (inputs, ...)."""
    reference: Mapping[str, str] = field(default_factory=dict)
    """Output name → .npy file of the expected output of each input in the pool; empty without a reference."""
    smallest: int = 1
    """The smallest batch size of the profile."""
    input_axes: Mapping[str, int | None] = field(default_factory=dict)
    """Input name → batch axis, None for one value per call; default 0."""
    output_axes: Mapping[str, int | None] = field(default_factory=dict)
    selection: Selection = EMPTY
    """Outputs whose rows the model selects: they are compared as sets."""
    reference_name: str = ""
    tolerance: float = 1e-2
    """Maximum relative L2 error against the reference."""
    device: str = "cpu"
    streams: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    id: str
    spool: str
    load: LoadSpec
    arrivals_seed: int = 0
    """Server: seed of the arrivals."""


@dataclass(frozen=True, slots=True)
class CacheProbe:
    known_ns: tuple[int, ...] = ()
    new_ns: tuple[int, ...] = ()
    stale: bool = False
    """Whether the output for a new input differed from the session's untimed output."""


@dataclass(frozen=True, slots=True)
class PointReport:
    steady: bool
    queries_needed: int
    stopped: bool
    host_peak_bytes: int
    rotated: int
    rotated_bytes: int
    output_check: OutputCheck
    cache_probe: CacheProbe
    load_ns: int | None = None
    """From the start of loading the session to its first answer; None if it gave none."""
    load_why_not: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """Events of a worker, one per line: `standing-by`, `ready`, `measuring`, `done`, `failed`, `out-of-memory`; `ended`
    if it closed its output."""

    kind: str
    pid: int = 0
    gpu_uuid: str | None = None
    """NVML and CUDA number GPUs differently, but share this name."""
    report: PointReport | None = None
    modules: tuple[str, ...] = ()
    """With `done`: all imported modules in order, which the next worker of its kind imports while standing by."""
    status: int = 0
    message: str = ""
    """With `failed`: as `core.message_wire` writes it."""


def session_from_loader(loader: str, arguments: Mapping[str, Any]) -> "Session":
    module, _, function = loader.partition(":")
    session: Session = getattr(import_module(module), function)(**arguments)
    return session


def session_from_store(workspace: str, entry: str, options: Mapping[str, Any]) -> "Session":
    """Loads an artifact of the store after checking every byte against its manifest, since deserializing runs code."""
    from optpipe.backends.registry import load_artifact
    from optpipe.workspace.store import Store

    store = Store(Path(workspace))
    return load_artifact(store.find(entry, ArtifactInfo), store, options)


MAGIC = b"OPTSPOOL"
VERSION = 1
HEADER_BYTES = 64
COUNT_AT, STOP_AT = 16, 24
RECORD = struct.Struct("<BxHIII7q")
"""phase, stream, input, images, (padding), scheduled, start, end, enqueue, h2d, compute, d2h; a missing time is -1."""
CHUNK_RECORDS = 1 << 16
_COUNT = struct.Struct("<Q")
_HEAD = struct.Struct("<8sII")


class Spool:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b")
        self._capacity = 0
        self.count = 0
        try:
            self._map = self._grow()
        except StageError:
            self._file.close()
            path.unlink()
            raise
        _HEAD.pack_into(self._map, 0, MAGIC, VERSION, RECORD.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._map.close()
        self._file.close()

    def writer(self) -> Callable[..., None]:
        """A function (phase, stream, input, images, 0, scheduled, start, end, enqueue, h2d, compute, d2h) → None."""
        pack, set_count, size = RECORD.pack_into, _COUNT.pack_into, RECORD.size

        def write(*record: int) -> None:
            if self.count == self._capacity:
                self._map.close()
                self._map = self._grow()
            pack(self._map, HEADER_BYTES + self.count * size, *record)
            self.count += 1
            set_count(
                self._map, COUNT_AT, self.count
            )  # last, so that a reader never sees half a record

        return write

    def read_last_latencies_ns(self, count: int) -> np.ndarray:
        """ns from the due time to the answer of each of the last `count` queries."""
        count = min(count, self.count)
        start = HEADER_BYTES + (self.count - count) * RECORD.size
        records = np.frombuffer(
            self._map[start : start + count * RECORD.size], dtype=_make_record_dtype()
        )
        return records["end_ns"] - records["scheduled_ns"]  # type: ignore[no-any-return]

    @property
    def stopped(self) -> bool:
        return self._map[STOP_AT] != 0

    def _grow(self) -> mmap.mmap:
        size = HEADER_BYTES + (self._capacity + CHUNK_RECORDS) * RECORD.size
        try:
            os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError as error:
            problem = f"no space for samples in {self._file.name}: {error.strerror}"
            raise StageError(
                f"{problem}; free disk space or use another " + Argument("workspace")
            ) from error
        self._capacity += CHUNK_RECORDS
        return mmap.mmap(self._file.fileno(), size)


def request_stop(path: Path) -> None:
    """Asks the process that writes `path` to end its measurement; does nothing without such a file."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        file.seek(STOP_AT)
        file.write(b"\1")


def _make_record_dtype() -> np.dtype[np.void]:
    return np.dtype(
        [
            ("phase", "u1"),
            ("_0", "u1"),
            ("stream", "<u2"),
            ("input", "<u4"),
            ("images", "<u4"),
            ("_1", "<u4"),
        ]
        + [(name, "<i8") for name in SAMPLE_COLUMNS if name.endswith("_ns")]
    )


def frame_from_spool(path: Path) -> "pl.DataFrame":
    """The samples with the columns of `core.measurement.SAMPLE_COLUMNS`. Raises StageError for another file."""
    content = path.read_bytes()
    if not content.strip(b"\0"):  # the writer was killed before the first sample
        content = _HEAD.pack(MAGIC, VERSION, RECORD.size).ljust(HEADER_BYTES, b"\0")
    if len(content) < HEADER_BYTES or _HEAD.unpack_from(content) != (MAGIC, VERSION, RECORD.size):
        raise StageError(f"{path} is not a sample spool of version {VERSION}")
    count = _COUNT.unpack_from(content, COUNT_AT)[0]
    records = np.frombuffer(content, dtype=_make_record_dtype(), count=count, offset=HEADER_BYTES)
    frame = pl.DataFrame({name: records[name].copy() for name in SAMPLE_COLUMNS})
    typed = [
        pl.col(name).cast(getattr(pl, kind_name)) for name, kind_name in SAMPLE_COLUMNS.items()
    ]
    missing = [pl.col(name).replace(-1, None) for name in ("h2d_ns", "compute_ns", "d2h_ns")]
    return frame.with_columns(typed).with_columns(missing)
