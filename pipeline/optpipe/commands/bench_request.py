"""From the options of `optpipe bench` to a plan, once, at the edge."""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TypeVar

from optpipe.artifacts.lookup import (
    StoredArtifact,
    explain_different_weights,
    find_artifacts,
    select_runnable,
)
from optpipe.backends.registry import BACKENDS
from optpipe.bench.session_plan import BenchPlan
from optpipe.commands.parsing import device_from_text, share_from_text
from optpipe.core.events import Listener
from optpipe.core.measurement import Mode, Scenario
from optpipe.core.precision import precisions_from_text
from optpipe.errors import BadInputError
from optpipe.measuring.interleave import PAIR_METRICS, PairMetric
from optpipe.measuring.measure import LoadSpec
from optpipe.measuring.slo import slo_from_text
from optpipe.measuring.sweep import batch_sizes_from_text
from optpipe.measuring.validity import LIMITS
from optpipe.signoff.loads import ENERGY_SECONDS
from optpipe.workspace.store import Store

Kind = TypeVar("Kind", Scenario, Mode)


def require_interleave(**given: object) -> None:
    """Raises BadInputError that names an option which only `--interleave` heeds."""
    if names := [f"--{name}" for name, value in given.items() if value]:
        raise BadInputError(
            f"{' and '.join(names)}: only --interleave, which compares two artifacts, has rounds and a metric"
        )


def bench_plan_from_options(
    *,
    batch: str | None,
    scenario: str,
    mode: str,
    streams: int,
    rate: float | None,
    slo: str | None,
    tune: bool,
    percentile: float,
    min_time: float,
    max_time: float,
    warm_up: float,
    max_warm_up: float,
    max_cv: str,
    all_sizes: bool,
    images: Path | None,
    options: Mapping[str, Mapping[str, str]],
    affinity: str | None,
    seed: int,
    energy: bool,
    interleave: bool,
) -> BenchPlan:
    """Reads and checks the options; raises BadInputError for what cannot be meant."""
    limit = slo_from_text(slo) if slo is not None else None
    kind, how = _choice_from_text(Scenario, scenario, "--scenario"), _choice_from_text(Mode, mode, "--mode")
    _check_load(kind, streams, rate, has_limit=limit is not None)
    if not 0 < percentile < 100:
        raise BadInputError(f"--percentile {percentile:g}: expected a number between 0 and 100, such as 99 or 99.9")
    least = ENERGY_SECONDS if energy else 0.0
    min_time, max_time = max(min_time, least), max(max_time, least)
    if not (0 < min_time <= max_time and 0 <= warm_up <= max_warm_up and max(min_time, warm_up) < inf):
        raise BadInputError("times must be positive, with --min-time <= --max-time and --warm-up <= --max-warm-up")
    if seed < 0:
        raise BadInputError(f"--seed {seed}: must be 0 or greater")
    if interleave and (tune or limit):
        raise BadInputError("--interleave cannot be combined with --tune or --slo; tune or search first")
    batches = batch_sizes_from_text(batch) if batch is not None else None
    if batches and len(batches) > 1 and (interleave or (kind is Scenario.SERVER and limit)):
        what = "--interleave compares" if interleave else "--scenario server with --slo searches the rate"
        raise BadInputError(f"{what} at one batch size, not {len(batches)}; use --batch {batches[-1]}")
    load = LoadSpec(
        batch_size=1,
        scenario=kind,
        mode=how,
        streams=streams,
        rate_per_s=rate,
        min_seconds=min_time,
        max_seconds=max_time,
        percentile=max(percentile, limit.percent) if limit else percentile,
        warm_up_seconds=warm_up,
        max_warm_up_seconds=max_warm_up,
    )
    return BenchPlan(
        load=load,
        batches=batches,
        slo=limit,
        tune=tune,
        to_the_end=all_sizes,
        options=options,
        images=images,
        affinity=_cpus_from_text(affinity),
        limits={**LIMITS, "max_cv": share_from_text(max_cv, "--max-cv")},
        seed=seed,
    )


