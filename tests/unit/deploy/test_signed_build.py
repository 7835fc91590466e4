"""What belongs to a dossier in the workspace that built it: its samples, and the DALI pipeline that it proves."""

import shutil
from dataclasses import replace

import pytest
from tests.fakes.entries import artifact_info
from tests.fakes.preprocess import preprocess_record

from optpipe.core.card import ModelCard, Task
from optpipe.core.entries import ModelInfo, ReferenceInfo, VerificationInfo, WeightsRecord
from optpipe.core.errors import BadInputError, GateError
from optpipe.core.events import SilentListener
from optpipe.core.transform import Decode, Pack, Rescale, Resize, Transform
from optpipe.deploy.signed_build import _find_preprocessing, _find_samples, open_signed_build
from optpipe.models.artifacts.facts import judged_build_from_entry
from optpipe.preprocess.artifact import PIPELINE, PreprocessingInfo
from optpipe.preprocess.dali_pipeline import DaliPlan
from optpipe.signoff.collect import SignoffRequest
from optpipe.signoff.policy import policy_from_toml
from optpipe.signoff.release import sign_off
from optpipe.workspace.file_names import REFERENCE
from optpipe.workspace.seal import SUMS
from optpipe.workspace.store import Store

PROVEN = Transform((Decode(), Resize((32, 32), "exact"), Rescale(), Pack()))
OTHER = Transform((Decode(), Resize((64, 64), "exact"), Rescale(), Pack()))


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "workspace")


def produced(store, info, recipe, parents=()):
    def make(folder):
        (folder / REFERENCE).write_bytes(b"outputs")
        return info

    return store.produce(type(info), recipe, make, parents=parents, listener=SilentListener())[0]


def reference(store, model, samples):
    info = ReferenceInfo("images", samples, "0" * 64, "source model", ())
    return produced(store, info, {"samples": samples}, (model.id,))


@pytest.fixture
def model(store):
    weights = WeightsRecord("file", "0" * 64)
    return produced(store, ModelInfo("m", "m", weights, simplified=False, own_precision=None), {})


def test_the_samples_are_those_of_the_dossiers_verification(store, model):
    signed = reference(store, model, 800)
    artifact = produced(store, artifact_info(), {}, (model.id,))
    info = VerificationInfo("source model", 800, 0.1, 61.2, None, None, None, (), 80, True)
    checked = produced(store, info, {"reference": signed.id}, (artifact.id, signed.id))
    later = reference(store, model, 8)
    assert _find_samples(None, store, model) == later  # a dossier may have none
    assert _find_samples(checked, store, model) == signed
    shutil.rmtree(signed.path)
    with pytest.raises(BadInputError, match=r"reference outputs of m are not in .*; build it again: \S+"):
        _find_samples(checked, store, model)


def pipeline_of(store):
    """A stored pipeline, and its record in a run."""

    def make(folder):
        (folder / "1").mkdir()
        (folder / PIPELINE).write_bytes(b"dali")
        return PreprocessingInfo("digits", PROVEN.hash, DaliPlan(), PIPELINE)

    entry, _ = store.produce(PreprocessingInfo, {"transform": PROVEN.hash}, make, listener=SilentListener())
    steps = tuple(PROVEN.to_dict()["steps"])
    return entry, replace(preprocess_record().pipeline, id=entry.id, sha256=entry.sha256(PIPELINE), steps=steps)


@pytest.mark.parametrize(
    ("transform", "changes", "found"),
    [
        (PROVEN, {}, True),
        (PROVEN, {"model_sha256": "0" * 64}, False),
        (PROVEN, {"model_sha256": None}, True),
        (OTHER, {"model_sha256": None}, False),
        (OTHER, {}, False),
    ],
    ids=["own", "another model's", "without a model", "without a model, of another card", "of another card"],
)
def test_the_pipeline_that_was_proven_on_the_signed_model_with_its_card_s_steps(workspace, transform, changes, found):
    artifact = workspace.artifact("fp16")
    entry, pipeline = pipeline_of(workspace.store)
    run = workspace.preprocess(pipeline=pipeline, **changes)
    card = ModelCard("digits", "card:digits", Task.CLASSIFICATION, (), transform=transform)
    assert _find_preprocessing([run], judged_build_from_entry(artifact), card, workspace.store) == (
        entry if found else None
    )


def test_only_a_dossier_that_is_intact_and_passes_is_opened(workspace, tmp_path):
    workspace.artifact("fp16")
    wanted = SignoffRequest("digits", policy_from_toml(b"schema = 1\n[size]\nmaximum = '1 MiB'\n"))
    folder = sign_off(wanted, workspace.store, tmp_path / "dossier", None, SilentListener(), figures=False).folder
    with pytest.raises(GateError, match=r"not an unqualified PASS \(INCONCLUSIVE\); pass --because TEXT"):
        open_signed_build(folder, workspace.store, None)
    (folder / SUMS).write_text("changed")
    with pytest.raises(BadInputError, match="failed verification"):
        open_signed_build(folder, workspace.store, "a trial")
