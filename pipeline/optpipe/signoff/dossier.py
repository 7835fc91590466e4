"""A dossier as values, each of its files read once.

A dossier's folder (see `optpipe.workspace.seal` for its seal)
    request.json               the request: model, artifact, waivers, version of optpipe, time
    policy.toml                the policy, byte for byte
    builds/KIND-ID/            the store's records: of the engine (its hash, its proven precision, its weights), of the
                               comparison of its outputs with the source model's, and of all their ancestors
    runs/RUN/…                 run folders with raw samples; `baseline/` holds those of the approved baseline
    verdict.json               the verdict of `judge_dossier`
    report.html, report.md, junit.xml, comparison.json   the reports
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, cached_property
from math import inf
from pathlib import Path
from typing import Any

from optpipe.core.entries import (
    ArtifactInfo,
    CalibrationInfo,
    GraphInfo,
    ModelInfo,
    RecoveredInfo,
    ReferenceInfo,
    VerificationInfo,
)
from optpipe.core.errors import BadInputError, escape
from optpipe.core.files import Files, hash_file
from optpipe.core.records import read_versioned
from optpipe.core.verdict import PreviousSignoff
from optpipe.core.wording import Argument
from optpipe.models.artifacts.engine_files import hash_engine
from optpipe.models.artifacts.judged_build import JudgedBuild, judged_build_from_entry
from optpipe.quantize.sensitivity import MethodsInfo, SelectionInfo, SensitivityInfo
from optpipe.signoff.policy import Policy, policy_from_toml
from optpipe.workspace.entry import (
    MANIFEST,
    Entry,
    Manifest,
    Run,
    entry_from_files,
    runs_from_files,
)
from optpipe.workspace.file_names import BUILDS, POLICY, REQUEST
from optpipe.workspace.places import find_shipped_folder, move_folder
from optpipe.workspace.seal import seal_folder, sign_folder

RUN_SUFFIXES = frozenset({".json", ".parquet", ".png"})
"""Of the files of a run in a dossier; a recording and a log stay in the workspace."""
BUILD_KINDS = {
    kind.KIND: kind
    for kind in (
        ArtifactInfo, CalibrationInfo, GraphInfo, MethodsInfo, ModelInfo, RecoveredInfo, ReferenceInfo, SelectionInfo,
        SensitivityInfo, VerificationInfo,
    )
}  # fmt: skip


@cache
def hash_verifier() -> str:
    """SHA-256 of the independent verifier that belongs to this version, `verifier/verify_dossier.py`, as it is shipped."""
    return hash_file(find_shipped_folder("verifier") / "verify_dossier.py")


@dataclass(frozen=True, slots=True)
class DossierRequest:
    model: str
    artifact: str
    waivers: Mapping[str, str]
    """Reasons by criterion."""
    baseline: str | None
    baseline_artifact: str | None
    optpipe: str
    created_utc: str
    drawn_with: Mapping[str, str]
    """Versions of the packages that drew the report's figures; empty for a report without figures."""
    measurements: Mapping[str, int] = field(default_factory=dict)
    """Number of measurements in each bench run of the artifact, by the run's name, so that a deleted one is noticed."""
    removed: tuple[str, ...] = ()
    """Runs of the artifact that were removed from the workspace before."""
    baselines: int = 1
    """Baselines that the artifact was compared with: those approved since it was first measured, and the one before."""
    verifications: int = 1
    """Comparisons of the artifact's outputs with the source model's in the workspace."""
    candidates: Mapping[str, int] = field(default_factory=dict)
    """By each judged bench run and evaluation of the artifact: of how many builds it may have been chosen; empty in older dossiers."""
    other_file: tuple[str, ...] = ()
    """Bench runs of another file under the artifact's id, which are not in the dossier."""
    network: str | None = None
    """`describe_network` of the judged build; None if the store had no record of it, and in older dossiers."""
    baseline_network: str | None = None
    """`network` of the baseline's own request."""
    since: str | None = None
    """Bench runs that started earlier are in the dossier but not judged."""
    policy_utc: str | None = None
    """When a sign-off first used the policy in its workspace; None in older dossiers."""
    verifier: str = ""
    """`hash_verifier` of the version that wrote it."""
    previous: PreviousSignoff | None = None
    """The sign-off before; None if there was none, and in older dossiers."""
    schema_version: int = 1

    @property
    def is_of_other_network(self) -> bool:
        """Whether the baseline is of another network with the model's name."""
        return None not in (self.network, self.baseline_network) and (
            self.network != self.baseline_network
        )


