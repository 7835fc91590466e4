"""The history of a model: the figures of its runs in order, and their changes.

A series is one figure of one build under one load on one kind of machine, and a point is one run's: all processes of the run that
measured it, as `compare` joins them. What `compare` would not set side by side is in another series, or left out and named.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from optpipe.core.entries import Environment
from optpipe.core.errors import escape
from optpipe.core.history import (
    Finding,
    HistoryChange,
    HistoryPoint,
    HistoryRun,
    HistorySeries,
)
from optpipe.core.metrics.contract import Metric
from optpipe.core.metrics.measured import SHOWN
from optpipe.core.metrics.registry import PLUGINS
from optpipe.core.metrics.scores import Score
from optpipe.core.quantity import Dimension, Estimate, choose_dimension, format_quantity
from optpipe.core.records import group_pairs
from optpipe.core.wording import Argument
from optpipe.measure.comparison_rows import RowNames, get_build_key
from optpipe.measure.groups import ProcessGroup, RecordedMeasurement, explain_clock_difference
from optpipe.measure.past_runs import Past, PastRun
from optpipe.stats.changes import (
    LEAST_RUNS,
    MOST_RUNS,
    Split,
    count_runs_to_show,
    find_changes,
)
from optpipe.stats.means import compute_mean_interval


def list_history_runs(past: Past) -> list[HistoryRun]:
    return [_describe_run(past_run, past) for past_run in past.runs]


def _describe_run(past_run: PastRun, past: Past) -> HistoryRun:
    info = past_run.run.info
    if past_run.measured:
        subjects = [recorded.measurement.subject for recorded in past_run.measured]
        builds = [f"{subject.backend} {subject.precision}" for subject in subjects]
        model = str(subjects[-1].model)
        loads = len({recorded.measurement.key for recorded in past_run.measured})
        invalid = sum(not recorded.measurement.is_valid for recorded in past_run.measured)
        result = f"{loads} load{'s' if loads > 1 else ''}"
        result += f", {invalid} of {len(past_run.measured)} processes INVALID" if invalid else ""
    else:
        builds = [score.build for score in past_run.scores]
        model = info.model or past.names[0]
        firsts = {score.build: score for score in reversed(past_run.scores)}
        result = "; ".join(
            f"{build} {score.score.title} {format_quantity(score.figure.value, Dimension.SHARE)}"
            for build, score in reversed(firsts.items())
        )
    return HistoryRun(
        past_run.run.name,
        past_run.run.kind,
        str(past_run.workspace),
        past_run.started_utc,
        model,
        tuple(dict.fromkeys(builds)),
        result,
        commit=info.commit,
        doubt=past_run.doubt,
    )


@dataclass(frozen=True, slots=True)
class _RunFigure:
    """A figure of one run before the series are made."""

    key: tuple[object, ...]
    label: tuple[str, str, str]
    """Build, load or data, machine."""
    metric: Metric | Score
    past_run: PastRun
    artifact: str
    figure: Estimate
    newest: RecordedMeasurement | None = None


def make_series(past: Past, *, across: bool = False) -> tuple[list[HistorySeries], list[str]]:
    """The series with their changes, and what was left out of them, in words."""
    doubted = [past_run for past_run in past.runs if past_run.doubt]
    runs = [past_run for past_run in past.runs if not past_run.doubt]
    notes = [
        f"{past_run.run.name} is in no series: {past_run.doubt}; a clock was wrong"
        for past_run in doubted
    ]
    every = [recorded for past_run in runs for recorded in past_run.measured]
    entries = [
        *_list_measured(runs, RowNames(every), past, across=across),
        *_list_scores(runs, past),
    ]
    grouped = group_pairs((entry.key, entry) for entry in entries)
    kept = [_keep_clock(group, notes, across=across) for group in grouped.values()]
    judged = [[entry for entry in group if _is_judged(entry.metric)][-MOST_RUNS:] for group in kept]
    changes = find_changes([[entry.figure.value for entry in group] for group in judged])
    series = [
        _series_from_group(group, of, splits, past)
        for group, of, splits in zip(kept, judged, changes, strict=True)
    ]
    notes += _list_gaps(runs)
    return series, notes


def _is_judged(metric: Metric | Score) -> bool:
    return metric.in_history if isinstance(metric, Metric) else True


def _list_measured(
    runs: Sequence[PastRun], names: RowNames, past: Past, *, across: bool
) -> Iterator[_RunFigure]:
    for past_run in runs:
        groups = group_pairs(
            (_make_key(recorded, past, across=across), recorded) for recorded in past_run.measured
        )
        for key, tries in groups.items():
            group = ProcessGroup(tuple(tries))
            if not group.valid:
                continue
            newest = group.valid[-1]
            network = past.networks.get(newest.measurement.subject.artifact, "")
            build = names.configuration(newest) + (f" [{network}]" if network else "")
            label = build, str(newest.measurement.load), "" if across else _name_machine(newest)
            for metric in (*SHOWN, *PLUGINS.values()):
                figure = group.estimate(metric.name)
                if figure is not None:
                    artifact = newest.measurement.subject.artifact
                    yield _RunFigure(
                        (*key, metric.name), label, metric, past_run, artifact, figure, newest
                    )


def _make_key(recorded: RecordedMeasurement, past: Past, *, across: bool) -> tuple[object, ...]:
    """Equal for measurements of one series: of the same network, build, settings, load, and kind of machine."""
    subject = recorded.measurement.subject
    _, backend, precision, device, _ = get_build_key(recorded)
    network = past.networks.get(subject.artifact, "")
    settings = tuple(subject.settings.items())
    place = "" if across else _name_machine(recorded)
    return network, place, backend, precision, device, settings, *recorded.measurement.load.key


def _name_machine(recorded: RecordedMeasurement) -> str:
    """The GPU and the CPU, or the CPU alone for what runs on it. A driver is no other machine: it may be the cause of a change."""
    cpu = recorded.environment.get_fact("cpu")
    on_cpu = recorded.measurement.subject.device == "cpu"
    return cpu if on_cpu else f"{recorded.environment.get_fact('gpu')}, {cpu}"


def _list_scores(runs: Sequence[PastRun], past: Past) -> Iterator[_RunFigure]:
    for past_run in runs:
        for score in past_run.scores:
            network = past.networks.get(score.artifact, "")
            label = score.build + (f" [{network}]" if network else ""), score.data, ""
            key = "score", *label, score.score.name
            yield _RunFigure(key, label, score.score, past_run, score.artifact, score.figure)


def _keep_clock(group: list[_RunFigure], notes: list[str], *, across: bool) -> list[_RunFigure]:
    """Without runs at another clock of the GPU than the newest, which `compare` would not compare either."""
    newest = group[-1].newest
    if across or newest is None:
        return group
    apart = {
        at: why
        for at, entry in enumerate(group)
        if entry.newest is not None and (why := explain_clock_difference(newest, entry.newest))
    }
    if apart:
        build, about, _ = group[-1].label
        said = f"{build}, {about}: {len(apart)} of {len(group)} runs are left out: {apart[max(apart)]}; "
        notes.append(said + "pass " + Argument("across") + " to keep them")
    return [entry for at, entry in enumerate(group) if at not in apart]


def _list_gaps(runs: Sequence[PastRun]) -> Iterator[str]:
    """Runs without a figure, since everything in them is INVALID."""
    gaps = [
        past_run.run.name
        for past_run in runs
        if past_run.measured
        and not any(recorded.measurement.is_valid for recorded in past_run.measured)
    ]
    if gaps:
        count = f"{len(gaps)} run{'s have' if len(gaps) > 1 else ' has'} no VALID measurement"
        yield f"{count}: {', '.join(gaps[-3:])}{' and others' if len(gaps) > 3 else ''}"


def _series_from_group(
    group: Sequence[_RunFigure], judged: Sequence[_RunFigure], splits: Sequence[Split], past: Past
) -> HistorySeries:
    newest = group[-1]
    metric = newest.metric
    sample = "image" if newest.newest is None else newest.newest.measurement.load.sample
    build, about, machine = newest.label
    higher = not metric.lower_is_better if isinstance(metric, Score) else metric.higher_is_better
    points = tuple(
        HistoryPoint(
            entry.past_run.run.name, entry.past_run.started_utc, entry.artifact, entry.figure
        )
        for entry in group
    )
    levels = _list_levels(judged, splits)
    changes = tuple(
        _make_change(judged, split, at, levels, past, higher=higher)
        for at, split in enumerate(splits)
    )
    return HistorySeries(
        build=build,
        about=about,
        machine=machine,
        metric=metric.name,
        title=metric.title,
        unit=Dimension.SHARE
        if isinstance(metric, Score)
        else choose_dimension(metric.dimension, sample),
        higher_is_better=higher,
        points=points,
        changes=changes,
        judged=_is_judged(metric),
    )


def _list_levels(judged: Sequence[_RunFigure], splits: Sequence[Split]) -> list[Estimate]:
    """The mean over the runs of every part between two changes, with its interval."""
    cuts = [0, *(split.at for split in splits), len(judged)]
    levels = []
    for begin, end in pairwise(cuts):
        values = [entry.figure.value for entry in judged[begin:end]]
        interval = compute_mean_interval(values, 0.95)
        levels.append(Estimate(sum(values) / max(len(values), 1), *(interval or ())))
    return levels


def _make_change(
    judged: Sequence[_RunFigure],
    split: Split,
    at: int,
    levels: Sequence[Estimate],
    past: Past,
    *,
    higher: bool,
) -> HistoryChange:
    before, after = levels[at], levels[at + 1]
    last, first = judged[split.at - 1], judged[split.at]
    return HistoryChange(
        last_before=last.past_run.run.name,
        first_after=first.past_run.run.name,
        before=before,
        after=after,
        p_value=split.p_value,
        worse=(after.value < before.value) is higher,
        recovered=any(
            _has_reached(level, before, higher=higher) for level in levels[at + 2 :][-1:]
        ),
        differences=tuple(list_differences(last, first, past)),
    )


def _has_reached(level: Estimate, wanted: Estimate, *, higher: bool) -> bool:
    """Whether a level is as good as `wanted`, or their intervals meet."""
    best = (level.high or level.value) if higher else -(level.low or level.value)
    least = (wanted.low or wanted.value) if higher else -(wanted.high or wanted.value)
    return best >= least


def list_differences(last: _RunFigure, first: _RunFigure, past: Past) -> Iterator[str]:
    """What differs between the runs of two figures: `onnxruntime-gpu: 1.30.0 and 1.31.1`."""
    pairs = _list_facts(last, past), _list_facts(first, past)
    for name in dict.fromkeys((*pairs[0], *pairs[1])):
        before, after = (facts.get(name, "") for facts in pairs)
        if before != after:
            yield f"{name}: {escape(before) or 'none'} and {escape(after) or 'none'}"


def _list_facts(entry: _RunFigure, past: Past) -> dict[str, str]:
    info, environment = entry.past_run.run.info, entry.past_run.run.manifest.environment
    known = past.builds.get(entry.artifact)
    facts = {"commit": info.commit[:12]}
    facts |= {"build": entry.artifact, "model": known.content if known else ""}
    facts |= {"optpipe": info.optpipe, **_list_versions(environment)}
    if known is not None:
        built = _list_versions(known.entry.manifest.environment)
        facts |= {f"{name} of the build": version for name, version in built.items()}
    return facts


def _list_versions(environment: Environment) -> dict[str, str]:
    facts = {name: environment.get_fact(name) for name in ("gpu", "driver", "cpu", "python")}
    cores = {} if environment.cpu_count is None else {"CPU cores": str(environment.cpu_count)}
    return {**facts, **cores, **environment.packages}


def choose_finding(series: Sequence[HistorySeries]) -> tuple[Finding, int]:
    """Whether any figure is worse than it was, and the runs from which on a change can show; TOO_FEW if no figure has so many."""
    judged = [line for line in series if line.judged]
    needed = count_runs_to_show(sum(len(line.points) >= 2 * LEAST_RUNS for line in judged))
    if any(line.regressions for line in judged):
        return Finding.REGRESSION, needed
    able = any(len(line.points) >= needed for line in judged)
    return (Finding.NO_REGRESSION if able else Finding.TOO_FEW), needed
