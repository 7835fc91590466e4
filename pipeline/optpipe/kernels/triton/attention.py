# mypy: ignore-errors
"""Attention over few tokens, whose keys are all read at once, and the quantization of what it reads."""

import triton
import triton.language as tl

from optpipe.kernels.triton.endings import make_cache_keys, start_in_turn, write_as


@triton.jit(do_not_specialize=["count"])
def fp16_quantize(x, y, inverse_scale, count, END: tl.constexpr, BLOCK: tl.constexpr):
    """FP16 values to INT8 (1) or E4M3 (2)."""
    start_in_turn()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    write_as(
        y + at,
        tl.load(x + at, mask=at < count, other=0.0).to(tl.float32),
        inverse_scale,
        at < count,
        END,
    )


@triton.jit(do_not_specialize=["windows", "tokens"])
def wgmma_attention(
    x,
    bias,
    mask,
    y,
    scale,
    inverse_scale,
    windows,
    tokens,
    apart,
    across,
    down,
    along,
    H: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BM: tl.constexpr,
    BIASED: tl.constexpr,
    MASK: tl.constexpr,
    END: tl.constexpr,
):
    """BM queries of a head of one sequence with all P keys, in FP16 or E4M3. `scale` includes the exponential's base, 2.

    `x` is (sequences, tokens, 3 * H * D). BIASED: `bias` is (windows, H, P, P) with minus infinity after the last token. MASK: 1 for a
    byte that lets a key count, 2 for FP16 values to add, with the strides `apart` to `along`. END: the output is FP16 (0), INT8 (1), or
    E4M3 (2).
    """
    start_in_turn()
    blocks = tl.cdiv(tokens, BM)
    sequence = tl.program_id(0) // blocks // H
    head = tl.program_id(0) // blocks % H
    row = (tl.program_id(0) % blocks) * BM + tl.arange(0, BM)
    key = tl.arange(0, P)
    column = tl.arange(0, D)
    queries = sequence * tokens + row
    keys = sequence * tokens + key
    asked = row < tokens
    known = key < tokens
    source = x + head * D + column[None, :]
    q = tl.load(source + queries[:, None] * (3 * H * D), mask=asked[:, None], other=0.0)
    k = tl.load(source + (keys[:, None] * (3 * H * D) + H * D), mask=known[:, None], other=0.0)
    v = tl.load(source + (keys[:, None] * (3 * H * D) + 2 * H * D), mask=known[:, None], other=0.0)
    score = tl.dot(q, k.T) * scale
    if BIASED:
        added = tl.load(
            bias + ((sequence % windows) * H + head) * (P * P) + row[:, None] * P + key[None, :]
        )
        score += added.to(tl.float32) * 1.4426950408889634
    else:
        score = tl.where(known[None, :], score, float("-inf"))
    if MASK > 0:
        place = mask + sequence * apart + head * across + row[:, None] * down + key[None, :] * along
        added = tl.load(place, mask=asked[:, None] & known[None, :], other=0)
        if MASK == 1:
            score = tl.where(added != 0, score, float("-inf"))
        else:
            score += added.to(tl.float32) * 1.4426950408889634
    weight = tl.exp2(score - tl.maximum(tl.max(score, 1), -1e30)[:, None])
    total = tl.maximum(tl.sum(weight, 1), 1e-30)  # a row whose keys are all masked is zero
    value = tl.dot(weight.to(tl.float16), v.to(tl.float16)) / total[:, None]
    write_as(
        y + queries[:, None] * (H * D) + head * D + column[None, :],
        value,
        inverse_scale,
        asked[:, None],
        END,
    )


make_cache_keys(globals())
