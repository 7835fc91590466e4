"""What every measurement satisfies, whatever it measured. Raw data that break a rule contradict themselves.

The rules are those of section 5.6 of docs/dossier-format.md, in its order, one function each. A figure that is computed from
impossible data would be right by every hash and still mean nothing: images multiplied by 100, a warm-up in the middle, readings
of another day.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import polars as pl

from optpipe.core.files import Files
from optpipe.core.measurement import (
    MACHINE_COLUMNS,
    MEASUREMENTS_FILE,
    SAMPLE_COLUMNS,
    Measurement,
    Phase,
    Scenario,
    read_measurements,
)
from optpipe.core.parquet import read_parquet
from optpipe.measure.figures import select_rows_during
from optpipe.workspace.entry import Run

WATCHED_S = 2.0
"""A measurement of this length has a reading of the machine, which is read several times a second."""
LATEST_NS = 2**62
ON_DEVICE = ("h2d_ns", "compute_ns", "d2h_ns")
CLOCK_SHARE, CLOCK_NS = 1.001, 1000
"""By how much a GPU's events may exceed the host's time of the query: they are of another clock, in steps of about 0.5 us."""


@dataclass(frozen=True, slots=True)
class RawMeasurement:
    """A measurement with its raw files; `machine` is None without one."""

    stored: Measurement
    samples: pl.DataFrame
    """Every query, warm-up included, in the order of `start_ns`."""
    machine: pl.DataFrame | None
    cpu_count: int | None

    @property
    def measured(self) -> pl.DataFrame:
        return self.samples.filter(pl.col("phase") == Phase.MEASURED)

    @property
    def on_cpu(self) -> bool:
        return self.stored.subject.device == "cpu"


def hold_phases(raw: RawMeasurement) -> bool:
    warm_up = raw.samples.filter(pl.col("phase") == Phase.WARM_UP)
    if len(warm_up) + len(raw.measured) != len(raw.samples):
        return False
    last, first = warm_up["end_ns"].max(), raw.measured["start_ns"].min()
    return last is None or first is None or bool(last <= first)  # type: ignore[operator]


def hold_images(raw: RawMeasurement) -> bool:
    load = raw.stored.load
    together = load.streams if load.scenario is Scenario.MULTI_STREAM else 1
    expected = pl.when(pl.col("phase") == Phase.MEASURED).then(together).otherwise(1)
    return _hold(raw.samples, pl.col("images") == expected * load.batch_size)


def hold_times(raw: RawMeasurement) -> bool:
    scheduled, start, end = (pl.col(f"{name}_ns") for name in ("scheduled", "start", "end"))
    on_time = (
        scheduled <= start if raw.stored.load.scenario is Scenario.SERVER else scheduled == start
    )
    rule = (scheduled >= 0) & on_time & (start <= end) & (end < LATEST_NS)
    return _hold(raw.samples, rule)


def hold_one_at_a_time(raw: RawMeasurement) -> bool:
    if raw.stored.load.scenario is Scenario.OFFLINE:
        return True
    return _hold(raw.samples, pl.col("start_ns") >= pl.col("end_ns").shift(1))


def hold_parts(raw: RawMeasurement) -> bool:
    took = pl.col("end_ns") - pl.col("start_ns")
    if raw.on_cpu and any(raw.samples[name].count() for name in ON_DEVICE):
        return False
    return _hold(raw.samples, pl.col("enqueue_ns").is_between(0, took)) and all(
        _hold(raw.samples, pl.col(name).is_between(0, took * CLOCK_SHARE + CLOCK_NS))
        for name in ON_DEVICE
    )


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


def hold_watched(raw: RawMeasurement) -> bool:
    if raw.machine is None or raw.measured.is_empty() or raw.stored.duration_s < WATCHED_S:
        return True
    return not select_rows_during(raw.machine, raw.measured).is_empty()


def hold_processors(raw: RawMeasurement) -> bool:
    cpus = raw.stored.subject.affinity
    return cpus is None or (
        0 < len(cpus) == len(set(cpus))
        and min(cpus) >= 0
        and (raw.cpu_count is None or len(cpus) <= raw.cpu_count)
    )


def hold_counts(raw: RawMeasurement) -> bool:
    stored, inputs = raw.stored, raw.stored.inputs
    bytes_ = [stored.host_peak_bytes, stored.device_peak_bytes]
    if inputs is not None:
        bytes_.append(inputs.rotated_bytes)
        if not 0 <= inputs.padding <= 1:
            return False
    return min(stored.load.batch_size, stored.load.streams) >= 1 and all(
        each is None or each >= 0 for each in bytes_
    )


INVARIANTS: Mapping[str, Callable[[RawMeasurement], bool]] = MappingProxyType(
    {
        "a query is of another phase than 0 and 1, or warm-up follows a measured query": hold_phases,
        "images are not those of the load": hold_images,
        "a query was scheduled after it started, started after it ended, or waited without a server": hold_times,
        "queries overlap, but the load has one at a time": hold_one_at_a_time,
        "parts of a query are longer than the query, or of a device that it did not run on": hold_parts,
        "the machine's readings are out of order, negative, or not finite": hold_readings,
        "no reading of the machine is from the measurement": hold_watched,
        "its processors repeat, or are more than the machine has": hold_processors,
        "a count is negative, or a share is not from 0 to 1": hold_counts,
    }
)
"""What is wrong if the function returns False."""


def find_impossible(run: Run) -> Iterator[str]:
    """One line for each rule that a measurement of a bench run breaks; measurements whose raw files are absent are skipped.

    Raises BadInputError for a raw file that cannot be read.
    """
    spans: list[tuple[int, int, str]] = []
    for stored in read_measurements(run.files):
        place = f"{MEASUREMENTS_FILE}: {stored.id}"
        named = (("samples", stored.samples_file), ("machine", stored.machine_file))
        yield from (
            f"{place}: the file of its {kind} is {name!r}, not {kind}/{stored.id}.parquet"
            for kind, name in named
            if name not in (None, f"{kind}/{stored.id}.parquet")
        )
        broken = list(_find_wrong_columns(stored, run.files))
        yield from (f"{place}: {each}" for each in broken)
        if broken or stored.samples_file is None or not run.files.has(stored.samples_file):
            continue
        raw = RawMeasurement(
            stored,
            read_parquet(run.files, stored.samples_file).sort("start_ns", maintain_order=True),
            read_parquet(run.files, stored.machine_file)
            if stored.machine_file and run.files.has(stored.machine_file)
            else None,
            run.manifest.environment.cpu_count,
        )
        yield from (f"{place}: {wrong}" for wrong, holds in INVARIANTS.items() if not holds(raw))
        if len(raw.samples):
            first, last = raw.samples["start_ns"].min(), raw.samples["end_ns"].max()
            spans.append((int(first), int(last), stored.id))  # type: ignore[arg-type]
    yield from _find_overlaps(spans)


def _find_wrong_columns(stored: Measurement, files: Files) -> Iterator[str]:
    tables = (
        (stored.samples_file, SAMPLE_COLUMNS, ON_DEVICE),
        (stored.machine_file, MACHINE_COLUMNS, tuple(set(MACHINE_COLUMNS) - {"time_ns"})),
    )
    for name, expected, nullable in tables:
        if name is None or not files.has(name):
            continue
        frame = read_parquet(files, name)
        types = {column: str(kind) for column, kind in frame.schema.items()}
        if types != dict(expected):
            wrong = sorted(dict(types.items() ^ expected.items()))
            yield f"{name} has other columns or types than the format: {', '.join(map(repr, wrong))}"
        elif absent := [
            each for each in expected if each not in nullable and frame[each].has_nulls()
        ]:
            yield f"{name} has no value in some rows of {', '.join(absent)}"


def _find_overlaps(spans: Sequence[tuple[int, int, str]]) -> Iterator[str]:
    for (_, end, earlier), (start, _, later) in pairwise(sorted(spans)):
        if start < end:
            yield f"{MEASUREMENTS_FILE}: {later} began before {earlier} ended, on one machine"


def _hold(frame: pl.DataFrame, rule: pl.Expr) -> bool:
    """Whether no row breaks the rule; a null breaks none."""
    return frame.filter(~rule).is_empty()
