"""What a sweep does with each cell: stored, to run, impossible, elsewhere; and how it is told."""

from dataclasses import replace

from tests.fakes.console import text_of
from tests.fakes.golden import assert_golden
from tests.fakes.sweeps import H200, L4, make_cell, make_record, make_slot, other_environment

from optpipe.sweep.document import document_from_sweep
from optpipe.sweep.job import JobState
from optpipe.sweep.plan import (
    Standing,
    SweepRecord,
    estimate_total,
    fill_rows,
    judge_status,
    list_tasks,
    list_warnings,
    plan_sweep,
)


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
    plan = plan_of([make_cell(batch=size) for size in (1, 2, 4, 8, 16)], [measured])
    assert estimate_total(plan, (make_slot(0), make_slot(1))) == 4 * 12.0 / 2
    assert estimate_total(plan_of([make_cell()]), [make_slot()]) is None


def test_one_process_takes_loads_of_one_recipe():
    cells = [make_cell(batch=size, precision=precision) for precision in ("fp16", "fp32") for size in (1, 2, 4)]
    works = list_tasks(plan_of(cells), 2)
    assert [(work.recipe.precision, len(work.cells)) for work in works] == [
        ("fp16", 2),
        ("fp16", 1),
        ("fp32", 2),
        ("fp32", 1),
    ]


def record_of(cells, records, **changes):
    plan = plan_of(cells, ())
    rows = fill_rows(plan, {one.cell.key: one for one in records})
    status = judge_status(rows, interrupted=False, dry_run=False)
    made = SweepRecord(
        rows, ("NVIDIA H200 (GPU-0)", "NVIDIA H200 (GPU-1)"), 75.0, 90.0, dry_run=False, serialized=False
    )
    return replace(made, exit_status=int(status), **changes)


def test_every_cell_is_a_row_whatever_came_of_it():
    cells = [make_cell(batch=size) for size in (1, 2, 4)] + [
        make_cell(L4),
        make_cell(precision="int8", backend="torch-tensorrt"),
    ]
    done = make_record(cells[0])
    crashed = replace(
        make_record(cells[1], JobState.FAILED, "its process was killed by SIGKILL"), attempts=("killed before",)
    )
    spoiled = make_record(cells[2], JobState.INVALID, "other processes used the GPU: python (process 7)")
    record = record_of(cells, [done, crashed, spoiled])
    assert [row.state for row in record.rows][:4] == ["done", "failed", "invalid", "elsewhere"]
    assert record.exit_status == 4
    assert_golden(text_of(document_from_sweep(record), width=150), "sweep.txt")
    planned = replace(record, rows=fill_rows(plan_of(cells), {}), dry_run=True)
    assert_golden(text_of(document_from_sweep(planned), width=150), "sweep-dry-run.txt")


def test_a_measured_cell_says_that_its_model_takes_no_images():
    done = make_record(make_cell())
    tensors = replace(done, group=replace(done.group, load=replace(done.group.load, images=False)))
    shown = text_of(document_from_sweep(record_of([done.cell], [tensors])), width=150)
    assert "samples/s" in shown
    assert "images" not in shown
    assert tensors.cell.key == replace(tensors.cell, load=tensors.group.load).key


def test_environments_of_one_kind_that_differ_are_said():
    cells = [make_cell(batch=size) for size in (1, 2)]
    records = [make_record(cells[0]), make_record(cells[1], slot=other_environment(make_slot(1)))]
    assert "2 environments" in list_warnings(record_of(cells, records).rows)[0]
    assert H200 in list_warnings(record_of(cells, records).rows)[0]
