"""One process counted twice, exactly or with a little noise: section 5 of docs/dossier-format.md.

The durations of two processes never agree: of 61 processes of record, at most 0.9% of the first thousand differ by 10 in a
million. A copy to which someone added more noise than that cannot be told from another process.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from optpipe.core.measurement import MEASUREMENTS_FILE, Phase, read_measurements
from optpipe.core.parquet import read_parquet
from optpipe.core.records import read_versioned
from optpipe.measure.figures import read_samples
from optpipe.measure.turns import SIDES, TurnsRecord
from optpipe.workspace.entry import Run
from optpipe.workspace.file_names import TURNS

COMPARED = 1000
"""Queries of each process that are compared, from the first measured one on."""
FEWEST_QUERIES, FEWEST_READINGS = 20, 8
NEAR_NS, NEAR_SHARE = 2.0, 1e-5
"""Two durations are the same if they differ by no more than the larger of both."""


@dataclass(frozen=True, slots=True)
class _Process:
    place: str
    name: tuple[str, str]
    """Of its run, and its own."""
    durations_ns: np.ndarray
    """Of the first measured queries, (queries,); empty without samples."""
    readings: bytes = b""
    """Those of the machine, without their times; empty if there are few."""


def find_copies(runs: Sequence[Run], folder: str) -> Iterator[str]:
    """Repeated names of measurements in a run, and processes with the queries or the readings of another one."""
    processes = [
        process for run in runs for process in _list_processes(run, f"{folder}/{run.path.name}")
    ]
    for place, process in enumerate(processes):
        for earlier in processes[:place]:
            if process.name == earlier.name or _are_copies(process, earlier):
                yield f"{process.place} is a copy of {earlier.place}"
                break


def _list_processes(run: Run, place: str) -> Iterator[_Process]:
    if run.kind == "turns":
        rounds = len(read_versioned(run.files, TURNS, TurnsRecord).speedups)
        for name in (f"{side}{turn:03}" for turn in range(rounds) for side in SIDES):
            durations = _read_durations(run, f"samples/{name}.parquet")
            yield _Process(f"{place}/{TURNS}: {name}", (run.path.name, name), durations)
    for measurement in read_measurements(run.files) if run.kind == "bench" else ():
        where = f"{place}/{MEASUREMENTS_FILE}: {measurement.id}"
        durations, readings = np.empty(0), b""
        if measurement.samples_file is not None and run.files.has(measurement.samples_file):
            durations = _read_durations(run, measurement.samples_file)
        if measurement.machine_file is not None and run.files.has(measurement.machine_file):
            machine = read_parquet(run.files, measurement.machine_file)
            rows = machine.drop("time_ns", strict=False).hash_rows()
            readings = rows.to_numpy().tobytes() if len(rows) >= FEWEST_READINGS else b""
        yield _Process(where, (run.path.name, measurement.id), durations, readings)


def _read_durations(run: Run, name: str) -> np.ndarray:
    frame = read_samples(run.files, name, ("phase", "start_ns", "end_ns"))
    measured = frame.filter(pl.col("phase") == Phase.MEASURED).sort("end_ns", maintain_order=True)
    return (measured["end_ns"] - measured["start_ns"]).to_numpy()[:COMPARED]


def _are_copies(left: _Process, right: _Process) -> bool:
    if left.readings and left.readings == right.readings:
        return True
    count = min(len(left.durations_ns), len(right.durations_ns))
    if count < FEWEST_QUERIES:
        return count > 0 and np.array_equal(left.durations_ns, right.durations_ns)
    mine, theirs = left.durations_ns[:count], right.durations_ns[:count]
    near = np.abs(mine - theirs) <= np.maximum(NEAR_NS, NEAR_SHARE * theirs)
    return int(near.sum()) > count / 2
