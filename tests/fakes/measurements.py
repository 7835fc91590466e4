"""Measurements of figures that a test chooses."""

from dataclasses import replace

from optpipe.core.measurement import (
    Estimate,
    LatencySummary,
    Measurement,
    Mode,
    Percentile,
    Scenario,
    Subject,
    Validity,
)


def planted(
    subject: Subject, batch: int, latency_ms: float, *, reasons=(), percents=(50.0, 99.0), low=0.99, high=1.01, **more
) -> Measurement:
    """Single-stream compute; each percentile is `latency_ms`, its interval `low` to `high` times that. INVALID with `reasons`."""
    percentiles = tuple(Percentile(each, latency_ms, (latency_ms * low, latency_ms * high)) for each in percents)
    found = Measurement(
        id="m",
        subject=subject,
        batch_size=batch,
        scenario=Scenario.SINGLE_STREAM,
        mode=Mode.COMPUTE,
        verdict=Validity.INVALID if reasons else Validity.VALID,
        reasons=tuple(reasons),
        latency=LatencySummary(1000, percentiles, latency_ms, latency_ms, latency_ms, 0.0, {}),
        throughput_images_per_s=Estimate(batch / latency_ms * 1e3),
    )
    return replace(found, **more)