def find_bench_targets(
    models: Sequence[str],
    store: Store,
    precision: str | None,
    backend: str | None,
    device: str | None,
    options: Mapping[str, Mapping[str, str]],
    listener: Listener,
) -> tuple[tuple[StoredArtifact, ...], ...]:
    """For each MODEL what it names and can run here; what cannot is said, and so is an option that nothing here has."""
    precisions = tuple(str(each) for each in precisions_from_text(precision)) if precision is not None else ()
    backends = tuple(name.strip() for name in backend.split(",")) if backend is not None else ()
    if unknown := [name for name in backends if name not in BACKENDS]:
        raise BadInputError(f"unknown backend '{unknown[0]}'; choose from {', '.join(BACKENDS)}")
    target = device_from_text(device)
    groups: list[tuple[StoredArtifact, ...]] = []
    for model in models:
        able, reasons = select_runnable(find_artifacts(model, store, precisions, backends, target))
        for label, why_not in reasons.items():
            listener.warn(f"not measured: {label}: {why_not}")
        if any(not each.entry.info["weights"]["trained"] for each in able):
            listener.warn(f"{model}: weights are random; speed is meaningful, accuracy is not")
        if (why := explain_different_weights(able)) is not None:
            listener.warn(why)
        groups.append(able)
    measured = {each.entry.info["backend"] for group in groups for each in group}
    for name in sorted(set(options) - measured):
        listener.warn(f"--option {name}.… has no effect: no {name} artifact is measured")
    return tuple(groups)


def pair_from_targets(
    models: Sequence[str], groups: Sequence[Sequence[StoredArtifact]], metric: str
) -> tuple[StoredArtifact, StoredArtifact, PairMetric]:
    """The two artifacts of `--interleave`: two MODELs of one artifact each, or one MODEL that names two."""
    if metric not in PAIR_METRICS:
        raise BadInputError(f"--metric {metric}: choose from {', '.join(PAIR_METRICS)}")
    every = [artifact for group in groups for artifact in group]
    if len(every) != 2:
        labels = ", ".join(f"{each.entry.id} {each.label}" for each in every)
        raise BadInputError(
            f"--interleave needs exactly two artifacts; {' '.join(models)} matches {len(every)}: {labels}\nspecify two IDs"
        )
    return every[0], every[1], metric


def _check_load(kind: Scenario, streams: int, rate: float | None, *, has_limit: bool) -> None:
    if streams < 1 or (streams > 1 and kind not in (Scenario.MULTI_STREAM, Scenario.OFFLINE)):
        raise BadInputError(
            f"--streams {streams}: must be at least 1; more than 1 requires --scenario multi-stream or offline"
        )
    if kind is Scenario.SERVER and rate is None and not has_limit:
        raise BadInputError("--scenario server requires --rate QUERIES_PER_SECOND, or --slo to find the maximum rate")
    if rate is not None and (kind is not Scenario.SERVER or not 0 < rate < inf):
        raise BadInputError("--rate must be positive and requires --scenario server")
    if rate is not None and has_limit:
        raise BadInputError("--rate and --slo are mutually exclusive")


def _choice_from_text(kinds: type[Kind], text: str, flag: str) -> Kind:
    try:
        return kinds(text)
    except ValueError as error:
        raise BadInputError(f"{flag} {text}: choose from {', '.join(kinds)}") from error


def _cpus_from_text(text: str | None) -> tuple[int, ...] | None:
    import os

    if text is None:
        return None
    have = os.sched_getaffinity(0)
    cpus: set[int] = set()
    try:
        for part in text.split(","):
            low, dash, high = part.partition("-")
            span = range(int(low), int(high if dash else low) + 1)
            cpus |= set(span) if span and span[-1] <= max(have) else {-1}
    except ValueError:
        cpus = set()
    if not cpus or cpus - have:
        raise BadInputError(
            f"--affinity {text}: expected CPUs from {','.join(map(str, sorted(have)))}, such as 0,2 or 4-7"
        )
    return tuple(sorted(cpus))
