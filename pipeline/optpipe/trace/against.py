"""Two profiles side by side: by stage, kind of work, module, and kernel, per iteration, with the scatter of iterations.

A change is named only if it is larger than the scatter: Welch's interval of the difference of means over iterations must not
hold 0, and the change must be at least 1% of the iteration or 5% of the row. A kernel that only one profile has `appeared`
or `vanished`; a module whose kernels became fewer and have another name was `fused`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from optpipe.stats.means import mean_from_values, subtract_means
from optpipe.trace.analysis import Analysis, array_from_column
from optpipe.trace.differences import Change, Difference, Side, StageDifference
from optpipe.trace.modules import locate_kernels
from optpipe.trace.read import TRACER_NOTE
from optpipe.trace.report import StageSubject

CONFIDENCE = 0.95
_WORTH_OF_ITERATION, _WORTH_OF_ROW = 0.01, 0.05
_MOST_ROWS = 500


@dataclass(frozen=True, slots=True)
class ComparedStage:
    """One side of a comparison."""

    subject: StageSubject
    measured: Analysis
    unprofiled_ns: float | None = None


def compare_stages(before: ComparedStage, after: ComparedStage) -> StageDifference:
    sides = before.measured, after.measured
    iterations = sides[0].iterations.height, sides[1].iterations.height
    per_iteration = min(iterations) > 0
    tables = [_tabulate(side, per_iteration=per_iteration) for side in sides]
    iteration_ns = max(float(tables[0].totals["time"].mean()), 1.0)

    def differ(part: str) -> tuple[Difference, ...]:
        return tuple(_compare_rows(part, tables, iteration_ns))[:_MOST_ROWS]

    named = [bool(table.modules) for table in tables]
    modules = differ("modules") if all(named) else ()
    return StageDifference(
        before=before.subject.name,
        after=after.subject.name,
        notes=(*_note_differences(before, after), *_note_modules(named)),
        per_iteration=per_iteration,
        iterations=iterations,
        totals=differ("totals"),
        kinds=differ("kinds"),
        modules=tuple(_name_fused(modules, tables)),
        kernels=differ("kernels"),
    )


Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Tables:
    """Time by iteration (one entry in total) of each row."""

    totals: Mapping[str, Values]
    kinds: Mapping[str, Values]
    modules: Mapping[str, Values]
    kernels: Mapping[str, Values]
    counts: Mapping[tuple[str, str], float]
    """Launches per iteration by part and name."""
    kernels_of: Mapping[str, frozenset[str]]
    """The kernels of each module."""


def _tabulate(side: Analysis, *, per_iteration: bool) -> _Tables:
    rows = side.iterations.sort("start_ns") if per_iteration else side.iterations.clear()
    count = max(rows.height, 1)
    starts = array_from_column(rows, "start_ns")
    if per_iteration:
        ends = array_from_column(rows, "end_ns")
        totals = {"time": np.append(np.diff(starts), ends[-1] - starts[-1]).astype(np.float64)}
    else:
        totals = {"time": np.array([side.timeline.span_ns], dtype=np.float64)}
    launches = locate_kernels(side)
    if launches.is_empty():
        launches = side.launches.select(
            "called_ns", "kernel_ns", pl.col("name").cast(pl.String).alias("kernel")
        ).with_columns(path=pl.lit(""))
    at = np.zeros(launches.height, dtype=np.int64)
    if per_iteration:
        at = np.searchsorted(starts, array_from_column(launches, "called_ns"), side="right") - 1
    located = launches.with_columns(iteration=pl.Series(at)).filter(pl.col("iteration") >= 0)
    kinds = side.kernels.select("name", "kind")
    located = located.join(kinds, left_on="kernel", right_on="name", how="left")
    parts: dict[str, dict[str, Values]] = {}
    counts: dict[tuple[str, str], float] = {("totals", "time"): 1.0}
    for part, column in (("kinds", "kind"), ("modules", "path"), ("kernels", "kernel")):
        named = located.filter(pl.col(column).fill_null("") != "")
        table = named.group_by(column, "iteration").agg(pl.col("kernel_ns").sum(), pl.len())
        values: dict[str, Values] = {}
        for (name,), group in table.group_by(column):
            times = np.zeros(count)
            times[group["iteration"].to_numpy()] = group["kernel_ns"].to_numpy()
            values[str(name)] = times
            counts[part, str(name)] = float(group["len"].sum()) / count
        parts[part] = values
    if side.trace.kernels.height:
        totals["kernels"] = sum(parts["kinds"].values(), np.zeros(count))
        counts["totals", "kernels"] = located.height / count
    else:  # the CPU side: ranges by name
        parts["modules"] = _tabulate_ranges(side, starts, count, counts)
    kernels_of: dict[str, frozenset[str]] = {}
    if located.height:
        for (path,), group in located.group_by("path"):
            kernels_of[str(path)] = frozenset(group["kernel"].to_list())
    return _Tables(totals, parts["kinds"], parts["modules"], parts["kernels"], counts, kernels_of)


def _tabulate_ranges(
    side: Analysis, starts: npt.NDArray[np.int64], count: int, counts: dict[tuple[str, str], float]
) -> dict[str, Values]:
    own = "" if side.iterations.is_empty() else str(side.iterations["family"][0])
    values: dict[str, Values] = {}
    for (name,), group in side.projection.filter(pl.col("family") != own).group_by("family"):
        at = np.zeros(group.height, dtype=np.int64)
        if starts.size:
            at = np.searchsorted(starts, array_from_column(group, "start_ns"), side="right") - 1
        times = np.zeros(count)
        np.add.at(times, at[at >= 0], group["wall_ns"].to_numpy()[at >= 0])
        values[str(name)] = times
        counts["modules", str(name)] = group.height / count
    return values


def _compare_rows(
    part: str, tables: Sequence[_Tables], iteration_ns: float
) -> Iterator[Difference]:
    """Rows of both sides, largest change first."""
    differences = []
    before, after = (getattr(table, part) for table in tables)
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        counts = [table.counts.get((part, name), 0.0) for table in tables]
        sides = _summarize(old, counts[0]), _summarize(new, counts[1])
        change_ns = sides[1].mean_ns - sides[0].mean_ns
        interval = _compute_interval(old, new)
        if old is None:
            change = Change.APPEARED
        elif new is None:
            change = Change.VANISHED
        else:
            worth_ns = min(_WORTH_OF_ITERATION * iteration_ns, _WORTH_OF_ROW * sides[0].mean_ns)
            certain = interval is not None and not interval[0] <= 0 <= interval[1]
            notable = certain and abs(change_ns) >= worth_ns
            change = (Change.SLOWER if change_ns > 0 else Change.FASTER) if notable else Change.SAME
        differences.append(Difference(name, *sides, change_ns, interval, change))
    yield from sorted(
        differences, key=lambda difference: (-abs(difference.change_ns), difference.name)
    )


def _summarize(values: Values | None, count: float) -> Side:
    if values is None:
        return Side(0.0, 0.0, None)
    deviation = float(values.std(ddof=1)) if values.size > 1 else None
    return Side(count, float(values.mean()), deviation)


def _compute_interval(before: Values | None, after: Values | None) -> tuple[float, float] | None:
    """Of the change of means; None for fewer than MIN_VALUES iterations of either, or if both sides do not scatter."""
    old, new = (
        None if values is None else mean_from_values(values.tolist()) for values in (before, after)
    )
    if old is None or new is None or old.error == new.error == 0:
        return None
    return subtract_means(new, old).interval(CONFIDENCE)


def _name_fused(rows: Sequence[Difference], tables: Sequence[_Tables]) -> Iterator[Difference]:
    """A module that runs fewer kernels than before, at least one of them new."""
    for row in rows:
        launches = [table.counts.get(("modules", row.name), 0.0) for table in tables]
        names = [table.kernels_of.get(row.name, frozenset()) for table in tables]
        fused = 0 < launches[1] < launches[0] and bool(names[1] - names[0])
        yield (
            row
            if not fused
            else Difference(
                row.name, row.before, row.after, row.change_ns, row.interval_ns, Change.FUSED
            )
        )


def _note_differences(before: ComparedStage, after: ComparedStage) -> Iterator[str]:
    earlier, later = before.subject, after.subject
    for what, values in (
        ("precision", (earlier.precision, later.precision)),
        ("device", (earlier.device, later.device)),
        ("batch size", (earlier.batch_size, later.batch_size)),
        ("length", (earlier.length, later.length)),
        ("build", (earlier.artifact, later.artifact)),
        ("GPU", tuple(_name_gpus(side) for side in (before, after))),
        ("profiler", tuple(_name_tracer(side) for side in (before, after))),
        ("iterations", (before.measured.iterations.height, after.measured.iterations.height)),
    ):
        if values[0] != values[1]:
            yield f"{what}: {values[0] or 'unknown'} before, {values[1] or 'unknown'} after"


def _note_modules(named: Sequence[bool]) -> Iterator[str]:
    """A recording without marks of modules has none to compare, and those of the other side did not appear."""
    if any(named) and not all(named):
        where = "before" if named[0] else "after"
        yield f"modules: named only {where}, so they are not compared; record both with them"


def _name_tracer(side: ComparedStage) -> str:
    return side.measured.trace.tracer.partition(TRACER_NOTE)[0]


def _name_gpus(side: ComparedStage) -> str:
    used = sorted(set(side.measured.trace.kernels["device"].to_list()))
    gpus = side.measured.trace.gpus
    return ", ".join(gpus[at].name for at in used if at is not None and at < len(gpus))
