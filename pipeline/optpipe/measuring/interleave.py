"""A B B A …: two subjects in turn, a fresh process each time, so that neither memory layout nor the hour favours one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from optpipe.core.measurement import Measurement
from optpipe.errors import BadInputError, StageError
from optpipe.measuring.slo import has_figures
from optpipe.measuring.validity import WRONG_OUTPUTS
from optpipe.stats.ratio import SMALLEST_ROUNDS, Ratio, ratio_from_rounds

PairMetric = Literal["p50", "p90", "p99", "mean", "throughput"]
PAIR_CONFIDENCE = 0.99
"""A claimed difference moves a release: one in a hundred comparisons of equals may claim one, not one in twenty."""
RESOLUTION = 0.04
"""Rounds go on until a difference of this size would show, or MOST_TIMES as many were run."""
MAX_ROUND_FACTOR = 3
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

    def to_dict(self) -> dict[str, Any]:
        """The content of `comparison.json`."""
        unit = "ms_per_image" if self.metric == "throughput" else "ms"
        return {
            "schema": "optpipe.comparison",
            "schema_version": 1,
            "metric": self.metric,
            "verdict": str(self.ratio.change),
            "ratio": self.ratio.to_dict(),
            f"baseline_{unit}": list(self.baseline),
            f"contender_{unit}": list(self.contender),
            "unit_of_replication": "fresh process",
            "measurements": [each.id for each in self.measurements],
        }


def run_interleaved(
    measure_baseline: Callable[[str], Measurement],
    measure_contender: Callable[[str], Measurement],
    rounds: int,
    metric: PairMetric,
) -> PairedComparison | None:
    """Runs the rounds; every other one begins with the contender; a noisy machine gets up to MOST_TIMES as many.

    None where one was interrupted.

    Raises StageError when a process fails: a comparison with holes would be one-sided.
    """
    if rounds < SMALLEST_ROUNDS:
        raise BadInputError(
            f"--rounds {rounds}: a confidence interval across processes needs at least {SMALLEST_ROUNDS} rounds"
        )
    figures: dict[str, list[float]] = {"a": [], "b": []}
    every: list[Measurement] = []
    measures = {"a": measure_baseline, "b": measure_contender}
    ratio: Ratio | None = None
    # the width of the interval ends it and never its place, so going on does not favour either answer
    for turn in range(rounds * MAX_ROUND_FACTOR):
        for side in "ab" if turn % 2 == 0 else "ba":
            found = measures[side](f"{side}{turn:03}")
            every.append(found)
            if found.interrupted:
                return None
            figures[side].append(_read_figure(found, metric))
        if turn + 1 >= rounds:
            ratio = ratio_from_rounds(figures["a"], figures["b"], PAIR_CONFIDENCE)
            if ratio.smallest_visible <= RESOLUTION:
                break
    if ratio is None:
        raise StageError("no rounds were run")
    return PairedComparison(metric, ratio, tuple(figures["a"]), tuple(figures["b"]), tuple(every))


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
