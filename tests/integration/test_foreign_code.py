"""A compiled package of somebody else: its code runs only after it was approved."""

import json
import shutil
import subprocess
import zipfile

import numpy as np
import pytest

import optpipe as op
from optpipe.core.errors import OptpipeError
from optpipe.core.files import hash_file
from tests.integration.conftest import optpipe
from tests.integration.test_users_folder import LAYERS, NET

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
PLANTED = """
#include <fstream>
__attribute__((constructor)) static void run() {{ std::ofstream("{marker}") << "ran"; }}
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """A user's folder with a network, and a foreign workspace with a package of it that leaves a file when it is loaded."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "net.py").write_text(NET.replace("from layers import Small\n", LAYERS))
    words = ("--precision", "fp32", "--backend", "inductor", "--device", "cpu")
    theirs = folder / "theirs"
    optpipe("build", "net.py:make", *words, cwd=folder, workspace=theirs).expect(0)
    (manifest,) = (theirs / "store").glob("artifact-*/manifest.json")
    marker = folder / "marker"
    source, library = folder / "planted.cpp", folder / "planted.so"
    source.write_text(PLANTED.format(marker=marker))
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
    plant_library(manifest.parent / "model.pt2", library)
    document = json.loads(manifest.read_text())
    for name in document["files"]:
        path = manifest.parent / name
        document["files"][name] = {"sha256": hash_file(path), "size_bytes": path.stat().st_size}
    manifest.write_text(json.dumps(document))
    return folder, theirs, marker


def plant_library(package, library):
    with zipfile.ZipFile(package) as before:
        content = {each.filename: before.read(each) for each in before.infolist()}
    names = [name for name in content if name.endswith(".so")]
    assert names
    with zipfile.ZipFile(package, "w") as after:
        for name, value in content.items():
            after.writestr(name, library.read_bytes() if name in names else value)


def rename_file(store, name):
    """As an attacker who wants the package to be taken for a graph: the manifest names a file that exists and is data."""
    (manifest,) = store.glob("artifact-*/manifest.json")
    document = json.loads(manifest.read_text())
    (manifest.parent / name).write_bytes(b"a graph")
    hashed = {"sha256": hash_file(manifest.parent / name), "size_bytes": 7}
    document["files"][name], document["info"]["file"] = hashed, name
    manifest.write_text(json.dumps(document))


@pytest.mark.parametrize("way", ["merge", "merge, renamed", "copy", "copy, renamed"])
def test_foreign_code_does_not_run(user, tmp_path, way):
    folder, original, marker = user
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    shutil.copytree(original, theirs)
    if way.endswith("renamed"):
        rename_file(theirs / "store", "model.onnx")
    if way.startswith("merge"):
        optpipe("store", "merge", theirs, workspace=mine).expect(0)
    else:
        shutil.copytree(theirs / "store", mine / "store")
    bench = ("bench", "net.py:make", "--processes", "1", "--min-time", "0.1")
    for words in (
        ("evaluate", "net.py:make"),
        bench,
        ("evaluate", "net.py:make", "--layers", "all"),
    ):
        ran = optpipe(*words, cwd=folder, workspace=mine)
        assert ran.status in (2, 4), ran.stdout + ran.stderr
        assert "Traceback" not in ran.stderr
        assert not marker.exists(), words
    (artifact,) = (mine / "store").glob("artifact-*")
    with pytest.raises(OptpipeError):
        op.Workspace(mine).builds(artifact.name)["fp32"](np.zeros((1, 4), np.float32))
    assert not marker.exists(), "the library"
    if not way.endswith("renamed"):  # the attack is real: what was approved runs
        optpipe("store", "approve", artifact.name, workspace=mine).expect(0)
        optpipe(*bench, cwd=folder, workspace=mine)
        assert marker.exists()
        marker.unlink()
