from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from tests.integration.conftest import Ran

Run = Callable[..., Ran]
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet", "inception_v2"])
def test_third_party_onnx_files(name: str, run: Run) -> None:
    """Old IR, opset 8 or 9, weights listed as inputs; the larger ones are left to a run by hand, for their time."""
    ran = run("build", LIGHT / f"light_{name}.onnx", "--precision", "fp32", "--json")
    assert ran.status == 0, ran.stderr
    assert {each["backend"] for each in ran.document["artifacts"]} == {"tensorrt-rtx", "onnxruntime"}


def test_an_onnx_file_with_external_data_and_two_inputs(run: Run, tmp_path: Path) -> None:
    import numpy as np
    from onnx import TensorProto, helper

    left = helper.make_tensor_value_info("left", TensorProto.FLOAT, ["n", 64])
    right = helper.make_tensor_value_info("right", TensorProto.FLOAT, ["n", 64])
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", 32])
    weight = onnx.numpy_helper.from_array(np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32), "w")
    nodes = [
        helper.make_node("Add", ["left", "right"], ["sum"], name="a"),
        helper.make_node("MatMul", ["sum", "w"], ["out"], name="m"),
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [left, right], [out], [weight]), opset_imports=[helper.make_opsetid("", 17)]
    )
    onnx.save(model, tmp_path / "two.onnx", save_as_external_data=True, location="two.bin", size_threshold=0)
    ran = run("build", "two.onnx", "--precision", "fp32", "--json")
    assert ran.status == 0, ran.stderr
    (tmp_path / "two.bin").unlink()
    missing = run("build", "two.onnx", "--precision", "fp32")
    assert missing.status == 2
    assert "external data" in missing.stderr


def test_a_factory_in_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n"
        'INPUTS = [{"name": "x", "dtype": "float32", "min": [1, 8], "opt": [4, 8], "max": [16, 8]}]\n'
        "def make():\n    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU())\n"
    )
    ran = run("build", "net.py:make", "--precision", "fp32,bf16", "--backend", "tensorrt-rtx,torch", "--json")
    assert ran.status == 0, ran.stderr
    assert ran.document["weights"]["source"] == "random"
    assert len(ran.document["artifacts"]) == 4


def test_a_factory_that_is_trained_again_is_built_again(run: Run, tmp_path: Path) -> None:
    import torch

    (tmp_path / "net.py").write_text(
        "import torch\nfrom pathlib import Path\nprint('imported')\n"
        'INPUTS = [{"name": "x", "dtype": "float32", "min": [1, 8], "opt": [4, 8], "max": [16, 8]}]\n'
        "def make():\n    print('called')\n    net = torch.nn.Linear(8, 4)\n"
        "    net.load_state_dict(torch.load(Path(__file__).parent / 'net.pt'))\n    return net\n"
    )
    ids = []
    for value in (1.0, 1.0, 2.0):
        torch.save({"weight": torch.full((4, 8), value), "bias": torch.zeros(4)}, tmp_path / "net.pt")
        ran = run("build", "net.py:make", "--precision", "fp32", "--backend", "onnxruntime", "--json")
        assert ran.status == 0, ran.stderr
        assert ran.document["weights"]["source"] == "default:net.py:make"  # and nothing but the document on stdout
        ids.append(ran.document["model_id"])
    assert ids[0] == ids[1] != ids[2]
    wrong = run("build", "net.py:make", "--weights", "random", "--precision", "fp32", "--backend", "onnxruntime")
    assert (wrong.status, "depends on the seed" in wrong.stderr) == (2, True)


def test_published_weights_that_cannot_be_had(run: Run) -> None:
    """Without a network the build goes on with random weights and says so; with one it has real weights."""
    ran = run("build", "squeezenet1_1", "--precision", "fp32", "--backend", "onnxruntime", "--json")
    assert ran.status == 0, ran.stderr
    weights = ran.document["weights"]
    assert weights["trained"] == (ran.document["fallback_reason"] is None)
    assert weights["trained"] == (not any("random weights" in warning for warning in ran.document["warnings"]))


def test_timm(run: Run) -> None:
    pytest.importorskip("timm", reason="needs timm: uv sync --extra timm")
    ran = run(
        "build", "timm:resnet10t", "--weights", "random", "--precision", "fp32", "--backend", "tensorrt-rtx", "--json"
    )
    assert ran.status == 0, ran.stderr


@pytest.mark.parametrize("kind", ["image", "text"])
def test_hugging_face(kind: str, run: Run, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: uv sync --extra hf")
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "num_labels": 3,
    }
    if kind == "image":
        config = transformers.ViTConfig(**small, image_size=32, patch_size=8)
        transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "model")
        transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "model")
    else:
        config = transformers.BertConfig(**small, vocab_size=1000)
        transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    ran = run("build", "hf:model", "--precision", "fp32", "--json")
    assert ran.status == 0, ran.stderr
    assert all(each["parity"] is None or each["parity"]["passed"] for each in ran.document["artifacts"])
