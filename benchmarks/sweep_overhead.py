"""What `optpipe sweep` itself costs: usage sweep_overhead.py FOLDER [JOBS]   (10,000 jobs by default, no GPU)

Planning, records, table and merging are measured with all JOBS; what a task costs (a process of its own, locks, watch) with 20 empty
jobs. Then all JOBS are run as empty jobs, 500 to a process, as two shards that are merged with their runs; and 20 on a Ray cluster of
three nodes, for what the driver takes.
"""

import json
import os
import resource
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fakes.ray_nodes import start_cluster

from optpipe.core.entries import Environment
from optpipe.core.events import SilentListener
from optpipe.core.load import LoadSpec
from optpipe.core.measurement import Subject
from optpipe.core.measurement_group import MeasurementGroup
from optpipe.sweep.cluster import RayExecutor, connect, list_cluster_slots
from optpipe.sweep.job import JobRecord, JobState, Matrix, SweepOptions, compute_job_key
from optpipe.sweep.ledger import merge_workspaces, read_jobs, write_job
from optpipe.sweep.local import LocalExecutor
from optpipe.sweep.matrix import cells_from_matrix
from optpipe.sweep.plan import fill_rows, list_tasks, plan_sweep
from optpipe.sweep.slots import Slot, list_slots
from optpipe.sweep.sweep import Scheduler, run_sweep
from optpipe.workspace.files import measure_folder_bytes
from optpipe.workspace.store import Store

EMPTY = (sys.executable, str(Path(__file__).with_name("empty_job.py")))
TASKS = 20
LOADS = 500


def timed(name, work, found):
    started, cpu = time.monotonic(), time.process_time()
    result = work()
    found[name] = {
        "s": round(time.monotonic() - started, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
    }
    print(f"{name}: {found[name]['s']} s, {found[name]['cpu_s']} s of processor", flush=True)
    return result


def run_shards(folder, cells, found):
    """Two sweeps of half the jobs each, and the union of their workspaces."""
    options, mine, shards = (
        SweepOptions(loads_per_process=LOADS),
        list_slots()[-1:],
        (folder / "1", folder / "2"),
    )
    for at, shard in enumerate(shards):
        half = cells[at::2]
        given = (
            half,
            mine,
            options,
            Store(shard),
            SilentListener(),
            LocalExecutor(shard, options, EMPTY),
        )
        run = lambda given=given: run_sweep(*given)  # noqa: E731
        record = timed(f"shard {at + 1}: {len(half)} empty jobs, {LOADS} to a process", run, found)
        assert record.counts == {"done": len(half)}
    merge = lambda: merge_workspaces(shards, Store(folder / "union"), SilentListener())  # noqa: E731
    assert timed("merge with runs", merge, found).status == 0
    timed("merge with runs again", merge, found)
    jobs = read_jobs(folder / "union")
    assert len(jobs) == len({tries[0].run for tries in jobs.values()}) == len(cells)
    found["bytes per job with its run"] = measure_folder_bytes(folder / "union") // len(cells)


def run_on_cluster(folder, found):
    """Empty jobs through Ray: the driver's processor time is that of this process."""
    cluster, _ = start_cluster()
    connect()
    import ray

    slots = list_cluster_slots()
    cells = [
        replace(cell, kind=slots[at % len(slots)].kind) for at, cell in enumerate(make_cells(TASKS))
    ]
    works, done = list_tasks(plan_sweep(cells, slots, {}), 1), []
    store, options = Store(folder / "ray"), SweepOptions(pending_s=600)
    executor = RayExecutor(slots, store, options, program=EMPTY)
    run = lambda: Scheduler(slots, options, store.workspace, executor, done.append).run(works)  # noqa: E731
    timed(f"{TASKS} empty tasks on Ray, the driver", run, found)
    assert [one.state for one in done] == [JobState.DONE] * TASKS
    ray.shutdown()
    cluster.shutdown()


def make_cells(count):
    models = tuple(f"m{number}" for number in range(max(1, count // 100)))
    matrix = Matrix(
        models=models, precisions=("fp32",), backends=("onnxruntime",), batches=tuple(range(1, 101))
    )
    return cells_from_matrix(matrix, ("cpu",))[:count]


def make_records(cells, slot):
    group = MeasurementGroup(
        Subject("a" * 12, "onnxruntime", "fp32", "cpu"), LoadSpec(1), 5, ("bench",), {}
    )
    return [
        JobRecord(
            compute_job_key(cell, slot.fingerprint),
            cell,
            JobState.DONE,
            "",
            slot.environment,
            slot.fingerprint,
            "host",
            slot.name,
            1,
            "a" * 12,
            f"bench-{at}",
            replace(group, load=cell.load),
            12.0,
            "2026",
            (),
        )
        for at, cell in enumerate(cells)
    ]


def main():
    folder, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10_000
    shutil.rmtree(folder, ignore_errors=True)
    found: dict[str, object] = {"jobs": count, "cores": os.cpu_count()}
    slots = [Slot(f"GPU-{at}", "cpu", (0,), "f" * 16, Environment()) for at in range(1000)]
    cells = timed("matrix", lambda: make_cells(count), found)
    records = make_records(cells, slots[0])
    for half, part in (("a", records[::2]), ("b", records[1::2])):
        (folder / half / "store").mkdir(parents=True)
        timed(
            f"write {half}",
            lambda half=half, part=part: [write_job(folder / half, one) for one in part],
            found,
        )

    def merge():
        return merge_workspaces(
            [folder / "a", folder / "b"], Store(folder / "all"), SilentListener()
        )

    timed("merge", merge, found)
    timed("merge again", merge, found)
    stored = timed("read", lambda: read_jobs(folder / "all"), found)
    plan = timed("plan, all stored, 1,000 slots", lambda: plan_sweep(cells, slots, stored), found)
    timed("plan, none stored", lambda: list_tasks(plan_sweep(cells, slots, {}), 1), found)
    rows = timed("rows", lambda: fill_rows(plan, {}), found)
    assert len(rows) == len({row.key for row in rows}) == count
    found["bytes per record"] = measure_folder_bytes(folder / "all") // count
    found["peak MB, records alone"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    tasks, mine = make_cells(TASKS), list_slots()[-1:]
    workspace, options = folder / "tasks", SweepOptions()
    workspace.mkdir()
    done = []
    works = list_tasks(plan_sweep(tasks, mine, {}), 1)
    executor = LocalExecutor(workspace, options, EMPTY)
    run = lambda: Scheduler(mine, options, workspace, executor, done.append).run(works)  # noqa: E731
    timed(f"{TASKS} empty tasks on one slot", run, found)
    assert [one.state for one in done] == [JobState.DONE] * TASKS
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    found["CPU s per empty task, its own process"] = round(
        (children.ru_utime + children.ru_stime) / (TASKS + 1), 3
    )
    run_shards(folder, cells, found)
    run_on_cluster(folder, found)
    found["peak MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps(found, indent=1))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
