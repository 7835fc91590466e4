"""From the options of `optpipe bench` and `bench-pair` to a plan, once, at the edge."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from optpipe.backends.registry import BACKENDS
from optpipe.cli.bench_options import LoadOptions, TargetOptions
from optpipe.cli.parsing import options_from_text, require_device, share_from_text
from optpipe.core.choices import choices_from_text
from optpipe.core.defaults import PROCESSES
from optpipe.core.errors import BadInputError, require_existing
from optpipe.core.events import Listener
from optpipe.core.measurement import LoadSpec, Scenario
from optpipe.core.precision import precisions_from_text
from optpipe.measure.figures import ENERGY_SECONDS
from optpipe.measure.search import Slo, batch_sizes_from_text, slo_from_text
from optpipe.measure.session_plan import BenchPlan
from optpipe.measure.validity import LIMITS
from optpipe.models.artifacts.decisions import find_decision
from optpipe.models.artifacts.lookup import StoredArtifact, explain_different_weights, find_artifacts, select_runnable
from optpipe.workspace.store import Store


def bench_plan_from_options(
    given: LoadOptions,
    targets: TargetOptions,
    *,
    batch: str | None,
    length: str | None,
    slo: str | None = None,
    energy: bool = False,
    tune: bool = False,
    to_the_end: bool = False,
    processes: int = PROCESSES,
    interval: str | None = None,
) -> BenchPlan:
    """Reads and checks the options. Raises BadInputError for what cannot be meant."""
    limit = None if slo is None else slo_from_text(slo)
    load = _read_load(given, limit, energy=energy)
    if given.seed < 0:
        raise BadInputError(f"--seed {given.seed}: must be 0 or greater")
    batches = batch_sizes_from_text(batch) if batch is not None else None
    if batches and len(batches) > 1 and load.scenario is Scenario.SERVER and slo:
        raise BadInputError(
            f"--scenario server with --slo searches the rate at one batch size, not {len(batches)}; use --batch {batches[-1]}"
        )
    require_existing(given.images, "--images")
    lengths = batch_sizes_from_text(length, "--length") if length is not None else None
    if lengths and len(lengths) > 1 and (slo or tune):
        flag = "--slo" if slo else "--tune"
        raise BadInputError(f"{flag} searches at one length, not {len(lengths)}; use --length {lengths[-1]}")
    return BenchPlan(
        load=load,
        batches=batches,
        lengths=lengths,
        slo=limit,
        processes=processes,
        interval=None if interval is None else _half_width_from_text(interval),
        tune=tune,
        to_the_end=to_the_end,
        options=options_from_text(targets.option or []),
        images=given.images,
        affinity=_cpus_from_text(given.affinity),
        limits={**LIMITS, "max_cv": share_from_text(given.max_cv, "--max-cv")},
        seed=given.seed,
    )


def _half_width_from_text(text: str) -> float:
    """Reads `--interval`. Raises BadInputError for an interval around p50 that reaches zero, which any measurement has."""
    half_width = share_from_text(text, "--interval")
    if half_width >= 1:
        raise BadInputError(f"--interval {text}: must be less than 100% of p50, such as 1%")
    return half_width


def _read_load(given: LoadOptions, slo: Slo | None, *, energy: bool) -> LoadSpec:
    """The load, of a batch size to be filled in."""
    scenario, streams, rate, percentile = given.scenario, given.streams, given.rate, given.percentile
    if rate is not None and slo is not None:
        raise BadInputError("--rate and --slo are mutually exclusive")
    if streams < 1 or (streams > 1 and scenario not in (Scenario.MULTI_STREAM, Scenario.OFFLINE)):
        raise BadInputError(
            f"--streams {streams}: must be at least 1; more than 1 requires --scenario multi-stream or offline"
        )
    if rate is not None and (scenario is not Scenario.SERVER or not 0 < rate < inf):
        raise BadInputError("--rate must be positive and requires --scenario server")
    if rate is None and slo is None and scenario is Scenario.SERVER:
        raise BadInputError(
            "--scenario server requires --rate QUERIES_PER_SECOND; optpipe bench --slo finds the maximum rate"
        )
    if not 0 < percentile < 100:
        raise BadInputError(f"--percentile {percentile:g}: expected a number between 0 and 100, such as 99 or 99.9")
    least = ENERGY_SECONDS if energy else 0.0
    min_time, max_time = max(given.min_time, least), max(given.max_time, least)
    warm_up, max_warm_up = given.warm_up, given.max_warm_up
    if not (0 < min_time <= max_time and 0 <= warm_up <= max_warm_up and max(min_time, warm_up) < inf):
        raise BadInputError("times must be positive, with --min-time <= --max-time and --warm-up <= --max-warm-up")
    return LoadSpec(
        1, scenario, given.mode, streams, rate, min_time, max_time, max(percentile, slo.percent) if slo else percentile,
        warm_up, max_warm_up,
    )  # fmt: skip


def find_bench_targets(
    models: Sequence[str], given: TargetOptions, store: Store, listener: Listener
) -> tuple[tuple[StoredArtifact, ...], ...]:
    """For each MODEL what it names and can run here; what cannot is said, and so is an option that nothing here has.

    With the precision `auto`, what `build --precision auto` chose.
    """
    chosen = given.precision == "auto"
    named_precision = None if chosen else given.precision
    precisions = () if named_precision is None else tuple(map(str, precisions_from_text(named_precision)))
    backends = () if given.backend is None else choices_from_text(given.backend, BACKENDS, "--backend")
    target = require_device(given.device)
    groups: list[tuple[StoredArtifact, ...]] = []
    for model in models:
        named = find_artifacts(model, store, precisions, backends, target)
        able, reasons = select_runnable(_select_chosen(named, model, store) if chosen else named)
        for label, why_not in reasons.items():
            listener.warn(f"not measured: {label}: {why_not}")
        if len(able) > 1 and (decided := find_decision(store.workspace, {each.entry.id for each in able})):
            listener.inform(f"build --precision auto chose {decided.describe()}")
        if any(not each.entry.info.weights.trained for each in able):
            listener.warn(f"{model}: weights are random; speed is meaningful, accuracy is not")
        if (why := explain_different_weights(able)) is not None:
            listener.warn(why)
        groups.append(able)
    measured = {each.entry.info.backend for group in groups for each in group}
    for name in sorted(set(options_from_text(given.option or [])) - measured):
        listener.warn(f"--option {name}.… has no effect: no {name} artifact is measured")
    return tuple(groups)


def _select_chosen(artifacts: Sequence[StoredArtifact], model: str, store: Store) -> tuple[StoredArtifact, ...]:
    """The winners of the newest decision. Raises BadInputError where there is none."""
    decided = find_decision(store.workspace, {each.entry.id for each in artifacts})
    if decided is None:
        raise BadInputError(f"nothing is chosen for {model} yet; optpipe build {model} --precision auto chooses")
    return tuple(each for each in artifacts if each.entry.id in decided.winners)


def pair_from_targets(
    models: Sequence[str], groups: Sequence[Sequence[StoredArtifact]]
) -> tuple[StoredArtifact, StoredArtifact]:
    """The two artifacts of `bench-pair`: two MODELs of one artifact each, or one MODEL that names two.

    Those of one model get the same inputs, whatever each was verified on.
    """
    every = [artifact for group in groups for artifact in group]
    if len(every) != 2:
        labels = ", ".join(dict.fromkeys(f"{each.entry.id} {each.label}" for each in every))
        named = " ".join(dict.fromkeys(models))
        raise BadInputError(
            f"bench-pair compares two artifacts; {named} matches {labels}\nspecify two IDs, the baseline first"
        )
    baseline, contender = every
    if contender.model.id == baseline.model.id:
        contender = replace(contender, reference=baseline.reference)
    return baseline, contender


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
