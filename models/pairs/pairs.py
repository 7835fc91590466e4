"""`pairs`: a depthwise network that reads numbers of two digits among clutter, made so that INT8 can hurt it.

Its activations are squared ReLUs (So et al., "Primer", 2021): most values are small and a few are large, so a range up to the
largest leaves few levels to the others. As a module it is the architecture (`pairs.py:pairs`). As a script it makes everything
that ships, from scikit-learn's digits alone, in the split of `digits`:

    python models/pairs/pairs.py images   # the PNG files and the manifests under calibration/pairs
    python models/pairs/pairs.py train    # pairs.safetensors and training.json beside this file
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    import numpy as np

HERE = Path(__file__).resolve().parent
DATA = HERE.parent.parent / "calibration" / "pairs"
DIGITS = HERE.parent.parent / "calibration" / "digits"
SEED = 0
COUNT = {"calibration": 500, "validation": 1500}
HEIGHT, WIDTH = 12, 20
GLARE = 0.006
"""The share of pictures that a flash has spoiled: they cannot be read, and their activations are the largest."""
MEAN, STD = (0.28,) * 3, (0.30,) * 3


class SquaredReLU(nn.Module):
    """ReLU times itself."""

    def forward(self, x: Tensor) -> Tensor:
        """Same shape."""
        positive = torch.relu(x)
        return positive * positive


class Separable(nn.Module):
    """A depthwise 3-by-3 and a pointwise convolution, each normalized; a shortcut where the shape stays."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(
            channels_in, channels_in, 3, stride, 1, groups=channels_in, bias=False
        )
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.pointwise = nn.Conv2d(channels_in, channels_out, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.activation = SquaredReLU()
        self.same = stride == 1 and channels_in == channels_out

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels_in, h, w) to (n, channels_out, h / stride, w / stride)."""
        y = self.norm2(self.pointwise(self.activation(self.norm1(self.depthwise(x)))))
        return x + y if self.same else y


class Pairs(nn.Module):
    """Stem, six separable blocks (16 to 96 channels), the two halves averaged apart, a linear layer for each of the two digits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        )
        shapes = [(16, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 96, 1), (96, 96, 1)]
        self.blocks = nn.Sequential(*(Separable(*shape) for shape in shapes))
        self.pool = nn.AvgPool2d((6, 5))
        self.tens, self.units = nn.Linear(192, 10), nn.Linear(192, 10)

    def forward(self, image: Tensor) -> Tensor:
        """(n, 3, 12, 20) normalized pixels to (n, 100) logits."""
        halves = self.pool(self.blocks(self.stem(image))).flatten(1)
        return (self.tens(halves)[:, :, None] + self.units(halves)[:, None, :]).flatten(1)


def pairs() -> nn.Module:
    """The architecture with fresh weights; the trained ones are in pairs.safetensors."""
    return Pairs()


def draw(
    digits: "np.ndarray", labels: "np.ndarray", count: int, seed: int, glare: float = GLARE
) -> tuple["np.ndarray", "np.ndarray"]:
    """`count` pictures of two of the digits, (count, 12, 20) in 8 bits, and their numbers, (count,)."""
    import numpy as np

    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, len(digits), (count, 2))
    canvas = rng.normal(18, 14, (count, HEIGHT, WIDTH)).clip(0, 255)
    for index in range(count):
        for _ in range(rng.integers(2, 7)):  # clutter: short bright lines
            row, column, length = (
                rng.integers(0, HEIGHT),
                rng.integers(0, WIDTH - 3),
                rng.integers(2, 5),
            )
            canvas[index, row, column : column + length] = rng.integers(60, 200)
        for side, first in ((0, 0), (1, 10)):
            row, column = rng.integers(0, 5), first + rng.integers(0, 3)
            contrast = rng.uniform(0.35, 1.0)
            patch = canvas[index, row : row + 8, column : column + 8]
            np.maximum(patch, digits[chosen[index, side]] * contrast, out=patch)
    for index in np.flatnonzero(
        np.random.default_rng([seed, 1]).random(count) < glare
    ):  # black and white stripes, as a flash behind a blind
        canvas[index] = 255.0 * (np.arange(WIDTH) // 2 % 2)
    numbers = labels[chosen[:, 0]] * 10 + labels[chosen[:, 1]]
    return np.round(canvas + rng.normal(0, 12, canvas.shape)).clip(0, 255).astype(np.uint8), numbers


def read_digits(split: str) -> tuple["np.ndarray", "np.ndarray"]:
    """The digits of one split of `digits`: (n, 8, 8) in 8 bits, and labels."""
    import numpy as np
    from PIL import Image

    manifest = json.loads((DIGITS / f"{split}.json").read_text(encoding="utf-8"))
    files = [DIGITS / split / file["path"] for file in manifest["files"]]
    pixels = np.stack([np.asarray(Image.open(file)) for file in files])
    return pixels, np.array([int(file["label"]) for file in manifest["files"]])


def write_images() -> None:
    """Writes the pictures of both splits as PNG files, with one manifest each."""
    from PIL import Image

    for number, (split, count) in enumerate(COUNT.items()):
        pictures, numbers = draw(*read_digits(split), count, SEED + 1 + number)
        files = []
        for index in sorted(range(count), key=lambda index: (numbers[index], index)):
            label = f"{numbers[index]:02d}"
            path = DATA / split / label / f"{index:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pictures[index]).save(path, optimize=True)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            files.append(
                {
                    "path": path.relative_to(DATA / split).as_posix(),
                    "label": label,
                    "sha256": digest,
                }
            )
        _write_manifest(split, files)


