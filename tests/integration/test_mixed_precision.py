"""FP16 within a budget on `digits`, a trained network, with a step planted in it that FP16 cannot represent, and weights beyond
its range: FP32 computes the same as before."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from optpipe.core.entries import ArtifactInfo, ModelInfo
from optpipe.core.precision import Precision
from optpipe.workspace.file_names import ONNX
from optpipe.workspace.store import Store
from tests.fakes.graphs import onnx_model
from tests.integration.conftest import optpipe, write_digits_card

if TYPE_CHECKING:
    from optpipe.workspace.entry import Entry

OFFSET = np.float32(6000)
"""Within FP16's range, where its numbers are 4 apart."""
GAIN = np.float32(1e6)


def plant(graph):
    """Adds OFFSET behind the third convolution and takes it away again; scales the fifth up by GAIN and its result down."""
    nodes, weights = list(graph.node), {each.name: each for each in graph.initializer}
    third, fifth = [node for node in nodes if node.op_type == "Conv"][2:5:2]
    for name in fifth.input[1:3]:
        weights[name].CopyFrom(
            numpy_helper.from_array(numpy_helper.to_array(weights[name]) * GAIN, name)
        )
    graph.initializer.extend(
        [numpy_helper.from_array(OFFSET, "offset"), numpy_helper.from_array(GAIN, "gain")]
    )
    for node, added in (
        (third, [("Add", "lift", "offset"), ("Sub", "lower", "offset")]),
        (fifth, [("Div", "scale", "gain")]),
    ):
        tensor = node.output[0]
        for reader in nodes:
            for position, name in enumerate(reader.input):
                if name == tensor:
                    reader.input[position] = f"{added[-1][1]}_out"
        place = nodes.index(node) + 1
        for op, name, constant in reversed(added):
            read = tensor if name == added[0][1] else f"{added[0][1]}_out"
            nodes.insert(place, helper.make_node(op, [read, constant], [f"{name}_out"], name=name))
    del graph.node[:]
    graph.node.extend(nodes)
    return fifth.name


@pytest.fixture(scope="module")
def planted(tmp_path_factory, exported) -> tuple[Path, str]:
    """A folder with the card `hard.toml`, and the layer whose weights leave FP16's range."""
    folder = tmp_path_factory.mktemp("planted")
    entry = Store(exported(folder / "source")).list_entries(ModelInfo)[0]
    model = onnx.load(entry.file(ONNX))
    wide = plant(model.graph)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, folder / "hard.onnx")
    write_digits_card(folder / "hard.toml")
    return folder, wide


def build(folder: Path, *more: str):
    return optpipe("build", "hard.toml", "--backend", "tensorrt-rtx", *more, "--json", cwd=folder)


@pytest.mark.parametrize("budget", ["0.5points", "40dB"])
def test_the_layers_that_fp16_breaks_stay_in_fp32(planted, budget) -> None:
    folder, wide = planted
    (artifact,) = (
        build(folder, "--precision", "fp16", "--budget", budget).expect(0).document["artifacts"]
    )
    mixed = artifact["mixed"]
    kept = {each["layer"]: each for each in mixed["kept"]}
    assert set(kept) == {"lift", "lower", wide, "scale"}
    assert "FP16's range" in kept[wide]["reason"]
    assert kept[wide]["macs"] > 0
    assert mixed["cost"]["drop"] <= 0.005
    assert mixed["cost"]["snr_db"] >= 40
    fp16 = artifact["precision_proof"]["share"]["macs"][
        "fp16"
    ]  # read from the engine's own network
    assert fp16 == pytest.approx(1 - kept[wide]["macs"] / mixed["total_macs"])
    shown = optpipe("store", "show", artifact["id"], cwd=folder)
    assert "lift (Add), 0 MACs: alone lowers the SNR to" in shown.stdout
    assert f"{wide} (Conv)" in shown.stdout
    info = Store(folder / ".optpipe").find(artifact["id"], ArtifactInfo).info
    assert info.precision is Precision.FP16
    assert info.precision_proof.proven


