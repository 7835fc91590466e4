"""The kinds of evidence: how to recompute each from its raw files, and its observations for a policy's criteria."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import exp, expm1, isnan, log

from optpipe.core.measurement import COMPARISON_FILE, MEASUREMENTS_FILE, MeasurementsRecord
from optpipe.core.metrics.registry import find_metric
from optpipe.core.metrics.sampled import PLUGIN_SCORES, is_score_name
from optpipe.core.metrics.sections import (
    ACCURACY,
    AGREEMENT,
    DROP,
    ENVIRONMENT,
    MORE_SCORES,
    OUTPUTS,
    PARITY,
    PRECISION,
    REGRESSION,
    SECTIONS,
    SIZE,
    SPEEDUP,
    TENSOR_CORES,
    Evidence,
    Sense,
)
from optpipe.core.params import make_call
from optpipe.core.quantity import Dimension, format_quantity
from optpipe.core.records import Recomputed
from optpipe.core.settings import find_differing_settings, format_settings
from optpipe.core.verdict import Blocker, Observation, RatioTail, ScaledTail
from optpipe.core.wording import Call
from optpipe.evaluate.recompute import recompute_evaluation
from optpipe.evaluate.result import Evaluation
from optpipe.measure.figures import recompute_bench
from optpipe.measure.groups import (
    ProcessGroup,
    RecordedMeasurement,
    compare_groups,
    describe_tries,
    explain_clock_difference,
    explain_no_interval,
    find_environment_differences,
    find_run_scatter,
    group_processes,
    is_requested,
    read_raw_value,
    read_value,
)
from optpipe.measure.pair import PairedComparison, RecordedPair, recompute_pair
from optpipe.measure.turns import TurnsRecord, recompute_turns
from optpipe.preprocess.proof import PreprocessRecord, recompute_preprocessing
from optpipe.signoff.build_evidence import (
    CAVEATS,
    UNKNOWN,
    BuildEvidence,
    describe_group,
    explain_withheld,
    find_blockers,
    list_withheld,
    observe_groups,
    select_groups,
    suggest_bench,
    suggest_build_again,
    suggest_evaluation,
    suggest_fix,
    suggest_more_processes,
    suggest_more_samples,
    suggest_narrowing,
    suggest_pair,
    suggest_parity,
    suggest_runs,
)
from optpipe.signoff.policy import Criterion, LoadFilter
from optpipe.stats.means import MIN_VALUES, SPEED_GAP, OtherSpeed, mean_from_runs
from optpipe.stats.paired import SampledFigure, Share, count_samples_to_decide
from optpipe.stats.ratio import SMALLEST_ROUNDS
from optpipe.trace.report import ProfileRecord, recompute_profile, suggest_profile
from optpipe.workspace.entry import Run
from optpipe.workspace.file_names import EVALUATION, PREPROCESSING, PROFILE, TURNS


def observe_regression(
    criterion: Criterion, evidence: BuildEvidence
) -> Sequence[Observation] | Blocker:
    """The loss of every load that the criterion selects, as a fraction."""
    if not evidence.baseline:
        return Blocker("no approved baseline", "approve one: " + APPROVE)
    groups = select_groups(criterion.where, evidence.measured)
    if not groups:
        command = suggest_bench(evidence.build, criterion.where, evidence.options, criterion.metric)
        return Blocker("not measured", command)
    return [_observe_loss(criterion, group, evidence) for group in groups]


APPROVE = Call("signoff approve", "DOSSIER")
_NEWER = "approve a newer baseline: " + APPROVE


def _observe_loss(
    criterion: Criterion, group: ProcessGroup, evidence: BuildEvidence
) -> Observation:
    metric = criterion.metric
    about = f"{describe_group(group, evidence.measured, metric)}, compared with {evidence.baseline_name}"
    approved = select_groups(LoadFilter(), evidence.baseline)
    same = [known for known in approved if known.load.key == group.load.key]
    baseline = (same or approved)[-1]
    caveats = dict.fromkeys(
        caveat
        for process in baseline.valid or baseline.tries
        for caveat in process.measurement.caveats
    )
    of_baseline = (
        Blocker(f"baseline: {CAVEATS.get(caveat, caveat)}", _NEWER) for caveat in caveats
    )
    other = Blocker(
        f"the baseline is of another network called {evidence.build.model}",
        "approve a dossier of this network: " + APPROVE,
    )
    blockers = (
        *find_blockers(group.keep_requested(metric), evidence),
        *of_baseline,
        *(() if evidence.same_network else (other,)),
    )
    seen = Observation(UNKNOWN, blockers=blockers, about=about, source=group.newest.run)
    paired = _observe_paired_loss(criterion, group, baseline, evidence, seen)
    if paired is not None:
        return paired
    if same:
        return _observe_unpaired_loss(metric, group, baseline, evidence, seen)
    remedy = _suggest_pair(metric, group, baseline, evidence) or _NEWER
    return replace(
        seen,
        blockers=(*blockers, Blocker(f"the baseline has no measurement of {group.load}", remedy)),
    )


def _observe_paired_loss(
    criterion: Criterion,
    group: ProcessGroup,
    baseline: ProcessGroup,
    evidence: BuildEvidence,
    seen: Observation,
) -> Observation | None:
    """The mean of the rounds' log ratios, rounds nested in runs; None if there are too few VALID rounds."""
    if not _can_pair(group, baseline):
        return None
    metric = criterion.metric
    pairs = [
        pair
        for pair in evidence.pairs
        if _is_about(pair, group, baseline)
        # a pair that was not measured for this percentile, and lacks it in some rounds, is not evidence
        and (is_requested(pair.rounds[0][0], metric) or not _count_withheld(metric, pair))
    ]
    losses, first = [], []
    for pair in pairs:
        given = [
            turn
            for turn, pair_round in enumerate(pair.rounds)
            if _compute_loss(metric, *pair_round) is not None
        ]
        losses.append(
            [
                loss
                for pair_round in pair.rounds
                if (loss := _compute_loss(metric, *pair_round)) is not None
            ]
        )
        first.append(sum(turn < pair.first_rounds for turn in given))
    count, tried = sum(len(run) for run in losses), sum(len(pair.rounds) for pair in pairs)
    withheld = sum(_count_withheld(metric, pair) for pair in pairs)
    runs = [run for run in losses if run]
    mean = mean_from_runs(runs, [number for number, run in zip(first, losses, strict=True) if run])
    if mean is None or count < SMALLEST_ROUNDS:
        return None
    low, high = map(exp, mean.interval(evidence.find_confidence("regression")))
    spoilt = [
        raw
        for pair in pairs
        for pair_round in pair.rounds
        if not all(side.measurement.is_valid for side in pair_round)
        for raw in [_compute_raw_loss(metric, *pair_round)]
    ]
    gap = max([SPEED_GAP, *(abs(loss - mean.value) for loss in spoilt if loss is not None)])
    speed = OtherSpeed(count, len(spoilt), gap)
    (low, high), widened = speed.widen(exp(mean.value), (low, high), evidence.policy_confidence)
    about = f"{group.load}; {count} interleaved rounds" + (
        f" in {len(pairs)} runs" if len(pairs) > 1 else ""
    )
    invalid = tried - count - withheld
    about += f" with {evidence.baseline_name}" + (
        f"; left out: {invalid} not VALID" if invalid else ""
    )
    command = suggest_pair(baseline.newest.measurement.subject, group, evidence.build, metric)
    narrow = suggest_runs(criterion, runs, evidence.policy_confidence, command, speed)
    unknown = sum(loss is None for loss in spoilt)
    lost = f"{unknown} rounds ended without {metric}" if unknown else ""
    reason = f"the processes of {withheld} of {count + withheld} VALID rounds do not show {metric}"
    return replace(
        seen,
        blockers=(
            *seen.blockers,
            *([Blocker(reason, explain_withheld(command, runs=len(pairs)))] if withheld else []),
            *([Blocker(lost, explain_withheld(command, runs=len(pairs)))] if lost else []),
        ),
        value=expm1(mean.value),
        low=low - 1,
        high=high - 1,
        about="; ".join(filter(None, (about, widened))),
        source=pairs[-1].run,
        processes=count,
        left_out=speed.left_out,
        left_out_gap=speed.gap,
        tail=ScaledTail(mean, of_logarithm=True),
        to_narrow=narrow,
    )


