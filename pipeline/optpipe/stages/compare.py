"""Compares what was measured: speed-up against a baseline, the frontier, the best build for each goal.

A speed-up is the ratio of the p50 latencies. With four or more processes of both sides it has Student's t interval over
the processes' medians; with fewer, the bounds of the two order-statistic intervals, which cover the noise inside a process
only, and the comparison says so. Exchanging the sides inverts value and interval exactly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from optpipe.core.comparison import Comparison, Goal, Interval, Row
from optpipe.core.evidence import Measured, clocks_apart, foreign
from optpipe.core.measurement import Measurement, Validity, percentile_name
from optpipe.core.quantity import Dimension, quantity_text
from optpipe.errors import BadInputError
from optpipe.measuring.marks import not_faster
from optpipe.measuring.slo import Slo
from optpipe.stats.ratio import SMALLEST_ROUNDS, medians_ratio


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of an artifact beyond its measurements."""

    size_bytes: int | None = None
    build_s: float | None = None
    top1: Interval | None = None
    causes: str = ""
    """Why an INT8 artifact may be slow."""
    accuracy: str | None = None
    """What an INT8 artifact's accuracy is not shown to keep."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What everything is held against: a run, an approved dossier, or the FP32 build of each backend."""

    name: str
    kind: str
    measured: tuple[Measured, ...]


def compared(
    measured: Sequence[Measured],
    *,
    baseline: Baseline | None = None,
    known: Mapping[str, Known] | None = None,
    slo: Slo | None = None,
    across: bool = False,
) -> Comparison:
    """The comparison of `measured`. Raises BadInputError where it mixes machines and `across` is not set."""
    warnings = _environments(measured, baseline, across=across)
    groups = _by_key(measured)
    several = len({one.measurement.subject.model for one in measured}) > 1
    baselines = _by_key(baseline.measured) if baseline else groups
    rows, unmatched = [], []
    for key, group in groups.items():
        known_of_it = (known or {}).get(group[-1].measurement.subject.artifact, Known())
        row = _row(group[-1], known_of_it, among_models=several)
        other, reason = _counterpart(key, group, baselines, own=baseline is None)
        if other is not None and not across and (apart := clocks_apart(group[-1], other[-1])):
            other, reason = None, f"{apart}; lock the clocks and measure again, or say --across"
        if other is None:
            unmatched.append({"row": row.id, "label": row.label, "reason": reason})
        elif other is not group:
            row, note = _with_speedup(row, group, other)
            warnings += [note] if note else []
        rows.append(row)
    if baseline:
        unmatched += _left_over(baselines, groups, among_models=several)
    rows = _with_frontier(rows)
    warnings += _int8_notes(rows, [group[-1].measurement for group in groups.values()], known or {})
    best, why = _best(rows, slo)
    return Comparison(
        rows=tuple(sorted(rows, key=lambda row: (row.model, row.scenario, row.mode, row.batch_size, row.build))),
        best=best,
        best_reason=why,
        unmatched=tuple(unmatched),
        baseline=_baseline_record(baseline, baselines),
        slo=None if slo is None else str(slo),
        warnings=tuple(dict.fromkeys(warnings)),
        environment=measured[-1].environment if measured else {},
    )


def _by_key(measured: Sequence[Measured]) -> dict[tuple[object, ...], list[Measured]]:
    def key(one: Measured) -> tuple[object, ...]:
        return one.measurement.key

    ordered = sorted(measured, key=lambda one: (str(key(one)), one.measurement.started_utc or "", one.run))
    return {found: list(group) for found, group in groupby(ordered, key=key)}


def _environments(measured: Sequence[Measured], baseline: Baseline | None, *, across: bool) -> list[str]:
    every = [*measured, *(baseline.measured if baseline else ())]
    differences = {
        difference: one.run for one in every[1:] for difference in foreign(every[0].environment, one.environment)
    }
    if not differences:
        return []
    listed = "; ".join(f"{difference} ({every[0].run} and {run})" for difference, run in differences.items())
    if not across:
        message = f"the runs are from different machines: {listed}\nname the runs to compare, or say --across"
        raise BadInputError(message)
    return [f"compares across different machines, as asked for: {listed}"]


