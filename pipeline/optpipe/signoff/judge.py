"""The verdict on a dossier's evidence, computed from its raw files alone. `signoff` and `verify` both call `judged`.

A dossier's folder (see `optpipe.workspace.seal` for its seal)
    request.json               what was asked: model, artifact, waivers, the optpipe that judged, when
    policy.toml                the policy, byte for byte
    environment.json           where it was judged
    artifact/manifest.json     the store's record of the engine (its hash, its proven precision, its weights)
    verification/manifest.json the store's record of its outputs held against the source model's, where it ran
    runs/RUN/…                 run folders with raw samples; `baseline/` holds the same of the approved baseline
    verdict.json               what `judged` says; report.html, report.md, junit.xml, comparison.json: the same for people
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optpipe.artifacts.facts import build_of
from optpipe.bench.int8_notes import Note, int8_notes
from optpipe.bench.recompute import measured_in
from optpipe.core.measurement import differing, setting_text
from optpipe.core.verdict import Verdict
from optpipe.errors import BadInputError
from optpipe.evaluate.recompute import accuracy_figures
from optpipe.measuring.measured import Measured, foreign, place_of
from optpipe.preprocess.recompute import preprocessing_figures
from optpipe.profile.recompute import tensor_core_figure
from optpipe.signoff.criteria import (
    Judged,
    judge,
    overall,
    waive,
)
from optpipe.signoff.evidence import (
    Evidence,
    about_measurement,
    matching,
    measured_with,
    observe,
)
from optpipe.signoff.load_filter import Where
from optpipe.signoff.policy import Policy, policy_from_toml
from optpipe.workspace.file_names import ENVIRONMENT, POLICY, REQUEST
from optpipe.workspace.manifest import MANIFEST, Manifest, manifest_from_file
from optpipe.workspace.runs import Run, json_file, read_dossier_file, require_unchanged, runs_in

SCHEMA = "optpipe.dossier"
SCHEMA_VERSION = 1
TRUST = ("trust.weights", "trust.precision", "trust.outputs", "trust.environment")
"""What is judged beside the policy's criteria."""


@dataclass(frozen=True, slots=True)
class Signoff:
    """A judged dossier."""

    folder: Path
    request: Mapping[str, Any]
    policy: Policy
    evidence: Evidence
    criteria: tuple[Judged, ...]
    verdict: Verdict
    environment: Mapping[str, Any]
    notes: tuple[Note, ...] = ()
    """What must be known of the build and decides nothing."""

    @property
    def expires_if(self) -> tuple[str, ...]:
        """What makes this verdict void."""
        return tuple(_expiry(self))

    @property
    def waived(self) -> tuple[Judged, ...]:
        """The criteria that were set aside."""
        return tuple(one for one in self.criteria if one.waived)


def judged(folder: Path) -> Signoff:
    """Judges the evidence in `folder` by the policy in it. Raises BadInputError where a file is missing or damaged."""
    request = json_file(folder / REQUEST)
    if request.get("schema") != SCHEMA or request.get("schema_version") != SCHEMA_VERSION:
        raise BadInputError(
            f"{folder}: {request.get('schema')!r} version {request.get('schema_version')!r}; "
            f"this optpipe reads {SCHEMA!r} version {SCHEMA_VERSION}"
        )
    policy = policy_from_toml(read_dossier_file(folder / POLICY), str(folder / POLICY))
    runs = runs_in(folder / "runs")
    manifest = manifest_from_file(folder / "artifact" / MANIFEST)
    evidence = _evidence(folder, runs, manifest, request, policy)
    found = (*evidence.trust, *(judge(criterion, observe(criterion, evidence)) for criterion in policy.criteria))
    waivers = dict(request["waivers"])
    require_waivable(waivers, policy)
    criteria = waive(found, waivers)
    environment = json_file(folder / ENVIRONMENT)
    measured = [one.measurement for one in matching(Where(), evidence.measured)]
    notes = tuple(int8_notes(manifest.info, evidence.build, runs, measured, policy.confidence))
    return Signoff(folder, request, policy, evidence, criteria, overall(criteria), environment, notes)


def require_waivable(waivers: Iterable[str], policy: Policy) -> None:
    """Raises BadInputError for the name of a waiver that nothing judged by `policy` has."""
    names = (*TRUST, *(one.name for one in policy.criteria))
    for name in waivers:
        if name not in names:
            raise BadInputError(f"no criterion {name!r} to waive; this policy has {', '.join(names)}")