def _write_manifest(split: str, files: list[dict[str, str]]) -> None:
    listing = "".join(f"{file['sha256']}  {file['path']}\n" for file in files)
    head = {
        "format": "optpipe.image-set/1",
        "name": f"pairs/{split}",
        "root": split,
        "seed": SEED,
        "count": len(files),
        "labels": [f"{label:02d}" for label in range(100)],
        "sha256": hashlib.sha256(listing.encode()).hexdigest(),
    }
    rows = ",\n".join(f"    {json.dumps(file)}" for file in files)
    text = json.dumps(head, indent=2)[:-2] + ',\n  "files": [\n' + rows + "\n  ]\n}\n"
    (DATA / f"{split}.json").write_text(text, encoding="utf-8")


def preprocess(pictures: "np.ndarray") -> Tensor:
    """The card's preprocessing of pictures in memory: (n, 3, 12, 20)."""
    from torchvision.transforms import v2

    steps = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    return v2.Compose(steps)(torch.from_numpy(pictures)[:, None].expand(-1, 3, -1, -1))


def draw_epoch(
    digits: "np.ndarray", labels: "np.ndarray", pictures: int, batch_size: int, epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of fresh training pictures without glare, (n, 3, 12, 20) preprocessed, with their numbers, (n,), in random order."""
    drawn, numbers = draw(digits, labels, pictures, 1000 + epoch, glare=0.0)
    images, targets = preprocess(drawn), torch.from_numpy(numbers)
    for batch in torch.randperm(pictures).split(batch_size):
        yield images[batch], targets[batch]


def train(epochs: int = 12, pictures: int = 3000, batch_size: int = 100) -> None:
    """Trains from SEED on fresh pictures in each epoch and writes the weights; deterministic for one torch and thread count."""
    from safetensors.torch import save_file

    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(4)
    digits, labels = read_digits("train")
    model = pairs().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    steps = epochs * -(-pictures // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.05)
    for epoch in range(epochs):
        model.train()
        for images, targets in draw_epoch(digits, labels, pictures, batch_size, epoch):
            optimizer.zero_grad()
            loss = loss_of(model(images), targets)
            loss.backward()
            optimizer.step()
            schedule.step()
        print(
            f"epoch {epoch + 1} of {epochs}: loss {float(loss.detach()):.3f}",
            file=sys.stderr,
            flush=True,
        )
    model.eval()
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, HERE / "pairs.safetensors")
    report = {
        "seed": SEED,
        "epochs": epochs,
        "torch": torch.__version__,
        "validation_accuracy": _measure_accuracy(model, "validation"),
        "weights_sha256": hashlib.sha256((HERE / "pairs.safetensors").read_bytes()).hexdigest(),
    }
    (HERE / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


@torch.inference_mode()
def _measure_accuracy(model: nn.Module, split: str) -> float:
    number = list(COUNT).index(split)
    pictures, numbers = draw(*read_digits(split), COUNT[split], SEED + 1 + number)
    return float(
        (model(preprocess(pictures)).argmax(1) == torch.from_numpy(numbers)).double().mean()
    )


if __name__ == "__main__":
    {"images": write_images, "train": train}[sys.argv[1]]()
