"""What the criteria of a policy need measured, as loads that `optpipe bench` can put on the judged build."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from optpipe.core.measurement import LoadSpec, Mode, Scenario
from optpipe.measuring.energy import ENERGY_SECONDS
from optpipe.signoff.policy import Criterion
from optpipe.signoff.policy_format import LoadFilter


def loads_from_criteria(
    criteria: Iterable[Criterion], min_seconds: float, max_seconds: float, *, energy: bool = True
) -> list[tuple[LoadSpec, tuple[int, ...]]]:
    """Loads with their batch sizes; one at batch 1 where no criterion names any.

    A criterion that names no scenario or mode is about single-stream compute here. Percentiles decide the sample count, and
    energy the time, where `energy` can be measured at all.
    """
    needed: dict[object, LoadSpec] = {}
    for criterion in criteria:
        if criterion.where:
            wanted = _load(criterion.where, min_seconds, max_seconds)
            load = needed.get(wanted.key, wanted)
            needed[load.key] = load if criterion.section == "energy" and not energy else _extend_load(criterion, load)
    loads = list(needed.values()) or [_load(LoadFilter(), min_seconds, max_seconds)]
    alike = sorted(loads, key=lambda load: (_order(load), load.batch_size))
    groups = [list(found) for _, found in groupby(alike, key=_order)]
    return [(found[0], tuple(dict.fromkeys(load.batch_size for load in found))) for found in groups]


def _load(where: LoadFilter, min_seconds: float, max_seconds: float) -> LoadSpec:
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


def _extend_load(criterion: Criterion, load: LoadSpec) -> LoadSpec:
    if criterion.section == "energy":
        seconds = max(load.min_seconds, ENERGY_SECONDS)
        return replace(load, min_seconds=seconds, max_seconds=max(load.max_seconds, seconds))
    if criterion.metric.startswith("p") and criterion.metric[1:].replace(".", "").isdigit():
        return replace(load, percentile=max(load.percentile, float(criterion.metric[1:])))
    return load


def _order(load: LoadSpec) -> tuple[str, str, int, int, float, float, float]:
    return (
        str(load.scenario), str(load.mode), load.streams, load.length or 0, load.rate_per_s or 0.0, load.percentile, load.min_seconds,
    )  # fmt: skip
