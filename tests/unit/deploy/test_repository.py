"""The configurations that are written for Triton, and the loader of a folder."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.entries import artifact_info
from tests.fakes.graphs import onnx_model

from optpipe.backends.registry import BACKENDS
from optpipe.core.card import TensorSpec
from optpipe.core.entries import VerificationInfo
from optpipe.core.errors import BadInputError
from optpipe.core.files import hash_file
from optpipe.deploy.repository import write_requests
from optpipe.deploy.triton_config import (
    TYPES,
    fill_tensors,
    find_tensor_differences,
    read_config,
    write_config,
)
from optpipe.workspace.files import write_json

pb = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="needs the extra `triton`")

names = st.text(
    st.characters(categories=["L", "N"], include_characters="_:/ \"'\n"), min_size=1, max_size=8
)
dimensions = st.lists(st.integers(-1, 512).filter(bool), max_size=4).map(tuple)
served = st.builds(TensorSpec, names, st.sampled_from(sorted(TYPES)), dimensions)
tensors = st.lists(served, min_size=1, max_size=3, unique_by=lambda each: each.name)


def config_of(inputs, outputs):
    config = pb.ModelConfig(name="net", max_batch_size=8)
    fill_tensors(config, inputs, outputs)
    return config


@given(tensors, tensors)
def test_what_is_written_is_read_back(tmp_path_factory, inputs, outputs):
    folder = tmp_path_factory.mktemp("config")
    write_config(config_of(inputs, outputs), folder)
    found = read_config(folder / "config.pbtxt")
    assert found == config_of(inputs, outputs)
    assert find_tensor_differences(found, "net", inputs, outputs) == []


@given(tensors, tensors, st.data())
def test_one_other_dtype_or_shape_is_one_line(inputs, outputs, data):
    at = data.draw(st.integers(0, len(inputs) - 1))
    other = data.draw(st.sampled_from(["dtype", "shape"]))
    changed = list(inputs)
    if other == "dtype":
        changed[at] = replace(
            inputs[at], dtype=data.draw(st.sampled_from(sorted(set(TYPES) - {inputs[at].dtype})))
        )
    else:
        changed[at] = replace(inputs[at], shape=(*inputs[at].shape, 3))
    found = find_tensor_differences(config_of(changed, outputs), "net", inputs, outputs)
    assert len(found) == 1
    assert re.search(
        r"is TYPE_\w+ \[.*\] in config.pbtxt, TYPE_\w+ \[.*\] in the signed-off model", found[0]
    )


def test_a_missing_and_a_foreign_tensor_are_named():
    config = config_of([TensorSpec("other", "float32", (3,))], [])
    assert find_tensor_differences(config, "net", [TensorSpec("image", "float32", (3,))], []) == [
        "net: input 'image' is missing in config.pbtxt, TYPE_FP32 [3] in the signed-off model",
        "net: input 'other' is TYPE_FP32 [3] in config.pbtxt, unknown in the signed-off model",
    ]


@pytest.mark.parametrize("text", ["no protobuf at all {", "max_batch_size: many", "\x00\xff"])
def test_a_file_that_is_no_configuration_is_bad_input(tmp_path, text):
    (tmp_path / "config.pbtxt").write_text(text)
    with pytest.raises(BadInputError, match="cannot be read as a Triton model configuration"):
        read_config(tmp_path / "config.pbtxt")


def test_rows_that_were_verified_by_boxes_are_no_answers_to_requests(tmp_path):
    rows = {
        "input:x": np.zeros((4, 3)),
        "output:boxes": np.ones((4, 9, 4)),
        "output:y": np.ones((4, 2)),
    }
    np.savez(tmp_path / "reference.npz", allow_pickle=False, **rows)
    info = VerificationInfo(
        "graph",
        4,
        0.3,
        50.0,
        None,
        None,
        None,
        (),
        80,
        True,
        selected=("boxes",),
        box_agreement=0.9,
    )
    x, boxes = TensorSpec("x", "float32", (4, 3)), TensorSpec("boxes", "float32", (4, 9, 4))
    build: Any = SimpleNamespace(
        samples=SimpleNamespace(file=lambda _: tmp_path / "reference.npz"),
        card=SimpleNamespace(inputs=[x], outputs=[boxes]),
        verification=SimpleNamespace(info=info),
    )
    assert set(write_requests(build, {}, tmp_path / "requests").outputs) == {"y"}


def load_predictor(folder, inputs):
    """`predict.py` of a folder with a graph that adds its two inputs, imported as a service does."""
    shape = ["n", 4]
    onnx_model(
        [("Add", "a b", "y")], {"a": shape, "b": shape}, {"y": shape}, path=folder / "model.onnx"
    )
    runtime = {
        "provider": "CPUExecutionProvider",
        "provider_options": {},
        "threads": 1,
        "session_config": {},
        "optimization": "ORT_ENABLE_ALL",
    }
    settings = {"engine": "model.onnx", "inputs": inputs, "labels": [], "runtime": runtime}
    settings |= {"classifies": False, "pipeline": None}
    write_json(
        folder / "loader.json",
        settings | {"sha256": {"model.onnx": hash_file(folder / "model.onnx")}},
    )
    loader = BACKENDS["onnxruntime"].serving(artifact_info(), {}, "").loader
    shutil.copy(loader, folder / "predict.py")
    return import_predictor(folder)


def import_predictor(folder):
    spec = spec_from_file_location("predict", folder / "predict.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_loader_of_a_folder_takes_what_the_engine_was_built_for_and_names_anything_else(
    tmp_path,
):
    spec = {"dtype": "float32", "min": [1, 4], "max": [8, 4], "batch": 0}
    predict = load_predictor(tmp_path, {"a": spec, "b": spec})
    good = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(predict.infer({"a": good, "b": good})["y"], 2 * good)
    for bad, says in (
        (np.ones((9, 4), np.float32), r"shape \[9, 4\]; the engine takes \[1, 4\] to \[8, 4\]"),
        (np.ones((2, 4)), "is float64; the model takes float32"),
        (np.ones((2, 5), np.float32), r"shape \[2, 5\]"),
        (np.ones(4, np.float32), r"shape \[4\]"),
        (np.ones((3, 4), np.float32), "different batch sizes"),
    ):
        with pytest.raises(ValueError, match=says):
            predict.infer({"a": good, "b": bad})
    with pytest.raises(ValueError, match=r"the inputs are \['a'\]; the model takes \['a', 'b'\]"):
        predict.infer({"a": good})
    with pytest.raises(ValueError, match="call infer"):
        predict.predict([b"image"])
    for arguments, says in ((["none.jpg"], "No such file"), ([], "call infer")):
        words = [sys.executable, tmp_path / "predict.py", *arguments]
        ran = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (ran.returncode, says in ran.stderr, "Traceback" in ran.stderr) == (1, True, False)
    with (tmp_path / "model.onnx").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(RuntimeError, match="is not the signed-off file"):
        import_predictor(tmp_path)
