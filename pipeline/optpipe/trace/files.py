"""Reads a trace from an SQLite export, an .nsys-rep, or a run folder."""

from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl

from optpipe.core.errors import BadInputError, StageError, read_as_user_file
from optpipe.core.files import Files
from optpipe.core.records import json_from_record, record_from_files
from optpipe.trace.nsys import sqlite_from_recording
from optpipe.trace.read import (
    SCHEMAS,
    Trace,
    TraceHeader,
    trace_from_frames,
    trace_from_sqlite,
)

TABLES = "tables"
TRACE_JSON = "trace.json"
_RECORDINGS = (".nsys-rep", ".qdrep", ".qdstrm")


def trace_from_path(path: Path) -> Trace:
    """Reads any kind of recording. Raises BadInputError if it is damaged, and MissingError if only nsys could read it."""
    if path.is_dir():
        return trace_from_folder(path)
    if path.suffix not in _RECORDINGS:
        return trace_from_sqlite(path)
    if not path.is_file():
        raise BadInputError(f"{path}: no such file")
    with TemporaryDirectory(prefix="optpipe-") as scratch:
        return trace_from_sqlite(sqlite_from_recording(path, Path(scratch)))


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
