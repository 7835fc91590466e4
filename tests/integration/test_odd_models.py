"""ONNX files such as people have them: of one name, with inputs and outputs that are no images and no logits."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.integration.conftest import optpipe

QUICK = (
    "--processes",
    "1",
    "--min-time",
    "0.2",
    "--percentile",
    "90",
    "--set",
    "warm-up=0.1",
    "--set",
    "max-warm-up=1",
    "--max-time",
    "2",
    "--json",
)

Node = tuple[str, list[str], list[str], dict[str, Any]]


def saved(path: Path, nodes, inputs, outputs, **constants) -> Path:
    """An ONNX file; nodes as (operator, inputs, outputs, attributes), values as name → (type, shape)."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    def values(described):
        return [
            helper.make_tensor_value_info(name, getattr(TensorProto, kind), shape)
            for name, (kind, shape) in described.items()
        ]

    made = [helper.make_node(kind, given, found, **attributes) for kind, given, found, attributes in nodes]
    weights = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(made, path.stem, values(inputs), values(outputs), weights)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def weights(seed=0):
    return np.random.default_rng(seed).standard_normal((8, 4)).astype(np.float32)


def linear(path: Path, seed=0) -> Path:
    nodes: list[Node] = [("MatMul", ["x", "w"], ["y"], {})]
    return saved(path, nodes, {"x": ("FLOAT", ["N", 8])}, {"y": ("FLOAT", ["N", 4])}, w=weights(seed))


def built(path: Path | str, workspace: Path, *arguments):
    options = ("--precision", "fp32", "--backend", "onnxruntime", "--device", "cpu", *arguments)
    return optpipe("build", path, *options, workspace=workspace)


def with_external_data(path: Path) -> Path:
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="net.bin", size_threshold=0)
    return path


def behind_a_card(path: Path) -> Path:
    card = path.with_name("twin.toml")
    card.write_text('name = "twin"\nsource = "net.onnx"\n', encoding="utf-8")
    return card


@pytest.mark.parametrize("give", [lambda path: path, with_external_data, behind_a_card])
def test_two_files_of_one_name_are_not_taken_for_each_other(tmp_path, give):
    given = [give(linear(tmp_path / name / "net.onnx", seed)) for name, seed in (("a", 1), ("b", 2))]
    ids = [built(each, tmp_path / "work", "--json").document["artifacts"][0]["id"] for each in given]
    for path, expected in zip(given, ids, strict=True):
        found = optpipe("bench", path, "--batch", "1", *QUICK, workspace=tmp_path / "work").document
        assert [each["subject"]["artifact"] for each in found["measurements"]] == [expected]
    first = give(linear(tmp_path / "a" / "net.onnx", 3))
    changed = optpipe("bench", first, "--batch", "1", *QUICK, workspace=tmp_path / "work")
    assert changed.status == 2
    assert "a different file" in changed.stderr
    assert f"optpipe build {first}" in changed.stderr


