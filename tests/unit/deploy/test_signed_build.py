"""What a dossier gives a deployment: the signed build and its samples, the passport; no file is read twice."""

import ctypes
import os
import shutil
import struct
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.fakes.entries import artifact_info, put, put_verified
from tests.fakes.preprocess import preprocess_record

import optpipe as op
from optpipe.backends.registry import BACKENDS
from optpipe.core.card import ModelCard, Task
from optpipe.core.entries import ArtifactInfo, Environment, Gpu, ModelInfo, WeightsRecord
from optpipe.core.errors import BadInputError, GateError, OptpipeError
from optpipe.core.events import SilentListener
from optpipe.core.transform import Decode, Pack, Rescale, Resize, Transform
from optpipe.deploy.check import find_differences
from optpipe.deploy.signed_build import (
    _find_preprocessing,
    _find_samples,
    find_signed_entry,
    open_signed_build,
)
from optpipe.models.artifacts.judged_build import judged_build_from_entry
from optpipe.preprocess.dali_pipeline import PIPELINE, DaliPlan, PreprocessingInfo
from optpipe.signoff.verify import verify_dossier
from optpipe.sweep.ledger import merge_workspaces
from optpipe.workspace.file_names import REFERENCE
from optpipe.workspace.seal import SUMS, store_baseline
from optpipe.workspace.store import Store

PROVEN = Transform((Decode(), Resize((32, 32), "exact"), Rescale(), Pack()))
OTHER = Transform((Decode(), Resize((64, 64), "exact"), Rescale(), Pack()))


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "workspace")


@pytest.fixture
def model(store):
    weights = WeightsRecord("file", "0" * 64)
    return put(store, ModelInfo("m", "m", weights, simplified=False, own_precision=None), {})


def test_the_samples_are_those_of_the_dossiers_verification(store, model):
    artifact = put(store, artifact_info(), {}, (model,))
    signed, checked = put_verified(store, model, artifact, 800, {REFERENCE: b"outputs"})
    later, _ = put_verified(store, model, artifact, 8, {REFERENCE: b"outputs"})
    assert _find_samples(None, store, model) == later  # a dossier may have none
    assert _find_samples(checked, store, model) == signed
    shutil.rmtree(signed.path)
    with pytest.raises(
        BadInputError, match=r"reference outputs of m are not in .*; build it again: \S+"
    ):
        _find_samples(checked, store, model)


def pipeline_of(store):
    """A stored pipeline, and its record in a run."""
    info = PreprocessingInfo("digits", PROVEN.hash, DaliPlan(), PIPELINE)
    entry = put(store, info, {"transform": PROVEN.hash}, files={PIPELINE: b"dali"})
    steps = tuple(PROVEN.to_dict()["steps"])
    return entry, replace(
        preprocess_record().pipeline, id=entry.id, sha256=entry.sha256(PIPELINE), steps=steps
    )


@pytest.mark.parametrize(
    ("transform", "changes", "found"),
    [
        (PROVEN, {}, True),
        (PROVEN, {"model_sha256": "0" * 64}, False),
        (PROVEN, {"model_sha256": None}, True),
        (OTHER, {"model_sha256": None}, False),
        (OTHER, {}, False),
    ],
    ids=[
        "own",
        "another model's",
        "without a model",
        "without a model, of another card",
        "of another card",
    ],
)
def test_the_pipeline_that_was_proven_on_the_signed_model_with_its_card_s_steps(
    workspace, transform, changes, found
):
    artifact = workspace.artifact("fp16")
    entry, pipeline = pipeline_of(workspace.store)
    run = workspace.preprocess(pipeline=pipeline, **changes)
    card = ModelCard("digits", "card:digits", Task.CLASSIFICATION, (), transform=transform)
    taken = _find_preprocessing([run], judged_build_from_entry(artifact), card, workspace.store)
    assert taken == (entry if found else None)


def test_only_a_dossier_that_is_intact_and_passes_is_opened(workspace, tmp_path):
    workspace.artifact("fp16")
    folder = workspace.release(b"schema = 1\n[size]\nmaximum = '1 MiB'\n", tmp_path / "dossier")
    with pytest.raises(
        GateError, match=r"not an unqualified PASS \(INCONCLUSIVE\); pass --because TEXT"
    ):
        open_signed_build(folder, workspace.store, None)
    (folder / SUMS).write_text("changed")
    with pytest.raises(BadInputError, match="failed verification"):
        open_signed_build(folder, workspace.store, "a trial")


