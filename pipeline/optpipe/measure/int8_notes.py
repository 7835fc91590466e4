"""Notes on an INT8 or FP8 build: no gain over the wider type, lost accuracy, and the usual causes."""

from collections.abc import Callable, Iterator, Sequence

from optpipe.core.entries import ArtifactInfo
from optpipe.core.load import list_load_options
from optpipe.core.measurement import Measurement, Reason, read_measurements
from optpipe.core.precision import CALIBRATED, REQUIRED_SHARE
from optpipe.core.settings import find_differing_settings, format_settings
from optpipe.core.verdict import Note
from optpipe.core.wording import Call
from optpipe.evaluate.recompute import observe_accuracy, read_evaluation
from optpipe.models.artifacts.judged_build import JudgedBuild
from optpipe.workspace.entry import Run

WIDER_PRECISIONS = dict.fromkeys(map(str, CALIBRATED), ("fp16", "bf16", "fp32"))
"""Types that INT8 and FP8 are compared with on the same runtime, by preference: CPUs only have FP32."""


def pick_baseline(
    measurement: Measurement, others: Sequence[Measurement], speed: Callable[[Measurement], float]
) -> Measurement | None:
    """The newest of `others` with the settings of `measurement`, otherwise the fastest, VALID ones first.

    The fastest flatters nothing that is compared with it. None if `others` is empty.
    """
    if same := [
        other for other in others if other.subject.settings == measurement.subject.settings
    ]:
        return max(same, key=lambda other: other.started_utc)
    return max(others, key=lambda other: (other.is_valid, speed(other)), default=None)


def check_int8_speed(
    measurement: Measurement,
    others: Sequence[Measurement],
    cause: str = "",
    *,
    can_profile: bool = True,
) -> Reason | None:
    """A reason if `measurement` is INT8 or FP8 and one of `others`, of the same runtime and load in a wider type, is as fast.

    None if it is clearly faster, or if nothing was measured to tell. `cause` is a known cause of slowness.
    `can_profile` is False for a module in memory, which no command can name.
    """
    wider, ours = find_wider(measurement, others), measurement.throughput_images_per_s
    theirs = wider.throughput_images_per_s if wider is not None else None
    if wider is None or ours is None or theirs is None:
        return None
    if theirs.high is not None and ours.is_above(theirs.high):
        return None
    return _make_reason(measurement, wider, cause, can_profile=can_profile)


def find_wider(measurement: Measurement, others: Sequence[Measurement]) -> Measurement | None:
    """The build that an INT8 or FP8 one is compared with: one of `others` in the preferred wider type, with the same runtime and load.

    None if there is none.
    """
    if measurement.throughput_images_per_s is None:
        return None

    def get_rate(other: Measurement) -> float:
        return other.throughput_images_per_s.value if other.throughput_images_per_s else 0.0

    beside = [
        other
        for other in others
        if other.throughput_images_per_s and has_same_load(measurement, other)
    ]
    for precision in WIDER_PRECISIONS.get(measurement.subject.precision, ()):
        of_type = [other for other in beside if other.subject.precision == precision]
        if (wider := pick_baseline(measurement, of_type, get_rate)) is not None:
            return wider
    return None


def has_same_load(left: Measurement, right: Measurement) -> bool:
    """Whether two measurements share model, runtime, device and load."""
    ours, theirs = left.subject, right.subject
    place = (ours.model, ours.backend, ours.device) == (theirs.model, theirs.backend, theirs.device)
    return place and left.load.key == right.load.key


def _make_reason(
    measurement: Measurement, other: Measurement, cause: str, *, can_profile: bool
) -> Reason:
    ours, theirs = measurement.throughput_images_per_s, other.throughput_images_per_s
    assert ours is not None
    assert theirs is not None
    precision = other.subject.precision
    settings = measurement.subject.settings, other.subject.settings
    shown = (format_settings(chosen, find_differing_settings(settings)) for chosen in settings)
    here, there = (f" ({text})" if text else "" for text in shown)
    text = (
        f"{ours.value:,.0f} {measurement.load.sample}s/s in {measurement.subject.precision}{here}"
    )
    text += f", {theirs.value:,.0f} in {precision}{there}"
    text += " on the same runtime"
    remedy = f"deploy {precision}"
    if can_profile:
        profile = Call(
            "profile",
            measurement.subject.model or "MODEL",
            backend=measurement.subject.backend,
            precision=[precision, measurement.subject.precision],
        )
        remedy += ", or find what prevents kernel fusion: " + profile
    if ours.value > theirs.value:
        known = ours.interval is not None and theirs.interval is not None
        text += ", but the intervals overlap" if known else ", but not both have an interval"
        pair = Call(
            "bench",
            measurement.subject.artifact,
            against=other.subject.artifact,
            metric="throughput",
            **list_load_options(measurement.load),
        )
        remedy = "compare them interleaved: " + pair
    return Reason(
        f"{measurement.subject.precision}-not-faster",
        text + (f"; {cause}" if cause else ""),
        remedy,
        invalidates=False,
        evidence={"ratio": ours.value / theirs.value, "than": precision},
    )


