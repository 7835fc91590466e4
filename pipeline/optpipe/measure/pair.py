"""Measures two artifacts in turn, a fresh process each time, in an order drawn for each round.

Neither memory layout nor time favors one of them, and no periodic disturbance hits the same one repeatedly, as it would
in A B B A (Fisher, The Design of Experiments, 1935).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from math import exp, log
from pathlib import Path
from secrets import randbits
from statistics import median

from optpipe.backends.registry import warn_of_unused_options
from optpipe.core.entries import Environment
from optpipe.core.errors import BadInputError, ExitStatus, StageError
from optpipe.core.events import Listener
from optpipe.core.load import LoadSpec
from optpipe.core.measurement import COMPARISON_FILE, Measurement, Reason, read_measurements
from optpipe.core.measurement_group import MeasurementGroup
from optpipe.core.metrics.measured import PairMetric
from optpipe.core.metrics.registry import find_metric
from optpipe.core.percentile_names import percent_from_name
from optpipe.core.process import acknowledge_interrupt
from optpipe.core.records import Recomputed, json_from_record, read_versioned
from optpipe.core.wording import Argument, Call
from optpipe.measure.figures import measurements_from_run, recompute_requested
from optpipe.measure.groups import RecordedMeasurement
from optpipe.measure.measure import (
    BenchPlan,
    TrialSubject,
    announce_round,
    describe_validity,
    offer_recovery,
    prepare_subject,
    recover_unfinished,
    require_one_clock,
    warn_about_threads,
    write_measurements,
)
from optpipe.measure.process import WorkerPool
from optpipe.measure.search import ArtifactLimit
from optpipe.measure.validity import WRONG_OUTPUTS, explain_stop, find_repeated_cause
from optpipe.models.artifacts.lookup import StoredArtifact
from optpipe.models.artifacts.profile_sizes import choose_batch_sizes, require_lengths
from optpipe.stats.ratio import (
    Change,
    Order,
    Ratio,
    compute_exchange_p_value,
    count_rounds_needed,
    ratio_from_rounds,
)
from optpipe.workspace.entry import Run
from optpipe.workspace.files import write_bytes
from optpipe.workspace.runs import OpenRun, begin_run, finish_run
from optpipe.workspace.store import Store


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Contender over baseline, with the figure of every process: the content of `comparison.json`."""

    metric: PairMetric
    ratio: Ratio
    baseline_artifact: str
    contender_artifact: str
    baseline_ns: tuple[float, ...]
    contender_ns: tuple[float, ...]
    """Per query, in order of the rounds; for `throughput`, per image."""
    first_rounds: int
    """Rounds whose scatter determined the total and gives the interval."""
    seed: int
    """Seed of the order within rounds."""
    invalid: Mapping[str, int]
    """INVALID processes by reason code. They count, since their order was drawn too."""
    invalid_processes: int
    measurements: tuple[str, ...]
    schema_version: int = 1


@dataclass(frozen=True, slots=True)
class BenchRecord:
    """The JSON document of `optpipe bench`; with `--against` only of the comparison."""

    run_dir: str
    run_id: str
    measurements: tuple[Measurement, ...]
    environment: Environment
    exit_status: int
    groups: tuple[MeasurementGroup, ...] = ()
    baseline: str | None = None
    contender: str | None = None
    comparison: PairedComparison | None = None
    """None if it was interrupted, or stopped because other work disturbed it."""
    limits: tuple[ArtifactLimit, ...] = ()
    interrupted: bool = False
    stopped: Reason | None = None
    """The cause on the machine that made the last two processes INVALID, and ended the measurement early."""
    warnings: tuple[str, ...] = field(default=())


PAIR_CONFIDENCE = 0.99
"""A claimed difference moves a release: one in a hundred comparisons of equals may claim one, not one in twenty."""
RESOLUTION = 0.04
"""After the requested rounds, as many more are run as a difference of this size needs, within MAX_ROUND_FACTOR."""
PAIR_LIMITS = {"max_other_cpu_share": RESOLUTION}
"""Validity limits: other work that takes as much as the difference to detect is flagged."""
MAX_ROUND_FACTOR = 3
FEWEST_ROUNDS = 8
"""With fewer rounds, an exchange test has too few outcomes for any to be rarer than 1 in 100."""


