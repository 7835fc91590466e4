"""A sweep on a Ray cluster of three nodes on this machine, with labels: nothing lost, nothing doubled, whatever is killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from optpipe.core.entries import ArtifactInfo, VerificationInfo
from optpipe.sweep.cluster import pack, unpack
from optpipe.sweep.job import Matrix, SweepOptions
from optpipe.sweep.ledger import read_jobs
from optpipe.sweep.matrix import cells_from_matrix
from optpipe.workspace.entry import load_run
from optpipe.workspace.store import Store
from tests.fakes.ray_nodes import add_node
from tests.fakes.ray_nodes import list_tasks as list_running
from tests.fakes.ray_sweeps import EMPTY, KINDS, assert_each_once, run_cells, sweep
from tests.fakes.small_disk import fill_disk, free_disk, mount_small_disk
from tests.integration.conftest import optpipe

ROOT = Path(__file__).parents[3]
DRIVE = (sys.executable, str(ROOT / "benchmarks" / "sweep_kills.py"), "drive")


def test_jobs_run_on_nodes_of_their_kind_and_come_back_whole(cluster, tmp_path):
    record = sweep(tmp_path, (1, 2))
    assert_each_once(tmp_path, record, 4)
    assert {row.cell.kind for row in record.rows} == set(KINDS)


def test_a_real_model_as_a_user_runs_it(cluster, tmp_path):
    quick = (
        "--processes",
        "1",
        "--min-time",
        "0.2",
        "--max-time",
        "3",
        "--set",
        "percentile=90",
        "--max-cv",
        "500%",
    )
    ran = optpipe(
        "sweep",
        "digits",
        "--precision",
        "fp32",
        "--backend",
        "onnxruntime",
        "--gpu",
        "cpu-a",
        "--batch",
        "1,8",
        "--on",
        "ray",
        *quick,
        "--json",
        workspace=tmp_path,
    )
    assert ran.status in (0, 5), ran.stderr
    assert {row["state"] for row in ran.document["rows"]} <= {"done", "invalid"}
    for records in read_jobs(tmp_path).values():
        assert load_run(tmp_path / "runs" / records[0].run).find_problems() == []


@pytest.mark.parametrize("way", ["there", "back"])
def test_a_byte_that_changes_on_the_way_is_found(cluster, tmp_path, monkeypatch, way):
    from optpipe.sweep import cluster as driver

    def spoil(*arguments):
        for chunk in pack(*arguments):
            yield chunk[:-1] + bytes([chunk[-1] ^ 1])

    def unpack_spoiled(chunks, store):
        unpack([chunk[:-1] + bytes([chunk[-1] ^ 1]) for chunk in chunks], store)

    monkeypatch.setattr(
        driver, *(("pack", spoil) if way == "there" else ("unpack", unpack_spoiled))
    )
    limits = SweepOptions(retries=0, pending_s=60)
    (row,) = sweep(tmp_path, (1,), kinds=("cpu-a",), limits=limits).rows
    assert (row.state, row.reason) == (
        "failed",
        "damaged in transfer: chunk 1 does not match its SHA-256",
    )
    assert not [each for each in (tmp_path / "runs").iterdir() if not each.name.startswith("job-")]


def test_a_kind_without_a_node_is_a_row(cluster, tmp_path):
    record = sweep(tmp_path, (1,), kinds=("cpu-a", "cpu-z"))
    assert [row.state for row in record.rows] == ["done", "elsewhere"]


def test_a_node_whose_environment_is_not_as_its_label_says_measures_nothing(cluster, tmp_path):
    from optpipe.sweep.cluster import RayExecutor, list_cluster_slots

    stale = [replace(slot, fingerprint="another") for slot in list_cluster_slots()]
    matrix = Matrix(models=("m",), precisions=("fp32",), backends=("onnxruntime",), gpus=("cpu-a",))
    cells = cells_from_matrix(matrix, ("cpu-a",))
    executor = RayExecutor(stale, Store(tmp_path), SweepOptions(pending_s=60), program=EMPTY)
    found = run_cells(cells, stale, tmp_path, executor)
    assert [one.state for one in found] == ["failed"]
    assert "differs from its label" in found[0].reason


def test_only_nodes_with_the_labels_that_are_asked_for_run_jobs(cluster, tmp_path):
    from optpipe.core.errors import MissingError
    from optpipe.sweep.cluster import selector_from_text

    capped = add_node(cluster, "cpu-b", **{"optpipe/power-limit-w": "350", "optpipe/mig": "off"})
    try:
        record = sweep(
            tmp_path,
            (1, 2),
            kinds=("cpu-b",),
            selectors=dict([selector_from_text("power-limit-w=350")]),
        )
        assert_each_once(tmp_path, record, 2)
        assert len(record.slots) == 1
        with pytest.raises(
            MissingError,
            match="--node mig=on: no node of the Ray cluster has it; nodes have none, off",
        ):
            sweep(tmp_path, (1,), selectors=dict([selector_from_text("mig=on")]))
    finally:
        cluster.remove_node(capped)


def test_a_node_whose_disk_is_really_full_loses_nothing(cluster, tmp_path, monkeypatch):
    with mount_small_disk(tmp_path / "disk") as disk:
        monkeypatch.setenv("TMPDIR", str(disk))  # where a node makes the workspace of a task
        monkeypatch.setenv("RAY_TMPDIR", "/tmp")
        monkeypatch.setenv("OPTPIPE_EMPTY_SECONDS", "0.2")
        node = add_node(cluster, "cpu-full")
        monkeypatch.delenv("TMPDIR")
        fill_disk(
            disk, leave_bytes=8192
        )  # where nothing can be written Python takes another folder
        limits = SweepOptions(task_s=120, lock_s=300, retries=1, pending_s=300)
        record = sweep(tmp_path / "w", (1, 2), kinds=("cpu-full", "cpu-a"), limits=limits)
        states = {(row.cell.kind, row.state) for row in record.rows}
        assert states == {("cpu-full", "failed"), ("cpu-a", "done")}
        said = [row.reason for row in record.rows if row.state == "failed"]
        assert [each for each in said if "no space left" not in each.lower()] == []
        free_disk(disk)
        again = sweep(tmp_path / "w", (1, 2), kinds=("cpu-full", "cpu-a"))
        assert_each_once(tmp_path / "w", again, 4)
        cluster.remove_node(node)


def test_an_engine_that_a_node_without_a_gpu_built_is_verified_by_the_gpus_own_node(
    cluster, tmp_path, monkeypatch
):
    from optpipe.sweep.cluster import RayExecutor, list_cluster_slots

    fake = ROOT / "tests" / "fakes" / "gpu_node"
    with monkeypatch.context() as there:  # what starts here believes in an NVIDIA L4
        there.setenv("PYTHONPATH", f"{fake}:{ROOT / 'pipeline'}")
        told = optpipe("sweep", "--node-labels", "--json").document["labels"]
        node = add_node(cluster, told.pop("optpipe/kind"), gpus=1, **told)
    try:
        matrix = Matrix(
            models=("digits",),
            precisions=("fp16",),
            backends=("tensorrt-rtx",),
            gpus=("NVIDIA L4",),
        )
        slots, store = list_cluster_slots(), Store(tmp_path)
        program = (sys.executable, str(fake / "task.py"))
        executor = RayExecutor(slots, store, SweepOptions(pending_s=60), program=program)
        (record,) = run_cells(cells_from_matrix(matrix, ()), slots, tmp_path, executor)
    finally:
        cluster.remove_node(node)
    assert (record.state, record.reason, record.slot) == ("done", "", "GPU-0")
    (built,), (verified,) = store.list_entries(ArtifactInfo), store.list_entries(VerificationInfo)
    assert [gpu.name for gpu in built.manifest.environment.gpus] == []
    assert [gpu.name for gpu in verified.manifest.environment.gpus] == ["NVIDIA L4"]
    assert (record.artifact, verified.manifest.parents[0], verified.info.passed) == (
        built.id,
        built.id,
        True,
    )
    assert (built.find_damage(), verified.find_damage()) == (None, None)


def kill_one(what):
    """Kills a task's own process, or the Ray worker above it, with SIGKILL, as soon as there is one."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for child, worker in list_running(EMPTY[1]).items():
            with suppress(ProcessLookupError):
                os.kill(child if what == "child" else worker, signal.SIGKILL)
                return
        time.sleep(0.02)