def _count_withheld(metric: str, pair: RecordedPair) -> int:
    """Counts rounds of VALID processes that lack the figure: the others may be only the undisturbed ones."""
    valid = (
        pair_round
        for pair_round in pair.rounds
        if all(side.measurement.is_valid for side in pair_round)
    )
    return sum(_compute_loss(metric, *pair_round) is None for pair_round in valid)


def _suggest_pair(
    metric: str, group: ProcessGroup, baseline: ProcessGroup, evidence: BuildEvidence
) -> str:
    """Empty if an interleaved comparison would not measure the regression."""
    if not _can_pair(group, baseline):
        return ""
    command = suggest_pair(baseline.newest.measurement.subject, group, evidence.build, metric)
    return "compare both in interleaved processes: " + command


def _can_pair(group: ProcessGroup, baseline: ProcessGroup) -> bool:
    """False if the settings or the runtime changed: two builds on one machine would not show that loss."""
    ours, theirs = (side.newest.measurement.subject for side in (group, baseline))
    if ours.backend == theirs.backend and ours.settings != theirs.settings:
        return False
    ours_at, theirs_at = (side.newest.environment for side in (group, baseline))
    return bool(theirs.packages) and all(
        ours_at.get_fact(f"packages.{name}") == theirs_at.get_fact(f"packages.{name}")
        for name in theirs.packages
    )


