"""Sweeps on a cluster of `ray_nodes`, by default of empty jobs."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from optpipe.core.events import SilentListener
from optpipe.sweep.job import Matrix, SweepOptions
from optpipe.sweep.ledger import read_jobs
from optpipe.sweep.matrix import cells_from_matrix
from optpipe.sweep.sweep import run_sweep
from optpipe.workspace.entry import load_run
from optpipe.workspace.store import Store

EMPTY = (sys.executable, str(Path(__file__).parents[2] / "benchmarks" / "empty_job.py"))
KINDS = ("cpu-a", "cpu-b")


def sweep(
    workspace, batches, kinds=KINDS, program=EMPTY, limits=None, models=("m",), watch=None, shared=None, selectors=()
):
    """The rows of a sweep on the cluster; `watch` is called with each record."""
    from optpipe.sweep.cluster import list_cluster_slots, run_on_ray

    matrix = Matrix(
        models=models, precisions=("fp32",), backends=("onnxruntime",), batches=batches, gpus=kinds, processes=1,
        min_seconds=0.3, warm_up_seconds=0.1, max_warm_up_seconds=1.0, max_seconds=4.0, percentile=90.0, max_cv=5.0,
    )  # fmt: skip
    slots = list_cluster_slots(selectors)
    cells = cells_from_matrix(matrix, kinds)

    def execute(works, slots, setting, report):
        def told(record):
            report(record)
            if watch is not None:
                watch(record)

        return run_on_ray(works, slots, replace(setting, program=program), told, shared, selectors)

    options = limits or SweepOptions(task_s=120, lock_s=300, retries=3, pending_s=300)
    return run_sweep(cells, slots, options, Store(workspace), SilentListener(), execute)


def assert_each_once(workspace, record, count):
    """Every cell is done, has one record that counts, and its run is here, whole."""
    assert Counter(row.state for row in record.rows) == {"done": count}
    assert len({row.run for row in record.rows}) == count
    for row in record.rows:
        assert load_run(workspace / "runs" / row.run).find_problems() == []
    finished = [one for records in read_jobs(workspace).values() for one in records if one.finished]
    assert sorted(one.cell.key for one in finished) == sorted(row.cell.key for row in record.rows)
