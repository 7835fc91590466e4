"""What only shows when measurements lie side by side: which one to hold another against, and INT8 that is not faster."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from optpipe.core.measurement import (
    Estimate,
    Measurement,
    Reason,
    Validity,
    differing,
    setting_text,
)

NOT_FASTER = "int8-not-faster"
WIDER = {"int8": ("fp16", "bf16", "fp32")}
"""What INT8 has to beat on the same runtime, in this order: where there are no FP16 kernels, as on CPUs, FP32."""


def marked(measurements: Sequence[Measurement], causes: Mapping[str, str] | None = None) -> tuple[Measurement, ...]:
    """The measurements, each INT8 one with a note where the same runtime and load is as fast in a wider type.

    `causes` says by artifact what is known to slow it down.
    """
    return tuple(
        each
        if (reason := not_faster(each, measurements, (causes or {}).get(each.subject.artifact, ""))) is None
        else replace(each, reasons=(*each.reasons, reason))
        for each in measurements
    )


def counterpart(
    found: Measurement, others: Sequence[Measurement], speed: Callable[[Measurement], float]
) -> Measurement | None:
    """The one of `others` to hold `found` against: the newest with the same settings, else the fastest, of the VALID ones.

    The fastest flatters nothing that is compared with it. None where there are no others.
    """
    same = [one for one in others if one.subject.settings == found.subject.settings]
    if same:
        return max(same, key=lambda one: one.started_utc or "")
    return max(others, key=lambda one: (one.verdict is Validity.VALID, speed(one)), default=None)


def not_faster(found: Measurement, others: Sequence[Measurement], cause: str = "") -> Reason | None:
    """The note where `found` is INT8 and one of `others`, of the same runtime and load in a wider type, is as fast.

    None where INT8 is clearly faster, or nothing was measured to say it. `cause` is what is known to slow it down.
    """
    ours = found.throughput_images_per_s
    beside = [one for one in others if one.throughput_images_per_s and same_load(found, one)] if ours else []
    for precision in WIDER.get(found.subject.precision, ()):
        wider = counterpart(found, [one for one in beside if one.subject.precision == precision], _rate)
        if wider is not None and ours and (theirs := wider.throughput_images_per_s):
            return None if _clearly_more(ours, theirs) else _reason(found, wider, cause)
    return None


def _rate(found: Measurement) -> float:
    return found.throughput_images_per_s.value if found.throughput_images_per_s else 0.0


def same_load(one: Measurement, other: Measurement) -> bool:
    """Whether two measurements differ in nothing but build and settings of one model for one runtime and device."""
    ours, theirs = one.subject, other.subject
    place = (ours.model, ours.backend, ours.device) == (theirs.model, theirs.backend, theirs.device)
    return place and one.load == other.load


def _clearly_more(one: Estimate, other: Estimate) -> bool:
    low = one.ci[0] if one.ci else one.value
    high = other.ci[1] if other.ci else other.value
    return low > high


def _reason(found: Measurement, other: Measurement, cause: str) -> Reason:
    ours, theirs = found.throughput_images_per_s, other.throughput_images_per_s
    assert ours is not None
    assert theirs is not None
    precision = other.subject.precision
    settings = found.subject.settings, other.subject.settings
    here, there = (f" ({text})" if (text := setting_text(each, differing(settings))) else "" for each in settings)
    text = f"{ours.value:,.0f} images/s in int8{here}, {theirs.value:,.0f} in {precision}{there} on the same runtime"
    remedy = f"ship {precision}, or find what stops the fusions: optpipe profile on both"
    if ours.value > theirs.value:
        text += ", but their intervals overlap: not shown to be faster"
        remedy = f"compare them in turns: optpipe bench {found.subject.artifact} {other.subject.artifact} --interleave"
    return Reason(
        NOT_FASTER,
        text + (f"; {cause}" if cause else ""),
        remedy,
        invalidates=False,
        evidence={"ratio": ours.value / theirs.value, "than": precision},
    )
