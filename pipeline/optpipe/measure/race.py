"""Races of builds or of their options, measured in turn, each time in a fresh process; which build is fastest at each batch size.

A race first: after each round what lags behind is not started again (Maron & Moore, Hoeffding Races, 1994). The race picks
whom noise favored, so the fastest few are then compared in rounds of their own. What these do not tell from the fastest counts
as equally fast, and of equally fast builds the first in the order given is chosen.

Dropping is a choice, not a finding: of six equally fast builds two never come to the final rounds. What was dropped is called
slower only where its few rounds show that against the scatter of the final ones, by Tukey's intervals for all pairs of builds,
since the race has picked the pair. In simulated races of ten equally fast builds one is then called slower wrongly in 3 % of
races where processes scatter by 1 to 11 %, in up to 7 % where one process in seven is slower by 10 or 30 %. At 5 % scatter the
fastest build is lost in 0.5 % of races, at 11 % in 13 %, which costs 1 % of time on average at most.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from random import Random

from optpipe.core.bench_record import Change, Ratio
from optpipe.stats.multiple import compute_pairwise_confidence
from optpipe.stats.ratio import Scatter, ratio_from_few_rounds, ratio_from_rounds, scatter_from_rounds

RACE_ROUNDS = 3
LAG = 0.15
"""Of builds: what takes this much longer than the fastest after one round is dropped."""
FINAL_ROUNDS = 8
MAX_FINALISTS = 4
CONFIDENCE = 0.95
"""Of all comparisons with the winner at one batch size together (Bonferroni); likewise of those that were dropped (Tukey)."""
Times = Mapping[int, float]
"""ns by batch size; a size without a figure is missing."""
Measure = Callable[[str, Sequence[int]], Times]


@dataclass
class RacedTimes:
    """What one build took at one batch size, in the order of the rounds."""

    race: list[float] = field(default_factory=list)
    final: list[float] = field(default_factory=list)
    failed: bool = False
    """A process gave no figure: it cannot win."""

    @property
    def mean(self) -> float:
        """The geometric mean of the race."""
        return exp(sum(map(log, self.race)) / len(self.race))


@dataclass(frozen=True, slots=True)
class RaceResult:
    """The winner at one batch size, and what all others took against it."""

    winner: str | None
    """None where nothing has a figure."""
    times: Mapping[str, RacedTimes]
    ratios: Mapping[str, Ratio]
    """Of those in the final rounds but the winner, times over the winner's."""
    dropped: Mapping[str, Ratio] = field(default_factory=dict)
    """Of the others, from the rounds of the race that both were in; empty where there were no final rounds."""
    scatter: Scatter | None = None
    """Of processes in the final rounds."""

    def compute_slowdown(self, name: str) -> float | None:
        """Time over the winner's from all rounds that both were in, the geometric mean; None where one has no figure."""
        if self.winner is None:
            return None
        own, best = self.times[name], self.times[self.winner]
        pairs = [*zip(own.race, best.race, strict=False), *zip(own.final, best.final, strict=False)]
        return exp(sum(log(mine) - log(other) for mine, other in pairs) / len(pairs)) if pairs else None


def count_processes(builds: int, final_rounds: int = FINAL_ROUNDS) -> int:
    """The most processes that a race of that many builds starts."""
    return builds if builds < 2 else RACE_ROUNDS * builds + final_rounds * min(builds, MAX_FINALISTS)


def race_builds(
    names: Sequence[str],
    sizes: Sequence[int],
    measure: Measure,
    seed: int,
    final_rounds: int = FINAL_ROUNDS,
    expect: Callable[[str, int], None] = lambda _name, _processes: None,
) -> dict[int, RaceResult]:
    """The fastest of `names` at each of `sizes`; of equally fast ones the first of `names`.

    `measure` starts a fresh process for one build and gives its times at some sizes; `expect` hears how many are coming. A
    single build is measured once.
    """
    order = Random(f"race {seed}")
    heats = [Heat(size, names) for size in sizes]
    run_heats(heats, measure, order, LAG)
    for heat in heats:
        heat.choose_finalists()
    finals = [heat for heat in heats if len(heat.running) > 1]
    for name in dict.fromkeys(name for heat in finals for name in heat.running):
        expect(name, final_rounds)
    for _ in range(final_rounds):
        measure_round([heat for heat in finals if len(heat.running) > 1], measure, order, final=True)
    return {heat.size: heat.judge() for heat in heats}


