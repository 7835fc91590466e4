"""Regression over a fleet: every cell against a baseline workspace, with the false-alarm rate held over all cells.

The figure is the ratio of the p50 latencies of processes, its interval Student's t over the logarithms of both sides' processes
(Welch). PASS: the whole interval is within the tolerance. FAIL: slower than the tolerance so clearly that it happens in at most
`LEVEL` of sweeps in which nothing became slower, however many cells there are (Holm's procedure). Everything else is INCONCLUSIVE.
"""

from collections.abc import Mapping, Sequence
from math import exp, log, log1p

from optpipe.core.estimate import Estimate
from optpipe.core.verdict import Verdict
from optpipe.stats.means import Mean, mean_from_values, reject_by_holm, subtract_means
from optpipe.sweep.job import JobRecord, JobState
from optpipe.sweep.rows import CellVerdict, Regression, SweepRow

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
