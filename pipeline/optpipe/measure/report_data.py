"""Fills a report from run folders: the curves, the machine's traces and the files behind them."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optpipe import __version__
from optpipe.core.comparison import Comparison
from optpipe.measure.groups import RecordedMeasurement
from optpipe.measure.recompute import read_samples
from optpipe.report.report import Curve, MachineTrace, RawFile, Report
from optpipe.workspace.entry import Run

CURVES = 8
POINTS = 160
QUANTITIES = (
    ("gpu_sm_mhz", "GPU clock (MHz)"),
    ("gpu_temperature_c", "GPU temperature (°C)"),
    ("gpu_power_w", "GPU power (W)"),
    ("cpu_mhz", "CPU clock (MHz)"),
    ("other_cpu_cores", "CPU cores used by other processes"),
)


def report_from_comparison(
    title: str,
    comparison: Comparison,
    measured: Sequence[RecordedMeasurement],
    runs: Sequence[Run],
    root: Path,
    **more: Any,
) -> Report:
    """The report on `comparison`; file paths are relative to the folder `root` that the report will lie in."""
    folders = {run.name: run for run in runs}
    chosen = _choose_measurements(measured, comparison)
    return Report(
        title=title,
        comparison=comparison,
        latencies=tuple(_curve_from_measurement(label, one, folders[one.run], root) for label, one in chosen.items()),
        machine=tuple(_read_machine_traces(chosen, folders, root)),
        optpipe=__version__,
        environment=comparison.environment,
        **more,
    )


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
) -> list[MachineTrace]:
    import polars as pl

    frames = []
    for label, one in chosen.items():
        name = one.measurement.machine_file
        if name and folders[one.run].files.has(name):
            files = list_raw_files((folders[one.run],), root, name)
            frames.append((label, pl.read_parquet(folders[one.run].files.read(name)), files))
    traces = []
    for column, title in QUANTITIES:
        curves = []
        for label, frame, files in frames:
            if column not in frame.columns or frame[column].null_count() == frame.height:
                continue
            rows = frame.select("time_ns", column).drop_nulls().gather_every(max(1, frame.height // POINTS))
            start = rows["time_ns"][0]
            curves.append(Curve(label, tuple(((time - start) / 1e9, float(y)) for time, y in rows.iter_rows()), files))
        if curves:
            traces.append(MachineTrace(title, tuple(curves)))
    return traces
