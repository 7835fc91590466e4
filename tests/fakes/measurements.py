"""Measurements of figures that a test chooses."""

from dataclasses import replace

from optpipe.core.load import LoadSpec
from optpipe.core.measurement import LatencySummary, Measurement, Subject, Validity
from optpipe.core.percentile_names import format_percentile_name
from optpipe.core.quantity import Estimate


def planted(
    subject: Subject,
    batch: int,
    latency_ms: float,
    *,
    reasons=(),
    percents=(50.0, 99.0),
    low=0.99,
    high=1.01,
    rate=None,
    streams=1,
    **more,
) -> Measurement:
    """Single-stream compute; each percentile is `latency_ms`, its interval `low` to `high` times that. INVALID with `reasons`."""
    ns = latency_ms * 1e6
    percentiles = {
        format_percentile_name(each): Estimate(ns, ns * low, ns * high) for each in percents
    }
    found = Measurement(
        id="m",
        subject=subject,
        load=LoadSpec(batch, rate_per_s=rate, streams=streams),
        verdict=Validity.INVALID if reasons else Validity.VALID,
        reasons=tuple(reasons),
        latency_ns=LatencySummary(1000, percentiles, ns, ns, ns, 0.0, {}, Estimate(0.0)),
        throughput_images_per_s=Estimate(batch / latency_ms * 1e3),
    )
    return replace(found, **more)
