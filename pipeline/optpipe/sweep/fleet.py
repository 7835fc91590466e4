"""What the jobs of a workspace say across kinds of GPU: the best engine of each, what it costs, how many a load needs."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path

import msgspec

from optpipe.core.errors import BadInputError, read_as_user_file
from optpipe.core.measurement import Mode, Scenario, format_percentile_name
from optpipe.core.plan import for_workspace
from optpipe.core.quantity import Estimate
from optpipe.measure.search import Slo
from optpipe.sweep.capacity import ServiceTimes, count_gpus_needed
from optpipe.sweep.job import Cell, JobRecord, JobState, command_from_cell

NS = 1e-9


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one GPU of a kind costs."""

    per_hour: float
    """In the currency of the list."""
    watts: float | None = None
    """What it draws with its share of the host."""


class PriceList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`prices.toml`: `currency`, and a table for each kind."""

    gpus: dict[str, Price]
    currency: str = "USD"


def prices_from_file(path: Path) -> PriceList:
    """Reads a price list. Raises BadInputError that names the file and the key."""
    with read_as_user_file(path, "a price list (TOML)"):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        found = msgspec.convert(table, PriceList)
    except msgspec.ValidationError as error:
        raise BadInputError(
            f'{path}: {error}\nexpected [gpus."NVIDIA H200"] with per_hour and, if known, watts'
        ) from error
    if wrong := [kind for kind, price in found.gpus.items() if price.per_hour < 0 or (price.watts or 0) < 0]:
        raise BadInputError(f"{path}: the price or power of {wrong[0]} is below zero")
    return found


@dataclass(frozen=True, slots=True)
class FleetRow:
    """An engine on a kind of GPU at the batch size that serves it best."""

    kind: str
    fingerprint: str
    model: str
    build: str
    batch_size: int
    latency_ns: Estimate
    """The limit's percentile; p50 without a limit."""
    throughput: Estimate
    """Images or samples per second."""
    artifact: str | None
    run: str | None
    best: bool = False
    """Of its model on this kind."""
    on_frontier: bool = False
    """No other is cheaper (without prices: faster) and quicker to answer."""
    cost_per_million: Estimate | None = None
    kwh_per_million: Estimate | None = None
    gpus: Estimate | None = None
    """For the load, within the limit; the interval is that of the measured times."""
    cost_per_hour: Estimate | None = None
    """Of that many."""
    length: int | None = None
    """Tokens of every sequence."""
    sample: str = "image"
    """What the throughput counts: `image` or `sample`."""


@dataclass(frozen=True, slots=True)
class MissingCell:
    """A cell that other kinds have and one lacks."""

    kind: str
    label: str
    why: str
    command: str


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """The JSON document of `optpipe compare --fleet`."""

    rows: tuple[FleetRow, ...]
    missing: tuple[MissingCell, ...]
    slo: str | None
    load_per_s: float | None
    currency: str | None
    warnings: tuple[str, ...] = ()


def compare_fleet(
    jobs: Mapping[str, Sequence[JobRecord]],
    *,
    model: str | None = None,
    slo: Slo | None = None,
    prices: PriceList | None = None,
    load_per_s: float | None = None,
) -> FleetRecord:
    """The answers. Raises BadInputError where nothing was measured."""
    records = [tries[0] for tries in jobs.values() if model in (None, tries[0].cell.recipe.model)]
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
    rows = [row for found in engines.values() if (row := _choose_row(found, slo, prices, load_per_s)) is not None]
    rows = _mark(rows)
    warnings = _list_warnings(rows, engines.values(), slo, prices)
    return FleetRecord(
        tuple(sorted(rows, key=lambda row: (row.model, row.kind, -row.throughput.value))),
        _list_missing(records),
        None if slo is None else str(slo),
        load_per_s,
        prices.currency if prices else None,
        tuple(warnings),
    )


def _name_build(cell: Cell) -> str:
    """What sets engines and their loads apart beside batch size and length; the usual is not named."""
    recipe, load = cell.recipe, cell.load
    words = [recipe.backend, recipe.precision]
    words += [each.partition(".")[2] for each in (*recipe.options, *cell.options)]
    words += [f"profile {recipe.profile}"] if recipe.profile else []
    words += [f"weights {Path(recipe.weights).name}"] if recipe.weights != "default" else []
    words += [load.scenario] if load.scenario is not Scenario.SINGLE_STREAM else []
    words += [load.arrivals] if load.arrivals else []
    words += [load.mode] if load.mode is not Mode.COMPUTE else []
    return " ".join(words)


