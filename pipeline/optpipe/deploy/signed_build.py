"""The build that a dossier signs off, with all parts of a deployment, each checked against the dossier's hashes.

A dossier holds hashes and measurements; the engine, the pipeline, and the reference are in the workspace that built them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optpipe.backends.registry import verify_for_loading
from optpipe.backends.selections import read_verified_selection
from optpipe.core.card import ModelCard, Task
from optpipe.core.entries import (
    ArtifactInfo,
    Environment,
    ModelInfo,
    ReferenceInfo,
    VerificationInfo,
)
from optpipe.core.errors import BadInputError
from optpipe.core.files import hash_file
from optpipe.core.parquet import read_parquet
from optpipe.core.records import record_from_files
from optpipe.core.wording import Argument, Call, for_workspace
from optpipe.deploy.records import DossierReference
from optpipe.evaluate.tasks import find_task
from optpipe.measure.groups import RecordedMeasurement
from optpipe.models.artifacts.engine_files import hash_engine
from optpipe.models.artifacts.judged_build import JudgedBuild
from optpipe.models.inputs.image_set import ImageSet
from optpipe.models.stored_card import read_stored_card
from optpipe.preprocess.dali_pipeline import PreprocessingInfo
from optpipe.preprocess.proof import PreprocessRecord, is_proof_for
from optpipe.signoff.dossier import Dossier
from optpipe.signoff.policy import Policy
from optpipe.signoff.verify import require_pass, verify_dossier
from optpipe.stats.selected_rows import Selection
from optpipe.workspace.entry import Entry, Run, entry_from_folder
from optpipe.workspace.file_names import CARD, PREDICTIONS, PREPROCESSING, REFERENCE
from optpipe.workspace.runs import newest_runs
from optpipe.workspace.seal import SUMS
from optpipe.workspace.store import Store

DALI = "nvidia-dali-cuda130"
REQUEST_IMAGES = 32
REQUEST_ROWS = 32


@dataclass(frozen=True, slots=True)
class SignedBuild:
    """A verified dossier and the stored files that it signs off."""

    folder: Path
    reference: DossierReference
    policy: Policy
    artifact: Entry[ArtifactInfo]
    card: ModelCard
    verification: Entry[VerificationInfo] | None
    samples: Entry[ReferenceInfo]
    selection: Selection
    """The outputs whose rows the exported graph selects, and which are compared as sets."""
    preprocessing: Entry[PreprocessingInfo] | None
    measured: tuple[RecordedMeasurement, ...]
    """Measurements of the artifact with the policy's options."""
    runs: tuple[Run, ...]

    @property
    def place(self) -> Environment:
        """The machine of the dossier's measurements; that of the build if there are none."""
        return (
            self.measured[-1].environment if self.measured else self.artifact.manifest.environment
        )


def open_signed_build(folder: Path, store: Store, because: str | None) -> SignedBuild:
    """Verifies the dossier and finds its files in the workspace.

    Raises BadInputError if the dossier fails verification or a file is missing, GateError for anything except an unqualified PASS
    without `because`.
    """
    dossier, verdict, evidence = verify_dossier(folder).require_intact()
    require_pass(folder, verdict, because, "deploy it")
    waived = tuple(criterion.name for criterion in verdict.waived)
    artifact = find_signed_entry(dossier, store)
    model = store.find(artifact.manifest.parents[0], ModelInfo)
    card = read_stored_card(store.verify_entry(model, CARD))
    digest = dossier.files.hash(SUMS)
    return SignedBuild(
        folder=folder,
        reference=DossierReference(verdict.dossier_name, digest, verdict.verdict, waived, because),
        policy=dossier.policy,
        artifact=artifact,
        card=card,
        verification=dossier.verification,
        samples=_find_samples(dossier.verification, store, model),
        selection=read_verified_selection(
            [] if dossier.verification is None else [dossier.verification.info], model, store
        ),
        preprocessing=_find_preprocessing(dossier.runs, dossier.build, card, store),
        measured=evidence.measured,
        runs=dossier.runs,
    )


