"""Which rows of a comparison no other row beats, and which is the best for each goal.

A row is better only where a difference was shown; what is equal or undecided beats nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from optpipe.core.measurement import (
    Comparison,
    ComparisonRow,
    Goal,
    format_percentile_name,
)
from optpipe.core.metrics.contract import Metric
from optpipe.core.metrics.measured import ENERGY, P50, P99, THROUGHPUT
from optpipe.core.metrics.sections import ACCURACY
from optpipe.core.quantity import Dimension, choose_dimension, format_quantity
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


def _objectives(row: ComparisonRow) -> dict[str, float]:
    scores = {name: _score(row, goal) for goal, name in OBJECTIVES.items()}
    scores[ACCURACY.name] = row.top1.value if row.top1 else None
    return {name: value for name, value in scores.items() if value is not None}


Claims = frozenset[tuple[str, str, str]]
"""(better row's id, worse row's id, objective) of every difference that is shown."""


def mark_frontier(rows: list[ComparisonRow], shown: Claims) -> list[ComparisonRow]:
    """Marks valid rows that no row of the same model and kind of load is shown to dominate."""
    judged = []
    for row in rows:
        rivals = [
            each
            for each in rows
            if each.valid and get_kind_of_load(each) == get_kind_of_load(row) and each is not row
        ]
        why = None
        for rival in rivals if row.valid else ():
            mine, theirs = _objectives(rival), _objectives(row)
            worse = any(name not in mine or mine[name] < value for name, value in theirs.items())
            better = [name for name in theirs if (rival.id, row.id, name) in shown]
            if better and not worse:
                why = f"{rival.id}: better in {', '.join(better)}, no worse in anything else"
                break
        judged.append(replace(row, on_frontier=row.valid and why is None, dominated_by=why))
    return judged


def get_kind_of_load(row: ComparisonRow) -> tuple[str, str, str, int | None]:
    return row.model, row.load.scenario, row.load.mode, row.load.length


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
        scored = [(score, row) for row in allowed if (score := _score(row, goal)) is not None]
        if not scored:
            best[goal], why[goal] = None, _explain_no_best(rows, goal, slo)
            continue
        _, winner = max(scored, key=lambda pair: pair[0])
        best[goal], why[goal] = winner.id, _describe_best(winner, goal)
        equal = [
            row
            for _, row in scored
            if row is not winner and (winner.id, row.id, OBJECTIVES[goal]) not in shown
        ]
        if equal:
            more = f" and {len(equal) - 1} more" if len(equal) > 1 else ""
            best[goal] = None
            why[goal] = (
                f"{winner.label} ({why[goal]}) is not shown to be better than {equal[0].label}{more}"
            )
    return best, why


def sort_by_goal(comparison: Comparison, goal: Goal) -> Comparison:
    """Sorts rows by `goal`, the best first, then rows without a figure, then INVALID ones."""

    def order(row: ComparisonRow) -> tuple[bool, bool, float]:
        score = _score(row, goal)
        return not row.valid, score is None, -(score or 0.0)

    return replace(comparison, rows=tuple(sorted(comparison.rows, key=order)))


def _meets_limit(row: ComparisonRow, slo: Slo) -> bool:
    latency = row.latency_ns.get(format_percentile_name(slo.percent))
    return latency is not None and latency.high is not None and latency.high <= slo.limit_ns


def find_common_metric(rows: Sequence[ComparisonRow], goal: Goal) -> Metric | None:
    """The metric of the goal that all `rows` have."""
    has_all = (each for each in METRICS[goal] if all(each.read_row(row) for row in rows))
    return next(has_all, None)


def _score(row: ComparisonRow, goal: Goal) -> float | None:
    """The figure, negative if less is better; None without one."""
    metric = find_common_metric([row], goal)
    figure = metric.read_row(row) if metric else None
    return None if metric is None or figure is None else -metric.loss_sign * figure.value


def _describe_best(row: ComparisonRow, goal: Goal) -> str:
    metric = find_common_metric([row], goal)
    figure = metric.read_row(row) if metric else None
    assert metric is not None
    assert figure is not None
    dimension = choose_dimension(metric.dimension, row.load.sample)
    return f"{metric.mark}{format_quantity(figure.value, dimension)}"


def _explain_no_best(rows: list[ComparisonRow], goal: Goal, slo: Slo | None) -> str:
    valid = [row for row in rows if row.valid]
    if not valid:
        return "no measurement is VALID"
    if slo is not None and not any(_meets_limit(row, slo) for row in valid):
        name = format_percentile_name(slo.percent)
        nearest = [row.latency_ns[name] for row in valid if name in row.latency_ns]
        if not nearest:
            return f"no measurement reports {name}: too few samples, or it was not requested"
        bound = format_quantity(min(each.bounds[1] for each in nearest), Dimension.TIME)
        return f"no build meets {slo}; the closest has an upper bound of {bound}"
    return "energy was not measured" if goal is Goal.EFFICIENCY else "not measured"