@pytest.mark.parametrize("what", ["child", "worker"])
def test_what_is_killed_runs_again_and_is_counted_once(cluster, tmp_path, what):
    killer = threading.Thread(target=lambda: [kill_one(what) for _ in range(2)])
    killer.start()
    record = sweep(tmp_path, (1, 2))
    killer.join()
    assert_each_once(tmp_path, record, 4)


def test_a_node_that_dies_loses_nothing(cluster, tmp_path):
    added = add_node(cluster, "cpu-b")
    killed = []

    def watch():
        if not killed:
            killed.append(added)
            cluster.remove_node(added, allow_graceful=False)

    record = sweep(tmp_path, tuple(range(1, 7)), kinds=("cpu-b",), watch=watch)
    assert_each_once(tmp_path, record, 6)


def test_two_drivers_on_one_workspace_run_each_job_once(cluster, tmp_path):
    records = []
    both = [
        threading.Thread(target=lambda: records.append(sweep(tmp_path, (1, 2)))) for _ in range(2)
    ]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert len(records) == 2
    for record in records:
        assert_each_once(tmp_path, record, 4)


def test_a_driver_that_is_killed_goes_on_where_it_was(cluster, tmp_path):
    command = [*DRIVE, str(tmp_path), "3"]
    for stored in (1, 4):
        driver = subprocess.Popen(command)
        while driver.poll() is None and len(read_jobs(tmp_path)) < stored:
            time.sleep(0.1)
        driver.kill()
        driver.wait()
    subprocess.run(command, check=True, timeout=300)
    assert_each_once_stored(tmp_path, 6)


def assert_each_once_stored(workspace, count):
    finished = [one for records in read_jobs(workspace).values() for one in records if one.finished]
    assert (
        len(finished)
        == len({one.cell.key for one in finished})
        == len({one.run for one in finished})
        == count
    )
    for one in finished:
        assert load_run(workspace / "runs" / one.run).find_problems() == []
