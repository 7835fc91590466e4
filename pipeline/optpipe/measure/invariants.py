"""What every measurement satisfies, whatever it measured. Raw data that break a rule contradict themselves.

The rules are those of sections 5.5 and 5.6 of docs/dossier-format.md, in its order, one function each. A figure that is computed
from impossible data would be right by every hash and still mean nothing: images multiplied by 100, a warm-up in the middle,
readings of another day. The worker's parent checks each measurement as it is written, `verify` those of a dossier.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from random import Random
from types import MappingProxyType

import polars as pl

from optpipe.core.errors import BadInputError
from optpipe.core.files import Files
from optpipe.core.load import LoadSpec, Mode, Scenario
from optpipe.core.measurement import (
    MACHINE_COLUMNS,
    MEASUREMENTS_FILE,
    SAMPLE_COLUMNS,
    InputPool,
    Measurement,
    Phase,
    read_measurements,
)
from optpipe.core.parquet import read_parquet
from optpipe.measure.figures import select_rows_during
from optpipe.measure.process import INTERVAL_S
from optpipe.workspace.entry import Run

WATCHED_S = 2.0
"""A measurement of this length has a reading of the machine, which is read several times a second."""
READINGS_AT_EVENTS = 2
"""Readings outside the interval: one as the measured part begins, one as it ends."""
LATEST_NS = 2**62
CLOCK_STEP_S = 5.0
"""By how much the date may be set while a run is measured; the clock of the queries is never set."""
ON_DEVICE = ("h2d_ns", "compute_ns", "d2h_ns")
ALWAYS_READ = ("time_ns", "other_cpu_cores", "worker_cpu_cores", "worker_waited_cores")
CLOCK_SHARE, CLOCK_NS = 1.001, 1000
"""By how much a GPU's events may exceed the host's time of the query: they are of another clock, in steps of about 0.5 us."""
EVENTS_THAT_SCATTER = 100
"""So many kernels do not all take the same time."""
FEWEST_READINGS, SHORTEST_S, SENSORS_APART = 12, 8.0, 1.5
"""From when on a GPU's energy is compared with its power, and the largest ratio of both: some cards average power over a second."""
MEMORY_SHARE, MEMORY_BYTES = 1.05, 2**26
"""By how much a process's memory may exceed that of the device, which is read a moment before."""


@dataclass(frozen=True, slots=True)
class RawQueries:
    """The queries of one process; `samples` has every one, warm-up included, in the order of `start_ns`."""

    load: LoadSpec
    device: str
    samples: pl.DataFrame

    @property
    def measured(self) -> pl.DataFrame:
        return self.samples.filter(pl.col("phase") == Phase.MEASURED)

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True, slots=True)
class RawMeasurement:
    """A measurement with its raw files; `machine` is None without one."""

    stored: Measurement
    queries: RawQueries
    machine: pl.DataFrame | None
    cpu_count: int | None
    gpu_bytes: int | None = None
    """Memory of the largest GPU; None without one."""


def hold_phases(raw: RawQueries) -> bool:
    warm_up = raw.samples.filter(pl.col("phase") == Phase.WARM_UP)
    if len(warm_up) + len(raw.measured) != len(raw.samples):
        return False
    last, first = warm_up["end_ns"].max(), raw.measured["start_ns"].min()
    return last is None or first is None or bool(last <= first)  # type: ignore[operator]


def hold_images(raw: RawQueries) -> bool:
    load = raw.load
    together = load.streams if load.scenario is Scenario.MULTI_STREAM else 1
    expected = pl.when(pl.col("phase") == Phase.MEASURED).then(together).otherwise(1)
    return _hold(raw.samples, pl.col("images") == expected * load.batch_size)


def hold_times(raw: RawQueries) -> bool:
    scheduled, start, end = (pl.col(f"{name}_ns") for name in ("scheduled", "start", "end"))
    on_time = scheduled <= start if raw.load.scenario is Scenario.SERVER else scheduled == start
    rule = (scheduled >= 0) & on_time & (start <= end) & (end < LATEST_NS)
    return _hold(raw.samples, rule)


