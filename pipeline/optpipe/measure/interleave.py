"""Two subjects in turn, a fresh process each time, in an order drawn for each round.

Neither memory layout nor the hour favors one, and no disturbance that comes back every few processes meets the same one
again and again, as it would in A B B A (Fisher, The Design of Experiments, 1935).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from random import Random

from optpipe.core.bench_record import Change, PairedComparison, PairMetric, Ratio, count_invalid
from optpipe.core.errors import BadInputError, StageError
from optpipe.core.measurement import Measurement
from optpipe.measure.validity import WRONG_OUTPUTS
from optpipe.stats.ratio import compute_exchange_p_value, count_rounds_needed, ratio_from_rounds

PAIR_CONFIDENCE = 0.99
"""A claimed difference moves a release: one in a hundred comparisons of equals may claim one, not one in twenty."""
RESOLUTION = 0.04
"""After the rounds asked for as many more are run as a difference of this size needs to show, up to MAX_ROUND_FACTOR times as many."""
PAIR_LIMITS = {"max_other_cpu_share": RESOLUTION}
"""Validity limits of the processes: other work that takes as much as the difference that is looked for is flagged."""
MAX_ROUND_FACTOR = 3
FEWEST_ROUNDS = 8
"""Exchanging the two in fewer rounds has too few outcomes for any of them to be rarer than 1 in 100."""


def run_interleaved(
    measure_baseline: Callable[[str], Measurement],
    measure_contender: Callable[[str], Measurement],
    rounds: int,
    metric: PairMetric,
    seed: int,
) -> PairedComparison | None:
    """Runs the rounds, each in an order that `seed` gives; after `rounds` of them it is decided once how many there will be.

    None where one was interrupted.

    Raises StageError when a process fails: a comparison with holes would be one-sided.
    """
    require_enough_rounds(rounds)
    measures = {"a": measure_baseline, "b": measure_contender}
    every: list[Measurement] = []
    last, names = rounds, draw_names(seed)
    while len(every) < 2 * last:
        name = next(names)
        found = replace(measures[name[0]](name), id=name)
        if found.interrupted:
            return None
        read_pair_figure(found, metric)
        every.append(found)
        if len(every) == 2 * rounds:
            last = decide_rounds(every, rounds, metric)
    return comparison_from_measurements(every, rounds, metric, seed)


def require_enough_rounds(rounds: int) -> None:
    """Raises BadInputError where no outcome of so few rounds could show a difference."""
    if rounds < FEWEST_ROUNDS:
        raise BadInputError(f"--rounds {rounds}: a comparison of processes needs {FEWEST_ROUNDS} rounds or more")


def draw_names(seed: int) -> Iterator[str]:
    """The names of all processes in their order: `a` or `b` with the round, such as `b000`, `a000`, `a001`, `b001`, …"""
    order = Random(f"order {seed}")
    for turn in count():
        yield from (f"{side}{turn:03}" for side in order.sample("ab", 2))


def decide_rounds(measured: Sequence[Measurement], first: int, metric: PairMetric) -> int:
    """How many rounds there are to be, from the scatter of the `first` ones alone."""
    baseline, contender = (_list_figures(measured, side, metric)[:first] for side in "ab")
    return decide_round_count(baseline, contender, first)


def decide_round_count(baseline: Sequence[float], contender: Sequence[float], first: int) -> int:
    """Likewise, from the figures of the `first` rounds."""
    needed = count_rounds_needed(ratio_from_rounds(baseline, contender, PAIR_CONFIDENCE), RESOLUTION)
    return max(first, min(needed, first * MAX_ROUND_FACTOR))


def comparison_from_measurements(
    measured: Sequence[Measurement], first: int, metric: PairMetric, seed: int
) -> PairedComparison:
    """The comparison of measurements that are named as by `draw_names`, in their order.

    Raises StageError or BadInputError where one does not give the figure.
    """
    baseline, contender = (_list_figures(measured, side, metric) for side in "ab")
    artifacts = {one.id[0]: one.subject.artifact for one in measured}
    invalid, invalid_processes = count_invalid(tuple(measured))
    return PairedComparison(
        metric,
        judge_rounds(baseline, contender, first),
        baseline_artifact=artifacts["a"],
        contender_artifact=artifacts["b"],
        baseline_ns=tuple(baseline),
        contender_ns=tuple(contender),
        first_rounds=first,
        seed=seed,
        invalid=invalid,
        invalid_processes=invalid_processes,
        measurements=tuple(each.id for each in measured),
    )


def _list_figures(measured: Sequence[Measurement], side: str, metric: PairMetric) -> list[float]:
    return [read_pair_figure(one, metric) for one in measured if one.id.startswith(side)]


def judge_rounds(baseline: Sequence[float], contender: Sequence[float], first: int) -> Ratio:
    """The ratio with Student's interval; a difference is claimed only where exchanging the two in some rounds shows it too."""
    ratio = ratio_from_rounds(baseline, contender, PAIR_CONFIDENCE, first)
    p_value = max(ratio.p_value, compute_exchange_p_value(baseline, contender))
    return replace(
        ratio, p_value=p_value, change=ratio.change if p_value <= 1 - PAIR_CONFIDENCE else Change.NO_DIFFERENCE
    )


def read_pair_figure(found: Measurement, metric: PairMetric) -> float:
    """One process's figure; its median needs no interval of its own, for the ratio's interval is over processes."""
    wrong = [reason for reason in found.reasons if reason.code in WRONG_OUTPUTS]
    latency, throughput = found.latency_ns, found.throughput_images_per_s
    if latency is None or wrong:
        reason = (wrong or list(found.reasons))[0]
        raise StageError(f"{found.subject.artifact}: {reason.message}; {reason.remedy}")
    if metric is PairMetric.THROUGHPUT:
        return 1e9 / throughput.value if throughput else float("nan")
    if metric is PairMetric.MEAN:
        return latency.mean
    percentile = latency.percentiles.get(metric)
    if percentile is None and metric is PairMetric.P50 and latency.median is not None:
        return latency.median
    if percentile is None:
        raise BadInputError(
            f"{metric} needs more samples per process: {latency.withheld.get(metric)}; increase --min-time"
        )
    return percentile.value