def test_without_a_budget_fp16_breaks_it(planted) -> None:
    from optpipe.core.entries import GraphInfo
    from optpipe.core.events import SilentListener
    from optpipe.quantize.calibrated_graph import load_calibration_data
    from optpipe.quantize.precision_graph import lower_to_half
    from optpipe.quantize.sensitivity import Fp32Reference

    folder, _ = planted
    assert build(folder, "--precision", "fp16").status == 0
    store = Store(folder / ".optpipe")
    (model,) = store.list_entries(ModelInfo)
    graph: Entry[GraphInfo] = next(
        each for each in store.list_entries(GraphInfo) if each.info.mixed is None
    )
    samples = load_calibration_data(model, None, None, 0, SilentListener())[0]
    layers, lower = lower_to_half(model, graph).load()
    cost = Fp32Reference(model, samples).measure_cost(lower(layers))
    assert cost.drop > 0.1


def test_a_budget_that_leaves_no_layer_in_int8_says_which_one_does(exported, tmp_path) -> None:
    command = (
        "build",
        "digits",
        "--precision",
        "int8",
        "--backend",
        "onnxruntime",
        "--device",
        "cpu",
        "--json",
    )
    exported(tmp_path / ".optpipe")
    failed = optpipe(*command, "--budget", "199dB", cwd=tmp_path).expect(1)
    (reason,) = [each["reason"] for each in failed.document["failed"]]
    assert reason.startswith(
        "--budget 199dB leaves no layer in int8: in all 16 layers it has an SNR of "
    )
    looser = reason.rpartition("such as ")[2].split()
    assert optpipe(*command, *looser, cwd=tmp_path).status == 0


def test_points_of_a_model_without_a_task_are_refused_before_the_export(tmp_path, product) -> None:
    ran = optpipe(
        "build", product, "--precision", "fp16", "--budget", "0.5points", cwd=tmp_path
    ).expect(2)
    assert "cannot be evaluated (task: other)" in ran.stderr
    assert "--budget 30dB" in ran.stderr
    assert not list(tmp_path.glob(".optpipe/store/*"))


def test_a_floor_of_the_snr_needs_no_task(tmp_path, product) -> None:
    np.savez(
        tmp_path / "tensors.npz",
        x=np.random.default_rng(0).standard_normal((16, 8, 32)).astype(np.float32),
    )
    ran = optpipe(
        "build",
        product,
        "--precision",
        "fp16",
        "--budget",
        "60dB",
        "--backend",
        "tensorrt-rtx",
        "--calibration",
        "tensors.npz",
        "--json",
        cwd=tmp_path,
    )
    assert ran.status in (0, 1), ran.stderr
    mixed = ran.document["artifacts"][0]["mixed"]
    assert mixed["metric"] == "snr"
    assert {each["op"] for each in mixed["kept"]} >= {"ReduceMean"}
    assert mixed["cost"]["snr_db"] >= 60


@pytest.fixture
def product(tmp_path: Path) -> Path:
    """A projection, then a normalization whose sum of squares overflows FP16."""
    rng = np.random.default_rng(1)
    weights = {
        "w": rng.standard_normal((32, 32)).astype(np.float32) * 30,
        "two": np.float32(2),
        "tiny": np.float32(1e-5),
    }
    nodes = [
        ("MatMul", "x w", "p"),
        ("Pow", "p two", "squares"),
        ("ReduceMean", "squares", "mean", {"axes": [-1]}),
        ("Add", "mean tiny", "safe"),
        ("Sqrt", "safe", "root"),
        ("Div", "p root", "y"),
    ]
    path = tmp_path / "norm.onnx"
    onnx_model(nodes, {"x": ["n", 8, 32]}, {"y": ["n", 8, 32]}, path=path, **weights)
    return path