def _evidence(
    folder: Path, runs: Sequence[Run], manifest: Manifest, request: Mapping[str, Any], policy: Policy
) -> Evidence:
    """Everything in `folder` that was gathered for the build, measurements computed anew from raw samples."""
    build, confidence = build_of(manifest), policy.confidence
    measured = tuple(measured_with(policy.options, measured_in(runs, confidence, build.artifact, judged=True)))
    baseline = runs_in(folder / "baseline" / "runs")
    for run in runs:
        require_unchanged(run, whole=False)
    verification = folder / "verification" / MANIFEST
    checked = manifest_from_file(verification) if verification.is_file() else None
    return Evidence(
        build=build,
        measured=measured,
        baseline=tuple(measured_in(baseline, confidence, request.get("baseline_artifact"), judged=True)),
        baseline_name=request.get("baseline"),
        accuracy=accuracy_figures(runs, build, confidence),
        preprocessing=preprocessing_figures(runs, build),
        tensor_core_share=tensor_core_figure(runs, build),
        options=policy.options,
        trust=tuple(_trust(manifest, checked, measured)),
    )


def _trust(manifest: Manifest, checked: Manifest | None, measured: tuple[Measured, ...]) -> Iterator[Judged]:
    """What no policy can do without."""
    weights = manifest.info["weights"]
    yield (
        _trusted("trust.weights", f"trained weights ({weights['source']})")
        if weights.get("trained", weights["source"] != "random")
        else _doubted(
            "trust.weights", "the weights are random", "build with the weights that will ship: --weights FILE"
        )
    )
    proof = manifest.info["precision_proof"]
    yield (
        _trusted("trust.precision", f"{manifest.info['precision']} is proven from the built network")
        if proof["proven"]
        else _failed(
            "trust.precision",
            f"not the precision asked for: {proof['reason']}",
            f"optpipe show {manifest.id} names the layers",
        )
    )
    yield _outputs(manifest, checked)
    differences = sorted({text for one in measured[1:] for text in foreign(measured[0].environment, one.environment)})
    yield (
        _doubted(
            "trust.environment", f"measured on different machines: {'; '.join(differences)}", "measure on one machine"
        )
        if differences
        else _trusted("trust.environment", "everything was measured on one machine")
        if measured
        else _doubted("trust.environment", "nothing was measured", f"optpipe bench {manifest.info['model']}")
    )


def _outputs(manifest: Manifest, checked: Manifest | None) -> Judged:
    build = f"optpipe build {manifest.info['model']}"
    name, again = "trust.outputs", f"{build} where it can run"
    if checked is None:
        return _doubted(name, "the outputs were not held against the source model's", again)
    sha256 = manifest.files[manifest.info["file"]].sha256
    if checked.recipe.get("artifact", {}).get("sha256") != sha256:
        return _doubted(name, "another file was verified than is judged", again)
    snr = checked.info.get("snr_db")
    seen = f"on {checked.info['samples']} samples ({checked.info['reference']})" + (
        f", SNR {snr:.0f} dB" if snr else ""
    )
    if not checked.info["passed"]:
        return _failed(
            name,
            f"outside the tolerance of {manifest.info['precision']} {seen}",
            f"optpipe show {checked.id} names the output",
        )
    return _trusted(name, f"equal to the source model's within tolerance {seen}")


def _trusted(name: str, reason: str) -> Judged:
    return Judged(name, None, "required", Verdict.PASS, reason)


def _doubted(name: str, reason: str, remedy: str) -> Judged:
    return Judged(name, None, "required", Verdict.INCONCLUSIVE, reason, remedy)


def _failed(name: str, reason: str, remedy: str) -> Judged:
    return Judged(name, None, "required", Verdict.FAIL, reason, remedy)


_RUNTIMES = {
    "onnxruntime": "onnxruntime-gpu",
    "tensorrt": "tensorrt-cu13",
    "tensorrt-rtx": "tensorrt-rtx-cu13",
    "torch-tensorrt": "torch-tensorrt",
}


def _expiry(signoff: Signoff) -> Iterator[str]:
    measured, build = signoff.evidence.measured, signoff.evidence.build
    place = measured[-1].environment if measured else signoff.environment
    yield f"the engine's sha256 is no longer {build.sha256}"
    for key, name in (("gpu", "the GPU"), ("driver", "the driver"), ("cpu", "the CPU")):
        value = place_of(place, key)
        if value != "none":
            yield f"{name} is no longer {value}"
    package = _RUNTIMES.get(build.backend, "torch")
    yield f"{package} is no longer {place_of(place, f'packages.{package}')}"
    yield from _unlike_built(signoff.evidence)
    yield "the clock or power policy of the machine changes"
    yield "the preprocessing, the input shapes or the weights change"


def _unlike_built(evidence: Evidence) -> Iterator[str]:
    """Options that were given, or found by tuning: who deploys the build has to give them too."""
    for one in matching(Where(), evidence.measured):
        built = replace(one.measurement.subject, options=evidence.build.options).settings
        used = one.measurement.subject.settings
        if names := [name for name in differing((built, used)) if name in built and name in used]:
            yield f"it does not run with {setting_text(used, names)} at {about_measurement(one.measurement)}"
