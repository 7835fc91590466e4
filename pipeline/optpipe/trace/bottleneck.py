"""What limits a stage: the largest part of its time, told from the split of the timeline."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import polars as pl

from optpipe.trace.analysis import Analysis
from optpipe.trace.intervals import Intervals, disjoint, within
from optpipe.trace.timeline import Cause, Timeline

GAP_NS = 50_000
"""Longer than any framework takes from one launch to the next (5 to 30 µs): the host was away."""
_IO_CALLS = (
    r"^(read|pread|readv|write|pwrite|writev|open|openat|fopen|fread|fwrite|fsync|fdatasync|sendfile|stat|lseek|mmap|munmap|"
    r"recv|send)"
)


class Limit(StrEnum):
    """What a stage waits for."""

    IO = "I/O"
    CPU = "CPU"
    LAUNCH = "launch"
    COPY = "copy"
    SYNCHRONIZATION = "synchronization"
    MEMORY = "memory-bound GPU"
    MATH = "math-bound GPU"
    WITHHELD = "withheld"


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The verdict, its share of the time, all the shares it was chosen from, and why."""

    limit: Limit
    share: float
    shares: dict[str, float]
    why: str


def long_gaps(timeline: Timeline) -> Intervals:
    """The gaps in which the host was away for at least 50 µs: it did other work than launching."""
    waits = timeline.idle[Cause.HOST_WAIT]
    kept = (waits.ends - waits.starts) >= GAP_NS
    return disjoint(waits.starts[kept], waits.ends[kept])


def bottleneck(measured: Analysis, math_share: float | None = None) -> Bottleneck:
    """What limits `measured` as a whole.

    `math_share` is the part of the lower bound that arithmetic takes (from the roofline); without it the kernels' kinds
    decide between math and memory, which is said.
    """
    if measured.trace.kernels.is_empty():
        return _without_gpu(measured)
    return _of_windows(
        measured,
        np.array([measured.timeline.start_ns], dtype=np.int64),
        np.array([measured.timeline.end_ns], dtype=np.int64),
        math_share,
    )


def range_bottleneck(measured: Analysis, name: str, math_share: float | None = None) -> Bottleneck | None:
    """What limits the range called `name`, over the time from its first to its last GPU operation; None without any."""
    found = measured.projection.filter((pl.col("name").cast(pl.String) == name) & pl.col("gpu_start_ns").is_not_null())
    if found.is_empty():
        return None
    return _of_windows(measured, found["gpu_start_ns"].to_numpy(), found["gpu_end_ns"].to_numpy(), math_share)


def _of_windows(measured: Analysis, starts: np.ndarray, ends: np.ndarray, math_share: float | None) -> Bottleneck:
    timeline = measured.timeline
    span = max(int((ends - starts).sum()), 1)
    away = int(within(long_gaps(timeline), starts, ends).sum())
    idle = {cause: int(within(timeline.idle[cause], starts, ends).sum()) for cause in Cause}
    gpu, basis = _gpu_limit(measured, math_share)
    parts = {
        gpu: int(within(timeline.busy, starts, ends).sum()),
        Limit.LAUNCH: idle[Cause.HOST_WAIT] - away + idle[Cause.KERNEL_WAIT],
        Limit.CPU: away,
        Limit.COPY: idle[Cause.COPY],
        Limit.SYNCHRONIZATION: idle[Cause.SYNCHRONIZATION],
    }
    limit = max(parts, key=lambda part: parts[part])
    shares = {str(part): ns / span for part, ns in parts.items()}
    why = {
        Limit.LAUNCH: "the GPU waits between kernels for the next launch",
        Limit.CPU: "the GPU waits while the host does other work than launching",
        Limit.COPY: "copies run and no kernel does",
        Limit.SYNCHRONIZATION: "the GPU is idle while the host returns from waiting for it",
    }.get(limit, f"a kernel runs most of the time; {basis}")
    return Bottleneck(limit, shares[str(limit)], shares, why)


def _gpu_limit(measured: Analysis, math_share: float | None) -> tuple[Limit, str]:
    if math_share is not None:
        limit = Limit.MATH if math_share >= 0.5 else Limit.MEMORY
        return limit, f"arithmetic is {math_share:.0%} of the roofline's lower bound"
    shares = {str(kind): float(share) for kind, share in measured.kinds.select("kind", "share").iter_rows()}
    matrix = shares.get("matrix", 0.0) + shares.get("attention", 0.0)
    limit = Limit.MATH if matrix >= 0.5 else Limit.MEMORY
    return limit, f"matrix kernels are {matrix:.0%} of kernel time (told from names: no counters, no graph)"


def _without_gpu(measured: Analysis) -> Bottleneck:
    span = measured.split.span_ns
    if measured.trace.api.height or measured.trace.graph_launches_untraced:
        return Bottleneck(Limit.WITHHELD, 0.0, {}, "CUDA calls without GPU rows: the trace cannot tell")
    calls = measured.os_runtime
    io_ns = int(calls.filter(pl.col("name").str.contains(_IO_CALLS))["total_ns"].sum()) if calls.height else 0
    share = io_ns / span if span else 0.0
    if share >= 0.5:
        return Bottleneck(
            Limit.IO,
            share,
            {str(Limit.IO): share, str(Limit.CPU): 1 - share},
            "reading and writing files takes most of the time",
        )
    basis = "" if calls.height else " (OS calls were not traced: I/O is not told apart; --osrt does)"
    return Bottleneck(
        Limit.CPU, 1 - share, {str(Limit.CPU): 1 - share, str(Limit.IO): share}, f"no GPU work at all{basis}"
    )
