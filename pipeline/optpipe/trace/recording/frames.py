"""The frames of a trace: one typed schema each, the same whatever tool and version recorded it.

Times are nanoseconds on the trace's own clock. `thread` is nsys' serialized global id, which holds the process too
(`pid` is the same with the low 24 bits cleared), so that several processes in one trace cannot be mixed up.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

NAME_DTYPE = pl.Categorical
"""Names repeat a thousandfold: kept as codes, so that grouping a million rows by name compares integers."""

KERNEL_SCHEMA: Mapping[str, Any] = {
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "device": pl.Int64,
    "stream": pl.Int64,
    "correlation_id": pl.Int64,
    "pid": pl.Int64,
    "name": NAME_DTYPE,
    "blocks": pl.Int64,
    "threads": pl.Int64,
    "graph_node": pl.Int64,
}
API_SCHEMA: Mapping[str, Any] = {
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "thread": pl.Int64,
    "correlation_id": pl.Int64,
    "name": NAME_DTYPE,
}
COPY_SCHEMA: Mapping[str, Any] = {
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "device": pl.Int64,
    "stream": pl.Int64,
    "correlation_id": pl.Int64,
    "pid": pl.Int64,
    "bytes": pl.Int64,
    "kind": pl.String,
    "source_memory": pl.String,
    "target_memory": pl.String,
    "graph_node": pl.Int64,
}
"""Copies and memsets (kind `Memset`)."""
SYNCHRONIZATION_SCHEMA: Mapping[str, Any] = {
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "stream": pl.Int64,
    "correlation_id": pl.Int64,
    "pid": pl.Int64,
    "kind": pl.String,
}
RANGE_SCHEMA: Mapping[str, Any] = {"start_ns": pl.Int64, "end_ns": pl.Int64, "thread": pl.Int64, "name": NAME_DTYPE}
OS_RUNTIME_SCHEMA: Mapping[str, Any] = RANGE_SCHEMA
THREAD_SCHEMA: Mapping[str, Any] = {"thread": pl.Int64, "name": pl.String}
MEMORY_SCHEMA: Mapping[str, Any] = {
    "time_ns": pl.Int64,
    "pid": pl.Int64,
    "device": pl.Int64,
    "address": pl.Int64,
    "bytes": pl.Int64,
    "kind": pl.String,
    "allocates": pl.Boolean,
}
"""Allocations and frees of device, pinned and managed memory; recorded on request."""
METRIC_SCHEMA: Mapping[str, Any] = {"time_ns": pl.Int64, "device": pl.Int64, "name": NAME_DTYPE, "value": pl.Float64}
"""GPU metrics at a fixed rate; recorded on request."""
SAMPLE_SCHEMA: Mapping[str, Any] = {
    "time_ns": pl.Int64,
    "thread": pl.Int64,
    "sample": pl.Int64,
    "depth": pl.Int64,
    "name": NAME_DTYPE,
}
"""Sampled stacks, one row per frame; depth 0 is the function that was running. Recorded on request."""
SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "kernels": KERNEL_SCHEMA,
    "api": API_SCHEMA,
    "copies": COPY_SCHEMA,
    "synchronizations": SYNCHRONIZATION_SCHEMA,
    "ranges": RANGE_SCHEMA,
    "os_runtime": OS_RUNTIME_SCHEMA,
    "threads": THREAD_SCHEMA,
    "memory": MEMORY_SCHEMA,
    "metrics": METRIC_SCHEMA,
    "samples": SAMPLE_SCHEMA,
}


def make_empty_frame(table: str) -> pl.DataFrame:
    """An empty frame with the schema of `table`."""
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
class Trace:
    """Everything read from one recording."""

    source: str
    tracer: str
    """The tool and its version: `nsys 2025.3.2.0`, `torch.profiler 2.14`."""
    schema: str | None = None
    gpus: tuple[Gpu, ...] = ()
    kernels: pl.DataFrame = field(default_factory=lambda: make_empty_frame("kernels"))
    api: pl.DataFrame = field(default_factory=lambda: make_empty_frame("api"))
    copies: pl.DataFrame = field(default_factory=lambda: make_empty_frame("copies"))
    synchronizations: pl.DataFrame = field(default_factory=lambda: make_empty_frame("synchronizations"))
    ranges: pl.DataFrame = field(default_factory=lambda: make_empty_frame("ranges"))
    os_runtime: pl.DataFrame = field(default_factory=lambda: make_empty_frame("os_runtime"))
    threads: pl.DataFrame = field(default_factory=lambda: make_empty_frame("threads"))
    memory: pl.DataFrame = field(default_factory=lambda: make_empty_frame("memory"))
    metrics: pl.DataFrame = field(default_factory=lambda: make_empty_frame("metrics"))
    samples: pl.DataFrame = field(default_factory=lambda: make_empty_frame("samples"))
    absent: tuple[str, ...] = ()
    """Tables the recording does not have; what needs them is withheld."""
    diagnostics: tuple[str, ...] = ()
    """What the profiler itself complained about: lost events, buffers that overflowed."""
    graph_launches_untraced: int = 0
    """CUDA graphs recorded as one opaque row each (`--cuda-graph-trace=graph`)."""
    overhead_ns: int = 0
    """Time that the profiler reports to have spent itself."""

    @property
    def tables(self) -> dict[str, pl.DataFrame]:
        """The frames by name, in the order of `SCHEMAS`."""
        return {table: getattr(self, table) for table in SCHEMAS}