def hold_one_at_a_time(raw: RawQueries) -> bool:
    if raw.load.scenario is Scenario.OFFLINE:
        return True
    return _hold(raw.samples, pl.col("start_ns") >= pl.col("end_ns").shift(1))


def hold_streams(raw: RawQueries) -> bool:
    several = raw.load.scenario in (Scenario.MULTI_STREAM, Scenario.OFFLINE)
    return _hold(raw.samples, pl.col("stream") < (raw.load.streams if several else 1))


def hold_parts(raw: RawQueries) -> bool:
    took = pl.col("end_ns") - pl.col("start_ns")
    unmeasured = ON_DEVICE if raw.on_cpu else ("h2d_ns", "d2h_ns")
    if (raw.on_cpu or raw.load.mode is Mode.COMPUTE) and any(
        raw.samples[name].count() for name in unmeasured
    ):
        return False
    partly = raw.samples.group_by("phase").agg(
        pl.col(name).is_null().n_unique() for name in ON_DEVICE
    )
    together = pl.sum_horizontal(ON_DEVICE)
    return (
        _hold(raw.samples, pl.col("enqueue_ns").is_between(0, took))
        and all(_hold(raw.samples, pl.col(name) >= 0) for name in ON_DEVICE)
        and _hold(raw.samples, together <= took * CLOCK_SHARE + CLOCK_NS)
        and all(_hold(partly, pl.col(name) == 1) for name in ON_DEVICE)
        and hold_scatter(raw)
    )


def hold_scatter(raw: RawQueries) -> bool:
    """Whether the times of many queries on a device are not all equal."""
    compute = raw.measured["compute_ns"]
    return compute.count() < EVENTS_THAT_SCATTER or compute.n_unique() > 1


def hold_readings(raw: RawMeasurement) -> bool:
    if raw.machine is None:
        return True
    energy = raw.machine["gpu_energy_mj"].drop_nulls()
    return (
        raw.machine["time_ns"].is_sorted()
        and energy.is_sorted()
        and _hold(raw.machine, pl.col("gpu_utilization") <= 100)
        and all(
            _hold(raw.machine, pl.col(name).is_finite() & (pl.col(name) >= 0))
            for name in MACHINE_COLUMNS
        )
    )


def hold_energy(raw: RawMeasurement) -> bool:
    """Whether the energy counter advances as the power says, by the rule of trapezoids."""
    if raw.machine is None:
        return True
    read = raw.machine.drop_nulls(("gpu_energy_mj", "gpu_power_w"))
    times = read["time_ns"]
    lasted_s = (times[-1] - times[0]) / 1e9 if len(times) else 0.0
    if len(read) < FEWEST_READINGS or lasted_s < SHORTEST_S:
        return True
    watts, passed_s = read["gpu_power_w"], times.diff().cast(pl.Float64) / 1e9
    by_power = float(((watts + watts.shift(1)) / 2 * passed_s).sum())
    counted = (read["gpu_energy_mj"][-1] - read["gpu_energy_mj"][0]) / 1e3
    return bool(by_power / SENSORS_APART <= counted <= by_power * SENSORS_APART)


def hold_memory(raw: RawMeasurement) -> bool:
    if raw.machine is None:
        return True
    used, mine = (
        _find_largest(raw.machine[name]) for name in ("gpu_used_bytes", "gpu_worker_bytes")
    )
    if used is None:
        return True
    fits = raw.gpu_bytes is None or used <= raw.gpu_bytes
    return fits and (mine is None or mine <= MEMORY_SHARE * used + MEMORY_BYTES)


