"""What must be known of an INT8 or FP8 build beside its verdicts: no gain over the wider type, lost accuracy, and the usual causes."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from optpipe.core.entries import ArtifactInfo
from optpipe.core.measurement import Measurement, Reason, read_measurements
from optpipe.core.precision import CALIBRATED, REQUIRED_SHARE
from optpipe.core.verdict import Note
from optpipe.evaluate.recompute import observe_accuracy, read_evaluation
from optpipe.measure.marks import WIDER_PRECISIONS, add_int8_speed_notes, check_int8_speed, has_same_load
from optpipe.models.artifacts.facts import JudgedBuild, judged_build_from_entry
from optpipe.workspace.runs import Run, list_runs
from optpipe.workspace.store import Entry, Store

BUDGET = 0.01
"""The drop that INT8 and FP8 may cost where no evaluation was given another budget."""


def find_int8_causes(info: ArtifactInfo) -> str:
    """Why an INT8 or FP8 artifact may be slow, from its manifest: layers that are in other types, then the linter's findings by rule."""
    if info.precision not in CALIBRATED:
        return ""
    share = info.precision_proof.share.counted.get(info.precision, 0.0)
    found = [f"only {share:.0%} of its MACs run in {info.precision}"] if share < REQUIRED_SHARE else []
    if info.lint.findings:
        first = info.lint.findings[0]
        listed = ", ".join(f"{count} × {rule}" for rule, count in info.lint.counts.items())
        found.append(f"the linter reports {listed} ({first.layer}: {first.message})")
    return "; ".join(found)


def check_int8_accuracy(runs: Sequence[Run], build: JudgedBuild, confidence: float = 0.95) -> Note | None:
    """A drop that is not inside its budget by the newest evaluation, computed anew from its predictions.

    None where it is inside, or nothing was evaluated.
    """
    figure = observe_accuracy(runs, build, confidence).get("drop")
    if (
        build.precision not in CALIBRATED
        or figure is None
        or figure.blockers
        or figure.low is None
        or figure.high is None
    ):
        return None
    budget = _find_budget(runs, figure.source)
    if figure.high <= budget:
        return None
    said = "exceeds" if figure.low > budget else "may exceed"
    interval = f"{100 * float(figure.value):+.2f} points, {100 * figure.low:+.2f} to {100 * figure.high:+.2f}"
    return Note(
        f"{build.precision}-accuracy",
        f"its accuracy drop ({interval}, {figure.about}) {said} the budget of {100 * budget:g} points",
        f"`optpipe calibrate {build.argument} --accuracy-budget {100 * budget:g}%` keeps the most sensitive layers in float"
        if figure.low > budget
        else f"evaluate on more: optpipe evaluate {build.argument} --data DIR",
    )


def _find_budget(runs: Sequence[Run], run_id: str) -> float:
    found = next((read_evaluation(run).accuracy_budget for run in runs if run.run_id == run_id), None)
    return BUDGET if found is None else found


def add_int8_notes(
    measurements: Sequence[Measurement], artifacts: Sequence[Entry[ArtifactInfo]], store: Store
) -> tuple[Measurement, ...]:
    """The measurements, INT8 and FP8 ones with a reason where that does not pay or costs more accuracy than it may."""
    found = add_int8_speed_notes(measurements, {entry.id: find_int8_causes(entry.info) for entry in artifacts})
    runs = list_runs(store.workspace, "evaluate")
    dropped = {entry.id: check_int8_accuracy(runs, judged_build_from_entry(entry)) for entry in artifacts}
    return tuple(_add_reason(each, dropped.get(each.subject.artifact)) for each in found)


def _add_reason(found: Measurement, note: Note | None) -> Measurement:
    if note is None:
        return found
    reason = Reason(note.code, f"{found.subject.precision.upper()}: {note.message}", note.remedy, invalidates=False)
    return replace(found, reasons=(*found.reasons, reason))


def list_int8_notes(
    info: ArtifactInfo, build: JudgedBuild, runs: Sequence[Run], measured: Sequence[Measurement], confidence: float
) -> Iterator[Note]:
    """All notes on a build that is to be signed off; `measured` are those that are judged, computed anew."""
    if build.precision not in CALIBRATED:
        return
    cause = find_int8_causes(info)
    yield from _speed_notes(build, runs, measured, cause)
    if (found := check_int8_accuracy(runs, build, confidence)) is not None:
        yield found
    if cause:
        yield Note(f"{build.precision}-causes", cause, f"`optpipe store show {build.artifact}` lists them by layer")


def _speed_notes(
    build: JudgedBuild, runs: Sequence[Run], measured: Sequence[Measurement], cause: str
) -> Iterator[Note]:
    """Against the wider types that the same runs measured, the newest of equal ones; that none did is a note too."""
    found = (one for run in runs if run.kind == "bench" for one in read_measurements(run.files))
    wider = [one for one in found if one.subject.precision in WIDER_PRECISIONS[build.precision]]
    newest = {one.key: one for one in sorted(wider, key=lambda one: one.started_utc)}
    beside = list(newest.values())
    marks = [reason for one in measured if (reason := check_int8_speed(one, beside, cause)) is not None]
    if marks:
        worst = min(marks, key=lambda reason: float(reason.evidence["ratio"]))
        yield Note(
            f"{build.precision}-not-faster",
            f"{build.precision.upper()} is not significantly faster: {worst.message}",
            worst.remedy,
        )
    elif measured and not any(has_same_load(one, other) for one in measured for other in beside):
        yield Note(
            f"{build.precision}-alone",
            f"no higher precision was measured for comparison, so the benefit of {build.precision.upper()} is unknown",
            f"optpipe bench {shlex.quote(build.model)} --backend {build.backend} --precision fp16,fp32,{build.precision}",
        )