def _choose_row(
    found: Sequence[JobRecord], slo: Slo | None, prices: PriceList | None, load_per_s: float | None
) -> FleetRow | None:
    """The batch size with the highest throughput among those that keep the limit; None where none does."""
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
    price = prices.gpus.get(one.cell.kind) if prices else None
    if price is not None:
        row = replace(row, cost_per_million=_invert(rate, price.per_hour * 1e6 / 3600))
        if price.watts is not None:
            row = replace(row, kwh_per_million=_invert(rate, price.watts * 1e6 / 3.6e6))
    if load_per_s is not None:
        gpus = _count_gpus([each for each, _, _ in able], load_per_s, slo, rate)
        row = replace(row, gpus=gpus, cost_per_hour=gpus.scale(price.per_hour) if price and gpus else None)
    return row


def _read(record: JobRecord, name: str) -> Estimate | None:
    figure = record.group.figures.get(name) if record.group else None
    return None if figure is None else figure.estimate


def _invert(rate: Estimate, factor: float) -> Estimate:
    """`factor` over a rate, with the bounds exchanged; infinite where the rate's interval reaches 0."""
    if rate.low is None:
        return Estimate(factor / rate.value)
    low, high = rate.bounds
    return Estimate(factor / rate.value, factor / high, factor / low if low > 0 else inf)


def _count_gpus(found: Sequence[JobRecord], load_per_s: float, slo: Slo | None, rate: Estimate) -> Estimate | None:
    """GPUs for the load: by throughput alone, or by simulation where a limit has to hold, of the batch sizes `found` that keep it.

    Each stream serves a batch of its own. None where no number does.
    """
    if slo is None:
        low, high = rate.bounds
        most = ceil(load_per_s / low) if low > 0 else inf
        return Estimate(ceil(load_per_s / rate.value), ceil(load_per_s / high), most)
    counts, streams = [], found[0].cell.load.streams
    measured = {one.cell.load.batch_size: time for one in found if (time := _read(one, "p50")) is not None}
    for choice in range(3):
        times = {size: (time.value, *time.bounds)[choice] * NS for size, time in measured.items()}
        if min(times.values()) <= 0:  # an interval that reaches 0 bounds nothing
            counts.append(1.0)
            continue
        need = count_gpus_needed(load_per_s, ServiceTimes(times), slo.percent, slo.limit_ns * NS)
        if need.gpus is None:
            return None
        counts.append(float(ceil(need.gpus / streams)))
    return Estimate(counts[0], min(counts), max(counts), "simulated queue with batching")


def _mark(rows: Sequence[FleetRow]) -> list[FleetRow]:
    """Marks the best of each model, length and kind, and the frontier of each model and length over kinds.

    The frontier is of cost, or throughput, against latency.
    """
    marked = []
    for row in rows:
        alike = [each for each in rows if (each.model, each.length) == (row.model, row.length)]
        peers = [each for each in alike if (each.kind, each.fingerprint) == (row.kind, row.fingerprint)]
        rivals = [each for each in alike if each is not row]
        best = row.throughput.value == max(each.throughput.value for each in peers)
        beaten = any(_dominates(each, row) for each in rivals)
        marked.append(replace(row, best=best, on_frontier=not beaten))
    return marked


def _dominates(one: FleetRow, other: FleetRow) -> bool:
    mine, theirs = _weigh(one), _weigh(other)
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def _weigh(row: FleetRow) -> tuple[float, float]:
    cost = row.cost_per_million.value if row.cost_per_million else -row.throughput.value
    return cost, row.latency_ns.value


def _list_warnings(
    rows: Sequence[FleetRow], engines: Iterable[Sequence[JobRecord]], slo: Slo | None, prices: PriceList | None
) -> list[str]:
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
        if prices is not None and kind not in prices.gpus:
            found.append(f"the price list has no entry for {kind}; its costs are unknown")
        if len({row.fingerprint for row in rows if row.kind == kind}) > 1:
            found.append(f"{kind}: rows are from several environments (driver, power limit or versions differ)")
    return found


def _list_missing(records: Sequence[JobRecord]) -> tuple[MissingCell, ...]:
    """The cells that were asked for on some kind of a device and have no figure on another kind of it."""
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
    return replace(cell, kind="").key
