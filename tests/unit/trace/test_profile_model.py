"""What the jobs of a profile share."""

import json
from functools import partial

import numpy as np

from optpipe.build.records import BuiltArtifact
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.entries import ReferenceInfo, VerificationInfo
from optpipe.core.events import SilentListener
from optpipe.trace import profile_model
from optpipe.trace.ranges import Stage
from optpipe.trace.record import ProfilePlan, make_worker_job, read_profiled_rows
from optpipe.workspace.file_names import CARD, REFERENCE


def test_the_verified_inputs_are_read_once_for_all_batch_sizes_and_lengths(workspace, tmp_path, monkeypatch):
    tokens = InputSpec("input_ids", "int64", (1, 4), (8, 16), (64, 32))
    card = ModelCard("texts", "hf:texts", Task.EMBEDDING, (tokens,))
    entry = workspace.artifact("fp32")
    model = workspace.store.find(entry.manifest.parents[0])
    model.file(CARD).write_text(json.dumps(card.to_dict()))
    reads = []

    def read(artifact, store):
        reads.append(artifact.id)
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
        assert reads == [entry.id]


def test_an_artifact_is_profiled_on_what_it_was_verified_on(workspace):
    own, other = (workspace.artifact(precision) for precision in ("fp32", "int8"))
    store = workspace.store
    model = store.find(own.manifest.parents[0])
    model.file(CARD).write_text(json.dumps(ModelCard("digits", "d", Task.OTHER, ()).to_dict()))

    def write_reference(samples, folder):
        np.savez(folder / REFERENCE, allow_pickle=False, **{"input:x": np.zeros((samples, 2))})
        return ReferenceInfo("images", samples, "0" * 64, "source model", ())

    for artifact, samples in ((own, 5), (other, 3)):
        write = partial(write_reference, samples)
        reference, _ = store.produce(
            ReferenceInfo, {"samples": samples}, write, parents=(model.id,), listener=SilentListener()
        )
        store.produce(
            VerificationInfo,
            {"of": artifact.id, "reference": reference.id},
            lambda _: VerificationInfo("source model", 8, 0.1, 61.2, None, None, None, (), 80, True),
            parents=(artifact.id, reference.id),
            listener=SilentListener(),
        )
    assert [len(read_profiled_rows(each, store)[1]["x"]) for each in (own, other)] == [5, 3]
