"""Figures and verdict of a measurement from its raw samples and machine rows.

The same code computes them when the measurement is made and when a sign-off or `optpipe verify` checks them; a stored figure
is never trusted.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from optpipe.core.entries import Environment
from optpipe.core.errors import BadInputError, read_as_user_file
from optpipe.core.files import Files
from optpipe.core.load import LoadSpec, Scenario
from optpipe.core.measurement import (
    COMPARISON_FILE,
    MACHINE_COLUMNS,
    MEASUREMENTS_FILE,
    SAMPLE_COLUMNS,
    Measurement,
    Phase,
    Reason,
    Validity,
    read_measurements,
)
from optpipe.core.metrics.measured import ENERGY, THROUGHPUT, TOKENS, keep_packages_note
from optpipe.core.metrics.registry import compute_recorded_figures, recompute_figures
from optpipe.core.parquet import keep_frames, parse_parquet, read_parquet
from optpipe.core.quantity import Estimate
from optpipe.core.records import Recomputed
from optpipe.measure.groups import RecordedMeasurement
from optpipe.measure.validity import WITNESSED, ValidityEvidence, find_reasons
from optpipe.models.artifacts.judged_build import JudgedBuild
from optpipe.stats.means import MIN_VALUES, compute_mean_interval, compute_ratio_of_sums_interval
from optpipe.stats.percentiles import CONFIDENCE, PERCENTS, summary_from_ns
from optpipe.stats.stability import compute_effective_count
from optpipe.workspace.entry import Run, require_unchanged


@dataclass(slots=True)
class SampledWindow:
    """The measured queries of one process, and the readings during them: a `core.metrics.contract.Window`."""

    load: LoadSpec
    samples: pl.DataFrame
    machine: pl.DataFrame
    padding: float = 0.0
    confidence: float = CONFIDENCE

    @property
    def latencies_ns(self) -> np.ndarray:
        return (self.samples["end_ns"] - self.samples["scheduled_ns"]).to_numpy()

    @property
    def images(self) -> int:
        return int(self.samples["images"].sum())

    @property
    def seconds(self) -> float:
        return float(self.samples["end_ns"].max() - self.samples["start_ns"].min()) / 1e9  # type: ignore[operator,arg-type]

    def estimate_mean(self, values: Sequence[float] | np.ndarray) -> Estimate:
        known = [float(value) for value in values]
        interval = compute_mean_interval(known, self.confidence)
        return Estimate(sum(known) / max(len(known), 1), *(interval or ()))

    def estimate_rate(self, amounts: np.ndarray, times_ns: np.ndarray) -> Estimate:
        """All amounts over all time; its interval always contains the figure.

        Adjacent queries resemble each other: a group joins many of them and counts as one.
        """
        amounts = amounts.astype(np.int64)
        worth = compute_effective_count(times_ns / np.maximum(amounts, 1))
        groups = min(len(amounts), max(MIN_VALUES, min(GROUPS, int(worth / WORTH_PER_GROUP))))
        # integers, whose sums are exact for any grouping
        in_groups, ns_in_groups = (
            np.array([int(part.sum()) for part in np.array_split(column, groups)])
            for column in (amounts, times_ns)
        )
        value = int(amounts.sum()) / max(int(times_ns.sum()), 1) * 1e9
        interval = compute_ratio_of_sums_interval(in_groups, ns_in_groups, self.confidence)
        if interval is None:
            return Estimate(value)
        return Estimate(value, max(0.0, interval[0]) * 1e9, interval[1] * 1e9)


PARTS = ("enqueue", "h2d", "compute", "d2h")
GROUPS = 10
"""Maximum consecutive groups of samples for the throughput's interval."""
WORTH_PER_GROUP = 8
"""Independent samples per group, so that adjacent groups hardly resemble each other."""


def judge_measurement(
    blank: Measurement,
    witnessed: Sequence[Reason],
    evidence: ValidityEvidence,
    highest: float = 99.0,
    confidence: float = CONFIDENCE,
) -> Measurement:
    """`blank` with figures, percentiles up to p99 or `highest`, and the verdict of the `witnessed` and all found reasons."""
    measured, load = evidence.samples, blank.load
    reasons = sorted(
        [*witnessed, *find_reasons(evidence)], key=lambda reason: not reason.invalidates
    )
    percents = tuple(
        sorted({percent for percent in (*PERCENTS, highest) if percent <= max(99.0, highest)})
    )
    padding = blank.inputs.padding if blank.inputs else 0.0
    window = SampledWindow(load, measured, evidence.machine, padding, confidence)
    parts = {part: column for part in PARTS if (column := measured[f"{part}_ns"]).null_count() == 0}
    if load.scenario is Scenario.SERVER:
        parts["queue"] = measured["start_ns"] - measured["scheduled_ns"]
        parts["service"] = measured["end_ns"] - measured["start_ns"]
    throughput, tokens = THROUGHPUT.compute(window), TOKENS.compute(window)
    energy = ENERGY.compute(window)
    return replace(
        blank,
        verdict=Validity.INVALID
        if any(reason.invalidates for reason in reasons)
        else Validity.VALID,
        reasons=tuple(reasons),
        samples=len(measured),
        latency_ns=summary_from_ns(window.latencies_ns, percents, confidence),
        parts_ns={
            part: summary_from_ns(durations.to_numpy(), percents, confidence)
            for part, durations in parts.items()
        },
        duration_s=window.seconds,
        throughput_images_per_s=throughput,
        throughput_batches_per_s=throughput.value / load.batch_size,
        throughput_tokens_per_s=None if isinstance(tokens, str) else tokens,
        energy_j_per_image=None if isinstance(energy, str) else energy,
        energy_why_not=energy if isinstance(energy, str) else None,
        figures=compute_recorded_figures(window, blank.figures),
    )