def run_interleaved(
    measure_baseline: Callable[[str], Measurement],
    measure_contender: Callable[[str], Measurement],
    rounds: int,
    metric: PairMetric,
    seed: int,
    stops: Callable[[Sequence[Measurement]], bool] = lambda _measured: False,
) -> PairedComparison | None:
    """Runs the rounds, each in an order from `seed`; after `rounds` of them the total is decided once.

    None if a process was interrupted, or if `stops` says after one that no further one is to start. Raises
    StageError if one fails: a comparison with holes would be biased.
    """
    require_enough_rounds(rounds)
    measures = {"a": measure_baseline, "b": measure_contender}
    every: list[Measurement] = []
    last, names = rounds, draw_names(seed)
    while len(every) < 2 * last:
        name = next(names)
        measurement = replace(measures[name[0]](name), id=name)
        if measurement.interrupted:
            return None
        read_pair_figure(measurement, metric)
        every.append(measurement)
        if len(every) == 2 * rounds:
            baseline, contender = (_list_figures(every, side, metric) for side in "ab")
            last = decide_rounds(baseline, contender, rounds)
        if len(every) < 2 * last and stops(every):
            return None
    return comparison_from_measurements(every, rounds, metric, seed)


def require_enough_rounds(rounds: int) -> None:
    """Raises BadInputError if no outcome of so few rounds could show a difference."""
    if rounds < FEWEST_ROUNDS:
        raise BadInputError(
            f"a comparison of processes needs {FEWEST_ROUNDS} rounds or more",
            argument=Argument("rounds", rounds),
        )


def draw_names(seed: int) -> Iterator[str]:
    """Names of all processes in order, `a` or `b` with the round: `b000`, `a000`, `a001`, `b001`, …"""
    order = Order(seed)
    for turn in count():
        yield from (f"{side}{turn:03}" for side in order.draw("ab"))


def decide_rounds(baseline: Sequence[float], contender: Sequence[float], first: int) -> int:
    """Total rounds, from the figures of the `first` rounds alone."""
    needed = count_rounds_needed(
        ratio_from_rounds(baseline, contender, PAIR_CONFIDENCE), RESOLUTION
    )
    return max(first, min(needed, first * MAX_ROUND_FACTOR))


def comparison_from_measurements(
    measured: Sequence[Measurement], first: int, metric: PairMetric, seed: int
) -> PairedComparison:
    """Compares measurements that are named and ordered as by `draw_names`. Raises StageError or BadInputError if one lacks the figure."""
    baseline, contender = (_list_figures(measured, side, metric) for side in "ab")
    artifacts = {measurement.id[0]: measurement.subject.artifact for measurement in measured}
    invalid = [measurement for measurement in measured if not measurement.is_valid]
    return PairedComparison(
        metric,
        judge_rounds(baseline, contender, first),
        baseline_artifact=artifacts["a"],
        contender_artifact=artifacts["b"],
        baseline_ns=tuple(baseline),
        contender_ns=tuple(contender),
        first_rounds=first,
        seed=seed,
        invalid=dict(
            Counter(
                code for measurement in invalid for code in measurement.invalid_codes
            ).most_common()
        ),
        invalid_processes=len(invalid),
        measurements=tuple(measurement.id for measurement in measured),
    )


def _list_figures(measured: Sequence[Measurement], side: str, metric: PairMetric) -> list[float]:
    return [
        read_pair_figure(measurement, metric)
        for measurement in measured
        if measurement.id.startswith(side)
    ]


def judge_rounds(baseline: Sequence[float], contender: Sequence[float], first: int) -> Ratio:
    """The ratio with Student's interval; a difference also requires an exchange test."""
    ratio = ratio_from_rounds(baseline, contender, PAIR_CONFIDENCE, first)
    p_value = max(ratio.p_value, compute_exchange_p_value(baseline, contender))
    change = ratio.change if p_value <= 1 - PAIR_CONFIDENCE else Change.NO_DIFFERENCE
    return replace(ratio, p_value=p_value, change=change)


