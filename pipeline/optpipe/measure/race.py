"""Races builds or their options in fresh processes to find the fastest at each batch size.

A race comes first: contenders that are clearly slower after a round are not started again (Maron & Moore, Hoeffding Races,
1994). A race favors contenders that noise favored, so that the fastest few are then compared in separate rounds. Those
that these rounds do not distinguish from the fastest count as equally fast, and of these the first in the given order
is chosen.

Dropping is a choice, not a finding: of six equally fast builds two never reach the final rounds. A dropped build is
called slower only if its few rounds show that against the scatter of the final ones, by Tukey's intervals for all pairs
of builds, since the race has picked the pair. In simulated races of ten equally fast builds one is then called slower
wrongly in 3% of races where processes scatter by 1 to 11%, in up to 7% where one process in seven is slower by 10 or
30%. At 5% scatter the fastest build is lost in 0.5% of races, at 11% in 13%, which costs 1% of time on average at most.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log

from optpipe.core.measurement import Measurement, Options, Validity
from optpipe.measure.groups import OWN_SAMPLES
from optpipe.measure.validity import WRONG_OUTPUTS
from optpipe.stats.means import Scatter, compute_pairwise_confidence
from optpipe.stats.ratio import Change, Order, Ratio, ratio_from_few_rounds, ratio_from_rounds, scatter_from_rounds

RACE_ROUNDS = 3
BUILD_LAG = 0.15
"""A build that takes this much longer than the fastest after one round is dropped."""
FINAL_ROUNDS = 8
MAX_FINALISTS = 4
CONFIDENCE = 0.95
"""Joint confidence of all comparisons with the winner at one batch size (Bonferroni), and of those with dropped builds (Tukey)."""
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
        return exp(sum(map(log, self.race)) / len(self.race))


def count_processes(builds: int, final_rounds: int = FINAL_ROUNDS) -> int:
    return builds if builds < 2 else RACE_ROUNDS * builds + final_rounds * min(builds, MAX_FINALISTS)


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
    run_races(races, measure, order, BUILD_LAG)
    for race in races:
        race.choose_finalists()
    finals = [race for race in races if len(race.running) > 1]
    for name in dict.fromkeys(name for race in finals for name in race.running):
        expect(name, final_rounds)
    for _ in range(final_rounds):
        measure_round([race for race in finals if len(race.running) > 1], measure, order, final=True)
    for race in races:
        race.judge()
    return {race.size: race for race in races}


def run_races(races: Sequence["Race"], measure: Measure, order: Order, lag: float) -> None:
    """Runs RACE_ROUNDS rounds. Contenders slower than the fastest by `lag` after one round, half of it after two, … are dropped."""
    for turn in range(RACE_ROUNDS):
        measure_round([race for race in races if turn == 0 or len(race.running) > 1], measure, order, final=False)
        for race in races:
            race.drop_slow(lag / (turn + 1))


class Race:
    """The race at one batch size, and its result once it is judged."""

    def __init__(self, size: int, names: Sequence[str]) -> None:
        self.size, self.times, self.running = size, {name: RacedTimes() for name in names}, list(names)
        self.winner: str | None = None
        self.ratios: dict[str, Ratio] = {}
        """Times of the other finalists over the winner's."""
        self.dropped: dict[str, Ratio] = {}
        """Times of the others over the winner's, from common rounds of the race; empty without final rounds."""
        self.scatter: Scatter | None = None

    def add(self, name: str, found: Times, *, final: bool) -> None:
        own = self.times[name]
        if self.size in found:
            (own.final if final else own.race).append(found[self.size])
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

    def judge(self) -> None:
        """The winner is the first in order of the finalists that are not distinguished from the fastest."""
        finalists = [name for name in self.times if name in self.running]
        if len(finalists) < 2:
            self.winner = next(iter(finalists), None)
            return
        leader = min(finalists, key=lambda name: sum(map(log, self.times[name].final)))
        self.winner = winner = next(
            name
            for name in finalists
            if name == leader or self._compare(name, leader, len(finalists)).change is not Change.SLOWER
        )
        self.ratios = {name: self._compare(name, winner, len(finalists)) for name in finalists if name != winner}
        self.scatter = scatter = scatter_from_rounds([self.times[name].final for name in finalists])
        if left := {name: own.race for name, own in self.times.items() if own.race and name not in finalists}:
            confidence = compute_pairwise_confidence(len(self.times), scatter.freedom, CONFIDENCE)
            best = self.times[winner].race
            self.dropped = {
                name: ratio_from_few_rounds(best[: len(own)], own[: len(best)], scatter, confidence)
                for name, own in left.items()
            }

    def compute_slowdown(self, name: str) -> float | None:
        """Geometric mean of the time over the winner's, from all common rounds; None if one has no figure."""
        if self.winner is None:
            return None
        own, best = self.times[name], self.times[self.winner]
        pairs = [*zip(own.race, best.race, strict=False), *zip(own.final, best.final, strict=False)]
        return exp(sum(log(mine) - log(other) for mine, other in pairs) / len(pairs)) if pairs else None

    def _compare(self, name: str, other: str, finalists: int) -> Ratio:
        confidence = 1 - (1 - CONFIDENCE) / (finalists - 1)
        return ratio_from_rounds(self.times[other].final, self.times[name].final, confidence)


