"""Everything a build is judged on, as one value, and what it shows for each criterion of a policy."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import expm1, log1p

from optpipe.artifacts.facts import JudgedBuild
from optpipe.core.measurement import (
    Measurement,
    find_differing_settings,
    format_settings,
)
from optpipe.core.observation import Blocker, Missing, Observation, ScaledTail
from optpipe.core.quantity import Dimension, format_quantity
from optpipe.measuring.groups import ProcessGroup, describe_tries, explain_no_scatter, group_processes
from optpipe.measuring.measured import (
    RecordedMeasurement,
    explain_clock_difference,
    find_environment_differences,
)
from optpipe.signoff.policy import Criterion
from optpipe.signoff.policy_format import LoadFilter
from optpipe.stats.means import Mean, subtract_means

UNKNOWN = float("nan")
"""The value of an observation that could not be made; its caps say why."""


@dataclass(frozen=True, slots=True)
class BuildEvidence:
    """What was gathered for one build. Nothing in it is a verdict."""

    build: JudgedBuild
    measured: tuple[RecordedMeasurement, ...] = ()
    baseline: tuple[RecordedMeasurement, ...] = ()
    baseline_name: str | None = None
    accuracy: Mapping[str, Observation] = field(default_factory=dict)
    """What `TaskContract.observe` says: `drop`, `agreement`, `score`, …, as fractions."""
    preprocessing: Mapping[str, Observation] = field(default_factory=dict)
    """`agreement` as a fraction, `snr` in dB."""
    tensor_core_share: Observation | None = None
    record: str = ""
    """Where the store's record of the build lies in the dossier."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What all of `measured` ran with, because the policy asks for it."""
    confidence: float = 0.95
    """Of every interval."""


