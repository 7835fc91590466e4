"""Whether what was measured keeps a latency limit: per artifact, and of all of them."""

from collections.abc import Sequence

from optpipe.core.bench_record import ArtifactLimit, LimitRecord, UnjudgedPoint
from optpipe.core.measurement import Measurement
from optpipe.measure.slo import Slo, is_credible_violation
from optpipe.measure.sweep import find_nearest_to_limit
from optpipe.models.artifacts.lookup import StoredArtifact


def judge_limit(
    artifact: StoredArtifact, slo: Slo, found: Sequence[Measurement], best: Measurement | None
) -> ArtifactLimit:
    """What the measurements of one artifact say of the limit; `met` is None where no valid one decides it."""
    shown = best or find_nearest_to_limit(found, slo)
    value = None if shown is None else slo.read(shown)
    not_judged = tuple(
        UnjudgedPoint(each.load.batch_size, each.load.rate_per_s, why)
        for each in found
        if (why := slo.explain_not_judged(each)) is not None
    )
    met: bool | None = None
    if best is not None and best.is_valid:
        met = True
    elif best is None and shown is not None and is_credible_violation(shown) and not not_judged:
        met = False
    return ArtifactLimit(
        artifact=artifact.entry.id,
        label=artifact.label,
        slo=str(slo),
        met=met,
        inside=best is not None,
        measurement=None if shown is None else shown.id,
        batch_size=None if shown is None else shown.load.batch_size,
        rate_per_s=None if shown is None else shown.load.rate_per_s,
        value_ns=None if value is None else value.value,
        upper_bound_ns=None if value is None else value.high,
        verdict=None if shown is None else shown.verdict,
        not_judged=not_judged,
    )


def combine_limits(slo: Slo, limits: Sequence[ArtifactLimit]) -> LimitRecord:
    """The answers of all artifacts: met where one meets it, and not met only where none may."""
    answers = [each.met for each in limits]
    met = True if True in answers else None if None in answers or not answers else False
    return LimitRecord(str(slo), met, tuple(limits))