X, Y = {"x": ("FLOAT", ["N", 8])}, {"y": ("FLOAT", ["N", 4])}
THROUGH: Node = ("MatMul", ["x", "w"], ["z"], {})
REFUSED = {
    "one value for a batch": (
        [THROUGH, ("ReduceMean", ["z"], ["y"], {"keepdims": 0})],
        {"y": ("FLOAT", [])},
        "output 'y' is a single value for a whole batch",
    ),
    "a size that depends on the data": (
        [THROUGH, ("Greater", ["z", "zero"], ["g"], {}), ("NonZero", ["g"], ["y"], {})],
        {"y": ("INT64", [2, "K"])},
        "output 'y' is (",
    ),
    "no numbers": (
        [THROUGH, ("Sub", ["z", "z"], ["n"], {}), ("Div", ["n", "n"], ["y"], {})],
        Y,
        "produces NaN or Inf in output 'y'",
    ),
    "infinite": (
        [THROUGH, ("Exp", ["z"], ["e"], {}), ("Div", ["e", "zero"], ["y"], {})],
        Y,
        "produces NaN or Inf in output 'y'",
    ),
    "drawn at random": (
        [THROUGH, ("RandomNormalLike", ["z"], ["r"], {}), ("Add", ["z", "r"], ["y"], {})],
        Y,
        "is not deterministic (output 'y')",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_input_by_input_is_said_of_the_model(tmp_path, case):
    nodes, outputs, words = REFUSED[case]
    path = saved(tmp_path / "net.onnx", nodes, X, outputs, w=weights(), zero=np.zeros((), np.float32))
    ran = built(path, tmp_path / "work")
    assert ran.status in (1, 2)
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr
    assert "Warning" not in ran.stderr


def test_a_batch_that_the_file_itself_does_not_take_is_no_question_of_building(tmp_path):
    path = saved(
        tmp_path / "net.onnx", [("MatMul", ["x", "w"], ["y"], {})], {"x": ("FLOAT", [4, 8])}, {"y": ("FLOAT", [4, 4])},
        w=weights(),
    )  # fmt: skip
    assert built(path, tmp_path / "work").status == 0
    ran = optpipe("bench", path, "--batch", "2", *QUICK, workspace=tmp_path / "work")
    assert ran.status == 2
    assert "the ONNX file has a fixed batch size of 4; give --batch 4" in ran.stderr
    measured = optpipe("bench", path, "--batch", "4", *QUICK, workspace=tmp_path / "work").document["measurements"]
    assert [each["load"]["batch_size"] for each in measured] == [4]


MEASURED = {
    "several inputs": (
        [("Add", ["x", "b"], ["s"], {}), ("MatMul", ["s", "w"], ["y"], {})],
        {**X, "b": ("FLOAT", ["N", 8])},
        Y,
    ),
    "bytes in": ([("Cast", ["x"], ["f"], {"to": 1}), ("MatMul", ["f", "w"], ["y"], {})], {"x": ("UINT8", ["N", 8])}, Y),
    "identifiers in": (
        [("Gather", ["w", "x"], ["e"], {}), ("ReduceMax", ["e"], ["y"], {"axes": [1], "keepdims": 0})],
        {"x": ("INT64", ["N", 5])},
        Y,
    ),
    "classes out": (
        [THROUGH, ("ArgMax", ["z"], ["y"], {"axis": 1, "keepdims": 0})],
        X,
        {"y": ("INT64", ["N"])},
    ),
}


@pytest.mark.parametrize("case", MEASURED)
def test_inputs_and_outputs_that_are_no_images_and_no_logits_are_measured_and_checked(tmp_path, case):
    nodes, inputs, outputs = MEASURED[case]
    path = saved(tmp_path / "net.onnx", nodes, inputs, outputs, w=weights())
    assert built(path, tmp_path / "work", "--batch", "1:2:4").status == 0
    found = optpipe("bench", path, "--batch", "4", *QUICK, workspace=tmp_path / "work").document["measurements"][0]
    assert found["output_check"]["passed"]
    assert "source model" in found["output_check"]["reference"]
    assert found["inputs"]["kind"] == "synthetic"
    assert not found["load"]["images"]


DEPENDS_ON_THE_BATCH = """import torch

INPUTS = [{"name": "x", "dtype": "float32", "min": [1, 8], "opt": [4, 8], "max": [16, 8]}]


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 10)

    def forward(self, x):
        y = self.layer(x)
        if x.shape[0] == 1:
            BRANCH
        return y


def make():
    return Branches()
"""


@pytest.mark.parametrize(
    ("branch", "said"),
    [
        ("y = y * 2", "gives other outputs at batch size 1: "),
        ("y = y.squeeze()", "is (10,), not (1, 10)"),
        ("raise ValueError('one is not enough')", "does not run at batch size 1: one is not enough"),
    ],
)
def test_a_module_that_depends_on_the_batch_size_is_refused_and_built_for_one(tmp_path, branch, said):
    file = tmp_path / "branches.py"
    file.write_text(DEPENDS_ON_THE_BATCH.replace("BRANCH", branch), encoding="utf-8")
    ran = built(f"{file}:make", tmp_path / "work")
    assert ran.status == 1
    assert said in ran.stderr
    assert ran.stderr.strip().endswith("build it for one: --batch N")
    assert built(f"{file}:make", tmp_path / "work", "--batch", "8").status == 0
