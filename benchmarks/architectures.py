"""Forty architectures with random weights through the library's build in FP32, FP16 and INT8, beside a bare script's SNR.

usage: architectures.py OUT.jsonl [--only NAME,NAME] [--limit SECONDS]

One network of each family of torchvision, timm and transformers, small where its family allows it. Each runs in a process of its
own, with a time limit, and adds one line of JSON for each precision to OUT; precisions whose lines are there are left out, so that
an interrupted run goes on. FP32 and INT8 are built by ONNX Runtime and run on the CPU; FP16 is built by TensorRT-RTX, which needs no
GPU to build, and its graph is run by ONNX Runtime.

Beside the build's SNR stands the one that this script computes from the same samples: torch runs the module, and ONNX Runtime the
build's graph with all optimizations off. They agree if they differ by at most 0.5 dB, or both are at least 100 dB.
"""

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

AGREE_DB = 0.5
EXACT_DB = 100.0
PRECISIONS = (("fp32", "onnxruntime"), ("int8", "onnxruntime"), ("fp16", "tensorrt-rtx"))
SAMPLES = 64
"""Three quarters calibrate INT8, and a quarter is held out for the verification."""


@dataclass(frozen=True)
class Architecture:
    """A factory's expression, and the shape of one sample by input; integers are token identifiers below `below`."""

    name: str
    library: str
    make: str
    inputs: Mapping[str, tuple[int, ...]]
    below: int = 0

    @property
    def file(self) -> str:
        """A Python file with this factory, as `optpipe build net.py:make` takes it."""
        dtype = "int64" if self.below else "float32"
        described = [
            {
                "name": name,
                "dtype": dtype,
                **{key: [size, *shape] for key, size in (("min", 1), ("opt", 2), ("max", 4))},
                **({"below": self.below} if self.below else {}),
            }
            for name, shape in self.inputs.items()
        ]
        return (
            f"import torch\nfrom torch import nn\nimport {self.library}\n\n"
            f"INPUTS = {described}\n\n\ndef make():\n    return {self.make}\n"
        )


def torchvision(name: str, side: int = 64, family: str = "", more: str = "") -> Architecture:
    backbone = ", weights_backbone=None" if family else ""
    make = f"torchvision.models.{family}{name}(weights=None{backbone}{more})"
    return Architecture(name, "torchvision", make, {"x": (3, side, side)})


def timm(name: str, side: int = 64, *, sized: bool = False) -> Architecture:
    size = f", img_size={side}" if sized else ""
    return Architecture(
        name, "timm", f"timm.create_model({name!r}, pretrained=False{size})", {"x": (3, side, side)}
    )


def transformers(name: str, model: str, config: str, options: str) -> Architecture:
    make = f"transformers.{model}(transformers.{config}({options}))"
    return Architecture(name, "transformers", make, {"input_ids": (16,)}, below=100)


def waves(name: str, model: str, config: str, options: str, *shape: int) -> Architecture:
    make = f"transformers.{model}(transformers.{config}({options}))"
    return Architecture(name, "transformers", make, {"x": shape})


