"""Two builds of one model in turns: how many times as fast one is as the other, also on a machine that does other work.

In each round a fresh process of each build is loaded, and the two take turns in short trials, so that every disturbance
meets both. Processes that run one after the other differ by whatever the machine does meanwhile (medians of 6 to 58 ms on
two shared cores); adjacent trials of two live processes do not. A process's memory layout stays its own, so that a round is
one observation (Kalibera and Jones, ISMM 2013).

A round's figure follows from its queries alone: sorted by their start they form blocks of one build each. Each pair of
adjacent blocks gives the logarithm of the ratio of their medians, and the figure is the mean of two medians: over the pairs
that begin with one build, and over those that begin with the other. A steady drift cancels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import exp, log
from secrets import randbits
from statistics import fmean, median
from time import monotonic

import numpy as np
import polars as pl

from optpipe.core.entries import Environment
from optpipe.core.errors import StageError
from optpipe.core.events import Listener
from optpipe.core.files import Files
from optpipe.core.load import LoadSpec
from optpipe.core.measurement import Phase, Subject
from optpipe.core.quantity import format_duration
from optpipe.core.records import Recomputed, json_from_record, read_versioned
from optpipe.measure.figures import read_samples
from optpipe.measure.groups import find_environment_differences
from optpipe.measure.invariants import find_impossible_turns
from optpipe.measure.measure import BenchPlan, TrialSubject, announce_round, prepare_subject
from optpipe.measure.pair import FEWEST_QUERIES, choose_common_size, read_trial_ns
from optpipe.measure.process import WorkerPool, WorkerProcess
from optpipe.models.artifacts.lookup import StoredArtifact
from optpipe.report.document import Document, Sentence, Tone, make_document
from optpipe.stats.means import OtherSpeed, mean_from_runs
from optpipe.stats.ratio import Order
from optpipe.workspace.entry import Run
from optpipe.workspace.file_names import TURNS
from optpipe.workspace.files import write_bytes, write_parquet
from optpipe.workspace.runs import OpenRun, finish_run, open_run
from optpipe.workspace.store import Store

ROUNDS, FEWEST_ROUNDS = 5, 4
TRIALS = 8
"""Trials of each build in a round."""
TRIAL_S = 0.05
LONGEST_S = 45.0
"""No further round starts after this time, if there are FEWEST_ROUNDS: the clock decides, never the result."""
FEWEST_PAIRS = 4
"""Pairs of adjacent blocks that a round needs, of those that begin with either build."""
SIDES = "ab"


@dataclass(frozen=True, slots=True)
class TurnsRecord:
    """What `turns.json` states; `samples/aNNN.parquet` (over) and `bNNN.parquet` (judged) hold the queries of round NNN."""

    load: LoadSpec
    over: Subject
    judged: Subject
    seed: int
    """Seed of which build begins each round."""
    speedups: tuple[float, ...]
    """By round: how many times as fast the judged build is."""
    over_ns: tuple[float, ...]
    judged_ns: tuple[float, ...]
    """By round: the median over all queries of each build."""
    schema_version: int = 1


def compute_round(over: pl.DataFrame, judged: pl.DataFrame) -> float | None:
    """The logarithm of how many times as fast `judged` was; None with too few pairs of adjacent blocks.

    Both frames hold the measured queries of one round, with `start_ns` and `end_ns`.
    """
    queries = sorted(
        (start, side, end - start)
        for side, frame in zip(SIDES, (over, judged), strict=True)
        for start, end in frame.select("start_ns", "end_ns").iter_rows()
    )
    blocks = [
        (side, log(median(ns for *_, ns in block)))
        for side, block in groupby(queries, key=lambda query: query[1])
    ]
    pairs: dict[str, list[float]] = {side: [] for side in SIDES}
    for (side, before), (_, after) in pairwise(blocks):
        pairs[side].append(before - after if side == "a" else after - before)
    if min(map(len, pairs.values())) < FEWEST_PAIRS:
        return None
    return fmean(median(ratios) for ratios in pairs.values())


def measure_turns(
    over: StoredArtifact,
    judged: StoredArtifact,
    plan: BenchPlan,
    store: Store,
    listener: Listener,
    rounds: int = ROUNDS,
) -> Run:
    """Measures both in turns and writes the run; nothing remains of an interrupted one.

    Raises BadInputError for a batch size or length outside of a profile, StageError for a wrong output.
    """
    size = choose_common_size(over, judged, plan, listener)
    load = replace(plan.load, batch_size=size, percentile=50.0)
    length = plan.lengths[0] if plan.lengths else None
    seed, begun = randbits(32), monotonic()
    order, summaries = Order(seed), list[tuple[float, float, float]]()
    with (
        open_run(store.workspace, "turns") as run,
        store.scratch("turns") as scratch,
        WorkerPool(scratch, plan.affinity) as pool,
    ):
        subjects = {
            side: prepare_subject(
                artifact, plan, store, pool, scratch / side, scratch / side, length
            )
            for side, artifact in zip(SIDES, (over, judged), strict=True)
        }
        for subject in subjects.values():
            subject.expect(rounds)
        few = f"{FEWEST_ROUNDS} to {rounds}" if rounds > FEWEST_ROUNDS else str(rounds)
        with listener.step(f"{over.label} and {judged.label} in turns, {few} rounds"):
            for turn in range(rounds):
                if len(summaries) >= FEWEST_ROUNDS and monotonic() - begun > LONGEST_S:
                    break
                first = order.draw(SIDES)
                with announce_round(turn + 1, listener):
                    frames = _measure_round(subjects, load, first)
                    summaries.append(_store_round(run, turn, frames))
        record = _make_record(subjects, load, seed, summaries)
        devices = {"a": record.over.device, "b": record.judged.device}
        lasted_s = monotonic() - begun
        for wrong in find_impossible_turns(
            Files(run.path), record.load, devices, len(summaries), lasted_s
        ):
            raise StageError(f"the rounds contradict themselves: {wrong}\nmeasure again")
        write_bytes(run.path / TURNS, json_from_record(record))
        parents = [over.entry.id, judged.entry.id]
        return finish_run(run, parents=parents, measurements=len(summaries))


def summarize_round(frames: dict[str, pl.DataFrame]) -> tuple[float, float, float]:
    """The speedup, and the medians of both in ns."""
    measured = {
        side: frame.filter(frame["phase"] == Phase.MEASURED) for side, frame in frames.items()
    }
    logarithm = compute_round(measured["a"], measured["b"])
    if logarithm is None:
        raise StageError(
            "too few trials for a comparison in turns; free the machine, and run it again"
        )
    over_ns, judged_ns = (
        float(np.median((measured[side]["end_ns"] - measured[side]["start_ns"]).to_numpy()))
        for side in SIDES
    )
    return exp(logarithm), over_ns, judged_ns


def _store_round(
    run: OpenRun, turn: int, frames: dict[str, pl.DataFrame]
) -> tuple[float, float, float]:
    for side, frame in frames.items():
        write_parquet(run.path / "samples" / f"{side}{turn:03}.parquet", frame)
    return summarize_round(frames)


def _make_record(
    subjects: dict[str, TrialSubject],
    load: LoadSpec,
    seed: int,
    summaries: Sequence[tuple[float, float, float]],
) -> TurnsRecord:
    over, judged = (subjects[side].blank for side in SIDES)
    return TurnsRecord(
        replace(load, length=judged.load.length),
        over.subject,
        judged.subject,
        seed,
        tuple(speedup for speedup, _, _ in summaries),
        tuple(over_ns for _, over_ns, _ in summaries),
        tuple(judged_ns for *_, judged_ns in summaries),
    )


def _measure_round(
    subjects: dict[str, TrialSubject], load: LoadSpec, first: Sequence[str]
) -> dict[str, pl.DataFrame]:
    """The queries of a fresh process of each in order; those before its first trial are warm-up.

    The last trial of each ends with the probes for cached answers, since they change the inputs.
    """
    short = replace(load, min_seconds=TRIAL_S, max_seconds=TRIAL_S, cache_probes=0)
    with subjects["a"].open() as over_worker, subjects["b"].open() as judged_worker:
        workers: dict[str, WorkerProcess] = {"a": over_worker, "b": judged_worker}
        frames: dict[str, list[pl.DataFrame]] = {}
        slowest = 0.0
        for side in SIDES:
            measurement, samples = subjects[side].measure_trial(
                workers[side], short, f"{side}-warm"
            )
            slowest = max(slowest, read_trial_ns(measurement))
            frames[side] = [samples.with_columns(phase=pl.lit(Phase.WARM_UP, pl.UInt8))]
        seconds = max(TRIAL_S, FEWEST_QUERIES * slowest / 1e9)
        trial = replace(
            short,
            min_seconds=seconds,
            max_seconds=seconds,
            warm_up_seconds=0.0,
            max_warm_up_seconds=0.0,
            output_checks=1,
        )
        for turn in range(TRIALS):
            probes = load.cache_probes if turn == TRIALS - 1 else 0
            for side in first:
                measurement, samples = subjects[side].measure_trial(
                    workers[side], replace(trial, cache_probes=probes), f"{side}{turn:03}"
                )
                read_trial_ns(measurement)
                frames[side].append(samples.filter(samples["phase"] == Phase.MEASURED))
    return {side: pl.concat(several) for side, several in frames.items()}


@dataclass(frozen=True, slots=True)
class RecordedTurns:
    """A run of turns with its figures recomputed from the queries."""

    run: str
    environment: Environment
    record: TurnsRecord

    def is_like(self, other: "RecordedTurns") -> bool:
        """Whether both compared the same files with the same settings under one load on one machine."""
        mine, theirs = self.record, other.record
        return (
            mine.load.key == theirs.load.key
            and all(
                (subject.artifact, subject.settings) == (same.artifact, same.settings)
                for subject, same in ((mine.over, theirs.over), (mine.judged, theirs.judged))
            )
            and not find_environment_differences(self.environment, other.environment)
        )

    @property
    def logarithms(self) -> list[float]:
        return [log(speedup) for speedup in self.record.speedups]


def turns_from_runs(runs: Sequence[Run], judged: str) -> Iterator[RecordedTurns]:
    """The runs of turns in which the artifact `judged` was compared, oldest first."""
    for run in runs:
        if run.kind == "turns":
            stored = read_versioned(run.files, TURNS, TurnsRecord)
            if stored.judged.artifact == judged:
                environment = run.manifest.environment
                yield RecordedTurns(run.name, environment, _recompute(stored, run))


def _recompute(stored: TurnsRecord, run: Run) -> TurnsRecord:
    summaries = []
    for turn in range(len(stored.speedups)):
        names = {side: f"samples/{side}{turn:03}.parquet" for side in SIDES}
        summaries.append(
            summarize_round(
                {
                    side: read_samples(run.files, name, ("phase", "images", "start_ns", "end_ns"))
                    for side, name in names.items()
                }
            )
        )
    speedups, over_ns, judged_ns = zip(*summaries, strict=True) if summaries else ((), (), ())
    return replace(stored, speedups=speedups, over_ns=over_ns, judged_ns=judged_ns)


def recompute_turns(run: Run) -> Iterator[Recomputed]:
    stored = read_versioned(run.files, TURNS, TurnsRecord)
    yield TURNS, stored, _recompute(stored, run)


CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class TurnsReport:
    """The JSON document of `bench --against --turns`."""

    run_dir: str
    run_id: str
    turns: TurnsRecord
    speedup: float
    ci: tuple[float, float]
    """At 95%, allowing for a speed that no round had."""


def report_from_run(run: Run) -> TurnsReport:
    record = read_versioned(run.files, TURNS, TurnsRecord)
    mean = mean_from_runs([[log(speedup) for speedup in record.speedups]])
    assert mean is not None  # FEWEST_ROUNDS are enough for an interval
    low, high = mean.interval(CONFIDENCE)
    value = exp(mean.value)
    ci, _ = OtherSpeed(len(record.speedups)).widen(value, (exp(low), exp(high)), CONFIDENCE)
    return TurnsReport(str(run.path), run.name, record, value, ci)


def document_from_turns(report: TurnsReport) -> Document:
    record, (low, high) = report.turns, report.ci
    over, judged = (
        f"{subject.artifact} {subject.backend} {subject.precision}"
        for subject in (record.over, record.judged)
    )
    shown = f"{report.speedup:.3g} times as fast as {over} [{low:.3g}, {high:.3g}] at 95%"
    shown += f", over {len(record.speedups)} rounds in turns ({record.load})"
    medians = ", ".join(
        format_duration(median(times)) for times in (record.over_ns, record.judged_ns)
    )
    tone = Tone.STRONG if low > 1 or high < 1 else Tone.DOUBTFUL
    return make_document(
        [
            Sentence(f"{judged} is {shown}", tone),
            Sentence(
                f"medians meanwhile, which other work on the machine may have raised: {medians}",
                Tone.FAINT,
            ),
            Sentence(report.run_dir, Tone.FAINT, "run"),
        ]
    )