def _is_about(pair: RecordedPair, group: ProcessGroup, baseline: ProcessGroup) -> bool:
    """True if the pair has the loads and settings of both groups, and ran on the machine that measured the build."""
    if not pair.rounds or find_environment_differences(pair.environment, group.newest.environment):
        return False
    return all(
        process.measurement.load.key == group.load.key
        and process.measurement.subject.artifact == side.newest.measurement.subject.artifact
        and process.measurement.subject.settings == side.newest.measurement.subject.settings
        for process, side in zip(pair.rounds[0], (baseline, group), strict=True)
    )


def _compute_loss(
    metric: str, baseline: RecordedMeasurement, contender: RecordedMeasurement
) -> float | None:
    """The logarithm of one round's loss; None if a process is not VALID or lacks the figure."""
    valid = [side.measurement for side in (baseline, contender) if side.measurement.is_valid]
    figures = [read_value(measurement, metric) for measurement in valid]
    if len(figures) < 2 or figures[0] is None or figures[1] is None:
        return None
    return find_metric(metric).loss_sign * (log(figures[1]) - log(figures[0]))


def _compute_raw_loss(
    metric: str, baseline: RecordedMeasurement, contender: RecordedMeasurement
) -> float | None:
    """The logarithm of the loss of a round that was left out; None if a process lacks the figure."""
    before, after = (read_raw_value(side, metric) or 0.0 for side in (baseline, contender))
    if min(before, after) <= 0:
        return None
    return find_metric(metric).loss_sign * (log(after) - log(before))


def _observe_unpaired_loss(
    metric: str,
    group: ProcessGroup,
    baseline: ProcessGroup,
    evidence: BuildEvidence,
    seen: Observation,
) -> Observation:
    """Compares the two figures by their ratio (Welch's t), with an allowance for runs at other hours."""
    pair = _suggest_pair(metric, group, baseline, evidence)
    again = suggest_more_processes(group, evidence.build, metric, more=True)
    more = pair or "measure more processes to narrow the interval: " + again
    ours, theirs = (side.newest.measurement.subject.settings for side in (group, baseline))
    names = find_differing_settings((ours, theirs))
    about = seen.about + (
        f" with {format_settings(theirs, names)}" if set(names) & set(theirs) else ""
    )
    blockers = [*seen.blockers, *_find_differences(group, baseline, pair)]
    group, baseline = (side.keep_requested(metric) for side in (group, baseline))
    about += f" ({describe_tries(baseline)})"
    blockers += list_withheld(group, metric, evidence)
    withheld = list_withheld(baseline, metric, evidence)
    blockers += (Blocker("baseline: " + blocker.reason, pair or _NEWER) for blocker in withheld)
    seen = replace(seen, about=about, to_narrow=more)
    counts = [side.count_showing(metric) for side in (group, baseline)]
    scatter = find_run_scatter(group_processes([*evidence.measured, *evidence.baseline]), metric)
    rises = find_metric(metric).higher_is_better
    sides = (baseline, group) if rises else (group, baseline)
    compared = compare_groups(*sides, metric, scatter)
    if isinstance(compared, str):
        why = f"{explain_no_interval(min(counts))}: {counts[0]} of the build and {counts[1]} of the baseline"
        if compared == "left out without it":
            why = f"a process that was left out has no {metric}, so that nothing bounds what it would add"
        elif min(counts) >= MIN_VALUES:
            why = "the two were measured in different runs, and how much runs differ is not known: no build was measured in two"
        return replace(seen, blockers=(*blockers, Blocker(why, more)))
    change = compared.change
    if scatter is not None:
        seen = replace(seen, about=f"{seen.about}; runs of a build differ by {scatter.sd:.1%}")
    confidence = evidence.find_confidence("regression")
    (low, high), widened = compared.interval(confidence, evidence.policy_confidence)
    return replace(
        seen,
        about="; ".join(filter(None, (seen.about, widened))),
        value=expm1(change.value),
        low=low - 1,
        high=high - 1,
        blockers=tuple(blockers),
        tail=ScaledTail(change, of_logarithm=True),
        processes=compared.speed.processes,
        left_out=compared.speed.left_out,
        left_out_gap=compared.speed.gap,
        repeated=compared.speed.repeated,
    )


