"""What only shows when measurements lie side by side: which one to compare another with, and INT8 or FP8 that is not faster."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from optpipe.core.measurement import Measurement, Reason, find_differing_settings, format_settings, list_load_options
from optpipe.core.precision import CALIBRATED

WIDER_PRECISIONS = dict.fromkeys(map(str, CALIBRATED), ("fp16", "bf16", "fp32"))
"""The types that INT8 and FP8 are compared with on the same runtime, the first that was measured: CPUs have FP32 alone."""


def add_int8_speed_notes(
    measurements: Sequence[Measurement], causes: Mapping[str, str] | None = None
) -> tuple[Measurement, ...]:
    """The measurements, each INT8 and FP8 one with a note where the same runtime and load is as fast in a wider type.

    `find_int8_causes` says by artifact what is known to slow it down.
    """
    return tuple(
        each
        if (reason := check_int8_speed(each, measurements, (causes or {}).get(each.subject.artifact, ""))) is None
        else replace(each, reasons=(*each.reasons, reason))
        for each in measurements
    )


def pick_baseline(
    found: Measurement, others: Sequence[Measurement], speed: Callable[[Measurement], float]
) -> Measurement | None:
    """The one of `others` to compare `found` with: the newest with the same settings, else the fastest, of the VALID ones.

    The fastest flatters nothing that is compared with it. None where there are no others.
    """
    same = [one for one in others if one.subject.settings == found.subject.settings]
    if same:
        return max(same, key=lambda one: one.started_utc)
    return max(others, key=lambda one: (one.is_valid, speed(one)), default=None)


def check_int8_speed(found: Measurement, others: Sequence[Measurement], cause: str = "") -> Reason | None:
    """The note where `found` is INT8 or FP8 and one of `others`, of the same runtime and load in a wider type, is as fast.

    None where it is clearly faster, or nothing was measured to say it. `cause` is what is known to slow it down.
    """
    ours = found.throughput_images_per_s
    beside = [one for one in others if one.throughput_images_per_s and has_same_load(found, one)] if ours else []
    for precision in WIDER_PRECISIONS.get(found.subject.precision, ()):
        wider = pick_baseline(found, [one for one in beside if one.subject.precision == precision], _get_rate)
        if wider is not None and ours and (theirs := wider.throughput_images_per_s):
            return None if ours.bounds[0] > theirs.bounds[1] else _make_reason(found, wider, cause)
    return None


def _get_rate(found: Measurement) -> float:
    return found.throughput_images_per_s.value if found.throughput_images_per_s else 0.0


def has_same_load(one: Measurement, other: Measurement) -> bool:
    """Whether two measurements differ in nothing but build and settings of one model for one runtime and device."""
    ours, theirs = one.subject, other.subject
    place = (ours.model, ours.backend, ours.device) == (theirs.model, theirs.backend, theirs.device)
    return place and one.load.key == other.load.key


def _make_reason(found: Measurement, other: Measurement, cause: str) -> Reason:
    ours, theirs = found.throughput_images_per_s, other.throughput_images_per_s
    assert ours is not None
    assert theirs is not None
    precision = other.subject.precision
    settings = found.subject.settings, other.subject.settings
    here, there = (
        f" ({text})" if (text := format_settings(each, find_differing_settings(settings))) else "" for each in settings
    )
    text = f"{ours.value:,.0f} {found.load.sample}s/s in {found.subject.precision}{here}, {theirs.value:,.0f} in {precision}{there}"
    text += " on the same runtime"
    model, backend = shlex.quote(found.subject.model or "MODEL"), found.subject.backend
    both = f"{model} --backend {backend} --precision {precision},{found.subject.precision}"
    remedy = f"deploy {precision}, or find what prevents kernel fusion: optpipe profile {both}"
    if ours.value > theirs.value:
        text += ", but the confidence intervals overlap: no significant speedup"
        pair = f"{found.subject.artifact} {other.subject.artifact} --metric throughput"
        remedy = f"compare them interleaved: optpipe bench-pair {' '.join((pair, *list_load_options(found.load)))}"
    return Reason(
        f"{found.subject.precision}-not-faster",
        text + (f"; {cause}" if cause else ""),
        remedy,
        invalidates=False,
        evidence={"ratio": ours.value / theirs.value, "than": precision},
    )
