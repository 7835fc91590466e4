"""The kinds of evidence: how each is recomputed from its raw files, and what it shows for the criteria of a policy."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from optpipe.core.measurement import COMPARISON_FILE, MEASUREMENTS_FILE, MeasurementsRecord
from optpipe.core.quantity import Dimension
from optpipe.core.records import Recomputed
from optpipe.core.verdict import Missing, Observation, ScaledTail
from optpipe.evaluate.recompute import recompute_evaluation
from optpipe.evaluate.result import Evaluation
from optpipe.measure.pair import recompute_pair
from optpipe.measure.recompute import recompute_bench
from optpipe.measure.records import PairedComparison
from optpipe.preprocess.proof import recompute_preprocessing
from optpipe.preprocess.records import PreprocessRecord
from optpipe.signoff.build_evidence import BuildEvidence, observe_groups, select_groups
from optpipe.signoff.policy import Criterion
from optpipe.signoff.policy_format import LoadFilter
from optpipe.signoff.regression import observe_regression
from optpipe.signoff.suggest import suggest_bench, suggest_build_again, suggest_fix, suggest_narrowing
from optpipe.trace.records import ProfileRecord
from optpipe.trace.report import recompute_profile, suggest_profile
from optpipe.workspace.entry import Run
from optpipe.workspace.file_names import EVALUATION, PREPROCESSING, PROFILE

Observer = Callable[[Criterion, BuildEvidence], Sequence[Observation] | Missing]


@dataclass(frozen=True, slots=True)
class EvidenceKind:
    """One kind of evidence. What a run of the kind is read as, `build_evidence.BuildEvidence` holds."""

    observers: Mapping[str, Observer]
    """What it shows for a criterion, by section of the policy, in the criterion's base unit."""
    recompute: tuple[Callable[[Run], Iterator[Recomputed]], ...] = ()
    """What a run's records say, and what its raw files give. Raw files that were too large for a dossier give nothing."""
    documents: Mapping[str, type] = field(default_factory=dict)
    """The JSON files of a run, each with the record in it."""


def observe(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    """What `evidence` shows for `criterion`, in the criterion's base unit, and what to do about it."""
    kind = KINDS[find_kind(criterion.section)]
    found = kind.observers[criterion.section](criterion, evidence)
    if isinstance(found, Missing):
        return found
    narrow, fix = (suggest(criterion.section, evidence.build) for suggest in (suggest_narrowing, suggest_fix))
    return [replace(each, to_narrow=each.to_narrow or narrow, to_fix=fix) for each in found]


def _environment(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    seen = {
        one.environment.get_fact(criterion.metric): one.run
        for group in select_groups(LoadFilter(), evidence.measured)
        for one in group.valid or group.tries
    }
    if not seen:
        return Missing("nothing was measured", suggest_bench(evidence.build, LoadFilter(), evidence.options))
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
        command = f"optpipe evaluate {evidence.build.argument} --data DIR"
        if not evidence.accuracy and "evaluate" in evidence.other_file:
            return Missing("the evaluated file differs from the one being judged (sha256 mismatch)", command)
        return Missing(f"the {name} was not evaluated for this build", command)
    if criterion.dimension is Dimension.POINTS:
        low, high = (None if bound is None else 100 * bound for bound in (figure.low, figure.high))
        tail = None if figure.tail is None else ScaledTail(figure.tail, 100)
        return [replace(figure, value=100 * float(figure.value), low=low, high=high, tail=tail)]
    return [figure]


def _preprocessing(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    figure = evidence.preprocessing.get(criterion.metric.removeprefix("minimum_"))
    if figure is None:
        command = f"optpipe preprocess {evidence.build.argument} --images DIR"
        if evidence.preprocessing and criterion.metric == "minimum_agreement":
            return Missing(
                "the parity proof compares no predictions: the model has none, or the same for every image",
                f"limit minimum_snr instead, or use images on which predictions differ: {command}",
            )
        return Missing("preprocessing parity was not verified for this model", command)
    return [figure]


def _outputs(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    """Of the output that the criterion names, or of all that have the figure."""
    known, command = evidence.outputs, f"{suggest_build_again(evidence.build)} --data PATH"
    if not known:
        return Missing("the errors of each sample's outputs are not recorded for this build", command)
    if criterion.output is not None and criterion.output not in known:
        there = f"this build has no output {criterion.output}; it has {', '.join(known)}"
        return Missing(there, "change the policy's [outputs]")
    name = criterion.metric.partition("_")[2]
    return [each[name] for output, each in known.items() if criterion.output in (None, output)]


def _precision(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:
    shares = evidence.build.macs_share
    if not shares:
        return Missing("the precision of this build was not verified", suggest_build_again(evidence.build))
    share = float(shares.get(criterion.metric, 0.0))
    return [Observation(share, about="counted in the built network", source=evidence.record)]


def _size(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:  # noqa: ARG001
    if evidence.build.size_bytes is None:
        return Missing("the size of this build is not recorded", suggest_build_again(evidence.build))
    return [Observation(float(evidence.build.size_bytes), about="exact, of the file", source=evidence.record)]


def _tensor_cores(criterion: Criterion, evidence: BuildEvidence) -> Sequence[Observation] | Missing:  # noqa: ARG001
    if evidence.tensor_core_share is None:
        other = "profile" in evidence.other_file
        reason = "the profiled file differs from the one being judged (sha256 mismatch)"
        return Missing(reason if other else "not profiled on a GPU", suggest_profile(evidence.build))
    return [evidence.tensor_core_share]


KINDS: Mapping[str, EvidenceKind] = {
    "evaluate": EvidenceKind({"accuracy": _accuracy}, (recompute_evaluation,), {EVALUATION: Evaluation}),
    "preprocess": EvidenceKind(
        {"preprocessing": _preprocessing}, (recompute_preprocessing,), {PREPROCESSING: PreprocessRecord}
    ),
    "bench": EvidenceKind(
        {
            "latency": lambda criterion, evidence: observe_groups(criterion, evidence, criterion.metric),
            "throughput": partial(observe_groups, name="throughput"),
            "regression": observe_regression,
            "memory": partial(observe_groups, name="memory"),
            "energy": partial(observe_groups, name="energy"),
            "stability": partial(observe_groups, name="cv"),
            "environment": _environment,
        },
        (recompute_bench, recompute_pair),
        {MEASUREMENTS_FILE: MeasurementsRecord, COMPARISON_FILE: PairedComparison},
    ),
    "profile": EvidenceKind({"tensor_cores": _tensor_cores}, (recompute_profile,), {PROFILE: ProfileRecord}),
    "build": EvidenceKind({"outputs": _outputs, "precision": _precision, "size": _size}),
}
"""By kind of run, in the order in which a sign-off makes those that are missing; `build` is the build's own record."""
JUDGED_RUNS = tuple(name for name in KINDS if name != "build")


def find_kind(section: str) -> str:
    """The kind of evidence that shows the criteria of a section."""
    return next(name for name, kind in KINDS.items() if section in kind.observers)


def recompute_run(run: Run) -> Iterator[Recomputed]:
    """The records of a run, each with what its raw files give."""
    for recompute in KINDS[run.kind].recompute if run.kind in KINDS else ():
        yield from recompute(run)
