"""A ResNet-50 with trained weights where nothing can be downloaded: trained in half a minute on a GPU to read digits.

Writes FOLDER/resnet50-digits.toml (a model card), resnet50.py (its factory), resnet50-digits.safetensors, and JPEG files of
about 300 by 280 pixels under train/ and validation/, one folder per label: the shipped 8-by-8 digits, enlarged, shifted, lit
and noisy, each by its own seed. Weights of a real task let accuracy, agreement and preprocessing be judged, which seeded
random ones cannot; the network is torchvision's own with ten classes.

usage: PYTHONPATH=pipeline:$PYTHONPATH python3 benchmarks/trained_resnet50.py FOLDER [--side 224] [--epochs 40]
"""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

DIGITS = Path(__file__).resolve().parent.parent / "calibration" / "digits"
FACTORY = '''"""torchvision's ResNet-50 with ten classes."""

from torch import nn


def resnet50() -> nn.Module:
    """Fresh weights; the trained ones are in resnet50-digits.safetensors."""
    from torchvision.models import resnet50 as network

    return network(weights=None, num_classes=10)
'''
CARD = """name = "resnet50-digits"
task = "classification"
description = "torchvision's ResNet-50 with ten classes, trained from nothing on 497 pictures of handwritten digits."
source = "resnet50.py:resnet50"
weights = "resnet50-digits.safetensors"
labels = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]

[license]
code = "Apache-2.0"
weights = "Apache-2.0"
data = "CC-BY-4.0; E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998 (as carried by scikit-learn)"

[[inputs]]
name = "image"
dtype = "float32"
min = [1, 3, {side}, {side}]
opt = [8, 3, {side}, {side}]
max = [256, 3, {side}, {side}]

[[outputs]]
name = "logits"

[[preprocessing.steps]]
step = "decode"
channels = "RGB"

[[preprocessing.steps]]
step = "resize"
size = [{resize}]
fit = "short"
interpolation = "bilinear"
antialias = true

[[preprocessing.steps]]
step = "center_crop"
height = {side}
width = {side}

[[preprocessing.steps]]
step = "rescale"
divisor = 255.0

[[preprocessing.steps]]
step = "normalize"
mean = [0.485, 0.456, 0.406]
std = [0.229, 0.224, 0.225]

[[preprocessing.steps]]
step = "pack"
order = "CHW"
dtype = "float32"
"""


def write_picture(folder: Path, path: Path) -> None:
    """One digit as a photograph might show it; its random choices depend on its file name alone."""
    random = np.random.default_rng(int(path.stem))
    width, height = (int(random.integers(low, low + 40)) for low in (280, 260))
    with Image.open(path) as opened:
        digit = opened.convert("L").resize((216, 216), Image.Resampling.BICUBIC)
    left, top = (int(random.integers(10, side - 226)) for side in (width, height))
    page = Image.new("L", (width, height))
    page.paste(digit, (left, top))
    ink, paper = (random.uniform(low, low + 60, 3) for low in (0, 170))
    share = np.asarray(page, np.float32)[..., None] / 255
    pixels = paper * (1 - share) + ink * share + random.normal(0, 6, (height, width, 3))
    target = folder / path.parent.name / f"{path.stem}.jpg"
    target.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(target, quality=92)


def tensors(folder: Path, card: Path):
    """Pictures as the card preprocesses them, and their labels."""
    import torch

    from optpipe.models.inputs.images import preprocess_batches
    from optpipe.models.sources.resolve import CardSource

    paths = sorted(folder.glob("*/*.jpg"))
    rows = np.concatenate(
        list(preprocess_batches(paths, CardSource(card).card.transform, 64, threads=8))
    )
    return torch.from_numpy(rows), torch.tensor([int(path.parent.name) for path in paths])


def trained(folder: Path, side: int, epochs: int):
    """The network after `epochs`, with one-cycle learning rates, small shifts and mixed precision on a GPU."""
    import torch
    from torch import nn
    from torchvision.models import resnet50

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = (
        each.to(device) for each in tensors(folder / "train", folder / "resnet50-digits.toml")
    )
    network = resnet50(weights=None, num_classes=10).to(device, memory_format=torch.channels_last)
    size, reach = 32, side // 12
    steps = epochs * (len(images) // size)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 2e-3, total_steps=steps, pct_start=0.2
    )
    network.train()
    for step in range(steps):
        if step % (len(images) // size) == 0:
            order = torch.randperm(len(images), device=device)
        chosen = order[(step % (len(images) // size)) * size :][:size]
        down, right = torch.randint(-reach, reach + 1, (2,)).tolist()
        batch = torch.roll(images[chosen], (down, right), (2, 3)).to(
            memory_format=torch.channels_last
        )
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = nn.functional.cross_entropy(
                network(batch).float(), labels[chosen], label_smoothing=0.05
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    return network.eval(), device


def main() -> None:
    """Makes everything and prints the accuracy on the validation pictures."""
    import torch
    from safetensors.torch import save_file

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=40)
    asked = parser.parse_args()
    folder, started = asked.folder, time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation"):
        with ProcessPoolExecutor() as pool:
            files = sorted((DIGITS / split).glob("*/*.png"))
            list(pool.map(partial(write_picture, folder / split), files, chunksize=32))
    (folder / "resnet50.py").write_text(FACTORY)
    (folder / "resnet50-digits.toml").write_text(
        CARD.format(side=asked.side, resize=asked.side * 256 // 224)
    )
    network, device = trained(folder, asked.side, asked.epochs)
    state = {name: value.float().cpu().contiguous() for name, value in network.state_dict().items()}
    save_file(
        {n: v if "num_batches" not in n else v.long() for n, v in state.items()},
        folder / "resnet50-digits.safetensors",
    )
    images, labels = tensors(folder / "validation", folder / "resnet50-digits.toml")
    with torch.inference_mode():
        answers = torch.cat([network(part.to(device)).argmax(1).cpu() for part in images.split(64)])
    right = int((answers == labels).sum())
    print(
        f"{right} of {len(labels)} right ({right / len(labels):.2%}) on {device}, {time.monotonic() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
