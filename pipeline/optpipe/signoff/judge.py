"""The verdict on a dossier's evidence, computed from its raw files alone. `signoff` and `verify` both call `judge_dossier`.

A dossier's folder (see `optpipe.workspace.seal` for its seal)
    request.json               what was asked: model, artifact, waivers, the optpipe that judged, when
    policy.toml                the policy, byte for byte
    environment.json           where it was judged
    artifact/manifest.json     the store's record of the engine (its hash, its proven precision, its weights)
    verification/manifest.json the store's record of its outputs held against the source model's, where it ran
    runs/RUN/…                 run folders with raw samples; `baseline/` holds the same of the approved baseline
    verdict.json               what `judge_dossier` says; report.html, report.md, junit.xml, comparison.json: the same for people
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optpipe.artifacts.facts import judged_build_from_manifest
from optpipe.bench.int8_notes import Note, list_int8_notes
from optpipe.bench.recompute import list_artifact_measurements
from optpipe.core.measurement import find_differing_settings, format_settings
from optpipe.core.verdict import Verdict
from optpipe.errors import BadInputError
from optpipe.evaluate.recompute import observe_accuracy
from optpipe.measuring.measured import RecordedMeasurement, find_environment_differences, get_environment_fact
from optpipe.preprocess.recompute import observe_preprocessing
from optpipe.profile.recompute import observe_tensor_cores
from optpipe.signoff.criteria import (
    CriterionResult,
    decide_overall_verdict,
    judge_criterion,
    waive_criteria,
)
from optpipe.signoff.evidence import (
    BuildEvidence,
    describe_measurement,
    filter_by_options,
    observe,
    select_measurements,
)
from optpipe.signoff.load_filter import LoadFilter
from optpipe.signoff.policy import Policy, policy_from_toml
from optpipe.workspace.file_names import ENVIRONMENT, POLICY, REQUEST
from optpipe.workspace.manifest import MANIFEST, Manifest, manifest_from_file
from optpipe.workspace.runs import Run, load_runs, read_dossier_file, read_json, require_unchanged

DOSSIER_SCHEMA = "optpipe.dossier"
DOSSIER_SCHEMA_VERSION = 1
TRUST_CRITERIA = ("trust.weights", "trust.precision", "trust.outputs", "trust.environment")
"""What is judged beside the policy's criteria."""


@dataclass(frozen=True, slots=True)
class Signoff:
    """A judged dossier."""

    folder: Path
    request: Mapping[str, Any]
    policy: Policy
    evidence: BuildEvidence
    criteria: tuple[CriterionResult, ...]
    verdict: Verdict
    environment: Mapping[str, Any]
    notes: tuple[Note, ...] = ()
    """What must be known of the build and decides nothing."""

    @property
    def expires_if(self) -> tuple[str, ...]:
        """What makes this verdict void."""
        return tuple(_list_expiry(self))

    @property
    def waived(self) -> tuple[CriterionResult, ...]:
        """The criteria that were set aside."""
        return tuple(one for one in self.criteria if one.waived)


def judge_dossier(folder: Path) -> Signoff:
    """Judges the evidence in `folder` by the policy in it. Raises BadInputError where a file is missing or damaged."""
    request = read_json(folder / REQUEST)
    if request.get("schema") != DOSSIER_SCHEMA or request.get("schema_version") != DOSSIER_SCHEMA_VERSION:
        raise BadInputError(
            f"{folder}: {request.get('schema')!r} version {request.get('schema_version')!r}; "
            f"this version of optpipe reads {DOSSIER_SCHEMA!r} version {DOSSIER_SCHEMA_VERSION}"
        )
    policy = policy_from_toml(read_dossier_file(folder / POLICY), str(folder / POLICY))
    runs = load_runs(folder / "runs")
    manifest = manifest_from_file(folder / "artifact" / MANIFEST)
    evidence = _gather_evidence(folder, runs, manifest, request, policy)
    found = (
        *evidence.trust,
        *(judge_criterion(criterion, observe(criterion, evidence)) for criterion in policy.criteria),
    )
    waivers = dict(request["waivers"])
    require_waivable(waivers, policy)
    criteria = waive_criteria(found, waivers)
    environment = read_json(folder / ENVIRONMENT)
    measured = [one.measurement for one in select_measurements(LoadFilter(), evidence.measured)]
    notes = tuple(list_int8_notes(manifest.info, evidence.build, runs, measured, policy.confidence))
    return Signoff(folder, request, policy, evidence, criteria, decide_overall_verdict(criteria), environment, notes)


def require_waivable(waivers: Iterable[str], policy: Policy) -> None:
    """Raises BadInputError for the name of a waiver that nothing judged by `policy` has."""
    names = (*TRUST_CRITERIA, *(one.name for one in policy.criteria))
    for name in waivers:
        if name not in names:
            raise BadInputError(f"cannot waive unknown criterion {name!r}; criteria are {', '.join(names)}")


