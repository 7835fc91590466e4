"""Interleaved comparisons computed anew from their raw samples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from optpipe.core.bench_record import PairedComparison
from optpipe.core.disagreements import find_disagreements
from optpipe.core.environment import Environment
from optpipe.core.measurement import COMPARISON_FILE, read_measurements
from optpipe.core.records import plain_from_record, record_from_files
from optpipe.measure.interleave import comparison_from_measurements, decide_rounds, draw_names
from optpipe.measure.measured import RecordedMeasurement
from optpipe.measure.recompute import measurements_from_run, recompute_requested
from optpipe.workspace.runs import Run


@dataclass(frozen=True, slots=True)
class RecordedPair:
    """The rounds of one `bench-pair` run."""

    run: str
    environment: Environment
    first_rounds: int
    """Rounds whose scatter decided how many there would be."""
    rounds: tuple[tuple[RecordedMeasurement, RecordedMeasurement], ...]
    """Baseline and contender of each, in the order in which they were measured."""


def pairs_from_runs(
    runs: Sequence[Run], baseline: str | None, contender: str, confidence: float
) -> Iterator[RecordedPair]:
    """The comparisons of two artifacts among `runs`, whichever was named first; those without all their raw files are left out."""
    for run in runs:
        if run.kind != "bench" or baseline is None or COMPARISON_FILE not in run.manifest.files:
            continue
        record = record_from_files(run.files, COMPARISON_FILE, PairedComparison)
        sides = {(baseline, contender): "ab", (contender, baseline): "ba"}
        order = sides.get((record.baseline_artifact, record.contender_artifact))
        if order is None:
            continue
        found = measurements_from_run(run, confidence, (baseline, contender), whole=False, judged=True)
        by_id = {one.measurement.id: one for one in found}
        names = [tuple(f"{side}{turn:03}" for side in order) for turn in range(len(record.baseline_ns))]
        if all(name in by_id for pair in names for name in pair):
            rounds = tuple((by_id[first], by_id[second]) for first, second in names)
            yield RecordedPair(run.run_id, run.manifest.environment, record.first_rounds, rounds)


def find_pair_disagreements(run: Run) -> Iterator[str]:
    """Where `comparison.json` differs from what the raw samples give, one line each."""
    if COMPARISON_FILE not in run.manifest.files or not run.files.has(COMPARISON_FILE):
        return
    stored = record_from_files(run.files, COMPARISON_FILE, PairedComparison)
    by_id = {one.id: one for one in read_measurements(run.files)}
    names = list(islice(draw_names(stored.seed), 2 * len(stored.baseline_ns)))
    if not all(name in by_id for name in names):
        yield f"{COMPARISON_FILE}: measurements says {', '.join(stored.measurements)}, but its seed gives {', '.join(names)}"
        return
    if not all(run.files.has(str(by_id[name].samples_file)) for name in names):
        return
    measured = [recompute_requested(by_id[name], run.files) for name in names]
    again = comparison_from_measurements(measured, stored.first_rounds, stored.metric, stored.seed)
    yield from find_disagreements(plain_from_record(stored), plain_from_record(again), COMPARISON_FILE)
    rounds = decide_rounds(measured, stored.first_rounds, stored.metric)
    if rounds != len(stored.baseline_ns):
        yield f"{COMPARISON_FILE}: has {len(stored.baseline_ns)} rounds, but its first {stored.first_rounds} give {rounds}"
