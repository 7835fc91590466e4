"""Slots and locks: processors near each GPU, nobody else's, one measurement at a time, strangers by name."""

import os
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.sweeps import make_slot

from optpipe.core.environment import Environment
from optpipe.errors import StageError
from optpipe.sweep.locks import QUIET, TakenError, hold_locks, list_locks
from optpipe.sweep.slots import (
    GpuProcess,
    divide_cpus,
    find_strangers,
    list_cpu_slots,
    list_descendants,
)


@given(st.integers(1, 64), st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_gpus_of_one_node_share_its_processors_without_overlap(cores, nodes):
    cpus = list(range(cores))
    near = [[cpu for cpu in cpus if cpu % 4 == node] for node in nodes]
    found = divide_cpus(cpus, near)
    for part, mine, node in zip(found, near, nodes, strict=True):
        assert part
        assert set(part) <= set(mine or cpus)
        others = [other for other, its in zip(found, nodes, strict=True) if its == node and other is not part]
        if mine and len(mine) >= nodes.count(node):
            assert not any(set(part) & set(other) for other in others)


def test_the_cpu_is_one_slot_or_equal_parts_of_another_environment():
    (whole,) = list_cpu_slots(Environment(cpu_count=8), range(8), 1)
    first, second = list_cpu_slots(Environment(cpu_count=8), range(8), 2)
    assert (whole.name, whole.cpus) == ("cpu", tuple(range(8)))
    assert (first.name, first.cpus, second.cpus) == ("cpu-0-3", (0, 1, 2, 3), (4, 5, 6, 7))
    assert first.fingerprint == second.fingerprint != whole.fingerprint


def test_a_stranger_is_whoever_is_not_ours_and_before_a_job_everybody():
    mine, other, hosts = (GpuProcess(pid, "python") for pid in (os.getpid(), 1, 2**31 - 1))
    assert find_strangers([mine, other], {mine.pid}, running=True) == (other,)
    assert find_strangers([mine, hosts], {mine.pid}, running=True) == ()
    assert find_strangers([hosts], (), running=False) == (hosts,)


def test_children_of_a_job_are_its_own():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert {os.getpid(), child.pid} <= list_descendants(os.getpid())
    finally:
        child.communicate(b"\n")


def test_a_gpu_is_locked_by_its_uuid_and_the_processors_by_their_host():
    gpu, cpu = make_slot(3), make_slot(kind="cpu")
    assert list_locks(gpu, timing=True, serialized=False) == [("GPU-3", False)]
    assert list_locks(gpu, timing=True, serialized=True) == [("GPU-3", False), ("timing", False)]
    assert list_locks(gpu, timing=False, serialized=True) == [("GPU-3", False)]
    assert list_locks(cpu, timing=True, serialized=False) == [(QUIET, False)]


def test_one_holder_at_a_time_and_the_other_is_told_who(tmp_path):
    with hold_locks([("GPU-0", False)], 1, tmp_path), pytest.raises(TakenError, match=f"process {os.getpid()}"):
        hold_locks([("GPU-0", False)], 0, tmp_path).__enter__()
    with hold_locks([("GPU-0", False)], 0, tmp_path):
        pass


def test_parts_of_the_cpu_share_the_quiet_slot_and_whoever_needs_all_of_it_waits(tmp_path):
    with hold_locks([(QUIET, True)], 1, tmp_path), hold_locks([(QUIET, True)], 0, tmp_path), pytest.raises(TakenError):
        hold_locks([(QUIET, False)], 0, tmp_path).__enter__()


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "GPU-0").symlink_to(tmp_path / "victim")
    with pytest.raises(StageError, match="symbolic link"):
        hold_locks([("GPU-0", False)], 0, tmp_path).__enter__()
    assert not (tmp_path / "victim").exists()


def test_no_two_threads_of_one_process_hold_a_lock(tmp_path):
    inside, most, guard = 0, 0, threading.Lock()

    def work():
        nonlocal inside, most
        for _ in range(5):
            with hold_locks([("GPU-0", False)], 60, tmp_path):
                with guard:
                    inside += 1
                    most = max(most, inside)
                with guard:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
