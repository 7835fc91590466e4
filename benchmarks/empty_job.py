"""An empty job for benchmarks and tests of `optpipe sweep`: it builds a few bytes and measures nothing, for OPTPIPE_EMPTY_SECONDS."""

import os
import sys
import time
from pathlib import Path

from optpipe.core.entries import ArtifactInfo, ModelInfo, WeightsRecord
from optpipe.core.events import SilentListener
from optpipe.core.precision import Precision, prove_precision
from optpipe.core.process import end_with_parent
from optpipe.core.records import json_from_record, plain_from_record, read_record
from optpipe.sweep.job import CellOutcome, JobState, Task
from optpipe.workspace.files import write_bytes
from optpipe.workspace.runs import begin_run, finish_run
from optpipe.workspace.store import Store

PROOF = prove_precision(Precision.FP32, ())


def build(task):
    store, recipe = Store(Path(task.workspace)), task.recipe
    weights = WeightsRecord("random", "0" * 64)

    def make(info):
        def fill(folder):
            (folder / "model.bin").write_bytes(recipe.model.encode() * 100)
            return info

        return fill

    listener = SilentListener()
    model = ModelInfo(recipe.model, recipe.model, weights, simplified=False, own_precision=None)
    entry, _ = store.produce(ModelInfo, {"model": recipe.model}, make(model), listener=listener)
    info = ArtifactInfo(
        recipe.model,
        recipe.model,
        recipe.backend,
        Precision.FP32,
        "cpu",
        "model.bin",
        weights,
        PROOF,
    )
    built, _ = store.produce(
        ArtifactInfo, plain_from_record(recipe), make(info), parents=(entry.id,), listener=listener
    )
    return (CellOutcome(JobState.DONE, artifact=built.id),)


def measure(task):
    found = []
    for cell in task.cells:
        run = begin_run(Path(task.workspace), "bench")
        write_bytes(run.path / "cell", cell.key.encode())
        time.sleep(float(os.environ.get("OPTPIPE_EMPTY_SECONDS", "0")))
        finish_run(run, command="empty", parents=[task.artifact])
        found.append(CellOutcome(JobState.DONE, artifact=task.artifact, run=run.name))
    return tuple(found)


if __name__ == "__main__":
    end_with_parent()
    told = read_record(Path(sys.argv[1]), Task)
    outcomes = measure(told) if told.timing else build(told)
    write_bytes(Path(sys.argv[2]), json_from_record(outcomes))
