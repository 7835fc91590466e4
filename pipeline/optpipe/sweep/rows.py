"""The table of a sweep: a row for every cell, whatever came of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optpipe.core.errors import ExitStatus
from optpipe.core.estimate import Estimate
from optpipe.core.verdict import Verdict
from optpipe.sweep.job import Cell, JobRecord, JobState
from optpipe.sweep.plan import PlannedCell, Standing, SweepPlan


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One cell and what is known of it."""

    cell: Cell
    state: str
    """A `JobState`, or a `Standing` of what was not run."""
    reason: str = ""
    key: str | None = None
    fingerprint: str | None = None
    """Of its environment: rows of several are not to be mixed."""
    host: str | None = None
    clock_ahead_s: float = 0.0
    """Of the host, by the clock of the sweep's driver; 0 where they agree."""
    slot: str | None = None
    artifact: str | None = None
    run: str | None = None
    processes: int = 0
    """VALID ones."""
    sample: str = "image"
    """What the throughput counts: `image` or `sample`."""
    figures: Mapping[str, Estimate] | None = None
    """`p50` and other percentiles in ns, `throughput` in images or samples per s."""
    seconds: float | None = None
    """Measured; of what is to run, estimated from earlier jobs."""
    attempts: tuple[str, ...] = ()
    stored: bool = False


@dataclass(frozen=True, slots=True)
class CellVerdict:
    """One cell against its baseline."""

    cell: str
    label: str
    verdict: Verdict
    reason: str
    ratio: Estimate | None = None
    """Of the p50 latencies, now over baseline: above 1 is slower."""
    p_value: float | None = None
    """That it is no slower than the tolerance."""


@dataclass(frozen=True, slots=True)
class Regression:
    """All cells against their baselines."""

    baseline: str
    tolerance: float
    level: float
    """Probability of any false FAIL."""
    method: str
    """What holds it over all cells."""
    cells: tuple[CellVerdict, ...]

    @property
    def verdict(self) -> Verdict:
        """FAIL where a cell fails, PASS where all pass."""
        verdicts = {one.verdict for one in self.cells}
        if Verdict.FAIL in verdicts:
            return Verdict.FAIL
        return Verdict.PASS if verdicts == {Verdict.PASS} else Verdict.INCONCLUSIVE


@dataclass(frozen=True, slots=True)
class SweepRecord:
    """The JSON document of `optpipe sweep`."""

    rows: tuple[SweepRow, ...]
    slots: tuple[str, ...]
    seconds: float
    estimate_s: float | None
    dry_run: bool
    serialized: bool
    """Whether GPUs of this host timed one after the other."""
    interrupted: bool = False
    regression: Regression | None = None
    """Against a baseline, where one was given."""
    warnings: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    exit_status: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """How many rows are in each state."""
        return dict(Counter(row.state for row in self.rows))


def make_rows(plan: SweepPlan, records: Mapping[str, JobRecord]) -> tuple[SweepRow, ...]:
    """A row per cell; `records` are those of this sweep by the key of their cell."""
    return tuple(_make_row(one, records.get(one.cell.key)) for one in plan.cells)


def _make_row(planned: PlannedCell, found: JobRecord | None) -> SweepRow:
    record = found or planned.record
    if record is None:
        return SweepRow(
            planned.cell, planned.standing, planned.reason, sample=planned.cell.load.sample, seconds=planned.estimate_s
        )
    figures = None if record.group is None else {name: one.estimate for name, one in record.group.figures.items()}
    return SweepRow(
        planned.cell,
        record.state,
        record.reason,
        key=record.key,
        fingerprint=record.fingerprint,
        host=record.place.host if record.place else None,
        clock_ahead_s=record.place.clock_ahead_s if record.place else 0.0,
        slot=record.place.slot if record.place else None,
        artifact=record.artifact,
        run=record.run,
        processes=record.group.processes if record.group else 0,
        sample=record.sample,
        figures=figures,
        seconds=record.seconds,
        attempts=record.attempts,
        stored=found is None,
    )


def judge_status(rows: Sequence[SweepRow], *, interrupted: bool, dry_run: bool) -> ExitStatus:
    """INTERRUPTED; STAGE_FAILED where a cell failed, INCONCLUSIVE where one is INVALID, MISSING where none could be done."""
    states = {row.state for row in rows}
    if interrupted:
        return ExitStatus.INTERRUPTED
    if dry_run:
        return ExitStatus.DONE
    if JobState.FAILED in states:
        return ExitStatus.STAGE_FAILED
    if JobState.INVALID in states:
        return ExitStatus.INCONCLUSIVE
    return ExitStatus.DONE if JobState.DONE in states else ExitStatus.MISSING


def list_warnings(rows: Sequence[SweepRow]) -> list[str]:
    """What a reader of the table must know: environments that differ within a kind."""
    found = []
    for kind in dict.fromkeys(row.cell.kind for row in rows):
        prints = {row.fingerprint for row in rows if row.cell.kind == kind and row.fingerprint}
        if len(prints) > 1:
            found.append(
                f"{kind}: rows are from {len(prints)} environments (driver, power limit or versions differ); do not compare "
                "them with each other"
            )
    clocks = {row.host: row.clock_ahead_s for row in rows if row.clock_ahead_s}
    found += [
        f"the clock of host {host} is {abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} this host's: the timestamps of its "
        "rows are off, durations are not affected"
        for host, ahead in clocks.items()
    ]
    elsewhere = Counter(row.cell.kind for row in rows if row.state == Standing.ELSEWHERE)
    found += [
        f"{count} cell{'s' if count > 1 else ''} need{'' if count > 1 else 's'} {kind}, which is not available here"
        for kind, count in elsewhere.items()
    ]
    return found
