"""What the criteria of a policy need measured, as loads that `optpipe bench` can put on the judged build."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from optpipe.core.measurement import LoadSpec, Mode, Scenario, percent_from_name
from optpipe.measure.figures import ENERGY_SECONDS
from optpipe.signoff.policy import Criterion
from optpipe.signoff.policy_format import LoadFilter


def loads_from_criteria(
    criteria: Iterable[Criterion], min_seconds: float, max_seconds: float, *, energy: bool = True
) -> list[tuple[LoadSpec, tuple[int, ...]]]:
    """Loads with their batch sizes; one at batch 1 where no criterion names any.

    A criterion that names no scenario or mode is about single-stream compute here, and one that names nothing about all loads.
    Percentiles decide the sample count, and energy the time, where `energy` can be measured at all.
    """
    needed: dict[object, LoadSpec] = {}
    wanted = [each for each in criteria if each.section != "energy" or energy]
    named = [each.where for each in criteria if each.where] or [LoadFilter()]
    for load in (_load(where, min_seconds, max_seconds) for where in named):
        needed.setdefault(load.key, load)
        about = (each for each in wanted if not each.where or _load(each.where, 0, 0).key == load.key)
        for criterion in about:
            needed[load.key] = _extend_load(criterion, needed[load.key])
    loads = list(needed.values())
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
    return replace(load, percentile=max(load.percentile, percent_from_name(criterion.metric)))


def _order(load: LoadSpec) -> tuple[str, str, int, int, float, float, float]:
    return (
        str(load.scenario), str(load.mode), load.streams, load.length or 0, load.rate_per_s or 0.0, load.percentile, load.min_seconds,
    )  # fmt: skip
