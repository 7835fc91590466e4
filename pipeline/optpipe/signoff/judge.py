"""The verdict on a dossier's evidence, computed only from its raw files; a sign-off and `verify` both call `judge_dossier`."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from optpipe.backends.registry import list_runtime_packages
from optpipe.build.verify import observe_outputs
from optpipe.core.entries import ArtifactInfo, Environment
from optpipe.core.errors import BadInputError
from optpipe.core.metrics.measured import P50
from optpipe.core.metrics.sections import (
    ACCURACY,
    DROP,
    OUTPUTS,
    PARITY,
    PRECISION,
    REGRESSION,
    SPEEDUP,
    Sense,
)
from optpipe.core.precision import Precision
from optpipe.core.quantity import Dimension, format_quantity, format_snr
from optpipe.core.settings import find_differing_settings, format_settings
from optpipe.core.verdict import (
    Blocker,
    CriterionResult,
    JudgedArtifact,
    Note,
    Observation,
    PolicyReference,
    Verdict,
    VerdictRecord,
    combine_verdicts,
    require_reason,
)
from optpipe.core.wording import Argument, Call
from optpipe.measure.figures import list_artifact_measurements
from optpipe.measure.groups import (
    RecordedMeasurement,
    describe_tries,
    find_environment_differences,
    group_processes,
    summarize_group,
)
from optpipe.measure.int8_notes import list_int8_notes
from optpipe.measure.pair import pairs_from_runs
from optpipe.models.artifacts.engine_files import hash_engine
from optpipe.report.document import format_observed
from optpipe.signoff.build_evidence import (
    BuildEvidence,
    Unjudged,
    evidence_from_runs,
    select_groups,
    suggest_build,
    suggest_build_again,
)
from optpipe.signoff.dossier import Dossier, DossierRequest, split_runs
from optpipe.signoff.evidence import APPROVE, find_kind_of_look, observe
from optpipe.signoff.loosened import list_loosened
from optpipe.signoff.policy import Criterion, LoadFilter, Policy
from optpipe.stats.means import Look, OtherSpeed, compute_t_quantile, reject_by_holm
from optpipe.workspace.entry import MANIFEST, Entry, require_unchanged
from optpipe.workspace.file_names import BUILDS


def judge_criteria(
    observed: Sequence[tuple[Criterion, Sequence[Observation] | Blocker]],
    confidence: float,
    looks: Mapping[str, Look] | None = None,
) -> list[CriterionResult]:
    """Judges all criteria; the worst observation of a criterion decides it.

    PASS needs each interval alone: all limits must hold, so no correction is needed (Berger, Technometrics 24, 1982). FAIL needs
    Holm's procedure over all observations, with each p-value multiplied by the parts of its look (`looks` by `find_kind_of_look`):
    the smallest such value over all looks is a p-value itself, so that the procedure holds over all looks of all kinds.
    """
    every = [
        (criterion, observation)
        for criterion, observations in observed
        if not isinstance(observations, Blocker)
        for observation in observations
    ]
    p_values = [
        (
            id(observation),
            _compute_p_value(
                criterion,
                observation,
                confidence,
                (looks or {}).get(find_kind_of_look(criterion.section), Look()),
            ),
        )
        for criterion, observation in every
    ]
    tests = [(name, p) for name, p in p_values if p is not None]
    rejected = reject_by_holm([p for _, p in tests], (1 - confidence) / 2)
    broken = {name for (name, _), hit in zip(tests, rejected, strict=True) if hit}
    return [
        _judge_criterion(criterion, observations, broken, len(tests))
        for criterion, observations in observed
    ]


def _judge_criterion(
    criterion: Criterion,
    observations: Sequence[Observation] | Blocker,
    broken: set[int],
    tests: int,
) -> CriterionResult:
    if isinstance(observations, Blocker) or not observations:
        absent = (
            observations
            if isinstance(observations, Blocker)
            else Blocker("no measurement", "measure it first")
        )
        return _make_result(criterion, Verdict.INCONCLUSIVE, absent.reason, absent.remedy)
    order = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS)
    verdict, _, worst = min(
        (
            (
                _decide_verdict(criterion, observation, broken),
                _margin(criterion, observation),
                observation,
            )
            for observation in observations
        ),
        key=lambda judged: (
            order.index(judged[0]),
            not judged[2].blockers,
            judged[1],
            judged[2].source,
        ),
    )
    if worst.blockers:
        reason = "; ".join(dict.fromkeys(cap.reason for cap in worst.blockers))
        remedy = "; ".join(dict.fromkeys(cap.remedy for cap in worst.blockers))
        return _make_result(criterion, verdict, reason, remedy, worst)
    reason = _reason(criterion, worst, verdict)
    if verdict is Verdict.INCONCLUSIVE and _is_beyond(criterion, worst):
        reason = f"{_reason(criterion, worst, Verdict.FAIL)}, but not clearly enough among the {tests} figures judged together"
    return _make_result(criterion, verdict, reason, _remedy(criterion, verdict, worst), worst)


def _compute_p_value(
    criterion: Criterion, seen: Observation, confidence: float, look: Look
) -> float | None:
    """The probability of a figure this far beyond the limit over all looks if the limit were true; None for exact figures.

    Repeated looks do not make it likelier that all processes ran at one speed, so that error counts once.
    """
    if seen.blockers or criterion.sense is Sense.EQUALS or isinstance(seen.value, str):
        return None
    bounds = seen.interval
    if bounds is None or not bounds[0] < bounds[1]:
        return None
    distance = criterion.measure_distance(float(seen.value))
    speed = OtherSpeed(seen.processes, seen.left_out, seen.left_out_gap, repeated=seen.repeated)
    unseen = speed.compute_p_value(distance) if seen.processes else 0.0
    tail = _compute_tail(criterion, seen, bounds, look.compute_confidence(confidence))
    return min(1.0, unseen + look.parts * tail)


def _compute_tail(
    criterion: Criterion, seen: Observation, interval: tuple[float, float], confidence: float
) -> float:
    """Uses the estimate's own distribution, or a normal one if only its interval is known."""
    (low, high), value = interval, float(seen.value)
    at_most = criterion.sense is not Sense.AT_LEAST
    limit = criterion.move_limit(seen.repeated)
    if seen.tail is not None:
        compute_p_value = (
            seen.tail.compute_p_value_above if at_most else seen.tail.compute_p_value_below
        )
        return compute_p_value(limit)
    spread = (value - low if at_most else high - value) / compute_t_quantile(
        0.5 + confidence / 2, math.inf
    )
    distance = value - limit if at_most else limit - value
    if spread <= 0:
        return 0.0 if distance > 0 else 1.0
    return 1 - NormalDist().cdf(distance / spread)


