"""The nsys command, and what the jobs of a profile share."""

import json
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.entries import put_verified

from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.errors import BadInputError, MissingError, StageError
from optpipe.trace.nsys import ProfilePlan, Recording, export_recording
from optpipe.trace.record import (
    INPUTS,
    InferenceJob,
    ProfileJob,
    make_worker_job,
    read_profiled_rows,
)
from optpipe.workspace.arrays import read_arrays
from optpipe.workspace.file_names import CARD, REFERENCE


def test_an_artifact_is_profiled_on_what_it_was_verified_on(workspace):
    own, other = (workspace.artifact(precision) for precision in ("fp32", "int8"))
    store = workspace.store
    model = store.find(own.manifest.parents[0])
    model.file(CARD).write_text(json.dumps(ModelCard("digits", "d", Task.OTHER, ()).to_dict()))
    for artifact, samples in ((own, 5), (other, 3)):
        np.savez(file := BytesIO(), allow_pickle=False, **{"input:x": np.zeros((samples, 2))})
        put_verified(store, model, artifact, samples, {REFERENCE: file.getvalue()})
    assert [len(read_profiled_rows(each, store)[1]["x"]) for each in (own, other)] == [5, 3]


@pytest.mark.parametrize(("length", "batch_size"), [(None, 4), (4, 1), (32, 4)])
def test_a_profile_runs_at_its_batch_size_and_length(tmp_path, length, batch_size):
    card = ModelCard(
        "t", "hf:t", Task.EMBEDDING, (InputSpec("input_ids", "int64", (1, 4), (8, 16), (64, 32)),)
    )

    def read_written(size):
        work = InferenceJob(tmp_path, "a" * 12, "onnxruntime", "cpu", {}, size, length)
        job = ProfileJob(
            "a",
            False,
            work,
            (),
            read_rows=lambda: (card, {"input_ids": np.arange(24).reshape(3, 8)}),
        )
        make_worker_job(job, ProfilePlan(), tmp_path)
        return np.load(tmp_path / INPUTS)["input_ids"]

    assert read_written(batch_size).shape == (batch_size, length or 8)
    with pytest.raises(BadInputError, match="--batch-size 65"):
        read_written(65)


def test_a_profile_takes_inputs_of_any_name(tmp_path):
    names = ("file", "allow_pickle", "x", "x.npy", "serving/input:0")
    card = ModelCard(
        "odd",
        "odd.onnx",
        Task.OTHER,
        tuple(InputSpec(each, "float32", (1, 4), (1, 4), (1, 4)) for each in names),
    )
    rows = {each: np.full((1, 4), number, np.float32) for number, each in enumerate(names)}
    work = InferenceJob(tmp_path, "a" * 12, "onnxruntime", "cpu", {}, 1, None)
    make_worker_job(
        ProfileJob("a", False, work, (), read_rows=lambda: (card, rows)), ProfilePlan(), tmp_path
    )
    written = read_arrays(tmp_path / INPUTS)
    assert {each: values.flat[0] for each, values in written.items()} == {
        each: number for number, each in enumerate(names)
    }


@pytest.mark.parametrize(
    ("log", "error", "said"),
    [
        ("Generating...\nwrite failed: No space left on device\n", StageError, "the disk is full"),
        (
            "Collecting data...\nUnable to create a session: operation not permitted\n",
            MissingError,
            "Unable to create a session: operation not permitted",
        ),
    ],
)
def test_a_refusal_is_given_in_nsys_own_words(
    tmp_path: Path, log: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        export_recording(Recording(None, 1, log), tmp_path)
