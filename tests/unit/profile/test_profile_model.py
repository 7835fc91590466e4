"""What the jobs of a profile share."""

import json

import numpy as np

from optpipe.build.records import BuiltArtifact
from optpipe.core.card import ModelCard, Task
from optpipe.core.tensors import InputSpec
from optpipe.profile import profile_model
from optpipe.profile.record import ProfilePlan, make_worker_job
from optpipe.trace.ranges import Stage
from optpipe.workspace.file_names import CARD


def test_the_verified_inputs_are_read_once_for_all_batch_sizes_and_lengths(workspace, tmp_path, monkeypatch):
    tokens = InputSpec("input_ids", "int64", (1, 4), (8, 16), (64, 32))
    card = ModelCard("texts", "hf:texts", Task.EMBEDDING, (tokens,))
    entry = workspace.artifact("fp32")
    model = workspace.store.find(entry.manifest.parents[0])
    model.file(CARD).write_text(json.dumps(card.to_dict()))
    reads = []

    def read(model, store):
        reads.append(model.id)
        return card, {"input_ids": np.arange(24).reshape(3, 8)}

    monkeypatch.setattr(profile_model, "read_profiled_rows", read)
    for lengths, expected in (None, (8, 8)), ((4, 32), (4, 4, 32, 32)):
        reads.clear()
        plan = ProfilePlan("cpu", stages=(Stage.INFERENCE,), batch_sizes=(1, 4), lengths=lengths)
        found = []
        for job in profile_model._list_jobs(plan, [BuiltArtifact(entry, None, None)], card, model, workspace.store):
            worker = make_worker_job(job, plan, tmp_path)
            assert job.stages[0].subject.sha256 == entry.sha256("model.onnx")
            found.append(np.load(worker.inputs)["input_ids"].shape[1])
        assert tuple(found) == expected
        assert reads == [model.id]