def observe(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    """What `evidence` shows for `criterion`, in the criterion's base unit."""
    return _OBSERVERS[criterion.section](criterion, evidence)


def select_groups(where: LoadFilter, measured: Sequence[RecordedMeasurement]) -> list[ProcessGroup]:
    """What `where` is about: of each load all processes with the settings that were measured last."""
    wanted = (where.batch_size, where.scenario, where.mode, where.streams, where.rate)
    newest: dict[object, ProcessGroup] = {}
    for group in group_processes(measured):
        if all(want is None or want == has for want, has in zip(wanted, group.load.key, strict=True)):
            newest[group.load.key] = group
    return list(newest.values())


def filter_by_options(
    options: Mapping[str, str], measured: Iterable[RecordedMeasurement]
) -> Iterator[RecordedMeasurement]:
    """Those of `measured` that ran with `options`, whatever others they had."""
    for one in measured:
        if options.items() <= one.measurement.subject.settings.items():
            yield one


def suggest_bench_command(evidence: BuildEvidence, where: LoadFilter) -> str:
    """The command that measures what `where` asks for."""
    build = evidence.build
    parts = [f"optpipe bench {build.model} --backend {build.backend} --precision {build.precision}"]
    parts += [f"--batch {where.batch_size}"] if where.batch_size else []
    parts += [f"--scenario {where.scenario}"] if where.scenario else []
    parts += [f"--mode {where.mode}"] if where.mode else []
    parts += [f"--streams {where.streams}"] if where.streams else []
    parts += [f"--rate {where.rate:g}"] if where.rate else []
    parts += [f"--option {build.backend}.{name}={value}" for name, value in evidence.options.items()]
    return " ".join(parts)


def _observe_groups(criterion: Criterion, evidence: BuildEvidence, name: str) -> Sequence[Observation] | Missing:
    found = select_groups(criterion.where, evidence.measured)
    if not found:
        wanted = criterion.where.to_text() or "this build"
        wanted += f", with {format_settings(evidence.options, evidence.options)}" if evidence.options else ""
        return Missing(f"not measured: {wanted}", suggest_bench_command(evidence, criterion.where))
    return [observe_group(group, name, criterion.dimension, evidence) for group in found]


def _describe_group(group: ProcessGroup, measured: Sequence[RecordedMeasurement]) -> str:
    """`batch 8, single-stream, compute, threads=2, the most recent of 3 settings; 5 processes`."""
    about, load = str(group.load), group.load.key
    known = [each.measurement.subject.settings for each in measured if each.measurement.load.key == load]
    if (several := len({tuple(each.items()) for each in known})) > 1:
        own = format_settings(group.newest.measurement.subject.settings, find_differing_settings(known))
        about += f", {own}, the most recent of {several} settings"
    return f"{about}; {describe_tries(group)}"


def observe_group(group: ProcessGroup, name: str, dimension: Dimension | None, evidence: BuildEvidence) -> Observation:
    """The figure `name` over the processes of a group, or what forbids judging it."""
    blockers = find_blockers(group, evidence)
    about, source = _describe_group(group, evidence.measured), group.newest.run
    found = group.estimate(name, evidence.confidence)
    if found is None:
        missing = _explain_missing_figure(group, name)
        return Observation(UNKNOWN, blockers=(*blockers, missing), about=about, source=source)
    if found.low is None and name != "memory":
        blockers = (*blockers, Blocker(str(found.note), suggest_bench_command(evidence, _filter_of(group))))
    values = [each for run in group.list_values(name) for each in run]
    if dimension is not None and len(values) > 1 and min(values) < max(values):
        about += f", {format_quantity(min(values), dimension)} to {format_quantity(max(values), dimension)}"
    if name == "memory":  # a peak: the largest that was seen, exactly
        return Observation(max(values), blockers=blockers, about=about, source=source)
    tail = None if name == "energy" else group.compute_mean(name)
    return Observation(found.value, found.low, found.high, blockers, about, source, tail)


def _filter_of(group: ProcessGroup) -> LoadFilter:
    load = group.load
    return LoadFilter(load.batch_size, load.scenario, load.mode, load.streams)


def _explain_missing_figure(group: ProcessGroup, name: str) -> Blocker:
    found = group.newest.measurement
    if name == "energy":
        why = found.energy_why_not or "no energy counter on this machine"
        return Blocker(f"the energy was not measured: {why}", "measure it on a GPU: optpipe bench … --energy")
    if name == "memory":
        return Blocker("the peak memory was not measured", "measure again")
    if found.latency_ns is None or not group.valid:
        return Blocker("no VALID process", "measure again: optpipe bench …")
    why = found.latency_ns.withheld.get(name, "not computed")
    return Blocker(
        f"{name} is not available: {why}", f"optpipe bench … --percentile {name.removeprefix('p')} --max-time 600"
    )


CAVEATS = {
    "random-weights": Blocker("the weights are random", "build with the weights you will ship: --weights FILE"),
    "synthetic-inputs": Blocker("the inputs are synthetic", "measure on real images: --images DIR"),
}
"""What a measurement's caveats mean for a verdict."""


def find_blockers(group: ProcessGroup, evidence: BuildEvidence) -> tuple[Blocker, ...]:
    """What forbids judging a group: no process is VALID, or one is of another file than the build's."""
    blockers = []
    if not group.valid:
        found = group.newest.measurement
        spoilt = [reason for reason in found.reasons if reason.invalidates] or list(found.reasons)
        more = f" (and {len(spoilt) - 1} more)" if len(spoilt) > 1 else ""
        count = len(group.tries)
        which = "the measurement is" if count == 1 else f"all {count} processes are INVALID; the last is"
        why = spoilt[0].message if spoilt else "no reason recorded"
        blockers.append(Blocker(f"{which} INVALID: {why}{more}", spoilt[0].remedy if spoilt else "measure again"))
    tries = group.valid or group.tries
    caveats = dict.fromkeys(caveat for one in tries for caveat in one.measurement.caveats)
    blockers += [CAVEATS.get(caveat, Blocker(caveat, "measure again without it")) for caveat in caveats]
    hashes = {one.measurement.subject.sha256 for one in tries} - {None}
    if evidence.build.sha256 and hashes - {evidence.build.sha256}:
        what = "the measured file differs from the one being judged (sha256 mismatch)"
        blockers.append(Blocker(what, "measure the current build"))
    return tuple(blockers)


def _latency(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    return _observe_groups(criterion, evidence, criterion.metric)


def _throughput(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    return _observe_groups(criterion, evidence, "throughput")


def _memory(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    return _observe_groups(criterion, evidence, "memory")


def _energy(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    return _observe_groups(criterion, evidence, "energy")


def _stability(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    return _observe_groups(criterion, evidence, "cv")


def _regression(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    if not evidence.baseline:
        return Missing("no approved baseline", "approve one: optpipe approve DOSSIER")
    found = select_groups(criterion.where, evidence.measured)
    if not found:
        return Missing("not measured", suggest_bench_command(evidence, criterion.where))
    return [_observe_loss(criterion.metric, group, evidence) for group in found]


def _observe_loss(metric: str, group: ProcessGroup, evidence: BuildEvidence) -> Observation:
    """The loss against the baseline as a fraction, by the difference of the two mean logarithms (Welch's t)."""
    about = f"{_describe_group(group, evidence.measured)}, compared with {evidence.baseline_name}"
    blockers, source = list(find_blockers(group, evidence)), group.newest.run
    others = [each for each in select_groups(LoadFilter(), evidence.baseline) if each.load.key == group.load.key]
    if not others:
        none = Blocker(f"the baseline has no measurement of {group.load}", "approve a newer baseline")
        return Observation(UNKNOWN, blockers=(*blockers, none), about=about, source=source)
    baseline = others[-1]
    about += _describe_other_settings(group.newest.measurement, baseline.newest.measurement)
    about += f" ({describe_tries(baseline)})"
    theirs = find_blockers(baseline, _evidence_from_measured(baseline.newest))
    blockers += [Blocker(f"baseline: {each.reason}", each.remedy) for each in theirs]
    blockers += (
        [_FOREIGN] if find_environment_differences(group.newest.environment, baseline.newest.environment) else []
    )
    if text := explain_clock_difference(group.newest, baseline.newest):
        blockers.append(Blocker(text, "lock the clocks and repeat both measurements"))
    new, old = (each.compute_mean(metric, logarithms=True) for each in (group, baseline))
    if new is None or old is None:
        counts = [len([each for run in one.list_values(metric) for each in run]) for one in (group, baseline)]
        few = Blocker(
            f"{explain_no_scatter(min(counts))}: {counts[0]} of the build and {counts[1]} of the baseline",
            f"compare both: optpipe bench-pair {baseline.newest.measurement.subject.artifact} {evidence.build.artifact}",
        )
        return Observation(UNKNOWN, blockers=(*blockers, few), about=about, source=source)
    change = subtract_means(new, old)
    if metric == "throughput":
        change = Mean(-change.value, change.error, change.freedom)
    low, high = change.interval(evidence.confidence)
    return Observation(expm1(change.value), expm1(low), expm1(high), tuple(blockers), about, source, LossTail(change))


@dataclass(frozen=True, slots=True)
class LossTail:
    """How improbable a loss is: that of the logarithm of the ratio."""

    change: Mean

    def compute_p_value_above(self, limit: float) -> float:
        """Were `limit` the loss."""
        return self.change.compute_p_value_above(log1p(limit))

    def compute_p_value_below(self, limit: float) -> float:
        """Were `limit` the loss."""
        return self.change.compute_p_value_below(log1p(limit))


def _describe_other_settings(contender: Measurement, baseline: Measurement) -> str:
    theirs = baseline.subject.settings
    names = find_differing_settings((contender.subject.settings, theirs))
    return f" with {format_settings(theirs, names)}" if set(names) & set(theirs) else ""


_FOREIGN = Blocker("the baseline was measured in another environment", "measure both on the deployment machine")


def _evidence_from_measured(one: RecordedMeasurement) -> BuildEvidence:
    subject = one.measurement.subject
    return BuildEvidence(JudgedBuild(subject.model or "", subject.artifact, subject.backend, subject.precision))


def _environment(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    seen = {
        one.environment.get_fact(criterion.metric): one.run
        for group in select_groups(LoadFilter(), evidence.measured)
        for one in group.valid or group.tries
    }
    if not seen:
        return Missing("nothing was measured", suggest_bench_command(evidence, LoadFilter()))
    return [Observation(name, source=run) for name, run in seen.items()]


def _accuracy(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    wanted = {
        "maximum_drop": "drop",
        "minimum_score": "score",
        "minimum_top1": "top1",
        "minimum_agreement": "agreement",
    }
    name = wanted[criterion.metric]
    if criterion.score is not None:
        name = f"drop of {criterion.score}" if name == "drop" else criterion.score
    figure = evidence.accuracy.get(name)
    if figure is None:
        known = [each.removeprefix("drop of ") for each in evidence.accuracy if each.startswith("drop of ")]
        if criterion.score is not None and known:
            there = f"this model's task has no score {criterion.score}; it has {', '.join(known)}"
            return Missing(there, "change the policy's [accuracy]")
        command = f"optpipe evaluate {evidence.build.model} --data DIR"
        return Missing(f"the {name} was not evaluated for this build", command)
    if criterion.dimension is Dimension.POINTS:
        low, high = (None if bound is None else 100 * bound for bound in (figure.low, figure.high))
        tail = None if figure.tail is None else ScaledTail(figure.tail, 100)
        return [replace(figure, value=100 * float(figure.value), low=low, high=high, tail=tail)]
    return [figure]


def _preprocessing(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    figure = evidence.preprocessing.get(criterion.metric.removeprefix("minimum_"))
    if figure is None:
        command = f"optpipe preprocess {evidence.build.model} --images DIR"
        return Missing("preprocessing parity was not verified for this model", command)
    return [figure]


def _precision(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    shares = evidence.build.macs_share
    if not shares:
        return Missing("the precision of this build was not verified", f"optpipe build {evidence.build.model}")
    return [Observation(float(shares.get(criterion.metric, 0.0)), source=evidence.record)]


def _size(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:  # noqa: ARG001
    if evidence.build.size_bytes is None:
        return Missing("the size of this build is not recorded", f"optpipe build {evidence.build.model}")
    return [Observation(float(evidence.build.size_bytes), source=evidence.record)]


def _tensor_cores(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:  # noqa: ARG001
    if evidence.tensor_core_share is None:
        return Missing("not profiled on a GPU", f"optpipe profile {evidence.build.model}")
    return [evidence.tensor_core_share]


_OBSERVERS: Mapping[str, Callable[[Criterion, BuildEvidence], Sequence[Observation] | Missing]] = {
    "latency": _latency,
    "throughput": _throughput,
    "regression": _regression,
    "memory": _memory,
    "energy": _energy,
    "stability": _stability,
    "environment": _environment,
    "accuracy": _accuracy,
    "preprocessing": _preprocessing,
    "precision": _precision,
    "size": _size,
    "tensor_cores": _tensor_cores,
}