def read_pair_figure(measurement: Measurement, metric: PairMetric) -> float:
    """One process's figure. A median needs no interval, since the ratio's interval is over processes."""
    wrong = [reason for reason in measurement.reasons if reason.code in WRONG_OUTPUTS]
    if measurement.latency_ns is None or wrong:
        reason = (wrong or list(measurement.reasons))[0]
        raise StageError(f"{measurement.subject.artifact}: {reason.message}; {reason.remedy}")
    figure = find_metric(metric)
    value = figure.read_without_interval(measurement)
    if figure.higher_is_better:
        return 1e9 / value if value else float("nan")
    if value is None:
        problem = f"{metric} needs more samples per process: {figure.find_reason(measurement)}"
        raise BadInputError(f"{problem}; increase " + Argument("min_time"))
    return value


@dataclass(slots=True)
class PairBench:
    """A run that compares two artifacts, and its processes so far."""

    run: OpenRun
    plan: BenchPlan
    load: LoadSpec
    artifacts: Mapping[str, StoredArtifact]
    """The baseline as `a`, the contender as `b`."""
    rounds: int
    listener: Listener
    subjects: Mapping[str, TrialSubject] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    cause: Reason | None = None
    """What on the machine made the last processes INVALID."""

    def prepare(self, store: Store, pool: WorkerPool, scratch: Path) -> None:
        length = self.plan.lengths[0] if self.plan.lengths else None
        self.subjects = {
            side: prepare_subject(
                artifact, self.plan, store, pool, scratch / side, self.run.path, length
            )
            for side, artifact in self.artifacts.items()
        }
        for subject in self.subjects.values():
            subject.expect(self.rounds * MAX_ROUND_FACTOR)

    def measure(self, name: str) -> Measurement:
        """Measures one side, the first letter of `name`, in a fresh process."""
        subject, done = self.subjects[name[0]], self.measurements
        with subject.open() as worker:
            measured = subject.measure(worker, self.load, name)
        measurement = replace(measured, process=len(done))
        done.append(measurement)
        write_measurements(self.run.path, done)  # a crash loses no finished process
        validity = describe_validity(measurement)
        self.listener.inform(f"process {len(done)}: {subject.artifact.label}: {validity}")
        return measurement

    def must_stop(self, measured: Sequence[Measurement]) -> bool:
        """Whether other work disturbs the comparison, which is then explained."""
        self.cause = None if self.plan.keep_going else find_repeated_cause(measured)
        if self.cause is None:
            return False
        baseline, contender = (artifact.entry.id for artifact in self.artifacts.values())
        count = f"process {len(measured)} of {2 * self.rounds} or more"
        turns = Call("bench", contender, against=baseline, turns=True)
        anyway = Call(
            "bench",
            contender,
            against=baseline,
            keep_going=Argument("keep_going", True, setting=True),
        )
        self.listener.warn(explain_stop(count, self.cause, turns, anyway))
        return True


def bench_pair(
    baseline: StoredArtifact,
    contender: StoredArtifact,
    plan: BenchPlan,
    rounds: int,
    metric: PairMetric,
    store: Store,
    listener: Listener,
) -> BenchRecord:
    """Compares two artifacts in `rounds` or more of fresh processes and writes the run.

    Raises BadInputError for a batch size or length outside a profile before anything is measured.
    """
    size = choose_common_size(baseline, contender, plan, listener)
    percent = max(plan.load.percentile, percent_from_name(metric))
    for artifact in (baseline, contender):
        options = artifact.resolve_effective_options(plan.options)
        warn_about_threads(artifact, options, plan.affinity, listener)
    pair = PairBench(
        run=begin_run(store.workspace, "bench"),
        plan=replace(plan, limits={**plan.limits, **PAIR_LIMITS}),
        load=replace(plan.load, batch_size=size, percentile=percent),
        artifacts={"a": baseline, "b": contender},
        rounds=rounds,
        listener=listener,
    )
    return _finish_pair(pair, _measure_pair(pair, metric, store))


def choose_common_size(
    first: StoredArtifact, second: StoredArtifact, plan: BenchPlan, listener: Listener
) -> int:
    """The batch size at which `plan` compares two artifacts. Warns of options that neither of them uses.

    Raises BadInputError for a batch size or length outside a profile.
    """
    size = choose_batch_sizes(first, plan.batches)[0]
    choose_batch_sizes(second, (size,))
    for artifact in (first, second):
        require_lengths(artifact, plan.lengths)
    backends = {artifact.entry.info.backend for artifact in (first, second)}
    warn_of_unused_options(plan.options, backends, "measured", listener)
    return size


