"""What the sources that are recorded on request say about one stage: GPU metrics, OS calls, stacks, context switches.

All are cut to the stage's ranges. OS calls are counted on the threads that open these ranges, or on all threads if none is
known; the time of several calls of one kind that overlap on one thread counts once.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import polars as pl

from optpipe.trace.analysis import (
    Analysis,
    TimeArray,
    TimeIntervals,
    array_from_column,
    find_measured_ranges,
    intersect_intervals,
    intervals_from_disjoint,
    sum_within,
    unite_intervals,
)
from optpipe.trace.read import Trace
from optpipe.trace.sources import SourceState

_ROWS = 40
_HERTZ = 1e5
"""No clock runs at 100,000 MHz."""
_UNKNOWN = r"^(\[unknown\]|0x[0-9a-f]+|\[string \d+\])$"


class OsCallKind(StrEnum):
    FILES = "files"
    NETWORK = "network"
    LOCKS = "locks"
    WAITING = "waiting"
    MEMORY = "memory"
    OTHER = "other"


# The first match wins.
_OS_CALLS: tuple[tuple[OsCallKind, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (
            OsCallKind.LOCKS,
            r"^(pthread_(mutex|rwlock|spin|barrier|cond)|sem_|futex|flock|lockf)",
        ),
        (
            OsCallKind.NETWORK,
            r"^(send|recv|accept|connect|socket|shutdown|getaddrinfo)",
        ),
        (
            OsCallKind.FILES,
            r"^_*(p?readv?(64)?(2)?|p?writev?(64)?(2)?|open(at)?(64)?|close|f(open|read|write|close|lush|sync|datasync|gets|puts|getc|putc|seek|scanf|printf)(64)?(_unlocked)?|"
            r"sendfile(64)?|copy_file_range|l?seek(64)?|f?l?x?stat(64)?|fstatat(64)?|readdir(64)?(_r)?|opendir|getdelim|getline|"
            r"(f?truncate|posix_fadvise|fallocate)(64)?|putc|puts|sync)$",
        ),
        (
            OsCallKind.WAITING,
            r"^(p?poll|p?select|epoll_p?wait|nanosleep|clock_nanosleep|u?sleep|wait(pid|id|3|4)?|sigwait|sigtimedwait|sched_yield|pthread_join|pause)",
        ),
        (OsCallKind.MEMORY, r"^(mmap|munmap|mremap|mprotect|madvise|mlock|brk|sbrk|msync)"),
    )
)


def classify_os_call(name: str) -> OsCallKind:
    """The kind of a libc function; a suffix such as `_v1` does not matter."""
    return next((kind for kind, pattern in _OS_CALLS if pattern.search(name)), OsCallKind.OTHER)


@dataclass(frozen=True, slots=True)
class MetricRow:
    """A GPU metric over the samples of a stage; `mean_busy` over those during which a kernel ran."""

    name: str
    device: int
    samples: int
    mean: float
    mean_busy: float | None
    maximum: float


@dataclass(frozen=True, slots=True)
class OsCallRow:
    name: str
    kind: OsCallKind
    count: int
    total_ns: int
    share: float
    """Of the stage's time on the threads that open its ranges."""


@dataclass(frozen=True, slots=True)
class OsCalls:
    """Blocked time by kind, in which overlapping calls of one thread count once, and the calls that take longest."""

    threads: int
    by_kind_ns: Mapping[OsCallKind, int]
    rows: tuple[OsCallRow, ...]


@dataclass(frozen=True, slots=True)
class StackRow:
    """A function, with the line in Python or the library in native code. `total`: samples with it anywhere in the stack."""

    function: str
    place: str
    self_samples: int
    total_samples: int
    self_share: float
    total_share: float


@dataclass(frozen=True, slots=True)
class Stacks:
    language: str
    samples: int
    threads: int
    rows: tuple[StackRow, ...]
    """Longest self time first."""


@dataclass(frozen=True, slots=True)
class Switches:
    """How often the stage's threads lost the CPU, and for how long they did not run."""

    count: int
    off_cpu_ns: int
    threads: int


@dataclass(frozen=True, slots=True)
class StageDetails:
    """Views of the sources that were recorded on request; None or empty if a source was not."""

    sources: tuple[SourceState, ...] = ()
    span_ns: int = 0
    metrics: tuple[MetricRow, ...] = ()
    os_calls: OsCalls | None = None
    python: Stacks | None = None
    native: Stacks | None = None
    switches: Switches | None = None


