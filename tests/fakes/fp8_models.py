"""Small transformers, as files that `FILE.py:make` names, and their FP8 graphs: linear layers, with attention between."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch

from optpipe.backends.base import BuildRequest, Device
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.precision import Precision
from optpipe.models.export.onnx_export import complete_card, onnx_from_torch, save_graph
from optpipe.models.export.source_graph import prepare_graph
from optpipe.quantize.qdq import place_qdq, qdq_from_onnx
from optpipe.quantize.ranges import TensorRange

VIT = """
import torch, torchvision
INPUTS = [{"name": "image", "dtype": "float32", "min": [1, 3, 32, 32], "opt": [4, 3, 32, 32], "max": [16, 3, 32, 32]}]
def make():
    torch.manual_seed(0)
    found = torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=64, mlp_dim=256, num_classes=32
    )
    torch.nn.init.normal_(found.heads.head.weight, std=0.1)
    return found.eval()
"""
BERT = """
import torch
from transformers import BertConfig, BertModel
INPUTS = [{"name": "input_ids", "dtype": "int64", "min": [1, 16], "opt": [4, 16], "max": [16, 16], "below": 100}]
class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        shape = BertConfig(
            vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
            max_position_embeddings=16, attn_implementation="sdpa",
        )
        self.bert = BertModel(shape, add_pooling_layer=False)
    def forward(self, input_ids):
        return self.bert(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).last_hidden_state
def make():
    return Encoder().eval()
"""


def make_request(text: str, folder: Path, device: Device = "cpu") -> BuildRequest:
    """A request for the model of `text`; its FP8 graph, with ranges of one batch, is `folder/fp8.onnx`."""
    space: dict[str, Any] = {}
    exec(text, space)
    given = space["INPUTS"][0]
    spec = InputSpec(
        given["name"],
        given["dtype"],
        *(tuple(given[each]) for each in ("min", "opt", "max")),
        batch=0,
    )
    onnx_from_torch(space["make"](), make_card(spec), folder / "model.onnx")
    model = onnx.load(folder / "model.onnx")
    placed = place_qdq(model, "fp8")
    onnx.save(
        qdq_from_onnx(model, placed, measure_ranges(model, placed.tensors, draw(spec))),
        folder / "fp8.onnx",
    )
    card = complete_card(make_card(spec), folder / "model.onnx")
    return BuildRequest(card, Precision.FP8, folder / "fp8.onnx", space["make"], device, {}, folder)


def make_card(spec: InputSpec) -> ModelCard:
    return ModelCard("small", "small.py:make", Task.OTHER, (spec,))


def export_quickly(module: torch.nn.Module, spec: InputSpec, path: Path) -> ModelCard:
    """Writes the module's ONNX graph and returns its card; torch's older exporter takes a tenth of the time."""
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            module,
            (draw(spec),),
            path,
            dynamo=False,
            input_names=[spec.name],
            dynamic_axes={spec.name: {0: "batch"}},
        )
    prepared = prepare_graph(onnx.load(path), make_card(spec), own_file=False)
    assert prepared.simplified
    save_graph(prepared.graph, path)
    return complete_card(make_card(spec), path)


def draw(spec: InputSpec, seed: int = 1) -> torch.Tensor:
    """One batch of `opt` shape."""
    generator = torch.Generator().manual_seed(seed)
    if spec.dtype == "int64":
        return torch.randint(100, spec.opt, generator=generator)
    return torch.randn(spec.opt, generator=generator)


def measure_ranges(
    model: onnx.ModelProto, tensors: tuple[str, ...], batch: torch.Tensor
) -> dict[str, TensorRange]:
    """The largest absolute value of each tensor."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    exposed.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in tensors)
    values = run_onnx(exposed, batch, tensors)
    return {
        name: TensorRange(
            max(float(np.abs(each).max()), 2.0**-17), float(each.min()), float(each.max())
        )
        for name, each in zip(tensors, values, strict=True)
    }


def run_onnx(
    model: onnx.ModelProto, batch: torch.Tensor, names: tuple[str, ...] | None = None
) -> Any:
    """Outputs of a graph as it is written: on CPUs without VNNI, ONNX Runtime's INT8 kernels saturate INT16 sums."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(
        list(names) if names else None, {session.get_inputs()[0].name: batch.numpy()}
    )
