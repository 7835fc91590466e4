"""What only shows when measurements lie side by side: an INT8 build that is not faster than the wider type it came from."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from optpipe.core.measurement import Estimate, Measurement, Reason

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


def not_faster(found: Measurement, others: Sequence[Measurement], cause: str = "") -> Reason | None:
    """The note where `found` is INT8 and one of `others`, of the same runtime and load in a wider type, is as fast.

    None where INT8 is clearly faster, or nothing was measured to say it. `cause` is what is known to slow it down.
    """
    ours = found.throughput_images_per_s
    for precision in WIDER.get(found.subject.precision, ()):
        for other in others:
            theirs = other.throughput_images_per_s
            if other.subject.precision == precision and same_load(found, other) and ours and theirs:
                return None if _clearly_more(ours, theirs) else _reason(found, other, cause)
    return None


def same_load(one: Measurement, other: Measurement) -> bool:
    """Whether two measurements differ in nothing but the build of one model for one runtime and device."""
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
    text = f"{ours.value:,.0f} images/s in int8, {theirs.value:,.0f} in {precision} on the same runtime"
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