def _find_differences(group: ProcessGroup, baseline: ProcessGroup, pair: str) -> list[Blocker]:
    """Reasons against comparing measurements of different times; `pair` is the command that compares both here."""
    subject = baseline.newest.measurement.subject
    blockers = []
    if not baseline.valid:
        blockers.append(
            Blocker(f"baseline: no VALID process of {subject.artifact}", pair or _NEWER)
        )
    if find_environment_differences(group.newest.environment, baseline.newest.environment):
        remedy = pair or "measure both on the deployment machine"
        blockers.append(Blocker("the baseline was measured in another environment", remedy))
    if text := explain_clock_difference(group.newest, baseline.newest):
        blockers.append(Blocker(text, pair or "lock the clocks and repeat both measurements"))
    return blockers


def observe_speedup(
    criterion: Criterion, evidence: BuildEvidence
) -> Sequence[Observation] | Blocker:
    """How many times as fast as another build, by all rounds of the comparison in turns that was measured last."""
    build, over = evidence.build, str(criterion.over)
    where = criterion.where
    command = make_call("bench", build.artifact, where, against=over, turns=True)
    measured = [
        recorded
        for recorded in evidence.turns
        if over in (recorded.record.over.artifact, recorded.record.over.precision)
        and where.batch_size in (None, recorded.record.load.batch_size)
        and where.length in (None, recorded.record.load.length)
    ]
    if not measured:
        return Blocker(f"not compared with {over} in turns", command)
    newest = measured[-1]
    same = [recorded for recorded in measured if recorded.is_like(newest)]
    runs = [recorded.logarithms for recorded in same]
    mean, count = mean_from_runs(runs), sum(map(len, runs))
    if mean is None or count < SMALLEST_ROUNDS:
        return Blocker(f"{count} rounds in turns, {SMALLEST_ROUNDS} needed", command)
    value, bounds = exp(mean.value), mean.interval(evidence.find_confidence("turns"))
    speed = OtherSpeed(count)
    (low, high), widened = speed.widen(
        value, (exp(bounds[0]), exp(bounds[1])), evidence.policy_confidence
    )
    speedups = [exp(logarithm) for run in runs for logarithm in run]
    shown = [
        format_quantity(speedup, Dimension.FACTOR) for speedup in (min(speedups), max(speedups))
    ]
    record = newest.record
    about = f"{record.load}, over {record.over.backend} {record.over.precision} ({record.over.artifact}); {count} rounds in turns"
    about += f", single rounds: {shown[0]} to {shown[1]}"
    hashes = {recorded.record.judged.sha256 for recorded in same} - {None}
    blockers: tuple[Blocker, ...] = ()
    if build.sha256 and hashes - {build.sha256}:
        what = "the measured file differs from the one being judged (sha256 mismatch)"
        blockers = (Blocker(what, command),)
    seen = Observation(
        value,
        low,
        high,
        blockers,
        "; ".join(filter(None, (about, widened))),
        newest.run,
        RatioTail(mean),
        "compare more rounds: " + command,
        processes=count,
        left_out_gap=speed.gap,
    )
    return [seen]


Observer = Callable[[Criterion, BuildEvidence], Sequence[Observation] | Blocker]


