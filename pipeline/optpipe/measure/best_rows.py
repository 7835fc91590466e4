"""Which rows of a comparison no other row beats, and which is the best for each goal.

A row is better only where a difference was shown; what is equal or undecided beats nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from optpipe.core.comparison import Comparison, ComparisonRow, Goal
from optpipe.core.metrics.contract import Metric
from optpipe.core.metrics.measured import ENERGY, P50, P99, THROUGHPUT
from optpipe.core.metrics.sections import ACCURACY
from optpipe.core.percentile_names import format_percentile_name
from optpipe.core.quantity import Dimension, choose_dimension, format_quantity
from optpipe.core.records import group_pairs
from optpipe.core.wording import Argument
from optpipe.measure.search import Slo

METRICS: Mapping[Goal, tuple[Metric, ...]] = {
    Goal.LATENCY: (P99, P50),
    Goal.THROUGHPUT: (THROUGHPUT,),
    Goal.EFFICIENCY: (ENERGY,),
}
"""The metrics that show who is nearer to a goal, the first that both rows have."""

OBJECTIVES = {goal: str(goal) for goal in Goal} | {Goal.EFFICIENCY: ENERGY.name}
"""The words for what a row is better in."""


Claims = frozenset[tuple[str, str, str]]
"""(better row's id, worse row's id, objective) of every difference that is shown."""


def mark_frontier(rows: list[ComparisonRow], shown: Claims) -> list[ComparisonRow]:
    """Marks valid rows that no row of the same model and kind of load is shown to dominate."""
    judged = []
    for row in rows:
        rivals = [
            other
            for other in rows
            if other.valid and get_kind_of_load(other) == get_kind_of_load(row) and other is not row
        ]
        why = None
        for rival in rivals if row.valid else ():
            better = [name for name in _list_objectives(row) if (rival.id, row.id, name) in shown]
            if better and not _is_worse_anywhere(rival, row):
                why = f"{rival.id}: better in {', '.join(better)}, no worse in anything else"
                break
        judged.append(replace(row, on_frontier=row.valid and why is None, dominated_by=why))
    return judged


def _list_objectives(row: ComparisonRow) -> list[str]:
    """What is known of a row and can be better or worse than that of another."""
    known = [OBJECTIVES[goal] for goal in Goal if find_common_metric([row], goal) is not None]
    return [*known, *([ACCURACY.name] if row.top1 else [])]


def _is_worse_anywhere(rival: ComparisonRow, row: ComparisonRow) -> bool:
    """Whether `rival` is worse in a figure that `row` has, or lacks it."""
    for goal in Goal:
        if find_common_metric([row], goal) is None:
            continue
        metric = find_common_metric([rival, row], goal)
        if metric is None or _score(rival, metric) < _score(row, metric):
            return True
    return row.top1 is not None and (rival.top1 is None or rival.top1.value < row.top1.value)


def get_kind_of_load(row: ComparisonRow) -> tuple[str, str, str, float | None, int | None]:
    """What the requests decide, not the deployment: figures are compared within one kind alone.

    Batch size and streams are a choice; the rate at which requests arrive is not.
    """
    load = row.load
    return row.model, load.scenario, load.mode, load.rate_per_s, load.length


def find_best_rows(
    rows: list[ComparisonRow], slo: Slo | None, shown: Claims
) -> tuple[dict[str, str | None], dict[str, str]]:
    """Row id by goal, None if no row is shown to be the best, and the reasons; with `slo` only rows that meet it."""
    models = sorted({row.model for row in rows})
    lengths = sorted({row.load.length for row in rows if row.load.length is not None})
    # the smallest network is not a better build of the others, nor is the shortest sequence
    for what, values, flag in (
        ("models", models, Argument("model")),
        ("sequence lengths", [*map(str, lengths)], Argument("length")),
    ):
        if len(values) > 1:
            compared = f"{len(values)} {what} are compared ({', '.join(values)})"
            reason = compared + "; choose one with " + flag
            return dict.fromkeys(Goal), dict.fromkeys(Goal, reason)
    allowed = [row for row in rows if row.valid and (slo is None or _meets_limit(row, slo))]
    best: dict[str, str | None] = {}
    why: dict[str, str] = {}
    for goal in Goal:
        scored = [row for row in allowed if find_common_metric([row], goal) is not None]
        if scored:
            best[goal], why[goal] = _find_best_of_kinds(scored, goal, shown)
        else:
            best[goal], why[goal] = None, _explain_no_best(rows, goal, slo)
    return best, why


def _find_best_of_kinds(
    rows: Sequence[ComparisonRow], goal: Goal, shown: Claims
) -> tuple[str | None, str]:
    """The id of the best row, None if none is shown to be, and the reason.

    Loads of different kinds are no comparison: the answer is that of one kind, which the reason then names. It is one
    in which a row is shown to be better than others, if possible without a given rate, and with most rows.
    """
    kinds = group_pairs((get_kind_of_load(row), row) for row in rows)
    answers = [(*_find_best_of_kind(alike, goal, shown), alike) for alike in kinds.values()]

    def rank(answer: tuple[str | None, str, Sequence[ComparisonRow]]) -> tuple[bool, bool, int]:
        best, _, alike = answer
        decided = best is not None and len(alike) > 1
        return decided, alike[0].load.rate_per_s is None, len(alike)

    best, why, alike = max(answers, key=rank)
    if len(kinds) == 1:
        return best, why if len(rows) > 1 else f"{why}, the only measurement"
    load = f"{alike[0].scenario}, {alike[0].load.mode}"
    count = f"{len(alike)} measurements" if len(alike) > 1 else "the only measurement"
    return best, f"{why}, {'among ' if len(alike) > 1 else ''}{count} of {load}"


def _find_best_of_kind(
    rows: Sequence[ComparisonRow], goal: Goal, shown: Claims
) -> tuple[str | None, str]:
    """As `_find_best_of_kinds`, of rows whose loads are of one kind."""
    metric = find_common_metric(rows, goal) or METRICS[goal][-1]
    winner = max(rows, key=lambda row: _score(row, metric))
    figure = metric.read_row(winner)
    assert figure is not None
    dimension = choose_dimension(metric.dimension, winner.load.sample)
    shown_value = f"{metric.mark}{format_quantity(figure.value, dimension)}"
    equal = [
        row
        for row in rows
        if row is not winner and (winner.id, row.id, OBJECTIVES[goal]) not in shown
    ]
    if not equal:
        return winner.id, shown_value
    more = f" and {len(equal) - 1} more" if len(equal) > 1 else ""
    return (
        None,
        f"{winner.label} ({shown_value}) is not shown to be better than {equal[0].label}{more}",
    )


def sort_by_goal(comparison: Comparison, goal: Goal) -> Comparison:
    """Sorts rows by `goal`, the best first, then rows without a figure, then INVALID ones."""

    known = [row for row in comparison.rows if find_common_metric([row], goal) is not None]
    metric = find_common_metric(known, goal) or METRICS[goal][-1]

    def order(row: ComparisonRow) -> tuple[bool, bool, float]:
        return not row.valid, row not in known, -_score(row, metric)

    return replace(comparison, rows=tuple(sorted(comparison.rows, key=order)))


def _meets_limit(row: ComparisonRow, slo: Slo) -> bool:
    latency = row.latency_ns.get(format_percentile_name(slo.percent))
    return latency is not None and latency.is_at_most(slo.limit_ns)


def find_common_metric(rows: Sequence[ComparisonRow], goal: Goal) -> Metric | None:
    """The metric of the goal that all `rows` have."""
    has_all = (metric for metric in METRICS[goal] if all(metric.read_row(row) for row in rows))
    return next(has_all, None)


def _score(row: ComparisonRow, metric: Metric) -> float:
    """The figure, negative if less is better; the lowest possible without one."""
    figure = metric.read_row(row)
    return -inf if figure is None else -metric.loss_sign * figure.value


def _explain_no_best(rows: list[ComparisonRow], goal: Goal, slo: Slo | None) -> str:
    valid = [row for row in rows if row.valid]
    if not valid:
        return "no measurement is VALID"
    if slo is not None and not any(_meets_limit(row, slo) for row in valid):
        name = format_percentile_name(slo.percent)
        nearest = [row.latency_ns[name] for row in valid if name in row.latency_ns]
        if not nearest:
            return f"no measurement reports {name}: too few samples, or it was not requested"
        bounds = [estimate.high for estimate in nearest if estimate.high is not None]
        if not bounds:
            return f"no measurement shows that it meets {slo}: {name} has no interval"
        bound = format_quantity(min(bounds), Dimension.TIME)
        return f"no build meets {slo}; the closest has an upper bound of {bound}"
    return "energy was not measured" if goal is Goal.EFFICIENCY else "not measured"