def find_signed_entry(dossier: Dossier, store: Store) -> Entry[ArtifactInfo]:
    """Finds the artifact in the workspace; its bytes must be those of the dossier's manifest."""
    signed, artifact = dossier.artifact, dossier.request.artifact
    path = store.root / f"{ArtifactInfo.KIND}-{artifact}"
    if not path.is_dir():
        problem = f"artifact {artifact} of the dossier is not in {store.workspace}"
        command = for_workspace(signed.manifest.command)
        raise BadInputError(
            f"{problem}; pass " + Argument("workspace", "DIR") + f", or build it again: `{command}`"
        )
    entry = verify_for_loading(entry_from_folder(path, ArtifactInfo), store)
    if hash_engine(entry) != hash_engine(signed):
        problem = f"artifact {artifact} in {store.workspace} is not the one that was signed off: its engine has another sha256"
        raise BadInputError(
            f"{problem}; sign off this build, or pass the "
            + Argument("workspace")
            + " that the dossier was made in"
        )
    return entry


def _find_samples(
    verification: Entry[VerificationInfo] | None, store: Store, model: Entry[ModelInfo]
) -> Entry[ReferenceInfo]:
    """The reference of the dossier's verification; the model's newest one if it names none."""
    references = [
        entry for entry in store.list_entries(ReferenceInfo) if model.id in entry.manifest.parents
    ]
    way_out = "build it again"
    if verification is not None and (own := verification.recipe.get("reference")) is not None:
        references = [entry for entry in references if entry.id == own]
        way_out = f"build it again: `{for_workspace(verification.manifest.command)}`"
    if not references:
        raise BadInputError(
            f"the reference outputs of {model.info.name} are not in {store.workspace}; {way_out}"
        )
    return store.verify_entry(references[-1], REFERENCE)


def _find_preprocessing(
    runs: Sequence[Run], build: JudgedBuild, card: ModelCard, store: Store
) -> Entry[PreprocessingInfo] | None:
    """The DALI pipeline that the dossier proves for the artifact's model and the card's steps; None without a proof."""
    for run in newest_runs(runs, "preprocess"):
        record = record_from_files(run.files, PREPROCESSING, PreprocessRecord)
        proven = record.pipeline
        if not is_proof_for(record, build) or proven.transform != card.transform:
            continue
        entry = store.verify_entry(store.find(proven.id, PreprocessingInfo), runs_code=True)
        if entry.sha256(entry.info.file) != proven.sha256:
            raise BadInputError(
                f"the DALI pipeline {proven.id} in {store.workspace} is not the one that was proven"
            )
        return entry
    return None


ENGINE_ALONE = "deploy the engine alone with " + Argument("ensemble", False)


def require_preprocessing(build: SignedBuild, *, served: bool) -> None:
    """Raises BadInputError if the preprocessing of an image model is not proven, or is to be `served` without images."""
    if build.card.transform is not None and build.preprocessing is None:
        preprocess = Call("preprocess", build.card.name, images="DIR")
        way = "run `" + preprocess + "` and sign off again, or " + ENGINE_ALONE
        raise BadInputError(f"{build.folder} has no evidence of the preprocessing; " + way)
    if served and build.preprocessing is not None and not list_signed_images(build):
        problem = f"no image of an evaluation in {build.folder} is here"
        way = "put the model card's validation set back, or " + ENGINE_ALONE
        raise BadInputError(
            f"{problem}, so an ensemble could be neither warmed up nor proven; " + way
        )


def list_signed_images(build: SignedBuild) -> dict[str, tuple[Path, int | None]]:
    """Unchanged images of the evaluation on this machine, by a new name, with their signed-off predictions."""
    source, classifies = build.card.data.get("validation"), build.card.task is Task.CLASSIFICATION
    if source is None or not Path(source).exists():
        return {}
    root = Path(source) if Path(source).is_dir() else ImageSet.from_manifest(Path(source)).root
    for run in newest_runs(build.runs, "evaluate"):
        table = read_parquet(run.files, PREDICTIONS)
        column = f"{build.artifact.id}:{find_task(build.card).prediction_column}"
        if column in table.columns:
            best = table[column].list.first().to_list() if classifies else [None] * len(table)
            rows = list(zip(table["path"].to_list(), table["sha256"].to_list(), best, strict=True))
            count, images = min(len(rows), REQUEST_IMAGES), {}
            for at in range(count):
                name, sha256, prediction = rows[
                    at * len(rows) // count
                ]  # a set is often sorted by class
                path = root / name
                leads_out = Path(name).is_absolute() or ".." in Path(name).parts
                if not leads_out and path.is_file() and hash_file(path) == sha256:
                    images[f"{at:05}{path.suffix}"] = path, prediction
            return images
    return {}
