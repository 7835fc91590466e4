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
    return tuple(_marked(each, measurements, (causes or {}).get(each.subject.artifact, "")) for each in measurements)


def _marked(found: Measurement, measurements: Sequence[Measurement], cause: str) -> Measurement:
    ours = found.throughput_images_per_s
    for precision in WIDER.get(found.subject.precision, ()):
        for other in measurements:
            theirs = other.throughput_images_per_s
            if other.subject.precision == precision and same_load(found, other) and ours and theirs:
                if _clearly_more(ours, theirs):
                    return found
                return replace(found, reasons=(*found.reasons, _not_faster(ours, theirs, precision, cause)))
    return found


def same_load(one: Measurement, other: Measurement) -> bool:
    """Whether two measurements differ in nothing but the build of one model for one runtime and device."""
    ours, theirs = one.subject, other.subject
    place = (ours.model, ours.backend, ours.device) == (theirs.model, theirs.backend, theirs.device)
    return place and one.load == other.load


def _clearly_more(one: Estimate, other: Estimate) -> bool:
    low = one.ci[0] if one.ci else one.value
    high = other.ci[1] if other.ci else other.value
    return low > high


def _not_faster(ours: Estimate, theirs: Estimate, precision: str, cause: str) -> Reason:
    return Reason(
        NOT_FASTER,
        f"{ours.value:,.0f} images/s in int8, {theirs.value:,.0f} in {precision} on the same runtime"
        + (f"; {cause}" if cause else ""),
        f"ship {precision}, or find what stops the fusions: optpipe profile on both",
        invalidates=False,
        evidence={"ratio": ours.value / theirs.value},
    )
