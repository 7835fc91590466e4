"""Two subjects in turn, a fresh process each time, in an order drawn for each round.

Neither memory layout nor the hour favors one, and no disturbance that comes back every few processes meets the same one
again and again, as it would in A B B A (Fisher, The Design of Experiments, 1935).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from optpipe.core.measurement import Measurement, Validity
from optpipe.errors import BadInputError, StageError
from optpipe.measuring.slo import has_figures
from optpipe.measuring.validity import WRONG_OUTPUTS
from optpipe.stats.ratio import Change, Ratio, compute_exchange_p_value, count_rounds_needed, ratio_from_rounds

PairMetric = Literal["p50", "p90", "p99", "mean", "throughput"]
PAIR_CONFIDENCE = 0.99
"""A claimed difference moves a release: one in a hundred comparisons of equals may claim one, not one in twenty."""
RESOLUTION = 0.04
"""After the rounds asked for as many more are run as a difference of this size needs to show, up to MOST_TIMES as many."""
MAX_ROUND_FACTOR = 3
FEWEST_ROUNDS = 8
"""Exchanging the two in fewer rounds has too few outcomes for any of them to be rarer than 1 in 100."""
PAIR_METRICS: tuple[PairMetric, ...] = ("p50", "p90", "p99", "mean", "throughput")


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Contender over baseline, and the figure of every process that it rests on."""

    metric: PairMetric
    ratio: Ratio
    baseline: tuple[float, ...]
    contender: tuple[float, ...]
    """Milliseconds per query, in order of the rounds; for `throughput`, per image."""
    measurements: tuple[Measurement, ...]
    first_rounds: int
    """Rounds whose scatter decided how many there would be, and gives the interval."""
    seed: int
    """Of the order within the rounds."""

    @property
    def invalid(self) -> dict[str, int]:
        """Processes whose measurement is INVALID, by the code of each reason. They count: their order was drawn too."""
        return dict(
            Counter(
                reason.code for each in self._invalid for reason in each.reasons if reason.invalidates
            ).most_common()
        )

    @property
    def invalid_processes(self) -> int:
        """How many of the processes are INVALID."""
        return len(self._invalid)

    @property
    def _invalid(self) -> list[Measurement]:
        return [each for each in self.measurements if each.verdict is Validity.INVALID]

    def to_dict(self) -> dict[str, Any]:
        """The content of `comparison.json`."""
        unit = "ms_per_image" if self.metric == "throughput" else "ms"
        return {
            "schema": "optpipe.comparison",
            "schema_version": 2,
            "metric": self.metric,
            "verdict": str(self.ratio.change),
            "ratio": self.ratio.to_dict(),
            f"baseline_{unit}": list(self.baseline),
            f"contender_{unit}": list(self.contender),
            "unit_of_replication": "fresh process",
            "first_rounds": self.first_rounds,
            "seed": self.seed,
            "invalid_processes": self.invalid_processes,
            "invalid": self.invalid,
            "measurements": [each.id for each in self.measurements],
        }


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
    if rounds < FEWEST_ROUNDS:
        raise BadInputError(f"--rounds {rounds}: a comparison of processes needs {FEWEST_ROUNDS} rounds or more")
    order = Random(f"order {seed}")
    figures: dict[str, list[float]] = {"a": [], "b": []}
    every: list[Measurement] = []
    measures = {"a": measure_baseline, "b": measure_contender}
    turn, last = 0, rounds
    while turn < last:
        for side in order.sample("ab", 2):
            found = measures[side](f"{side}{turn:03}")
            every.append(found)
            if found.interrupted:
                return None
            figures[side].append(_read_figure(found, metric))
        turn += 1
        if turn == rounds:
            needed = count_rounds_needed(ratio_from_rounds(figures["a"], figures["b"], PAIR_CONFIDENCE), RESOLUTION)
            last = max(rounds, min(needed, rounds * MAX_ROUND_FACTOR))
    ratio = _judged(figures["a"], figures["b"], rounds)
    return PairedComparison(metric, ratio, tuple(figures["a"]), tuple(figures["b"]), tuple(every), rounds, seed)


def _judged(baseline: list[float], contender: list[float], first: int) -> Ratio:
    """The ratio with Student's interval; a difference is claimed only where exchanging the two in some rounds shows it too."""
    ratio = ratio_from_rounds(baseline, contender, PAIR_CONFIDENCE, first)
    p_value = max(ratio.p_value, compute_exchange_p_value(baseline, contender))
    return replace(
        ratio, p_value=p_value, change=ratio.change if p_value <= 1 - PAIR_CONFIDENCE else Change.NO_DIFFERENCE
    )


def _read_figure(found: Measurement, metric: PairMetric) -> float:
    wrong = [reason for reason in found.reasons if reason.code in WRONG_OUTPUTS]
    if not has_figures(found) or found.latency is None or wrong:
        reason = (wrong or list(found.reasons))[0]
        raise StageError(f"{found.subject.artifact}: {reason.message}; {reason.remedy}")
    if metric == "throughput":
        return 1e3 / found.throughput_images_per_s.value if found.throughput_images_per_s else float("nan")
    if metric == "mean":
        return found.latency.mean
    percentile = found.latency.percentile(float(metric[1:]))
    if percentile is None:
        raise BadInputError(
            f"{metric} needs more samples per process: {found.latency.withheld.get(metric)}; increase --min-time"
        )
    return percentile.value
