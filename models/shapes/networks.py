"""What the two networks share: their block, and how trained weights are written."""

import hashlib
import json
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).resolve().parent
SEED = 0


def make_block(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    """Convolution 3 × 3, normalization, ReLU."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


def save_trained(model: nn.Module, name: str, **said: int | float) -> None:
    """Writes NAME.safetensors, and NAME.json with what is `said` of the training, beside this file."""
    from safetensors.torch import save_file

    path = HERE / f"{name}.safetensors"
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    report = {"seed": SEED, **said, "torch": torch.__version__, "weights_sha256": digest}
    path.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
