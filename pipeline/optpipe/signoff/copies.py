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
    processes = [each for run in runs for each in _list_processes(run, f"{folder}/{run.path.name}")]
    for place, one in enumerate(processes):
        for other in processes[:place]:
            if one.name == other.name or _are_copies(one, other):
                yield f"{one.place} is a copy of {other.place}"
                break


def _list_processes(run: Run, place: str) -> Iterator[_Process]:
    if run.kind == "turns":
        rounds = len(read_versioned(run.files, TURNS, TurnsRecord).speedups)
        for name in (f"{side}{turn:03}" for turn in range(rounds) for side in SIDES):
            durations = _read_durations(run, f"samples/{name}.parquet")
            yield _Process(f"{place}/{TURNS}: {name}", (run.path.name, name), durations)
    for one in read_measurements(run.files) if run.kind == "bench" else ():
        where = f"{place}/{MEASUREMENTS_FILE}: {one.id}"
        durations, readings = np.empty(0), b""
        if one.samples_file is not None and run.files.has(one.samples_file):
            durations = _read_durations(run, one.samples_file)
        if one.machine_file is not None and run.files.has(one.machine_file):
            machine = read_parquet(run.files, one.machine_file)
            rows = machine.drop("time_ns", strict=False).hash_rows()
            readings = rows.to_numpy().tobytes() if len(rows) >= FEWEST_READINGS else b""
        yield _Process(where, (run.path.name, one.id), durations, readings)


def _read_durations(run: Run, name: str) -> np.ndarray:
    frame = read_samples(run.files, name, ("phase", "start_ns", "end_ns"))
    measured = frame.filter(pl.col("phase") == Phase.MEASURED).sort("end_ns", maintain_order=True)
    return (measured["end_ns"] - measured["start_ns"]).to_numpy()[:COMPARED]


def _are_copies(one: _Process, other: _Process) -> bool:
    if one.readings and one.readings == other.readings:
        return True
    count = min(len(one.durations_ns), len(other.durations_ns))
    if count < FEWEST_QUERIES:
        return count > 0 and np.array_equal(one.durations_ns, other.durations_ns)
    mine, theirs = one.durations_ns[:count], other.durations_ns[:count]
    near = np.abs(mine - theirs) <= np.maximum(NEAR_NS, NEAR_SHARE * theirs)
    return int(near.sum()) > count / 2
