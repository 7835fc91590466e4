"""A trace from torch.profiler's JSON (Chrome trace format), into the same tables as nsys' export, marked as such.

Times there are microseconds with three decimals since a base of their own. What torch.profiler does not record stays
empty and is listed in `absent`: operating-system calls, and anything that other threads do outside of torch.
"""

import gzip
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import polars as pl

from optpipe.core.errors import BadInputError
from optpipe.core.records import record_from_json
from optpipe.trace.recording.frames import SCHEMAS, Gpu, Trace, TraceHeader, trace_from_frames
from optpipe.trace.recording.read import MEMSET

_PROCESS = 1 << 48
_MEMORIES = frozenset({"Pageable", "Pinned", "Device", "Array", "Managed"})
_COPY_NAMES = {"HtoD": "Host-to-Device", "DtoH": "Device-to-Host", "DtoD": "Device-to-Device", "PtoP": "Peer-to-Peer"}
_TABLES = {
    "kernel": "kernels",
    "cuda_runtime": "api",
    "cuda_driver": "api",
    "gpu_memcpy": "copies",
    "gpu_memset": "copies",
    "user_annotation": "ranges",
}
"""The category of an event to the table that it is a row of; others are left out."""


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
    totalGlobalMem: int | None = None


@dataclass(frozen=True, slots=True)
class _Document:
    traceEvents: tuple[_Event, ...]
    deviceProperties: tuple[_Device, ...] = ()


def trace_from_torch(path: Path) -> Trace:
    """Reads what `torch.profiler.profile.export_chrome_trace` wrote; a name that ends in .gz is compressed.

    Raises:
        BadInputError: the file is missing, damaged, or no such trace.
    """
    rows: dict[str, list[tuple[object, ...]]] = {table: [] for table in _TABLES.values()}
    try:
        content = path.read_bytes()
        document = record_from_json(gzip.decompress(content) if path.suffix == ".gz" else content, _Document, path)
        for event in document.traceEvents:
            if event.ph == "X" and event.cat in _TABLES:
                rows[_TABLES[event.cat]].append(_row_from_event(event))
        found = {table: pl.DataFrame(rows[table], schema=dict(SCHEMAS[table]), orient="row") for table in rows}
    except FileNotFoundError:
        raise BadInputError(f"{path}: no such file") from None
    except (OSError, EOFError, ArithmeticError, ValueError, TypeError, pl.exceptions.PolarsError) as error:
        why = f"{type(error).__name__}: {str(error)[:120]}"
        raise BadInputError(f"{path}: not a torch.profiler trace ({why})") from error
    if not any(rows.values()):
        raise BadInputError(f"{path}: the recording is empty: no kernels, API calls, or annotations")
    gpus = tuple(_gpu_from_device(each) for each in document.deviceProperties)
    return trace_from_frames(TraceHeader(path.name, "torch.profiler", gpus), found)


def _row_from_event(event: _Event) -> tuple[object, ...]:
    """The values of the event's table, in the order of its schema."""
    start = round(float(event.ts) * 1_000)
    span, about = (start, start + round(event.dur * 1_000)), event.args
    if _TABLES[event.cat] in ("api", "ranges"):
        thread = _PROCESS + (event.tid & 0xFFFFFF if isinstance(event.tid, int) else 0)
        correlation = int(about.get("correlation", about.get("External id", 0)))
        return (*span, thread, *((correlation,) if _TABLES[event.cat] == "api" else ()), str(event.name))
    device, stream, correlation = (int(about.get(name, 0)) for name in ("device", "stream", "correlation"))
    operation = (*span, device, stream, correlation, _PROCESS)
    node = int(about["graph node id"]) if about.get("graph node id") else None
    if event.cat == "kernel":
        return (*operation, str(event.name), prod(map(int, about.get("grid", ()))), node)
    return (*operation, int(about.get("bytes", 0)), *_describe_copy(event), node)


def _describe_copy(event: _Event) -> tuple[str, str | None, str | None]:
    """Kind and memories: `Memcpy HtoD (Pageable -> Device)` says both, `Memset (Device)` the target alone."""
    name = str(event.name)
    memories = name[name.find("(") + 1 : name.rfind(")")].split(" -> ") if "(" in name else []
    source, target = (memories[0], memories[1]) if len(memories) == 2 else (None, memories[0] if memories else None)
    known = next((label for word, label in _COPY_NAMES.items() if word in name), "Unknown")
    kind = MEMSET if event.cat == "gpu_memset" else known
    return kind, source if source in _MEMORIES else None, target if target in _MEMORIES else None


def _gpu_from_device(found: _Device) -> Gpu:
    capability = f"{found.computeMajor}.{found.computeMinor}" if found.computeMajor is not None else None
    return Gpu(found.name, capability, found.numSms, found.totalGlobalMem)
