"""Two environments side by side: a round is a fresh process of each, and the two take turns in short laps.

Where other work runs, a machine has several speeds, and a process that is measured alone has one of them by chance: medians of
processes then scatter by as much (11 % on two shared cores, at any priority). Laps of two processes that live at the same time
meet the same speeds, and the median of the ratios of adjacent laps is that of two laps at one speed. What is left, the layout of
a process, differs from round to round, so that a round is one observation (Kalibera & Jones, ISMM 2013).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp, log
from random import Random
from statistics import median

from optpipe.core.bench_record import PairMetric, Ratio
from optpipe.core.errors import StageError
from optpipe.core.measurement import LoadSpec, Measurement, Subject
from optpipe.measure.measure import RunContext, measure_load
from optpipe.measure.pair import decide_round_count, judge_rounds, read_pair_figure
from optpipe.measure.process import WorkerPool, WorkerProcess
from optpipe.measure.worker.plan import SessionPlan

LAPS = 12
"""In each round, of each process."""
FEWEST_QUERIES = 3
"""That a lap has time for, however slow they are."""
MAX_WARM_UP_S = 2.0
KIND = "recheck"
"""Of the workers: each pool has one."""


@dataclass(frozen=True, slots=True)
class Side:
    """One environment's session."""

    session: SessionPlan
    pool: WorkerPool
    frame: RunContext
    subject: Subject

    def open(self) -> WorkerProcess:
        """A fresh process."""
        return WorkerProcess(self.session, self.pool, KIND)

    def measure(self, worker: WorkerProcess, load: LoadSpec, name: str) -> Measurement:
        """One measurement in an open process."""
        return measure_load(worker, self.subject, load, name, self.frame)[0]


def compare_sides(
    old: Side, new: Side, load: LoadSpec, rounds: int, seed: int, on_round: Callable[[], None] = lambda: None
) -> Ratio:
    """New over old, of p50. After `rounds` it is decided once how many there will be. Raises StageError where one fails."""
    order, last = Random(f"order {seed}"), rounds
    before: list[float] = []
    after: list[float] = []
    while len(before) < last:
        one, other = _measure_round(old, new, load, order)
        before.append(one)
        after.append(other)
        on_round()
        if len(before) == rounds:
            last = decide_round_count(before, after, rounds)
    return judge_rounds(before, after, rounds)


def _measure_round(old: Side, new: Side, load: LoadSpec, order: Random) -> tuple[float, float]:
    """The old process's median over its laps in ns, and that times the median ratio of adjacent laps."""
    seconds, logs = load.min_seconds / LAPS, []
    first = replace(load, min_seconds=seconds, max_seconds=seconds, max_warm_up_seconds=MAX_WARM_UP_S)
    with old.open() as one, new.open() as other:
        sides = {"a": (old, one), "b": (new, other)}
        slowest_ns = max(_read(side.measure(worker, first, f"{name}-warm")) for name, (side, worker) in sides.items())
        seconds = max(seconds, FEWEST_QUERIES * slowest_ns / 1e9)
        lap = replace(load, min_seconds=seconds, max_seconds=seconds, warm_up_seconds=0.0, max_warm_up_seconds=0.0)
        for turn in range(LAPS):
            times = {}
            for name in order.sample("ab", 2):
                side, worker = sides[name]
                times[name] = log(_read(side.measure(worker, lap, f"{name}{turn:03}")))
            logs.append((times["a"], times["b"]))
    before = exp(median(one for one, _ in logs))
    return before, before * exp(median(other - one for one, other in logs))


def _read(found: Measurement) -> float:
    """The lap's median; its mean where it has too few queries for one, as with a slow model or a lap that was disturbed."""
    if found.interrupted:
        raise StageError("interrupted before the comparison was complete; nothing is said of the latency")
    few = found.latency_ns is not None and found.latency_ns.median is None
    return read_pair_figure(found, PairMetric.MEAN if few else PairMetric.P50)
