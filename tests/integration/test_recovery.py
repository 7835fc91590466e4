"""Accuracy in INT8, from the command line: checkpoints with their own ranges, and recovery without labels."""

import json

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.integration.conftest import optpipe
from tests.unit.quantize.test_given_pairs import make_checkpoint

pytestmark = pytest.mark.slow


def build(place, *arguments):
    return optpipe(
        "build", *arguments, "--backend", "onnxruntime", "--device", "cpu", "--json", cwd=place
    )


def test_a_checkpoint_keeps_its_ranges(tmp_path) -> None:
    onnx.save(make_checkpoint(), tmp_path / "qat.onnx")
    ran = build(tmp_path, "qat.onnx", "--precision", "int8")
    ran.expect(0)
    (made,) = json.loads(ran.stdout)["artifacts"]
    assert made["ranges"].startswith(
        "2 ranges of activations and 2 quantized weights are the file's"
    )
    assert made["precision_proof"]["share"]["macs"]["int8"] > 0.4
    assert made["parity"]["snr_db"] is None or made["parity"]["snr_db"] > 40


def test_a_range_of_nan_is_refused_before_anything_runs(tmp_path) -> None:
    model = make_checkpoint()
    held = next(each for each in model.graph.initializer if each.name == "s")
    held.CopyFrom(numpy_helper.from_array(np.float32(np.nan), "s"))
    onnx.save(model, tmp_path / "qat.onnx")
    ran = build(tmp_path, "qat.onnx", "--precision", "int8")
    ran.expect(2)
    assert "NaN" in ran.stderr
    assert not list((tmp_path / ".optpipe").glob("*/graph-*"))


def test_each_step_has_a_row_and_the_reference_is_the_model(tmp_path) -> None:
    ran = build(tmp_path, "pairs", "--precision", "int8", "--recover", "auto")
    ran.expect(0)
    (made,) = json.loads(ran.stdout)["artifacts"]
    steps = {each["name"]: each for each in made["recovery"]}
    assert [*steps] == ["ranges", "equalize", "smoothquant", "rounding", "bias"]
    assert steps["ranges"]["kept"]
    for step in made["recovery"][1:]:
        assert step["kept"] == (step["gain_ci"] is not None and step["gain_ci"][0] > 0)
    assert made["parity"]["passed"]
    again = json.loads(build(tmp_path, "pairs", "--precision", "int8", "--recover", "auto").stdout)
    assert again["artifacts"][0]["id"] == made["id"]


def test_too_few_samples_to_hold_any_out_are_refused(tmp_path) -> None:
    onnx.save(make_float_model(), tmp_path / "net.onnx")
    np.savez(
        tmp_path / "few.npz",
        x=np.random.default_rng(0).standard_normal((12, 8, 6, 6)).astype(np.float32),
    )
    ran = build(
        tmp_path, "net.onnx", "--precision", "int8", "--recover", "auto", "--calibration", "few.npz"
    )
    assert ran.status != 0
    assert "12 are too few" in ran.stdout + ran.stderr


def make_float_model():
    """The checkpoint without its pairs."""
    from optpipe.backends.onnx_graph import name_nodes
    from tests.fakes.graphs import onnx_model

    weight = np.random.default_rng(0).standard_normal((8, 8, 3, 3)).astype(np.float32)
    return name_nodes(
        onnx_model(
            [("Conv", "x w", "y", {"pads": [1, 1, 1, 1]})],
            {"x": ["n", 8, 6, 6]},
            {"y": ["n", 8, 6, 6]},
            opset=19,
            w=weight,
        )
    )
