"""A trace from any file or folder that holds one: an SQLite export, an .nsys-rep, torch's JSON, or a run folder."""

from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl

from optpipe.core.errors import BadInputError, StageError
from optpipe.core.files import Files
from optpipe.core.records import json_from_record, record_from_files
from optpipe.trace.recording.frames import SCHEMAS, Trace, TraceHeader, trace_from_frames
from optpipe.trace.recording.importer import sqlite_from_recording
from optpipe.trace.recording.read import trace_from_sqlite
from optpipe.trace.recording.redaction import write_redacted_export
from optpipe.trace.recording.torch_trace import trace_from_torch

TABLES = "tables"
TRACE_JSON = "trace.json"
_RECORDINGS = (".nsys-rep", ".qdrep", ".qdstrm")


def trace_from_path(path: Path) -> Trace:
    """Reads `path`, whatever kind of recording it is.

    Raises:
        BadInputError: it is none, or damaged. MissingError: it has to be exported first and nsys is not here.
    """
    if path.is_dir():
        return trace_from_folder(path)
    if path.name.endswith((".json", ".json.gz")):
        return trace_from_torch(path)
    if path.suffix not in _RECORDINGS:
        return trace_from_sqlite(path)
    if not path.is_file():
        raise BadInputError(f"{path}: no such file")
    with TemporaryDirectory(prefix="optpipe-") as scratch:
        return trace_from_sqlite(sqlite_from_recording(path, Path(scratch)))


def redact(path: Path, target: Path) -> None:
    """Writes what is read of the recording at `path`, without the process environment, as an export at `target`.

    Raises:
        BadInputError: `path` is not an nsys recording, or `target` is there already. MissingError: nsys is not here.
    """
    if path.suffix not in _RECORDINGS:
        write_redacted_export(path, target)
        return
    with TemporaryDirectory(prefix="optpipe-") as scratch:
        write_redacted_export(sqlite_from_recording(path, Path(scratch)), target)


def write_trace(trace: Trace, directory: Path) -> None:
    """Writes each frame with rows as Parquet, names as plain strings, and `trace.json`; all free of the environment.

    Raises:
        StageError: it cannot be written.
    """
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
    """Reads what `write_trace` wrote; a profile of several stages has one folder per stage.

    Raises:
        BadInputError: there is no trace, or a damaged one.
    """
    if not (directory / TRACE_JSON).is_file():
        inner = sorted(path.parent.name for path in directory.glob(f"*/{TRACE_JSON}"))
        hint = f"; pass one of its stages: {', '.join(inner)}" if inner else ""
        raise BadInputError(f"{directory}: no trace found{hint or ' (no trace.json)'}")
    return trace_from_files(Files(directory))


def trace_from_files(files: Files) -> Trace:
    """Reads what `write_trace` wrote. Raises BadInputError as `trace_from_folder`."""
    header = record_from_files(files, TRACE_JSON, TraceHeader)
    try:
        frames = {
            table: pl.read_parquet(files.read(name)).select(
                pl.col(column).cast(dtype) for column, dtype in schema.items()
            )
            for table, schema in SCHEMAS.items()
            if files.has(name := f"{TABLES}/{table}.parquet")
        }
    except pl.exceptions.PolarsError as error:
        raise BadInputError(f"{files.folder}: the trace is damaged ({type(error).__name__}: {error})") from error
    return trace_from_frames(header, frames)
