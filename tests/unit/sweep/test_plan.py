"""What a sweep runs, in which order, the rows that come of it."""

import os
import signal
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.console import assert_golden, text_of
from tests.fakes.entries import artifact_info, put
from tests.fakes.sweeps import (
    H200,
    L4,
    make_cell,
    make_group,
    make_recipe,
    make_record,
    make_slot,
    other_environment,
)

import optpipe.sweep.local as local
from optpipe.core.measurement import Reason
from optpipe.core.measurement_group import LeftOut
from optpipe.sweep.document import document_from_sweep
from optpipe.sweep.job import (
    START_S,
    CellOutcome,
    JobState,
    Result,
    SweepOptions,
    Task,
    fail_task,
    repeat_outcome,
)
from optpipe.sweep.ledger import read_jobs
from optpipe.sweep.local import LocalExecutor, find_built, note_built
from optpipe.sweep.plan import (
    Standing,
    SweepRecord,
    estimate_total,
    fill_rows,
    judge_status,
    list_tasks,
    plan_sweep,
    sort_tasks,
    take_task,
)
from optpipe.sweep.sweep import Scheduler
from optpipe.sweep.task import outcome_from_group
from optpipe.workspace.store import Store


def plan_of(cells, records=(), slots=None, **options):
    stored = {one.key: [one] for one in records}
    return plan_sweep(cells, slots or (make_slot(0), make_slot(1)), stored, **options)


def standings(plan):
    return ["stored" if row.stored else row.state for row in plan]


def test_what_is_done_is_stored_and_what_failed_runs_again():
    cells = [make_cell(batch=size) for size in (1, 2, 4, 8)]
    states = (JobState.DONE, JobState.FAILED, JobState.INVALID, JobState.IMPOSSIBLE)
    records = [make_record(cell, state) for cell, state in zip(cells, states, strict=True)]
    assert standings(plan_of(cells, records)) == ["stored", "to run", "to run", "stored"]
    assert standings(plan_of(cells, records, again=True)) == ["to run"] * 4


def test_a_figure_of_another_environment_is_no_figure_of_this_one():
    cell = make_cell()
    elsewhere = make_record(cell, slot=other_environment(make_slot()))
    assert standings(plan_of([cell], [elsewhere])) == [Standing.RUN]
    mixed = (make_slot(0), other_environment(make_slot(1)))
    assert standings(plan_of([cell], [elsewhere], slots=mixed)) == [Standing.STORED]


def test_a_kind_that_is_not_here_is_a_row_and_its_merged_result_is_shown():
    cell = make_cell(L4)
    assert standings(plan_of([cell])) == [Standing.ELSEWHERE]
    assert standings(plan_of([cell], [make_record(cell)])) == [Standing.STORED]


def test_the_estimate_is_from_jobs_like_it_over_the_slots():
    measured = make_record(make_cell(batch=1))
    plan = plan_of([make_cell(batch=size, precision="fp32") for size in (1, 1, 1, 1)], [measured])
    assert estimate_total(plan, (make_slot(0), make_slot(1))) == 4 * 12.0 / 2
    assert estimate_total(plan_of([make_cell()]), [make_slot()]) is None


@pytest.mark.parametrize("records", [(), (make_record(make_cell(batch=1)),)])
def test_large_batches_run_first(records):
    cells = [
        make_cell(batch=size, precision=precision)
        for precision in ("fp16", "fp32")
        for size in (2, 4, 32, 64)
    ]
    works = sort_tasks(list_tasks(plan_of(cells, records), 2))
    assert [[cell.load.batch_size for cell in work.cells] for work in works] == [
        [32, 64],
        [32, 64],
        [2, 4],
        [2, 4],
    ]


def test_one_process_takes_loads_of_one_recipe():
    cells = [
        make_cell(batch=size, precision=precision)
        for precision in ("fp16", "fp32")
        for size in (1, 2, 4)
    ]
    works = list_tasks(plan_of(cells), 2)
    taken = [(work.recipe.precision, len(work.cells)) for work in works]
    assert taken == [("fp16", 2), ("fp16", 1), ("fp32", 2), ("fp32", 1)]


