"""Slots, locks and Ray nodes: processors near each GPU, one measurement at a time, foreign processes by name."""

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.gpu_node.pynvml import Driver
from tests.fakes.sweeps import make_cell, make_slot

import optpipe.sweep.slots as slots_module
from optpipe.core.entries import Environment
from optpipe.core.errors import BadInputError, MissingError, StageError
from optpipe.sweep.cluster import connect, describe_node, is_selected, selector_from_text
from optpipe.sweep.job import SweepOptions, Task
from optpipe.sweep.local import run_task
from optpipe.sweep.slots import (
    QUIET,
    TakenError,
    divide_cpus,
    find_foreign,
    hold_locks,
    list_cpu_slots,
    list_descendants,
    list_kinds,
    list_locks,
    list_slots,
)
from optpipe.workspace.environment import list_gpus


@given(st.integers(1, 64), st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_gpus_of_one_node_share_its_processors_without_overlap(cores, nodes):
    cpus = list(range(cores))
    near = [[cpu for cpu in cpus if cpu % 4 == node] for node in nodes]
    found = divide_cpus(cpus, near)
    for part, mine, node in zip(found, near, nodes, strict=True):
        assert part
        assert set(part) <= set(mine or cpus)
        others = [
            other
            for other, its in zip(found, nodes, strict=True)
            if its == node and other is not part
        ]
        if mine and len(mine) >= nodes.count(node):
            assert not any(set(part) & set(other) for other in others)


def test_the_cpu_is_one_slot_or_equal_parts_of_another_environment():
    (whole,) = list_cpu_slots(Environment(cpu_count=8), range(8), 1)
    first, second = list_cpu_slots(Environment(cpu_count=8), range(8), 2)
    assert (whole.name, whole.cpus) == ("cpu", tuple(range(8)))
    assert (first.name, first.cpus, second.cpus) == ("cpu-0-3", (0, 1, 2, 3), (4, 5, 6, 7))
    assert first.fingerprint == second.fingerprint != whole.fingerprint


def test_a_foreign_process_is_one_that_is_not_ours_and_is_known_here():
    mine, other, of_the_host = os.getpid(), 1, 2**31 - 1
    seen = dict.fromkeys((mine, other, of_the_host), "python")
    assert find_foreign(seen, {mine}) == {other: "python"}


def test_children_of_a_job_are_its_own():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert {os.getpid(), child.pid} <= list_descendants(os.getpid())
    finally:
        child.communicate(b"\n")


def test_a_gpu_is_locked_by_its_uuid_and_the_processors_by_their_host():
    gpu, cpu = make_slot(3), make_slot(kind="cpu")
    assert list_locks(gpu, timing=True) == [("GPU-3", False)]
    assert list_locks(cpu, timing=True) == [(QUIET, False)]


def test_one_holder_at_a_time_and_the_other_is_told_who(tmp_path):
    with (
        hold_locks([("GPU-0", False)], 1, tmp_path),
        pytest.raises(TakenError, match="GPU-0 has been in use"),
    ):
        hold_locks([("GPU-0", False)], 0, tmp_path).__enter__()
    with hold_locks([("GPU-0", False)], 0, tmp_path):
        pass


def test_who_waits_for_a_lock_is_interrupted_with_the_sweep(tmp_path):
    stop = threading.Event()
    stop.set()
    with (
        hold_locks([("GPU-0", False)], 1, tmp_path),
        pytest.raises(StageError, match="interrupted"),
    ):
        hold_locks([("GPU-0", False)], 60, tmp_path, stop).__enter__()


def test_parts_of_the_cpu_share_the_quiet_slot_and_whoever_needs_all_of_it_waits(tmp_path):
    with (
        hold_locks([(QUIET, True)], 1, tmp_path),
        hold_locks([(QUIET, True)], 0, tmp_path),
        pytest.raises(TakenError),
    ):
        hold_locks([(QUIET, False)], 0, tmp_path).__enter__()


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "GPU-0").symlink_to(tmp_path / "victim")
    with pytest.raises(StageError, match="symbolic link"):
        hold_locks([("GPU-0", False)], 0, tmp_path).__enter__()
    assert not (tmp_path / "victim").exists()


@pytest.fixture
def two_gpus(monkeypatch):
    fake = Driver(2, "NVIDIA H200", (9, 0), 140, 700)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    for cached in (list_gpus, slots_module.list_devices):
        cached.cache_clear()
    yield fake
    monkeypatch.undo()
    for cached in (list_gpus, slots_module.list_devices):
        cached.cache_clear()


