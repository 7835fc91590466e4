"""Compares measurements: speedup against a baseline, the frontier, the best build for each goal.

A row is a build with its settings under one load (`Measurement.key`), over all processes that measured it. A speedup
is the ratio of the p50 latencies of two rows, with an interval if both have three or more processes. Claims (faster,
slower, dominated, best) use Holm's procedure over all pairs of rows, so that one table in a hundred of equal builds has
a false claim; builds of different runs are only compared if the scatter between runs is known.

A workspace is compared with everything that was measured in it: runs, artifacts, and their accuracy.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from math import exp, inf
from pathlib import Path

from optpipe.core.entries import ArtifactInfo, Environment, ModelInfo
from optpipe.core.errors import BadInputError
from optpipe.core.measurement import (
    Comparison,
    ComparisonRow,
    Goal,
    LoadSpec,
    Measurement,
    find_differing_settings,
    format_percentile_name,
    format_settings,
    read_measurements,
)
from optpipe.core.metrics.contract import Metric
from optpipe.core.metrics.measured import ENERGY, P50, P99, THROUGHPUT
from optpipe.core.metrics.scores import TOP1
from optpipe.core.metrics.sections import ACCURACY
from optpipe.core.plan import for_workspace
from optpipe.core.quantity import Dimension, Estimate, choose_dimension, format_quantity
from optpipe.core.records import group_pairs
from optpipe.core.wording import Argument, Call
from optpipe.evaluate.recompute import observe_accuracy
from optpipe.measure.figures import list_artifact_measurements, measurements_from_run
from optpipe.measure.groups import (
    FigureRatio,
    ProcessGroup,
    RecordedMeasurement,
    compare_groups,
    explain_clock_difference,
    find_environment_differences,
    find_run_scatter,
    merge_group,
)
from optpipe.measure.int8_notes import (
    check_int8_accuracy,
    check_int8_speed,
    find_int8_causes,
    pick_baseline,
)
from optpipe.measure.pair import PAIR_CONFIDENCE
from optpipe.measure.search import Slo
from optpipe.models.artifacts.lookup import (
    describe_network,
    explain_other_content,
    find_builds,
    find_by_id,
    judged_build_from_entry,
    require_one_model,
)
from optpipe.stats.means import Scatter, reject_by_holm
from optpipe.workspace.entry import MANIFEST, Entry, Manifest, Run, load_run, runs_from_files
from optpipe.workspace.runs import RUNS, list_runs
from optpipe.workspace.seal import find_approved_baseline
from optpipe.workspace.store import Store

METRICS: Mapping[Goal, tuple[Metric, ...]] = {
    Goal.LATENCY: (P99, P50),
    Goal.THROUGHPUT: (THROUGHPUT,),
    Goal.EFFICIENCY: (ENERGY,),
}
"""The metrics that show who is nearer to a goal, the first that both rows have."""
OBJECTIVES = {goal: str(goal) for goal in Goal} | {Goal.EFFICIENCY: ENERGY.name}
"""The words for what a row is better in."""


def _objectives(row: ComparisonRow) -> dict[str, float]:
    found = {name: _score(row, goal) for goal, name in OBJECTIVES.items()}
    found[ACCURACY.name] = row.top1.value if row.top1 else None
    return {name: value for name, value in found.items() if value is not None}


Claims = frozenset[tuple[str, str, str]]
"""(better row's id, worse row's id, objective) of every difference that is shown."""


def mark_frontier(rows: list[ComparisonRow], shown: Claims) -> list[ComparisonRow]:
    """Marks valid rows that no row of the same model and kind of load is shown to dominate."""
    judged = []
    for row in rows:
        rivals = [
            each for each in rows if each.valid and _kind(each) == _kind(row) and each is not row
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


def _kind(row: ComparisonRow) -> tuple[str, str, str, int | None]:
    return row.model, row.load.scenario, row.load.mode, row.load.length


def find_best_rows(
    rows: list[ComparisonRow], slo: Slo | None, shown: Claims
) -> tuple[dict[str, str | None], dict[str, str]]:
    """Row id by goal, None if no row is shown to be the best, and the reasons; with `slo` only rows that meet it."""
    models = sorted({row.model for row in rows})
    lengths = sorted({row.load.length for row in rows if row.load.length is not None})
    # the smallest network is not a better build of the others, nor is the shortest sequence
    for what, found, flag in (
        ("models", models, "--model"),
        ("sequence lengths", [*map(str, lengths)], "--length"),
    ):
        if len(found) > 1:
            reason = (
                f"{len(found)} {what} are compared ({', '.join(found)}); choose one with {flag}"
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
    found = row.latency_ns.get(format_percentile_name(slo.percent))
    return found is not None and found.high is not None and found.high <= slo.limit_ns


def _find_shown(rows: Sequence[ComparisonRow], goal: Goal) -> Metric | None:
    """The metric of the goal that all `rows` have."""
    has_all = (each for each in METRICS[goal] if all(each.read_row(row) for row in rows))
    return next(has_all, None)


def _score(row: ComparisonRow, goal: Goal) -> float | None:
    """The figure, negative if less is better; None without one."""
    metric = _find_shown([row], goal)
    found = metric.read_row(row) if metric else None
    return None if metric is None or found is None else -metric.loss_sign * found.value


def _describe_best(row: ComparisonRow, goal: Goal) -> str:
    metric = _find_shown([row], goal)
    found = metric.read_row(row) if metric else None
    assert metric is not None
    assert found is not None
    dimension = choose_dimension(metric.dimension, row.load.sample)
    return f"{metric.mark}{format_quantity(found.value, dimension)}"


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


@dataclass(frozen=True, slots=True)
class BuildFacts:
    size_bytes: int | None = None
    build_s: float | None = None
    top1: Estimate | None = None
    causes: str = ""
    accuracy: str | None = None
    """How the accuracy drop of an INT8 artifact may exceed its budget."""


def compare_measurements(
    measured: Sequence[RecordedMeasurement],
    *,
    baseline: str | None = None,
    against: Sequence[RecordedMeasurement] = (),
    known: Mapping[str, BuildFacts] | None = None,
    slo: Slo | None = None,
    across: bool = False,
) -> Comparison:
    """Compares with the measurements `against` of a `baseline`, by default with the FP32 build of each backend.

    Raises BadInputError if the measurements are from several machines and `across` is not set.
    """
    every = [*measured, *against]
    warnings = _check_environments(every, across=across)
    groups, names = _group_by_key(measured), _Names(every)
    baselines = _group_by_key(against) if baseline else groups
    known = known or {}
    facts = {
        key: known.get(group.newest.measurement.subject.artifact, BuildFacts())
        for key, group in groups.items()
    }
    rows, unmatched, notes, shown = _compare_groups(groups, baselines, names, facts, across=across)
    if baseline:
        loads = {_load(group) for group in groups.values()}
        alone = [
            _row_from_group(each, BuildFacts(), names)
            for each in baselines.values()
            if _load(each) not in loads
        ]
        reason = "only the baseline has a measurement at this load"
        unmatched |= {f"baseline: {row.label}": reason for row in alone}
    elif any(group.newest.measurement.subject.precision == "fp32" for group in groups.values()):
        baseline = "fp32 build of each backend"
    rows = mark_frontier(rows, shown)
    warnings += [*notes, *_list_int8_notes(rows, list(groups.values()), [*facts.values()])]
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
    )


def _compare_groups(
    groups: "_Groups",
    baselines: "_Groups",
    names: "_Names",
    facts: Mapping[tuple[object, ...], BuildFacts],
    *,
    across: bool,
) -> tuple[list[ComparisonRow], dict[str, str], list[str], Claims]:
    """A row per group with its speedup over the baseline; labels of rows without a counterpart, and why; notes; claims."""
    rows: list[ComparisonRow] = []
    every = [*groups.values(), *(baselines.values() if baselines is not groups else ())]
    names_of_figures = [metric.name for metrics in METRICS.values() for metric in metrics]
    scatters = {name: find_run_scatter(every, name) for name in names_of_figures}
    tests: dict[tuple[str, str, str], float] = {}
    speedups: dict[str, FigureRatio] = {}
    unmatched: dict[str, str] = {}
    notes: list[str] = []
    chosen: dict[str, list[int]] = {}
    for key, group in groups.items():
        row = _row_from_group(group, facts[key], names)
        other, said = _find_counterpart(group, baselines, names, own=baselines is groups)
        if (
            other is not None
            and not across
            and (apart := explain_clock_difference(group.newest, other.newest))
        ):
            other, said = None, f"{apart}; lock the clocks and measure again, or pass --across"
        if other is None:
            unmatched[row.label] = said
        elif other is not group:
            speedup, change, basis = _compute_speedup(group, other, scatters[P50.name])
            held_against = f"{_id(other.newest)}: {names.configuration(other.newest)}"
            row = replace(row, speedup=speedup, change=change, held_against=held_against)
            if isinstance(basis, FigureRatio):
                speedups[row.id] = basis
            elif basis:
                notes.append(basis)
            if said:
                chosen.setdefault(said, []).append(row.load.batch_size)
        rows.append(row)
    notes += [f"{said} (batch {', '.join(map(str, sizes))})" for said, sizes in chosen.items()]
    for (one, mine), (another, theirs) in combinations(zip(rows, groups.values(), strict=True), 2):
        if not (one.valid and another.valid and _kind(one) == _kind(another)):
            continue
        for goal, objective in OBJECTIVES.items():
            metric = _find_shown([one, another], goal) or METRICS[goal][-1]
            found = compare_groups(mine, theirs, metric.name, scatters[metric.name])
            if isinstance(found, FigureRatio):
                gains = metric.loss_sign * found.change.value < 0
                better, worse = (one, another) if gains else (another, one)
                tests[better.id, worse.id, objective] = found.p_value
    keys = [*tests, *speedups]
    p_values = [*tests.values(), *(each.p_value for each in speedups.values())]
    claimed = {
        key
        for key, hit in zip(keys, reject_by_holm(p_values, 1 - PAIR_CONFIDENCE), strict=True)
        if hit
    }
    for at, row in enumerate(rows):
        if row.id in speedups:
            faster = "faster" if speedups[row.id].change.value > 0 else "slower"
            rows[at] = replace(row, change=faster if row.id in claimed else "no difference shown")
    return rows, unmatched, notes, frozenset(key for key in claimed if isinstance(key, tuple))


_Groups = Mapping[tuple[object, ...], ProcessGroup]
_Build = tuple[str | None, str, str, str, str]
"""Model, backend, precision, device and the processor's name."""


