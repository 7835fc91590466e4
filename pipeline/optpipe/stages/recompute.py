"""Measurements computed anew from their raw samples: nothing that a run has stored about itself is believed."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from optpipe.core.evidence import Measured
from optpipe.core.measurement import (
    MEASUREMENTS_FILE,
    Estimate,
    Measurement,
    Phase,
    measurements_of,
)
from optpipe.core.runs import Run, changed_files
from optpipe.errors import BadInputError

if TYPE_CHECKING:
    import polars as pl

NEEDED = ("phase", "images", "scheduled_ns", "start_ns", "end_ns")
THROUGHPUT_WINDOWS = 20


def measured_from_run(
    run: Run, confidence: float = 0.95, only: Iterable[str] | None = None, *, whole: bool = True
) -> tuple[Measured, ...]:
    """The measurements of a bench run, computed anew from the raw samples.

    `only` names the artifacts wanted. Raises BadInputError where a file is not as the run's manifest says; with
    `whole=False` files that were left out on purpose are no fault.
    """
    require_unchanged(run, whole=whole)
    document = _measurements_document(run)
    wanted = None if only is None else set(only)
    found = [one for one in measurements_of(document) if wanted is None or one.subject.artifact in wanted]
    return tuple(
        Measured(recomputed(one, run.path, confidence), run.run_id, run.manifest.get("environment", {}))
        for one in found
        if whole or one.samples_file is None or (run.path / one.samples_file).is_file()
    )


def require_unchanged(run: Run, *, whole: bool = True) -> None:
    """Raises BadInputError, naming the first file of `run` that is not as its manifest says."""
    problems = [problem for problem in changed_files(run) if whole or not problem.endswith(": missing")]
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        message = f"run {run.run_id} is not as it was written: {problems[0]}{more}; measure again, or optpipe rm it"
        raise BadInputError(message)


def _measurements_document(run: Run) -> dict[str, object]:
    import json

    path = run.path / MEASUREMENTS_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"cannot read {path}: {error}; measure again with optpipe bench"
        raise BadInputError(message) from error
    if not isinstance(document, dict):
        message = f"{path} holds no measurements; measure again with optpipe bench"
        raise BadInputError(message)
    return document


def recomputed(stored: Measurement, folder: Path, confidence: float = 0.95) -> Measurement:
    """`stored` with its latency and throughput computed from its Parquet file."""
    from optpipe.stats.percentiles import summary_from_ns

    if stored.samples_file is None:
        return replace(stored, latency=None, throughput_images_per_s=None, samples=0)
    frame = samples(folder / stored.samples_file)
    if frame.height == 0:
        return replace(stored, latency=None, throughput_images_per_s=None, samples=0)
    durations = (frame["end_ns"] - frame["scheduled_ns"]).to_numpy()
    percents = sorted({50.0, 90.0, 95.0, 99.0, 99.9})
    return replace(
        stored,
        latency=summary_from_ns(durations, percents, confidence),
        throughput_images_per_s=throughput(frame, confidence),
        samples=frame.height,
    )


def samples(path: Path) -> "pl.DataFrame":
    """The measured queries of one Parquet file, in the order in which they started."""
    import polars as pl

    try:
        lazy = pl.scan_parquet(path)
        absent = [name for name in NEEDED if name not in lazy.collect_schema()]
        if absent:
            message = f"{path} lacks the columns {', '.join(absent)}; it is not a file of raw samples"
            raise BadInputError(message)
        measured = lazy.filter(pl.col("phase") == Phase.MEASURED).select(NEEDED)
        return measured.cast({"images": pl.Int64}).sort("start_ns", maintain_order=True).collect()
    except (pl.exceptions.PolarsError, OSError) as error:
        message = f"cannot read the raw samples in {path}: {str(error).splitlines()[0]}"
        raise BadInputError(message) from error


def throughput(frame: "pl.DataFrame", confidence: float = 0.95) -> Estimate | None:
    """Images per second from the first start to the last answer, with Student's t over equal windows of queries."""
    import numpy as np

    from optpipe.stats.stability import mean_interval

    start, end = int(frame["start_ns"].min() or 0), int(frame["end_ns"].max() or 0)  # type: ignore[arg-type]
    if end <= start:
        return None
    value = float(frame["images"].sum()) / (end - start) * 1e9
    blocks = np.array_split(np.arange(frame.height), min(THROUGHPUT_WINDOWS, frame.height))
    ends, images = frame["end_ns"].to_numpy(), frame["images"].to_numpy()
    edges = [start, *(int(ends[block].max()) for block in blocks)]
    rates = [
        images[block].sum() / (after - before) * 1e9
        for block, before, after in zip(blocks, edges[:-1], edges[1:], strict=True)
        if after > before
    ]
    interval = mean_interval(np.array(rates), confidence)
    if interval is None:
        return Estimate(value, None, "too few samples for an interval")
    return Estimate(value, (min(value, interval[0]), max(value, interval[1])))