SMALL = "vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4"
ROTARY = f"{SMALL}, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2"
DISTILBERT = "vocab_size=100, dim=64, hidden_dim=128, n_layers=2, n_heads=4"
GPT2 = (
    "vocab_size=100, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2"
)
T5 = "vocab_size=100, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4"
SEGFORMER = "hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], decoder_hidden_size=64"
WAV2VEC2 = (
    "vocab_size=40, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, "
    "conv_dim=(32,) * 7"
)
ARCHITECTURES = (
    torchvision("resnet18"),
    torchvision("vgg11_bn", 32),
    torchvision("densenet121"),
    torchvision("googlenet"),
    torchvision("squeezenet1_1"),
    torchvision("mobilenet_v3_small"),
    torchvision("shufflenet_v2_x0_5"),
    torchvision("mnasnet0_5"),
    torchvision("efficientnet_b0"),
    torchvision("regnet_y_400mf"),
    torchvision("convnext_tiny"),
    torchvision("swin_v2_t"),
    torchvision("vit_b_32", 64, more=", image_size=64"),
    torchvision("lraspp_mobilenet_v3_large", family="segmentation."),
    torchvision("deeplabv3_mobilenet_v3_large", family="segmentation."),
    timm("convmixer_768_32", 28),
    timm("ghostnet_100"),
    timm("hrnet_w18_small"),
    timm("mobileone_s0"),
    timm("repvgg_a0"),
    timm("resmlp_12_224", 224),
    timm("mixer_s32_224", 224),
    timm("poolformer_s12"),
    timm("efficientvit_b0"),
    timm("edgenext_xx_small"),
    timm("levit_128s", 224),
    timm("xcit_nano_12_p16_224", 224),
    timm("nfnet_l0", 32),
    timm("maxvit_rmlp_pico_rw_256", 64, sized=True),
    timm("vit_tiny_patch16_224", 64, sized=True),
    timm("fastvit_t8"),
    transformers("bert", "BertForSequenceClassification", "BertConfig", SMALL),
    transformers("roberta", "RobertaModel", "RobertaConfig", f"{SMALL}, max_position_embeddings=40"),
    transformers("distilbert", "DistilBertModel", "DistilBertConfig", DISTILBERT),
    transformers("gpt2", "GPT2LMHeadModel", "GPT2Config", GPT2),
    transformers("llama", "LlamaForCausalLM", "LlamaConfig", ROTARY),
    transformers("qwen2", "Qwen2ForCausalLM", "Qwen2Config", ROTARY),
    transformers("t5-encoder", "T5EncoderModel", "T5Config", T5),
    waves("segformer", "SegformerForSemanticSegmentation", "SegformerConfig", SEGFORMER, 3, 64, 64),
    waves("wav2vec2", "Wav2Vec2Model", "Wav2Vec2Config", WAV2VEC2, 3200),
)  # fmt: skip


def make_samples(architecture: Architecture) -> dict[str, Any]:
    from optpipe.models.inputs.samples import make_synthetic_tensor

    dtype = "int64" if architecture.below else "float32"
    return {
        name: make_synthetic_tensor((SAMPLES, *shape), dtype, 0, architecture.below or None)
        for name, shape in architecture.inputs.items()
    }