@dataclass(frozen=True)
class Dossier:
    files: Files
    request: DossierRequest
    policy: Policy
    every_run: tuple[Run, ...]
    baseline_runs: tuple[Run, ...]
    builds: tuple[Entry[Any], ...]

    @property
    def folder(self) -> Path:
        return self.files.folder

    @cached_property
    def artifact(self) -> Entry[ArtifactInfo]:
        """Raises BadInputError if the artifact's record is missing."""
        name = f"{ArtifactInfo.KIND}-{self.request.artifact}"
        if (
            entry := next((build for build in self.builds if build.path.name == name), None)
        ) is None:
            raise BadInputError(
                f"{self.folder}: has no {BUILDS}/{name}/{MANIFEST}; the dossier is incomplete"
            )
        return entry

    @cached_property
    def build(self) -> JudgedBuild:
        return judged_build_from_entry(self.artifact, self.manifests)

    @cached_property
    def manifests(self) -> Mapping[str, Manifest]:
        return {build.id: build.manifest for build in self.builds}

    @cached_property
    def artifacts(self) -> tuple[Entry[ArtifactInfo], ...]:
        return tuple(build for build in self.builds if isinstance(build.info, ArtifactInfo))

    @cached_property
    def verification(self) -> Entry[VerificationInfo] | None:
        """The comparison of the judged artifact's outputs with the source model's.

        Of several, the worst of the artifact's file: one that failed, one without a result, the lowest SNR.
        """
        verifications = (build for build in self.builds if isinstance(build.info, VerificationInfo))
        about = [
            verification
            for verification in verifications
            if self.artifact.id in verification.manifest.parents
        ]
        engine = hash_engine(self.artifact)

        def rank(checked: Entry[VerificationInfo]) -> tuple[bool, int, float, str]:
            other_file = checked.recipe.get("artifact", {}).get("sha256") != engine
            snr_db = inf if checked.info.snr_db is None else checked.info.snr_db
            return other_file, (False, None, True).index(checked.info.passed), snr_db, checked.id

        return min(about, key=rank, default=None)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return split_runs(self.every_run, self.request.since, self.registered_utc)[0]

    @cached_property
    def earlier_runs(self) -> tuple[Run, ...]:
        """The runs that `--since` and a preregistered policy exclude."""
        return split_runs(self.every_run, self.request.since, self.registered_utc)[1]

    @property
    def registered_utc(self) -> str | None:
        """The time before which no evidence counts; None unless the policy is preregistered."""
        return (
            (self.request.policy_utc or self.request.created_utc)
            if self.policy.preregistered
            else None
        )


def read_dossier(files: Files) -> Dossier:
    """Raises BadInputError if a file is missing, damaged, or of another version."""
    return Dossier(
        files=files,
        request=read_versioned(files, REQUEST, DossierRequest),
        policy=policy_from_toml(files.read(POLICY), str(files.folder / POLICY)),
        every_run=runs_from_files(files, "runs"),
        baseline_runs=runs_from_files(files, "baseline/runs"),
        builds=tuple(
            entry_from_files(
                files.below(f"{BUILDS}/{path.name}"), BUILD_KINDS.get(path.name.rsplit("-", 1)[0])
            )
            for path in sorted((files.folder / BUILDS).glob("*/"))
        ),
    )


def since_from_text(text: str) -> str:
    """Reads `--since` as a time in UTC. Raises BadInputError for text that is not a time, and for a time in the future."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadInputError(
            "expected a date or time in UTC, such as 2026-11-21 or 2026-11-21T07:25",
            argument=Argument("since", escape(text)),
        ) from error
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    if moment > datetime.now(UTC):
        raise BadInputError(
            "is in the future; nothing was measured since then",
            argument=Argument("since", escape(text)),
        )
    return moment.isoformat(timespec="milliseconds")


def split_runs(
    runs: Sequence[Run], since: str | None, registered_utc: str | None = None
) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Splits off the bench runs that started before `since`, and all runs before `registered_utc`.

    Raises BadInputError for an invalid time.
    """
    judged: list[Run] = []
    earlier: list[Run] = []
    for run in runs:
        started, first = (
            run.manifest.started_utc,
            [registered_utc, since if run.kind == "bench" else None],
        )
        try:
            begun = datetime.fromisoformat(started)
            counts = all(bound is None or begun >= datetime.fromisoformat(bound) for bound in first)
        except (ValueError, TypeError) as error:
            raise BadInputError(
                f"a run started {escape(started)}, to be judged since {escape(str(first))}"
            ) from error
        (judged if counts else earlier).append(run)
    return tuple(judged), tuple(earlier)


def finish_dossier(folder: Path, target: Path, key: Path | None = None) -> Path:
    """Seals `folder`, signs it with `key`, and moves it to `target` in one step."""
    seal_folder(folder)
    if key is not None:
        sign_folder(folder, key)
    move_folder(folder, target)
    return target
