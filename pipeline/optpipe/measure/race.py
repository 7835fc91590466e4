"""Races builds in fresh processes to find the fastest at each batch size.

A race comes first: while more than two are left, builds that are clearly slower after a round are not started again (Maron &
Moore, Hoeffding Races, 1994). A race favors builds that noise favored, so that the fastest few, or both of two, are then
compared in separate rounds. Those that these rounds do not distinguish from the fastest count as equally fast, and of these
the first in the given order is chosen. The rounds end early, after EARLY_ROUNDS, if all others are shown to be slower; each
of these two looks has half of the error.

Dropping is a choice, not a finding: of six equally fast builds two never reach the final rounds, and nothing is claimed of
them. In simulated races the fastest build is lost in 0.5% of races where processes scatter by 5%, in 13% where they scatter
by 11%, which costs 1% of time on average at most.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log

from optpipe.stats.ratio import Change, Order, Ratio, ratio_from_rounds

RACE_ROUNDS = 3
BUILD_LAG = 0.15
"""A build that takes this much longer than the fastest after one round is dropped; half of it after two, a third after three."""
FINAL_ROUNDS, EARLY_ROUNDS = 8, 4
MAX_FINALISTS = 4
CONFIDENCE, LOOKS = 0.95, 2
"""Joint confidence of all comparisons with the winner at one batch size, and how often they are made (Bonferroni)."""
Times = Mapping[int, float]
"""ns by batch size; a size without a figure is missing."""
Measure = Callable[[str, Sequence[int]], Times]


@dataclass
class RacedTimes:
    race: list[float] = field(default_factory=list)
    final: list[float] = field(default_factory=list)
    failed: bool = False
    """Whether a process gave no figure; such a build cannot win."""

    @property
    def mean(self) -> float:
        """Geometric mean over the race; 1 without one."""
        return exp(sum(map(log, self.race)) / max(len(self.race), 1))


def count_processes(builds: int, final_rounds: int = FINAL_ROUNDS) -> int:
    """The most that a race starts."""
    rounds = RACE_ROUNDS if builds > 2 else 0  # both of two are compared in full
    return builds if builds < 2 else rounds * builds + final_rounds * min(builds, MAX_FINALISTS)


def race_builds(
    names: Sequence[str],
    sizes: Sequence[int],
    measure: Measure,
    seed: int,
    final_rounds: int = FINAL_ROUNDS,
    expect: Callable[[str, int], None] = lambda _name, _processes: None,
) -> dict[int, "Race"]:
    """The fastest of `names` at each of `sizes`; of equally fast ones the first of `names`.

    `measure` starts a fresh process for one build and gives its times at some sizes; `expect` receives the number of
    coming processes. A single build is measured once.
    """
    order = Order(seed)
    races = [Race(size, names) for size in sizes]
    for turn in range(RACE_ROUNDS if len(names) > 1 else 1):
        undecided = [race for race in races if len(race.running) > 2 or len(names) == 1]
        measure_round(undecided, measure, order, final=False)
        for race in undecided:
            race.drop_slow(BUILD_LAG / (turn + 1))
    for race in races:
        race.choose_finalists()
    finals = [race for race in races if len(race.running) > 1]
    for name in dict.fromkeys(name for race in finals for name in race.running):
        expect(name, final_rounds)
    for turn in range(final_rounds):
        if turn == EARLY_ROUNDS:
            finals = [race for race in finals if not race.is_decided()]
        measure_round(
            [race for race in finals if len(race.running) > 1], measure, order, final=True
        )
    for race in races:
        race.judge()
    return {race.size: race for race in races}


class Race:
    """The race at one batch size, and its result once it is judged."""

    def __init__(self, size: int, names: Sequence[str]) -> None:
        self.size, self.times, self.running = (
            size,
            {name: RacedTimes() for name in names},
            list(names),
        )
        self.winner: str | None = None
        self.ratios: dict[str, Ratio] = {}
        """Times of the other finalists over the winner's."""

    def add(self, name: str, times: Times, *, final: bool) -> None:
        own = self.times[name]
        if self.size in times:
            (own.final if final else own.race).append(times[self.size])
        else:
            own.failed = True
            self.running.remove(name)

    def drop_slow(self, lag: float) -> None:
        limit = min((self.times[name].mean for name in self.running), default=0.0) * (1 + lag)
        self.running = [name for name in self.running if self.times[name].mean <= limit]

    def choose_finalists(self) -> None:
        """The fastest still running, at most MAX_FINALISTS; if only one is left, the best dropped one joins it."""
        whole = [name for name, own in self.times.items() if not own.failed]
        ranked = sorted(whole, key=lambda name: (name not in self.running, self.times[name].mean))
        self.running = ranked[: min(max(len(self.running), 2), MAX_FINALISTS)]

    def is_decided(self) -> bool:
        """Whether all finalists but the fastest are shown to be slower."""
        self.judge()
        return all(ratio.change is Change.SLOWER for ratio in self.ratios.values())

    def judge(self) -> None:
        """The winner is the first in order of the finalists that are not distinguished from the fastest."""
        finalists = [name for name in self.times if name in self.running]
        if len(finalists) < 2:
            self.winner, self.ratios = next(iter(finalists), None), {}
            return
        leader = min(finalists, key=lambda name: sum(map(log, self.times[name].final)))
        self.winner = winner = next(
            name
            for name in finalists
            if name == leader or self._is_as_fast(name, leader, len(finalists))
        )
        self.ratios = {
            name: self._compare(name, winner, len(finalists))
            for name in finalists
            if name != winner
        }

    def compute_slowdown(self, name: str) -> float | None:
        """Geometric mean of the time over the winner's, from all common rounds; None if one has no figure."""
        if self.winner is None:
            return None
        own, best = self.times[name], self.times[self.winner]
        pairs = [*zip(own.race, best.race, strict=False), *zip(own.final, best.final, strict=False)]
        return (
            exp(sum(log(mine) - log(other) for mine, other in pairs) / len(pairs))
            if pairs
            else None
        )

    def _is_as_fast(self, name: str, leader: str, finalists: int) -> bool:
        """Whether the rounds do not distinguish it; rounds that do not show their scatter leave the choice to the times."""
        ratio = self._compare(name, leader, finalists)
        return ratio.change is not Change.SLOWER if ratio.is_known else ratio.value <= 1

    def _compare(self, name: str, other: str, finalists: int) -> Ratio:
        confidence = 1 - (1 - CONFIDENCE) / (finalists - 1) / LOOKS
        return ratio_from_rounds(self.times[other].final, self.times[name].final, confidence)


def measure_round(races: Sequence[Race], measure: Measure, order: Order, *, final: bool) -> None:
    """Runs one process for each build that is still in at some size, in a drawn order."""
    names = list(dict.fromkeys(name for race in races for name in race.running))
    for name in order.draw(names):
        inside = [race for race in races if name in race.running]
        times = measure(name, [race.size for race in inside])
        for race in inside:
            race.add(name, times, final=final)