def _is_beyond(criterion: Criterion, seen: Observation) -> bool:
    if criterion.sense is Sense.EQUALS or (bounds := seen.interval) is None:
        return False
    (low, high), limit = bounds, float(criterion.threshold)
    return high < limit if criterion.sense is Sense.AT_LEAST else low > limit


def decide_overall_verdict(judged: Iterable[CriterionResult]) -> Verdict:
    """Waived criteria do not count; without any criteria the verdict is INCONCLUSIVE."""
    return combine_verdicts(criterion.verdict for criterion in judged if criterion.counts)


def _decide_verdict(criterion: Criterion, seen: Observation, broken: set[int]) -> Verdict:
    """INCONCLUSIVE unless the observation proves the limit kept or broken."""
    if seen.blockers:
        return Verdict.INCONCLUSIVE
    if criterion.sense is Sense.EQUALS:
        return Verdict.PASS if seen.value == criterion.threshold else Verdict.INCONCLUSIVE
    if (bounds := seen.interval) is None:
        return Verdict.INCONCLUSIVE
    (low, high), limit = bounds, float(criterion.threshold)
    if not (low <= high):  # true also for NaN
        return Verdict.INCONCLUSIVE
    if _is_beyond(criterion, seen) and (low == high or id(seen) in broken):
        return Verdict.FAIL
    if low >= limit if criterion.sense is Sense.AT_LEAST else high <= limit:
        return Verdict.PASS
    return Verdict.INCONCLUSIVE


