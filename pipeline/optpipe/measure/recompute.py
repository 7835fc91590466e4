"""Recomputes measurements from their raw samples, without trusting any stored figure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from optpipe.core.entries import Environment
from optpipe.core.errors import BadInputError, read_as_user_file
from optpipe.core.files import Files
from optpipe.core.measurement import (
    MACHINE_COLUMNS,
    MEASUREMENTS_FILE,
    SAMPLE_COLUMNS,
    Measurement,
    Phase,
    Reason,
    Validity,
    read_measurements,
)
from optpipe.core.records import Recomputed
from optpipe.measure.groups import RecordedMeasurement
from optpipe.models.artifacts.facts import JudgedBuild
from optpipe.workspace.entry import Run, require_unchanged

if TYPE_CHECKING:
    import polars as pl

NO_SAMPLES = Reason("no-samples", "there are no raw samples of it", "measure again", invalidates=True)
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
    return tuple(
        recorded_from_files(
            recompute_measurement(one, run.files, confidence), run.name, run.files, run.manifest.environment
        )
        for one in read_measurements(run.files)
        if (wanted is None or one.subject.artifact in wanted)
        and (whole or one.samples_file is None or run.files.has(one.samples_file))
    )


def recorded_from_files(
    found: Measurement, run: str, files: Files, environment: Environment | None = None
) -> RecordedMeasurement:
    """A measurement of `run`, with its latencies and the GPU's median clock if its raw files are among `files`."""
    latencies = None
    if found.samples_file is not None and files.has(found.samples_file):
        frame = read_samples(files, found.samples_file)
        latencies = (frame["end_ns"] - frame["scheduled_ns"]).to_numpy()
    kept = found.machine_file if found.machine_file is not None and files.has(found.machine_file) else None
    clock = _read_machine_rows(files, kept)["gpu_sm_mhz"].median()
    mhz = None if clock is None else float(clock)  # type: ignore[arg-type]
    return RecordedMeasurement(found, run, environment or Environment(), mhz, latencies)


def recompute_measurement(
    stored: Measurement, files: Files, confidence: float = 0.95, highest: float = 99.9
) -> Measurement:
    """`stored` with its verdict, and every figure and percentile up to `highest`, recomputed."""
    from optpipe.measure.figures import recompute_from_samples

    frame = None if stored.samples_file is None else read_samples(files, stored.samples_file, tuple(SAMPLE_COLUMNS))
    if frame is None or frame.height == 0:
        return _clear_figures(stored)
    machine = _read_machine_rows(files, stored.machine_file)
    warm_up = read_samples(files, str(stored.samples_file), ("phase",), Phase.WARM_UP).height
    again = replace(stored, warm_up_samples=warm_up)
    return recompute_from_samples(again, frame, machine, highest=highest, confidence=confidence)


def _clear_figures(stored: Measurement) -> Measurement:
    """A measurement without measured queries has no figures and is INVALID."""
    told = any(reason.invalidates for reason in stored.reasons)
    return replace(
        stored,
        verdict=Validity.INVALID,
        reasons=stored.reasons if told else (*stored.reasons, NO_SAMPLES),
        samples=0,
        duration_s=0.0,
        latency_ns=None,
        parts_ns={},
        throughput_images_per_s=None,
        throughput_batches_per_s=None,
        throughput_tokens_per_s=None,
        device_peak_bytes=None,
        host_peak_bytes=None,
        energy_j_per_image=None,
        energy_why_not=None,
    )


def _read_machine_rows(files: Files, name: str | None) -> "pl.DataFrame":
    import polars as pl

    schema = {name: getattr(pl, kind) for name, kind in MACHINE_COLUMNS.items()}
    if name is None:
        return pl.DataFrame(schema=schema)
    with read_as_user_file(files.folder / name, "machine data"):
        return pl.read_parquet(files.read(name), columns=list(schema)).cast(schema)  # type: ignore[arg-type]


def read_samples(
    files: Files, name: str, columns: tuple[str, ...] = NEEDED, phase: int = Phase.MEASURED
) -> "pl.DataFrame":
    """The columns of a phase's queries, in order of their end."""
    import polars as pl

    with read_as_user_file(files.folder / name, "raw samples"):
        lazy = pl.scan_parquet(files.read(name))
        present = lazy.collect_schema()
        absent = [name for name in columns if name not in present]
        if absent:
            raise BadInputError(f"{files.folder / name} is not a raw sample file: missing columns {', '.join(absent)}")
        chosen = lazy.filter(pl.col("phase") == phase).with_columns(pl.col("images").cast(pl.Int64))
        return chosen.sort("end_ns", maintain_order=True).select(columns).collect()


def recompute_bench(run: Run) -> Iterator[Recomputed]:
    """Every measurement whose raw samples are present."""
    for stored in read_measurements(run.files):
        if stored.samples_file is None or run.files.has(stored.samples_file):
            said, found = (
                replace(each, reasons=tuple(sorted(each.reasons, key=lambda reason: reason.code)))
                for each in (stored, recompute_requested(stored, run.files))
            )
            yield f"{MEASUREMENTS_FILE}: {stored.id}", said, found


def recompute_requested(stored: Measurement, files: Files) -> Measurement:
    """Recomputes `stored` with the confidence and percentiles that were requested."""
    latency = stored.latency_ns
    if latency is None:
        return recompute_measurement(stored, files, highest=99.0)
    asked = [float(name[1:]) for name in (*latency.percentiles, *latency.withheld)]
    return recompute_measurement(stored, files, latency.confidence, max(asked, default=99.0))


def has_measured_other_file(run: Run, build: JudgedBuild) -> bool:
    """Whether a bench run measured another file with the build's id."""
    subjects = (one.subject for one in read_measurements(run.files))
    return any(build.has_other_file(each.artifact, each.sha256) for each in subjects)


def list_artifact_measurements(
    runs: Sequence[Run], confidence: float, artifact: str | None
) -> Iterator[RecordedMeasurement]:
    """Measurements of `artifact` in the bench runs among `runs`, whose files may be partial."""
    only = None if artifact is None else [artifact]
    for run in runs:
        if run.kind == "bench":
            yield from measurements_from_run(run, confidence, only, whole=False)