def _gather_evidence(
    folder: Path, runs: Sequence[Run], manifest: Manifest, request: Mapping[str, Any], policy: Policy
) -> BuildEvidence:
    """Everything in `folder` that was gathered for the build, measurements computed anew from raw samples."""
    build, confidence = judged_build_from_manifest(manifest), policy.confidence
    measured = tuple(
        filter_by_options(policy.options, list_artifact_measurements(runs, confidence, build.artifact, judged=True))
    )
    baseline = load_runs(folder / "baseline" / "runs")
    for run in runs:
        require_unchanged(run, whole=False)
    verification = folder / "verification" / MANIFEST
    checked = manifest_from_file(verification) if verification.is_file() else None
    return BuildEvidence(
        build=build,
        measured=measured,
        baseline=tuple(list_artifact_measurements(baseline, confidence, request.get("baseline_artifact"), judged=True)),
        baseline_name=request.get("baseline"),
        accuracy=observe_accuracy(runs, build, confidence),
        preprocessing=observe_preprocessing(runs, build),
        tensor_core_share=observe_tensor_cores(runs, build),
        options=policy.options,
        trust=tuple(_judge_trust(manifest, checked, measured)),
    )


def _judge_trust(
    manifest: Manifest, checked: Manifest | None, measured: tuple[RecordedMeasurement, ...]
) -> Iterator[CriterionResult]:
    """What no policy can do without."""
    weights = manifest.info["weights"]
    yield (
        _pass_trust("trust.weights", f"trained weights ({weights['source']})")
        if weights.get("trained", weights["source"] != "random")
        else _doubt_trust(
            "trust.weights", "the weights are random", "build with the weights you will ship: --weights FILE"
        )
    )
    proof = manifest.info["precision_proof"]
    yield (
        _pass_trust("trust.precision", f"{manifest.info['precision']} is verified in the built network")
        if proof["proven"]
        else _fail_trust(
            "trust.precision",
            f"not the requested precision: {proof['reason']}",
            f"optpipe show {manifest.id} lists the layers",
        )
    )
    yield _judge_outputs(manifest, checked)
    differences = sorted(
        {
            text
            for one in measured[1:]
            for text in find_environment_differences(measured[0].environment, one.environment)
        }
    )
    yield (
        _doubt_trust(
            "trust.environment", f"measured on different machines: {'; '.join(differences)}", "measure on one machine"
        )
        if differences
        else _pass_trust("trust.environment", "all measurements are from one machine")
        if measured
        else _doubt_trust("trust.environment", "nothing was measured", f"optpipe bench {manifest.info['model']}")
    )


def _judge_outputs(manifest: Manifest, checked: Manifest | None) -> CriterionResult:
    build = f"optpipe build {manifest.info['model']}"
    name, again = "trust.outputs", f"{build} on a machine where it can run"
    if checked is None:
        return _doubt_trust(name, "the outputs were not compared with the source model", again)
    sha256 = manifest.files[manifest.info["file"]].sha256
    if checked.recipe.get("artifact", {}).get("sha256") != sha256:
        return _doubt_trust(name, "the verified file differs from the one being judged", again)
    snr = checked.info.get("snr_db")
    seen = f"on {checked.info['samples']} samples (reference: {checked.info['reference']})" + (
        f", SNR {snr:.0f} dB" if snr else ""
    )
    if not checked.info["passed"]:
        return _fail_trust(
            name,
            f"outputs exceed the {manifest.info['precision']} tolerance {seen}",
            f"optpipe show {checked.id} names the output",
        )
    return _pass_trust(name, f"outputs match the source model within tolerance {seen}")


def _pass_trust(name: str, reason: str) -> CriterionResult:
    return CriterionResult(name, None, "required", Verdict.PASS, reason)


def _doubt_trust(name: str, reason: str, remedy: str) -> CriterionResult:
    return CriterionResult(name, None, "required", Verdict.INCONCLUSIVE, reason, remedy)


def _fail_trust(name: str, reason: str, remedy: str) -> CriterionResult:
    return CriterionResult(name, None, "required", Verdict.FAIL, reason, remedy)


_RUNTIMES = {
    "onnxruntime": "onnxruntime-gpu",
    "tensorrt": "tensorrt-cu13",
    "tensorrt-rtx": "tensorrt-rtx-cu13",
    "torch-tensorrt": "torch-tensorrt",
}


def _list_expiry(signoff: Signoff) -> Iterator[str]:
    measured, build = signoff.evidence.measured, signoff.evidence.build
    place = measured[-1].environment if measured else signoff.environment
    yield f"the engine's sha256 is no longer {build.sha256}"
    for key, name in (("gpu", "the GPU"), ("driver", "the driver"), ("cpu", "the CPU")):
        value = get_environment_fact(place, key)
        if value != "none":
            yield f"{name} is no longer {value}"
    package = _RUNTIMES.get(build.backend, "torch")
    yield f"{package} is no longer {get_environment_fact(place, f'packages.{package}')}"
    yield from _list_changed_options(signoff.evidence)
    yield "the machine's clock or power settings change"
    yield "the preprocessing, input shapes or weights change"


def _list_changed_options(evidence: BuildEvidence) -> Iterator[str]:
    """Options that were given, or found by tuning: who deploys the build has to give them too."""
    for one in select_measurements(LoadFilter(), evidence.measured):
        built = replace(one.measurement.subject, options=evidence.build.options).settings
        used = one.measurement.subject.settings
        if names := [name for name in find_differing_settings((built, used)) if name in built and name in used]:
            yield f"it is deployed with options other than {format_settings(used, names)} ({describe_measurement(one.measurement)})"
