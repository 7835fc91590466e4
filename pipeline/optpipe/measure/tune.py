"""Which runtime options are fastest for this artifact and batch here.

One option at a time from the defaults: its values race, round by round in an order drawn anew, each time in a fresh process,
and what lags behind is not started again (Maron & Moore, Hoeffding Races, 1994; Birattari et al., GECCO 2002). The winner of
all races is then compared with the defaults in interleaved rounds of their own, and replaces them only where those show it to
be faster: the race picks whom noise favored. What failed or gave wrong outputs cannot win. A short trial that is INVALID for
noise counts. Options that change the arithmetic (TF32) are never touched.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log, log2
from random import Random

from optpipe.core.bench_record import Change, Ratio, TrialRecord, TuningRecord
from optpipe.core.measurement import Measurement, Options
from optpipe.measure.race import FINAL_ROUNDS, Heat, measure_round, run_heats
from optpipe.measure.slo import has_figures
from optpipe.measure.validity import WRONG_OUTPUTS
from optpipe.stats.ratio import ratio_from_rounds

MIN_TUNING_GAIN = 0.02
"""An option is changed only for at least this much more throughput."""
LAG = 0.10
"""Of options: what takes this much longer than the fastest after one round is not started again."""
FINAL_CONFIDENCE = 0.97
"""Of the winner's ratio to the defaults at one batch size; there are up to three, so that with nothing to gain the defaults
stay in at least 95 of 100 tunings."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Options that were tried, with what they gave at each batch size in each round."""

    options: Options
    measurements: tuple[Measurement, ...]


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was tried, and what is used at each batch size."""

    trials: tuple[Trial, ...]
    chosen: Mapping[int, Options] = field(default_factory=dict)
    """Options by batch size; empty where it was interrupted."""
    final: Mapping[int, Ratio] = field(default_factory=dict)
    """Times of the winner of the races over those of the defaults, by batch size; empty where the defaults won the races."""
    seed: int = 0
    """Of the order of the processes."""


def list_choices(cpus: int) -> dict[str, tuple[bool | int | str, ...]]:
    """The values worth trying, by option; a test checks the names against what the backends' sessions take.

    Of `threads`, powers of two up to all processors; its default 0 leaves the number and their places to the runtime.
    """
    threads = sorted({1 << power for power in range(cpus.bit_length()) if 1 << power <= cpus} | {cpus})
    return {
        "nhwc": (True, False),
        "fuse": (True, False),
        "cuda_graph": (True, False),
        "fuse_conv_bias": (False, True),
        "cudnn_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
        "threads": tuple(threads),
        "spinning": (True, False),
    }


def list_alternatives(
    defaults: Options, cpus: int, fixed: Container[str] = ()
) -> dict[str, tuple[bool | int | str, ...]]:
    """The values to try beside `defaults`, by option; none of an option that is `fixed`."""
    found = {
        name: tuple(value for value in values if value != defaults[name])
        for name, values in list_choices(cpus).items()
        if name in defaults and name not in fixed
    }
    return {name: values for name, values in found.items() if values}


def tune_options(
    measure: Callable[[Options], tuple[Measurement, ...]],
    defaults: Options,
    sizes: Sequence[int],
    cpus: int,
    fixed: Container[str] = (),
    seed: int = 0,
) -> Tuning:
    """Races each option's values with the best so far in the others, then compares the winner with the defaults.

    `measure` loads the artifact with some options in a fresh process and measures all batch `sizes`. What is `fixed` was
    asked for and stays.
    """
    tried = _Tried(measure, sizes, Random(f"tuning {seed}"))
    best: Options = dict(defaults)
    try:
        for name, values in list_alternatives(defaults, cpus, fixed).items():
            best = tried.race([best, *({**best, name: value} for value in values)])
        if best == dict(defaults):
            trials = tried.trials or (Trial(dict(defaults), tuple(measure(defaults))),)
            return Tuning(trials, {size: dict(defaults) for size in sizes}, seed=seed)
        final = tried.compare(dict(defaults), best)
    except _Interrupted:
        return Tuning(tried.trials, seed=seed)
    chosen = {size: best if _clearly_faster(final.get(size)) else dict(defaults) for size in sizes}
    return Tuning(tried.trials, chosen, final, seed)


class _Interrupted(Exception):
    """A trial was interrupted: what was not tried cannot lose."""


class _Tried:
    """All trials so far: what was measured, of which options."""

    def __init__(
        self, measure: Callable[[Options], tuple[Measurement, ...]], sizes: Sequence[int], order: Random
    ) -> None:
        self._measure, self._sizes, self._order = measure, sizes, order
        self._found: list[tuple[Options, list[Measurement]]] = []

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(Trial(options, tuple(found)) for options, found in self._found)

    def race(self, contenders: list[Options]) -> Options:
        """The one of `contenders` with the most throughput over all sizes; the first unless another has MIN_TUNING_GAIN more."""

        def measure_jointly(name: str, _sizes: Sequence[int]) -> dict[int, float]:
            times = self._measure_times(contenders[int(name)])
            whole = len(times) == len(self._sizes)
            return {0: exp(sum(map(log, times.values())) / len(times))} if whole else {}

        heat = Heat(0, [str(at) for at in range(len(contenders))])
        run_heats([heat], measure_jointly, self._order, LAG)
        means = {name: heat.times[name].mean for name in heat.running}
        leader = min(means, key=lambda name: means[name], default="0")
        ahead = "0" in means and means["0"] <= means[leader] * (1 + MIN_TUNING_GAIN)
        return contenders[0 if ahead else int(leader)]

    def compare(self, defaults: Options, best: Options) -> dict[int, Ratio]:
        """The ratio of the two's times at every size, over FINAL_ROUNDS; none where a trial failed or gave wrong outputs."""
        sides = {"defaults": defaults, "best": best}
        heats = [Heat(size, list(sides)) for size in self._sizes]
        for _ in range(FINAL_ROUNDS):
            measure_round(heats, lambda name, _sizes: self._measure_times(sides[name]), self._order, final=True)
        return {
            heat.size: ratio_from_rounds(heat.times["defaults"].final, heat.times["best"].final, FINAL_CONFIDENCE)
            for heat in heats
            if len(heat.running) == len(sides)
        }

    def _measure_times(self, options: Options) -> dict[int, float]:
        """Seconds per image by batch size of one more trial; without those that have no figures or are not `is_usable`."""
        measured = self._measure(options)
        known = next((found for seen, found in self._found if seen == options), None)
        if known is None:
            self._found.append((dict(options), known := []))
        known += measured
        if any(each.interrupted for each in measured):
            raise _Interrupted
        return {
            each.load.batch_size: 1 / each.throughput_images_per_s.value
            for each in measured
            if has_figures(each) and each.throughput_images_per_s and is_usable(each)
        }


