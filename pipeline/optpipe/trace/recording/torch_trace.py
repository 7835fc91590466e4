"""A trace from torch.profiler's JSON (Chrome trace format), into the same tables as nsys' export, marked as such.

Times there are microseconds with three decimals since a base of their own. What torch.profiler does not record stays
empty and is listed in `absent`: operating-system calls, and anything that other threads do outside of torch.
"""

import gzip
import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import polars as pl

from optpipe.errors import BadInputError
from optpipe.trace.recording.frames import SCHEMAS, Gpu, Trace
from optpipe.trace.recording.read import MEMSET

_PROCESS = 1 << 48
_MEMORIES = frozenset({"Pageable", "Pinned", "Device", "Array", "Managed"})
_COPY_NAMES = {"HtoD": "Host-to-Device", "DtoH": "Device-to-Host", "DtoD": "Device-to-Device", "PtoP": "Peer-to-Peer"}


def trace_from_torch(path: Path) -> Trace:
    """Reads what `torch.profiler.profile.export_chrome_trace` wrote; a name that ends in .gz is compressed.

    Raises:
        BadInputError: the file is missing, damaged, or no such trace.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            document = json.load(file)
        found = _rows(document)
        frames = {table: pl.DataFrame(rows, schema=dict(SCHEMAS[table])) for table, rows in found.items()}
        gpus = _gpus(document)
    except FileNotFoundError:
        raise BadInputError(f"{path}: no such file") from None
    except (
        OSError,
        EOFError,
        ArithmeticError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        pl.exceptions.PolarsError,
    ) as error:
        raise BadInputError(
            f"{path}: not a torch.profiler trace ({type(error).__name__}: {str(error)[:120]})"
        ) from error
    if not any(found.values()):
        raise BadInputError(f"{path}: the recording is empty: no kernels, API calls, or annotations")
    return Trace(
        source=path.name,
        tracer="torch.profiler",
        gpus=gpus,
        absent=tuple(table for table in SCHEMAS if not found.get(table)),
        kernels=frames["kernels"],
        api=frames["api"],
        copies=frames["copies"],
        ranges=frames["ranges"],
    )


def _rows(document: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    return {
        "kernels": [_kernel(event) for event in _select_events(events, "kernel")],
        "api": [_call(event) for event in _select_events(events, "cuda_runtime", "cuda_driver")],
        "copies": [_copy(event) for event in _select_events(events, "gpu_memcpy", "gpu_memset")],
        "ranges": [_range(event) for event in _select_events(events, "user_annotation")],
    }


def _select_events(events: Iterable[Mapping[str, Any]], *categories: str) -> list[Mapping[str, Any]]:
    return [event for event in events if event.get("cat") in categories]


def _times(event: Mapping[str, Any]) -> dict[str, int]:
    start = round(float(event["ts"]) * 1_000)
    return {"start_ns": start, "end_ns": start + round(float(event.get("dur", 0)) * 1_000)}


def _operation(event: Mapping[str, Any]) -> dict[str, Any]:
    about = event.get("args", {})
    node = about.get("graph node id")
    return {
        **_times(event),
        "device": int(about.get("device", 0)),
        "stream": int(about.get("stream", 0)),
        "correlation_id": int(about.get("correlation", 0)),
        "pid": _PROCESS,
        "graph_node": int(node) if node else None,
    }


def _kernel(event: Mapping[str, Any]) -> dict[str, Any]:
    about = event.get("args", {})
    blocks, threads = (prod(map(int, about.get(name, ()))) for name in ("grid", "block"))
    return {**_operation(event), "name": str(event["name"]), "blocks": blocks, "threads": threads}


def _copy(event: Mapping[str, Any]) -> dict[str, Any]:
    """`Memcpy HtoD (Pageable -> Device)` says kind and memories; `Memset (Device)` the memory alone."""
    name = str(event["name"])
    memories = name[name.find("(") + 1 : name.rfind(")")].split(" -> ") if "(" in name else []
    source, target = (memories[0], memories[1]) if len(memories) == 2 else (None, memories[0] if memories else None)
    is_memset = event.get("cat") == "gpu_memset"
    kind = MEMSET if is_memset else next((label for word, label in _COPY_NAMES.items() if word in name), "Unknown")
    return {
        **_operation(event),
        "bytes": int(event.get("args", {}).get("bytes", 0)),
        "kind": kind,
        "source_memory": source if source in _MEMORIES else None,
        "target_memory": target if target in _MEMORIES else None,
    }


def _call(event: Mapping[str, Any]) -> dict[str, Any]:
    about = event.get("args", {})
    return {**_range(event), "correlation_id": int(about.get("correlation", about.get("External id", 0)))}


def _range(event: Mapping[str, Any]) -> dict[str, Any]:
    thread = event.get("tid", 0)
    return {
        **_times(event),
        "thread": _PROCESS + (int(thread) & 0xFFFFFF if isinstance(thread, int) else 0),
        "name": str(event["name"]),
    }


def _gpus(document: Mapping[str, Any]) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            name=str(each.get("name", "unknown")),
            compute_capability=f"{each['computeMajor']}.{each['computeMinor']}" if "computeMajor" in each else None,
            multiprocessors=each.get("numSms"),
            memory_bytes=each.get("totalGlobalMem"),
        )
        for each in document.get("deviceProperties", [])
    )
