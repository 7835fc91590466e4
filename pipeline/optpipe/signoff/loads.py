"""The loads that a policy's criteria need."""

from collections.abc import Iterable
from dataclasses import replace

from optpipe.core.load import LoadSpec, Mode, Scenario
from optpipe.core.records import group_pairs
from optpipe.signoff.policy import Criterion, LoadFilter


def loads_from_criteria(
    criteria: Iterable[Criterion], min_seconds: float, max_seconds: float, *, energy: bool = True
) -> list[tuple[LoadSpec, tuple[int, ...]]]:
    """Loads with their batch sizes; batch 1 if no criterion names a load.

    A criterion without scenario or mode means single-stream compute, and one without any filter means all loads. Percentiles
    decide the sample count, and energy the time, if `energy` can be measured.
    """
    needed: dict[object, LoadSpec] = {}
    able = [criterion for criterion in criteria if criterion.table.is_measured]
    wanted = [
        criterion for criterion in able if energy or not criterion.find_metric().least_seconds
    ]
    named = [criterion.where for criterion in criteria if criterion.where] or [LoadFilter()]
    for load in (load_from_filter(where, min_seconds, max_seconds) for where in named):
        needed.setdefault(load.key, load)
        about = (
            criterion
            for criterion in wanted
            if not criterion.where or load_from_filter(criterion.where, 0, 0).key == load.key
        )
        for criterion in about:
            known, metric = needed[load.key], criterion.find_metric()
            least = max(known.min_seconds, metric.least_seconds)
            needed[load.key] = replace(
                known,
                min_seconds=least,
                max_seconds=max(known.max_seconds, least),
                percentile=max(known.percentile, metric.percent),
            )
    groups = group_pairs((replace(load, batch_size=1), load.batch_size) for load in needed.values())
    return [
        (replace(load, batch_size=min(sizes)), tuple(sorted(sizes)))
        for load, sizes in groups.items()
    ]


def load_from_filter(where: LoadFilter, min_seconds: float, max_seconds: float) -> LoadSpec:
    return LoadSpec(
        batch_size=where.batch_size or 1,
        scenario=where.scenario or Scenario.SINGLE_STREAM,
        mode=where.mode or Mode.COMPUTE,
        streams=where.streams or 1,
        rate_per_s=where.rate,
        min_seconds=min_seconds,
        max_seconds=max(max_seconds, min_seconds),
        length=where.length,
    )