def recompute_from_samples(
    stored: Measurement,
    measured: pl.DataFrame,
    machine: pl.DataFrame,
    *,
    highest: float = 99.9,
    confidence: float = CONFIDENCE,
) -> Measurement:
    """Recomputes `stored` from its raw files.

    Only facts that no raw file holds are taken from the record: the subject and load, the worker's peak memory and load time, what
    RAPL said of the CPU packages, and the reasons in `validity.WITNESSED`.
    """
    judged = replace(stored, output_check=None, interrupted=False)
    evidence = ValidityEvidence(judged, measured, select_rows_during(machine, measured))
    witnessed = [reason for reason in stored.reasons if reason.code in WITNESSED]
    again = judge_measurement(stored, witnessed, evidence, highest, confidence)
    again = replace(
        again,
        figures=recompute_figures(stored.figures, again.figures),
        energy_why_not=keep_packages_note(again.energy_why_not, stored.energy_why_not),
    )
    peak = compute_worker_peak_bytes(
        machine, stored.inputs.rotated_bytes if stored.inputs else None
    )
    return again if peak is None else replace(again, device_peak_bytes=peak)


def select_rows_during(machine: pl.DataFrame, measured: pl.DataFrame) -> pl.DataFrame:
    """Rows within the measurement; rates look back, so the first row after the start is left out."""
    start, end = measured["start_ns"].min(), measured["end_ns"].max()
    inside = machine.filter((machine["time_ns"] >= start) & (machine["time_ns"] <= end))
    return inside.slice(1) if len(inside) > 2 else inside


def compute_worker_peak_bytes(machine: pl.DataFrame, rotated_bytes: int | None) -> int | None:
    """Maximum of the worker's share of the device, without the rotated inputs; None if the driver does not report it."""
    own = None if machine.is_empty() or rotated_bytes is None else machine["gpu_worker_bytes"].max()
    return max(0, own - (rotated_bytes or 0)) if isinstance(own, int) and own > 0 else None


NO_SAMPLES = Reason(
    "no-samples", "there are no raw samples of it", "measure again", invalidates=True
)
NEEDED = ("phase", "images", "scheduled_ns", "start_ns", "end_ns")


def measurements_from_run(
    run: Run, confidence: float = 0.95, only: Iterable[str] | None = None, *, whole: bool = True
) -> tuple[RecordedMeasurement, ...]:
    """The measurements of a bench run, with all figures and verdicts recomputed from the raw files.

    `only` names the wanted artifacts. Raises BadInputError if a file differs from the run's manifest; with
    `whole=False` missing files are allowed.
    """
    require_unchanged(run, whole=whole)
    wanted = None if only is None else set(only)
    measurements = (
        recompute_measurement(measurement, run.files, confidence)
        for measurement in read_measurements(run.files)
        if (wanted is None or measurement.subject.artifact in wanted)
        and (whole or measurement.samples_file is None or run.files.has(measurement.samples_file))
    )
    return tuple(
        recorded_from_files(measurement, run.name, run.files, run.manifest.environment)
        for measurement in measurements
    )


def recorded_from_files(
    measurement: Measurement, run: str, files: Files, environment: Environment | None = None
) -> RecordedMeasurement:
    """A measurement of `run`, with its latencies and the GPU's median clock if its raw files are among `files`."""
    latencies = None
    if measurement.samples_file is not None and files.has(measurement.samples_file):
        frame = read_samples(files, measurement.samples_file)
        latencies = (frame["end_ns"] - frame["scheduled_ns"]).to_numpy()
    kept = (
        measurement.machine_file
        if measurement.machine_file is not None and files.has(measurement.machine_file)
        else None
    )
    clock = _read_machine_rows(files, kept)["gpu_sm_mhz"].median()
    mhz = None if clock is None else float(clock)  # type: ignore[arg-type]
    return RecordedMeasurement(measurement, run, environment or Environment(), mhz, latencies)