def measure_round(races: Sequence[Race], measure: Measure, order: Order, *, final: bool) -> None:
    """Runs one process for each build that is still in at some size, in a drawn order."""
    names = list(dict.fromkeys(name for race in races for name in race.running))
    for name in order.draw(names):
        inside = [race for race in races if name in race.running]
        found = measure(name, [race.size for race in inside])
        for race in inside:
            race.add(name, found, final=final)


MIN_TUNING_GAIN = 0.02
"""Minimum throughput gain for changing an option."""
OPTION_LAG = 0.10
"""A value that takes this much longer than the fastest after one round is not started again."""
FINAL_CONFIDENCE = 0.97
"""Confidence of the winner's ratio to the defaults at one batch size. There are up to three sizes, so that without a
gain the defaults stay in at least 95 of 100 tunings."""


def list_choices(cpus: int) -> dict[str, tuple[bool | int | str, ...]]:
    """Values to try, by option. `threads` has powers of two up to all processors; its default 0 leaves the number to the runtime."""
    threads = sorted({1 << power for power in range(cpus.bit_length()) if 1 << power <= cpus} | {cpus})
    return {
        "nhwc": (True, False),
        "cuda_graph": (True, False),
        "fuse_conv_bias": (False, True),
        "cudnn_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
        "threads": tuple(threads),
        "spinning": (True, False),
    }


def list_alternatives(
    defaults: Options, cpus: int, fixed: Container[str] = ()
) -> dict[str, tuple[bool | int | str, ...]]:
    """Values to try besides `defaults`, by option; none for an option that is `fixed`."""
    found = {
        name: tuple(value for value in values if value != defaults[name])
        for name, values in list_choices(cpus).items()
        if name in defaults and name not in fixed
    }
    return {name: values for name, values in found.items() if values}


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """Options that were tried, with each round's results by batch size."""

    options: Options
    throughput_images_per_s: Mapping[int, tuple[float | None, ...]]
    verdicts: Mapping[int, tuple[Validity, ...]]
    reasons: Mapping[int, tuple[str, ...]]
    wrong_outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TuningRecord:
    artifact: str
    label: str
    seed: int
    """Seed of the order of processes."""
    chosen: Mapping[int, Options] = field(default_factory=dict)
    """Options by batch size; empty if it was interrupted."""
    final: Mapping[int, Ratio] = field(default_factory=dict)
    """Times of the races' winner over the defaults', by batch size; empty if the defaults won the races."""
    trials: tuple[TrialRecord, ...] = ()


def tune_options(
    measure: Callable[[Options], tuple[Measurement, ...]],
    blank: TuningRecord,
    defaults: Options,
    sizes: Sequence[int],
    cpus: int,
    fixed: Container[str] = (),
) -> TuningRecord:
    """Finds the fastest runtime options of an artifact: each option's values race with the best so far in the others
    (Birattari et al., GECCO 2002), and the winner is compared with the defaults in separate rounds.

    It replaces the defaults only if those rounds show it to be faster, since a race favors what noise favored. Options
    that failed or gave wrong outputs cannot win; a short trial that is INVALID for noise counts. Options that change
    the arithmetic (TF32) are never touched. `measure` loads the artifact with some options in a fresh process and
    measures all batch `sizes`. `fixed` options keep their values. The result is `blank`, which has the seed of the
    order, with the trials and the choice.
    """
    tried = _Tried(measure, sizes, Order(blank.seed))
    best: Options = dict(defaults)
    try:
        for name, values in list_alternatives(defaults, cpus, fixed).items():
            best = tried.race([best, *({**best, name: value} for value in values)])
        if best == dict(defaults):
            if not tried.trials:
                tried.measure(defaults)
            return replace(blank, trials=tried.trials, chosen={size: dict(defaults) for size in sizes})
        final = tried.compare(dict(defaults), best)
    except _Interrupted:
        return replace(blank, trials=tried.trials)
    faster = {
        size
        for size, ratio in final.items()
        if ratio.change is Change.FASTER and ratio.value <= 1 / (1 + MIN_TUNING_GAIN)
    }
    chosen = {size: best if size in faster else dict(defaults) for size in sizes}
    return replace(blank, trials=tried.trials, chosen=chosen, final=final)


