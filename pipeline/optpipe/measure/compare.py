"""Compares measurements: speedup against a baseline, the frontier, the best build for each goal.

A speedup is the ratio of the p50 latencies of two rows, with an interval if both have three or more processes. Claims (faster,
slower, dominated, best) use Holm's procedure over all pairs of rows, so that one table in a hundred of equal builds has
a false claim; builds of different runs are only compared if the scatter between runs is known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import exp, inf

from optpipe.core.comparison import Comparison, ComparisonRow, Goal, Levels
from optpipe.core.entries import Environment
from optpipe.core.errors import BadInputError
from optpipe.core.load import LoadSpec
from optpipe.core.measurement import Measurement
from optpipe.core.metrics.measured import P50
from optpipe.core.quantity import Estimate
from optpipe.core.wording import Argument, Call
from optpipe.measure.best_rows import (
    METRICS,
    OBJECTIVES,
    Claims,
    find_best_rows,
    find_common_metric,
    get_kind_of_load,
    mark_frontier,
)
from optpipe.measure.comparison_rows import (
    BuildFacts,
    Groups,
    RowNames,
    format_row_id,
    get_build_key,
    group_by_key,
    name_processor,
    row_from_group,
)
from optpipe.measure.groups import (
    FigureRatio,
    ProcessGroup,
    RecordedMeasurement,
    compare_groups,
    explain_clock_difference,
    find_environment_differences,
    find_run_scatter,
    find_usual_gap,
    merge_group,
)
from optpipe.measure.int8_notes import (
    find_wider,
    pick_baseline,
)
from optpipe.measure.pair import PAIR_CONFIDENCE
from optpipe.measure.search import Slo
from optpipe.stats.means import Scatter, reject_by_holm


def compare_measurements(
    measured: Sequence[RecordedMeasurement],
    *,
    baseline: str | None = None,
    against: Sequence[RecordedMeasurement] = (),
    known: Mapping[str, BuildFacts] | None = None,
    slo: Slo | None = None,
    across: bool = False,
    levels: Levels | None = None,
) -> Comparison:
    """Compares with the measurements `against` of a `baseline`, by default with the FP32 build of each backend.

    Raises BadInputError if the measurements are from several machines and `across` is not set.
    """
    levels = levels or Levels()
    every = [*measured, *against]
    warnings = _check_environments(every, across=across)
    groups, names = group_by_key(measured), RowNames(every)
    baselines = group_by_key(against) if baseline else groups
    known = known or {}
    facts = {
        key: known.get(group.newest.measurement.subject.artifact, BuildFacts())
        for key, group in groups.items()
    }
    rows, unmatched, notes, shown, ratios = _compare_groups(
        groups, baselines, names, facts, levels, across=across
    )
    if baseline:
        loads = {_load(group) for group in groups.values()}
        alone = [
            row_from_group(group, BuildFacts(), names, levels)
            for group in baselines.values()
            if _load(group) not in loads
        ]
        reason = "only the baseline has a measurement at this load"
        unmatched |= {f"baseline: {row.label}": reason for row in alone}
    elif any(group.newest.measurement.subject.precision == "fp32" for group in groups.values()):
        baseline = "fp32 build of each backend"
    rows = mark_frontier(rows, shown)
    of_int8 = _list_int8_notes(rows, [*groups.values()], [*facts.values()], shown, ratios)
    warnings += [*notes, *of_int8]
    best, why = find_best_rows(rows, slo, shown)
    return Comparison(
        rows=tuple(sorted(rows, key=lambda row: (row.model, *_order(row.load), row.configuration))),
        best=best,
        best_reason=why,
        unmatched=unmatched,
        baseline=baseline,
        slo=None if slo is None else str(slo),
        warnings=tuple(dict.fromkeys(warnings)),
        environment=measured[-1].environment if measured else Environment(),
        confidence=levels,
    )


def _compare_groups(
    groups: "Groups",
    baselines: "Groups",
    names: "RowNames",
    facts: Mapping[tuple[object, ...], BuildFacts],
    levels: Levels,
    *,
    across: bool,
) -> tuple[list[ComparisonRow], dict[str, str], list[str], Claims, "_Ratios"]:
    """A row per group with its speedup over the baseline; labels of rows without a counterpart, and why; notes; claims; ratios."""
    rows: list[ComparisonRow] = []
    every = [*groups.values(), *(baselines.values() if baselines is not groups else ())]
    names_of_figures = [metric.name for metrics in METRICS.values() for metric in metrics]
    scatters = {name: find_run_scatter(every, name) for name in names_of_figures}
    gaps = {name: find_usual_gap(every, name) for name in names_of_figures}
    speedups: dict[str, FigureRatio] = {}
    unmatched: dict[str, str] = {}
    notes: list[str] = []
    chosen: dict[str, list[int]] = {}
    for key, group in groups.items():
        row = row_from_group(group, facts[key], names, levels)
        other, said = _find_counterpart(group, baselines, names, own=baselines is groups)
        if (
            other is not None
            and not across
            and (apart := explain_clock_difference(group.newest, other.newest))
        ):
            way = "lock the clocks and measure again, or pass " + Argument("across")
            other, said = None, f"{apart}; " + way
        if other is None:
            unmatched[row.label] = said
        elif other is not group:
            speedup, change, basis = _compute_speedup(
                group, other, scatters[P50.name], gaps[P50.name], levels
            )
            held_against = f"{format_row_id(other.newest)}: {names.configuration(other.newest)}"
            row = replace(row, speedup=speedup, change=change, held_against=held_against)
            if isinstance(basis, FigureRatio):
                speedups[row.id] = basis
            elif basis:
                notes.append(basis)
            if said:
                chosen.setdefault(said, []).append(row.load.batch_size)
        rows.append(row)
    notes += [f"{said} (batch {', '.join(map(str, sizes))})" for said, sizes in chosen.items()]
    tests, ratios = _compare_pairs(rows, [*groups.values()], scatters, gaps)
    keys = [*tests, *speedups]
    p_values = [*tests.values(), *(speedup.p_value for speedup in speedups.values())]
    hits = reject_by_holm(p_values, 1 - PAIR_CONFIDENCE)
    claimed = {key for key, hit in zip(keys, hits, strict=True) if hit}
    for at, row in enumerate(rows):
        if row.id in speedups:
            faster = "faster" if speedups[row.id].change.value > 0 else "slower"
            rows[at] = replace(row, change=faster if row.id in claimed else "no difference shown")
    shown = frozenset(key for key in claimed if isinstance(key, tuple))
    return rows, unmatched, notes, shown, ratios


def _compare_pairs(
    rows: Sequence[ComparisonRow],
    groups: Sequence[ProcessGroup],
    scatters: Mapping[str, Scatter | None],
    gaps: Mapping[str, float],
) -> tuple[dict[tuple[str, str, str], float], dict[tuple[str, str, str], FigureRatio]]:
    """Compares every two VALID rows of one kind of load for each objective; `rows` and `groups` are parallel.

    Returns the p-values by the ids of the better and the worse row, and the ratios by those of the first and the second.
    """
    tests, ratios = {}, {}
    for (first, mine), (second, theirs) in combinations(zip(rows, groups, strict=True), 2):
        alike = get_kind_of_load(first) == get_kind_of_load(second)
        if not (first.valid and second.valid and alike):
            continue
        for goal, objective in OBJECTIVES.items():
            metric = find_common_metric([first, second], goal) or METRICS[goal][-1]
            ratio = compare_groups(mine, theirs, metric.name, scatters[metric.name])
            if isinstance(ratio, FigureRatio):
                ratio = ratio.assume_gap(gaps[metric.name])
                gains = metric.loss_sign * ratio.change.value < 0
                better, worse = (first, second) if gains else (second, first)
                tests[better.id, worse.id, objective] = ratio.p_value
                ratios[first.id, second.id, objective] = ratio
    return tests, ratios


_Ratios = Mapping[tuple[str, str, str], FigureRatio]
"""By the ids of two rows and the objective: the first row's figure over the second's."""


def _check_environments(every: Sequence[RecordedMeasurement], *, across: bool) -> list[str]:
    differences = {
        difference: recorded.run
        for recorded in every[1:]
        for difference in find_environment_differences(every[0].environment, recorded.environment)
    }
    if not differences:
        return []
    listed = "; ".join(
        f"{difference} ({every[0].run} and {run})" for difference, run in differences.items()
    )
    if not across:
        problem = f"the runs are from different machines: {listed}"
        raise BadInputError(
            problem, remedy="specify which runs to compare, or pass " + Argument("across")
        )
    return ["comparing across different machines (" + Argument("across") + f"): {listed}"]


def _order(load: LoadSpec) -> tuple[str, str, int, float, int, int]:
    return (
        load.scenario,
        load.mode,
        load.streams,
        load.rate_per_s or 0.0,
        load.length or 0,
        load.batch_size,
    )


def _find_counterpart(
    group: ProcessGroup, baselines: Groups, names: RowNames, *, own: bool
) -> tuple[ProcessGroup | None, str]:
    """The baseline's measurements of the same load: of the same build, or of the only build that it has.

    Prefers the same settings, otherwise takes the fastest. The text gives the reason for a missing counterpart, or
    which of several was taken.
    """
    of = group.newest.measurement
    where = str(of.load)
    same_load = {
        key: baseline.newest
        for key, baseline in baselines.items()
        if _load(baseline) == _load(group)
    }
    end = 5 if own else 4  # a given baseline may be of another processor
    backend, precision, *place = get_build_key(group.newest)[1:end]
    wanted = (backend, "fp32" if own else precision, *place)
    fitting = {
        key: candidate
        for key, candidate in same_load.items()
        if get_build_key(candidate)[1:end] == wanted
    }
    builds = {get_build_key(candidate) for candidate in same_load.values()}
    if not fitting and not own and len(builds) == 1:
        fitting = same_load
    chosen = pick_baseline(
        of,
        [candidate.measurement for candidate in fitting.values()],
        lambda measurement: -(_get_p50(measurement) or inf),
    )
    if chosen is not None:
        key = next(key for key, candidate in fitting.items() if candidate.measurement is chosen)
        mine, theirs = names.configuration(group.newest), names.configuration(fitting[key])
        said = f"{mine} is compared with {theirs}"
        said += f", the fastest of {len(fitting)} settings" if len(fitting) > 1 else ""
        other = get_build_key(fitting[key]) != get_build_key(group.newest)
        settled = chosen.subject.settings == of.subject.settings or (len(fitting) == 1 and other)
        return baselines[key], "" if settled else said
    if own:
        return None, f"no fp32 build of {of.subject.backend} was measured at {where}"
    if builds:
        return (
            None,
            f"the baseline has {len(builds)} builds at {where}, but not {names.build(group.newest)}",
        )
    return None, f"the baseline was not measured at {where}"


def _load(group: ProcessGroup) -> tuple[object, ...]:
    measurement = group.newest.measurement
    return measurement.subject.model, *measurement.load.key


def _compute_speedup(
    new: ProcessGroup, old: ProcessGroup, run_scatter: Scatter | None, gap: float, levels: Levels
) -> tuple[Estimate | None, str | None, FigureRatio | str]:
    """The ratio of the p50 latencies, why it is not judged, and its basis or a note. INVALID sides have no figure.

    `gap` is `find_usual_gap` of all builds.
    """
    if not (new.valid and old.valid):
        return None, "not judged: INVALID", ""
    basis = compare_groups(old, new, P50.name, run_scatter)
    if isinstance(basis, FigureRatio):
        basis = basis.assume_gap(gap)
        (low, high), _ = basis.interval(levels.speedup)
        return Estimate(exp(basis.change.value), low, high), None, basis
    before, after = (_get_p50(merge_group(group)) for group in (old, new))  # as the rows show
    if before is None or after is None:
        return None, None, ""
    pair, more = Call("bench", "A", against="B"), Call("bench", processes=5)
    notes = {
        "too few processes": "speedups of fewer than three processes are shown without a claim: the scatter between processes is not"
        " known; use " + more + ", or " + pair,
        "different runs": "builds that were measured in different runs are not judged: how much runs differ is not known until one"
        " build was measured in two; measure both in one run, or use " + pair,
        "left out without it": "builds of which a process ended without a latency are not judged: nothing bounds what it would add;"
        " measure them again, or use " + pair,
    }
    return Estimate(before / after), f"not judged: {basis}", notes[basis]


def _get_p50(measurement: Measurement) -> float | None:
    estimate = None if measurement.latency_ns is None else measurement.latency_ns.percentile(50.0)
    return None if estimate is None else estimate.value


def _list_int8_notes(
    rows: Sequence[ComparisonRow],
    groups: Sequence[ProcessGroup],
    of: Sequence[BuildFacts],
    shown: Claims,
    ratios: _Ratios,
) -> list[str]:
    """INT8 builds that may exceed their accuracy budget, then INT8 builds not shown to be faster than a wider type.

    `rows`, `groups`, and `of` are parallel. What is shown is what the table claims, and the interval is that of its test.
    """
    notes = [
        f"{row.build}: {about.accuracy}"
        for row, about in zip(rows, of, strict=True)
        if about.accuracy
    ]
    measured = [(name_processor(group.newest), merge_group(group)) for group in groups]
    objective = OBJECTIVES[Goal.THROUGHPUT]
    for row, (where, measurement), about in zip(rows, measured, of, strict=True):
        beside = [other for place, other in measured if other.is_valid and place == where]
        wider = find_wider(measurement, beside) if row.valid else None
        if wider is None:
            continue
        other = rows[next(at for at, (_, candidate) in enumerate(measured) if candidate is wider)]
        if (row.id, other.id, objective) in shown:
            continue
        seen = f"{measurement.subject.precision.upper()} is not shown to be faster than {wider.subject.precision}"
        ratio = _describe_ratio(row, other, ratios, objective)
        notes.append(
            f"{row.label}: {seen} ({ratio})" + (f"; {about.causes}" if about.causes else "")
        )
    return notes


def _describe_ratio(
    row: ComparisonRow, other: ComparisonRow, ratios: _Ratios, objective: str
) -> str:
    """`1.08 times as fast [0.97, 1.20]`, or without an interval where the table tests nothing."""
    (low, high), value = (0.0, 0.0), 0.0
    if (ratio := ratios.get((row.id, other.id, objective))) is not None:
        (low, high), _ = ratio.interval(PAIR_CONFIDENCE)
        value = exp(ratio.change.value)
    elif (ratio := ratios.get((other.id, row.id, objective))) is not None:
        (least, most), _ = ratio.interval(PAIR_CONFIDENCE)
        low, high, value = 1 / most, 1 / least, exp(-ratio.change.value)
    else:
        ours, theirs = row.throughput_images_per_s, other.throughput_images_per_s
        assert ours is not None
        assert theirs is not None
        return f"{ours.value / theirs.value:.2f} times as fast, no interval: measure both in one run, with three processes or more"
    return f"{value:.2f} times as fast [{low:.2f}, {high:.2f}]"
