"""Every command in a world that is not as it should be: weights that are NaN, a workspace that is read-only or full, a source
that changed after the build, two models of one name. Each ends with its status in two lines, and leaves nothing half-written.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from optpipe.workspace.runs import list_runs
from optpipe.workspace.store import Store
from tests.fakes.graphs import onnx_model
from tests.fakes.small_disk import fill_disk, mount_small_disk
from tests.integration.conftest import optpipe

CARD = """
name = "three"
task = "classification"
source = "net.onnx"
labels = ["a", "b", "c"]
inputs = [{name = "x", dtype = "float32", min = [1, 4], opt = [2, 4], max = [8, 4]}]
"""
POLICY = "schema = 1\n[size]\nmaximum = '1 MiB'\n"
WHERE = ("--backend", "onnxruntime", "--device", "cpu")
QUICK = ("--batch", "1", "--processes", "1", "--min-time", "0.05", "--max-cv", "90%")
COMMANDS = {
    "build": ("build", "three.toml", "--precision", "fp32,int8", "--calibration", "data.npz", *WHERE),
    "calibrate": ("calibrate", "three.toml", "--data", "data.npz", "--method", "max"),
    "evaluate": ("evaluate", "three.toml", "--data", "data.npz"),
    "bench": ("bench", "three.toml", *QUICK),
    "profile": ("profile", "three.toml", "--stage", "inference", "--precision", "fp32", *WHERE),
    "compare": ("compare", "--model", "three"),
    "compare --output": ("compare", "--model", "three", "--output", "compared"),
    "signoff": (
        "signoff", "three.toml", "--policy", "policy.toml", "--no-measure", "--no-figures", "--output", "signed-again",
    ),
    "run": ("run", "three.toml", "--policy", "policy.toml", *WHERE, "--no-profile", "--output", "ran"),
    "deploy": ("deploy", "signed", "--to", "folder", "--because", "a test", "--output", "served"),
    "verify": ("verify", "signed"),
    "signoff recheck": ("signoff", "recheck", "signed", "--python", sys.executable, "--rounds", "8"),
    "sweep": ("sweep", "three.toml", "--precision", "fp32", "--backend", "onnxruntime", *QUICK),
    "store ls": ("store", "ls"),
    "store gc": ("store", "gc", "--yes"),
    "store merge": ("store", "merge", "other"),
}  # fmt: skip
READ_ONLY = ("compare", "compare --output", "verify", "store ls")
"""They write nothing into the workspace, so that no such state keeps them from their work."""
OF_STORED_BUILDS = ("evaluate", "bench", "signoff")
"""They take a build from the workspace, and must not take that of another source."""
DONE = (0, 5)
SLOWER = {"signoff recheck": (1,)}
"""Other work on the machine may make the second environment slower, although it is the same."""


@dataclass(frozen=True)
class World:
    folder: Path
    workspace: Path

    def run(self, inside, name: str):
        return inside(*COMMANDS[name], "--workspace", self.workspace, cwd=self.folder)


def write_network(path: Path, seed: int, value: float | None = None) -> None:
    weight = np.random.default_rng(seed).standard_normal((3, 4)).astype(np.float32)
    if value is not None:
        weight[1, 2] = value
    graph = onnx_model(
        [("Gemm", "x v", "y", {"transB": 1})], {"x": ["n", 4]}, {"y": ["n", 3]}, v=weight
    )
    onnx.save(graph, path)


def write_folder(folder: Path, seed: int, value: float | None = None) -> None:
    folder.mkdir()
    write_network(folder / "net.onnx", seed, value)
    (folder / "three.toml").write_text(CARD)
    (folder / "policy.toml").write_text(POLICY)
    labels = np.arange(24) % 3
    rows = np.random.default_rng(1).standard_normal((24, 4)).astype(np.float32)
    np.savez(folder / "data.npz", x=rows, labels=labels)


@pytest.fixture(autouse=True)
def short_recheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more rounds on a noisy machine, and short ones."""
    monkeypatch.setattr("optpipe.measure.pair.MAX_ROUND_FACTOR", 1)
    monkeypatch.setattr("optpipe.deploy.recheck.MIN_SECONDS", 0.05)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a network, its workspace `ws` with a build and a measurement, another workspace, and a dossier."""
    folder = tmp_path_factory.mktemp("made") / "work"
    write_folder(folder, 0)
    where: dict[str, Any] = {"cwd": folder, "workspace": folder / "ws"}
    optpipe("build", "three.toml", "--precision", "fp32", *WHERE, **where).expect(0)
    shutil.copytree(folder / "ws", folder / "other")
    optpipe(*COMMANDS["bench"], **where)
    words = ("--policy", "policy.toml", "--no-measure", "--no-figures", "--output", "signed")
    assert optpipe("signoff", "three.toml", *words, **where).status in DONE
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> World:
    folder = tmp_path / "work"
    shutil.copytree(made, folder)
    return World(folder, folder / "ws")


@pytest.fixture
def small(copy: World) -> Iterator[World]:
    """Its workspace lies on a disk of its own."""
    with mount_small_disk(copy.folder / "disk", 32) as disk:
        shutil.copytree(copy.workspace, disk / "ws")
        yield World(copy.folder, disk / "ws")


def require_two_lines(ran, name: str) -> None:
    if ran.status in (2, 3, 4):
        message = ran.stderr[ran.stderr.find("optpipe: ") :].strip()
        assert len(message.splitlines()) <= 2, f"{name}: {ran.stderr}"


def require_whole(workspace: Path) -> None:
    """No damaged entry, no half-written run, no scratch."""
    entries, damaged = Store(workspace).scan_entries()
    assert not damaged
    assert all(entry.find_damage() is None for entry in entries)
    assert all(run.find_problems() == [] for run in list_runs(workspace))
    assert not list((workspace / "tmp").glob("*"))


@pytest.mark.parametrize("name", COMMANDS)
def test_weights_that_are_nan_are_no_model(tmp_path: Path, inside, name: str) -> None:
    write_folder(tmp_path / "work", 0, float("nan"))
    world = World(tmp_path / "work", tmp_path / "work" / "ws")
    ran = world.run(inside, name)
    require_two_lines(ran, name)
    assert ran.status == (0 if name in ("store ls", "store gc") else 2), ran.stderr
    assert not list(world.workspace.glob("store/artifact-*"))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_workspace_that_is_read_only(small: World, inside, name: str) -> None:
    before = {path: path.stat().st_size for path in small.folder.rglob("*") if path.is_file()}
    subprocess.run(["mount", "-o", "remount,ro", str(small.workspace.parent)], check=True)
    ran = small.run(inside, name)
    require_two_lines(ran, name)
    if name in READ_ONLY:
        assert ran.status in DONE
    else:
        assert "is not writable" in ran.expect(2).stderr
    require_whole(small.workspace)
    assert all(path.stat().st_size == size for path, size in before.items())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_disk_that_is_full(small: World, inside, name: str) -> None:
    fill_disk(small.workspace.parent)
    ran = small.run(inside, name)
    require_two_lines(ran, name)
    if name in (*READ_ONLY, "store gc", "store merge"):
        assert ran.status in DONE
    else:
        assert "space" in ran.expect(4).stderr
    require_whole(small.workspace)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_source_that_changed_after_the_build(copy: World, inside, name: str) -> None:
    write_network(copy.folder / "net.onnx", 7)
    ran = copy.run(inside, name)
    require_two_lines(ran, name)
    if name in (*OF_STORED_BUILDS, "compare", "compare --output"):
        assert "source" in ran.expect(2).stderr
    else:
        assert ran.status in (*DONE, *SLOWER.get(name, ())), ran.stderr
    require_whole(copy.workspace)


@pytest.mark.parametrize("name", COMMANDS)
def test_two_models_of_one_name(copy: World, tmp_path: Path, inside, name: str) -> None:
    write_folder(tmp_path / "namesake", 3)
    shutil.copytree(copy.folder / "signed", tmp_path / "namesake" / "signed")
    shutil.copytree(copy.folder / "other", tmp_path / "namesake" / "other")
    ran = World(tmp_path / "namesake", copy.workspace).run(inside, name)
    require_two_lines(ran, name)
    if name in OF_STORED_BUILDS:
        assert "source" in ran.expect(2).stderr
    else:
        assert ran.status in (*DONE, *SLOWER.get(name, ())), ran.stderr
    require_whole(copy.workspace)


@pytest.mark.parametrize("state", ["full", "read-only"])
def test_a_comparison_that_cannot_be_written_leaves_no_part(
    small: World, inside, state: str
) -> None:
    disk = small.workspace.parent
    fill_disk(disk)
    if state == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    words = ("compare", "--model", "three", "--output", disk / "compared")
    ran = inside(*words, "--workspace", small.workspace, cwd=small.folder)
    require_two_lines(ran, state)
    assert ran.status == (4 if state == "full" else 2), ran.stderr
    assert not [path for path in disk.glob("compared/**/*") if path.is_file()]