def details_from_trace(
    whole: Analysis, range_name: str | None, sources: tuple[SourceState, ...]
) -> StageDetails:
    """Raises BadInputError if the trace has no range called `range_name`."""
    scope, threads = find_scope(whole, range_name)
    states = tuple(_check_recorded(whole, state) for state in sources)
    return StageDetails(
        sources=states,
        span_ns=scope.total_ns,
        metrics=tuple(_average_metrics(whole, scope)),
        os_calls=_sum_os_calls(whole, scope, threads),
        python=_sum_stacks(whole, scope, "python"),
        native=_sum_stacks(whole, scope, "native"),
        switches=_sum_switches(whole, scope, threads),
    )


def find_scope(whole: Analysis, range_name: str | None) -> tuple[TimeIntervals, TimeArray]:
    """The times of a stage, and the threads that open its ranges; all threads (none listed) without ranges."""
    ranges, _ = find_measured_ranges(whole, range_name)
    if ranges.is_empty():
        start, end = whole.timeline.start_ns, whole.timeline.end_ns
        edges = np.array([start], dtype=np.int64), np.array([end], dtype=np.int64)
        return intervals_from_disjoint(*edges), np.zeros(0, dtype=np.int64)
    starts, ends = array_from_column(ranges, "start_ns"), array_from_column(ranges, "end_ns")
    opened = whole.projection.filter(
        pl.col("start_ns").is_in(ranges["start_ns"].implode()), pl.col("start_ns") >= starts.min()
    )
    return unite_intervals(starts, ends), np.unique(array_from_column(opened, "thread"))


_TABLES_OF = {
    "gpu-metrics": "metrics",
    "os-calls": "os_calls",
    "cpu": "stacks",
    "python": "stacks",
}


def _check_recorded(whole: Analysis, state: SourceState) -> SourceState:
    """A source that was granted may still have recorded nothing."""
    if not state.recorded or state.name not in _TABLES_OF:
        return state
    frame = getattr(whole.trace, _TABLES_OF[state.name])
    if state.name in ("cpu", "python") and frame.height:
        wanted = "python" if state.name == "python" else "native"
        frame = frame.filter(pl.col("language").cast(pl.String) == wanted)
    if frame.height:
        return state
    return SourceState(state.name, False, "nothing of it is in the recording", state.remedy)


def _is_inside(scope: TimeIntervals, times: TimeArray) -> pl.Series:
    return pl.Series(sum_within(scope, times, times + 1) > 0, dtype=pl.Boolean)


