"""What belongs to a dossier in the workspace that built it."""

import shutil

import pytest
from tests.fakes.entries import artifact_info

from optpipe.build.verify import VerificationInfo
from optpipe.core.entries import ModelInfo, ReferenceInfo
from optpipe.core.events import SilentListener
from optpipe.core.weights import WeightsRecord
from optpipe.deploy.signed_build import _find_samples
from optpipe.errors import BadInputError
from optpipe.workspace.file_names import BUILDS, REFERENCE
from optpipe.workspace.store import Store


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


def test_the_samples_are_those_of_the_dossiers_verification(store, model, tmp_path):
    signed = reference(store, model, 800)
    artifact = produced(store, artifact_info(), {}, (model.id,))
    info = VerificationInfo("source model", 800, 0.1, 61.2, None, None, None, (), 80, True)
    checked = produced(store, info, {"reference": signed.id}, (artifact.id, signed.id))
    later = reference(store, model, 8)
    assert _find_samples(tmp_path, store, artifact, model) == later  # an old dossier may name none
    shutil.copytree(checked.path, tmp_path / BUILDS / checked.path.name)
    assert _find_samples(tmp_path, store, artifact, model) == signed
    shutil.rmtree(signed.path)
    with pytest.raises(BadInputError, match=r"reference outputs of m are not in .*; build it again: \S+"):
        _find_samples(tmp_path, store, artifact, model)
