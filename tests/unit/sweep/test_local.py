"""The executor of this host: an interruption lets what runs end in order, and keeps what it measured."""

import os
import signal
import time
from dataclasses import replace

import pytest
from tests.fakes.sweeps import make_cell, make_group, make_slot

import optpipe.sweep.local as local
from optpipe.core.measurement import LeftOut
from optpipe.sweep.job import CellOutcome, JobState, Task
from optpipe.sweep.ledger import read_jobs
from optpipe.sweep.local import Setting, run_locally
from optpipe.sweep.task import outcome_from_group


def test_an_interrupted_sweep_waits_for_the_task_that_runs_and_records_it(tmp_path, monkeypatch):
    def run_task(task, slot, limits, stop, program):
        if not task.timing:
            return (CellOutcome(JobState.DONE, artifact="artifact"),)
        time.sleep(0.2)  # until all threads have started
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(10)
        time.sleep(0.5)  # as a process that writes what it has
        return (CellOutcome(JobState.INVALID, "interrupted", "artifact", "bench-1"),)

    monkeypatch.setattr(local, "run_task", run_task)
    cell, told = make_cell(kind="cpu"), []
    works = [Task(cell.recipe, cell.kind, (cell,))]
    assert run_locally(works, [make_slot(kind="cpu")], Setting(tmp_path), told.append) is False
    assert [one.run for one in told] == ["bench-1"]
    assert [one.run for tries in read_jobs(tmp_path).values() for one in tries] == ["bench-1"]


CUT = LeftOut("bench-1", "m003", ("interrupted",))


@pytest.mark.parametrize(
    ("asked", "left_out", "state"),
    [
        (None, (), JobState.DONE),
        (3, (), JobState.DONE),
        (5, (), JobState.FAILED),  # three of five processes
        (4, (CUT,), JobState.FAILED),
        (4, (replace(CUT, codes=("drift",)),), JobState.DONE),
    ],
)
def test_a_cell_of_an_interrupted_run_is_done_only_with_all_its_processes(asked, left_out, state):
    group = replace(make_group(make_cell()), left_out=left_out)
    found = outcome_from_group((group, ()), "artifact", "bench-1", asked)
    assert (found.state, found.run) == (state, "bench-1")
