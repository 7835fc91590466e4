"""The plan of a sweep (stored, impossible and runnable cells, with expected times), and its rows."""

from collections import Counter
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from math import floor
from statistics import fmean, median

from optpipe.core.errors import BadInputError, ExitStatus
from optpipe.core.files import hash_value
from optpipe.core.quantity import Estimate
from optpipe.core.records import group_pairs, plain_from_record
from optpipe.core.wording import Argument
from optpipe.sweep.job import LOAD_S, START_S, Cell, JobRecord, JobState, Recipe, Task
from optpipe.sweep.matrix import find_obstacle
from optpipe.sweep.slots import Slot


class Standing(StrEnum):
    STORED = "stored"
    RUN = "to run"
    IMPOSSIBLE = "impossible"
    ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True)
class SweepRow:
    cell: Cell
    state: str
    """A `JobState`, or the `Standing` of a cell that was not run."""
    reason: str = ""
    key: str | None = None
    fingerprint: str | None = None
    """Rows of several environments are not comparable."""
    host: str | None = None
    slot: str | None = None
    artifact: str | None = None
    run: str | None = None
    processes: int = 0
    sample: str = "image"
    figures: Mapping[str, Estimate] | None = None
    """`p50` and other percentiles in ns, `throughput` in images or samples per s."""
    seconds: float | None = None
    """Measured, or estimated from earlier jobs for a cell to run."""
    attempts: tuple[str, ...] = ()
    stored: bool = False
    bad_input: bool = False
    """Whether it is impossible on every machine: the request or the model is wrong."""


def plan_sweep(
    cells: Sequence[Cell],
    slots: Sequence[Slot],
    stored: Mapping[str, Sequence[JobRecord]],
    *,
    again: bool = False,
) -> tuple[SweepRow, ...]:
    """A row for each cell. `again` ignores stored results."""
    jobs = [records[0] for records in stored.values()]
    known = [
        (job.cell.recipe, job.seconds / _weigh(job.cell))
        for job in jobs
        if job.run and job.seconds > 0
    ]
    times = group_pairs(
        (key, seconds) for recipe, seconds in known for key in _list_likenesses(recipe)
    )
    by_cell = group_pairs((job.cell.key, job) for job in jobs)
    here = group_pairs((slot.kind, slot.fingerprint) for slot in slots)
    planned = []
    for cell in cells:
        records = by_cell.get(cell.key, [])
        ours = [
            record
            for record in records
            if record.finished and record.fingerprint in here.get(cell.kind, [])
        ]
        if ours and not again:
            planned.append(replace(_row_from_record(ours[0], stored=True), cell=cell))
        elif (why := find_obstacle(cell)) is not None:
            planned.append(SweepRow(cell, Standing.IMPOSSIBLE, why, sample=cell.load.sample))
        elif cell.kind in here:
            planned.append(
                SweepRow(
                    cell, Standing.RUN, sample=cell.load.sample, seconds=_estimate(cell, times)
                )
            )
        elif (done := next((record for record in records if record.finished), None)) is not None:
            planned.append(replace(_row_from_record(done, stored=True), cell=cell))
        else:
            reason = (
                f"no {cell.kind} here; run the sweep on a host that has one and merge its workspace"
            )
            planned.append(SweepRow(cell, Standing.ELSEWHERE, reason, sample=cell.load.sample))
    return tuple(planned)


def estimate_total(rows: Sequence[SweepRow], slots: Sequence[Slot]) -> float | None:
    """Wall-clock seconds over the slots; None without earlier jobs."""
    left = [row for row in rows if row.state == Standing.RUN]
    known = [row.seconds for row in left if row.seconds is not None]
    if not known and left:
        return None
    total = sum(known) + (len(left) - len(known)) * (sum(known) / len(known) if known else 0.0)
    used = {row.cell.kind for row in left}
    return total / max(1, sum(slot.kind in used for slot in slots))


_Times = Mapping[tuple[str, ...], Sequence[float]]


def _estimate(cell: Cell, times: _Times) -> float | None:
    seconds = next(filter(None, map(times.get, _list_likenesses(cell.recipe))), None)
    return median(seconds) * _weigh(cell) if seconds else None


def _weigh(cell: Cell) -> float:
    """How long a job takes, relative to one process at batch size 0.

    A load at batch 59 took 1.15 to 2.2 times as long as one at batch 6 (means of five sizes, four builds; reports/h200/sweep-fleet.json).
    """
    return cell.processes * (1 + cell.load.batch_size / 64)


def _list_likenesses(recipe: Recipe) -> tuple[tuple[str, ...], ...]:
    """Properties that a recipe shares with others of similar duration, the closest first."""
    engine = recipe.backend, recipe.device
    return (recipe.model, recipe.precision, *engine), (recipe.model, *engine), engine, ()


def list_tasks(rows: Sequence[SweepRow], loads_per_process: int) -> tuple[Task, ...]:
    """Tasks of at most `loads_per_process` cells, in the order of the matrix."""
    left = [row for row in rows if row.state == Standing.RUN]
    keys = [
        (hash_value(plain_from_record(row.cell.recipe)), row.cell.kind, row.cell.options)
        for row in left
    ]
    tasks = []
    for group in group_pairs(zip(keys, left, strict=True)).values():
        for at in range(0, len(group), loads_per_process):
            part = group[at : at + loads_per_process]
            cells = tuple(row.cell for row in part)
            guesses = [
                _weigh(cell) * (LOAD_S + cell.load.warm_up_seconds + cell.load.min_seconds)
                for cell in cells
            ]
            times = [
                guess if row.seconds is None else row.seconds
                for row, guess in zip(part, guesses, strict=True)
            ]
            tasks.append(Task(cells[0].recipe, cells[0].kind, cells, fmean(times)))
    return tuple(tasks)


