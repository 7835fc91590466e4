# mypy: ignore-errors
"""How kernels begin and end: they wait for the kernel before, and scale, add, activate, and quantize what they computed.

Each kernel may start before the previous one ends (programmatic dependent launch), and waits for it before it reads or writes
anything.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: added to a small FP32 number, it leaves that number in the lowest bits, rounded half to even."""


def make_cache_keys(module: Mapping[str, Any]) -> None:
    """Makes the cache keys of a module's functions.

    With Triton 3.6 the key of a function depends on whether its callees have keys, so that every process makes all of them.
    """
    for value in [*module.values()]:
        if isinstance(value, triton.JITFunction):
            value.cache_key  # noqa: B018 - a property that keeps what it computes


@triton.jit
def start_in_turn():
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def quantize(value, ACTIVATION: tl.constexpr):
    low = 0.0 if ACTIVATION else -128.0
    clipped = tl.minimum(tl.maximum(value, low), 127.0)
    return (clipped + ROUND).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def activate(value, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:  # as in `steps.ACTIVATIONS`
        value = tl.maximum(value, 0.0)
    elif ACTIVATION == 2:
        value = value / (1.0 + tl.exp(-value))
    elif ACTIVATION == 3:
        value = value * (tl.minimum(tl.maximum(value + 3.0, 0.0), 6.0) * (1.0 / 6.0))
    elif ACTIVATION == 4:
        value = tl.minimum(tl.maximum(value, 0.0), 6.0)
    elif ACTIVATION == 5:
        square = tl.minimum(value * value, 36.0)  # as in `steps.approximate_gelu`
        value = value / (
            1.0 + tl.exp(value * (-1.59501573 - square * (0.0740113232 - 0.000703038082 * square)))
        )
    return value


@triton.jit
def end_layer(
    acc,
    scale,
    bias,
    added,
    added_scale,
    inverse_scale,
    ADD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HALF: tl.constexpr,
):
    value = tl.fma(acc.to(tl.float32), scale[None, :], bias[None, :])
    if ADD:
        value = tl.fma(added.to(tl.float32), added_scale, value)
    if HALF:
        return activate(value, ACTIVATION).to(tl.float16)
    elif ACTIVATION > 1:  # as in `steps.BEFORE_SCALING`
        return quantize(activate(value, ACTIVATION) * inverse_scale, 0)
    else:  # Triton would type all returns without it
        return quantize(value, ACTIVATION)


@triton.jit
def store_tile(
    acc,
    added,
    y,
    scale,
    bias,
    added_scale,
    inverse_scale,
    m,
    n,
    ADD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HALF: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Ends a tile in PARTS pieces of its columns, which need fewer registers."""
    if PARTS == 1:
        columns = n + tl.arange(0, BN)
        r = acc
        if ADD:
            r = added.load([m, n])
        scales = tl.load(scale + columns)
        biases = tl.load(bias + columns)
        y.store(
            [m, n],
            end_layer(acc, scales, biases, r, added_scale, inverse_scale, ADD, ACTIVATION, HALF),
        )
    else:
        half: tl.constexpr = BN // 2
        rest: tl.constexpr = PARTS // 2
        left, right = acc.reshape(BM, 2, half).permute(0, 2, 1).split()
        store_tile(
            left,
            added,
            y,
            scale,
            bias,
            added_scale,
            inverse_scale,
            m,
            n,
            ADD,
            ACTIVATION,
            HALF,
            BM,
            half,
            rest,
        )
        n += half
        store_tile(
            right,
            added,
            y,
            scale,
            bias,
            added_scale,
            inverse_scale,
            m,
            n,
            ADD,
            ACTIVATION,
            HALF,
            BM,
            half,
            rest,
        )


@triton.jit
def write_as(target, value, inverse_scale, mask, END: tl.constexpr):
    if END == 1:
        tl.store(target, quantize(value * inverse_scale, 0), mask=mask)
    elif END == 2:
        bounded = tl.minimum(tl.maximum(value * inverse_scale, -448.0), 448.0)
        tl.store(target, bounded.to(tl.float8e4nv), mask=mask)
    else:
        tl.store(target, value.to(tl.float16), mask=mask)


make_cache_keys(globals())