BUDGET = 0.01
"""Default drop of INT8 and FP8, if no evaluation has a budget."""


def find_int8_causes(info: ArtifactInfo) -> str:
    """Why an INT8 or FP8 artifact may be slow: layers of other types."""
    share = info.precision_proof.share.counted.get(info.precision, 0.0)
    partly = info.precision in CALIBRATED and share < REQUIRED_SHARE
    return f"only {share:.0%} of its MACs run in {info.precision}" if partly else ""


def check_int8_accuracy(
    runs: Sequence[Run],
    build: JudgedBuild,
    confidence: float = 0.95,
    limit: float | None = None,
) -> Note | None:
    """The drop of the newest evaluation, recomputed from its predictions, if it is not within its budget.

    The budget is `limit`, the drop that a policy allows as a share, otherwise the evaluation's.
    """
    figure = observe_accuracy(runs, build, confidence).get("drop")
    if build.precision not in CALIBRATED or figure is None or figure.blockers:
        return None
    if figure.low is None or figure.high is None:
        return None
    given = (read_evaluation(run).accuracy_budget for run in runs if run.name == figure.source)
    budget = next((drop for drop in (limit, *given) if drop is not None), BUDGET)
    if figure.high <= budget:
        return None
    said = "exceeds" if figure.low > budget else "may exceed"
    interval = f"{100 * float(figure.value):+.2f} points [{100 * figure.low:+.2f}, {100 * figure.high:+.2f}]"
    text = (
        f"its accuracy drop ({interval}, {figure.about}) {said} the {100 * budget:g}-point budget"
    )
    allowed = f"{100 * budget:g}%"
    way = Call("build", build.argument, precision=build.precision, budget=allowed)
    remedy = "`" + build.choose_way(way) + "` keeps sensitive layers in float"
    if figure.low <= budget:
        way = Call("evaluate", build.argument, data="DIR")
        remedy = "evaluate on more: " + build.choose_way(way)
    return Note(f"{build.precision}-accuracy", text, remedy)


def list_int8_notes(
    info: ArtifactInfo,
    build: JudgedBuild,
    runs: Sequence[Run],
    measured: Sequence[Measurement],
    confidence: float,
    drop_limit: float | None = None,
) -> Iterator[Note]:
    """Notes on an INT8 or FP8 build. The drop is judged at `confidence`, by `drop_limit` of a policy if it has one."""
    if build.precision not in CALIBRATED:
        return
    cause = find_int8_causes(info)
    yield from _note_speed(build, runs, measured, cause)
    if (reason := check_int8_accuracy(runs, build, confidence, drop_limit)) is not None:
        yield reason
    if cause:
        yield Note(
            f"{build.precision}-causes",
            cause,
            "`" + Call("store show", build.artifact) + "` lists them by layer",
        )


def _note_speed(
    build: JudgedBuild, runs: Sequence[Run], measured: Sequence[Measurement], cause: str
) -> Iterator[Note]:
    """Compares with the newest measurements of wider types in the same runs; their absence is a note too."""
    measurements = (
        measurement
        for run in runs
        if run.kind == "bench"
        for measurement in read_measurements(run.files)
    )
    wider = [
        measurement
        for measurement in measurements
        if measurement.subject.precision in WIDER_PRECISIONS[build.precision]
    ]
    newest = {
        measurement.key: measurement
        for measurement in sorted(wider, key=lambda measurement: measurement.started_utc)
    }
    beside = list(newest.values())
    marks = [
        reason
        for measurement in measured
        if (reason := check_int8_speed(measurement, beside, cause, can_profile=not build.in_memory))
        is not None
    ]
    if marks:
        worst = min(marks, key=lambda reason: float(reason.evidence["ratio"]))
        text = f"{build.precision.upper()} is not shown to be faster: {worst.message}"
        yield Note(f"{build.precision}-not-faster", text, worst.remedy)
    elif measured and not any(
        has_same_load(measurement, other) for measurement in measured for other in beside
    ):
        yield Note(
            f"{build.precision}-alone",
            f"no higher precision was measured for comparison, so the benefit of {build.precision.upper()} is unknown",
            Call(
                "bench",
                build.model,
                backend=build.backend,
                precision=[
                    "fp32" if measured[0].subject.device == "cpu" else "fp16",
                    build.precision,
                ],
            ),
        )
