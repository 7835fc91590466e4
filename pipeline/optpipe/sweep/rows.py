"""The table of a sweep: a row for every cell, whatever came of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, log1p

from optpipe.core.errors import ExitStatus
from optpipe.core.quantity import Estimate
from optpipe.core.verdict import Verdict
from optpipe.stats.means import Mean, mean_from_values, reject_by_holm, subtract_means
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


LEVEL = 0.025
"""Probability of any false FAIL in one sweep."""
METHOD = "Holm"
TOLERANCE = 0.02
"""Slowdown that still passes."""


def judge_against(
    rows: Sequence[SweepRow],
    now: Mapping[str, JobRecord],
    baseline: Mapping[str, Sequence[JobRecord]],
    name: str,
    tolerance: float = TOLERANCE,
) -> Regression:
    """Each row against the baseline's job of the same key, else of the same cell. `now` has the records by key."""
    by_cell: dict[str, JobRecord] = {}
    for records in baseline.values():
        by_cell.setdefault(records[0].cell.key, records[0])
    prepared = []
    for row in rows:
        record = now.get(row.key or "")
        same = baseline.get(row.key or "")
        prepared.append((row, *_compare(record, same[0] if same else by_cell.get(row.cell.key))))
    limit = log1p(tolerance)
    p_values = [1.0 if ratio is None else ratio.compute_p_value_above(limit) for _, ratio, _ in prepared]
    failed = reject_by_holm(p_values, LEVEL)
    cells = [
        _judge(row, ratio, why, p_value, tolerance, broken=broken)
        for (row, ratio, why), p_value, broken in zip(prepared, p_values, failed, strict=True)
    ]
    return Regression(name, tolerance, LEVEL, METHOD, tuple(cells))


def _compare(now: JobRecord | None, before: JobRecord | None) -> tuple[Mean | None, str]:
    """The mean of the logarithm of the ratio; or why there is none."""
    if now is None or now.state is not JobState.DONE:
        return None, "not measured" if now is None else f"{now.state}: {now.reason}"
    if before is None or before.state is not JobState.DONE:
        return None, "not measured in the baseline" if before is None else f"the baseline is {before.state}"
    if now.fingerprint != before.fingerprint:
        return None, "the baseline was measured in another environment (GPU, driver, power limit or versions)"
    if now.run == before.run:
        return None, "it is the baseline's own run"
    sides = []
    for record in (now, before):
        figure = record.group.figures.get("p50") if record.group else None
        mean = mean_from_values([log(each) for each in figure.processes]) if figure else None
        if mean is None:
            return None, "fewer than three VALID processes on one side; raise --processes"
        sides.append(mean)
    return subtract_means(sides[0], sides[1]), ""


def _judge(
    row: SweepRow, ratio: Mean | None, why: str, p_value: float, tolerance: float, *, broken: bool
) -> CellVerdict:
    if ratio is None:
        return CellVerdict(row.cell.key, row.cell.label, Verdict.INCONCLUSIVE, why)
    low, high = (exp(each) for each in ratio.interval(1 - 2 * LEVEL))
    shown = Estimate(exp(ratio.value), low, high)
    if broken:
        verdict, reason = Verdict.FAIL, f"{shown.value - 1:+.1%} exceeds the tolerance of {tolerance:.1%}"
    elif high <= 1 + tolerance:
        verdict, reason = Verdict.PASS, ""
    else:
        verdict, reason = (
            Verdict.INCONCLUSIVE,
            f"the interval reaches {high - 1:+.1%}, beyond the tolerance; use more --processes",
        )
    return CellVerdict(row.cell.key, row.cell.label, verdict, reason, shown, p_value)
