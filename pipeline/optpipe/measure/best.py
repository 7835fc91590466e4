"""Which rows of a comparison nothing beats, and which one is the best for each goal."""

from dataclasses import replace

from optpipe.core.comparison import Comparison, ComparisonRow, Goal
from optpipe.core.measurement import format_percentile_name
from optpipe.core.quantity import Dimension, choose_dimension, format_quantity
from optpipe.measure.slo import Slo


def _objectives(row: ComparisonRow) -> dict[str, float]:
    """What a build is weighed by, larger is better."""
    found = {
        "latency": _score(row, Goal.LATENCY),
        "throughput": _score(row, Goal.THROUGHPUT),
        "energy": -row.energy_j_per_image.value if row.energy_j_per_image else None,
        "accuracy": row.top1.value if row.top1 else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def mark_frontier(rows: list[ComparisonRow]) -> list[ComparisonRow]:
    """Marks rows that no other one dominates, among valid rows of one model under one kind of load."""
    judged = []
    for row in rows:
        rivals = [each for each in rows if each.valid and _kind(each) == _kind(row) and each is not row]
        winner = next((each for each in rivals if _dominates(each, row)), None) if row.valid else None
        why = (
            f"{winner.id}: better in {', '.join(_find_better(winner, row))}, no worse in anything else"
            if winner
            else None
        )
        judged.append(replace(row, on_frontier=row.valid and winner is None, dominated_by=why))
    return judged


def _kind(row: ComparisonRow) -> tuple[str, str, str, int | None]:
    return row.model, row.load.scenario, row.load.mode, row.load.length


def _find_better(one: ComparisonRow, other: ComparisonRow) -> list[str]:
    mine, theirs = _objectives(one), _objectives(other)
    return [name for name, value in mine.items() if name in theirs and value > theirs[name]]


def _dominates(one: ComparisonRow, other: ComparisonRow) -> bool:
    mine, theirs = _objectives(one), _objectives(other)
    complete = set(theirs) <= set(mine)  # an objective that is unknown of the winner proves nothing
    return complete and bool(_find_better(one, other)) and all(mine[name] >= value for name, value in theirs.items())


def find_best_rows(rows: list[ComparisonRow], slo: Slo | None) -> tuple[dict[str, str | None], dict[str, str]]:
    """The best row's id for each goal, None where there is none, and why; with `slo` only rows that keep it count."""
    models = sorted({row.model for row in rows})
    if len(models) > 1:  # the smallest network is not a better build of the others
        reason = f"{len(models)} models are compared ({', '.join(models)}); choose one with --model"
        return dict.fromkeys(Goal), dict.fromkeys(Goal, reason)
    lengths = sorted({row.load.length for row in rows if row.load.length is not None})
    if len(lengths) > 1:  # nor is the shortest sequence
        reason = (
            f"{len(lengths)} sequence lengths are compared ({', '.join(map(str, lengths))}); choose one with --length"
        )
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
    return best, why


def sort_by_goal(comparison: Comparison, goal: Goal) -> Comparison:
    """The rows ordered by `goal`, the best first and what has no figure last; INVALID ones below the valid."""

    def order(row: ComparisonRow) -> tuple[bool, bool, float]:
        score = _score(row, goal)
        return not row.valid, score is None, -(score or 0.0)

    return replace(comparison, rows=tuple(sorted(comparison.rows, key=order)))


def _meets_limit(row: ComparisonRow, slo: Slo) -> bool:
    found = row.latency_ns.get(format_percentile_name(slo.percent))
    return found is not None and found.high is not None and found.high <= slo.limit_ns


def _score(row: ComparisonRow, goal: Goal) -> float | None:
    if goal is Goal.LATENCY:
        latency = row.latency_ns.get("p99") or row.latency_ns.get("p50")
        return -latency.value if latency else None
    if goal is Goal.THROUGHPUT:
        return row.throughput_images_per_s.value if row.throughput_images_per_s else None
    return 1 / row.energy_j_per_image.value if row.energy_j_per_image else None


def _describe_best(row: ComparisonRow, goal: Goal) -> str:
    if goal is Goal.LATENCY:
        name = "p99" if "p99" in row.latency_ns else "p50"
        return f"{name} {format_quantity(row.latency_ns[name].value, Dimension.TIME)}"
    if goal is Goal.THROUGHPUT and row.throughput_images_per_s:
        return format_quantity(row.throughput_images_per_s.value, choose_dimension(Dimension.RATE, row.load.sample))
    assert row.energy_j_per_image
    return f"≈ {format_quantity(row.energy_j_per_image.value, choose_dimension(Dimension.ENERGY, row.load.sample))}"


def _explain_no_best(rows: list[ComparisonRow], goal: Goal, slo: Slo | None) -> str:
    valid = [row for row in rows if row.valid]
    if not valid:
        return "no measurement is VALID"
    if slo is not None and not any(_meets_limit(row, slo) for row in valid):
        name = format_percentile_name(slo.percent)
        nearest = [row.latency_ns[name] for row in valid if name in row.latency_ns]
        if not nearest:
            return f"no measurement reports {name}: too few samples, or it was not requested"
        closest = min(nearest, key=lambda each: each.bounds[1])
        bound = format_quantity(closest.bounds[1], Dimension.TIME)
        return f"no build meets {slo}; the closest has an upper bound of {bound}"
    return "energy was not measured" if goal is Goal.EFFICIENCY else "not measured"
