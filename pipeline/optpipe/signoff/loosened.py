"""Limits of evidence that were looser than usual, which a verdict states wherever it is shown.

A policy's own limits are its author's choice. The limits here decide what counts as evidence for them at all: the rules
of a VALID measurement, the tolerance of a build's outputs, and the confidence.
"""

from collections.abc import Iterator, Mapping
from math import log10

from optpipe.core.measurement import COMPARISON_FILE, Measurement, read_measurements
from optpipe.core.precision import Precision
from optpipe.core.quantity import share_to_text
from optpipe.core.verdict import LoosenedLimit
from optpipe.measure.validity import LIMITS
from optpipe.signoff.dossier import Dossier
from optpipe.stats.paired import TOLERATED_RELATIVE_ERROR
from optpipe.stats.percentiles import CONFIDENCE

_WORDS = {
    "max_cv": "coefficient of variation up to {}",
    "max_drift": "drift of the latency up to {}",
    "max_other_cpu_share": "other work on up to {} of the processors",
    "max_clock_change": "clocks that move by up to {}",
}
"""Limits of a VALID measurement that are shares. The one of `max_gpu_temperature_c` is a temperature."""


def find_loosest_limits(dossier: Dossier) -> Mapping[str, float]:
    """The limits of VALID measurements by name, the loosest of all measurements that the verdict can rest on."""
    limits = [measurement.limits for measurement in _list_measurements(dossier)]
    return {
        name: max((stated.get(name, usual) for stated in limits), default=usual)
        for name, usual in LIMITS.items()
    }


def _list_measurements(dossier: Dossier) -> Iterator[Measurement]:
    """Those of the judged build, of what it was compared with in turn, and of the approved baseline."""
    judged, baseline = dossier.request.artifact, dossier.request.baseline_artifact
    for run in dossier.every_run:
        if run.kind == "bench" and judged in run.manifest.parents:
            paired = COMPARISON_FILE in run.manifest.files
            yield from (
                measurement
                for measurement in read_measurements(run.files)
                if paired or measurement.subject.artifact == judged
            )
    for run in dossier.baseline_runs:
        yield from (
            measurement
            for measurement in read_measurements(run.files)
            if measurement.subject.artifact == baseline
        )


def list_loosened(dossier: Dossier) -> Iterator[LoosenedLimit]:
    """Every limit that was looser than usual, with both values; nothing if none was."""
    loosest = find_loosest_limits(dossier)
    for name, usual in LIMITS.items():
        if not name.startswith("max_") or loosest[name] <= usual:
            continue
        if name in _WORDS:
            shown, normal = share_to_text(loosest[name]), share_to_text(usual)
            text = f"{_WORDS[name].format(shown)} (usual: {normal})"
        else:
            text = f"a GPU of up to {loosest[name]:g} °C (usual: {usual:g} °C)"
        yield LoosenedLimit(name, loosest[name], usual, text)
    checked = dossier.verification
    asked = None if checked is None else checked.recipe.get("minimum_snr_db")
    usual_db = compute_usual_snr_db(dossier.artifact.info.precision)
    if asked is not None and asked < usual_db:
        text = f"outputs with an SNR from {asked:g} dB (usual: {usual_db:g} dB)"
        yield LoosenedLimit("minimum_snr_db", asked, usual_db, text)
    if dossier.policy.confidence < CONFIDENCE:
        shown, normal = share_to_text(dossier.policy.confidence), share_to_text(CONFIDENCE)
        text = f"intervals at a confidence of {shown} (usual: {normal})"
        yield LoosenedLimit("confidence", dossier.policy.confidence, CONFIDENCE, text)


def compute_usual_snr_db(precision: Precision) -> float:
    """The SNR in dB that outputs of a build need if it was built without `--min-snr`."""
    return round(-20 * log10(TOLERATED_RELATIVE_ERROR[precision]), 9)


def describe_loosened(loosened: tuple[LoosenedLimit, ...]) -> str:
    """`looser limits of evidence than usual: coefficient of variation up to 50% (usual: 2.5%)`; empty without any."""
    if not loosened:
        return ""
    return f"looser limits of evidence than usual: {'; '.join(limit.message for limit in loosened)}"