def hold_inputs(raw: RawMeasurement) -> bool:
    """Whether the rotated inputs follow each other in each stream."""
    inputs, scenario = raw.stored.inputs, raw.stored.load.scenario
    if inputs is None or inputs.rotated < 1:
        return True
    if not _hold(raw.queries.samples, pl.col("input") < inputs.rotated):
        return False
    number = pl.col("input").cast(pl.Int64)
    step = (number - number.shift(1)).over("stream") % inputs.rotated
    steps = raw.queries.measured.select(step).to_series().drop_nulls().unique().to_list()
    return len(steps) < 2 and (scenario is Scenario.OFFLINE or steps in ([], [1 % inputs.rotated]))


def hold_arrivals(raw: RawMeasurement) -> bool:
    """Whether a server's queries were due as `arrivals_seed` draws them, from any place in the warm-up on."""
    load, seed = raw.stored.load, raw.stored.arrivals_seed
    if load.scenario is not Scenario.SERVER or seed is None or load.rate_per_s is None:
        return (seed is None) == (load.scenario is not Scenario.SERVER)
    gaps = raw.queries.measured["scheduled_ns"].diff().drop_nulls().to_list()
    generator = Random(f"arrivals {seed}")
    drawn = [
        round(generator.expovariate(load.rate_per_s) * 1e9) for _ in range(len(raw.queries.samples))
    ]
    return not gaps or any(
        abs(drawn[at] - gaps[0]) <= 1
        and all(abs(expected - gap) <= 1 for expected, gap in zip(drawn[at:], gaps, strict=False))
        for at in range(1, len(drawn) - len(gaps) + 1)
    )


def hold_load(raw: RawMeasurement) -> bool:
    load = raw.stored.load
    try:
        load.require_sound()
    except BadInputError:
        return False
    return min(load.output_checks, load.cache_probes) >= 0 and load.length != 0


def hold_watched(raw: RawMeasurement) -> bool:
    measured = raw.queries.measured
    if raw.machine is None or measured.is_empty() or raw.stored.duration_s < WATCHED_S:
        return True
    return not select_rows_during(raw.machine, measured).is_empty()


def hold_pace(raw: RawMeasurement) -> bool:
    if raw.machine is None:
        return True
    soon = raw.machine["time_ns"].diff().drop_nulls() < INTERVAL_S / 4 * 1e9
    return int(soon.sum()) <= READINGS_AT_EVENTS


def hold_length(raw: RawMeasurement) -> bool:
    load = raw.stored.load
    shortest_s = min(load.min_seconds, load.max_seconds) / 2
    return not raw.stored.is_valid or raw.stored.duration_s >= shortest_s


def hold_processors(raw: RawMeasurement) -> bool:
    cpus = raw.stored.subject.affinity
    return cpus is None or (
        0 < len(cpus) == len(set(cpus))
        and min(cpus) >= 0
        and (raw.cpu_count is None or len(cpus) <= raw.cpu_count)
    )


def hold_counts(raw: RawMeasurement) -> bool:
    stored = raw.stored
    bytes_ = (stored.host_peak_bytes, stored.device_peak_bytes)
    return (
        min(stored.load.batch_size, stored.load.streams) >= 1
        and stored.process >= 0
        and all(size is None or size >= 0 for size in bytes_)
        and (stored.inputs is None or hold_pool(stored.inputs))
    )


def hold_pool(inputs: InputPool) -> bool:
    shortest, longest = inputs.lengths or (1, 1)
    return (
        0 <= inputs.real <= inputs.count
        and inputs.count >= 1
        and min(inputs.rotated, inputs.rotated_bytes) >= 0
        and 0 <= inputs.padding <= 1
        and 1 <= shortest <= longest
    )


