"""Compares the kinds of GPU of a workspace: the best engine of each, and how many GPUs a load needs."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING

from optpipe.core.errors import BadInputError
from optpipe.core.measurement import Mode, Scenario, format_percentile_name
from optpipe.core.plan import for_workspace
from optpipe.core.quantity import Estimate
from optpipe.measure.search import Slo
from optpipe.stats.percentiles import count_queries_needed, count_transient_queries
from optpipe.sweep.job import Cell, JobRecord, JobState, command_from_cell

if TYPE_CHECKING:
    import numpy as np

MOST_GPUS = 100_000
MOST_REQUESTS = 400_000
"""The most requests of a simulation. A percentile at a higher utilization needs more, but in practice such a load exceeds its limit."""


def _list_times(seconds: Mapping[int, float]) -> list[float]:
    """Seconds by batch size from 0, interpolated; sizes below the smallest measured size take as long as it."""
    sizes = sorted(seconds)
    found = [0.0]
    for size in range(1, sizes[-1] + 1):
        at = bisect_left(sizes, size)
        high = sizes[at]
        if at == 0 or high == size:
            found.append(seconds[high])
            continue
        low = sizes[at - 1]
        share = (size - low) / (high - low)
        found.append(seconds[low] + share * (seconds[high] - seconds[low]))
    return found


def compute_highest_rate(seconds: Mapping[int, float]) -> float:
    """Requests per second of one GPU at its best batch size; `seconds` of a batch by its size."""
    return max(size / time for size, time in seconds.items())


def simulate_queue(
    rate_per_s: float, gpus: int, seconds: Mapping[int, float], *, requests: int, seed: int = 0
) -> "np.ndarray":
    """Latencies in seconds, shape `(requests,)`, in order of arrival; a batch takes `seconds` by its size. Raises BadInputError."""
    import numpy as np

    if not rate_per_s > 0 or gpus < 1 or requests < 1:
        raise BadInputError(
            f"a simulation needs a positive rate, GPUs and requests, got {rate_per_s:g}, {gpus}, {requests}"
        )
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate_per_s, requests)).tolist()
    times, most = _list_times(seconds), max(seconds)
    free = [0.0] * gpus
    heapify(free)
    latencies = [0.0] * requests
    at = 0
    while at < requests:
        begin = max(free[0], arrivals[at])
        end = at + 1
        while end < requests and end - at < most and arrivals[end] <= begin:
            end += 1
        done = begin + times[end - at]
        heapreplace(free, done)
        for index in range(at, end):
            latencies[index] = done - arrivals[index]
        at = end
    return np.asarray(latencies)


def count_gpus_needed(
    rate_per_s: float, seconds: Mapping[int, float], percent: float, limit_s: float, *, seed: int = 0
) -> int | None:
    """The smallest number of GPUs whose simulated percentile of latency is within the limit; None if no number is enough."""
    if min(seconds.values()) > limit_s:
        return None
    low = max(1, ceil(rate_per_s / compute_highest_rate(seconds) * (1 + 1e-9)))
    high = low
    found: dict[int, float] = {}

    def percentile(gpus: int) -> float:
        if gpus not in found:
            found[gpus] = _simulate_percentile(rate_per_s, gpus, seconds, percent, seed)
        return found[gpus]

    while percentile(high) > limit_s:
        low, high = high + 1, high + max(1, high // 8)
        if high > MOST_GPUS:
            return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if percentile(middle) <= limit_s else (middle + 1, high)
    return high


def _simulate_percentile(
    rate_per_s: float, gpus: int, seconds: Mapping[int, float], percent: float, seed: int
) -> float:
    import numpy as np

    utilization = rate_per_s / (gpus * compute_highest_rate(seconds))
    if utilization >= 1:
        return float("inf")
    left_out = count_transient_queries(utilization, percent) + gpus * max(seconds)
    requests = min(MOST_REQUESTS, left_out + count_queries_needed(utilization, percent))
    latencies = simulate_queue(rate_per_s, gpus, seconds, requests=requests, seed=seed)
    return float(np.percentile(latencies[min(left_out, requests // 2) :], percent, method="higher"))


NS = 1e-9


@dataclass(frozen=True, slots=True)
class FleetRow:
    kind: str
    fingerprint: str
    model: str
    build: str
    batch_size: int
    latency_ns: Estimate
    throughput: Estimate
    artifact: str | None
    run: str | None
    best: bool = False
    on_frontier: bool = False
    gpus: Estimate | None = None
    """For the load, within the limit; the interval follows from that of the measured times."""
    length: int | None = None
    sample: str = "image"


@dataclass(frozen=True, slots=True)
class MissingCell:
    kind: str
    label: str
    why: str
    command: str


@dataclass(frozen=True, slots=True)
class FleetRecord:
    rows: tuple[FleetRow, ...]
    missing: tuple[MissingCell, ...]
    slo: str | None
    load_per_s: float | None
    warnings: tuple[str, ...] = ()


def compare_fleet(
    jobs: Mapping[str, Sequence[JobRecord]],
    *,
    model: str | None = None,
    slo: Slo | None = None,
    load_per_s: float | None = None,
) -> FleetRecord:
    """Raises BadInputError if nothing was measured."""
    newest: dict[tuple[str, str], JobRecord] = {}  # a measurement of a model before its last change does not count
    for one in sorted((tries[0] for tries in jobs.values()), key=lambda one: one.started_utc):
        if model in (None, one.cell.recipe.model):
            newest[one.cell.name_key, one.fingerprint] = one
    records = list(newest.values())
    done = [one for one in records if one.state is JobState.DONE and one.cell.load.scenario is not Scenario.SERVER]
    if not done:
        raise BadInputError(
            f"no finished job{'' if model is None else f' of {model}'}; measure with `{for_workspace('optpipe sweep MODEL')}`"
        )
    engines: dict[tuple[object, ...], list[JobRecord]] = {}
    for one in done:
        cell = one.cell
        key = cell.kind, one.fingerprint, cell.recipe.model, _name_build(cell), cell.load.length
        engines.setdefault(key, []).append(one)
    rows = [row for found in engines.values() if (row := _choose_row(found, slo, load_per_s)) is not None]
    rows = _mark(rows)
    warnings = _list_warnings(rows, engines.values(), slo)
    return FleetRecord(
        tuple(sorted(rows, key=lambda row: (row.model, row.kind, -row.throughput.value))),
        _list_missing(records),
        None if slo is None else str(slo),
        load_per_s,
        tuple(warnings),
    )


def _name_build(cell: Cell) -> str:
    """The properties that distinguish engines and loads, except batch size and length; defaults are not named."""
    recipe, load = cell.recipe, cell.load
    words = [recipe.backend, recipe.precision]
    words += [each.partition(".")[2] for each in (*recipe.options, *cell.options)]
    words += [f"profile {recipe.profile}"] if recipe.profile else []
    words += [f"weights {Path(recipe.weights).name}"] if recipe.weights != "default" else []
    words += [load.scenario] if load.scenario is not Scenario.SINGLE_STREAM else []
    words += [load.arrivals] if load.arrivals else []
    words += [load.mode] if load.mode is not Mode.COMPUTE else []
    return " ".join(words)


def _choose_row(found: Sequence[JobRecord], slo: Slo | None, load_per_s: float | None) -> FleetRow | None:
    """The batch size with the highest throughput within the limit; None if there is none."""
    name = "p50" if slo is None else format_percentile_name(slo.percent)
    able = [
        (one, latency, rate)
        for one in found
        if one.group is not None
        and (latency := _read(one, name)) is not None
        and (rate := _read(one, "throughput")) is not None
        and (slo is None or latency.bounds[1] <= slo.limit_ns)
    ]
    if not able:
        return None
    one, latency, rate = max(able, key=lambda each: each[2].value)
    row = FleetRow(
        one.cell.kind, one.fingerprint, one.cell.recipe.model, _name_build(one.cell), one.cell.load.batch_size,
        latency, rate, one.artifact, one.run, length=one.cell.load.length,
        sample=one.sample,
    )  # fmt: skip
    if load_per_s is not None:
        row = replace(row, gpus=_count_gpus([each for each, _, _ in able], load_per_s, slo, rate))
    return row


def _read(record: JobRecord, name: str) -> Estimate | None:
    figure = record.group.figures.get(name) if record.group else None
    return None if figure is None else figure.estimate


def _count_gpus(found: Sequence[JobRecord], load_per_s: float, slo: Slo | None, rate: Estimate) -> Estimate | None:
    """GPUs for the load: by throughput alone, or by simulation if there is a limit. None if no number is enough.

    Each stream serves its own batch. `found` are the batch sizes within the limit.
    """
    if slo is None:
        low, high = rate.bounds
        most = ceil(load_per_s / low) if low > 0 else inf
        return Estimate(ceil(load_per_s / rate.value), ceil(load_per_s / high), most)
    counts, streams = [], found[0].cell.load.streams
    measured = {one.cell.load.batch_size: time for one in found if (time := _read(one, "p50")) is not None}
    for choice in range(3):
        times = {size: (time.value, *time.bounds)[choice] * NS for size, time in measured.items()}
        if min(times.values()) <= 0:  # an interval that reaches 0 has no bound
            counts.append(1.0)
            continue
        need = count_gpus_needed(load_per_s, times, slo.percent, slo.limit_ns * NS)
        if need is None:
            return None
        counts.append(float(ceil(need / streams)))
    return Estimate(counts[0], min(counts), max(counts), "simulated queue with batching")


def _mark(rows: Sequence[FleetRow]) -> list[FleetRow]:
    """Marks the best of each model, length and kind, and the frontier of throughput against latency over kinds."""
    marked = []
    for row in rows:
        alike = [each for each in rows if (each.model, each.length) == (row.model, row.length)]
        peers = [each for each in alike if (each.kind, each.fingerprint) == (row.kind, row.fingerprint)]
        best = row.throughput.value == max(each.throughput.value for each in peers)
        mine, *rivals = ((-each.throughput.value, each.latency_ns.value) for each in (row, *alike))
        beaten = any(other != mine and other[0] <= mine[0] and other[1] <= mine[1] for other in rivals)
        marked.append(replace(row, best=best, on_frontier=not beaten))
    return marked


def _list_warnings(rows: Sequence[FleetRow], engines: Iterable[Sequence[JobRecord]], slo: Slo | None) -> list[str]:
    found = []
    if slo is not None:
        shown = {(row.kind, row.fingerprint, row.model, row.build, row.length) for row in rows}
        lost = [
            " ".join([cell.recipe.model, _name_build(cell), *cell.load.list_lengths(), "on", cell.kind])
            for cell, fingerprint in ((one[0].cell, one[0].fingerprint) for one in engines)
            if (cell.kind, fingerprint, cell.recipe.model, _name_build(cell), cell.load.length) not in shown
        ]
        found += [f"{name} does not meet {slo} at any measured batch size" for name in lost]
    for kind in dict.fromkeys(row.kind for row in rows):
        if len({row.fingerprint for row in rows if row.kind == kind}) > 1:
            found.append(f"{kind}: rows are from several environments (driver, power limit or versions differ)")
    return found


def _list_missing(records: Sequence[JobRecord]) -> tuple[MissingCell, ...]:
    """Cells that were measured or tried on one kind of a device and have no figure on another kind of it."""
    asked = {_identify(one.cell): one.cell for one in records}
    kinds = list(dict.fromkeys((one.cell.kind, one.cell.recipe.device) for one in records))
    done = {(one.cell.kind, _identify(one.cell)) for one in records if one.state is JobState.DONE}
    reasons = {(one.cell.kind, _identify(one.cell)): one for one in records if one.state is not JobState.DONE}
    found = []
    for kind, device in kinds:
        for name, cell in asked.items():
            if cell.recipe.device != device or (kind, name) in done:
                continue
            tried = reasons.get((kind, name))
            if tried is not None and tried.state is JobState.IMPOSSIBLE:
                continue
            why = "not measured" if tried is None else f"{tried.state}: {tried.reason}"
            found.append(MissingCell(kind, cell.label, why, command_from_cell(replace(cell, kind=kind))))
    return tuple(found)


def _identify(cell: Cell) -> str:
    return replace(cell, kind="").name_key
