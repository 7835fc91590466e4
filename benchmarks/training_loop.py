"""A small training loop that a profile should find fault with: it waits for its data, copies in blocking calls, and pads nothing.

`optpipe profile -- python benchmarks/training_loop.py [--workers N] [--steps N] [--times FILE]`
"""

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Random pictures, whose preparation takes some milliseconds of the CPU."""

    def __init__(self, count: int, side: int) -> None:
        self.count, self.side = count, side

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        picture = torch.rand(3, 2 * self.side, 2 * self.side)
        resized = torch.nn.functional.interpolate(picture[None], size=self.side, mode="bilinear")
        return resized[0], at % 10


class Block(torch.nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(channels)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(images + self.norm(self.conv(images)))


def make_network() -> torch.nn.Module:
    """60 channels: not a multiple of 8, so that Tensor Cores need padding."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 60, 3, stride=2, padding=1),
        torch.nn.Sequential(*(Block(60) for _ in range(4))),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(60, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--times", type=Path, help="where to write the milliseconds of each step")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = make_network().to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    pictures = Pictures(given.steps * given.batch_size, given.side)
    loader = DataLoader(pictures, batch_size=given.batch_size, num_workers=given.workers)
    total, ends_s = 0.0, [time.perf_counter()]
    for images, labels in loader:
        with torch.autocast(device, dtype=torch.bfloat16):
            scores = network(images.to(device))
            loss = torch.nn.functional.cross_entropy(scores.float(), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        ends_s.append(time.perf_counter())
    if given.times is not None:
        steps = [1e3 * (end - begin) for begin, end in pairwise(ends_s)]
        given.times.write_text(json.dumps(steps), encoding="utf-8")
    print(f"trained {given.steps} steps on {device}, mean loss {total / given.steps:.3f}")


if __name__ == "__main__":
    main()