def _margin(criterion: Criterion, seen: Observation) -> float:
    """Distance of the critical bound from the limit, negative beyond it. Orders observations of one verdict."""
    if isinstance(seen.value, str):
        return 0.0
    if math.isnan(seen.value):
        return -math.inf
    low, high = seen.interval or (seen.value, seen.value)
    limit = float(criterion.threshold)
    return low - limit if criterion.sense is Sense.AT_LEAST else limit - high


def _reason(criterion: Criterion, seen: Observation, verdict: Verdict) -> str:
    text = format_observed(_make_result(criterion, verdict, "", None, seen))
    limit = criterion.limit.removeprefix(f"{criterion.sense} ")
    if verdict is Verdict.FAIL and text == limit:  # they differ only in digits that are not shown
        text, limit = (
            f"{float(number):.12g} {criterion.dimension}"
            for number in (seen.value, criterion.threshold)
        )
    if criterion.sense is Sense.EQUALS:
        required = (
            "" if verdict is Verdict.PASS else f", but the policy requires {criterion.threshold}"
        )
        return f"measured on {text}{required}"
    if verdict is Verdict.PASS:
        return f"{text} {'meets the minimum of' if criterion.sense is Sense.AT_LEAST else 'is within the limit of'} {limit}"
    if verdict is Verdict.FAIL:
        return f"{text} {'is below the minimum of' if criterion.sense is Sense.AT_LEAST else 'exceeds the limit of'} {limit}"
    if seen.interval is None:
        return f"{text} has no interval"
    return f"the interval {text} straddles the limit of {limit}"


def _remedy(criterion: Criterion, verdict: Verdict, seen: Observation) -> str | None:
    if verdict is Verdict.PASS:
        return None
    if criterion.sense is Sense.EQUALS:
        return f"measure on {criterion.threshold}, or change the policy's [environment]"
    if verdict is Verdict.INCONCLUSIVE:
        return seen.to_narrow or "collect more data to narrow the interval"
    return seen.to_fix or "change the build, or justify a different limit"


def _make_result(
    criterion: Criterion,
    verdict: Verdict,
    reason: str,
    remedy: str | None,
    seen: Observation | None = None,
) -> CriterionResult:
    threshold, unit = criterion.threshold, criterion.dimension
    result = CriterionResult(
        criterion.name, verdict, reason, criterion.limit, remedy, threshold=threshold, unit=unit
    )
    if seen is None:
        return result
    result = replace(result, about=seen.about, source=seen.source)
    if isinstance(seen.value, str):
        return replace(result, observed=seen.value)
    if not math.isfinite(seen.value):
        return result  # a blocker gives the reason
    bounds = None if seen.is_exact else seen.interval
    bounded = bounds is not None and math.isfinite(bounds[0])
    return replace(result, observed=seen.value, ci=bounds if bounded else None)


TRUST_CRITERIA = ("trust.weights", "trust.precision", "trust.outputs", "trust.environment")


