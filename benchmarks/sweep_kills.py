"""Kills tasks, Ray workers, nodes and drivers of a sweep with SIGKILL and counts what is lost or doubled.

usage: sweep_kills.py FOLDER [KILLS]     50 by default; three Ray nodes on this machine, empty jobs of 0.4 s
At the end all workspaces are merged in two orders, which have to give the same store.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fakes.ray_nodes import add_node, list_tasks, start_cluster

from optpipe.core.events import SilentListener
from optpipe.core.files import hash_file
from optpipe.sweep.cluster import RayExecutor, connect, list_cluster_slots
from optpipe.sweep.job import Matrix, SweepOptions
from optpipe.sweep.ledger import merge_workspaces, read_jobs
from optpipe.sweep.matrix import cells_from_matrix
from optpipe.sweep.sweep import run_sweep
from optpipe.workspace.entry import load_run
from optpipe.workspace.store import Store

PROGRAM = (sys.executable, str(Path(__file__).with_name("empty_job.py")))
KINDS = ("cpu-a", "cpu-b")
BATCHES = tuple(range(1, 7))


def drive(workspace, batches=6):
    """One sweep of so many batch sizes on both kinds, resumed where an earlier driver was killed."""
    connect()
    sizes = BATCHES[: int(batches)]
    matrix = Matrix(models=("m",), precisions=("fp32",), backends=("onnxruntime",), batches=sizes)
    options, slots, store = (
        SweepOptions(task_s=60, lock_s=120, retries=10, pending_s=120),
        list_cluster_slots(),
        Store(workspace),
    )
    executor = RayExecutor(slots, store, options, program=PROGRAM)
    record = run_sweep(
        cells_from_matrix(matrix, KINDS), slots, options, store, SilentListener(), executor
    )
    print(json.dumps(Counter(row.state for row in record.rows)))


def kill(what, driver, cluster, nodes):
    """Kills one; False where there is none just now."""
    if what == "driver":
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        return True
    if what == "node":
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        nodes.append(add_node(cluster, "cpu-b"))
        return True
    for child, worker in list_tasks(PROGRAM[1]).items():
        with suppress(ProcessLookupError):
            os.kill(child if what == "child" else worker, signal.SIGKILL)
            return True
    return False


def check(workspace):
    """Lost and doubled jobs of a finished workspace."""
    finished = [one for tries in read_jobs(workspace).values() for one in tries if one.finished]
    keys = Counter(one.cell.key for one in finished)
    broken = [one.run for one in finished if load_run(workspace / "runs" / one.run).find_problems()]
    doubled = (
        sum(count > 1 for count in keys.values())
        + len(finished)
        - len({one.run for one in finished})
    )
    return len(KINDS) * len(BATCHES) - len(keys) + len(broken), doubled


def hash_merged(sources, target):
    """The files of the workspaces merged in the given order, with their hashes."""
    merge_workspaces(sources, Store(target), SilentListener())
    kept = (
        path for folder in ("store", "runs", "conflicts") for path in (target / folder).rglob("*")
    )
    return {str(path.relative_to(target)): hash_file(path) for path in kept if path.is_file()}


def main():
    folder, wanted = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 50
    os.environ["OPTPIPE_EMPTY_SECONDS"] = "0.4"
    folder.mkdir(parents=True, exist_ok=True)
    cluster, nodes = start_cluster()
    draw, killed, sweeps, lost, doubled = random.Random(7), Counter(), 0, 0, 0
    started = time.monotonic()
    while killed.total() < wanted:
        workspace = folder / f"w{sweeps}"
        rounds = 0
        while True:
            command = [sys.executable, __file__, "drive", str(workspace)]
            with (folder / "driver.log").open("ab") as log:
                driver = subprocess.Popen(command, stdout=log, stderr=log)
            while driver.poll() is None:
                time.sleep(draw.uniform(0.5, 4))
                what = draw.choice(["child", "worker", "child", "worker", "driver", "node"])
                rounds += 1
                if rounds < 12 and driver.poll() is None and kill(what, driver, cluster, nodes):
                    killed[what] += 1
            if driver.returncode == 0:
                break
        missing, twice = check(workspace)
        lost, doubled, sweeps = lost + missing, doubled + twice, sweeps + 1
        print(f"sweep {sweeps}: killed {dict(killed)}, lost {lost}, doubled {doubled}", flush=True)
    seconds = time.monotonic() - started
    print(
        f"{killed.total()} kills {dict(killed)} in {sweeps} sweeps, {seconds:.0f} s: {lost} lost, {doubled} doubled"
    )
    sources = [folder / f"w{at}" for at in range(sweeps)]
    forward, backward = (
        hash_merged(sources, folder / "forward"),
        hash_merged(sources[::-1], folder / "backward"),
    )
    print(
        f"merged in two orders: {len(forward)} files, {'the same' if forward == backward else 'not the same'}"
    )
    cluster.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "drive":
        drive(Path(sys.argv[2]), *sys.argv[3:])
    else:
        main()