def _row(one: Measured, known: Known, *, among_models: bool) -> Row:
    found = one.measurement
    subject = found.subject
    throughput, energy = found.throughput_images_per_s, found.energy_j_per_image
    percentiles = found.latency.percentiles if found.latency else ()
    return Row(
        id=f"{one.run}/{found.id}",
        run=one.run,
        artifact=subject.artifact,
        model=subject.model or "",
        backend=subject.backend,
        precision=subject.precision,
        device=subject.device,
        batch_size=found.batch_size,
        scenario=str(found.scenario),
        mode=str(found.mode),
        valid=found.verdict is Validity.VALID,
        reasons=tuple(reason.message for reason in found.reasons),
        reason_codes=tuple(reason.code for reason in found.reasons if reason.invalidates),
        samples=found.samples,
        latency_ms={percentile_name(each.percent): Interval(each.value, *each.ci) for each in percentiles},
        throughput_images_per_s=None if throughput is None else Interval(throughput.value, *(throughput.ci or ())),
        energy_j_per_image=None if energy is None else Interval(energy.value, *(energy.ci or ())),
        memory_bytes=found.host_peak_bytes if subject.device == "cpu" else found.device_peak_bytes,
        size_bytes=known.size_bytes,
        build_s=known.build_s,
        top1=known.top1,
        among_models=among_models,
        caveats=found.caveats,
        sources={} if found.samples_file is None else {found.samples_file: ""},
    )


def _counterpart(
    key: tuple[object, ...], group: list[Measured], baselines: Mapping[tuple[object, ...], list[Measured]], *, own: bool
) -> tuple[list[Measured] | None, str]:
    """The baseline's measurements of the same load: of the same build where there are, else of the only one it has."""
    contender = group[-1].measurement
    if not own and key in baselines:
        return baselines[key], ""
    same_load = {other: found for other, found in baselines.items() if _load(found) == _load(group)}
    if own:
        backend = contender.subject.backend
        fp32 = [found for found in same_load.values() if found[-1].measurement.subject.precision == "fp32"]
        own_backend = [found for found in fp32 if found[-1].measurement.subject.backend == backend]
        if own_backend:
            return own_backend[-1], ""
        return None, f"no fp32 build of {backend} was measured at batch {contender.batch_size}, {contender.scenario}"
    if len(same_load) == 1:
        return next(iter(same_load.values())), ""
    where = f"batch {contender.batch_size}, {contender.scenario}, {contender.mode}"
    if same_load:
        return None, f"the baseline has {len(same_load)} builds at {where} and none is {_build(contender)}"
    return None, f"the baseline was not measured at {where}"


def _load(group: list[Measured]) -> tuple[object, ...]:
    found = group[-1].measurement
    return (found.subject.model, found.batch_size, found.scenario, found.mode, found.streams, found.offered_rate_per_s)


def _build(found: Measurement) -> str:
    return f"{found.subject.backend} {found.subject.precision}"


def _left_over(
    baselines: Mapping[tuple[object, ...], list[Measured]],
    groups: Mapping[tuple[object, ...], list[Measured]],
    *,
    among_models: bool,
) -> list[dict[str, str]]:
    loads = {_load(group) for group in groups.values()}
    alone = [group[-1] for group in baselines.values() if _load(group) not in loads]
    rows = [_row(one, Known(), among_models=among_models) for one in alone]
    reason = "only the baseline was measured so"
    return [{"row": row.id, "label": f"baseline: {row.label}", "reason": reason} for row in rows]


