"""A trace from any file or folder that holds one: an SQLite export, an .nsys-rep, torch's JSON, or a run folder."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

from optpipe.errors import BadInputError
from optpipe.trace.recording.export import open_export
from optpipe.trace.recording.frames import SCHEMAS, Gpu, Trace
from optpipe.trace.recording.importer import sqlite_from_recording
from optpipe.trace.recording.python_samples import add_samples, has_samples
from optpipe.trace.recording.read import trace_from_sqlite
from optpipe.trace.recording.redaction import write_frames, write_redacted_export
from optpipe.trace.recording.torch_trace import trace_from_torch

TABLES = "tables"
TRACE_JSON = "trace.json"
_RECORDINGS = (".nsys-rep", ".qdrep", ".qdstrm")


def trace_from_path(path: Path, warn: Callable[[str], None] = lambda _: None) -> Trace:
    """Reads `path`, whatever kind of recording it is; `warn` hears of what cannot be read beside the rest.

    Raises:
        BadInputError: it is none, or damaged. MissingError: it has to be exported first and nsys is not here.
    """
    if path.is_dir():
        return trace_from_folder(path)
    if path.name.endswith((".json", ".json.gz")):
        return trace_from_torch(path)
    if path.suffix in _RECORDINGS:
        if not path.is_file():
            raise BadInputError(f"{path}: no such file")
        with TemporaryDirectory(prefix="optpipe-") as scratch:
            sqlite = sqlite_from_recording(path, Path(scratch))
            trace = trace_from_sqlite(sqlite)
            return add_samples(trace, path, Path(scratch), warn) if has_samples(open_export(sqlite)) else trace
    return trace_from_sqlite(path)


def redact(path: Path, target: Path) -> None:
    """Writes what is read of the recording at `path`, without the process environment, as an export at `target`.

    Raises:
        BadInputError: `path` is no recording of nsys, or `target` is there already. MissingError: nsys is not here.
    """
    if path.suffix not in _RECORDINGS:
        write_redacted_export(path, target)
        return
    with TemporaryDirectory(prefix="optpipe-") as scratch:
        write_redacted_export(sqlite_from_recording(path, Path(scratch)), target)


def write_trace(trace: Trace, directory: Path) -> tuple[Path, ...]:
    """Writes the frames and what is known beside them, both free of the process environment; read by `trace_from_folder`."""
    files = write_frames(trace, directory / TABLES)
    known = {
        "source": trace.source,
        "tracer": trace.tracer,
        "schema": trace.schema,
        "gpus": [asdict(gpu) for gpu in trace.gpus],
        "absent": list(trace.absent),
        "diagnostics": list(trace.diagnostics),
        "graph_launches_untraced": trace.graph_launches_untraced,
        "overhead_ns": trace.overhead_ns,
    }
    (directory / TRACE_JSON).write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return (*files, directory / TRACE_JSON)


def trace_from_folder(directory: Path) -> Trace:
    """Reads what `write_trace` wrote; a profile of several stages has one folder per stage."""
    if not (directory / TRACE_JSON).is_file():
        inner = sorted(path.parent.name for path in directory.glob(f"*/{TRACE_JSON}"))
        hint = f"; pass one of its stages: {', '.join(inner)}" if inner else ""
        raise BadInputError(f"{directory}: no trace found{hint or ' (no trace.json)'}")
    try:
        known: dict[str, Any] = json.loads((directory / TRACE_JSON).read_text(encoding="utf-8"))
        frames = {
            table: pl.read_parquet(path).cast(dict(schema))  # type: ignore[arg-type]
            for table, schema in SCHEMAS.items()
            if (path := directory / TABLES / f"{table}.parquet").is_file()
        }
        return Trace(
            source=known["source"],
            tracer=known["tracer"],
            schema=known["schema"],
            gpus=tuple(Gpu(**gpu) for gpu in known["gpus"]),
            absent=tuple(known["absent"]),
            diagnostics=tuple(known["diagnostics"]),
            graph_launches_untraced=known["graph_launches_untraced"],
            overhead_ns=known["overhead_ns"],
            **frames,
        )
    except (OSError, ValueError, KeyError, TypeError, pl.exceptions.PolarsError) as error:
        raise BadInputError(f"{directory}: the trace is damaged ({type(error).__name__}: {error})") from error