OF_QUERIES: Mapping[str, Callable[[RawQueries], bool]] = MappingProxyType(
    {
        "a query is of another phase than 0 and 1, or warm-up follows a measured query": hold_phases,
        "images are not those of the load": hold_images,
        "a query was scheduled after it started, started after it ended, or waited without a server": hold_times,
        "queries overlap, but the load has one at a time": hold_one_at_a_time,
        "a query is of a stream that the load does not have": hold_streams,
        "parts of a query are longer than the query, or of a device that it did not run on, partly missing, or all equal": hold_parts,
    }
)
"""What is wrong if the function returns False."""
OF_MEASUREMENTS: Mapping[str, Callable[[RawMeasurement], bool]] = MappingProxyType(
    {
        "the machine's readings are out of order, negative, or not finite": hold_readings,
        "the energy that was counted is not that of the power": hold_energy,
        "the process used more memory than its GPU, or the GPU more than it has": hold_memory,
        "no reading of the machine is from the measurement": hold_watched,
        "the machine was read more often than it is": hold_pace,
        "it is VALID and shorter than its load asks for": hold_length,
        "its processors repeat, or are more than the machine has": hold_processors,
        "a count is negative, or a share is not from 0 to 1": hold_counts,
        "its load is none that can be measured": hold_load,
        "the inputs do not follow each other": hold_inputs,
        "the queries were not due as the seed draws them": hold_arrivals,
    }
)
"""What is wrong if the function returns False."""


def list_broken_rules(raw: RawMeasurement) -> list[str]:
    """What is wrong with a measurement whose columns are those of the format."""
    broken = [wrong for wrong, holds in OF_QUERIES.items() if not holds(raw.queries)]
    return broken + [wrong for wrong, holds in OF_MEASUREMENTS.items() if not holds(raw)]


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """When a measurement began, and its first and last query, warm-up included, by the clock of the queries."""

    started_utc: str
    first_ns: int
    last_ns: int
    id: str


def find_impossible(run: Run) -> Iterator[str]:
    """One line for each rule that a measurement of a bench run breaks; measurements whose raw files are absent are skipped.

    Raises BadInputError for a raw file that cannot be read.
    """
    spans: list[QuerySpan] = []
    for stored in read_measurements(run.files):
        place = f"{MEASUREMENTS_FILE}: {stored.id}"
        named = (("samples", stored.samples_file), ("machine", stored.machine_file))
        yield from (
            f"{place}: the file of its {kind} is {name!r}, not {kind}/{stored.id}.parquet"
            for kind, name in named
            if name not in (None, f"{kind}/{stored.id}.parquet")
        )
        broken = [
            *_find_wrong_columns(stored.samples_file, SAMPLE_COLUMNS, ON_DEVICE, run.files),
            *_find_wrong_columns(stored.machine_file, MACHINE_COLUMNS, _MAY_BE_NULL, run.files),
        ]
        yield from (f"{place}: {problem}" for problem in broken)
        if broken or stored.samples_file is None or not run.files.has(stored.samples_file):
            continue
        queries = RawQueries(
            stored.load, stored.subject.device, _read_in_order(run.files, stored.samples_file)
        )
        raw = RawMeasurement(
            stored,
            queries,
            read_parquet(run.files, stored.machine_file)
            if stored.machine_file and run.files.has(stored.machine_file)
            else None,
            run.manifest.environment.cpu_count,
            max((gpu.memory_bytes for gpu in run.manifest.environment.gpus), default=None),
        )
        yield from (f"{place}: {wrong}" for wrong in list_broken_rules(raw))
        spans += list_spans(stored, queries.samples)
    yield from find_contradicting_spans(spans, run.manifest.finished_utc)


def list_spans(stored: Measurement, samples: pl.DataFrame) -> list[QuerySpan]:
    """The span of a measurement; none without queries."""
    if samples.is_empty():
        return []
    first, last = samples["start_ns"].min(), samples["end_ns"].max()
    return [QuerySpan(stored.started_utc, int(first), int(last), stored.id)]  # type: ignore[arg-type]


