"""Everything a build is judged on, as one value, and what it shows for each criterion of a policy."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from optpipe.artifacts.facts import JudgedBuild
from optpipe.core.measurement import (
    Measurement,
    find_differing_settings,
    format_settings,
)
from optpipe.core.observation import Blocker, Missing, Observation
from optpipe.measuring.measured import (
    RecordedMeasurement,
    explain_clock_difference,
    find_environment_differences,
)
from optpipe.signoff.policy import Criterion
from optpipe.signoff.policy_format import LoadFilter

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
    """`top1`, `drop`, `agreement`, as fractions of the images."""
    preprocessing: Mapping[str, Observation] = field(default_factory=dict)
    """`agreement` as a fraction, `snr` in dB."""
    tensor_core_share: Observation | None = None
    record: str = ""
    """Where the store's record of the build lies in the dossier."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What all of `measured` ran with, because the policy asks for it."""


def observe(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    """What `evidence` shows for `criterion`, in the criterion's base unit."""
    return _OBSERVERS[criterion.section](criterion, evidence)


def select_measurements(where: LoadFilter, measured: Sequence[RecordedMeasurement]) -> list[RecordedMeasurement]:
    """The measurements that `where` is about: of each load the newest, whatever its settings."""
    newest: dict[object, RecordedMeasurement] = {}
    for one in sorted(measured, key=lambda each: (each.measurement.started_utc, each.run)):
        found = one.measurement
        wanted = (where.batch_size, where.scenario, where.mode, where.streams, where.rate)
        if all(want is None or want == has for want, has in zip(wanted, found.load.key, strict=True)):
            newest[found.load.key] = one
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


def _observe_measurements(
    criterion: Criterion, evidence: BuildEvidence, figure: Callable[[Measurement], Observation | Missing]
) -> Sequence[Observation] | Missing:
    found = select_measurements(criterion.where, evidence.measured)
    if not found:
        wanted = criterion.where.to_text() or "this build"
        wanted += f", with {format_settings(evidence.options, evidence.options)}" if evidence.options else ""
        return Missing(f"not measured: {wanted}", suggest_bench_command(evidence, criterion.where))
    return [_observe_measurement(one, figure(one.measurement), evidence) for one in found]


def _describe_chosen_settings(one: RecordedMeasurement, measured: Sequence[RecordedMeasurement]) -> str:
    """`threads=2, the newest of 3 settings`, where the load of `one` was measured with others too; else nothing."""
    known = [
        each.measurement.subject.settings for each in measured if each.measurement.load.key == one.measurement.load.key
    ]
    several = len({tuple(each.items()) for each in known})
    if several < 2:
        return ""
    return f", {format_settings(one.measurement.subject.settings, find_differing_settings(known))}, the most recent of {several} settings"


def _observe_measurement(
    one: RecordedMeasurement, figure: Observation | Missing, evidence: BuildEvidence
) -> Observation:
    caps = find_blockers(one, evidence)
    about = str(one.measurement.load) + _describe_chosen_settings(one, evidence.measured)
    if isinstance(figure, Missing):
        return Observation(
            UNKNOWN, blockers=(*caps, Blocker(figure.reason, figure.remedy)), about=about, source=one.run
        )
    return Observation(figure.value, figure.low, figure.high, (*caps, *figure.blockers), about, one.run)


CAVEATS = {
    "random-weights": Blocker("the weights are random", "build with the weights you will ship: --weights FILE"),
    "synthetic-inputs": Blocker("the inputs are synthetic", "measure on real images: --images DIR"),
}
"""What a measurement's caveats mean for a verdict."""


def find_blockers(one: RecordedMeasurement, evidence: BuildEvidence) -> tuple[Blocker, ...]:
    """What forbids judging a measurement: it is INVALID, was interrupted, or is of another file than the build's."""
    found, caps = one.measurement, []
    if not found.is_valid:
        spoilt = [reason for reason in found.reasons if reason.invalidates] or list(found.reasons)
        why = spoilt[0].message if spoilt else "no reason recorded"
        more = f" (and {len(spoilt) - 1} more)" if len(spoilt) > 1 else ""
        caps.append(
            Blocker(f"the measurement is INVALID: {why}{more}", spoilt[0].remedy if spoilt else "measure again")
        )
    caps += [CAVEATS.get(caveat, Blocker(caveat, "measure again without it")) for caveat in found.caveats]
    if found.interrupted:
        caps.append(Blocker("the measurement was interrupted", "measure again"))
    if found.subject.sha256 and evidence.build.sha256 and found.subject.sha256 != evidence.build.sha256:
        caps.append(
            Blocker(
                "the measured file differs from the one being judged (sha256 mismatch)", "measure the current build"
            )
        )
    return tuple(caps)


def _latency(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    return _observe_measurements(criterion, evidence, lambda found: observe_percentile(found, criterion.metric))


def observe_percentile(found: Measurement, name: str) -> Observation | Missing:
    """A latency percentile in ns with its interval, or why the sample cannot give it."""
    latency = found.latency_ns
    one = None if latency is None else latency.percentiles.get(name)
    if one is None:
        why = "no latency was measured" if latency is None else latency.withheld.get(name, "not computed")
        return Missing(f"{name} is not available: {why}", "measure longer: optpipe bench … --min-time 60")
    return Observation(one.value, one.low, one.high)


def _throughput(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    return _observe_measurements(criterion, evidence, observe_throughput)


def observe_throughput(found: Measurement) -> Observation | Missing:
    """Images per second with its interval."""
    estimate = found.throughput_images_per_s
    if estimate is None or estimate.low is None:
        return Missing("the throughput has no confidence interval", "measure longer: optpipe bench … --min-time 60")
    return Observation(estimate.value, estimate.low, estimate.high)


def _memory(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    def figure(found: Measurement) -> Observation | Missing:
        peak = found.memory_bytes
        return Observation(float(peak)) if peak else Missing("the peak memory was not measured", "measure again")

    return _observe_measurements(criterion, evidence, figure)


def _energy(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    def figure(found: Measurement) -> Observation | Missing:
        estimate = found.energy_j_per_image
        if estimate is None or estimate.low is None:
            why = (estimate.note if estimate else found.energy_why_not) or "no energy counter on this machine"
            return Missing(f"the energy was not measured: {why}", "measure on a GPU for at least 10 s")
        return Observation(estimate.value, estimate.low, estimate.high)

    return _observe_measurements(criterion, evidence, figure)


def _stability(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    def figure(found: Measurement) -> Observation | Missing:
        cv = found.latency_ns.cv if found.latency_ns else None
        return Observation(cv.value, cv.low, cv.high) if cv else Missing("no latency was measured", "measure again")

    return _observe_measurements(criterion, evidence, figure)


def _regression(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    if not evidence.baseline:
        return Missing("no approved baseline", "approve one: optpipe approve DOSSIER")
    found = select_measurements(criterion.where, evidence.measured)
    if not found:
        return Missing("not measured", suggest_bench_command(evidence, criterion.where))
    return [_observe_loss(criterion.metric, one, evidence) for one in found]


def _observe_loss(metric: str, one: RecordedMeasurement, evidence: BuildEvidence) -> Observation:
    contender = one.measurement
    others = [
        each for each in select_measurements(LoadFilter(), evidence.baseline) if each.measurement.load == contender.load
    ]
    about = str(contender.load) + _describe_chosen_settings(one, evidence.measured)
    about += f", compared with {evidence.baseline_name}"
    caps = list(find_blockers(one, evidence))
    if not others:
        cap = Blocker(f"the baseline has no measurement of {contender.load}", "approve a newer baseline")
        return Observation(UNKNOWN, blockers=(*caps, cap), about=about, source=one.run)
    baseline = others[-1]
    about += _describe_other_settings(contender, baseline.measurement)
    caps += [
        Blocker(f"baseline: {cap.reason}", cap.remedy)
        for cap in find_blockers(baseline, _evidence_from_measured(baseline))
    ]
    caps += [_FOREIGN] if find_environment_differences(one.environment, baseline.environment) else []
    caps += (
        [Blocker(text, "lock the clocks and repeat both measurements")]
        if (text := explain_clock_difference(one, baseline))
        else []
    )
    figure = observe_throughput if metric == "throughput" else lambda each: observe_percentile(each, metric)
    new, old = figure(contender), figure(baseline.measurement)
    if isinstance(new, Missing) or isinstance(old, Missing):
        missing = new if isinstance(new, Missing) else old
        assert isinstance(missing, Missing)
        return Observation(
            UNKNOWN, blockers=(*caps, Blocker(missing.reason, missing.remedy)), about=about, source=one.run
        )
    value, low, high = divide_observations(new, old)
    if metric == "throughput":
        return Observation(1 - value, 1 - high, 1 - low, tuple(caps), about, one.run)
    return Observation(value - 1, low - 1, high - 1, tuple(caps), about, one.run)


def _describe_other_settings(contender: Measurement, baseline: Measurement) -> str:
    theirs = baseline.subject.settings
    names = find_differing_settings((contender.subject.settings, theirs))
    return f" with {format_settings(theirs, names)}" if set(names) & set(theirs) else ""


_FOREIGN = Blocker("the baseline was measured in another environment", "measure both on the deployment machine")


def _evidence_from_measured(one: RecordedMeasurement) -> BuildEvidence:
    subject = one.measurement.subject
    return BuildEvidence(JudgedBuild(subject.model or "", subject.artifact, subject.backend, subject.precision))


def divide_observations(new: Observation, old: Observation) -> tuple[float, float, float]:
    """`new` over `old` with the widest interval that the two intervals allow, so that it mirrors exactly.

    With both at confidence c, the ratio's interval holds with at least 2c - 1 (Bonferroni); the bounds of independent
    estimates rarely meet at once, so in practice it is wider than c asks for.
    """
    assert not isinstance(new.value, str)
    assert not isinstance(old.value, str)
    assert None not in (new.low, new.high, old.low, old.high)
    return (
        new.value / old.value if old.value else float("nan"),
        (new.low or 0.0) / old.high if old.high else float("nan"),
        (new.high or 0.0) / old.low if old.low else float("nan"),
    )


def _environment(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    seen = {
        one.environment.get_fact(criterion.metric): one.run
        for one in select_measurements(LoadFilter(), evidence.measured)
    }
    if not seen:
        return Missing("nothing was measured", suggest_bench_command(evidence, LoadFilter()))
    return [Observation(name, source=run) for name, run in seen.items()]


def _accuracy(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    wanted = {"maximum_drop": "drop", "minimum_top1": "top1", "minimum_agreement": "agreement"}[criterion.metric]
    figure = evidence.accuracy.get(wanted)
    if figure is None:
        command = f"optpipe evaluate {evidence.build.model} --data DIR"
        return Missing(f"the {wanted} was not evaluated for this build", command)
    if wanted == "drop":  # in points
        low, high = (None if bound is None else 100 * bound for bound in (figure.low, figure.high))
        return [replace(figure, value=100 * float(figure.value), low=low, high=high)]
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