def _clearly_faster(ratio: Ratio | None) -> bool:
    return ratio is not None and ratio.change is Change.FASTER and ratio.value <= 1 / (1 + MIN_TUNING_GAIN)


def is_usable(measurement: Measurement) -> bool:
    """Valid, or invalid only for noise: options are compared on a short look, and the winner is measured in full."""
    noise = {
        "dispersion",
        "too-few-samples",
        "loaded-host",
        "drift",
        "not-steady",
        "bimodal",
        "clocks-moved",
        "throttled",
    }
    return measurement.is_valid or all(reason.code in noise for reason in measurement.reasons if reason.invalidates)


def choose_tuning_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes at which options are tried: both ends and the middle; the others take the nearest one's choice."""
    return tuple(dict.fromkeys((sizes[0], sizes[len(sizes) // 2], sizes[-1])))


def record_from_tuning(artifact: str, label: str, tuning: Tuning) -> TuningRecord:
    """What was tried and chosen, for `tuning.json`."""
    trials = tuple(_record_from_trial(trial) for trial in tuning.trials)
    return TuningRecord(artifact, label, tuning.seed, tuning.chosen, tuning.final, trials)


def _record_from_trial(trial: Trial) -> TrialRecord:
    """Figures, verdicts and reasons by batch size, in the order of the rounds."""
    by_size: dict[int, list[Measurement]] = {}
    for each in trial.measurements:
        by_size.setdefault(each.load.batch_size, []).append(each)
    rates = {size: [each.throughput_images_per_s for each in found] for size, found in by_size.items()}
    codes = {size: {reason.code for each in found for reason in each.reasons} for size, found in by_size.items()}
    return TrialRecord(
        trial.options,
        {size: tuple(rate.value if rate else None for rate in found) for size, found in rates.items()},
        {size: tuple(each.verdict for each in found) for size, found in by_size.items()},
        {size: tuple(sorted(found)) for size, found in codes.items()},
        tuple(size for size, found in codes.items() if found & WRONG_OUTPUTS),
    )


def find_nearest_options(options: Mapping[int, Options], size: int) -> Options:
    """What was chosen at the tuned size closest to `size`, on a scale of powers of two."""
    return options[min(options, key=lambda known: abs(log2(known / size)))]
