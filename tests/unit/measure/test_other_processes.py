"""Which processes on a GPU disturb a measurement."""

import os

import pytest

from optpipe.measure import process
from optpipe.measure.process import count_other_processes

WORKER, STRANGER = 2**22 + 1, 2**22 + 2


@pytest.mark.parametrize(
    ("listed", "others"),
    [
        ([], 0),
        ([WORKER], 0),
        ([WORKER, os.getpid()], 0),
        ([WORKER, os.getpid(), STRANGER], 1),
        ([WORKER, STRANGER], 1),
        ([os.getpid(), STRANGER], 1),
    ],
)
def test_the_worker_and_the_process_that_waits_for_it_are_no_others(listed, others):
    assert count_other_processes(listed, WORKER) == others


@pytest.mark.parametrize(("uses_cuda", "others"), [(False, 1), (True, 0)])
def test_with_ids_of_the_host_this_process_counts_if_it_uses_cuda(monkeypatch, uses_cuda, others):
    monkeypatch.setattr(process, "has_cuda_context", lambda: uses_cuda)
    assert count_other_processes([STRANGER, STRANGER + 1], WORKER) == others
    assert count_other_processes([], WORKER) == 0
