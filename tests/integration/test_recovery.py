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
    assert [*steps] == ["ranges", "equalize", "smoothquant", "rounding", "bias", "distill"]
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


def test_a_dossier_of_a_recovered_build_is_recomputed(tmp_path) -> None:
    """Its graph has the recipe of a recovery, and the weights of its model."""
    onnx.save(make_float_model(layers=3), tmp_path / "net.onnx")
    random = np.random.default_rng(1)
    data = random.standard_normal((128, 8, 6, 6)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=data)
    (tmp_path / "policy.toml").write_text(POLICY, encoding="utf-8")
    words = ("--precision", "int8", "--calibration", "data.npz", "--data", "data.npz")
    ran = build(tmp_path, "net.onnx", *words, "--recover", "equalize")
    ran.expect(0)
    steps = {each["name"]: each["kept"] for each in ran.document["artifacts"][0]["recovery"]}
    assert steps["equalize"]
    signed = optpipe(
        "signoff", "net.onnx", "--policy", "policy.toml", "--output", "dossier", cwd=tmp_path
    )
    assert signed.status == 5, signed.stderr  # nothing is measured
    verified = optpipe("verify", "dossier", "--json", cwd=tmp_path)
    assert verified.status == 5, verified.stderr
    assert verified.document["intact"]


POLICY = """
schema = 1
name = "recovered"

[build]
backend = "onnxruntime"
precision = "int8"

[precision]
int8 = "50%"

[size]
maximum = "1 MiB"
"""


def make_float_model(layers=1):
    """Convolutions with a Relu between two; the channels of all but the last differ in size by orders of magnitude."""
    from optpipe.backends.onnx_graph import name_nodes
    from tests.fakes.graphs import onnx_model

    random, weights = np.random.default_rng(0), {}
    nodes: list[tuple] = []
    last = "x"
    for layer in range(layers):
        size = np.exp(random.normal(0, 2, (8, 1, 1, 1))) if layer < layers - 1 else 1.0
        weights[f"w{layer}"] = (random.standard_normal((8, 8, 3, 3)) * size).astype(np.float32)
        nodes.append(("Conv", f"{last} w{layer}", f"c{layer}", {"pads": [1, 1, 1, 1]}))
        last = f"c{layer}"
        if layer < layers - 1:
            nodes.append(("Relu", last, f"r{layer}"))
            last = f"r{layer}"
    nodes.append(("Identity", last, "y"))
    sizes = {"x": ["n", 8, 6, 6]}, {"y": ["n", 8, 6, 6]}
    return name_nodes(onnx_model(nodes, *sizes, opset=19, **weights))
