"""What a report needs of run folders beside its documents: figures, the files behind them, and the rows as a frame."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optpipe.core.comparison import Comparison, ComparisonRow
from optpipe.core.measurement import format_settings
from optpipe.core.quantity import Estimate
from optpipe.measure.groups import RecordedMeasurement
from optpipe.measure.recompute import read_samples
from optpipe.report.charts import ChartData, Curve, StageBar, draw_figures
from optpipe.report.document import Figure, RawFile
from optpipe.workspace.entry import Run

if TYPE_CHECKING:
    import polars as pl

CURVES = 8
POINTS = 160
QUANTITIES = (
    ("gpu_sm_mhz", "GPU clock (MHz)"),
    ("gpu_temperature_c", "GPU temperature (°C)"),
    ("gpu_power_w", "GPU power (W)"),
    ("cpu_mhz", "CPU clock (MHz)"),
    ("other_cpu_cores", "CPU cores used by other processes"),
)


def draw_measurements(
    comparison: Comparison,
    measured: Sequence[RecordedMeasurement],
    runs: Sequence[Run],
    root: Path,
    stages: tuple[StageBar, ...] = (),
    stage_files: tuple[RawFile, ...] = (),
) -> list[Figure]:
    """The figures of `comparison`; file paths are relative to the folder `root` that the report will lie in."""
    folders = {run.name: run for run in runs}
    chosen = _choose_measurements(measured, comparison)
    latencies = tuple(_curve_from_measurement(label, one, folders[one.run], root) for label, one in chosen.items())
    machine = _read_machine_traces(chosen, folders, root)
    return draw_figures(ChartData(comparison, latencies, machine, stages, stage_files))


def list_raw_files(runs: Sequence[Run], root: Path, name: str | None = None) -> tuple[RawFile, ...]:
    """Every file of `runs` that is there, or what each has by `name`, with the hash in its run's manifest."""
    return tuple(
        RawFile(_make_relative(run.path / path, root), file.sha256, file.size_bytes)
        for run in runs
        for path, file in run.manifest.files.items()
        if name in (None, path) and run.files.has(path)
    )


def _make_relative(path: Path, root: Path) -> str:
    return Path(os.path.relpath(path.resolve(), root.resolve())).as_posix()


def _choose_measurements(
    measured: Sequence[RecordedMeasurement], comparison: Comparison
) -> dict[str, RecordedMeasurement]:
    """The measurements whose distributions are drawn, by label: the best ones, then the smallest batch of each build first."""
    by_id = {f"{one.run}/{one.measurement.id}": one for one in measured if one.measurement.samples}
    rows = sorted(comparison.rows, key=lambda row: (row.load.batch_size, row.configuration))
    smallest = {row.configuration: row.id for row in reversed(rows)}
    best = [row for row in comparison.best.values() if row]
    frontier = (row.id for row in rows if row.on_frontier)
    wanted = dict.fromkeys([*best, *smallest.values(), *frontier, *(row.id for row in rows)])
    drawn = [one for one in wanted if one in by_id][:CURVES]
    return {comparison.row(one).label: by_id[one] for one in drawn}


def _curve_from_measurement(label: str, one: RecordedMeasurement, run: Run, root: Path) -> Curve:
    import numpy as np

    name = str(one.measurement.samples_file)
    frame = read_samples(run.files, name)
    ordered = np.sort((frame["end_ns"] - frame["scheduled_ns"]).to_numpy()) / 1e6
    count = len(ordered)
    at = np.unique(
        np.concatenate([np.linspace(0, count - 1, POINTS), count - 1 - np.arange(min(8, count))]).astype(int)
    )
    points = tuple((float(ordered[index]), (index + 1) / count) for index in at)
    return Curve(label, points, list_raw_files((run,), root, name))


def _read_machine_traces(
    chosen: Mapping[str, RecordedMeasurement], folders: dict[str, Run], root: Path
) -> dict[str, tuple[Curve, ...]]:
    import polars as pl

    frames = []
    for label, one in chosen.items():
        name = one.measurement.machine_file
        if name and folders[one.run].files.has(name):
            files = list_raw_files((folders[one.run],), root, name)
            frames.append((label, pl.read_parquet(folders[one.run].files.read(name)), files))
    traces = {}
    for column, title in QUANTITIES:
        curves = []
        for label, frame, files in frames:
            if column not in frame.columns or frame[column].null_count() == frame.height:
                continue
            rows = frame.select("time_ns", column).drop_nulls().gather_every(max(1, frame.height // POINTS))
            start = rows["time_ns"][0]
            curves.append(Curve(label, tuple(((time - start) / 1e9, float(y)) for time, y in rows.iter_rows()), files))
        if curves:
            traces[title] = tuple(curves)
    return traces


PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9")


def frame_from_comparison(comparison: Comparison) -> "pl.DataFrame":
    """The rows as a frame; units are in the column names."""
    import polars as pl

    return pl.DataFrame([_list_columns(row) for row in comparison.rows], infer_schema_length=None)


def _list_columns(row: ComparisonRow) -> dict[str, object]:
    record: dict[str, object] = {
        name: getattr(row, name)
        for name in ("id", "run", "artifact", "model", "backend", "precision", "device", "setting")
    }
    for name in ("batch_size", "scenario", "mode", "streams", "rate_per_s"):
        record[name] = getattr(row.load, name)
    if row.load.length is not None:
        record["length"] = row.load.length
    record |= {"settings": format_settings(row.settings, row.settings)}
    record |= {"verdict": "VALID" if row.valid else "INVALID", "processes": row.processes, "samples": row.samples}
    for name in PERCENTILES:
        record |= _figure(f"latency_{name.replace('.', '_')}_ms", row.latency_ns.get(name), 1e-6)
    record |= _figure("throughput_images_per_s", row.throughput_images_per_s)
    if row.throughput_tokens_per_s is not None:
        record |= _figure("throughput_tokens_per_s", row.throughput_tokens_per_s)
    record |= _figure("energy_j_per_image", row.energy_j_per_image)
    record |= _figure("top1", row.top1)
    record |= _figure("speedup", row.speedup)
    return record | {
        "change": row.change,
        "held_against": row.held_against,
        "memory_bytes": row.memory_bytes,
        "size_bytes": row.size_bytes,
        "build_s": row.build_s,
        "on_frontier": row.on_frontier,
        "dominated_by": row.dominated_by,
        "reasons": "; ".join(row.reasons),
        "caveats": "; ".join(row.caveats),
    }


def _figure(name: str, figure: Estimate | None, scale: float = 1.0) -> dict[str, float | None]:
    figure = None if figure is None else figure.scale(scale)
    return {
        name: figure.value if figure else None,
        f"{name}_low": figure.low if figure else None,
        f"{name}_high": figure.high if figure else None,
    }