def judge_dossier(dossier: Dossier) -> tuple[VerdictRecord, BuildEvidence]:
    """Recomputes the evidence from raw files and judges it. Raises BadInputError if a file is missing or damaged."""
    request, policy = dossier.request, dossier.policy
    for run in dossier.every_run:
        require_unchanged(run, whole=False)
    left_out = tuple(
        list_artifact_measurements(dossier.earlier_runs, policy.confidence, dossier.build.artifact)
    )
    evidence = _gather_evidence(dossier, left_out)
    observed = [(criterion, observe(criterion, evidence)) for criterion in policy.criteria]
    results = [
        *_judge_trust(dossier, evidence),
        *judge_criteria(observed, policy.confidence, evidence.looks),
    ]
    require_waivable(request.waivers, policy)
    criteria = tuple(
        replace(criterion, waived=request.waivers.get(criterion.name)) for criterion in results
    )
    build, groups = evidence.build, select_groups(LoadFilter(), evidence.measured)
    loads = [group.newest.measurement for group in groups]
    judged = JudgedArtifact(
        build.artifact,
        build.backend,
        build.precision,
        build.sha256,
        build.size_bytes,
        build.weights,
    )
    when = request.created_utc[:19].replace("-", "").replace(":", "")  # 20261121T072500
    record = VerdictRecord(
        verdict=decide_overall_verdict(criteria),
        dossier_name=f"{Path(build.model).stem}-{build.backend}-{build.precision}-{when}",
        model=build.model,
        artifact=judged,
        policy=PolicyReference(policy.name, policy.sha256),
        criteria=criteria,
        notes=(
            *_note_policy(dossier),
            *_note_left_out(request, left_out),
            *list_int8_notes(
                dossier.artifact.info,
                build,
                dossier.runs,
                loads,
                evidence.find_confidence("evaluate"),
                find_drop_limit(policy),
            ),
            _note_look(evidence),
        ),
        baseline=request.baseline,
        expires_if=tuple(_list_expiry(evidence)),
        runs=tuple(sorted({process.run for process in evidence.measured})),
        groups=tuple(
            summarize_group(group, evidence.find_confidence("bench"), policy.confidence)
            for group in groups
        ),
        since=request.since,
        runs_left_out=tuple(sorted({process.run for process in left_out})),
        loosened=tuple(list_loosened(dossier)),
        created_utc=request.created_utc,
        optpipe=request.optpipe,
    )
    return record, evidence


def find_drop_limit(policy: Policy) -> float | None:
    """The drop of the task's main score that the policy allows, as a share; None without a limit."""
    limits = [
        float(criterion.threshold) / 100
        for criterion in policy.criteria
        if criterion.is_of(ACCURACY) and criterion.metric == DROP and criterion.score is None
    ]
    return min(limits, default=None)


MEASURE_ENOUGH = "measure enough processes in one run (`bench " + Argument("processes", "N") + "`)"


def _note_look(evidence: BuildEvidence) -> Note:
    error = 100 * (1 - evidence.policy_confidence)
    said = "; ".join(_describe_looks(evidence))
    message = (
        f"each kind of evidence has its own looks: {said or 'none was judged'}. Over all of them, a build exactly on a limit"
        f" wrongly passes in at most {error / 2:.3g}% of cases, and wrongly fails in at most {error / 2:.3g}%, if processes and samples"
        " differ by chance, and a second speed is at most 5% away"
    )
    shares = f"the k-th may err in {error:.3g}% / (k (k + 1)) of cases"
    if any(look.sampled and look.number > 2 for look in evidence.looks.values()):
        shares += f", of scores of samples from the third on in {2 * error:.3g}% / (k² (k + 1))"
    stricter = f"each further look needs stronger evidence: {shares}"
    way = MEASURE_ENOUGH
    if evidence.find_look("bench").builds > LARGEST_SHARED:
        way += (
            "; or measure the chosen build again, and judge it from then on (`signoff "
            + Argument("since", "TIME")
            + "`), which spends one look instead of a share for each build"
        )
    return Note("look", message, way + "; " + stricter)


LARGEST_SHARED = 3
"""Builds that share a first look; with more, each share is smaller than that of a second look."""


def _describe_looks(evidence: BuildEvidence) -> Iterator[str]:
    """One phrase for each kind of evidence that was judged: `accuracy, look 2 (2 sets of samples), at 99.17%`."""
    baselines = evidence.find_look(REGRESSION.name).number - evidence.find_look("bench").number + 1
    approved = f", and {baselines} baselines" if baselines > 1 else ""
    kinds = (
        ("measurements", "bench", "bench run", " of one load", evidence.measured),
        (
            REGRESSION.name,
            REGRESSION.name,
            "bench run",
            " of one load",
            evidence.baseline,
        ),
        (SPEEDUP.name, "turns", "comparison", " in turns", evidence.turns),
        (ACCURACY.name, "evaluate", "set", " of samples", evidence.accuracy),
        (PARITY.name, "preprocess", "set", " of images", evidence.preprocessing),
        ("Tensor Cores", "profile", "profile", "", evidence.tensor_core_share),
        (OUTPUTS.name, "build", "set", " of samples", evidence.outputs),
    )
    for name, kind, what, of, judged in kinds:
        look = evidence.find_look(kind)
        if not judged:
            continue
        count = evidence.find_look("bench").number if kind == REGRESSION.name else look.number
        why = f"{count} {what}{'s' if count > 1 else ''}{of}"
        if look.builds > 1:
            on, done = ("on", "evaluated") if kind == "evaluate" else ("under", "measured")
            why += f", {on} which {look.builds} builds were {done}"
        if kind == REGRESSION.name:
            why += approved
        level = 100 * look.compute_confidence(evidence.policy_confidence)
        yield f"{name}, look {look.number} ({why}), at {level:.4g}%"