class _Names:
    """Names of builds and settings that are unique within a comparison."""

    def __init__(self, measured: Sequence[RecordedMeasurement]) -> None:
        settings = group_pairs((_build(one), one.measurement.subject.settings) for one in measured)
        self.differing = {
            build: find_differing_settings(found) for build, found in settings.items()
        }

    def build(self, one: RecordedMeasurement) -> str:
        """`onnxruntime int8`, with its model first and its device or processor last if others differ in them."""
        model, backend, precision, device, processor = _build(one)
        several_models = len({each[0] for each in self.differing}) > 1
        places = [each[3:] for each in self.differing if each[:3] == (model, backend, precision)]
        place = device if sum(each[0] == device for each in places) == 1 else processor
        first, last = (
            f"{model} " if several_models else "",
            f" ({place})" if len(places) > 1 else "",
        )
        return f"{first}{backend} {precision}{last}"

    def setting(self, one: RecordedMeasurement) -> str:
        """`threads=2`: the settings that distinguish `one` from others of its build."""
        return format_settings(one.measurement.subject.settings, self.differing[_build(one)])

    def configuration(self, one: RecordedMeasurement) -> str:
        return f"{self.build(one)} {self.setting(one)}".rstrip()


def _group_by_key(
    measured: Sequence[RecordedMeasurement],
) -> dict[tuple[object, ...], ProcessGroup]:
    """The processes by processor and `Measurement.key`, of the last measured artifact only: a rebuilt artifact is another one."""

    def key(one: RecordedMeasurement) -> tuple[object, ...]:
        return _name_processor(one), *one.measurement.key

    ordered = sorted(
        measured, key=lambda one: (str(key(one)), one.measurement.started_utc, one.run)
    )
    groups = {}
    for found, tries in groupby(ordered, key=key):
        *_, newest = group = list(tries)
        artifact = newest.measurement.subject.artifact
        groups[found] = ProcessGroup(
            tuple(one for one in group if one.measurement.subject.artifact == artifact)
        )
    return groups


