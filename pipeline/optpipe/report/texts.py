"""Texts that several documents share, so that a figure reads the same everywhere."""

from collections.abc import Sequence

from optpipe.core.entries import WeightsRecord
from optpipe.core.precision import MixedPrecision, Placement, PrecisionCost
from optpipe.core.quantity import Estimate, format_quantity
from optpipe.core.verdict import CriterionResult
from optpipe.report.document import Cell, Sentence, Tone


def warn_of_random_weights(weights: WeightsRecord) -> Sentence | None:
    """The warning about random weights, with those that a factory draws (`WeightsRecord.drawn`)."""
    if weights.trained:
        return None
    which = f" ({weights.drawn})" if weights.drawn else ""
    return Sentence(f"weights are random{which}: these results say nothing about accuracy", Tone.DOUBTFUL)


def cell_from_estimate(figure: Estimate | None, form: str, *, scale: float = 1.0, interval: bool = False) -> Cell:
    """A figure times `scale` in the format `form`, with its interval beside it if asked for."""
    if figure is None:
        return Cell("")
    shown = figure.scale(scale)
    note = ""
    if interval and shown.low is not None and shown.high is not None:
        note = f"[{form.format(shown.low)}, {form.format(shown.high)}]"
    return Cell(form.format(shown.value), note=note, value=shown.value)


def cell_from_latency(ns: Estimate | None, *, interval: bool = False) -> Cell:
    """A duration in ms with three digits."""
    return cell_from_estimate(ns, "{:.3g}", scale=1e-6, interval=interval)


def format_observed(one: CriterionResult) -> str:
    """The observed value of a criterion with its interval, or a dash."""
    if one.unit is None or not isinstance(one.observed, float):
        return "–" if one.observed is None else str(one.observed)
    text = format_quantity(one.observed, one.unit)
    if one.ci is None or one.ci[0] == one.ci[1]:
        return text
    low, high = (format_quantity(bound, one.unit) for bound in one.ci)
    return f"{text} [{low}, {high}]"


def format_rate_interval(ci: Sequence[float] | None) -> str:
    """The interval of a rate in images per second; None where too few batches were timed for one."""
    return f"{ci[0]:,.0f} – {ci[1]:,.0f}" if ci else "too few batches"


def format_drop(drop: float, interval: tuple[float, float]) -> str:
    """A drop of a share in percentage points, with its interval."""
    low, high = interval
    return f"{100 * drop:+.2f} ({100 * low:+.2f} … {100 * high:+.2f})"


def format_cost_snr(cost: PrecisionCost) -> str:
    """`31.2 dB`; a dash where outputs differ in size."""
    return "–" if cost.snr_db is None else f"{cost.snr_db:.1f} dB"


def name_score(score: str) -> str:
    return {"top1": "top-1 accuracy"}.get(score, score)


def format_mixed(mixed: MixedPrecision) -> str:
    """A build within a budget in one line."""
    of = " SNR" if mixed.metric == "snr" else f" of {name_score(mixed.metric)}"
    count = f"{len(mixed.kept)} layer{'' if len(mixed.kept) == 1 else 's'}"
    cost = mixed.cost
    drop = "" if cost.drop is None or cost.drop_ci is None else f", drop {format_drop(cost.drop, cost.drop_ci)}"
    outputs = f"SNR {format_cost_snr(cost)}{drop}" if cost.finite else "NaN or Inf in the outputs"
    return (
        f"{count} kept, {mixed.kept_share:.1%} of MACs, for a budget of {mixed.budget}{of}: "
        f"{outputs} on {mixed.samples} samples"
    )


def format_placement(placement: Placement) -> str:
    """`1 of 61 nodes, 0.0% of MACs, does not run on CUDAExecutionProvider: top (TopK, CPUExecutionProvider, 0.0%)`."""
    named = [f"{each.name} ({each.op}, {each.provider}, {each.share:.1%})" for each in placement.elsewhere]
    more = placement.count - len(named)
    return (
        f"{placement.count} of {placement.nodes} nodes, {placement.share:.1%} of {placement.unit}, "
        f"{'does' if placement.count == 1 else 'do'} not run on {placement.provider}: "
        + ", ".join(named)
        + (f" and {more} more" if more > 0 else "")
    )
