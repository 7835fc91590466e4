"""Texts that several reporters share: every one of them writes a figure or a verdict the same way."""

from collections.abc import Sequence

from optpipe.core.estimate import Estimate
from optpipe.core.mixed_precision import MixedPrecision, PrecisionCost
from optpipe.core.quantity import format_quantity
from optpipe.core.verdict import CriterionResult

VERDICT_STYLES = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow"}


def format_random_weights(drawn: str | None) -> str:
    """The warning about random weights, with those that a factory draws (`WeightsRecord.drawn`)."""
    which = f" ({drawn})" if drawn else ""
    return f"weights are random{which}: these results say nothing about accuracy"


def scale_to_ms(figure: Estimate | None) -> Estimate | None:
    """Nanoseconds as milliseconds."""
    return None if figure is None else figure.scale(1e-6)


def format_observed(one: CriterionResult) -> str:
    """The observed value of a criterion with its interval, or a dash."""
    if one.unit is None or not isinstance(one.observed, float):
        return "–" if one.observed is None else str(one.observed)
    text = format_quantity(one.observed, one.unit)
    if one.ci is None or one.ci[0] == one.ci[1]:
        return text
    low, high = (format_quantity(bound, one.unit) for bound in one.ci)
    return f"{text} [{low}, {high}]"


def explain_beside_figures(one: CriterionResult) -> str:
    """The reason where figure and limit stand beside it: empty where it only repeats them."""
    return "" if one.observed is not None and format_observed(one) in one.reason else one.reason


def format_rate_interval(ci: Sequence[float] | None) -> str:
    """The interval of a rate in images per second; None where too few batches were timed for one."""
    return f"{ci[0]:,.0f} – {ci[1]:,.0f}" if ci else "too few batches"


def format_drop(drop: float, interval: tuple[float, float]) -> str:
    """A drop of a share in percentage points, with its interval."""
    low, high = interval
    return f"{100 * drop:+.2f} ({100 * low:+.2f} … {100 * high:+.2f})"


def format_cost(cost: PrecisionCost) -> str:
    """What a lower precision does to the outputs."""
    if not cost.finite:
        return "NaN or Inf in the outputs"
    drop = "" if cost.drop is None or cost.drop_ci is None else f", drop {format_drop(cost.drop, cost.drop_ci)}"
    return f"SNR {format_cost_snr(cost)}{drop}"


def format_cost_snr(cost: PrecisionCost) -> str:
    """`31.2 dB`; a dash where outputs differ in size."""
    return "–" if cost.snr_db is None else f"{cost.snr_db:.1f} dB"


def name_score(score: str) -> str:
    """A task's score as it is read."""
    return {"top1": "top-1 accuracy"}.get(score, score)


def format_mixed(mixed: MixedPrecision) -> str:
    """A build within a budget in one line."""
    of = " SNR" if mixed.metric == "snr" else f" of {name_score(mixed.metric)}"
    count = f"{len(mixed.kept)} layer{'' if len(mixed.kept) == 1 else 's'}"
    return (
        f"{count} kept, {mixed.kept_share:.1%} of MACs, for a budget of {mixed.budget}{of}: "
        f"{format_cost(mixed.cost)} on {mixed.samples} samples"
    )