def find_contradicting_spans(spans: Sequence[QuerySpan], finished_utc: str) -> Iterator[str]:
    """Measurements of one run that overlap, and a clock of queries that does not advance like the dates."""
    ordered = sorted(spans, key=lambda span: (span.first_ns, span.last_ns, span.id))
    for earlier, later in pairwise(ordered):
        if later.first_ns < earlier.last_ns:
            yield f"{MEASUREMENTS_FILE}: {later.id} began before {earlier.id} ended, on one machine"
    dated = sorted(spans, key=lambda span: (_read_time(span.started_utc), span.id))
    if not dated:
        return
    begun = [_read_time(span.started_utc) for span in dated]
    before_s = max(start - span.first_ns / 1e9 for start, span in zip(begun, dated, strict=True))
    ends = [*begun[1:], _read_time(finished_utc)]
    after_s = min(end - span.last_ns / 1e9 for end, span in zip(ends, dated, strict=True))
    if before_s - after_s > CLOCK_STEP_S:
        yield (
            f"{MEASUREMENTS_FILE}: the clock of the queries and that of the dates differ by "
            f"{before_s - after_s:.1f} s more at one time than at another"
        )


def _read_time(text: str) -> float:
    """Seconds since 1970. Raises BadInputError for a time without a time zone."""
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise BadInputError(f"{text}: a time without a time zone")
    return time.timestamp()


def find_impossible_turns(
    files: Files, load: LoadSpec, devices: Mapping[str, str], rounds: int, lasted_s: float
) -> Iterator[str]:
    """One line for each rule that the queries of builds in turns break, in a run that lasted `lasted_s`.

    `files` are those of the run, `devices` those of the sides by name.

    Raises BadInputError for a raw file that cannot be read.
    """
    spans: list[tuple[int, int]] = []
    for turn in range(rounds):
        frames = {}
        for side in devices:
            name = f"samples/{side}{turn:03}.parquet"
            broken = list(_find_wrong_columns(name, SAMPLE_COLUMNS, ON_DEVICE, files))
            yield from broken
            if broken:
                return
            frames[side] = _read_in_order(files, name)
        for side, frame in frames.items():
            whole = RawQueries(load, devices[side], frame)
            measured = RawQueries(load, devices[side], whole.measured)
            for wrong, holds in OF_QUERIES.items():
                if not holds(whole if holds is hold_phases else measured):
                    yield f"samples/{side}{turn:03}.parquet: {wrong}"
        every = pl.concat(frames.values())
        if every.is_empty():
            continue
        both = every.filter(pl.col("phase") == Phase.MEASURED).sort("start_ns")
        if not hold_one_at_a_time(RawQueries(load, "", both)):
            yield f"round {turn}: queries of both builds overlap, but they take turns"
        spans.append((every["start_ns"].min(), every["end_ns"].max()))  # type: ignore[arg-type]
    if any(start < end for (_, end), (start, _) in pairwise(spans)):
        yield "a round began before the one before had ended"
    took_s = (spans[-1][1] - spans[0][0]) / 1e9 if spans else 0.0
    if took_s > lasted_s + CLOCK_STEP_S:
        yield f"its queries took {took_s:.1f} s, the run {lasted_s:.1f} s"


_MAY_BE_NULL = tuple(set(MACHINE_COLUMNS) - {*ALWAYS_READ})


def _read_in_order(files: Files, name: str) -> pl.DataFrame:
    return read_parquet(files, name).sort("start_ns", maintain_order=True)


def _find_wrong_columns(
    name: str | None, expected: Mapping[str, str], nullable: Sequence[str], files: Files
) -> Iterator[str]:
    if name is None or not files.has(name):
        return
    frame = read_parquet(files, name)
    types = {column: str(kind) for column, kind in frame.schema.items()}
    if types != dict(expected):
        wrong = sorted(dict(types.items() ^ expected.items()))
        yield f"{name} has other columns or types than the format: {', '.join(map(repr, wrong))}"
    elif absent := [
        column for column in expected if column not in nullable and frame[column].has_nulls()
    ]:
        yield f"{name} has no value in some rows of {', '.join(absent)}"


def _find_largest(column: pl.Series) -> int | None:
    largest = column.max()
    return None if largest is None else int(largest)  # type: ignore[arg-type]


def _hold(frame: pl.DataFrame, rule: pl.Expr) -> bool:
    """Whether no row breaks the rule; a null breaks none."""
    return frame.filter(~rule).is_empty()
