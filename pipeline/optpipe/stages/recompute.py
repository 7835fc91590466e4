"""Measurements computed anew from their raw samples: nothing that a run has stored about itself is believed."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from optpipe.core.advice import advised
from optpipe.core.evidence import Measured
from optpipe.core.measurement import MACHINE_COLUMNS, MEASUREMENTS_FILE, SAMPLE_COLUMNS, Measurement, Phase
from optpipe.core.measurement_json import measurements_of
from optpipe.core.runs import Run, changed_files, json_of_run
from optpipe.errors import BadInputError, first_line

if TYPE_CHECKING:
    import polars as pl

NEEDED = ("phase", "images", "scheduled_ns", "start_ns", "end_ns")


def measured_from_run(
    run: Run, confidence: float = 0.95, only: Iterable[str] | None = None, *, whole: bool = True, judged: bool = False
) -> tuple[Measured, ...]:
    """The measurements of a bench run, computed anew from the raw samples.

    `only` names the artifacts wanted; with `judged`, validity, energy and memory are computed anew too. Raises
    BadInputError where a file is not as the run's manifest says; with `whole=False` files that were left out on purpose
    are no fault.
    """
    require_unchanged(run, whole=whole)
    document = json_of_run(run, MEASUREMENTS_FILE)
    wanted = None if only is None else set(only)
    found = [one for one in measurements_of(document) if wanted is None or one.subject.artifact in wanted]
    return tuple(
        Measured(
            (judged_again if judged else recomputed)(one, run.path, confidence),
            run.run_id,
            run.manifest.get("environment", {}),
            _clock(one, run.path),
        )
        for one in found
        if whole or one.samples_file is None or (run.path / one.samples_file).is_file()
    )


def require_unchanged(run: Run, *, whole: bool = True) -> None:
    """Raises BadInputError, naming the first file of `run` that is not as its manifest says."""
    problems = [problem for problem in changed_files(run) if whole or not problem.endswith(": missing")]
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        message = (
            f"run {run.run_id} is not as it was written: {problems[0]}{more}\n"
            f"remove it with `{advised(f'rm {run.run_id}', run.path.parent.parent)}` and measure again"
        )
        raise BadInputError(message)


def _clock(found: Measurement, folder: Path) -> float | None:
    """Median clock of the GPU during a measurement, in MHz; None without a GPU."""
    import polars as pl

    path = None if found.machine_file is None else folder / found.machine_file
    if path is None or not path.is_file():
        return None
    clock = pl.read_parquet(path, columns=["gpu_sm_mhz"])["gpu_sm_mhz"].median()
    return None if clock is None else float(clock)  # type: ignore[arg-type]


def recomputed(stored: Measurement, folder: Path, confidence: float = 0.95) -> Measurement:
    """`stored` with its latency and throughput computed from its Parquet file."""
    from optpipe.measuring.figures import images_per_second
    from optpipe.stats.percentiles import PERCENTS, summary_from_ns

    frame = None if stored.samples_file is None else samples(folder / stored.samples_file)
    if frame is None or frame.height == 0:
        return _unmeasured(stored)
    durations = (frame["end_ns"] - frame["scheduled_ns"]).to_numpy()
    return replace(
        stored,
        latency=summary_from_ns(durations, PERCENTS, confidence),
        throughput_images_per_s=images_per_second(frame, stored.scenario, confidence),
        samples=frame.height,
    )


def judged_again(stored: Measurement, folder: Path, confidence: float = 0.95, highest: float = 99.9) -> Measurement:
    """`stored` with every figure, percentiles up to `highest`, and its verdict computed from samples and machine rows."""
    from optpipe.measuring.figures import computed_again

    frame = None if stored.samples_file is None else samples(folder / stored.samples_file, tuple(SAMPLE_COLUMNS))
    if frame is None or frame.height == 0:
        return _unmeasured(stored)
    machine = _machine_rows(None if stored.machine_file is None else folder / stored.machine_file)
    return computed_again(stored, frame, machine, highest=highest, confidence=confidence)


def _unmeasured(stored: Measurement) -> Measurement:
    return replace(stored, latency=None, throughput_images_per_s=None, samples=0)


def _machine_rows(path: Path | None) -> "pl.DataFrame":
    import polars as pl

    schema = {name: getattr(pl, kind) for name, kind in MACHINE_COLUMNS.items()}
    if path is None:
        return pl.DataFrame(schema=schema)
    try:
        return pl.read_parquet(path, columns=list(schema)).cast(schema)  # type: ignore[arg-type]
    except (pl.exceptions.PolarsError, OSError) as error:
        message = f"cannot read the machine's rows in {path}: {first_line(error)}"
        raise BadInputError(message) from error


def samples(path: Path, columns: tuple[str, ...] = NEEDED) -> "pl.DataFrame":
    """The measured queries of one Parquet file, in the order of their end; `columns` of them."""
    import polars as pl

    try:
        lazy = pl.scan_parquet(path)
        absent = [name for name in columns if name not in lazy.collect_schema()]
        if absent:
            message = f"{path} lacks the columns {', '.join(absent)}; it is not a file of raw samples"
            raise BadInputError(message)
        measured = lazy.filter(pl.col("phase") == Phase.MEASURED).select(columns)
        return measured.cast({"images": pl.Int64}).sort("end_ns", maintain_order=True).collect()
    except (pl.exceptions.PolarsError, OSError) as error:
        message = f"cannot read the raw samples in {path}: {first_line(error)}"
        raise BadInputError(message) from error
