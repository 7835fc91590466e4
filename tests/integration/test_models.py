from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from tests.fakes.graphs import onnx_model
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

    weight = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    inputs = {name: ["n", 64] for name in ("left", "right")}
    model = onnx_model([("Add", "left right", "sum"), ("MatMul", "sum w", "out")], inputs, {"out": ["n", 32]}, w=weight)
    onnx.save(model, tmp_path / "two.onnx", save_as_external_data=True, location="two.bin", size_threshold=0)
    ran = run("build", "two.onnx", "--precision", "fp32", "--json")
    assert ran.status == 0, ran.stderr
    (tmp_path / "two.bin").unlink()
    missing = run("build", "two.onnx", "--precision", "fp32")
    assert missing.status == 2
    assert "external data" in missing.stderr


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