def record_of(cells, records, **changes):
    plan = plan_of(cells, ())
    rows = fill_rows(plan, {one.cell.key: one for one in records})
    status = judge_status(rows, interrupted=False, dry_run=False)
    made = SweepRecord(
        rows, ("NVIDIA H200 (GPU-0)", "NVIDIA H200 (GPU-1)"), 75.0, 90.0, dry_run=False
    )
    return replace(made, exit_status=int(status), **changes)


def test_every_cell_is_a_row_whatever_came_of_it():
    cells = [make_cell(batch=size) for size in (1, 2, 4)]
    cells += [make_cell(L4), make_cell(precision="int8", backend="torch-tensorrt")]
    done = make_record(cells[0])
    crashed = make_record(cells[1], JobState.FAILED, "its process was killed by SIGKILL")
    crashed = replace(crashed, attempts=("killed before",))
    spoiled = make_record(
        cells[2], JobState.INVALID, "other processes used the GPU: python (process 7)"
    )
    record = record_of(cells, [done, crashed, spoiled])
    assert [row.state for row in record.rows][:4] == ["done", "failed", "invalid", "elsewhere"]
    assert record.exit_status == 4
    assert_golden(text_of(document_from_sweep(record), width=150), "sweep.txt")
    planned = replace(record, rows=fill_rows(plan_of(cells), {}), dry_run=True)
    assert_golden(text_of(document_from_sweep(planned), width=150), "sweep-dry-run.txt")


def make_work(loads, load_s):
    cells = tuple(make_cell(batch=size) for size in range(1, loads + 1))
    return Task(cells[0].recipe, cells[0].kind, cells, load_s)


def run(works, slots, *, divide=True):
    """When the last slot ends if works take as long as expected, and what was run; undivided, the order of `works` is kept."""
    waiting = list(works)
    ends, ran = [0.0] * slots, []
    while waiting:
        ends.sort()
        now, *others = ends
        busy = [end for end in others if end > now]
        work = take_task(waiting, 0, busy, slots, now) if divide else waiting.pop(0)
        ran.append(work)
        ends[0] = now + work.expected_s
    return max(ends), ran


works_of = st.lists(
    st.builds(make_work, st.integers(1, 12), st.floats(0.1, 60)), min_size=1, max_size=7
)


@given(works_of, st.integers(1, 8))
def test_dividing_ends_no_later_than_before_by_more_than_one_load(works, slots):
    whole = sort_tasks(works)
    ended, ran = run(whole, slots)
    longest = START_S + max(work.load_s for work in works)
    for before in (works, whole):
        assert ended <= run(before, slots, divide=False)[0] + longest
    loads = sum(len(work.cells) for work in works)
    together = (sum(work.expected_s for work in works) + START_S * (len(ran) - len(works))) / slots
    assert sum(len(work.cells) for work in ran) == loads
    assert ended <= together + longest


def test_an_interrupted_sweep_waits_for_the_task_that_runs_and_records_it(tmp_path, monkeypatch):
    def run_task(task, slot, options, stop, program):
        outcome = CellOutcome(JobState.DONE, artifact="artifact")
        if task.timing:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.wait(10)
            time.sleep(0.5)  # as a process that writes what it has
            outcome = CellOutcome(JobState.INVALID, "interrupted", "artifact", "bench-1")
        return Result((outcome,), slot.fingerprint)

    monkeypatch.setattr(local, "run_task", run_task)
    slots, options, told = [make_slot(kind="cpu")], SweepOptions(), []
    tasks = list_tasks(plan_of([make_cell("cpu", precision="fp32")], slots=slots), 1)
    assert (
        Scheduler(slots, options, tmp_path, LocalExecutor(tmp_path, options), told.append).run(
            tasks
        )
        is False
    )
    assert [one.run for one in told] == ["bench-1"]
    assert [one.run for tries in read_jobs(tmp_path).values() for one in tries] == ["bench-1"]


class FakeExecutor:
    """Ends one task at each poll, with the results that `answer` gives of it."""

    def __init__(self, answer, *, remote=False):
        self.answer, self.remote, self.started = answer, remote, []

    def start(self, task, slot):
        self.started.append((task, slot))
        return len(self.started) - 1

    def poll(self, running, _timeout_s):
        for each in sorted(running)[:1]:
            task, slot = self.started[each]
            yield each, self.answer(task, slot)

    def cancel(self, running):
        return running

    def close(self):
        pass


