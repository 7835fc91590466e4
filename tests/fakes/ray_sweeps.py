"""Sweeps on a cluster of `ray_nodes`, by default of empty jobs."""

import sys
from collections import Counter
from pathlib import Path

from tests.fakes.sweeps import Watcher

from optpipe.sweep.job import Matrix, SweepOptions
from optpipe.sweep.ledger import read_jobs
from optpipe.sweep.matrix import cells_from_matrix
from optpipe.sweep.plan import list_tasks, plan_sweep
from optpipe.sweep.sweep import Scheduler, run_sweep
from optpipe.workspace.entry import load_run
from optpipe.workspace.store import Store

EMPTY = (sys.executable, str(Path(__file__).parents[2] / "benchmarks" / "empty_job.py"))
KINDS = ("cpu-a", "cpu-b")


def sweep(
    workspace,
    batches,
    kinds=KINDS,
    program=EMPTY,
    limits=None,
    models=("m",),
    watch=None,
    shared=None,
    selectors=None,
):
    """The rows of a sweep on the cluster; `watch` is called as each job ends."""
    from optpipe.sweep.cluster import RayExecutor, list_cluster_slots

    matrix = Matrix(
        models=models,
        precisions=("fp32",),
        backends=("onnxruntime",),
        batches=batches,
        gpus=kinds,
        processes=1,
        min_seconds=0.3,
        warm_up_seconds=0.1,
        max_warm_up_seconds=1.0,
        max_seconds=4.0,
        percentile=90.0,
        max_cv=5.0,
    )
    slots = list_cluster_slots(selectors or {})
    options, store = (
        limits or SweepOptions(task_s=120, lock_s=300, retries=3, pending_s=300),
        Store(workspace),
    )
    executor = RayExecutor(slots, store, options, shared, selectors or {}, program)
    return run_sweep(
        cells_from_matrix(matrix, kinds), slots, options, store, Watcher(watch), executor
    )


def run_cells(cells, slots, workspace, executor, options=None):
    """The records of the cells' jobs, in the order in which they ended."""
    tasks, found = list_tasks(plan_sweep(cells, slots, {}), 1), []
    assert Scheduler(slots, options or SweepOptions(), workspace, executor, found.append).run(tasks)
    return found


def assert_each_once(workspace, record, count):
    """Every cell is done, has one record that counts, and its run is here, whole."""
    assert Counter(row.state for row in record.rows) == {"done": count}
    assert len({row.run for row in record.rows}) == count
    for row in record.rows:
        assert load_run(workspace / "runs" / row.run).find_problems() == []
    finished = [one for records in read_jobs(workspace).values() for one in records if one.finished]
    assert sorted(one.cell.key for one in finished) == sorted(row.cell.key for row in record.rows)