def _with_speedup(row: Row, contender: list[Measured], baseline: list[Measured]) -> tuple[Row, str | None]:
    medians = [_medians(group) for group in (contender, baseline)]
    if all(len(each) >= SMALLEST_ROUNDS for each in medians):
        ratio = medians_ratio(medians[0], medians[1])
        speedup = Interval(ratio.value, *ratio.ci)
        return replace(row, speedup=speedup, change=_change(speedup)), None
    new, old = (_p50(group[-1]) for group in (contender, baseline))
    if new is None or old is None or min(new.low or 0, old.low or 0) <= 0:
        return row, None
    assert new.high is not None
    assert old.low is not None
    assert old.high is not None
    assert new.low is not None
    speedup = Interval(old.value / new.value, old.low / new.high, old.high / new.low)
    note = (
        "speed-ups come from one process each: their intervals cover the noise inside a process only; "
        "optpipe bench A B --interleave covers the rest"
    )
    valid = all(group[-1].measurement.verdict is Validity.VALID for group in (contender, baseline))
    return replace(row, speedup=speedup, change=_change(speedup) if valid else "not judged: INVALID"), note


def _medians(group: list[Measured]) -> list[float]:
    """One median per process; VALID measurements only."""
    found = [_p50(one) for one in group if one.measurement.verdict is Validity.VALID]
    return [one.value for one in found if one is not None]


def _p50(one: Measured) -> Interval | None:
    latency = one.measurement.latency
    found = None if latency is None else latency.percentile(50.0)
    return None if found is None else Interval(found.value, *found.ci)


def _change(speedup: Interval) -> str:
    assert speedup.low is not None
    assert speedup.high is not None
    return "faster" if speedup.low > 1 else "slower" if speedup.high < 1 else "no difference shown"


def _int8_notes(rows: Sequence[Row], measured: Sequence[Measurement], known: Mapping[str, Known]) -> list[str]:
    """INT8 whose accuracy is not shown to keep its budget, then INT8 that is not shown to be faster than a wider type.

    `measured` are the measurements that `rows` show, in their order.
    """
    of = [known.get(row.artifact, Known()) for row in rows]
    found = [f"{row.build}: {about.accuracy}" for row, about in zip(rows, of, strict=True) if about.accuracy]
    valid = [one for one in measured if one.verdict is Validity.VALID]
    for row, one, about in zip(rows, measured, of, strict=True):
        if row.valid and (reason := not_faster(one, valid, about.causes)) is not None:
            seen = f"INT8 is not shown to be faster than {reason.evidence['than']}"
            ratio = f"{reason.evidence['ratio']:.2f} times as fast"
            found.append(f"{row.label}: {seen} ({ratio})" + (f"; {about.causes}" if about.causes else ""))
    return found