def _note_policy(dossier: Dossier) -> Iterator[Note]:
    """Counts the tries since the policy was first used, and names evidence that is older."""
    first = dossier.request.policy_utc
    if first is None:
        return
    judged = dossier.artifact.id
    about = [
        run
        for run in dossier.every_run
        if run.kind == "preprocess" or judged in run.manifest.parents
    ]
    later, older = split_runs(about, None, first)
    tries = sum(run.kind == "bench" for run in later)
    message = f"this policy was first used on {first[:19].replace('T', ' ')} UTC; bench runs of this build since then: {tries}"
    if older:
        names = ", ".join(run.name for run in older)
        message += (
            f"; older runs, {'left out' if dossier.policy.preregistered else 'judged too'}: {names}"
        )
    again = "measure again, or sign off by a policy with `[evidence] preregistered = true`, which leaves older runs out"
    yield Note(
        "policy",
        message,
        again if older else MEASURE_ENOUGH,
    )


def _note_left_out(
    request: DossierRequest, left_out: Sequence[RecordedMeasurement]
) -> Iterator[Note]:
    """Notes on runs that are not judged (before `--since`, removed, of another file), and on a baseline of another network."""
    if (since := request.since) is not None:
        tries = []
        for group in group_processes(left_out):
            p50 = [value for run in group.list_values(P50.name) for value in run]
            shown = (
                [format_quantity(value, Dimension.TIME) for value in (min(p50), max(p50))]
                if p50
                else []
            )
            runs = ", ".join(dict.fromkeys(process.run for process in group.tries))
            text = f"{group.load} ({runs}): {describe_tries(group)}"
            tries.append(text + (f", p50 {' to '.join(dict.fromkeys(shown))}" if shown else ""))
        message = f"only bench runs since {since[:19].replace('T', ' ')} UTC are judged ("
        message += Argument("since") + ")"
        message += (
            f"; left out: {'; '.join(tries)}"
            if tries
            else "; there are no earlier ones of this build"
        )
        yield Note("since", message, "omit " + Argument("since") + " to judge all runs")
    if count := len(request.removed):
        what = f"{count} run{'s' if count > 1 else ''} of this build {'were' if count > 1 else 'was'} removed"
        message = f"{what} and not judged: {', '.join(request.removed)}"
        yield Note("removed-runs", message, "judge the build on a workspace with all of its runs")
    if names := request.other_file:
        what = f"{len(names)} bench run{'s' if len(names) > 1 else ''} of another file under this build's ID not judged"
        yield Note(
            "other-file",
            f"{what}: {', '.join(names)}",
            "measure this file: " + Call("bench", request.artifact),
        )
    if request.is_of_other_network:
        mine, theirs = request.network, request.baseline_network
        what = f"the baseline {request.baseline} is of another network called {request.model}"
        remedy = "approve a dossier of this network: " + APPROVE
        yield Note("other-network", f"{what}: {theirs}; this one: {mine}", remedy)


def require_waivable(waivers: Mapping[str, str], policy: Policy) -> None:
    """Raises BadInputError for a waiver that names no criterion of `policy`, or that has no reason."""
    names = (*TRUST_CRITERIA, *(criterion.name for criterion in policy.criteria))
    for name, reason in waivers.items():
        if name not in names:
            raise BadInputError(
                f"cannot waive unknown criterion {name!r}; criteria are {', '.join(names)}"
            )
        require_reason(reason, f"the waiver of {name}")


