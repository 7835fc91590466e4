"""ONNX files such as people have them: of one name, with inputs and outputs that are no images and no logits."""

from pathlib import Path

import numpy as np

from tests.integration.conftest import optpipe

QUICK = (
    "--min-time",
    "0.2",
    "--percentile",
    "90",
    "--warm-up",
    "0.1",
    "--max-warm-up",
    "1",
    "--max-time",
    "2",
    "--json",
)


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
    nodes = [("MatMul", ["x", "w"], ["y"], {})]
    return saved(path, nodes, {"x": ("FLOAT", ["N", 8])}, {"y": ("FLOAT", ["N", 4])}, w=weights(seed))


def built(path: Path, workspace: Path, *arguments):
    options = ("--precision", "fp32", "--backend", "onnxruntime", "--device", "cpu", *arguments)
    return optpipe("build", path, *options, workspace=workspace)


def test_two_files_of_one_name_are_not_taken_for_each_other(tmp_path):
    first, second = linear(tmp_path / "a" / "net.onnx", 1), linear(tmp_path / "b" / "net.onnx", 2)
    ids = [built(each, tmp_path / "work", "--json").document["artifacts"][0]["id"] for each in (first, second)]
    for path, expected in zip((first, second), ids, strict=True):
        found = optpipe("bench", path, "--batch", "1", *QUICK, workspace=tmp_path / "work").document
        assert [each["artifact"] for each in found["measurements"]] == [expected]
    linear(first, 3)
    changed = optpipe("bench", first, "--batch", "1", *QUICK, workspace=tmp_path / "work")
    assert changed.status == 2
    assert "another content" in changed.stderr
    assert f"optpipe build {first}" in changed.stderr