def observe(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Blocker:
    """Observations for `criterion` in its base unit, with the way out."""
    observations = OBSERVERS.get(criterion.section, observe_groups)(criterion, evidence)
    if isinstance(observations, Blocker):
        return observations
    narrow, fix = (
        suggest(criterion.section, evidence.build) for suggest in (suggest_narrowing, suggest_fix)
    )
    confidence = evidence.find_confidence(find_kind_of_look(criterion.section))
    more = [
        observation.to_narrow or narrow + _suggest_count(criterion, observation, confidence)
        for observation in observations
    ]
    return [
        replace(observation, to_narrow=text, to_fix=fix)
        for observation, text in zip(observations, more, strict=True)
    ]


def _suggest_count(criterion: Criterion, seen: Observation, confidence: float) -> str:
    """The number of similar samples that would show that the limit holds; empty if it is not known."""
    tail, factor = (
        (seen.tail.tail, seen.tail.factor)
        if isinstance(seen.tail, ScaledTail)
        else (seen.tail, 1.0)
    )
    if not isinstance(tail, Share | SampledFigure):
        return ""
    limit = float(criterion.threshold) / factor
    needed = count_samples_to_decide(
        tail, limit, confidence, at_least=criterion.sense is Sense.AT_LEAST
    )
    return (
        ""
        if needed is None
        else f"; about {needed:,} samples like these would show that the limit holds"
    )


def _environment(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Blocker:
    """The facts of VALID processes and of comparisons in turns alone."""
    groups = select_groups(LoadFilter(), evidence.measured)
    processes = [process for group in groups for process in group.valid]
    known = [(process.environment, process.run) for process in processes]
    known += [(recorded.environment, recorded.run) for recorded in evidence.turns]
    seen = {place.get_fact(criterion.metric): run for place, run in known}
    if not seen:
        why = "no process was VALID" if groups else "nothing was measured"
        return Blocker(why, suggest_bench(evidence.build, LoadFilter(), evidence.options))
    return [Observation(name, source=run) for name, run in seen.items()]


def _accuracy(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Blocker:
    if evidence.failure is not None:
        return evidence.failure
    name = criterion.metric.rpartition("_")[2]  # such as `drop` or `top1`
    if criterion.score is not None:
        name = f"drop of {criterion.score}" if name == "drop" else criterion.score
    figure = evidence.accuracy.get(name)
    if figure is not None:
        return [_scale_figure(criterion, figure)]
    known = [
        name.removeprefix("drop of ") for name in evidence.accuracy if name.startswith("drop of ")
    ]
    known = [name for name in known if not is_score_name(name)]
    if criterion.score is not None and known:
        there = f"this model's task has no score {criterion.score}; it has {', '.join(known)}"
        return Blocker(there, "change the policy's [accuracy]")
    return _explain_no_evaluation(evidence) or Blocker(
        f"the {name} was not evaluated for this build", suggest_evaluation(evidence.build)
    )


def _sampled_score(
    criterion: Criterion, evidence: BuildEvidence
) -> Sequence[Observation] | Blocker:
    """A score of a plug-in or of a Python program."""
    if evidence.failure is not None:
        return evidence.failure
    name = criterion.sampled_score or ""
    key = f"drop of {name}" if criterion.metric.endswith(f".{DROP}") else name
    figure = evidence.accuracy.get(key)
    if figure is not None:
        return [_scale_figure(criterion, figure)]
    brings = "install the plug-in that brings it, or give it in Python (scores=[...]), and evaluate again: "
    way = suggest_evaluation(evidence.build)
    return _explain_no_evaluation(evidence) or Blocker(
        f"the score {name} was not evaluated for this build",
        way if name in PLUGIN_SCORES else brings + way,
    )


def _explain_no_evaluation(evidence: BuildEvidence) -> Blocker | None:
    if evidence.accuracy or "evaluate" not in evidence.other_file:
        return None
    return Blocker(
        "the evaluated file differs from the one being judged (sha256 mismatch)",
        suggest_evaluation(evidence.build),
    )


def _scale_figure(criterion: Criterion, figure: Observation) -> Observation:
    """The figure in the base unit of the criterion."""
    if criterion.dimension is not Dimension.POINTS or (
        figure.blockers and isnan(float(figure.value))
    ):
        return figure
    low, high = (None if bound is None else 100 * bound for bound in (figure.low, figure.high))
    tail = None if figure.tail is None else ScaledTail(figure.tail, 100)
    return replace(figure, value=100 * float(figure.value), low=low, high=high, tail=tail)


NO_PARITY = "a module in memory has no preprocessing to verify: omit [preprocessing]"


def _preprocessing(
    criterion: Criterion, evidence: BuildEvidence
) -> Sequence[Observation] | Blocker:
    figure = evidence.preprocessing.get(criterion.metric.removeprefix("minimum_"))
    if figure is None:
        command = suggest_parity(evidence.build) or NO_PARITY
        if evidence.preprocessing and criterion.metric == AGREEMENT:
            reason = "the parity proof compares no predictions: the model has none, or the same for every image"
            remedy = "limit minimum_snr instead, or use images on which predictions differ: "
            return Blocker(reason, remedy + command)
        return Blocker("preprocessing parity was not verified for this model", command)
    return [figure]


def _outputs(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Blocker:
    """Observes the output that the criterion names, all outputs, or the state after the criterion's steps."""
    known = evidence.outputs
    command = suggest_more_samples(
        evidence.build, None if criterion.steps is None else str(criterion.steps)
    )
    if criterion.steps is not None:
        known = evidence.states if evidence.steps == criterion.steps else {}
    if not known and criterion.steps is not None:
        why = f"the state after {criterion.steps} steps was not compared with the source model's"
        return Blocker(why, command)
    if not known:
        return Blocker(
            "the errors of each sample's outputs are not recorded for this build", command
        )
    if criterion.output is not None and criterion.output not in known:
        there = f"this build has no output {criterion.output}; it has {', '.join(known)}"
        return Blocker(there, "change the policy's [outputs]")
    name = criterion.metric.partition("_")[2]
    return [
        figures[name] for output, figures in known.items() if criterion.output in (None, output)
    ]


def _precision(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Blocker:
    """Exact, unless products of unknown cost could change the share: then its interval has every share that is possible."""
    share = evidence.build.share
    if share is None or not (share.counted or share.unknown):
        return Blocker(
            "the precision of this build was not verified", suggest_build_again(evidence.build)
        )
    low, high = share.find_bounds(criterion.metric)
    known = float(share.counted.get(criterion.metric, 0.0)) if low < high else low
    if low == high:
        counted = "counted in the built network"
        return [Observation(known, about=counted, source=evidence.record, is_exact=True)]
    unknown = share.describe_unknown() or "some products are of unknown type"
    way_out = "export the model with standard operators in their place, or leave this limit out"
    about = f"of the known MACs; {unknown}"
    return [Observation(known, low, high, about=about, source=evidence.record, to_narrow=way_out)]


def _size(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Blocker:  # noqa: ARG001
    if evidence.build.size_bytes is None:
        return Blocker(
            "the size of this build is not recorded", suggest_build_again(evidence.build)
        )
    return [
        Observation(
            float(evidence.build.size_bytes),
            about="exact, of the file",
            source=evidence.record,
            is_exact=True,
        )
    ]


def _tensor_cores(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Blocker:  # noqa: ARG001
    if evidence.tensor_core_share is None:
        other = "profile" in evidence.other_file
        reason = "the profiled file differs from the one being judged (sha256 mismatch)"
        by_file = "give the module as FILE.py:FACTORY; one in memory cannot be profiled"
        return Blocker(
            reason if other else "not profiled on a GPU", suggest_profile(evidence.build) or by_file
        )
    return [evidence.tensor_core_share]


OBSERVERS: Mapping[str, Observer] = {
    ENVIRONMENT.name: _environment,
    REGRESSION.name: observe_regression,
    SPEEDUP.name: observe_speedup,
    ACCURACY.name: _accuracy,
    MORE_SCORES.name: _sampled_score,
    PARITY.name: _preprocessing,
    OUTPUTS.name: _outputs,
    PRECISION.name: _precision,
    SIZE.name: _size,
    TENSOR_CORES.name: _tensor_cores,
}
"""By section of the policy; `observe_groups` observes the metrics of every other."""
JUDGED_RUNS = tuple(str(kind) for kind in Evidence if kind is not Evidence.BUILD)
RECOMPUTE: Mapping[str, tuple[Callable[[Run], Iterator[Recomputed]], ...]] = {
    "evaluate": (recompute_evaluation,),
    "preprocess": (recompute_preprocessing,),
    "bench": (recompute_bench, recompute_pair),
    "turns": (recompute_turns,),
    "profile": (recompute_profile,),
}
"""Yield a run's records with their recomputed values; raw files that were too large for a dossier yield nothing."""
DOCUMENTS: Mapping[str, Mapping[str, type]] = {
    "evaluate": {EVALUATION: Evaluation},
    "preprocess": {PREPROCESSING: PreprocessRecord},
    "bench": {MEASUREMENTS_FILE: MeasurementsRecord, COMPARISON_FILE: PairedComparison},
    "turns": {TURNS: TurnsRecord},
    "profile": {PROFILE: ProfileRecord},
}
"""The record type of each JSON file of a run."""


def find_kind(section: str) -> str:
    """The kind of run that shows a section's figures."""
    return str(SECTIONS[section].evidence)


def find_kind_of_look(section: str) -> str:
    """The key of `BuildEvidence.looks`: a newly approved baseline is another look at regressions alone."""
    return section if SECTIONS[section].of_loss else find_kind(section)
