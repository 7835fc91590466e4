"""Reads a trace from an SQLite export, an .nsys-rep, torch's JSON, or a run folder."""

import gzip
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

from optpipe.core.errors import BadInputError, StageError, read_as_user_file
from optpipe.core.files import Files
from optpipe.core.records import json_from_record, record_from_files, record_from_json
from optpipe.trace.nsys import sqlite_from_recording
from optpipe.trace.read import (
    MEMSET,
    SCHEMAS,
    Gpu,
    Trace,
    TraceHeader,
    trace_from_frames,
    trace_from_sqlite,
    write_redacted_export,
)

TABLES = "tables"
TRACE_JSON = "trace.json"
_RECORDINGS = (".nsys-rep", ".qdrep", ".qdstrm")
_PROCESS = 1 << 48
_MEMORIES = frozenset({"Pageable", "Pinned", "Device", "Array", "Managed"})
_COPY_NAMES = {"HtoD": "Host-to-Device", "DtoH": "Device-to-Host", "DtoD": "Device-to-Device", "PtoP": "Peer-to-Peer"}
_TABLE_OF = {
    "kernel": "kernels",
    "cuda_runtime": "api",
    "cuda_driver": "api",
    "gpu_memcpy": "copies",
    "gpu_memset": "copies",
    "user_annotation": "ranges",
}
"""The table of each event category; other categories are left out."""


def trace_from_path(path: Path) -> Trace:
    """Reads any kind of recording. Raises BadInputError if it is damaged, and MissingError if only nsys could read it."""
    if path.is_dir():
        return trace_from_folder(path)
    if path.name.endswith((".json", ".json.gz")):
        return trace_from_torch(path)
    with _open_export_file(path) as export:
        return trace_from_sqlite(export)


@contextmanager
def _open_export_file(path: Path) -> Iterator[Path]:
    """Exports a recording to SQLite for the time of the block; yields any other file unchanged."""
    if path.suffix not in _RECORDINGS:
        yield path
        return
    if not path.is_file():
        raise BadInputError(f"{path}: no such file")
    with TemporaryDirectory(prefix="optpipe-") as scratch:
        yield sqlite_from_recording(path, Path(scratch))


def redact(path: Path, target: Path) -> None:
    """Writes an export without the process environment. Raises BadInputError for other files, or if `target` exists."""
    with _open_export_file(path) as export:
        write_redacted_export(export, target)


def write_trace(trace: Trace, directory: Path) -> None:
    """Writes each frame with rows as Parquet, and `trace.json`; neither contains the process environment."""
    header = TraceHeader(**{each.name: getattr(trace, each.name) for each in fields(TraceHeader)})
    try:
        (directory / TABLES).mkdir(parents=True, exist_ok=True)
        for table, frame in trace.tables.items():
            if frame.height:
                plain = frame.with_columns(pl.col(pl.Categorical).cast(pl.String))
                plain.write_parquet(directory / TABLES / f"{table}.parquet", compression="zstd")
        (directory / TRACE_JSON).write_bytes(json_from_record(header))
    except OSError as error:
        raise StageError(
            f"cannot write {directory}: {error.strerror or error}; free some space or choose another --workspace"
        ) from error


def trace_from_folder(directory: Path) -> Trace:
    """Reads the output of `write_trace`. Raises BadInputError if there is none, or it is damaged."""
    if not (directory / TRACE_JSON).is_file():
        inner = sorted(path.parent.name for path in directory.glob(f"*/{TRACE_JSON}"))
        hint = f"; pass one of its stages: {', '.join(inner)}" if inner else ""
        raise BadInputError(f"{directory}: no trace found{hint or ' (no trace.json)'}")
    return trace_from_files(Files(directory))


def trace_from_files(files: Files) -> Trace:
    header = record_from_files(files, TRACE_JSON, TraceHeader)
    with read_as_user_file(files.folder, "a recorded trace"):
        frames = {
            table: pl.read_parquet(files.read(name)).select(
                pl.col(column).cast(dtype) for column, dtype in schema.items()
            )
            for table, schema in SCHEMAS.items()
            if files.has(name := f"{TABLES}/{table}.parquet")
        }
    return trace_from_frames(header, frames)


@dataclass(frozen=True, slots=True)
class _Event:
    ph: str = ""
    cat: str = ""
    name: str | int = ""
    ts: float | str = 0.0
    dur: float = 0.0
    tid: int | str = 0
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Device:
    name: str = "unknown"
    computeMajor: int | None = None
    computeMinor: int | None = None
    numSms: int | None = None


@dataclass(frozen=True, slots=True)
class _Document:
    traceEvents: tuple[_Event, ...]
    deviceProperties: tuple[_Device, ...] = ()


def trace_from_torch(path: Path) -> Trace:
    """Reads torch's `export_chrome_trace`, also with .gz. Raises BadInputError for a missing, damaged, or other file."""
    rows: dict[str, list[tuple[object, ...]]] = {table: [] for table in _TABLE_OF.values()}
    try:
        content = path.read_bytes()
        document = record_from_json(gzip.decompress(content) if path.suffix == ".gz" else content, _Document, path)
        for event in document.traceEvents:
            if event.ph == "X" and event.cat in _TABLE_OF:
                rows[_TABLE_OF[event.cat]].append(_row_from_event(event))
        found = {table: pl.DataFrame(rows[table], schema=dict(SCHEMAS[table]), orient="row") for table in rows}
    except FileNotFoundError:
        raise BadInputError(f"{path}: no such file") from None
    except (OSError, EOFError, ArithmeticError, ValueError, TypeError, pl.exceptions.PolarsError) as error:
        why = f"{type(error).__name__}: {str(error)[:120]}"
        raise BadInputError(f"{path}: not a torch.profiler trace ({why})") from error
    if not any(rows.values()):
        raise BadInputError(f"{path}: the recording is empty: no kernels, API calls, or annotations")
    gpus = tuple(
        Gpu(each.name, None if each.computeMajor is None else f"{each.computeMajor}.{each.computeMinor}", each.numSms)
        for each in document.deviceProperties
    )
    return trace_from_frames(TraceHeader(path.name, "torch.profiler", gpus), found)


def _row_from_event(event: _Event) -> tuple[object, ...]:
    start = round(float(event.ts) * 1_000)
    span, about = (start, start + round(event.dur * 1_000)), event.args
    if _TABLE_OF[event.cat] in ("api", "ranges"):
        thread = _PROCESS + (event.tid & 0xFFFFFF if isinstance(event.tid, int) else 0)
        correlation = int(about.get("correlation", about.get("External id", 0)))
        return (*span, thread, *((correlation,) if _TABLE_OF[event.cat] == "api" else ()), str(event.name))
    device, stream, correlation = (int(about.get(name, 0)) for name in ("device", "stream", "correlation"))
    operation = (*span, device, stream, correlation, _PROCESS)
    node = int(about["graph node id"]) if about.get("graph node id") else None
    if event.cat == "kernel":
        return (*operation, str(event.name), prod(map(int, about.get("grid", ()))), node)
    # `Memcpy HtoD (Pageable -> Device)` names kind and memories, `Memset (Device)` only the target
    name = str(event.name)
    memories = name[name.find("(") + 1 : name.rfind(")")].split(" -> ") if "(" in name else []
    pair = memories if len(memories) == 2 else [None, memories[0] if memories else None]
    kind = next((label for word, label in _COPY_NAMES.items() if word in name), "Unknown")
    kind = MEMSET if event.cat == "gpu_memset" else kind
    return (*operation, int(about.get("bytes", 0)), kind, *(each if each in _MEMORIES else None for each in pair), node)