def select_shard(cells: Sequence[Cell], shard: tuple[int, int] | None) -> tuple[Cell, ...]:
    """Part i of n, counted from 1: adjacent cells stay together, so that few recipes are built twice."""
    if shard is None:
        return tuple(cells)
    part, parts = shard
    return tuple(cells[(part - 1) * len(cells) // parts : part * len(cells) // parts])


def shard_from_text(text: str) -> tuple[int, int]:
    """Reads `--shard 2/8`. Raises BadInputError."""
    part, _, parts = text.partition("/")
    with suppress(ValueError):
        if 1 <= int(part) <= int(parts):
            return int(part), int(parts)
    raise BadInputError(
        "expected I/N with 1 ≤ I ≤ N, such as 2/8", argument=Argument("shard", text)
    )


def sort_tasks(tasks: Iterable[Task]) -> list[Task]:
    """The longest first: with n slots the last ends at most 4/3 - 1/(3n) times as late as in the best order."""
    return sorted(tasks, key=lambda task: -task.expected_s)


def take_task(
    waiting: MutableSequence[Task], at: int, ends: Sequence[float], slots: int, now: float
) -> Task:
    """Removes the task at index `at` for a free slot of its kind, and puts back the loads that other slots finish sooner.

    `slots` counts the slots of the kind; `ends` are the times in seconds when those in use are expected to be free.
    """
    task = waiting.pop(at)
    if len(task.cells) < 2 or slots == 1:
        return task
    left_s = task.expected_s + START_S  # one more process has to start where the task is divided
    for other in waiting:
        if left_s >= task.expected_s * slots:  # the other slots have enough work meanwhile
            return task
        left_s += other.expected_s if other.kind == task.kind else 0.0
    free = sorted([*(max(now, end) for end in ends), *[now] * (slots - len(ends))])
    together = min(
        (left_s + total) / count for count, total in enumerate(accumulate(free), start=1)
    )
    count = max(1, floor((together - now - START_S) / task.load_s))
    if count < len(task.cells):
        rest = replace(task, cells=task.cells[count:])
        place = next(
            (at for at, other in enumerate(waiting) if other.expected_s <= rest.expected_s),
            len(waiting),
        )
        waiting.insert(place, rest)
    return replace(task, cells=task.cells[:count])


@dataclass(frozen=True, slots=True)
class SweepRecord:
    rows: tuple[SweepRow, ...]
    slots: tuple[str, ...]
    seconds: float
    estimate_s: float | None
    dry_run: bool
    interrupted: bool = False
    warnings: tuple[str, ...] = ()
    exit_status: int = 0

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(row.state for row in self.rows))


def fill_rows(rows: Sequence[SweepRow], records: Mapping[str, JobRecord]) -> tuple[SweepRow, ...]:
    """The rows with their results; `records` are those of this sweep by the key of their cell."""
    return tuple(
        row
        if (record := records.get(row.cell.key)) is None
        else replace(_row_from_record(record), cell=row.cell)
        for row in rows
    )


def _row_from_record(record: JobRecord, *, stored: bool = False) -> SweepRow:
    return SweepRow(
        record.cell,
        record.state,
        record.reason,
        key=record.key,
        fingerprint=record.fingerprint,
        host=record.host or None,
        slot=record.slot or None,
        artifact=record.artifact,
        run=record.run,
        processes=record.group.processes if record.group else 0,
        sample=record.sample,
        figures=None
        if record.group is None
        else {name: figure.estimate for name, figure in record.group.figures.items()},
        seconds=record.seconds,
        attempts=record.attempts,
        stored=stored,
        bad_input=record.bad_input,
    )


def judge_status(rows: Sequence[SweepRow], *, interrupted: bool, dry_run: bool) -> ExitStatus:
    states = {row.state for row in rows}
    if interrupted:
        return ExitStatus.INTERRUPTED
    if dry_run:
        return ExitStatus.DONE
    if JobState.FAILED in states:
        return ExitStatus.STAGE_FAILED
    if JobState.INVALID in states:
        return ExitStatus.INCONCLUSIVE
    if JobState.DONE in states:
        return ExitStatus.DONE
    return ExitStatus.BAD_INPUT if any(row.bad_input for row in rows) else ExitStatus.MISSING


def list_warnings(rows: Sequence[SweepRow]) -> list[str]:
    warnings = []
    for kind in dict.fromkeys(row.cell.kind for row in rows):
        prints = {row.fingerprint for row in rows if row.cell.kind == kind and row.fingerprint}
        if len(prints) > 1:
            problem = f"{kind}: rows are from {len(prints)} environments (driver, power limit or versions differ)"
            warnings.append(f"{problem}; do not compare them with each other")
    warnings += [
        f"{count} cell{'s' if count > 1 else ''} need{'' if count > 1 else 's'} {kind}, which is not available here"
        for kind, count in Counter(
            row.cell.kind for row in rows if row.state == Standing.ELSEWHERE
        ).items()
    ]
    return warnings