def _gather_evidence(dossier: Dossier, left_out: Sequence[RecordedMeasurement]) -> BuildEvidence:
    request, build, confidence = dossier.request, dossier.build, dossier.policy.confidence
    approved = list_artifact_measurements(
        dossier.baseline_runs, confidence, request.baseline_artifact
    )
    unjudged = Unjudged(
        left_out,
        dossier.earlier_runs,
        request.removed,
        request.baselines,
        request.verifications,
        request.candidates,
    )
    evidence = evidence_from_runs(build, dossier.runs, dossier.policy, unjudged)
    checked, of_outputs = dossier.verification, evidence.find_confidence("build")
    outputs = {} if checked is None else observe_outputs(checked, build, of_outputs)
    trajectory = () if checked is None else checked.info.trajectory
    states = {state.name: outputs.pop(state.name) for state in trajectory if state.name in outputs}
    return replace(
        evidence,
        baseline=tuple(approved),
        baseline_name=request.baseline,
        same_network=not request.is_of_other_network,
        pairs=tuple(
            pairs_from_runs(dossier.runs, request.baseline_artifact, build.artifact, confidence)
        ),
        record=_describe_record(dossier.artifact),
        outputs=outputs,
        states=states,
        steps=None if checked is None else checked.info.steps,
    )


def _judge_trust(dossier: Dossier, evidence: BuildEvidence) -> Iterator[CriterionResult]:
    artifact, checked = dossier.artifact, dossier.verification
    record = _describe_record(artifact)
    yield replace(_judge_weights(dossier), source=record)
    yield replace(_judge_precision(artifact, dossier.policy), source=record)
    yield replace(_judge_outputs(dossier), source=_describe_record(checked) if checked else "")
    yield _judge_environment(artifact.id, evidence)


def _judge_weights(dossier: Dossier) -> CriterionResult:
    name, weights = "trust.weights", dossier.artifact.info.weights
    if weights.trained:
        given = f"weights as given ({weights.source}), not random"
        if weights.source == "asserted":
            given = "weights of a module in memory, trained as its user asserts"
        if (own := weights.converted_from) is not None:
            given += f"; converted from {own} to float32"
        return CriterionResult(name, Verdict.PASS, given)
    if weights.source == "unknown":
        remedy = "if they are, say so: Model(..., trained=True)"
        return _doubt_trust(name, "nobody asserts that the weights are trained", remedy)
    remedy = "build with the weights you will ship: " + suggest_build(dossier.build)
    return _doubt_trust(name, "the weights are random", remedy)


def _judge_precision(artifact: Entry[ArtifactInfo], policy: Policy) -> CriterionResult:
    """PASS and FAIL need layers that were read back from the built network, and that products of unknown cost change neither.

    A policy may state which share of a precision is enough; FP32 and TF32 hold for every MAC, whatever it states.
    """
    name, info, proof = "trust.precision", artifact.info, artifact.info.precision_proof
    remedy = "`" + Call("store show", artifact.id) + "` lists the layers"
    read = bool(proof.share.counted or proof.share.unknown)
    enough = proof.settle(info.precision) if read else None
    if enough and proof.proven:
        return CriterionResult(
            name, Verdict.PASS, f"{info.precision} is verified in the built network"
        )
    share = proof.share.counted.get(info.precision, 0.0)
    stated = any(
        criterion.is_of(PRECISION) and criterion.metric == info.precision
        for criterion in policy.criteria
    )
    if stated and proof.placed and share and info.precision not in (Precision.FP32, Precision.TF32):
        reason = f"{share:.1%} {info.precision}, verified in the built network; the policy states which share is enough"
        return CriterionResult(name, Verdict.PASS, reason)
    if enough is not None:
        reason = f"not the requested precision: {proof.reason}"
        return CriterionResult(name, Verdict.FAIL, reason, remedy=remedy)
    if read:
        unknown = proof.share.describe_unknown() or "products of unknown type"
        return _doubt_trust(name, f"{unknown} could change the share of {info.precision}", remedy)
    return _doubt_trust(name, "no layer of the built network could be read", remedy)