def recompute_measurement(
    stored: Measurement, files: Files, confidence: float = 0.95, highest: float = 99.9
) -> Measurement:
    """`stored` with its verdict, and every figure and percentile up to `highest`, recomputed."""
    frame = (
        None
        if stored.samples_file is None
        else read_samples(files, stored.samples_file, tuple(SAMPLE_COLUMNS))
    )
    if frame is None or frame.height == 0:  # no figures, and INVALID
        reasons = stored.reasons if stored.invalid_reasons else (*stored.reasons, NO_SAMPLES)
        blank = replace(
            stored,
            verdict=Validity.INVALID,
            reasons=reasons,
            samples=0,
            duration_s=0.0,
            parts_ns={},
            figures={},
        )
        cleared: dict[str, Any] = dict.fromkeys(MEASURED)
        return replace(blank, **cleared)
    machine = _read_machine_rows(files, stored.machine_file)
    warm_up = read_samples(files, str(stored.samples_file), ("phase",), Phase.WARM_UP).height
    again = replace(stored, warm_up_samples=warm_up)
    return recompute_from_samples(again, frame, machine, highest=highest, confidence=confidence)


MEASURED = (
    "latency_ns", "throughput_images_per_s", "throughput_batches_per_s", "throughput_tokens_per_s", "device_peak_bytes",
    "host_peak_bytes", "energy_j_per_image", "energy_why_not",
)  # fmt: skip
"""Fields of a measurement that are None without measured queries."""


def _read_machine_rows(files: Files, name: str | None) -> pl.DataFrame:
    schema = {name: getattr(pl, kind) for name, kind in MACHINE_COLUMNS.items()}
    if name is None:
        return pl.DataFrame(schema=schema)
    with read_as_user_file(files.folder / name, "machine data"):
        return read_parquet(files, name, list(schema)).cast(schema)  # type: ignore[arg-type]


def read_samples(
    files: Files, name: str, columns: tuple[str, ...] = NEEDED, phase: int = Phase.MEASURED
) -> pl.DataFrame:
    """The columns of a phase's queries, in order of their end."""
    place = files.folder / name
    with read_as_user_file(place, "raw samples"):
        chosen = _select_phase(files.read(name), place, phase)
        _require_columns(chosen, columns, place)
        return chosen.select(columns)


@keep_frames
def _select_phase(content: bytes, place: Path, phase: int) -> pl.DataFrame:
    frame = parse_parquet(content, place)
    _require_columns(frame, ("phase", "images", "end_ns"), place)
    chosen = frame.filter(pl.col("phase") == phase)
    return chosen.with_columns(pl.col("images").cast(pl.Int64)).sort("end_ns", maintain_order=True)


def _require_columns(frame: pl.DataFrame, columns: Iterable[str], place: Path) -> None:
    if absent := [name for name in columns if name not in frame.columns]:
        raise BadInputError(
            f"{place} is not a raw sample file: missing columns {', '.join(absent)}"
        )


def recompute_bench(run: Run) -> Iterator[Recomputed]:
    """Every measurement whose raw samples are present."""
    for stored in read_measurements(run.files):
        if stored.samples_file is None or run.files.has(stored.samples_file):
            said, computed = (
                replace(
                    measurement,
                    reasons=tuple(sorted(measurement.reasons, key=lambda reason: reason.code)),
                )
                for measurement in (stored, recompute_requested(stored, run.files))
            )
            yield f"{MEASUREMENTS_FILE}: {stored.id}", said, computed


def recompute_requested(stored: Measurement, files: Files) -> Measurement:
    """Recomputes `stored` with the confidence and percentiles that were requested."""
    latency = stored.latency_ns
    if latency is None:
        return recompute_measurement(stored, files, highest=99.0)
    asked = [float(name[1:]) for name in (*latency.percentiles, *latency.withheld)]
    return recompute_measurement(stored, files, latency.confidence, max(asked, default=99.0))


def count_measured_together(
    runs: Sequence[Run], artifact: str, candidates: Mapping[str, int]
) -> int:
    """The number of builds among which bench runs may have chosen `artifact`: those of one run and load, or the `candidates` of one.

    A comparison in turns chooses from none: it has another build only to compare with.
    """
    most = 1
    for run in runs:
        if run.kind != "bench":
            continue
        loads = list_builds_by_load(run).values()
        together = (len(builds) for builds in loads if artifact in builds)
        most = max([most, candidates.get(run.name, 1), *together])
    return most


def list_builds_by_load(run: Run) -> dict[object, dict[str, str | None]]:
    """The artifacts that a bench run measured under each load, with the names of their models; none of a comparison in turns."""
    of_load: defaultdict[object, dict[str, str | None]] = defaultdict(dict)
    if COMPARISON_FILE not in run.manifest.files:
        for one in read_measurements(run.files):
            of_load[one.load.key][one.subject.artifact] = one.subject.model
    return of_load


def has_measured_other_file(run: Run, build: JudgedBuild) -> bool:
    """Whether a bench run measured another file with the build's id."""
    return any(
        build.has_other_file(measurement.subject.artifact, measurement.subject.sha256)
        for measurement in read_measurements(run.files)
    )


def list_artifact_measurements(
    runs: Sequence[Run], confidence: float, artifact: str | None
) -> Iterator[RecordedMeasurement]:
    """Measurements of `artifact` in the bench runs among `runs`, whose files may be partial."""
    only = None if artifact is None else [artifact]
    for run in runs:
        if run.kind == "bench":
            yield from measurements_from_run(run, confidence, only, whole=False)
