"""Trains two small networks to try `build --recover` on, on one core in a few minutes.

Their normalizations start with log-normal scales of the channels: one range for all channels of a tensor then leaves few levels to most.
That start is artificial; from an ordinary one INT8 loses nothing. The networks are trained from there; nothing is rescaled afterwards.

`mobile` is MobileNetV3-like (inverted residuals, squeeze and excitation, hard-swish), `vit` a vision transformer with six layers.
Both read the numbers of two digits of `models/pairs`, from pictures drawn anew in each epoch.
Writes FOLDER/NAME.toml (a model card), NAME.py (its factory), and NAME.safetensors.

usage: python benchmarks/trained_small.py FOLDER [mobile|vit] [--epochs 14] [--threads 1]
"""

import argparse
import hashlib
import importlib.util
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAIRS = ROOT / "models" / "pairs" / "pairs.py"
SEED = 0
PICTURES = 3000
BATCH_SIZE = 100

FACTORIES = {
    "mobile": '''"""A MobileNetV3-like network for pictures of 12 by 20."""

import torch
from torch import nn


class Gate(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels):
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x):
        return x * nn.functional.hardsigmoid(self.up(torch.relu(self.down(x.mean((2, 3), keepdim=True)))))


class Inverted(nn.Module):
    """Expands, filters each channel, gates, and projects."""

    def __init__(self, channels, inner, out, stride, gated, activation):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), activation(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.BatchNorm2d(inner), activation(),
            Gate(inner) if gated else nn.Identity(),
            nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out),
        )
        self.same = stride == 1 and channels == out

    def forward(self, x):
        return x + self.body(x) if self.same else self.body(x)


class Mobile(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        shapes = [
            (16, 32, 16, 1, False, nn.ReLU), (16, 64, 24, 2, False, nn.ReLU), (24, 72, 24, 1, False, nn.ReLU),
            (24, 72, 32, 1, True, nn.Hardswish), (32, 96, 32, 1, True, nn.Hardswish), (32, 128, 48, 1, True, nn.Hardswish),
        ]
        self.blocks = nn.Sequential(*(Inverted(*each) for each in shapes))
        self.head = nn.Sequential(nn.Conv2d(48, 128, 1, bias=False), nn.BatchNorm2d(128), nn.Hardswish(), nn.AvgPool2d((6, 5)))
        self.classify = nn.Linear(256, 100)

    def forward(self, image):
        """(n, 3, 12, 20) to (n, 100)."""
        return self.classify(self.head(self.blocks(self.stem(image))).flatten(1))


def mobile():
    return Mobile()
''',
    "vit": '''"""A small vision transformer for pictures of 12 by 20, in patches of 4 by 4."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x):
        n, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(n, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Vit(nn.Module):
    def __init__(self, width=64, depth=6, heads=4):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.places = nn.Parameter(0.02 * torch.randn(1, 15, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.classify = nn.LayerNorm(width), nn.Linear(width * 15, 100)

    def forward(self, image):
        """(n, 3, 12, 20) to (n, 100)."""
        x = self.patches(image).flatten(2).transpose(1, 2) + self.places
        return self.classify(self.norm(self.blocks(x)).flatten(1))


def vit():
    return Vit()
''',
}
RATES = {"mobile": 1e-2, "vit": 2e-3}


SPREAD = 1.3
"""Standard deviation of the logarithm of a normalization's scales at the start."""


def spread_channels(model) -> None:
    """Draws the scales of normalizations, in place."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d | torch.nn.LayerNorm):
            with torch.no_grad():
                module.weight.copy_(
                    torch.exp(SPREAD * torch.randn_like(module.weight) - SPREAD**2 / 2)
                )


def load_file(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(name: str, folder: Path, epochs: int) -> None:
    import torch
    from safetensors.torch import save_file

    pairs, file = load_file(PAIRS), folder / f"{name}.py"
    file.write_text(FACTORIES[name], encoding="utf-8")
    torch.manual_seed(SEED)
    model = getattr(load_file(file), name)()
    spread_channels(model)
    digits, labels = pairs.read_digits("train")
    norms = [each for each in model.parameters() if each.ndim == 1]
    others = [each for each in model.parameters() if each.ndim > 1]
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=RATES[name])
    steps = epochs * -(-PICTURES // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=RATES[name], total_steps=steps)
    loss_of, started = torch.nn.CrossEntropyLoss(label_smoothing=0.05), time.monotonic()
    for epoch in range(epochs):
        model.train()
        for images, targets in pairs.draw_epoch(digits, labels, PICTURES, BATCH_SIZE, epoch):
            optimizer.zero_grad()
            loss = loss_of(model(images), targets)
            loss.backward()
            optimizer.step()
            schedule.step()
        print(
            f"{name}: epoch {epoch + 1} of {epochs}, loss {float(loss):.3f}, {time.monotonic() - started:.0f} s",
            file=sys.stderr,
        )
    model.eval()
    weights = folder / f"{name}.safetensors"
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, weights)
    card = (ROOT / "models" / "pairs.toml").read_text(encoding="utf-8")
    own, _, rest = card.partition("\n[")
    kept = [each for each in own.splitlines() if each.startswith(("task =", "labels ="))]
    head = [
        f'name = "{name}"',
        f'source = "{name}.py:{name}"',
        f'weights = "{weights.name}"',
        f'weights_sha256 = "{hashlib.sha256(weights.read_bytes()).hexdigest()}"',
    ]
    text = "\n".join([*head, *kept]) + "\n\n[" + rest
    (folder / f"{name}.toml").write_text(
        text.replace("../calibration", str(ROOT / "calibration")), encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", choices=[*FACTORIES, []], default=[*FACTORIES])
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    import torch

    torch.set_num_threads(given.threads)
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in given.names or FACTORIES:
        train(name, given.folder, given.epochs or {"mobile": 14, "vit": 40}[name])


if __name__ == "__main__":
    main()
