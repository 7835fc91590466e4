"""Run by `test_kernels`: every kernel in Triton's interpreter against the emulation; prints the largest difference of each, of E4M3
the share of numbers that differ."""

import json
import sys

import torch
import triton
import triton.language as tl
from tests.fakes import emulation
from tests.fakes.int8_network import (
    random_attention,
    random_block,
    random_convolution,
    random_depthwise,
    random_sequences,
    random_stem,
)

from optpipe.kernels import operators, steps, tactics
from optpipe.kernels.triton import attention, convolutions, images

NOT_HERE = (
    "int8_wgmma_product_at_once",
    "int8_wgmma_block_at_once",
    "fp16_wgmma_stem_at_once",
    "max_pool",
    "depthwise_by_torch",
    "convolution_by_cudnn",
    "product_by_cublas",
    "attention_by_torch",
)
"""Gluon and inline assembly have no interpreter; torch's FP16 convolution rounds otherwise."""


@triton.jit
def run_at_once():
    tl.static_assert(True)


@triton.jit
def run_without_fetching(w, scale, bias, tile, across, size, ahead, BN):
    tl.static_assert(True)


def compare(step, given):
    expected = emulation.compute_step(step, given)
    for tactic in tactics.list_tactics(step, given.data):
        if tactic.kernel not in NOT_HERE and not tactic.settings.get("PERSISTENT"):
            found = operators.launch_step(step, given, tactic)
            same = found.shape == expected.shape and found.dtype == expected.dtype
            apart = (found.double() - expected.double()).abs()
            if (
                found.dtype == torch.float8_e4m3fn
            ):  # the interpreter rounds to a power of two wrongly
                apart = (apart[(expected.view(torch.uint8) & 7) != 0] > 0).double().mean()
            yield str(tactic), float(apart.max()) if same else float("inf")


def list_cases():
    yield random_convolution(64, 32, 1, added=True)
    yield random_convolution(48, 16, 3, half=True, activation="")
    yield random_convolution(32, 80, 3, stride=2, added=True)
    yield random_convolution(64, 64, 1, stride=2, activation="")
    yield random_convolution(16, 32, 3, 7, stride=2)
    yield random_convolution(32, 24, 3, 7, stride=2, half=True)
    for activation in steps.ACTIVATIONS[2:]:
        yield random_convolution(64, 48, 1, 6, half=True, added=True, activation=activation)
        yield random_convolution(32, 48, 3, 6, activation=activation)
    yield random_convolution(32, 48, (1, 3), 6)
    yield random_convolution(32, 48, 3, 7, dilation=2, padding=(2, 2, 2, 2))
    yield random_convolution(32, 48, 3, 8, stride=2, padding=(0, 0, 1, 1))
    yield random_convolution(24, 96, 3, 5, added=True, groups=2)
    yield random_convolution(64, 48, 1, 3, flat=True)
    yield random_convolution(64, 32, 1, half=True, floating=True, added=True)
    yield random_convolution(64, 48, 1, 3, half=True, floating=True, flat=True, activation="gelu")
    yield random_convolution(24, 48, 3, 8, half=True, floating=True, stride=2, activation="silu")
    yield random_convolution(16, 48, 3, 8, half=True, floating=True, added=True, groups=2)
    for channels in (40, 88, 152):  # no block of input channels fits
        yield random_convolution(channels, 32, 1, half=True, floating=True, added=True)
        yield random_convolution(channels, 32, 3, half=True, floating=True)
        yield random_convolution(channels, 32, 3, half=True, floating=True, stride=2)
    yield random_convolution(40, 32, 3, half=True, floating=True, groups=2)
    yield random_convolution(208, 32, 1, 3, flat=True)
    yield random_convolution(112, 32, 3, added=True)
    for index, (activation, half, spare) in enumerate(
        (("", True, 0), ("silu", True, 0), ("hardswish", False, 8), ("relu6", False, 8))
    ):
        yield random_depthwise(
            40, 3 + 2 * (index % 2), 1 + index // 2, activation=activation, half=half, spare=spare
        )
    yield random_depthwise(40, 5, 2, activation="gelu")
    yield random_depthwise(24, 9, half=False)
    yield random_block(64, 128, 64, 12)
    yield random_block(128, 256, 0, 8, stride=2)
    yield random_attention()
    yield random_attention(heads=2, features=16, tokens=9, windows=1)
    yield random_sequences(mask=torch.bool)
    yield random_sequences(1, 64, 130, 2, half=False)
    yield random_sequences(2, 16, 33, mask=torch.float16, half=False, e4m3=True)
    yield random_stem(16, 3, 7, 3, (16, 16), activation="relu", half=False)
    yield random_stem(32, 3, 3, 1, (16, 16), activation="silu")
    yield random_stem(32, 3, 3, 1, (16, 16), activation="hardswish", half=False)
    yield random_stem(64, 3, 11, 2, (35, 33), activation="relu", stride=4)
    yield random_stem(32, 1, 7, 3, (17, 24), activation="silu", half=False, stride=4)


if __name__ == "__main__":
    for module in (attention, convolutions, images):
        setattr(module, "start_in_turn", run_at_once)  # noqa: B010 - Triton has no types
    setattr(convolutions, "start_with_weights", run_without_fetching)  # noqa: B010 - likewise
    json.dump([row for step, given in list_cases() for row in compare(step, given)], sys.stdout)
