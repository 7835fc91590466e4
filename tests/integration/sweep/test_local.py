"""`optpipe sweep` and `merge` as a user runs them, with real builds and measurements of `digits` on the CPU."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from optpipe.sweep.job import JobState, Matrix, SweepOptions
from optpipe.sweep.ledger import read_jobs
from optpipe.sweep.local import LocalExecutor
from optpipe.sweep.matrix import cells_from_matrix
from optpipe.sweep.slots import list_slots
from optpipe.sweep.sweep import run_sweep
from optpipe.workspace.store import Store
from tests.fakes.ray_sweeps import EMPTY, assert_each_once
from tests.fakes.small_disk import fill_disk, free_disk, mount_small_disk
from tests.fakes.sweeps import Watcher
from tests.integration.conftest import optpipe

QUICK = (
    "--backend", "onnxruntime", "--gpu", "cpu", "--processes", "1", "--min-time", "0.2", "--set", "warm-up=0.1",
    "--set", "max-warm-up=1", "--max-time", "3", "--set", "percentile=90", "--max-cv", "500%",
)  # fmt: skip


def sweep(workspace, *arguments):
    return optpipe("sweep", *arguments, *QUICK, "--json", workspace=workspace)


def states(ran):
    return [row["state"] for row in ran.document["rows"]]


@pytest.fixture(scope="module")
def swept(tmp_path_factory, exported):
    """A workspace in which two cells were measured."""
    folder = exported(tmp_path_factory.mktemp("sweep") / "work")
    ran = sweep(
        folder,
        "digits",
        "--precision",
        "fp32,fp16",
        "--batch",
        "1,8",
        "--set",
        "loads-per-process=2",
    )
    assert Counter(states(ran)).keys() <= {"done", "invalid", "impossible"}, ran.stderr
    return folder, ran


def test_every_cell_is_a_row_with_its_run_or_its_reason(swept):
    folder, ran = swept
    rows = ran.document["rows"]
    assert len(rows) == 4
    for row in rows:
        if row["cell"]["recipe"]["precision"] == "fp16":
            assert row["state"] == "impossible"
            assert row["reason"] == "onnxruntime has no fp16 kernels on cpu, only fp32, int8"
        else:
            assert (folder / "runs" / row["run"] / "manifest.json").is_file()
            assert row["figures"]["throughput"]["value"] > 0


def test_a_batch_size_outside_of_the_profile_is_a_row(swept):
    ran = sweep(swept[0], "digits", "--precision", "fp32", "--batch", "257")
    assert (ran.status, states(ran)) == (2, ["impossible"])
    reason = ran.document["rows"][0]["reason"]
    assert "outside the profile" in reason
    (command,) = re.findall("`optpipe sweep (.*)`", reason)
    wider = sweep(swept[0], *shlex.split(command))
    assert wider.document["rows"][0]["figures"]["throughput"]["value"] > 0


def test_shards_merge_into_what_one_host_would_have(tmp_path, exported):
    arguments = ("digits", "--precision", "fp32", "--batch", "2,4")
    shards = [exported(tmp_path / name) for name in ("one", "two")]
    for number, shard in enumerate(shards, start=1):
        ran = sweep(shard, *arguments, "--shard", f"{number}/2")
        assert len(ran.document["rows"]) == 1
    merged = optpipe("store", "merge", *shards, "--json", workspace=tmp_path / "all")
    assert merged.status in (0, 1), merged.stderr
    shown = sweep(tmp_path / "all", *arguments, "--dry-run")
    assert {row["state"] for row in shown.document["rows"]} <= {"done", "to run"}
    jobs = read_jobs(tmp_path / "all")
    assert sorted(one[0].cell.load.batch_size for one in jobs.values()) == [2, 4]


def empty_cells(count):
    matrix = Matrix(
        models=("m",),
        precisions=("fp32",),
        backends=("onnxruntime",),
        batches=tuple(range(1, count + 1)),
    )
    return cells_from_matrix(matrix, ("cpu",))


DRIVER = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.integration.sweep.test_local import run_empty
run_empty(Path(sys.argv[1]), int(sys.argv[2]))
"""


def run_empty(workspace, count, watch=None, limits=None):
    """A sweep of empty jobs in this process."""
    options = limits or SweepOptions(retries=3)
    executor = LocalExecutor(workspace, options, EMPTY)
    return run_sweep(
        empty_cells(count), list_slots(2), options, Store(workspace), Watcher(watch), executor
    )


def measuring(workspace):
    """The processes of tasks that are inside their measurement; a build leaves no run."""
    found = subprocess.run(
        ["pgrep", "-f", f"empty_job.py {workspace}"], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in found.stdout.split()] if any((workspace / "runs").glob("*")) else []


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_driver_that_is_killed_goes_on_where_it_was(tmp_path):
    for seconds in ("600", "0.3", "0.3"):  # the first tasks would outlive their driver by far
        environment = {**os.environ, "OPTPIPE_EMPTY_SECONDS": seconds}
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path), "6"], env=environment
        )
        wait_for(lambda driver=driver: measuring(tmp_path) or driver.poll() is not None)
        time.sleep(0.5)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        wait_for(lambda: not measuring(tmp_path))
    record = run_empty(tmp_path, 6)
    assert_each_once(tmp_path, record, 6)


def test_a_task_that_is_killed_is_tried_again_and_its_reason_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("OPTPIPE_EMPTY_SECONDS", "4")  # long enough to be killed in
    stop = threading.Event()

    def kill_first():
        while not stop.wait(0.05):
            if pids := measuring(tmp_path):
                with suppress(ProcessLookupError):
                    os.kill(pids[0], signal.SIGKILL)
                return

    killer = threading.Thread(target=kill_first)
    killer.start()
    record = run_empty(tmp_path, 2)
    stop.set()
    killer.join()
    assert any("was killed by SIGKILL" in why for row in record.rows for why in row.attempts)
    assert_each_once(tmp_path, record, 2)


def test_two_sweeps_of_one_workspace_run_each_job_once(tmp_path):
    found = []
    both = [threading.Thread(target=lambda: found.append(run_empty(tmp_path, 6))) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert len(found) == 2
    for record in found:
        assert_each_once(tmp_path, record, 6)


def test_a_gpu_that_somebody_holds_ends_in_a_row(tmp_path, monkeypatch):
    import optpipe.sweep.slots as locks

    monkeypatch.setattr(locks, "FOLDER", tmp_path / "locks")
    with locks.hold_locks([(locks.QUIET, False)], 1):
        record = run_empty(tmp_path / "w", 1, limits=SweepOptions(lock_s=0.5))
    assert record.rows[0].state == JobState.FAILED
    assert "the CPU has been in use" in record.rows[0].reason


@pytest.mark.parametrize("before", [0, 2])
def test_a_disk_that_is_really_full_ends_in_rows_and_the_next_sweep_runs_what_is_left(
    tmp_path, before
):
    with mount_small_disk(tmp_path / "disk") as disk:
        workspace, told = disk / "work", []

        def watch():
            told.append(None)
            if len(told) == before:
                fill_disk(disk)

        (workspace / "store").mkdir(parents=True)
        if not before:
            fill_disk(disk)
        record = run_empty(workspace, 5, watch)
        counts = Counter(row.state for row in record.rows)
        assert counts.keys() <= {"done", "failed"}
        assert counts["failed"] >= 3 - before
        assert [
            row.reason
            for row in record.rows
            if row.state == "failed" and "No space left" not in row.reason
        ] == []
        free_disk(disk)
        assert_each_once(workspace, run_empty(workspace, 5), 5)
