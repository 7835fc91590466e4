"""Run by `test_kernels`: every kernel in Triton's interpreter against the emulation; prints the largest difference of each."""

import json
import sys
from dataclasses import replace

import torch
import triton
import triton.language as tl
from tests.fakes.int8_emulation import emulate_step
from tests.fakes.int8_network import random_convolution, random_depthwise, random_half, random_int8

from optpipe.backends.torch_int8 import kernels, program, steps, tactics

NOT_HERE = ("int8_wgmma_product_at_once", "int8_max_pool", "depthwise_by_torch")
"""Gluon and inline assembly have no interpreter; torch's FP16 convolution rounds otherwise."""


@triton.jit
def run_at_once():
    tl.static_assert(True)


def compare(step, values):
    expected = emulate_step(step, values)
    alone = program.Program(steps.Network(("x",), ("y",), (step,)), {}, "cpu")
    for tactic in tactics.list_tactics(step, values["x"]):
        if tactic.kernel not in NOT_HERE and not tactic.settings.get("PERSISTENT"):
            found = alone.launch(step, values, tactic)
            same = found.shape == expected.shape and found.dtype == expected.dtype
            yield str(tactic), float((found.double() - expected.double()).abs().max()) if same else float("inf")


def list_cases():
    shapes = ((64, 32, 1, 1, 8), (48, 16, 3, 1, 8), (32, 80, 3, 2, 8), (64, 64, 1, 2, 8), (16, 32, 3, 2, 7))
    for index, (channels, outputs, kernel, stride, size) in enumerate(shapes):
        end = {"activation": "" if index % 2 else "relu", "half": index == 1, "added": index in (0, 2)}
        step = random_convolution(index, channels, outputs, kernel, stride, **end)
        out = (size - 1) // stride + 1
        yield step, {"x": random_int8(1, 2, channels, size, size), "z": random_int8(2, 2, outputs, out, out)}
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 16, 16, generator=generator)
    half = torch.rand(2, 64, 5, 5, generator=generator).half().contiguous(memory_format=torch.channels_last)
    wide = random_convolution(3, 64, 16, 1)
    yield (
        steps.Linear("l", "x", "y", wide.weight[:10, 0, 0], wide.scale[:10], wide.bias[:10]),
        {"x": random_int8(3, 3, 64, 1, 1).flatten(1)},
    )
    yield random_convolution(6, 32, 24, 3, 2, half=True), {"x": random_int8(6, 2, 32, 7, 7)}
    smooth = random_convolution(9, 64, 48, 1, half=True, added=True)
    small = replace(smooth, scale=smooth.scale / 20, bias=smooth.bias / 20)  # where SiLU and HardSwish bend
    values = {"x": random_int8(11, 2, 64, 6, 6), "z": random_int8(12, 2, 48, 6, 6)}
    yield replace(small, activation="silu"), values
    yield replace(small, activation="hardswish"), values
    ends = (("", True, 0), ("silu", True, 0), ("hardswish", False, 8), ("relu", False, 0))
    pixels = {"x": random_half(1, 2, 40, 9, 9)}
    for index, (activation, in_half, spare) in enumerate(ends):
        yield random_depthwise(index, 40, 3 + 2 * (index % 2), 1 + index // 2, activation, in_half, spare), pixels
    thirds = random_convolution(7, 32, 48, 3, 1)
    yield replace(thirds, weight=thirds.weight[:, :1], padding=(0, 1, 0, 1)), {"x": random_int8(7, 2, 32, 6, 7)}
    yield replace(thirds, dilation=2, padding=(2, 2, 2, 2)), {"x": random_int8(8, 2, 32, 7, 6)}
    yield replace(thirds, stride=2, padding=(0, 0, 1, 1)), {"x": random_int8(9, 2, 32, 8, 8)}
    grouped = random_convolution(8, 24, 96, 3, 1, added=True)
    shortcut = random_int8(10, 2, 96, 5, 5)
    yield replace(grouped, groups=2), {"x": random_int8(10, 2, 48, 5, 5), "z": shortcut}
    flat = replace(random_convolution(4, 64, 48, 1), flat=True)
    yield flat, {"x": random_int8(4, 10, 64, 1, 1).reshape(2, 5, 64)}
    yield flat, {"x": random_int8(4, 12, 64, 1, 1).reshape(2, 2, 3, 64)}
    yield (
        steps.Linear("t", "x", "y", wide.weight[:10, 0, 0], wide.scale[:10], wide.bias[:10]),
        {"x": random_int8(5, 6, 64, 1, 1).reshape(2, 3, 64)},
    )
    weight = torch.randn(16, 3, 7, 7, generator=generator).half().numpy()
    yield steps.Stem("s", "x", "y", weight, wide.bias, 3, "relu", False, 5.0), {"x": images}
    narrow = torch.randn(32, 3, 3, 3, generator=generator).half().numpy()
    yield steps.Stem("s", "x", "y", narrow, random_convolution(5, 32, 32, 1).bias, 1, "silu", True), {"x": images}
    yield (
        steps.Stem("s", "x", "y", narrow, random_convolution(5, 32, 32, 1).bias, 1, "hardswish", False, 5.0),
        {"x": images},
    )
    yield steps.MeanPool("m", "x", "y", 50.0), {"x": half}
    yield steps.MeanPool("m", "x", "y", 50.0, keepdims=True), {"x": half}
    yield steps.MeanPool("m", "x", "y", 50.0, keepdims=True, spare=8), {"x": random_half(2, 2, 72, 9, 9)}
    yield steps.Quantize("q", "x", "y", 50.0), {"x": half}
    gated = {"x": random_half(3, 2, 72, 9, 9), "z": random_half(4, 2, 72, 1, 1)}
    yield steps.Quantize("g", "x", "y", 50.0, "z", "sigmoid", 8), gated
    yield steps.Quantize("g", "x", "y", 50.0, "z", "hardsigmoid", 8), gated
    yield steps.Quantize("g", "x", "y", 50.0, "z"), gated
    yield steps.Quantize("t", "x", "y", 50.0), {"x": half.flatten(2)[:, :, 1:]}


if __name__ == "__main__":
    kernels._in_turn = run_at_once
    json.dump([row for step, values in list_cases() for row in compare(step, values)], sys.stdout)