def _objectives(row: Row) -> dict[str, float]:
    """What a build is weighed by, larger is better."""
    found = {
        "latency": _score(row, Goal.LATENCY),
        "throughput": _score(row, Goal.THROUGHPUT),
        "energy": -row.energy_j_per_image.value if row.energy_j_per_image else None,
        "accuracy": row.top1.value if row.top1 else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _with_frontier(rows: list[Row]) -> list[Row]:
    """Marks rows that no other one dominates, among valid rows of one model under one kind of load."""
    judged = []
    for row in rows:
        rivals = [each for each in rows if each.valid and _kind(each) == _kind(row) and each is not row]
        winner = next((each for each in rivals if _dominates(each, row)), None) if row.valid else None
        why = f"{winner.id}: better in {', '.join(_better(winner, row))}, worse in nothing" if winner else None
        judged.append(replace(row, on_frontier=row.valid and winner is None, dominated_by=why))
    return judged


def _kind(row: Row) -> tuple[str, str, str]:
    return row.model, row.scenario, row.mode


def _better(one: Row, other: Row) -> list[str]:
    mine, theirs = _objectives(one), _objectives(other)
    return [name for name, value in mine.items() if name in theirs and value > theirs[name]]


def _dominates(one: Row, other: Row) -> bool:
    mine, theirs = _objectives(one), _objectives(other)
    complete = set(theirs) <= set(mine)  # an objective that is unknown of the winner proves nothing
    return complete and bool(_better(one, other)) and all(mine[name] >= value for name, value in theirs.items())


def _best(rows: list[Row], slo: Slo | None) -> tuple[dict[str, str | None], dict[str, str]]:
    models = sorted({row.model for row in rows})
    if len(models) > 1:  # the smallest network is no better build of the others
        reason = f"{len(models)} models are compared ({', '.join(models)}); name one with --model"
        return dict.fromkeys(Goal), dict.fromkeys(Goal, reason)
    allowed = [row for row in rows if row.valid and (slo is None or _keeps(row, slo))]
    best: dict[str, str | None] = {}
    why: dict[str, str] = {}
    for goal in Goal:
        scored = [(score, row) for row in allowed if (score := _score(row, goal)) is not None]
        if not scored:
            best[goal], why[goal] = None, _nothing(rows, goal, slo)
            continue
        _, winner = max(scored, key=lambda pair: pair[0])
        best[goal], why[goal] = winner.id, _praise(winner, goal)
    return best, why


def sorted_for(comparison: Comparison, goal: Goal) -> Comparison:
    """The rows ordered by `goal`, the best first and what has no figure last; INVALID ones below the valid."""

    def order(row: Row) -> tuple[bool, bool, float]:
        score = _score(row, goal)
        return not row.valid, score is None, -(score or 0.0)

    return replace(comparison, rows=tuple(sorted(comparison.rows, key=order)))


def _keeps(row: Row, slo: Slo) -> bool:
    found = row.latency_ms.get(percentile_name(slo.percent))
    return found is not None and found.high is not None and found.high <= slo.limit_ms


def _score(row: Row, goal: Goal) -> float | None:
    if goal is Goal.LATENCY:
        latency = row.latency_ms.get("p99") or row.latency_ms.get("p50")
        return -latency.value if latency else None
    if goal is Goal.THROUGHPUT:
        return row.throughput_images_per_s.value if row.throughput_images_per_s else None
    return 1 / row.energy_j_per_image.value if row.energy_j_per_image else None


def _praise(row: Row, goal: Goal) -> str:
    if goal is Goal.LATENCY:
        name = "p99" if "p99" in row.latency_ms else "p50"
        return f"{name} {quantity_text(row.latency_ms[name].value * 1e6, Dimension.TIME)}"
    if goal is Goal.THROUGHPUT and row.throughput_images_per_s:
        return quantity_text(row.throughput_images_per_s.value, Dimension.RATE)
    assert row.energy_j_per_image
    return f"≈ {quantity_text(row.energy_j_per_image.value, Dimension.ENERGY)}"


def _nothing(rows: list[Row], goal: Goal, slo: Slo | None) -> str:
    valid = [row for row in rows if row.valid]
    if not valid:
        return "no measurement is VALID"
    if slo is not None and not any(_keeps(row, slo) for row in valid):
        name = percentile_name(slo.percent)
        nearest = [row.latency_ms[name] for row in valid if name in row.latency_ms]
        if not nearest:
            return f"no measurement gives {name}: too few samples, or it was not asked for"
        closest = min(nearest, key=lambda each: each.high or each.value)
        bound = quantity_text((closest.high or closest.value) * 1e6, Dimension.TIME)
        return f"no build keeps {slo}; the nearest has an upper bound of {bound}"
    return "energy was not measured" if goal is Goal.EFFICIENCY else "not measured"


def _baseline_record(
    baseline: Baseline | None, baselines: Mapping[tuple[object, ...], list[Measured]]
) -> dict[str, object] | None:
    if baseline:
        return {"name": baseline.name, "kind": baseline.kind}
    fp32 = any(group[-1].measurement.subject.precision == "fp32" for group in baselines.values())
    return {"name": "fp32 of each backend", "kind": "precision"} if fp32 else None