def _check_environments(every: Sequence[RecordedMeasurement], *, across: bool) -> list[str]:
    differences = {
        difference: one.run
        for one in every[1:]
        for difference in find_environment_differences(every[0].environment, one.environment)
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
    return [f"comparing across different machines (--across): {listed}"]


def _order(load: LoadSpec) -> tuple[str, str, int, float, int, int]:
    return (
        load.scenario,
        load.mode,
        load.streams,
        load.rate_per_s or 0.0,
        load.length or 0,
        load.batch_size,
    )


def _id(one: RecordedMeasurement) -> str:
    return f"{one.run}/{one.measurement.id}"


def _row_from_group(group: ProcessGroup, known: BuildFacts, names: _Names) -> ComparisonRow:
    one, found = (group.valid or group.tries)[-1], merge_group(group)
    subject = found.subject
    return ComparisonRow(
        id=_id(one),
        run=one.run,
        artifact=subject.artifact,
        model=subject.model or "",
        backend=subject.backend,
        precision=subject.precision,
        device=subject.device,
        load=found.load,
        build=names.build(one),
        valid=found.is_valid,
        reasons=tuple(reason.message for reason in found.reasons),
        reason_codes=found.invalid_codes,
        processes=group.count_processes(),
        left_out=len(group.left_out),
        samples=found.samples,
        latency_ns=found.latency_ns.percentiles if found.latency_ns else {},
        throughput_images_per_s=found.throughput_images_per_s,
        throughput_tokens_per_s=found.throughput_tokens_per_s,
        energy_j_per_image=found.energy_j_per_image,
        memory_bytes=max([each.measurement.memory_bytes or 0 for each in group.valid or (one,)])
        or None,
        size_bytes=known.size_bytes,
        build_s=known.build_s,
        top1=known.top1,
        settings=subject.settings,
        setting=names.setting(one),
        caveats=found.caveats,
        sources={} if found.samples_file is None else {found.samples_file: ""},
    )


def _find_counterpart(
    group: ProcessGroup, baselines: _Groups, names: _Names, *, own: bool
) -> tuple[ProcessGroup | None, str]:
    """The baseline's measurements of the same load: of the same build, or of the only build that it has.

    Prefers the same settings, otherwise takes the fastest. The text gives the reason for a missing counterpart, or
    which of several was taken.
    """
    of = group.newest.measurement
    where = str(of.load)
    same_load = {
        key: found.newest for key, found in baselines.items() if _load(found) == _load(group)
    }
    end = 5 if own else 4  # a given baseline may be of another processor
    backend, precision, *place = _build(group.newest)[1:end]
    wanted = (backend, "fp32" if own else precision, *place)
    fitting = {key: one for key, one in same_load.items() if _build(one)[1:end] == wanted}
    builds = {_build(one) for one in same_load.values()}
    if not fitting and not own and len(builds) == 1:
        fitting = same_load
    found = pick_baseline(
        of, [one.measurement for one in fitting.values()], lambda one: -(_get_p50(one) or inf)
    )
    if found is not None:
        key = next(key for key, one in fitting.items() if one.measurement is found)
        mine, theirs = names.configuration(group.newest), names.configuration(fitting[key])
        said = f"{mine} is compared with {theirs}"
        said += f", the fastest of {len(fitting)} settings" if len(fitting) > 1 else ""
        other = _build(fitting[key]) != _build(group.newest)
        settled = found.subject.settings == of.subject.settings or (len(fitting) == 1 and other)
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
    found = group.newest.measurement
    return found.subject.model, *found.load.key


def _build(one: RecordedMeasurement) -> _Build:
    of = one.measurement.subject
    return of.model, of.backend, of.precision, of.device, _name_processor(one)


def _name_processor(one: RecordedMeasurement) -> str:
    return one.environment.get_fact("cpu" if one.measurement.subject.device == "cpu" else "gpu")


def _compute_speedup(
    new: ProcessGroup, old: ProcessGroup, run_scatter: Scatter | None
) -> tuple[Estimate | None, str | None, FigureRatio | str]:
    """The ratio of the p50 latencies, why it is not judged, and its basis or a note. INVALID sides have no figure."""
    if not (new.valid and old.valid):
        return None, "not judged: INVALID", ""
    found = compare_groups(old, new, P50.name, run_scatter)
    if isinstance(found, FigureRatio):
        (low, high), _ = found.interval(PAIR_CONFIDENCE)
        return Estimate(exp(found.change.value), low, high), None, found
    before, after = (_get_p50(merge_group(each)) for each in (old, new))  # as the rows show
    if before is None or after is None:
        return None, None, ""
    notes = {
        "too few processes": "speedups of fewer than three processes are shown without a claim: the scatter between processes is not"
        " known; use optpipe bench --processes 5, or optpipe bench A --against B",
        "different runs": "builds that were measured in different runs are not judged: how much runs differ is not known until one"
        " build was measured in two; measure both in one run, or use optpipe bench A --against B",
        "left out without it": "builds of which a process ended without a latency are not judged: nothing bounds what it would add;"
        " measure them again, or use optpipe bench A --against B",
    }
    return Estimate(before / after), f"not judged: {found}", notes[found]


def _get_p50(one: Measurement) -> float | None:
    found = None if one.latency_ns is None else one.latency_ns.percentile(50.0)
    return None if found is None else found.value


def _list_int8_notes(
    rows: Sequence[ComparisonRow], groups: Sequence[ProcessGroup], of: Sequence[BuildFacts]
) -> list[str]:
    """INT8 builds that may exceed their accuracy budget, then INT8 builds not shown to be faster than a wider type.

    `groups` and `of` are parallel to `rows`.
    """
    found = [
        f"{row.build}: {about.accuracy}"
        for row, about in zip(rows, of, strict=True)
        if about.accuracy
    ]
    measured = [(_name_processor(group.newest), merge_group(group)) for group in groups]
    for row, (where, one), about in zip(rows, measured, of, strict=True):
        beside = [other for place, other in measured if other.is_valid and place == where]
        if row.valid and (reason := check_int8_speed(one, beside, about.causes)) is not None:
            seen = f"{one.subject.precision.upper()} is not shown to be faster than {reason.evidence['than']}"
            ratio = f"{reason.evidence['ratio']:.2f} times as fast, and their 95% intervals overlap"
            found.append(
                f"{row.label}: {seen} ({ratio})" + (f"; {about.causes}" if about.causes else "")
            )
    return found


def find_bench_runs(workspace: Path, names: Sequence[str] = ()) -> tuple[Run, ...]:
    """The bench runs `names` (ids, unambiguous prefixes, or folders), or all.

    Raises BadInputError if one is missing, or if there are none.
    """
    present = list_runs(workspace, "bench")
    if not names and not present:
        raise _nothing_measured(workspace)
    return tuple(_find_run(name, present, workspace) for name in names) if names else present


def _nothing_measured(workspace: Path) -> BadInputError:
    build, bench = for_workspace("optpipe build MODEL"), for_workspace("optpipe bench MODEL")
    return BadInputError(f"no measurements in {workspace} yet; first run {build}, then {bench}")


def _find_measured_model(text: str, store: Store) -> str | None:
    """The measured model that `text` means as MODEL; None if it names a run, or if nothing of it was measured."""
    runs = list_runs(store.workspace, "bench")
    if (Path(text) / MANIFEST).is_file() or any(run.name.startswith(text) for run in runs):
        return None
    measured = {one.subject.model for run in runs for one in read_measurements(run.files)}
    builds = find_by_id(text, store) or find_builds(text, store, any_content=True)
    named = {each.info.model for each in builds} | {text}
    return next(iter(named & measured), None)


def _keep_meant(
    text: str, model: str, measured: Sequence[RecordedMeasurement], store: Store
) -> tuple[RecordedMeasurement, ...]:
    """Without builds of the name `model` that `text`, a name, file, or ID, does not mean, such as those of an earlier source.

    Raises BadInputError with the IDs if a name means several measured models.
    """
    builds = {one.measurement.subject.artifact for one in measured}
    by_id = find_by_id(text, store)
    meant = by_id or find_builds(text, store)
    if not by_id:
        require_one_model(text, [each for each in meant if each.id in builds], store)
    called = {each.id for each in store.list_entries(ArtifactInfo) if each.info.model == model}
    others = called - {each.id for each in meant}
    return tuple(one for one in measured if one.measurement.subject.artifact not in others)


def _find_run(name: str, present: Sequence[Run], workspace: Path) -> Run:
    if (Path(name) / MANIFEST).is_file():
        run = load_run(Path(name))
        if run.kind != "bench":
            raise BadInputError(f"{name} is a {run.kind} run; compare requires bench runs")
        return run
    found = [run for run in present if run.name == name] or [
        run for run in present if run.name.startswith(name)
    ]
    if len(found) != 1:
        known = ", ".join(run.name for run in (found or present)[-5:]) or "none"
        raise BadInputError(
            f"{name!r} matches {len(found)} bench runs in {workspace}; available: {known}"
        )
    return found[0]


def compare_workspace(
    store: Store,
    *,
    names: Sequence[str] = (),
    model: str | None = None,
    length: int | None = None,
    baseline: str | None = None,
    slo: Slo | None = None,
    across: bool = False,
) -> tuple[Comparison, tuple[RecordedMeasurement, ...], tuple[Run, ...]]:
    """Compares measurements; returns them and their runs too. `baseline` is a run, a workspace, or `approved` for the dossier of `model`.

    A single name that is a measured model and no run acts as `model`. A name, file, or ID selects the builds that `bench` would.
    """
    asked = model or (names[0] if len(names) == 1 else "")
    if asked and (meant := _find_measured_model(asked, store)) is not None:
        model, names = meant, () if tuple(names) == (asked,) else names
    held_against, against = _find_baseline(store, baseline, model)
    runs = find_bench_runs(store.workspace, names)
    if held_against is not None:
        runs = tuple(run for run in runs if run.name != held_against)
        if not runs:
            problem = f"the only run is the baseline {held_against}"
            raise BadInputError(
                f"{problem}; measure something to compare: " + Call("bench", "MODEL")
            )
    measured = tuple(one for run in runs for one in measurements_from_run(run))
    if model is not None:
        have = sorted({str(one.measurement.subject.model) for one in measured})
        measured = tuple(one for one in measured if one.measurement.subject.model == model)
        if have and not measured:
            raise BadInputError(
                f"no measurements of {model} in {store.workspace}; measured models: {', '.join(have)}"
            )
    if model is not None and not names:
        measured = _keep_meant(asked, model, measured, store)
        if not measured:
            raise BadInputError(
                f"no measurements of {asked}{explain_other_content(asked, store)}",
                remedy="build and measure it: " + Call("build", asked),
            )
    if length is not None:
        have = sorted(
            {str(one.measurement.load.length) for one in measured if one.measurement.load.length}
        )
        measured = tuple(one for one in measured if one.measurement.load.length == length)
        if not measured:
            raise BadInputError(
                f"no measurements at length {length}; measured lengths: {', '.join(have) or 'none'}"
            )
    if not measured:
        raise _nothing_measured(store.workspace)
    known = collect_build_facts(store.list_entries(ArtifactInfo), list_runs(store.workspace))
    found = compare_measurements(
        measured, baseline=held_against, against=against, known=known, slo=slo, across=across
    )
    return (
        replace(found, warnings=(*found.warnings, *_list_namesakes(measured, store))),
        measured,
        runs,
    )


def _list_namesakes(measured: Sequence[RecordedMeasurement], store: Store) -> Iterator[str]:
    """Models of which several networks were measured, as far as the store has them: a row is the newest build alone."""
    builds = {one.measurement.subject.artifact for one in measured}
    exported = {each.id: each for each in store.list_entries(ModelInfo)}
    stored = [each for each in store.list_entries(ArtifactInfo) if each.id in builds]
    known = ((each.info.model, (each.manifest.parents[0], each.id)) for each in stored)
    for model, pairs in group_pairs(each for each in known if each[1][0] in exported).items():
        if len(origins := {origin for origin, _ in pairs}) < 2:
            continue
        networks = {origin: describe_network(exported[origin]) for origin in origins}
        found = {
            network: artifact
            for origin, artifact in pairs
            if (network := networks[origin]) is not None
        }
        if len(found) > 1:
            listed = "; ".join(f"{network} ({artifact})" for network, artifact in found.items())
            yield f"{len(found)} networks are called {model}, and each row shows the newest: {listed}; name another's file to compare it"


def _find_baseline(
    store: Store, name: str | None, model: str | None
) -> tuple[str | None, tuple[RecordedMeasurement, ...]]:
    if name is None:
        return None, ()
    if (Path(name) / RUNS).is_dir():
        return name, tuple(
            one for run in find_bench_runs(Path(name)) for one in measurements_from_run(run)
        )
    if name != "approved":
        run = find_bench_runs(store.workspace, [name])[0]
        return run.name, measurements_from_run(run)
    if model is None:
        raise BadInputError(
            Argument("baseline", "approved") + " needs one model: add " + Argument("model", "MODEL")
        )
    if (files := find_approved_baseline(store.workspace, model)) is None:
        problem = f"no approved baseline for {model}"
        raise BadInputError(f"{problem}; approve one with " + Call("signoff approve", "DOSSIER"))
    return f"approved {model}", tuple(
        list_artifact_measurements(runs_from_files(files, "runs"), 0.95, None)
    )


def collect_build_facts(
    artifacts: Iterable[Entry[ArtifactInfo]],
    runs: Sequence[Run],
    exported: Mapping[str, Manifest] | None = None,
) -> dict[str, BuildFacts]:
    found = {}
    for entry in artifacts:
        build = judged_build_from_entry(entry, exported)
        top1 = observe_accuracy(runs, build, 0.95).get(TOP1.name)
        accuracy = check_int8_accuracy(runs, build)
        found[entry.id] = BuildFacts(
            size_bytes=build.size_bytes,
            build_s=entry.manifest.seconds,
            top1=None if top1 is None else Estimate(float(top1.value), top1.low, top1.high),
            causes=find_int8_causes(entry.info),
            accuracy=accuracy.message if accuracy else None,
        )
    return found