def test_a_slot_for_each_gpu_that_cuda_shows_and_one_for_the_processors(two_gpus, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second, cpu = list_slots()
    assert [(slot.name, slot.kind, slot.gpu) for slot in (first, second)] == [
        ("GPU-0", "NVIDIA H200", "GPU-0"),
        ("GPU-1", "NVIDIA H200", "GPU-1"),
    ]
    assert first.fingerprint == second.fingerprint != cpu.fingerprint
    assert list_kinds((first, second, cpu)) == ("NVIDIA H200",)
    for shown in ("1", "GPU-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        list_gpus.cache_clear()
        only, _ = list_slots()
        assert (only.name, only.fingerprint, only.cpus) == (
            second.name,
            second.fingerprint,
            second.cpus,
        )


def test_a_gpu_in_use_is_not_measured_and_the_row_says_by_whom(two_gpus, tmp_path, monkeypatch):
    two_gpus.processes = (7,)
    monkeypatch.setattr("optpipe.sweep.local._SETTLE_S", 0)
    cell = make_cell()
    task = Task(cell.recipe, cell.kind, (cell,), workspace=str(tmp_path), artifact="a" * 12)
    result = run_task(task, make_slot(0), SweepOptions(), threading.Event(), ("false",))
    assert result.outcomes[0].state == "invalid"
    assert result.outcomes[0].reason == "not measured: GPU-0 is in use by python3 (process 7)"


def test_a_process_that_ends_without_a_word_is_a_failed_row_with_its_last_words(tmp_path):
    cell = make_cell("cpu")
    task = Task(cell.recipe, cell.kind, (cell,), workspace=str(tmp_path), artifact="a" * 12)
    for program, said in (
        (
            "import os, sys; print('last words', file=sys.stderr); sys.exit(3)",
            "ended with status 3: last words",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
    ):
        command = (sys.executable, "-c", program)
        result = run_task(task, make_slot(kind="cpu"), SweepOptions(), threading.Event(), command)
        assert (result.lost, result.outcomes[0].state) == (True, "failed")
        assert said in result.outcomes[0].reason


@pytest.mark.slow
def test_a_process_that_hangs_is_ended_and_leaves_nothing_behind(tmp_path):
    cell = make_cell("cpu")
    task = Task(cell.recipe, cell.kind, (cell,), workspace=str(tmp_path), artifact="a" * 12)
    seconds = f"987.{os.getpid()}"  # of this test alone
    program = (
        f"import subprocess, sys, time; subprocess.Popen(['sleep', '{seconds}']); time.sleep(987)"
    )
    command = (sys.executable, "-c", program)
    result = run_task(
        task, make_slot(kind="cpu"), SweepOptions(task_s=0.5), threading.Event(), command
    )
    reason = result.outcomes[0].reason
    assert "longer than 0 s (--set job-timeout)" in reason or "KeyboardInterrupt" in reason
    deadline = time.monotonic() + 60
    while (
        subprocess.run(
            ["pgrep", "-f", f"^sleep {seconds}$"], check=False, capture_output=True
        ).returncode
        == 0
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_node_says_everything_that_a_selector_may_ask_for(two_gpus, monkeypatch):
    labels = describe_node()
    assert labels == {
        "optpipe/kind": "NVIDIA_H200",
        "optpipe/fingerprint": labels["optpipe/fingerprint"],
        "optpipe/driver": "580.1",
        "optpipe/memory-gib": "140",
        "optpipe/mig": "unsupported",
        "optpipe/power-limit-w": "700",
    }
    for text in (
        "power-limit-w=700",
        "kind=NVIDIA H200",
        "mig!=on",
        "memory-gib = 140",
        "optpipe/driver=580.1",
    ):
        assert is_selected(labels, *selector_from_text(text)), text
    for text in ("power-limit-w=350", "driver!=580.1", "rack=7"):
        assert not is_selected(labels, *selector_from_text(text)), text


def test_gpus_of_one_kind_that_differ_have_no_one_label(two_gpus, monkeypatch):
    monkeypatch.setattr(
        two_gpus, "nvmlDeviceGetEnforcedPowerLimit", lambda handle: 700_000 - 350_000 * handle
    )
    with pytest.raises(BadInputError, match="different power limits or MIG modes"):
        describe_node()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    list_gpus.cache_clear()
    assert describe_node()["optpipe/power-limit-w"] == "350"


def test_a_node_without_a_gpu_says_its_kind_and_environment():
    assert sorted(describe_node()) == ["optpipe/fingerprint", "optpipe/kind"]


@pytest.mark.parametrize("text", ["mig", "=off", "mig=", "!=x", ""])
def test_what_is_no_selector_is_refused(text):
    with pytest.raises(BadInputError, match="expected LABEL=VALUE or LABEL!=VALUE, such as"):
        selector_from_text(text)


class AuthenticationError(Exception):
    """As Ray's."""


@pytest.fixture
def calls(monkeypatch):
    found = SimpleNamespace(addresses=[], errors=[])

    def init(address, **_):
        found.addresses.append(address)
        if found.errors:
            raise found.errors.pop(0)

    exceptions = SimpleNamespace(RayError=AuthenticationError)
    ray = SimpleNamespace(is_initialized=lambda: False, init=init, exceptions=exceptions)
    monkeypatch.setitem(sys.modules, "ray", ray)
    return found


def test_no_cluster_is_named_with_the_way_out(calls):
    calls.errors = [ConnectionAbortedError("failed")]
    with pytest.raises(
        MissingError, match="no Ray cluster: failed\nstart one with `ray start --head`"
    ):
        connect()
    assert calls.addresses == ["auto"]