def succeed(task, slot):
    outcome = CellOutcome(JobState.DONE, artifact="a" * 12, run="bench-1" if task.timing else None)
    return Result(repeat_outcome(task, outcome), slot.fingerprint)


def schedule(cells, slots, workspace, executor, loads=4, **options):
    tasks, told = list_tasks(plan_of(cells, slots=slots), loads), []
    assert Scheduler(slots, SweepOptions(**options), workspace, executor, told.append).run(tasks)
    assert len(told) == len(cells)
    return {one.cell.load.batch_size: one for one in told}


@pytest.mark.parametrize("remote", [False, True])
def test_what_is_lost_runs_again_one_by_one_and_no_load_takes_others_with_it(tmp_path, remote):
    def answer(task, slot):
        if task.timing and any(cell.load.batch_size == 2 for cell in task.cells):
            return fail_task(task, f"killed {len(task.cells)}", slot.fingerprint, lost=True)
        return succeed(task, slot)

    executor = FakeExecutor(answer, remote=remote)
    cells, slots = (
        [make_cell("cpu", batch=size, precision="fp32") for size in (1, 2, 3)],
        [make_slot(kind="cpu")],
    )
    found = schedule(cells, slots, tmp_path, executor, retries=2)
    assert {size: one.state for size, one in found.items()} == {1: "done", 2: "failed", 3: "done"}
    assert (found[2].reason, found[2].attempts) == ("killed 1", ("killed 1",) * 2)
    assert [len(task.cells) for task, _ in executor.started] == [0, 3, 1, 1, 1, 1, 1]


def test_a_build_that_failed_is_a_row_of_every_cell_and_is_tried_as_often_as_asked(tmp_path):
    executor = FakeExecutor(
        lambda task, slot: fail_task(task, "killed", slot.fingerprint, lost=True)
    )
    found = schedule(
        [make_cell(batch=size) for size in (1, 2)], [make_slot()], tmp_path, executor, retries=1
    )
    assert {(one.state, one.reason, one.attempts) for one in found.values()} == {
        ("failed", "killed", ("killed",))
    }
    assert len(executor.started) == 2


def test_kinds_of_one_host_follow_each_other_and_a_cluster_builds_for_gpus_where_there_are_none(
    tmp_path,
):
    cells, slots = (
        [make_cell(), make_cell("cpu", precision="fp32")],
        [make_slot(), make_slot(kind="cpu")],
    )
    for remote, kinds in (
        (False, [H200, H200, "cpu", "cpu"]),
        (True, ["cpu", "cpu", H200, "cpu", H200]),
    ):
        executor = FakeExecutor(succeed, remote=remote)
        schedule(cells, slots, tmp_path / str(remote), executor)
        assert [task.kind for task, _ in executor.started] == kinds
        assert all(slot.kind == task.kind for task, slot in executor.started)


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


def test_a_cell_that_one_cause_ended_early_says_so():
    cause = Reason("loaded-host", "other work", "free the machine", invalidates=True)
    group = make_group(make_cell())
    done = outcome_from_group((group, ()), "artifact", "bench-1", None, cause)
    assert (done.state, done.reason) == (JobState.DONE, "stopped early (loaded-host)")
    lost = replace(group, processes=0, left_out=(replace(CUT, codes=("loaded-host",)),))
    invalid = outcome_from_group((lost, (cause,)), "artifact", "bench-1", None, cause)
    assert invalid.state is JobState.INVALID
    assert invalid.reason == "other work; stopped early (loaded-host)"


def test_a_build_is_known_again_by_its_content_in_its_environment(tmp_path):
    entry = put(Store(tmp_path), artifact_info(), {"test": 1}, files={"model.onnx": b"engine"})
    recipe = make_recipe(files={"model": "1"})
    note_built(tmp_path, recipe, "f", entry.id)
    assert find_built(tmp_path, recipe, "f") == entry.id
    assert find_built(tmp_path, recipe, "other") is None
    assert find_built(tmp_path, replace(recipe, files={"model": "2"}), "f") is None
    unknown = make_recipe()
    note_built(tmp_path, unknown, "f", entry.id)
    assert find_built(tmp_path, unknown, "f") is None
    entry.file("model.onnx").write_bytes(b"damage")
    assert find_built(tmp_path, recipe, "f") is None
