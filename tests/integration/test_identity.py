"""A model's identity is its content: no command takes the build of a namesake or of an earlier source, and a folder can be moved."""

import json
import shutil

import numpy as np
import pytest

from tests.integration.conftest import optpipe

NET = """
import torch

INPUTS = [{{"name": "x", "dtype": "float32", "min": [1, 4], "opt": [2, 4], "max": [8, 4]}}]

def make():
    torch.manual_seed({seed})
    return torch.nn.Linear(4, 3)
"""
CARD = """
name = "three"
task = "classification"
source = "net.py:make"
weights = "default"
labels = ["a", "b", "c"]
inputs = [{name = "x", dtype = "float32", min = [1, 4], opt = [2, 4], max = [8, 4]}]
"""
BUILD = ("--precision", "fp32", "--backend", "onnxruntime")
BENCH = ("--batch", "1", "--processes", "1", "--min-time", "0.05")
POLICY = "schema = 1\n[size]\nmaximum = '1 MiB'\n"


@pytest.fixture
def folders(tmp_path):
    """`x`, `y`, and their workspace, which has builds of `y` alone."""
    for seed, name in enumerate("xy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "net.py").write_text(NET.format(seed=seed))
        (tmp_path / name / "three.toml").write_text(CARD)
    labels = np.arange(24) % 3
    np.savez(tmp_path / "data.npz", x=np.eye(4, dtype=np.float32)[labels], labels=labels)
    (tmp_path / "policy.toml").write_text(POLICY)
    build(tmp_path / "y", "net.py:make")
    return tmp_path / "x", tmp_path / "y"


def run(folder, *words):
    return optpipe(*words, "--json", cwd=folder, workspace=folder.parent / "workspace")


def build(folder, model):
    (made,) = run(folder, "build", model, *BUILD).expect(0).document["artifacts"]
    return made["id"]


def test_no_command_takes_the_build_of_another_folder(folders) -> None:
    mine, theirs = folders
    stored = build(theirs, "net.py:make")
    sign_off = ("--policy", "../policy.toml", "--no-measure")
    for words in (("bench", "net.py:make", *BENCH), ("signoff", "net.py:make", *sign_off)):
        refused = run(mine, *words).expect(2)
        assert stored in refused.stderr
        assert "its source is not that of its builds" in refused.stderr
    profiled = ("profile", "net.py:make", "--stage", "inference", *BUILD)
    record = run(mine, *profiled).expect(0).document
    (subject,) = {each["subject"]["artifact"] for each in record["stages"]}
    assert subject != stored, "it builds its own"
    build(theirs, "three.toml")
    refused = run(mine, "evaluate", "three.toml", "--data", "../data.npz").expect(2)
    assert "build" in refused.stderr
    own = build(mine, "three.toml")
    scores = run(mine, "evaluate", "three.toml", "--data", "../data.npz").expect(0)
    assert own in scores.stdout


def test_a_changed_source_is_said_by_every_command_that_takes_a_stored_build(folders) -> None:
    _, folder = folders
    stored = build(folder, "net.py:make")
    (folder / "net.py").write_text(NET.format(seed=7))
    said = f"is not what {stored} was built from"
    for name in ("net.make", "net.py:make"):
        assert stored in run(folder, "bench", name, *BENCH).expect(2).stderr
    signed = run(folder, "signoff", "net.make", "--policy", "../policy.toml", "--no-measure")
    assert stored in signed.expect(2).stderr
    measured = run(folder, "bench", stored, *BENCH)
    assert said in " ".join(measured.stderr.split())
    words = ("--artifact", stored, "--policy", "../policy.toml", "--no-measure")
    signed = run(folder, "signoff", "net.make", *words, "--output", "dossier")
    assert any(said in each for each in signed.document["warnings"])
    served = ("dossier", "--to", "folder", "--output", "served", "--because", "a test")
    deployed = run(folder, "deploy", *served).expect(0)
    assert any(said in each for each in deployed.document["warnings"])
    (manifest,) = (folder / "served").rglob("manifest.json")
    assert json.loads(manifest.read_text())["id"] == stored


def test_a_workspace_and_its_folder_can_be_moved_together(tmp_path) -> None:
    first, second = tmp_path / "first", tmp_path / "elsewhere" / "second"
    first.mkdir()
    (first / "net.py").write_text(NET.format(seed=0))
    data = 'data = {calibration = "train.npz", validation = "held.npz"}'
    (first / "three.toml").write_text(CARD + data)
    labels = np.arange(240) % 3
    for seed, name in enumerate(("train", "held")):
        noise = np.random.default_rng(seed).normal(0, 0.1, (240, 4))
        rows = (np.eye(4)[labels] + noise).astype(np.float32)
        np.savez(first / f"{name}.npz", x=rows, labels=labels)
    (first / "policy.toml").write_text(POLICY)
    build_both = ("--precision", "fp32,int8", "--backend", "onnxruntime")

    def build_all(folder):
        models = (
            ("three.toml",),
            ("net.py:make", "--calibration", "train.npz"),
            (f"{folder}/net.py:make", "--calibration", f"{folder}/train.npz"),
        )
        made = []
        for words in models:
            ran = optpipe("build", *words, *build_both, "--json", cwd=folder).expect(0)
            made += [each["id"] for each in ran.document["artifacts"]]
        return made

    builds = build_all(first)
    entries = sorted(path.name for path in (first / ".optpipe" / "store").iterdir())
    assert len(set(builds)) == 4, "a path that is typed otherwise is the same model"
    second.parent.mkdir()
    shutil.move(first, second)
    assert build_all(second) == builds
    scored = optpipe("evaluate", "three", "--json", cwd=second).expect(0)
    assert scored.document["dataset"]["name"] == "held.npz"
    assert sorted(path.name for path in (second / ".optpipe" / "store").iterdir()) == entries
    (second / "net.py").write_text(NET.format(seed=1))
    refused = optpipe("bench", "three", *BENCH, cwd=second).expect(2)
    assert "its source is not that of its builds" in refused.stderr


def test_a_copy_of_a_card_reads_the_data_beside_it(folders) -> None:
    mine, theirs = folders
    for folder, count in ((mine, 12), (theirs, 24)):
        (folder / "net.py").write_text(NET.format(seed=0))
        (folder / "three.toml").write_text(CARD + 'data = {validation = "held.npz"}')
        labels = np.arange(count) % 3
        np.savez(folder / "held.npz", x=np.eye(4, dtype=np.float32)[labels], labels=labels)
    assert build(mine, "three.toml") == build(theirs, "three.toml")
    for folder, count in ((mine, 12), (theirs, 24)):
        scored = run(folder, "evaluate", "three.toml").expect(0).document
        assert scored["dataset"]["count"] == count


def test_every_command_that_takes_a_model_takes_an_id(folders) -> None:
    folder, _ = folders
    shape = ("--batch", "1:2:6")  # an ID also means the profile
    labels = np.arange(240) % 3
    rows = np.eye(4)[labels] + np.random.default_rng(0).normal(0, 0.1, (240, 4))
    np.savez(folder / "train.npz", x=rows.astype(np.float32))
    (made,) = run(folder, "build", "three.toml", *BUILD, *shape).expect(0).document["artifacts"]
    stored = made["id"]
    run(folder, "bench", stored, *BENCH)
    assert run(folder, "compare", stored).expect(0).document["rows"]
    (again,) = run(folder, "build", stored, *BUILD).expect(0).document["artifacts"]
    assert again["id"] == stored
    refused = run(folder, "build", stored, *BUILD, "--weights", "random").expect(2)
    assert "whose weights and profile are fixed" in refused.stderr
    run(folder, "calibrate", stored, "--data", "train.npz", "--method", "max").expect(0)
    scored = run(folder, "evaluate", stored, "--data", "../data.npz").expect(0).document
    assert {each["artifact"] for each in scored["results"]} <= {stored, None}
    profiled = run(folder, "profile", stored).expect(0).document
    assert {each["subject"]["artifact"] for each in profiled["stages"]} == {stored}
    policy = ("--policy", "../policy.toml")
    signed = run(folder, "signoff", stored, *policy, "--no-measure")
    assert signed.document["artifact"]["id"] == stored
    assert "optpipe signoff" in run(folder, "run", stored, *policy).expect(2).stderr
    assert "profile" in run(folder, "sweep", stored).expect(2).stderr

    (folder / "net.py").write_text(NET.format(seed=7))
    ran = run(folder, "calibrate", stored, "--data", "train.npz", "--method", "max").expect(0)
    assert "the stored build is used" in " ".join(ran.stderr.split())
    refused = run(folder, "evaluate", stored, "--data", "../data.npz").expect(2)
    assert "is not what model" in refused.stderr
    assert "is not what" in run(folder, "sweep", stored).expect(2).stderr
    for name in (("three",), ("three.toml",), ("--model", "three")):
        assert stored in run(folder, "compare", *name).expect(2).stderr, name


def test_compare_takes_no_namesake(folders) -> None:
    mine, theirs = folders
    builds = [build(folder, "three.toml") for folder in (mine, theirs)]
    run(mine, "bench", builds[0], *BENCH)
    assert run(mine, "compare", "three").expect(0).document["rows"], "one of them was measured"
    run(mine, "bench", builds[1], *BENCH)
    refused = run(mine, "compare", "three").expect(2)
    assert "2 models" in refused.stderr
    for folder, one in zip((mine, theirs), builds, strict=True):
        rows = run(folder, "compare", "three.toml").expect(0).document["rows"]
        assert {each["artifact"] for each in rows} == {one}


def test_builds_of_another_version_are_named(folders) -> None:
    _, folder = folders
    (manifest,) = (folder.parent / "workspace" / "store").glob("artifact-*/manifest.json")
    record = json.loads(manifest.read_text())
    record["info"]["unknown_field"] = record["info"].pop("precision_proof")
    manifest.write_text(json.dumps(record))
    for words in (("signoff", "net.make", "--policy", "../policy.toml"), ("bench", "net.make")):
        refused = run(folder, *words).expect(2)
        said = " ".join(refused.stderr.split())
        assert "1 build of another version of optpipe cannot be read: net.make" in said
        assert "optpipe build" in said