def _measure_pair(pair: PairBench, metric: PairMetric, store: Store) -> PairedComparison | None:
    """None if it was interrupted, or stopped because other work disturbed it."""
    fewest, most = 2 * pair.rounds, 2 * pair.rounds * MAX_ROUND_FACTOR
    sides = " vs. ".join(artifact.label for artifact in pair.artifacts.values())
    with (
        offer_recovery(pair.run, pair.listener),
        store.scratch("bench") as scratch,
        WorkerPool(scratch, pair.plan.affinity) as pool,
        pair.listener.step(f"{sides}, {fewest} to {most} processes"),
    ):
        try:
            pair.prepare(store, pool, scratch)
            return run_interleaved(
                pair.measure, pair.measure, pair.rounds, metric, randbits(32), pair.must_stop
            )
        except KeyboardInterrupt as interruption:  # between two processes
            pair.measurements += recover_unfinished(pair.run.path, pair.measurements)
            if not pair.measurements:
                raise
            acknowledge_interrupt(interruption)
            return None


def _finish_pair(pair: PairBench, comparison: PairedComparison | None) -> BenchRecord:
    """Writes the run. Without a comparison it is incomplete: interrupted, or stopped for a cause."""
    write_measurements(pair.run.path, pair.measurements)
    require_one_clock(pair.run.path, pair.measurements)
    if comparison is not None:
        write_bytes(pair.run.path / COMPARISON_FILE, json_from_record(comparison))
    interrupted = comparison is None and pair.cause is None
    finished = finish_run(
        pair.run,
        parents=[artifact.entry.id for artifact in pair.artifacts.values()],
        status="interrupted" if interrupted else "complete",
    )
    status = ExitStatus.INTERRUPTED if interrupted else ExitStatus.DONE
    if pair.cause is not None:
        status = ExitStatus.INCONCLUSIVE
    labels = [f"{artifact.entry.id} {artifact.label}" for artifact in pair.artifacts.values()]
    return BenchRecord(
        run_dir=str(finished.path),
        run_id=finished.name,
        baseline=labels[0],
        contender=labels[1],
        comparison=comparison,
        measurements=tuple(pair.measurements),
        environment=finished.manifest.environment,
        exit_status=int(status),
        interrupted=interrupted,
        stopped=pair.cause,
    )


@dataclass(frozen=True, slots=True)
class RecordedPair:
    run: str
    environment: Environment
    first_rounds: int
    """Rounds whose scatter determined the total."""
    rounds: tuple[tuple[RecordedMeasurement, RecordedMeasurement], ...]


def pairs_from_runs(
    runs: Sequence[Run], baseline: str | None, contender: str, confidence: float
) -> Iterator[RecordedPair]:
    """Comparisons of two artifacts among `runs`, in either order, without those that lack raw files."""
    for run in runs:
        if run.kind != "bench" or baseline is None or COMPARISON_FILE not in run.manifest.files:
            continue
        record = read_versioned(run.files, COMPARISON_FILE, PairedComparison)
        sides = {(baseline, contender): "ab", (contender, baseline): "ba"}
        order = sides.get((record.baseline_artifact, record.contender_artifact))
        if order is None:
            continue
        measured = measurements_from_run(run, confidence, (baseline, contender), whole=False)
        by_id = {recorded.measurement.id: recorded for recorded in measured}
        names = [
            tuple(f"{side}{turn:03}" for side in order) for turn in range(len(record.baseline_ns))
        ]
        if all(name in by_id for pair in names for name in pair):
            rounds = tuple((by_id[first], by_id[second]) for first, second in names)
            yield RecordedPair(run.name, run.manifest.environment, record.first_rounds, rounds)


