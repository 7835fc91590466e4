# mypy: ignore-errors
"""How kernels begin and end: they wait for the kernel before, and scale, add, activate, and quantize what they computed.

Each kernel may start before the previous one ends (programmatic dependent launch), and waits for it before it reads or writes
anything but its own weights, which nothing writes: those it fetches meanwhile.
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
def _fetch_to_cache(pointers):
    """Starts copies of the lines at `pointers` into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def start_with_weights(w, scale, bias, tile, across, size, ahead, BN: tl.constexpr):
    """Starts in turn, and fetches weights, scales, and biases meanwhile.

    The first `across` tiles fetch `ahead` weights each, of `size` in all: those of BN columns. No tile does if `ahead` is 0.
    """
    gdc_launch_dependents()
    if (tile < across) & (ahead > 0):
        LINE: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth
        last = tl.minimum((tile + 1) * ahead, size) - 1
        for first in range(tile * ahead, last + 1, 128 * LINE):
            _fetch_to_cache(w + tl.minimum(first + tl.arange(0, 128) * LINE, last))
        columns = tile * BN + tl.minimum(tl.arange(0, 8) * 32, BN - 1)
        _fetch_to_cache(scale + columns)
        _fetch_to_cache(bias + columns)
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