def select_devices(metrics: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    """Metrics of the devices that ran kernels; of all if none of them did, since CUDA may number GPUs differently than nsys."""
    devices = trace.kernels["device"].unique()
    of_devices = metrics.filter(pl.col("device").is_in(devices.implode()))
    return of_devices if of_devices.height else metrics


def _average_metrics(whole: Analysis, scope: TimeIntervals) -> Iterator[MetricRow]:
    """Metrics of the devices that ran kernels, or of all if none did, without those that are always 0."""
    frame = whole.trace.metrics
    if frame.is_empty():
        return
    inside = frame.filter(_is_inside(scope, array_from_column(frame, "time_ns")))
    inside = select_devices(inside, whole.trace)
    # nsys 2025.3 counts hertz under the name of megahertz
    hertz = pl.col("name").cast(pl.String).str.contains("[MHz]", literal=True)
    scaled = pl.when(hertz & (pl.col("value") > _HERTZ)).then(pl.col("value") / 1e6)
    inside = inside.with_columns(scaled.otherwise(pl.col("value")).alias("value"))
    times = array_from_column(inside, "time_ns")
    busy = pl.Series("busy", sum_within(whole.timeline.busy, times, times + 1) > 0)
    table = (
        inside.with_columns(busy)
        .group_by("device", pl.col("name").cast(pl.String))
        .agg(
            pl.len().alias("samples"),
            pl.col("value").mean().alias("mean"),
            pl.col("value").filter(pl.col("busy")).mean().alias("mean_busy"),
            pl.col("value").max().alias("maximum"),
        )
        .filter(pl.col("maximum") > 0)
        .sort("device", "name")
    )
    for row in table.iter_rows(named=True):
        yield MetricRow(**{name: row[name] for name in MetricRow.__dataclass_fields__})


def _sum_os_calls(whole: Analysis, scope: TimeIntervals, threads: TimeArray) -> OsCalls | None:
    frame = whole.trace.os_calls
    if frame.is_empty():
        return None
    if threads.size:
        frame = frame.filter(pl.col("thread").is_in(threads.tolist()))
    starts, ends = array_from_column(frame, "start_ns"), array_from_column(frame, "end_ns")
    inside_ns = sum_within(scope, starts, ends)
    touched = frame.with_columns(
        pl.Series("inside_ns", inside_ns), pl.col("name").cast(pl.String)
    ).filter(pl.Series(inside_ns > 0, dtype=pl.Boolean))
    kinds = {name: classify_os_call(name) for name in touched["name"].unique()}
    count = max(touched["thread"].n_unique() if not threads.size else threads.size, 1)
    table = (
        touched.group_by("name")
        .agg(pl.len().alias("count"), pl.col("inside_ns").sum().alias("total_ns"))
        .sort("total_ns", "name", descending=[True, False])
    )
    available_ns = max(scope.total_ns * count, 1)
    rows = tuple(
        OsCallRow(name, kinds[name], count, total_ns, total_ns / available_ns)
        for name, count, total_ns in table.head(_ROWS).iter_rows()
    )
    by_kind = dict.fromkeys(OsCallKind, 0)
    for (thread, kind), part in touched.with_columns(
        kind=pl.col("name").replace_strict(kinds, return_dtype=pl.String)
    ).group_by("thread", "kind"):
        del thread
        times = unite_intervals(
            array_from_column(part.sort("start_ns"), "start_ns"),
            array_from_column(part.sort("start_ns"), "end_ns"),
        )
        by_kind[OsCallKind(str(kind))] += intersect_intervals(times, scope).total_ns
    return OsCalls(count, {kind: ns for kind, ns in by_kind.items() if ns}, rows)


def _sum_stacks(whole: Analysis, scope: TimeIntervals, language: str) -> Stacks | None:
    frame = whole.trace.stacks
    if frame.is_empty():
        return None
    mine = frame.filter(pl.col("language").cast(pl.String) == language)
    mine = mine.filter(_is_inside(scope, array_from_column(mine, "time_ns")))
    count = mine["sample"].n_unique()
    if not count:
        return None
    keys = [pl.col("name").cast(pl.String), pl.col("place").cast(pl.String)]
    # frames whose symbol is unknown differ only in their address: the library is what is known
    keys[0] = pl.when(keys[0].str.contains(_UNKNOWN)).then(pl.lit("(no symbol)")).otherwise(keys[0])
    table = (
        mine.select("sample", "depth", keys[0].alias("function"), keys[1].alias("place"))
        .group_by("function", "place")
        .agg(
            pl.col("sample").filter(pl.col("depth") == 0).n_unique().alias("self_samples"),
            pl.col("sample").n_unique().alias("total_samples"),
        )
        .sort(
            "self_samples",
            "total_samples",
            "function",
            "place",
            descending=[True, True, False, False],
        )
    )
    rows = tuple(
        StackRow(
            row["function"],
            row["place"],
            row["self_samples"],
            row["total_samples"],
            row["self_samples"] / count,
            row["total_samples"] / count,
        )
        for row in table.head(_ROWS).iter_rows(named=True)
    )
    return Stacks(language, count, mine["thread"].n_unique(), rows)


def _sum_switches(whole: Analysis, scope: TimeIntervals, threads: TimeArray) -> Switches | None:
    frame = whole.trace.switches
    if frame.is_empty():
        return None
    if threads.size:
        frame = frame.filter(pl.col("thread").is_in(threads.tolist()))
    ordered = frame.sort("thread", "time_ns").with_columns(
        pl.col("time_ns").shift(-1).over("thread").alias("until_ns")
    )
    off = ordered.filter(~pl.col("is_in")).drop_nulls("until_ns")
    starts, ends = array_from_column(off, "time_ns"), array_from_column(off, "until_ns")
    inside = sum_within(scope, starts, ends)
    return Switches(
        count=int((inside > 0).sum()),
        off_cpu_ns=int(inside.sum()),
        threads=ordered["thread"].n_unique(),
    )