@pytest.mark.parametrize("way", ["merge", "copy"])
def test_the_build_of_a_dossier_is_foreign_where_it_was_not_built(
    workspace, tmp_path, monkeypatch, way
):
    """As of a backend whose files run code: neither `deploy` nor `op.load` takes it before it is approved."""
    artifact = workspace.artifact("fp16")
    folder = workspace.release(b"schema = 1\n[size]\nmaximum = '1 MiB'\n", tmp_path / "dossier")
    mine = Store(tmp_path / "mine")
    if way == "merge":
        merge_workspaces([workspace.path], mine, SilentListener())
    else:
        shutil.copytree(workspace.store.root, mine.root)
    monkeypatch.setattr(BACKENDS["onnxruntime"], "loading_runs_code", True)
    for take in (
        lambda: open_signed_build(folder, mine, "a trial"),
        lambda: op.load(folder, workspace=op.Workspace(mine.workspace)),
    ):
        with pytest.raises(OptpipeError, match="was not built in"):
            take()
    foreign = mine.find(artifact.id, ArtifactInfo)
    mine.approve(foreign)
    assert find_signed_entry(verify_dossier(folder).content, mine) == foreign


IN_OPEN, IN_ISDIR = 0x20, 0x40000000
POLICY = b"schema = 1\n[[latency]]\np50 = '50 ms'\nbatch_size = 1\n[preprocessing]\nminimum_agreement = '50 %'\n"


@contextmanager
def count_opens(folder):
    """How often the kernel opened each file below `folder`, for whichever library."""
    library, opened = ctypes.CDLL(None), Counter()
    descriptor = library.inotify_init1(os.O_NONBLOCK)
    places = {
        library.inotify_add_watch(descriptor, os.fsencode(path), IN_OPEN): path
        for path in (folder, *folder.rglob("*"))
        if path.is_dir()
    }
    try:
        yield opened
        content, at = os.read(descriptor, 1 << 20), 0
        while at < len(content):
            place, mask, _, length = struct.unpack_from("iIII", content, at)
            name = content[at + 16 : at + 16 + length].rstrip(b"\0").decode()
            opened[(places[place] / name).relative_to(folder).as_posix()] += not mask & IN_ISDIR
            at += 16 + length
    finally:
        os.close(descriptor)


@pytest.fixture
def folder(workspace, tmp_path):
    entry = workspace.artifact("fp16")
    workspace.bench(entry)
    workspace.preprocess()
    return workspace.release(POLICY, tmp_path / "dossier")


def test_no_file_of_a_dossier_is_opened_twice(workspace, folder, monkeypatch):
    for name in (
        "read_stored_card",
        "_find_samples",
        "_find_preprocessing",
    ):  # of the workspace, which is not looked at here
        monkeypatch.setattr(f"optpipe.deploy.signed_build.{name}", lambda *_: None)
    monkeypatch.setattr(type(workspace.store), "verify_entry", lambda _, entry, *__, **___: entry)
    with count_opens(folder) as opened:
        assert open_signed_build(folder, workspace.store, None).measured
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {name: count for name, count in opened.items() if count > 1} == {}
    assert files <= set(opened)


def test_what_is_approved_is_what_was_verified(tmp_path, folder):
    verified = verify_dossier(folder)
    with count_opens(folder) as opened:
        target = store_baseline(verified.files, tmp_path / "w")
    assert +opened == Counter()
    assert verify_dossier(target).problems == ()


H200 = Gpu(0, "NVIDIA H200", "9.0", 1 << 37, "580.1")
PLACE = Environment(
    cpu="a CPU", gpus=(H200,), packages={"onnxruntime-gpu": "1.31.1", "numpy": "2.4"}
)


def evidence(**changes):
    place = replace(PLACE, packages={"onnxruntime-gpu": "1.31.1"}, **changes)
    return SimpleNamespace(environment=place, device="cuda" if place.gpus else "cpu")


def test_the_same_machine_has_no_differences_and_other_packages_do_not_matter():
    other = replace(
        PLACE, packages={"onnxruntime-gpu": "1.31.1", "numpy": "2.5"}, cpu="another CPU"
    )
    assert list(find_differences(evidence(), PLACE)) == []
    assert list(find_differences(evidence(), other)) == [], "on a GPU the CPU does not decide"


def test_each_difference_is_one_line():
    a100 = replace(H200, name="NVIDIA A100", compute_capability="8.0", driver="570.2")
    for here, named, known in (
        (
            replace(PLACE, gpus=(a100,), packages={}),
            ["gpu", "driver", "onnxruntime-gpu"],
            evidence(),
        ),
        (replace(PLACE, gpus=()), ["gpu", "driver"], evidence()),
        (PLACE, ["cpu"], evidence(gpus=(), cpu="another CPU")),
    ):
        assert [each.partition(":")[0] for each in find_differences(known, here)] == named
