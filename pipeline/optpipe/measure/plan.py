"""The plan of a measurement from what a user asks for."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from optpipe.backends.registry import require_known_options
from optpipe.core.bench_defaults import MAX_CV, PROCESSES
from optpipe.core.errors import BadInputError, require_existing
from optpipe.core.load import LoadSpec, Scenario
from optpipe.core.metrics.measured import ENERGY
from optpipe.core.params import MOST_PROCESSES
from optpipe.core.values import is_integer
from optpipe.core.wording import Argument
from optpipe.measure.measure import BenchPlan
from optpipe.measure.search import slo_from_text


def plan_bench(
    load: Mapping[str, Any],
    *,
    batch: tuple[int, ...] | None = None,
    length: tuple[int, ...] | None = None,
    slo: str | None = None,
    processes: int | None = None,
    energy: bool = False,
    max_cv: float = MAX_CV,
    images: Path | None = None,
    affinity: tuple[int, ...] | None = None,
    keep_going: bool = False,
    seed: int = 0,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> BenchPlan:
    """`load` holds fields of LoadSpec. Raises BadInputError for values that contradict each other, or are no counts."""
    _require_count("processes", processes, 1, MOST_PROCESSES)
    _require_count("seed", seed, 0)
    limit = None if slo is None else slo_from_text(slo)
    spec = LoadSpec(1, **load)
    if limit is not None and spec.rate_per_s is not None:
        raise BadInputError(
            Argument("rate") + " and " + Argument("slo") + " are mutually exclusive"
        )
    spec.require_sound(needs_rate=limit is None)
    if energy:
        least = max(spec.min_seconds, ENERGY.least_seconds)
        spec = replace(spec, min_seconds=least, max_seconds=max(spec.max_seconds, least))
    if limit is not None:
        spec = replace(spec, percentile=max(spec.percentile, limit.percent))
    if batch and len(batch) > 1 and spec.scenario is Scenario.SERVER and limit:
        problem = (
            Argument("scenario", "server")
            + " with "
            + Argument("slo")
            + f" searches the rate at one batch size, not {len(batch)}"
        )
        raise BadInputError(problem + "; use " + Argument("batch", batch[-1]))
    if length and len(length) > 1 and limit:
        raise BadInputError(
            Argument("slo")
            + f" searches at one length, not {len(length)}; use "
            + Argument("length", length[-1])
        )
    require_existing(images, "images")
    require_known_options(options or {})
    return BenchPlan(
        load=spec,
        batches=batch,
        lengths=length,
        slo=limit,
        processes=PROCESSES if processes is None else int(processes),
        keep_going=keep_going,
        options=options or {},
        images=images,
        affinity=affinity,
        limits={"max_cv": max_cv},
        seed=int(seed),
    )


def _require_count(name: str, given: Any, least: int, most: int | None = None) -> None:
    if given is None or (is_integer(given) and given >= least and (most is None or given <= most)):
        return
    limits = f"of at least {least}" if most is None else f"from {least} to {most:,}"
    raise BadInputError(f"expected a whole number {limits}", argument=Argument(name, given))
