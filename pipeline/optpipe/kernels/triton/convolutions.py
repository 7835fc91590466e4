# mypy: ignore-errors
"""Convolutions and products on Tensor Cores; images are NHWC, weights (output channels, kernel * kernel * padded input channels).

Tensor Cores compute INT8 products with INT32 sums, and FP16 products (FLOAT) with FP32 sums; tiles are loaded and stored by TMA
copies.
"""

import triton
import triton.language as tl

from optpipe.kernels.triton.endings import (
    end_layer,
    make_cache_keys,
    start_in_turn,
    start_with_weights,
    store_tile,
)


@triton.jit(do_not_specialize=["tiles", "across", "depth", "size", "ahead"])
def wgmma_product(
    x,
    w,
    weights,
    added,
    y,
    scale,
    bias,
    added_scale,
    inverse_scale,
    tiles,
    across,
    depth,
    size,
    ahead,
    FLOAT: tl.constexpr,
    ADD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HALF: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    """A 1x1 convolution: (pixels, depth) times (channels, depth). `w` describes `weights`, `size` numbers."""
    start_with_weights(weights, scale, bias, tl.program_id(0), across, size, ahead, BN)
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            m = (tile // across) * BM
            n = (tile % across) * BN
            acc = tl.zeros((BM, BN), tl.float32 if FLOAT else tl.int32)
            for k in tl.range(0, depth, BK, num_stages=STAGES):
                a = x.load([m, k])
                b = w.load([n, k])
                acc = tl.dot(a, b.T, acc, out_dtype=tl.float32 if FLOAT else tl.int32)
            store_tile(
                acc,
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
                BN,
                PARTS,
            )
    else:
        tile = tl.program_id(0)
        m = (tile // across) * BM
        n = (tile % across) * BN
        acc = tl.zeros((BM, BN), tl.float32 if FLOAT else tl.int32)
        for k in tl.range(0, depth, BK, num_stages=STAGES):
            a = x.load([m, k])
            b = w.load([n, k])
            acc = tl.dot(a, b.T, acc, out_dtype=tl.float32 if FLOAT else tl.int32)
        store_tile(
            acc,
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
            BN,
            PARTS,
        )


@triton.jit(
    do_not_specialize=[
        "pixels",
        "height",
        "width",
        "out_height",
        "out_width",
        "across",
        "per_group",
        "wide",
        "size",
        "ahead",
    ]
)
def wgmma_convolution_gathered(
    x,
    w,
    weights,
    added,
    y,
    scale,
    bias,
    added_scale,
    inverse_scale,
    pixels,
    height,
    width,
    out_height,
    out_width,
    across,
    channels,
    per_group,
    depth,
    wide,
    size,
    ahead,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    DILATION: tl.constexpr,
    TOP: tl.constexpr,
    LEFT: tl.constexpr,
    GROUPED: tl.constexpr,
    FLOAT: tl.constexpr,
    ADD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HALF: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A convolution as a matrix product over (kernel row, kernel column, channel) of pixels that asynchronous copies gather.

    PADDED: the channels of a group do not fill the last block, whose other pixels are zeros beside any weights. GROUPED: a tile's
    columns belong to one group, which has `per_group` outputs and `depth` inputs, in weights `wide` inputs.
    """
    tile = tl.program_id(0)
    start_with_weights(weights, scale, bias, tile, across, size, ahead, BN)
    m = (tile // across) * BM
    n = (tile % across) * BN
    rows = m + tl.arange(0, BM)
    column = rows % out_width
    rest = rows // out_width
    top = (rest % out_height) * STRIDE - TOP
    left = column * STRIDE - LEFT
    base = (
        x
        + (((rest // out_height) * height + top) * width + left)[:, None] * channels
        + tl.arange(0, BK)[None, :]
    )
    if GROUPED:
        base += (n // per_group) * depth
    acc = tl.zeros((BM, BN), tl.float32 if FLOAT else tl.int32)
    blocks = tl.cdiv(depth, BK)
    for step in tl.range(0, R * S * blocks, num_stages=STAGES):
        tap = step // blocks
        dr = tap // S * DILATION
        ds = tap % S * DILATION
        inside = (
            (top + dr >= 0)
            & (top + dr < height)
            & (left + ds >= 0)
            & (left + ds < width)
            & (rows < pixels)
        )
        offset = (dr * width + ds) * channels + (step % blocks) * BK
        if PADDED:
            known = (step % blocks) * BK + tl.arange(0, BK) < depth
            a = tl.load(base + offset, mask=inside[:, None] & known[None, :], other=0)
        else:
            a = tl.load(base + offset, mask=inside[:, None], other=0)
        b = w.load([n, tap * wide + (step % blocks) * BK])
        acc = tl.dot(a, b.T, acc, out_dtype=tl.float32 if FLOAT else tl.int32)
    store_tile(
        acc,
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
        BN,
        PARTS,
    )


@triton.jit
def find_box(tile, down, along, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr):
    """First image, row, and column of a box."""
    return tile // along // down * BI, tile // along % down * BH, tile % along * BW


@triton.jit
def _load_tap(
    x,
    i0,
    h0,
    w0,
    tap,
    first,
    channels,
    R: tl.constexpr,
    PAD: tl.constexpr,
    STRIDE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """The pixels of a box under one element of the kernel, BK channels from `first` on."""
    dr = tap // R - PAD + 2 * STRIDE
    ds = tap % R - PAD + 2 * STRIDE
    place = [
        i0,
        h0 + dr // STRIDE - 2,
        dr % STRIDE,
        w0 + ds // STRIDE - 2,
        (ds % STRIDE) * channels + first,
    ]
    return x.load(place).reshape(BM, BK)


@triton.jit(do_not_specialize=["down", "along", "across", "blocks", "wide", "size", "ahead"])
def wgmma_convolution_boxes(
    x,
    w,
    weights,
    added,
    y,
    scale,
    bias,
    added_scale,
    inverse_scale,
    down,
    along,
    across,
    blocks,
    channels,
    wide,
    size,
    ahead,
    R: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    FLOAT: tl.constexpr,
    ADD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HALF: tl.constexpr,
    BI: tl.constexpr,
    BH: tl.constexpr,
    BW: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same over boxes of BI images, BH rows, and BW columns, each a TMA copy with zeros outside the image.

    `x` has the shape (images, height / STRIDE, STRIDE, width / STRIDE, STRIDE * channels). With STRIDE 1 a last block that the channels
    do not fill is copied with zeros; weights have `wide` channels.
    """
    BM: tl.constexpr = BI * BH * BW
    tile = tl.program_id(0)
    start_with_weights(weights, scale, bias, tile, across, size, ahead, BN)
    n = (tile % across) * BN
    i0, h0, w0 = find_box(tile // across, down, along, BI, BH, BW)
    acc = tl.zeros((BM, BN), tl.float32 if FLOAT else tl.int32)
    for step in tl.range(0, R * R * blocks, num_stages=STAGES):
        a = _load_tap(
            x, i0, h0, w0, step // blocks, (step % blocks) * BK, channels, R, PAD, STRIDE, BM, BK
        )
        b = w.load([n, (step // blocks) * wide + (step % blocks) * BK])
        acc = tl.dot(a, b.T, acc, out_dtype=tl.float32 if FLOAT else tl.int32)
    columns = n + tl.arange(0, BN)
    r = acc
    if ADD:
        r = added.load([i0, h0, w0, n]).reshape(BM, BN)
    value = end_layer(
        acc,
        tl.load(scale + columns),
        tl.load(bias + columns),
        r,
        added_scale,
        inverse_scale,
        ADD,
        ACTIVATION,
        HALF,
    )
    y.store([i0, h0, w0, n], value.reshape(BI, BH, BW, BN))


@triton.jit
def _end_by_relu(acc, scale, bias, columns):
    return end_layer(
        acc, tl.load(scale + columns), tl.load(bias + columns), acc, 0.0, 1.0, False, 1, False
    )


@triton.jit(do_not_specialize=["down", "along"])
def int8_wgmma_block(
    x,
    w,
    scale,
    bias,
    w3,
    scale3,
    bias3,
    added,
    added_scale,
    y,
    w1,
    scale1,
    bias1,
    z,
    down,
    along,
    outputs,
    STRIDE: tl.constexpr,
    MID: tl.constexpr,
    NEXT: tl.constexpr,
    BI: tl.constexpr,
    BH: tl.constexpr,
    BW: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A `steps.Block` over boxes of pixels, as in `wgmma_convolution_boxes`.

    The 3x3 convolution's outputs stay in registers. BN columns at a time, the sum is written and multiplied for the NEXT outputs.
    """
    start_in_turn()
    BM: tl.constexpr = BI * BH * BW
    i0, h0, w0 = find_box(tl.program_id(0), down, along, BI, BH, BW)
    acc = tl.zeros((BM, MID), tl.int32)
    for tap in tl.range(0, 9, num_stages=STAGES):
        a = _load_tap(x, i0, h0, w0, tap, 0, MID, 3, 1, STRIDE, BM, MID)
        b = w.load([0, tap * MID])
        acc = tl.dot(a, b.T, acc, out_dtype=tl.int32)
    middle = _end_by_relu(acc, scale, bias, tl.arange(0, MID))
    following = tl.zeros((BM, NEXT if NEXT > 0 else 16), tl.int32)
    for n in tl.range(0, outputs, BN, num_stages=STAGES):
        b = w3.load([n, 0])
        r = added.load([i0, h0, w0, n]).reshape(BM, BN)
        part = tl.dot(middle, b.T, out_dtype=tl.int32)
        columns = n + tl.arange(0, BN)
        value = end_layer(
            part,
            tl.load(scale3 + columns),
            tl.load(bias3 + columns),
            r,
            added_scale,
            1.0,
            True,
            1,
            False,
        )
        y.store([i0, h0, w0, n], value.reshape(BI, BH, BW, BN))
        if NEXT > 0:
            following = tl.dot(value, w1.load([0, n]).T, following, out_dtype=tl.int32)
    if NEXT > 0:
        value = _end_by_relu(following, scale1, bias1, tl.arange(0, NEXT))
        z.store([i0, h0, w0, 0], value.reshape(BI, BH, BW, NEXT))


make_cache_keys(globals())
