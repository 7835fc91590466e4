"""`digits`: a small residual network for the 1,797 handwritten digits that scikit-learn carries.

As a module it is the architecture (`digits.py:digits`). As a script it makes everything that ships, from nothing but
scikit-learn:

    python models/digits/digits.py images   # the PNG files and the manifests under calibration/digits
    python models/digits/digits.py train    # digits.safetensors and training.json beside this file
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
DATA = HERE.parent.parent / "calibration" / "digits"
SEED = 0
SPLIT = {"train": 497, "calibration": 500, "validation": 800}
MEAN, STD = (0.3437,) * 3, (0.3203,) * 3
"""Of the training images after resizing and cropping, in [0, 1]."""


class Residual(nn.Module):
    """Two 3-by-3 convolutions beside a shortcut; `stride` 2 halves the picture."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        same = stride == 1 and channels_in == channels_out
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels_in, h, w) to (n, channels_out, h / stride, w / stride)."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Digits(nn.Module):
    """Stem, three stages of two residual blocks (16, 32, 64 channels), global average, one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        )
        stages = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
        self.stages = nn.Sequential(*(Residual(*stage) for stage in stages))
        self.head = nn.Linear(64, 10)

    def forward(self, image: Tensor) -> Tensor:
        """(n, 3, 32, 32) normalized pixels to (n, 10) logits."""
        return self.head(self.stages(self.stem(image)).mean(dim=(2, 3)))


def digits() -> nn.Module:
    """The architecture with fresh weights; the trained ones are in digits.safetensors."""
    return Digits()


def write_images() -> None:
    """Writes the 8-by-8 originals as PNG files, split per label by a seeded shuffle, with one manifest per split."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    raw = load_digits()
    pixels = np.round(raw.images * (255 / 16)).astype(np.uint8)
    for split, members in _split(raw.target).items():
        files = []
        for index in sorted(members, key=lambda index: (raw.target[index], index)):
            path = DATA / split / str(raw.target[index]) / f"{index:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[index]).save(path, optimize=True)
            files.append(
                {
                    "path": path.relative_to(DATA / split).as_posix(),
                    "label": str(raw.target[index]),
                    "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                }
            )
        _write_manifest(split, files)


def _split(labels: "torch.Tensor") -> dict[str, list[int]]:
    """Indices per split: every label is shuffled by itself and cut in the same proportions (largest remainder)."""
    import numpy as np

    rng = np.random.default_rng(SEED)
    order = np.concatenate(
        [_ranked(rng.permutation(np.flatnonzero(labels == label))) for label in range(10)]
    )
    order = order[np.argsort(order[:, 0], kind="stable")][:, 1].astype(int)
    ends = np.cumsum(list(SPLIT.values()))
    return {
        split: order[end - count : end].tolist()
        for (split, count), end in zip(SPLIT.items(), ends, strict=True)
    }


def _ranked(members: "torch.Tensor") -> "torch.Tensor":
    import numpy as np

    return np.stack([(np.arange(len(members)) + 0.5) / len(members), members], axis=1)


def _write_manifest(split: str, files: list[dict[str, str]]) -> None:
    listing = "".join(f"{file['sha256']}  {file['path']}\n" for file in files)
    head = {
        "format": "optpipe.image-set/1",
        "name": f"digits/{split}",
        "root": split,
        "seed": SEED,
        "count": len(files),
        "labels": [str(label) for label in range(10)],
        "sha256": hashlib.sha256(listing.encode()).hexdigest(),
    }
    rows = ",\n".join(f"    {json.dumps(file)}" for file in files)
    text = json.dumps(head, indent=2)[:-2] + ',\n  "files": [\n' + rows + "\n  ]\n}\n"
    (DATA / f"{split}.json").write_text(text, encoding="utf-8")


def load(split: str) -> tuple[Tensor, Tensor]:
    """The pictures of `split` after the card's preprocessing, (n, 3, 32, 32), and their labels, (n,)."""
    from PIL import Image
    from torchvision.transforms import v2

    preprocess = v2.Compose(
        [
            v2.Resize(36),
            v2.CenterCrop(32),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    manifest = json.loads((DATA / f"{split}.json").read_text(encoding="utf-8"))
    files = [DATA / split / file["path"] for file in manifest["files"]]
    labels = torch.tensor([int(file["label"]) for file in manifest["files"]])
    return torch.stack([preprocess(Image.open(file).convert("RGB")) for file in files]), labels


def train(epochs: int = 60, batch_size: int = 50) -> None:
    """Trains from SEED and writes the weights; deterministic for one torch version and thread count."""
    from safetensors.torch import save_file

    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    images, labels = load("train")
    model = digits().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    steps = epochs * -(-len(images) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=steps)
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.05)
    for _ in range(epochs):
        model.train()
        for batch in torch.randperm(len(images)).split(batch_size):
            optimizer.zero_grad()
            loss_of(model(_warped(images[batch])), labels[batch]).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, HERE / "digits.safetensors")
    report = {
        "seed": SEED,
        "epochs": epochs,
        "torch": torch.__version__,
        "train_accuracy": _accuracy(model, "train"),
        "validation_accuracy": _accuracy(model, "validation"),
        "weights_sha256": hashlib.sha256((HERE / "digits.safetensors").read_bytes()).hexdigest(),
    }
    (HERE / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


def _warped(images: Tensor) -> Tensor:
    """Each picture turned by up to 12°, scaled by up to 10 % and moved by up to 12 % of its half width."""
    count = len(images)
    angle = (torch.rand(count) - 0.5) * 0.42
    scale = 1 + (torch.rand(count) - 0.5) * 0.2
    shift = (torch.rand(count, 2) - 0.5) * 0.24
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    theta = torch.stack(
        [torch.stack([cos, -sin, shift[:, 0]], 1), torch.stack([sin, cos, shift[:, 1]], 1)], 1
    )
    grid = nn.functional.affine_grid(theta, list(images.shape), align_corners=False)
    return nn.functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


@torch.inference_mode()
def _accuracy(model: nn.Module, split: str) -> float:
    images, labels = load(split)
    return float((model(images).argmax(1) == labels).double().mean())


if __name__ == "__main__":
    {"images": write_images, "train": train}[sys.argv[1]]()