NOISE = OWN_SAMPLES | {"too-few-samples", "loaded-host", "clocks-moved", "throttled"}
"""Codes that do not exclude a trial: short trials compare options, and the winner is measured in full."""


class _Interrupted(Exception):
    """A trial was interrupted: untried options cannot lose."""


class _Tried:
    def __init__(
        self, measure: Callable[[Options], tuple[Measurement, ...]], sizes: Sequence[int], order: Order
    ) -> None:
        self._measure, self._sizes, self._order = measure, sizes, order
        self._found: list[tuple[Options, list[Measurement]]] = []

    @property
    def trials(self) -> tuple[TrialRecord, ...]:
        return tuple(trial_from_measurements(options, found) for options, found in self._found)

    def measure(self, options: Options) -> tuple[Measurement, ...]:
        measured = self._measure(options)
        known = next((found for seen, found in self._found if seen == options), None)
        if known is None:
            self._found.append((dict(options), known := []))
        known += measured
        if any(each.interrupted for each in measured):
            raise _Interrupted
        return measured

    def race(self, contenders: list[Options]) -> Options:
        """The contender with the most throughput over all sizes; the first unless another has MIN_TUNING_GAIN more."""

        def measure_jointly(name: str, _sizes: Sequence[int]) -> dict[int, float]:
            times = self._measure_times(contenders[int(name)])
            whole = len(times) == len(self._sizes)
            return {0: exp(sum(map(log, times.values())) / len(times))} if whole else {}

        race = Race(0, [str(at) for at in range(len(contenders))])
        run_races([race], measure_jointly, self._order, OPTION_LAG)
        means = {name: race.times[name].mean for name in race.running}
        leader = min(means, key=lambda name: means[name], default="0")
        ahead = "0" in means and means["0"] <= means[leader] * (1 + MIN_TUNING_GAIN)
        return contenders[0 if ahead else int(leader)]

    def compare(self, defaults: Options, best: Options) -> dict[int, Ratio]:
        """Ratio of times, best over defaults, by size over FINAL_ROUNDS; without sizes at which a trial failed or gave wrong outputs."""
        sides = {"defaults": defaults, "best": best}
        races = [Race(size, list(sides)) for size in self._sizes]
        for _ in range(FINAL_ROUNDS):
            measure_round(races, lambda name, _sizes: self._measure_times(sides[name]), self._order, final=True)
        return {
            race.size: ratio_from_rounds(race.times["defaults"].final, race.times["best"].final, FINAL_CONFIDENCE)
            for race in races
            if len(race.running) == len(sides)
        }

    def _measure_times(self, options: Options) -> dict[int, float]:
        """Seconds per image by batch size of one more trial, without unusable ones."""
        return {
            each.load.batch_size: 1 / each.throughput_images_per_s.value
            for each in self.measure(options)
            if each.throughput_images_per_s and (each.is_valid or NOISE.issuperset(each.invalid_codes))
        }


def trial_from_measurements(options: Options, measurements: Sequence[Measurement]) -> TrialRecord:
    """Figures, verdicts and reasons by batch size, in the order of the rounds."""
    by_size: dict[int, list[Measurement]] = {}
    for each in measurements:
        by_size.setdefault(each.load.batch_size, []).append(each)
    rates = {size: [each.throughput_images_per_s for each in found] for size, found in by_size.items()}
    codes = {size: {reason.code for each in found for reason in each.reasons} for size, found in by_size.items()}
    return TrialRecord(
        options,
        {size: tuple(rate.value if rate else None for rate in found) for size, found in rates.items()},
        {size: tuple(each.verdict for each in found) for size, found in by_size.items()},
        {size: tuple(sorted(found)) for size, found in codes.items()},
        tuple(size for size, found in codes.items() if found & WRONG_OUTPUTS),
    )