def run_heats(heats: Sequence["Heat"], measure: Measure, order: Random, lag: float) -> None:
    """RACE_ROUNDS rounds; what takes `lag` longer than the fastest after one, half of it after two, … is dropped."""
    for turn in range(RACE_ROUNDS):
        measure_round([heat for heat in heats if turn == 0 or len(heat.running) > 1], measure, order, final=False)
        for heat in heats:
            heat.drop_slow(lag / (turn + 1))


class Heat:
    """The race at one batch size: who is still in it, and what was measured."""

    def __init__(self, size: int, names: Sequence[str]) -> None:
        self.size, self.times, self.running = size, {name: RacedTimes() for name in names}, list(names)

    def add(self, name: str, found: Times, *, final: bool) -> None:
        """Keeps a process's time; a build without one is out."""
        own = self.times[name]
        if self.size in found:
            (own.final if final else own.race).append(found[self.size])
        else:
            own.failed = True
            self.running.remove(name)

    def drop_slow(self, lag: float) -> None:
        """Leaves those within `lag` of the fastest."""
        limit = min((self.times[name].mean for name in self.running), default=0.0) * (1 + lag)
        self.running = [name for name in self.running if self.times[name].mean <= limit]

    def choose_finalists(self) -> None:
        """The fastest still running, MAX_FINALISTS at most; with them the best that was dropped where only one is left."""
        whole = [name for name, own in self.times.items() if not own.failed]
        ranked = sorted(whole, key=lambda name: (name not in self.running, self.times[name].mean))
        self.running = ranked[: min(max(len(self.running), 2), MAX_FINALISTS)]

    def judge(self) -> RaceResult:
        """The fastest of the finalists, or the first in order of those that are not told from it."""
        finalists = [name for name in self.times if name in self.running]
        if len(finalists) < 2:
            return RaceResult(next(iter(finalists), None), self.times, {})
        leader = min(finalists, key=lambda name: sum(map(log, self.times[name].final)))
        winner = next(name for name in finalists if not self._is_slower(name, leader, len(finalists)))
        ratios = {name: self._compare(name, winner, len(finalists)) for name in finalists if name != winner}
        scatter = scatter_from_rounds([self.times[name].final for name in finalists])
        return RaceResult(winner, self.times, ratios, self._compare_dropped(winner, finalists, scatter), scatter)

    def _is_slower(self, name: str, leader: str, finalists: int) -> bool:
        return name != leader and self._compare(name, leader, finalists).change is Change.SLOWER

    def _compare_dropped(self, winner: str, finalists: Sequence[str], scatter: Scatter) -> dict[str, Ratio]:
        left = {name: own.race for name, own in self.times.items() if own.race and name not in finalists}
        if not left:
            return {}
        confidence, best = compute_pairwise_confidence(len(self.times), scatter.freedom, CONFIDENCE), self.times[winner]
        return {
            name: ratio_from_few_rounds(best.race[: len(own)], own[: len(best.race)], scatter, confidence)
            for name, own in left.items()
        }

    def _compare(self, name: str, other: str, finalists: int) -> Ratio:
        confidence = 1 - (1 - CONFIDENCE) / (finalists - 1)
        return ratio_from_rounds(self.times[other].final, self.times[name].final, confidence)


def measure_round(heats: Sequence[Heat], measure: Measure, order: Random, *, final: bool) -> None:
    """One process for each build that is still in at some size, in an order drawn anew."""
    names = list(dict.fromkeys(name for heat in heats for name in heat.running))
    for name in order.sample(names, len(names)):
        inside = [heat for heat in heats if name in heat.running]
        found = measure(name, [heat.size for heat in inside])
        for heat in inside:
            heat.add(name, found, final=final)