def recompute_pair(run: Run) -> Iterator[Recomputed]:
    """The comparison of a run that has one and all its raw samples."""
    if COMPARISON_FILE not in run.manifest.files or not run.files.has(COMPARISON_FILE):
        return
    stored = read_versioned(run.files, COMPARISON_FILE, PairedComparison)
    by_id = {measurement.id: measurement for measurement in read_measurements(run.files)}
    names = list(islice(draw_names(stored.seed), 2 * len(stored.baseline_ns)))
    if not all(name in by_id for name in names):
        yield f"{COMPARISON_FILE}: measurements", stored.measurements, names
        return
    if not all(run.files.has(str(by_id[name].samples_file)) for name in names):
        return
    measured = [recompute_requested(by_id[name], run.files) for name in names]
    again = comparison_from_measurements(measured, stored.first_rounds, stored.metric, stored.seed)
    yield COMPARISON_FILE, stored, again
    first = again.baseline_ns[: stored.first_rounds], again.contender_ns[: stored.first_rounds]
    yield (
        f"{COMPARISON_FILE}: number of rounds",
        len(stored.baseline_ns),
        decide_rounds(*first, stored.first_rounds),
    )


TRIALS = 12
"""Trials of each process in a round of two environments."""
FEWEST_QUERIES = 3
"""Minimum queries per trial, however slow."""
MAX_TRIAL_WARM_UP_S = 2.0


def compare_environments(
    old: TrialSubject,
    new: TrialSubject,
    load: LoadSpec,
    rounds: int,
    seed: int,
    listener: Listener,
) -> Ratio:
    """p50 of `new` over `old`: a round is a fresh process of each, which take turns in short trials.

    Under other load a machine has several speeds, and a process measured alone gets one of them by chance: medians of
    processes then scatter by as much (11% on two shared cores, at any priority). Trials of two simultaneous processes
    meet the same speeds, and the median of the ratios of adjacent trials is that of two trials at one speed. The
    remaining factor, a process's memory layout, differs between rounds, so that a round is one observation (Kalibera &
    Jones, ISMM 2013). After `rounds` the total is decided once. Raises StageError if one fails.
    """
    order, last = Order(seed), rounds
    before: list[float] = []
    after: list[float] = []
    with listener.step(f"{load}, {rounds} to {rounds * MAX_ROUND_FACTOR} rounds"):
        while len(before) < last:
            with announce_round(len(before) + 1, listener):
                old_ns, new_ns = _compare_once(old, new, load, order)
            before.append(old_ns)
            after.append(new_ns)
            if len(before) == rounds:
                last = decide_rounds(before, after, rounds)
    return judge_rounds(before, after, rounds)


def _compare_once(
    old: TrialSubject, new: TrialSubject, load: LoadSpec, order: Order
) -> tuple[float, float]:
    """The old process's median over its trials in ns, and its product with the median ratio of adjacent trials."""
    seconds, logs = load.min_seconds / TRIALS, []
    first = replace(
        load, min_seconds=seconds, max_seconds=seconds, max_warm_up_seconds=MAX_TRIAL_WARM_UP_S
    )
    with old.open() as old_worker, new.open() as new_worker:
        subjects = {"a": (old, old_worker), "b": (new, new_worker)}
        ns = (
            read_trial_ns(side.measure(worker, first, f"{name}-warm"))
            for name, (side, worker) in subjects.items()
        )
        seconds = max(seconds, FEWEST_QUERIES * max(ns) / 1e9)
        trial = replace(
            load,
            min_seconds=seconds,
            max_seconds=seconds,
            warm_up_seconds=0.0,
            max_warm_up_seconds=0.0,
        )
        for turn in range(TRIALS):
            times = {}
            for name in order.draw("ab"):
                side, worker = subjects[name]
                times[name] = log(read_trial_ns(side.measure(worker, trial, f"{name}{turn:03}")))
            logs.append((times["a"], times["b"]))
    before = exp(median(old_log for old_log, _ in logs))
    return before, before * exp(median(new_log - old_log for old_log, new_log in logs))


def read_trial_ns(measurement: Measurement) -> float:
    """The trial's median; its mean if it has too few queries for one, as with a slow model or a disturbed trial."""
    if (
        measurement.interrupted
    ):  # the worker ended in order; a comparison that is not complete is not judged
        raise KeyboardInterrupt
    few = measurement.latency_ns is not None and measurement.latency_ns.median is None
    return read_pair_figure(measurement, PairMetric.MEAN if few else PairMetric.P50)