def measure_snr(expected: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    """The lowest SNR in dB of all outputs, at most 200."""
    worst = 200.0
    for name, value in expected.items():
        noise = float(((found[name].astype(np.float64) - value) ** 2).sum())
        signal = float((value.astype(np.float64) ** 2).sum())
        if not np.isfinite(noise):
            return -200.0
        if noise > 0 and signal > 0:
            worst = min(worst, 10 * np.log10(signal / noise))
    return worst


def run_bare(graph: Path, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The graph's outputs in batches of four by ONNX Runtime, all optimizations off."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    count = len(next(iter(inputs.values())))
    parts = [
        session.run(None, {name: value[at : at + 4] for name, value in inputs.items()})
        for at in range(0, count, 4)
    ]
    return {
        name: np.concatenate([np.asarray(part[place], np.float32) for part in parts])
        for place, name in enumerate(names)
    }


def run_source(module: Any, inputs: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    import torch

    count, parts = len(next(iter(inputs.values()))), []
    with torch.inference_mode():
        for at in range(0, count, 4):
            found = module(*(torch.from_numpy(value[at : at + 4]) for value in inputs.values()))
            parts.append([each.float().numpy() for each in found])
    return {
        name: np.concatenate([part[place] for part in parts]) for place, name in enumerate(names)
    }


def build_cells(
    architecture: Architecture, folder: Path, done: Collection[str] = ()
) -> Iterator[dict[str, Any]]:
    """One record for each precision that is not `done`."""
    from optpipe.backends.registry import BACKENDS
    from optpipe.build.build import build_model
    from optpipe.build.plan import BuildPlan
    from optpipe.core.card import card_from_file
    from optpipe.core.entries import GraphInfo, ReferenceInfo, WeightsRequest
    from optpipe.core.events import SilentListener
    from optpipe.core.precision import Precision
    from optpipe.models.export.exported import Model, reference_from_file
    from optpipe.models.sources.python_file import PythonFileSource
    from optpipe.workspace.file_names import CARD, ONNX, REFERENCE
    from optpipe.workspace.store import Store

    (folder / "net.py").write_text(architecture.file, encoding="utf-8")
    data = folder / "data.npz"
    np.savez(data, **make_samples(architecture))
    store = Store(folder / "work")
    model = Model(PythonFileSource(folder / "net.py", "make"), WeightsRequest("random"))
    expected: dict[str, Any] | None = None
    for precision, backend in ((Precision(each), backend) for each, backend in PRECISIONS):
        if precision.value in done:
            continue
        started = time.monotonic()
        record = {
            "network": architecture.name,
            "library": architecture.library,
            "precision": precision.value,
        }
        try:
            plan = BuildPlan((precision,), (BACKENDS[backend],), named=True, calibration=data)
            built = build_model(model, plan, store, SilentListener())
            (reference,) = store.list_entries(ReferenceInfo)
            tensors = reference_from_file(reference.file(REFERENCE))
            if expected is None:
                names = [each.name for each in card_from_file(built.model.file(CARD)).outputs]
                expected = run_source(model.fresh_module(), tensors.inputs, names)
            graphs = {each.info.precision: each for each in store.list_entries(GraphInfo)}
            graph = graphs.get(precision, built.model).file(ONNX)
            bare = measure_snr(expected, run_bare(graph, tensors.inputs))
            record |= describe(built, bare)
        except Exception as error:  # noqa: BLE001 - every failure is a result
            kind = "refused" if type(error).__module__.startswith("optpipe") else "traceback"
            record |= {kind: f"{type(error).__name__}: {error}"}
            if kind == "traceback":
                record["trace"] = traceback.format_exc(limit=-6)
        yield {**record, "seconds": round(time.monotonic() - started, 1)}


def describe(built: Any, bare_db: float) -> dict[str, Any]:
    """What the build says, what the bare script says, and whether they agree."""
    found: dict[str, Any] = {"bare_db": round(float(bare_db), 2)}
    if built.failed:
        return {**found, "refused": built.failed[0].reason}
    (made,) = built.artifacts
    proof = made.entry.info.precision_proof
    found |= {
        "share": {str(kind): round(part, 4) for kind, part in proof.share.counted.items()},
        "proven": proof.proven,
    }
    if made.verification is None:
        return {**found, "build_db": None, "why_not": made.why_not}
    snr = made.verification.info.snr_db
    own = 200.0 if snr is None else snr
    agree = bool(abs(own - bare_db) <= AGREE_DB or min(own, bare_db) >= EXACT_DB)
    return {
        **found,
        "build_db": round(own, 2),
        "agree": agree,
        "verified": made.verification.info.passed,
    }


def list_done(out: Path, name: str) -> set[str]:
    """The precisions of a network that have a line in `out`."""
    if not out.is_file():
        return set()
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return {
        each["precision"] for each in records if each["network"] == name and "precision" in each
    }


def append(out: Path, record: Mapping[str, Any]) -> None:
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def run_network(name: str, out: Path, limit_s: float) -> None:
    """Runs one network in a process of its own; what ends it is a line too."""
    command = [sys.executable, __file__, str(out), "--network", name]
    try:
        ran = subprocess.run(command, timeout=limit_s, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired:
        append(out, {"network": name, "refused": f"did not end within {limit_s:g} s"})
        return
    if ran.returncode:
        append(out, {"network": name, "traceback": ran.stderr[-2000:]})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--limit", type=float, default=240.0)
    parser.add_argument("--network", help=argparse.SUPPRESS)
    given = parser.parse_args()
    known = {each.name: each for each in ARCHITECTURES}
    if given.network:
        with TemporaryDirectory() as folder:
            done = list_done(given.out, given.network)
            for record in build_cells(known[given.network], Path(folder), done):
                append(given.out, record)
        return 0
    wanted = given.only.split(",") if given.only else list(known)
    for name in wanted:
        if len(list_done(given.out, name)) < len(PRECISIONS):
            run_network(name, given.out, given.limit)
    lines = [json.loads(line) for line in given.out.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        print(json.dumps(line))
    return int(any("traceback" in line or line.get("agree") is False for line in lines))


if __name__ == "__main__":
    sys.exit(main())
