"""A trace in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Format: "Trace Event Format" (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): `X` is an event
with a duration, `b` and `e` are the ends of one that need not nest, `M` names processes and threads, `C` is a counter. Times are
microseconds.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl

from optpipe.core.errors import StageError
from optpipe.core.events import Listener
from optpipe.trace.analysis import Analysis
from optpipe.trace.kernels import shorten_name
from optpipe.trace.modules import locate_kernels
from optpipe.trace.read import Trace
from optpipe.trace.report import StageProfile

Event = Mapping[str, Any]
_GPU_PROCESS, _METRICS_THREAD = 1_000_000, 0
_THREAD = 0xFFFFFF


def write_chrome_trace(whole: Analysis, target: Path) -> int:
    """Writes the whole recording; returns the number of events. Raises StageError if the file cannot be written."""
    count = 0
    try:
        with target.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ns", "traceEvents": [')
            for event in list_events(whole):
                file.write(("\n" if count == 0 else ",\n") + json.dumps(event, allow_nan=False))
                count += 1
            file.write("\n]}\n")
    except OSError as error:
        raise StageError(f"cannot write {target}: {error.strerror or error}") from error
    return count


def list_events(whole: Analysis) -> Iterator[Event]:
    """Times start at the recording's first event."""
    trace = whole.trace
    origin_ns = whole.timeline.start_ns
    yield from _name_tracks(whole)
    yield from _list_host_spans(whole, origin_ns)
    paths = _find_paths(whole)
    for name, start, end, device, stream, launch in _rows(
        trace.kernels, "name", "start_ns", "end_ns", "device", "stream", "correlation_id"
    ):
        module = paths.get((launch, name), "")
        detail = {"name": name, **({"module": module} if module else {})}
        track = _GPU_PROCESS + (device or 0), stream or 0
        yield _span(shorten_name(name), "kernel", start, end, origin_ns, *track, args=detail)
    for kind, start, end, device, stream, size in _rows(
        trace.copies, "kind", "start_ns", "end_ns", "device", "stream", "bytes"
    ):
        track = _GPU_PROCESS + (device or 0), stream or 0
        args = {"bytes": size or 0}
        yield _span(kind or "copy", "copy", start, end, origin_ns, *track, args=args)
    for name, time, device, value in _rows(trace.metrics, "name", "time_ns", "device", "value"):
        yield {
            "name": name,
            "ph": "C",
            "ts": (time - origin_ns) / 1e3,
            "pid": _GPU_PROCESS + (device or 0),
            "tid": _METRICS_THREAD,
            "args": {"value": value or 0.0},
        }


def _list_host_spans(whole: Analysis, origin_ns: int) -> Iterator[Event]:
    """Ranges and calls of each thread; one that begins in another and outlasts it is asynchronous.

    On one thread, a viewer shows events with a duration only if they nest.
    """
    parts = [
        getattr(whole.trace, table)
        .select("start_ns", "end_ns", "thread", pl.col("name").cast(pl.String))
        .with_columns(category=pl.lit(category))
        for table, category in (("ranges", "nvtx"), ("api", "cuda"), ("os_calls", "os"))
    ]
    ordered = pl.concat(parts).sort("thread", "start_ns", "end_ns", descending=[False, False, True])
    owner, open_until = None, list[int]()
    for number, (start, end, thread, name, category) in enumerate(ordered.iter_rows()):
        if thread != owner:
            owner, open_until = thread, []
        while open_until and open_until[-1] <= start:
            open_until.pop()
        track = _host_track(thread)
        if open_until and end > open_until[-1]:
            shared = {"name": name, "cat": category, "id": number, "pid": track[0], "tid": track[1]}
            yield {**shared, "ph": "b", "ts": (start - origin_ns) / 1e3}
            yield {**shared, "ph": "e", "ts": (end - origin_ns) / 1e3}
        else:
            open_until.append(end)
            yield _span(name, category, start, end, origin_ns, *track)


def _find_paths(whole: Analysis) -> dict[tuple[int, str], str]:
    """The module of each kernel, by the correlation id of its launch and its name."""
    located = locate_kernels(whole)
    if located.is_empty():
        return {}
    operations = whole.timeline.operations
    known = operations.is_kernel & (operations.api_row >= 0)
    launches = whole.trace.kernels["correlation_id"][operations.row[known]]
    names, paths = located["kernel"].to_list(), located["path"].to_list()
    return {
        (launch, name): path
        for launch, name, path in zip(launches.to_list(), names, paths, strict=True)
        if path
    }


def _rows(frame: pl.DataFrame, *columns: str) -> Iterator[tuple[Any, ...]]:
    text = [column for column in columns if frame.schema[column] == pl.Categorical]
    yield from frame.select(columns).with_columns(pl.col(text).cast(pl.String)).iter_rows()


def _host_track(thread: int | None) -> tuple[int, int]:
    """Process and thread of nsys' global thread id: 24 bits each."""
    number = thread or 0
    return (number >> 24) & _THREAD, number & _THREAD


def _span(
    name: str,
    category: str,
    start_ns: int,
    end_ns: int,
    origin_ns: int,
    process: int,
    thread: int,
    args: Mapping[str, Any] | None = None,
) -> Event:
    event: dict[str, Any] = {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": (start_ns - origin_ns) / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "pid": process,
        "tid": thread,
    }
    return event if args is None else {**event, "args": args}


def _name_host_tracks(trace: Trace) -> Iterator[Event]:
    """A viewer shows bare numbers for processes and threads without a name."""
    tables = (trace.ranges, trace.api, trace.os_calls)
    threads = pl.concat(frame.select("thread") for frame in tables).unique().to_series()
    tracks = sorted({_host_track(thread) for thread in threads.to_list()})
    for process in sorted({process for process, _ in tracks}):
        yield _name_track("process_name", process, 0, f"host process {process}")
    for process, thread in tracks:
        yield _name_track("thread_name", process, thread, f"thread {thread}")


def _name_track(what: str, process: int, thread: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _name_tracks(whole: Analysis) -> Iterator[Event]:
    trace = whole.trace
    yield from _name_host_tracks(trace)
    devices = {device or 0 for device in trace.kernels["device"].unique().to_list()}
    devices |= {device or 0 for device in trace.copies["device"].unique().to_list()}
    for device in sorted(devices):
        name = trace.gpus[device].name if device < len(trace.gpus) else "GPU"
        yield _name_track("process_name", _GPU_PROCESS + device, 0, f"{name} {device}")
    streams = pl.concat(
        frame.select("device", "stream") for frame in (trace.kernels, trace.copies)
    ).unique()
    for device, stream in streams.sort("device", "stream").iter_rows():
        process = _GPU_PROCESS + (device or 0)
        yield _name_track("thread_name", process, stream or 0, f"stream {stream}")


def write_timeline(whole: Analysis, stage: StageProfile, output: Path, listener: Listener) -> None:
    count = write_chrome_trace(whole, output)
    listener.inform(f"wrote {output}: {count} events of {stage.subject.name}")
