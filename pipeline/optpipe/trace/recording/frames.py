"""The frames of a trace: one typed schema each, the same whatever tool and version recorded it.

Times are nanoseconds on the trace's own clock. `thread` is nsys' serialized global id, which holds the process too
(`pid` is the same with the low 24 bits cleared), so that several processes in one trace cannot be mixed up.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import polars as pl
from polars._typing import PolarsDataType

NAME_DTYPE = pl.Categorical
"""Names repeat a thousandfold: kept as codes, so that grouping a million rows by name compares integers."""
FrameSchema = Mapping[str, PolarsDataType]
_SPAN: FrameSchema = {"start_ns": pl.Int64, "end_ns": pl.Int64}
_OPERATION: FrameSchema = {**_SPAN, **dict.fromkeys(("device", "stream", "correlation_id", "pid"), pl.Int64)}

KERNEL_SCHEMA: FrameSchema = {**_OPERATION, "name": NAME_DTYPE, "blocks": pl.Int64, "graph_node": pl.Int64}
API_SCHEMA: FrameSchema = {**_SPAN, "thread": pl.Int64, "correlation_id": pl.Int64, "name": NAME_DTYPE}
COPY_SCHEMA: FrameSchema = {
    **_OPERATION,
    "bytes": pl.Int64,
    **dict.fromkeys(("kind", "source_memory", "target_memory"), pl.String),
    "graph_node": pl.Int64,
}
"""Copies and memsets (kind `Memset`)."""
RANGE_SCHEMA: FrameSchema = {**_SPAN, "thread": pl.Int64, "name": NAME_DTYPE}
METRIC_SCHEMA: FrameSchema = {"time_ns": pl.Int64, "device": pl.Int64, "name": NAME_DTYPE, "value": pl.Float64}
"""GPU metrics at a fixed rate; recorded on request."""
SCHEMAS: Mapping[str, FrameSchema] = {
    "kernels": KERNEL_SCHEMA,
    "api": API_SCHEMA,
    "copies": COPY_SCHEMA,
    "ranges": RANGE_SCHEMA,
    "os_runtime": RANGE_SCHEMA,
    "metrics": METRIC_SCHEMA,
}


def make_empty_frame(table: str) -> pl.DataFrame:
    return pl.DataFrame(schema=dict(SCHEMAS[table]))


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the trace describes it; None where the export does not say."""

    name: str
    compute_capability: str | None = None
    multiprocessors: int | None = None
    memory_bytes: int | None = None
    bandwidth_bytes_per_s: int | None = None


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What is known of a recording beside its frames."""

    source: str
    tracer: str
    """The tool and its version: `nsys 2025.3.2.0`, `torch.profiler 2.14`."""
    gpus: tuple[Gpu, ...] = ()
    diagnostics: tuple[str, ...] = ()
    """What is missing or damaged: events that the profiler says it lost, rows without times or with impossible ones."""
    graph_launches_untraced: int = 0
    """CUDA graphs recorded as one opaque row each (`--cuda-graph-trace=graph`)."""
    overhead_ns: int = 0
    """Time that the profiler reports to have spent itself."""


@dataclass(frozen=True, slots=True)
class Trace(TraceHeader):
    """Everything read from one recording; `trace_from_frames` makes it."""

    absent: tuple[str, ...] = ()
    """Tables the recording does not have; what needs them is withheld."""
    kernels: pl.DataFrame = field(default_factory=lambda: make_empty_frame("kernels"))
    api: pl.DataFrame = field(default_factory=lambda: make_empty_frame("api"))
    copies: pl.DataFrame = field(default_factory=lambda: make_empty_frame("copies"))
    ranges: pl.DataFrame = field(default_factory=lambda: make_empty_frame("ranges"))
    os_runtime: pl.DataFrame = field(default_factory=lambda: make_empty_frame("os_runtime"))
    metrics: pl.DataFrame = field(default_factory=lambda: make_empty_frame("metrics"))

    @property
    def tables(self) -> dict[str, pl.DataFrame]:
        return {table: getattr(self, table) for table in SCHEMAS}


_FARTHEST_NS = 1 << 60
"""36 years from the clock's origin: a timestamp beyond is damage, and sums of such overflow."""


def trace_from_frames(header: TraceHeader, frames: Mapping[str, pl.DataFrame]) -> Trace:
    """The trace with those rows of `frames` that have their times and end no earlier than they start.

    How many rows of which frame are left out is among the diagnostics: the trace is then not to be trusted as a whole.
    """
    kept, lost = {}, list(header.diagnostics)
    for table, frame in frames.items():
        times = [column for column in ("start_ns", "end_ns", "time_ns") if column in frame.columns]
        timed = frame.drop_nulls(times).filter(*(pl.col(each).abs() < _FARTHEST_NS for each in times))
        kept[table] = timed.filter(pl.col("end_ns") >= pl.col("start_ns")) if "end_ns" in times else timed
        if timed.height < frame.height:
            lost.append(f"{frame.height - timed.height} rows of {table} have no possible timestamp")
        if kept[table].height < timed.height:
            lost.append(f"{timed.height - kept[table].height} rows of {table} end before they start")
    absent = tuple(table for table in SCHEMAS if table not in kept or kept[table].is_empty())
    known = {each.name: getattr(header, each.name) for each in fields(TraceHeader)}
    return Trace(**known | {"diagnostics": tuple(lost), "absent": absent} | kept)