def _describe_record(entry: Entry[Any]) -> str:
    """Path of an entry's record in a dossier: the source of facts without raw files."""
    return f"{BUILDS}/{entry.manifest.kind}-{entry.id}/{MANIFEST}"


def _judge_environment(artifact: str, evidence: BuildEvidence) -> CriterionResult:
    """PASS needs a VALID process or a comparison in turns: without one no machine was seen in a state that counts."""
    name, places = "trust.environment", evidence.list_environments()
    differences = {
        text for place in places for text in find_environment_differences(places[0], place)
    }
    if differences:
        why = f"measured on different machines: {'; '.join(sorted(differences))}"
        return _doubt_trust(name, why, "measure on one machine")
    if evidence.turns or any(process.measurement.is_valid for process in evidence.measured):
        return CriterionResult(name, Verdict.PASS, "all measurements are from one machine")
    why = "no process was VALID" if places else "nothing was measured"
    return _doubt_trust(name, why, Call("bench", artifact))


def _judge_outputs(dossier: Dossier) -> CriterionResult:
    info, checked = dossier.artifact.info, dossier.verification
    name, again = (
        "trust.outputs",
        "on a machine where it can run: " + suggest_build_again(dossier.build),
    )
    if checked is None:
        return _doubt_trust(name, "the outputs were not compared with the source model", again)
    if checked.recipe.get("artifact", {}).get("sha256") != hash_engine(dossier.artifact):
        return _doubt_trust(name, "the verified file differs from the one being judged", again)
    snr, whose = checked.info.snr_db, f" of {checked.info.data}" if checked.info.data else ""
    seen = f"on {checked.info.samples:,} samples{whose} (reference: {checked.info.reference})"
    seen += f", SNR {format_snr(snr)}" if snr else ""
    if checked.info.box_agreement is not None:
        seen += f", {checked.info.box_agreement:.1%} of the boxes agree"
    if checked.info.passed:
        return CriterionResult(
            name, Verdict.PASS, f"outputs match the source model within tolerance {seen}"
        )
    if checked.info.passed is None:
        remedy = "build on samples in which the model finds something"
        return _doubt_trust(name, f"there was nothing to compare {seen}", remedy)
    asked = checked.recipe.get("minimum_snr_db")
    reason = f"outputs exceed the {info.precision} tolerance {seen}"
    if asked is not None:
        reason = f"an output has less than the SNR of {asked:g} dB that the build required ("
        reason += Argument("min_snr") + f") {seen}"
    remedy = "`" + Call("store show", checked.id) + "` names the output"
    return CriterionResult(name, Verdict.FAIL, reason, remedy=remedy)


def _doubt_trust(name: str, reason: str, remedy: str) -> CriterionResult:
    return CriterionResult(name, Verdict.INCONCLUSIVE, reason, remedy=remedy)


def _list_expiry(evidence: BuildEvidence) -> Iterator[str]:
    build = evidence.build
    yield f"the engine's sha256 is no longer {build.sha256}"
    place = next(reversed(evidence.list_environments()), Environment())
    facts = {"gpu": "the GPU", "driver": "the driver", "cpu": "the CPU"}
    packages = build.packages or list_runtime_packages(build.backend)
    facts |= {f"packages.{package}": package for package in packages}
    for key, name in facts.items():
        if (value := place.get_fact(key)) != "none":
            yield f"{name} is no longer {value}"
    for process in (group.newest for group in select_groups(LoadFilter(), evidence.measured)):
        built = replace(process.measurement.subject, options=build.options).settings
        used = process.measurement.subject.settings
        if names := [
            name
            for name in find_differing_settings((built, used))
            if name in built and name in used
        ]:
            yield f"it is deployed with options other than {format_settings(used, names)} ({process.measurement.load})"
    yield "the machine's clock or power settings change"
    yield "the preprocessing, input shapes or weights change"
