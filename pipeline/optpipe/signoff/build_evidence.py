"""The evidence for one build, the figures of its measured loads, and the commands that a verdict suggests.

Each command runs as printed and supplies the missing evidence. DIR, FILE, DOSSIER, BEFORE, and AFTER stand for paths that only
the user can fill in.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import expm1, log1p
from typing import Any

from optpipe.core.bench_defaults import MAX_CV, PROCESSES
from optpipe.core.entries import Environment
from optpipe.core.load import LoadSpec, list_load_options
from optpipe.core.measurement import Subject
from optpipe.core.metrics.measured import PairMetric
from optpipe.core.metrics.registry import find_metric
from optpipe.core.metrics.sections import (
    ACCURACY,
    ENERGY_PER_SAMPLE,
    LATENCY,
    LOADING,
    MORE_SCORES,
    OUTPUTS,
    PARITY,
    PEAK_MEMORY,
    PER_WATT,
    POWER_DRAW,
    PRECISION,
    RATE,
    REGRESSION,
    SIZE,
    SPEEDUP,
    STABILITY,
    TENSOR_CORES,
)
from optpipe.core.params import make_call
from optpipe.core.percentile_names import percent_from_name
from optpipe.core.quantity import (
    Dimension,
    Estimate,
    choose_dimension,
    format_quantity,
    share_to_text,
)
from optpipe.core.settings import find_differing_settings, format_option, format_settings
from optpipe.core.verdict import Blocker, InverseTail, Observation, ScaledTail, Tail
from optpipe.core.wording import Argument, Call
from optpipe.evaluate.recompute import (
    count_evaluated_together,
    find_failure,
    has_evaluated_other_file,
    identify_data,
    observe_accuracy,
)
from optpipe.measure.figures import (
    count_measured_together,
    has_measured_other_file,
    list_artifact_measurements,
)
from optpipe.measure.groups import (
    ProcessGroup,
    RecordedMeasurement,
    describe_tries,
    group_processes,
    read_raw_value,
)
from optpipe.measure.pair import RecordedPair
from optpipe.measure.turns import RecordedTurns, turns_from_runs
from optpipe.measure.validity import HOST_CAUSES, WRONG_OUTPUTS
from optpipe.models.artifacts.judged_build import JudgedBuild
from optpipe.preprocess.proof import identify_images, is_proof_run, observe_preprocessing
from optpipe.signoff.policy import Criterion, LoadFilter, Policy
from optpipe.stats.means import (
    MAX_RUNS,
    MIN_VALUES,
    Look,
    OtherSpeed,
    count_runs_needed,
    predict_next_upper_bound,
)
from optpipe.trace.report import (
    MORE_ITERATIONS,
    has_profiled_other_file,
    observe_tensor_cores,
    suggest_profile,
)
from optpipe.workspace.entry import Run

LONGEST_S = 600
"""Seconds of a process that measures a rare percentile."""
MORE = 2
"""Factor on the usual number of processes to narrow an interval."""


def suggest_bench(
    build: JudgedBuild, where: LoadFilter, options: Mapping[str, str], name: str = ""
) -> Call:
    """Measures `where` on a build that has no such measurement; `name` is the wanted figure."""
    return make_call(
        "bench",
        build.artifact,
        where,
        **_list_percentile_options(name),
        option=_list_runtime_options({build.backend: options}),
        energy=_needs_longer_window(name),
    )


def suggest_more_processes(
    group: ProcessGroup,
    build: JudgedBuild,
    name: str = "",
    *,
    more: bool = False,
    longer: bool = False,
) -> Call:
    """Measures the load of `group` again with its settings, so that both sets of processes count.

    `name` is the wanted figure; `more` suggests more processes than usual, `longer` more time.
    """
    options = _list_options(group, build, name)
    if longer:
        options.setdefault("max_time", LONGEST_S)
    return make_call(
        "bench",
        build.artifact,
        **options,
        processes=MORE * PROCESSES if more else None,
        energy=_needs_longer_window(name),
    )


def _needs_longer_window(name: str) -> bool:
    """Whether `bench` measures the figure only with --energy."""
    return bool(name) and find_metric(name).least_seconds > 0


MEMORY_STEP_BYTES = 2**21
"""Memory of a GPU is given out in steps of 2 MiB (CUDA's allocation granularity): equal readings show no finer scatter."""


def suggest_runs(
    criterion: Criterion,
    runs: Sequence[Sequence[float]],
    confidence: float,
    command: str,
    speed: OtherSpeed | None = None,
) -> str:
    """Tells how often to run `command` until the criterion is decided.

    `runs` holds the figures of each run's processes, or the log ratios of a regression's rounds. `speed` is what
    processes that were left out may add; by default a speed that none of these had.
    """
    loss, limit = criterion.is_loss, float(criterion.threshold)
    verb, every = "compare" if loss else "measure", [value for run in runs for value in run]
    if len(every) < MIN_VALUES:
        return f"{verb} again: " + command
    middle = sum(every) / len(every)
    distance = criterion.measure_distance(expm1(middle) if loss else middle)
    level, speed = (1 - confidence) / 2, speed or OtherSpeed(len(every))
    percent = speed.percent if not loss and distance and middle < limit else 0.0
    fewest = (
        0.0
        if speed.gap <= 0
        else replace(speed, percent=percent).count_processes_for_reach(distance, level)
    )
    half = abs(middle - (log1p(limit) if loss else limit))
    needed = count_runs_needed(runs, half, confidence, fewest)
    if needed is None:
        return f"with this scatter even {MAX_RUNS} runs would not decide it: reduce the scatter, or change the build or the limit"
    more = needed - len(runs)
    times = "once more" if more == 1 else f"{more} more times"
    return f"with this scatter about {needed} runs would decide it; {verb} {times}: " + command


def suggest_pair(baseline: Subject, group: ProcessGroup, build: JudgedBuild, metric: str) -> Call:
    """Compares the build with the baseline's in interleaved processes under the load of `group`."""
    options = _list_options(group, build, metric)
    settings = {name: value for name, value in baseline.settings.items() if name != "affinity"}
    if baseline.backend != build.backend and settings:
        options["option"] = options.get("option", {}) | {baseline.backend: settings}
    by = PairMetric.for_metric(metric)
    return Call("bench", build.artifact, against=baseline.artifact, metric=by, **options)


def _list_options(group: ProcessGroup, build: JudgedBuild, name: str) -> dict[str, Any]:
    """The options of `bench` for the load, the settings, and the limits of `group`."""
    measurement = group.newest.measurement
    settings = measurement.subject.settings
    usual = {key: format_option(value) for key, value in build.options.items()}
    changed = {
        key: value for key, value in settings.items() if key in usual and usual[key] != value
    }
    options: dict[str, Any] = {
        **list_load_options(group.load),
        **_list_percentile_options(name),
        "option": _list_runtime_options({build.backend: changed}),
        "affinity": settings.get("affinity"),
    }
    if (max_cv := measurement.limits.get("max_cv", MAX_CV)) != MAX_CV:
        options["max_cv"] = share_to_text(max_cv)
    return {key: value for key, value in options.items() if value is not None}


def _list_percentile_options(name: str) -> dict[str, object]:
    """Asks for enough samples for a percentile that `bench` does not report by default."""
    percent = percent_from_name(name)
    enough = percent <= LoadSpec(1).percentile
    return {} if enough else {"percentile": percent, "max_time": LONGEST_S}


def _list_runtime_options(
    options: Mapping[str, Mapping[str, str]],
) -> Mapping[str, Mapping[str, str]] | None:
    """Those of the backends that have any; None if none has."""
    return {backend: given for backend, given in options.items() if given} or None


def suggest_build_again(build: JudgedBuild) -> str:
    return build.choose_way(Call("build", build.argument))


def suggest_build(build: JudgedBuild) -> str:
    """Builds with trained weights."""
    if build.in_memory:
        return "Model(module, example=..., trained=True)"
    which = {"backend": build.backend, "precision": build.precision}
    return Call("build", build.argument, **which, weights="FILE")


def suggest_narrowing(section: str, build: JudgedBuild) -> str:
    """Empty for sections whose intervals a load narrows."""
    evaluate, rebuild, profile = (
        suggest_evaluation(build),
        suggest_more_samples(build),
        suggest_profile(build, MORE_ITERATIONS),
    )
    parity = suggest_parity(build)
    return {
        **dict.fromkeys(
            (ACCURACY.name, MORE_SCORES.name), "evaluate on more labeled data: " + evaluate
        ),
        PARITY.name: parity and "verify parity on more images: " + parity,
        OUTPUTS.name: "build on more samples: " + rebuild,
        TENSOR_CORES.name: profile and "profile more iterations: " + profile,
    }.get(section, "")


def suggest_evaluation(build: JudgedBuild) -> str:
    return build.choose_way(Call("evaluate", build.argument, data="DIR"))


def suggest_parity(build: JudgedBuild) -> str:
    """Empty for a module in memory, which has no preprocessing."""
    return build.choose_way(Call("preprocess", build.argument, images="DIR"))


def suggest_more_samples(build: JudgedBuild, steps: str | None = None) -> str:
    return build.choose_way(Call("build", build.argument, data="PATH", steps=steps))


def suggest_fix(section: str, build: JudgedBuild) -> str:
    """The command that helps to meet a section's limits; empty if none is known."""
    compare = Call("compare", model=build.model)
    profile = suggest_profile(build)
    bottleneck = profile and "`" + profile + "` identifies the bottleneck; "
    faster = bottleneck + "`" + compare + "` lists faster builds"
    sweep = "`" + Call("doctor", options=True) + "` lists runtime options to sweep"
    calibrate = build.choose_way(Call("calibrate", build.argument, sensitivity=True))
    preprocess = build.choose_way(Call("preprocess", build.argument))
    budget = build.choose_way(Call("build", build.argument, budget="30dB"))
    layers = Call("store show", build.artifact)
    again = Call("bench", build.artifact)
    return {
        LATENCY.name: faster,
        RATE.name: "`" + compare + "` shows the best batch size and build; " + sweep,
        REGRESSION.name: profile
        and "`" + profile + "` lists the kernels, to compare with those of the baseline",
        SPEEDUP.name: faster,
        **dict.fromkeys(
            (ACCURACY.name, MORE_SCORES.name),
            calibrate and "`" + calibrate + "` finds the layers to keep out of INT8",
        ),
        PARITY.name: preprocess and "`" + preprocess + "` shows which step contributes most",
        OUTPUTS.name: "`" + budget + "` keeps the layers in float that cost the most",
        PRECISION.name: "`" + layers + "` lists the layers in other precisions",
        PEAK_MEMORY.name: "reduce the batch size or use a lower precision",
        SIZE.name: "use a lower precision for a smaller engine",
        **dict.fromkeys(
            (ENERGY_PER_SAMPLE.name, PER_WATT.name),
            "use a lower precision or a larger batch to reduce energy per inference",
        ),
        POWER_DRAW.name: "use a lower precision, or limit the power of the GPU, which also slows it",
        LOADING.name: "use a lower precision for a smaller engine; `"
        + compare
        + "` shows the load time of each build",
        STABILITY.name: "stop other work and lock the clocks; `" + again + "` reports the cause",
        TENSOR_CORES.name: profile
        and "`" + profile + "` lists eligible kernels that do not use Tensor Cores",
    }.get(section, "")


UNKNOWN = float("nan")
"""Value of an observation that could not be made; its blockers give the reason."""


@dataclass(frozen=True, slots=True)
class BuildEvidence:
    build: JudgedBuild
    measured: tuple[RecordedMeasurement, ...] = ()
    baseline: tuple[RecordedMeasurement, ...] = ()
    baseline_name: str | None = None
    same_network: bool = True
    """Whether the baseline is of a network with the same facts, as after training it again, or of an unknown one."""
    pairs: tuple[RecordedPair, ...] = ()
    turns: tuple[RecordedTurns, ...] = ()
    """Comparisons in turns with other builds of the model, oldest first."""
    accuracy: Mapping[str, Observation] = field(default_factory=dict)
    """`drop`, `agreement`, `score`, … of `TaskContract.observe`, as fractions."""
    failure: Blocker | None = None
    """Why no accuracy is judged, if the build failed in an evaluation."""
    preprocessing: Mapping[str, Observation] = field(default_factory=dict)
    """`agreement` as a fraction, `snr` in dB."""
    outputs: Mapping[str, Mapping[str, Observation]] = field(default_factory=dict)
    """By output: `snr` in dB, `cosine`, `agreement` as a fraction, `abs_error`."""
    states: Mapping[str, Mapping[str, Observation]] = field(default_factory=dict)
    """As `outputs`, of the state after a trajectory of `steps` steps."""
    steps: int | None = None
    tensor_core_share: Observation | None = None
    other_file: tuple[str, ...] = ()
    """Kinds of runs of another file under the build's id, which are not evidence: `evaluate`, `profile`."""
    record: str = ""
    """Path of the build's record in the dossier."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The policy's options, with which all of `measured` ran."""
    policy_confidence: float = 0.95
    looks: Mapping[str, Look] = field(default_factory=dict)
    """By kind of evidence: the kinds of runs, `build` for comparisons of outputs, and `regression`; a kind that is absent had one."""

    def list_environments(self) -> list[Environment]:
        """Of every comparison in turns and every measurement, the newest measurement last."""
        return [
            *(recorded.environment for recorded in self.turns),
            *(process.environment for process in self.measured),
        ]

    def find_look(self, kind: str) -> Look:
        return self.looks.get(kind, Look())

    def find_confidence(self, kind: str) -> float:
        """The confidence that the looks at this kind of evidence leave."""
        return self.find_look(kind).compute_confidence(self.policy_confidence)


def select_groups(where: LoadFilter, measured: Sequence[RecordedMeasurement]) -> list[ProcessGroup]:
    """All processes with the settings measured last, for each load that `where` selects."""
    wanted = (where.batch_size, where.scenario, where.mode, where.streams, where.rate, where.length)
    newest: dict[object, ProcessGroup] = {}
    for group in group_processes(measured):
        if all(
            want is None or want == has for want, has in zip(wanted, group.load.key, strict=True)
        ):
            newest[group.load.key] = group
    return list(newest.values())


def is_of_other_file(run: Run, build: JudgedBuild) -> bool:
    """True for a run of another file under the build's id. Raises BadInputError if its record cannot be read."""
    asked = {
        "bench": has_measured_other_file,
        "evaluate": has_evaluated_other_file,
        "profile": has_profiled_other_file,
    }
    return run.kind in asked and asked[run.kind](run, build)


@dataclass(frozen=True, slots=True)
class Unjudged:
    """What is not judged, and counts as looks all the same."""

    measured: Sequence[RecordedMeasurement] = ()
    runs: Sequence[Run] = ()
    """Of all kinds: those before `--since` and before a preregistered policy."""
    removed: Sequence[str] = ()
    """Names of runs that were removed from the workspace."""
    baselines: int = 1
    """Baselines that were approved since the build was first measured, with the one before."""
    verifications: int = 1
    """Comparisons of the build's outputs with the source model's, on other samples each."""
    candidates: Mapping[str, int] = field(default_factory=dict)
    """By run: of how many builds of the workspace its figures may have chosen this one."""


def evidence_from_runs(
    build: JudgedBuild,
    runs: Sequence[Run],
    policy: Policy,
    unjudged: Unjudged = Unjudged(),
) -> BuildEvidence:
    """Evidence without a baseline."""
    every = tuple(list_artifact_measurements(runs, policy.confidence, build.artifact))
    turns = tuple(turns_from_runs(runs, build.artifact))
    looks = count_looks(build, runs, every, unjudged)

    def find_confidence(kind: str) -> float:
        return looks[kind].compute_confidence(policy.confidence)

    return BuildEvidence(
        build,
        measured=tuple(
            process
            for process in every
            if policy.options.items() <= process.measurement.subject.settings.items()
        ),
        turns=tuple(
            recorded
            for recorded in turns
            if policy.options.items() <= recorded.record.judged.settings.items()
        ),
        accuracy=observe_accuracy(runs, build, find_confidence("evaluate")),
        failure=find_failure(runs, build),
        preprocessing=observe_preprocessing(runs, build, find_confidence("preprocess")),
        tensor_core_share=observe_tensor_cores(runs, build, find_confidence("profile")),
        other_file=tuple(sorted({run.kind for run in runs if is_of_other_file(run, build)})),
        options=policy.options,
        policy_confidence=policy.confidence,
        looks=looks,
    )


OF_SAMPLES = frozenset({"evaluate", "preprocess", "build"})
"""Kinds of evidence whose figures are scores of samples."""


def count_looks(
    build: JudgedBuild,
    runs: Sequence[Run],
    measured: Sequence[RecordedMeasurement],
    unjudged: Unjudged,
) -> dict[str, Look]:
    """The looks at each kind of evidence: what was drawn again, whether it is judged or not."""
    every = [*runs, *unjudged.runs]
    loads = Counter(
        load
        for load, _ in {
            (process.measurement.load.key, process.run)
            for process in (*measured, *unjudged.measured)
        }
    )
    evaluated = [
        run for run in every if run.kind == "evaluate" and build.artifact in run.manifest.parents
    ]
    drawn = {
        "bench": max(loads.values(), default=0),
        "turns": len(list(turns_from_runs(every, build.artifact))),
        "evaluate": len({identify_data(run) for run in evaluated}),
        "preprocess": len({identify_images(run) for run in every if is_proof_run(run, build)}),
        "profile": sum(
            run.kind == "profile" and build.artifact in run.manifest.parents for run in every
        ),
        "build": unjudged.verifications,
    }
    removed = Counter(name.partition("-")[0] for name in unjudged.removed)
    looks = {
        kind: Look(max(1, count + removed[kind]), sampled=kind in OF_SAMPLES)
        for kind, count in drawn.items()
    }
    together = count_measured_together(runs, build.artifact, unjudged.candidates)
    builds = count_evaluated_together(runs, evaluated, build, unjudged.candidates)
    regressions = looks["bench"].number + max(0, unjudged.baselines - 1)
    return looks | {
        "bench": replace(looks["bench"], builds=together),
        "evaluate": replace(looks["evaluate"], builds=builds),
        "regression": Look(regressions, builds=together),
    }


def observe_groups(
    criterion: Criterion, evidence: BuildEvidence
) -> Sequence[Observation] | Blocker:
    """The metric that the criterion limits, over the processes of every load that it selects."""
    metric = criterion.find_metric()
    read = metric.inverse_of or metric
    name = read.name
    groups = select_groups(criterion.where, evidence.measured)
    if not groups:
        wanted = criterion.where.to_text() or "this build"
        wanted += (
            f", with {format_settings(evidence.options, evidence.options)}"
            if evidence.options
            else ""
        )
        command = suggest_bench(evidence.build, criterion.where, evidence.options, name)
        return Blocker(f"not measured: {wanted}", command)
    seen = [observe_group(criterion, group, name, evidence) for group in groups]
    if read is not metric:
        return [_invert_observation(observation) for observation in seen]
    return [
        replace(
            observation,
            blockers=(*observation.blockers, *_list_other_units(criterion, group, name)),
        )
        for observation, group in zip(seen, groups, strict=True)
    ]


def _invert_observation(seen: Observation) -> Observation:
    """One over a positive figure; the share by which processes differ is that of the figure."""
    inverse = Estimate(float(seen.value), seen.low, seen.high).invert()
    if inverse is None:
        return replace(seen, value=UNKNOWN, low=None, high=None, tail=None)
    tail = None if seen.tail is None else InverseTail(seen.tail)
    return replace(seen, value=inverse.value, low=inverse.low, high=inverse.high, tail=tail)


def _list_other_units(criterion: Criterion, group: ProcessGroup, name: str) -> Iterator[Blocker]:
    """A plug-in's figures of another unit than the limit's cannot be judged by it."""
    limited, every = criterion.dimension, [process.measurement.figures for process in group.tries]
    units = {figures[name].unit for figures in every if name in figures}
    for unit in sorted(units):
        # rates and energies count images or samples
        if limited and choose_dimension(unit, "sample") is not choose_dimension(limited, "sample"):
            yield Blocker(
                f"{name} was measured as {unit.noun}, and the limit is {limited.noun}",
                f"give the limit as {unit.noun}, such as {unit.example}",
            )


def describe_group(
    group: ProcessGroup, measured: Sequence[RecordedMeasurement], name: str = ""
) -> str:
    """`batch 8, single-stream, compute, threads=2, the most recent of 3 settings; 5 processes`."""
    counted = group.keep_requested(name)
    about, load = str(group.load), group.load.key
    known = [
        process.measurement.subject.settings
        for process in measured
        if process.measurement.load.key == load
    ]
    if (several := len({tuple(settings.items()) for settings in known})) > 1:
        own = format_settings(
            group.newest.measurement.subject.settings, find_differing_settings(known)
        )
        about += f", {own}, the most recent of {several} settings"
    unasked = group.count_processes() - counted.count_processes()
    return f"{about}; {describe_tries(counted)}" + (
        f"; {unasked} not measured for {name}" if unasked else ""
    )


def observe_group(
    criterion: Criterion, group: ProcessGroup, name: str, evidence: BuildEvidence
) -> Observation:
    """The figure `name` over the processes of a group, with the blockers that forbid judging it."""
    about = describe_group(group, evidence.measured, name)
    group = group.keep_requested(name)
    blockers, source = find_blockers(group, evidence), group.newest.run
    estimate = group.estimate(name, evidence.find_confidence("bench"), evidence.policy_confidence)
    if estimate is None:
        # without VALID processes the blockers give the reason
        missing = (_explain_missing_figure(group, name, evidence),) if group.valid else ()
        return Observation(UNKNOWN, blockers=(*blockers, *missing), about=about, source=source)
    if estimate.low is None:
        blockers = (
            *blockers,
            Blocker(str(estimate.note), suggest_more_processes(group, evidence.build, name)),
        )
    blockers = (*blockers, *list_withheld(group, name, evidence))
    values = [value for run in group.list_values(name) for value in run]
    metric = find_metric(name)
    dimension = criterion.dimension
    if criterion.find_metric().inverse_of is metric:
        sample = "sample" if dimension is Dimension.SAMPLE_EFFICIENCY else "image"
        dimension = choose_dimension(metric.dimension, sample)
    if dimension is not None and len(values) > 1 and min(values) < max(values):
        about += f"; single processes: {format_quantity(min(values), dimension)} to {format_quantity(max(values), dimension)}"
    if estimate.low is not None and estimate.note:
        about += f"; {estimate.note}"
    tail: Tail | None = group.compute_distribution(name)
    if metric.sensor_share and tail is not None:
        tail = ScaledTail(tail, 1 / (1 + metric.sensor_share))  # in case the sensor reads too much
    speed = group.find_other_speed(name, alone=True)
    counted = 0 if metric.judges_peak or speed.gap <= 0 else len(values)
    if metric.sensor_share or metric.judges_peak:  # not only the mean over runs has a scatter
        more = suggest_more_processes(group, evidence.build, name, more=True)
        narrow: str = "measure more processes to narrow the interval: " + more
    else:
        again = suggest_more_processes(group, evidence.build, name)
        narrow = suggest_runs(
            criterion, group.list_parts(name), evidence.policy_confidence, again, speed
        )
    if speed.repeated > 0:
        longer = Argument("warm_up", setting=True) + ", or measure longer ("
        narrow += "; all processes change alike while they are measured: increase "
        narrow += longer + Argument("min_time") + ")"
    seen = Observation(
        estimate.value,
        estimate.low,
        estimate.high,
        blockers,
        about,
        source,
        tail,
        narrow,
        processes=counted,
        left_out=speed.left_out,
        left_out_gap=speed.gap,
        repeated=speed.repeated,
    )
    if not metric.judges_peak:
        return seen
    # a process that needs more memory ends a service: judge the largest, up to the bound for the next process
    # those that were left out need it too
    bound, peak = predict_next_upper_bound(values, evidence.find_confidence("bench")), max(values)
    if bound is not None and min(values) == peak:  # the readings are coarser than their scatter
        bound += MEMORY_STEP_BYTES
    others = (read_raw_value(process, name) for process in group.tries)
    known = max(peak, *(figure for figure in others if figure is not None))
    about += "; the peak, with a margin for one more process"
    return replace(
        seen,
        value=peak,
        low=peak,
        high=max(known, bound) if bound else None,
        about=about,
        tail=None,
    )


def _explain_missing_figure(group: ProcessGroup, name: str, evidence: BuildEvidence) -> Blocker:
    metric, measurement = find_metric(name), group.newest.measurement
    again = suggest_more_processes(group, evidence.build, name, longer=metric.needs_longer)
    return Blocker(metric.explain_missing(measurement), metric.remedy + ": " + again)


def list_withheld(group: ProcessGroup, name: str, evidence: BuildEvidence) -> Iterator[Blocker]:
    """VALID processes that do not show the figure: the others may be only the undisturbed ones. And processes that were left out
    without it, of which nothing is known.
    """
    count, given = group.count_processes(), group.count_showing(name)
    if group.valid and (lacking := group.count_left_out_without(name)):
        again = suggest_more_processes(group, evidence.build, name)
        what = (
            f"{lacking} of {len(group.tries)} processes ended without {name}, so that nothing bounds"
            " what they would add"
        )
        since = " and the start of that run, which counts as one more try"
        way = "measure again: " + again + "; then sign off with " + Argument("since") + since
        yield Blocker(what, way)
    metric = find_metric(name)
    if metric.is_optional or given == count:
        return
    reasons = [metric.find_reason(process.measurement) for process in group.valid]
    why = next(filter(None, reasons), "not computed")
    longer = suggest_more_processes(group, evidence.build, name, longer=True)
    what = f"{name} could not be estimated in {count - given} of {count} VALID processes: " + why
    yield Blocker(
        what, explain_withheld(longer, runs=len({process.run for process in group.valid}))
    )


def explain_withheld(command: str, *, runs: int) -> str:
    """With more than one run, processes of earlier runs would still lack the figure."""
    longer = "measure longer: " + command
    if runs <= 1:
        return longer
    since = "; then sign off with " + Argument("since") + " and the start of that run"
    return longer + since + ", because the earlier processes would still lack it"


def find_blockers(group: ProcessGroup, evidence: BuildEvidence) -> tuple[Blocker, ...]:
    """A group without VALID processes, with caveats, or of another file must not be judged."""
    again = suggest_more_processes(group, evidence.build)
    blockers = [] if group.valid else [_explain_invalid(group, again)]
    tries = group.valid or group.tries
    caveats = dict.fromkeys(caveat for process in tries for caveat in process.measurement.caveats)
    without = {
        "random-weights": "build with the weights you will ship: " + suggest_build(evidence.build),
        "synthetic-inputs": "measure on real images: " + again.with_options(images="DIR"),
    }
    for caveat in caveats:
        remedy = without.get(caveat, "measure again without it: " + again)
        blockers.append(Blocker(CAVEATS.get(caveat, caveat), remedy))
    hashes = {process.measurement.subject.sha256 for process in tries} - {None}
    if evidence.build.sha256 and hashes - {evidence.build.sha256}:
        what = "the measured file differs from the one being judged (sha256 mismatch)"
        blockers.append(Blocker(what, "measure the current build: " + again))
    return tuple(blockers)


def _explain_invalid(group: ProcessGroup, again: str) -> Blocker:
    measurement = group.newest.measurement
    spoilt = list(measurement.invalid_reasons) or list(measurement.reasons)
    spoilt.sort(key=lambda reason: reason.code not in HOST_CAUSES)
    count = len(group.tries)
    which = (
        "the measurement is INVALID"
        if count == 1
        else f"{'both' if count == 2 else f'all {count}'} processes are INVALID; the last"
    )
    if not spoilt:
        return Blocker(f"{which}: no reason recorded", "measure again: " + again)
    remedy = (
        spoilt[0].remedy
        if spoilt[0].code in WRONG_OUTPUTS
        else spoilt[0].remedy + "; then `" + again + "`"
    )
    return Blocker(f"{which}: " + spoilt[0].message, remedy)


CAVEATS = {
    "random-weights": "the weights are random",
    "synthetic-inputs": "the inputs are synthetic",
}
