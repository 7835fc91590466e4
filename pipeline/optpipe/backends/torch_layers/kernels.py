# mypy: ignore-errors
"""Triton kernels of INT8 and FP16 layers; activations are NHWC, weights (output channels, kernel * kernel * padded input channels).

Each kernel may start before the previous one ends (programmatic dependent launch), and waits for it before it reads or writes
anything. Tensor Cores compute INT8 products with INT32 sums, and FP16 products (FLOAT) with FP32 sums; tiles are loaded and stored by
TMA copies.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: added to a small FP32 number, it leaves that number in the lowest bits, rounded half to even."""


@triton.jit
def _in_turn():
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def _quantized(value, ACTIVATION: tl.constexpr):
    low = 0.0 if ACTIVATION else -128.0
    clipped = tl.minimum(tl.maximum(value, low), 127.0)
    return (clipped + ROUND).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _bent(value, ACTIVATION: tl.constexpr):
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
def _ended(
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
        return _bent(value, ACTIVATION).to(tl.float16)
    elif ACTIVATION > 1:  # as in `steps.BEFORE_SCALING`
        return _quantized(_bent(value, ACTIVATION) * inverse_scale, 0)
    else:  # Triton would type all returns without it
        return _quantized(value, ACTIVATION)


@triton.jit
def _store(
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
            _ended(acc, scales, biases, r, added_scale, inverse_scale, ADD, ACTIVATION, HALF),
        )
    else:
        half: tl.constexpr = BN // 2
        rest: tl.constexpr = PARTS // 2
        left, right = acc.reshape(BM, 2, half).permute(0, 2, 1).split()
        _store(
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
        _store(
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


@triton.jit(do_not_specialize=["tiles", "across", "depth"])
def wgmma_product(
    x,
    w,
    added,
    y,
    scale,
    bias,
    added_scale,
    inverse_scale,
    tiles,
    across,
    depth,
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
    """A 1x1 convolution: (pixels, depth) times (channels, depth)."""
    _in_turn()
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            m = (tile // across) * BM
            n = (tile % across) * BN
            acc = tl.zeros((BM, BN), tl.float32 if FLOAT else tl.int32)
            for k in tl.range(0, depth, BK, num_stages=STAGES):
                a = x.load([m, k])
                b = w.load([n, k])
                acc = tl.dot(a, b.T, acc, out_dtype=tl.float32 if FLOAT else tl.int32)
            _store(
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
        _store(
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
    ]
)
def wgmma_convolution_gathered(
    x,
    w,
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

    PADDED: the channels of a group do not fill the last block. GROUPED: a tile's columns belong to one group, which has `per_group`
    outputs and `depth` inputs.
    """
    _in_turn()
    tile = tl.program_id(0)
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
        b = w.load([n, step * BK])
        acc = tl.dot(a, b.T, acc, out_dtype=tl.float32 if FLOAT else tl.int32)
    _store(
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
def _find_box(tile, down, along, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr):
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


@triton.jit(do_not_specialize=["down", "along", "across", "blocks"])
def wgmma_convolution_boxes(
    x,
    w,
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

    `x` has the shape (images, height / STRIDE, STRIDE, width / STRIDE, STRIDE * channels).
    """
    _in_turn()
    BM: tl.constexpr = BI * BH * BW
    tile = tl.program_id(0)
    n = (tile % across) * BN
    i0, h0, w0 = _find_box(tile // across, down, along, BI, BH, BW)
    acc = tl.zeros((BM, BN), tl.float32 if FLOAT else tl.int32)
    for step in tl.range(0, R * R * blocks, num_stages=STAGES):
        a = _load_tap(
            x, i0, h0, w0, step // blocks, (step % blocks) * BK, channels, R, PAD, STRIDE, BM, BK
        )
        b = w.load([n, step * BK])
        acc = tl.dot(a, b.T, acc, out_dtype=tl.float32 if FLOAT else tl.int32)
    columns = n + tl.arange(0, BN)
    r = acc
    if ADD:
        r = added.load([i0, h0, w0, n]).reshape(BM, BN)
    value = _ended(
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
def _ended_by_relu(acc, scale, bias, columns):
    return _ended(
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
    _in_turn()
    BM: tl.constexpr = BI * BH * BW
    i0, h0, w0 = _find_box(tl.program_id(0), down, along, BI, BH, BW)
    acc = tl.zeros((BM, MID), tl.int32)
    for tap in tl.range(0, 9, num_stages=STAGES):
        a = _load_tap(x, i0, h0, w0, tap, 0, MID, 3, 1, STRIDE, BM, MID)
        b = w.load([0, tap * MID])
        acc = tl.dot(a, b.T, acc, out_dtype=tl.int32)
    middle = _ended_by_relu(acc, scale, bias, tl.arange(0, MID))
    following = tl.zeros((BM, NEXT if NEXT > 0 else 16), tl.int32)
    for n in tl.range(0, outputs, BN, num_stages=STAGES):
        b = w3.load([n, 0])
        r = added.load([i0, h0, w0, n]).reshape(BM, BN)
        part = tl.dot(middle, b.T, out_dtype=tl.int32)
        columns = n + tl.arange(0, BN)
        value = _ended(
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
        value = _ended_by_relu(following, scale1, bias1, tl.arange(0, NEXT))
        z.store([i0, h0, w0, 0], value.reshape(BI, BH, BW, NEXT))


@triton.jit(do_not_specialize=["cells", "height", "width", "rows", "columns", "shift"])
def fp16_reorder_cells(
    x,
    y,
    cells,
    height,
    width,
    rows,
    columns,
    shift,
    CHANNELS: tl.constexpr,
    BP: tl.constexpr,
):
    """Converts FP32 images, channels first, to FP16 cells of 2x2 pixels by 4 channels: (images, rows, columns, 16), zero outside.

    Cell q covers the pixels 2q - shift and 2q - shift + 1. A convolution with stride 2 has stride 1 over cells.
    """
    _in_turn()
    cell = tl.program_id(0) * BP + tl.arange(0, BP)
    p = cell % columns
    rest = cell // columns
    q = rest % rows
    image = rest // rows
    part = tl.arange(0, 16)
    c = part % 4
    row = 2 * q[:, None] - shift + (part // 8)[None, :]
    column = 2 * p[:, None] - shift + ((part // 4) % 2)[None, :]
    inside = (
        (row >= 0) & (row < height) & (column >= 0) & (column < width) & (c < CHANNELS)[None, :]
    )
    source = x + ((image[:, None] * CHANNELS + c[None, :]) * height + row) * width + column
    value = tl.load(source, mask=inside & (cell < cells)[:, None], other=0.0)
    tl.store(
        y + cell[:, None] * 16 + part[None, :], value.to(tl.float16), mask=(cell < cells)[:, None]
    )


@triton.jit(do_not_specialize=["pixels", "out_height", "out_width", "rows", "columns"])
def fp16_wgmma_stem(
    x,
    w,
    y,
    bias,
    inverse_scale,
    pixels,
    out_height,
    out_width,
    rows,
    columns,
    R: tl.constexpr,
    N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HALF: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A convolution of RxR cells in FP16 with FP32 sums, bias, and activation; the output is FP16 or INT8."""
    _in_turn()
    DEPTH: tl.constexpr = R * 16
    m = tl.program_id(0) * BM
    pixel = tl.minimum(m + tl.arange(0, BM), pixels - 1)
    rest = pixel // out_width
    first = ((rest // out_height) * rows + rest % out_height) * columns + pixel % out_width
    base = x + first[:, None] * 16 + tl.arange(0, DEPTH)[None, :]
    acc = tl.zeros((BM, N), tl.float32)
    for r in tl.range(0, R, num_stages=STAGES):
        a = tl.load(base + r * columns * 16)
        b = w.load([0, r * DEPTH])
        acc = tl.dot(a, b.T, acc)
    value = _bent(acc + tl.load(bias + tl.arange(0, N))[None, :], ACTIVATION)
    if HALF:
        y.store([m, 0], value.to(tl.float16))
    else:
        y.store([m, 0], _quantized(value * inverse_scale, False))


@triton.jit
def _sum_taps(
    base,
    w,
    row,
    column,
    c,
    height,
    width,
    channels,
    known,
    R: tl.constexpr,
    S: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The sums of one output pixel per row of a tile, whose kernel is AHEAD columns to the right of `base`."""
    acc = tl.zeros(known.shape, tl.float32)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            down = row + r
            along = column + (AHEAD + s)
            inside = (down >= 0) & (down < height) & (along >= 0) & (along < width)
            value = tl.load(
                base + (r * width + (AHEAD + s)) * channels, mask=inside[:, None] & known, other=0.0
            )
            weight = tl.load(w + (r * S + s) * channels + c, mask=c < channels, other=0.0)
            acc += value.to(tl.float32) * weight.to(tl.float32)[None, :]
    return acc


@triton.jit
def _end_depthwise(
    acc, target, bias, inverse_scale, written, ACTIVATION: tl.constexpr, HALF: tl.constexpr
):
    value = _bent(acc + bias[None, :], ACTIVATION)
    if HALF:
        tl.store(target, value.to(tl.float16), mask=written)
    else:
        tl.store(target, _quantized(value * inverse_scale, False), mask=written)


@triton.jit(
    do_not_specialize=[
        "strips",
        "height",
        "width",
        "out_height",
        "out_width",
        "channels",
        "out_channels",
    ]
)
def fp16_depthwise(
    x,
    w,
    y,
    bias,
    inverse_scale,
    strips,
    height,
    width,
    out_height,
    out_width,
    channels,
    out_channels,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    TOP: tl.constexpr,
    LEFT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HALF: tl.constexpr,
    ALIGN: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
    ALONG: tl.constexpr,
):
    """A depthwise convolution with FP32 sums, bias, and activation; the output is FP16 or INT8, zero-padded after the last channel.

    Weights are (R * S, channels); channels are multiples of ALIGN. A strip is ALONG (1, 2, or 4) output pixels of a row, whose kernels
    overlap, and the compiler loads shared pixels once. The strips of a tile are neighbors, so most of their input is in the cache.
    """
    _in_turn()
    channels = channels // ALIGN * ALIGN
    out_channels = out_channels // ALIGN * ALIGN
    strip = tl.program_id(0) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    across = tl.cdiv(out_width, ALONG)
    rest = strip // across
    first = (strip % across) * ALONG
    row = (rest % out_height) * STRIDE - TOP
    column = first * STRIDE - LEFT
    base = (
        x
        + (((rest // out_height) * height + row) * width + column)[:, None] * channels
        + c[None, :]
    )
    known = (strip < strips)[:, None] & (c < channels)[None, :]
    one = _sum_taps(base, w, row, column, c, height, width, channels, known, R, S, 0)
    if ALONG > 1:
        two = _sum_taps(base, w, row, column, c, height, width, channels, known, R, S, STRIDE)
    if ALONG > 2:
        three = _sum_taps(base, w, row, column, c, height, width, channels, known, R, S, 2 * STRIDE)
        four = _sum_taps(base, w, row, column, c, height, width, channels, known, R, S, 3 * STRIDE)
    biases = tl.load(bias + c, mask=c < channels, other=0.0)
    target = y + (rest * out_width + first)[:, None] * out_channels + c[None, :]
    written = (strip < strips)[:, None] & (c < out_channels)[None, :]
    _end_depthwise(one, target, biases, inverse_scale, written, ACTIVATION, HALF)
    if ALONG > 1:
        more = written & (first + 1 < out_width)[:, None]
        _end_depthwise(two, target + out_channels, biases, inverse_scale, more, ACTIVATION, HALF)
    if ALONG > 2:
        more = written & (first + 2 < out_width)[:, None]
        _end_depthwise(
            three, target + 2 * out_channels, biases, inverse_scale, more, ACTIVATION, HALF
        )
        more = written & (first + 3 < out_width)[:, None]
        _end_depthwise(
            four, target + 3 * out_channels, biases, inverse_scale, more, ACTIVATION, HALF
        )


@triton.jit
def _larger(left, right):
    """The elementwise maximum of pairs of unsigned 16-bit integers."""
    return tl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [left, right], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit(do_not_specialize=["pixels", "height", "width", "out_height", "out_width"])
def max_pool(
    x,
    y,
    pixels,
    height,
    width,
    out_height,
    out_width,
    words,
    R: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    FLOAT: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """Max pooling of FP16 values, or of INT8 values that are not negative, with four channels in a word.

    Of two INT8 values in a 16-bit integer, the upper byte decides the maximum; for the lower bytes, the upper ones are cleared.
    """
    _in_turn()
    pixel = tl.program_id(0) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    rest = pixel // out_width
    top = (rest % out_height) * STRIDE - PAD
    left = (pixel % out_width) * STRIDE - PAD
    image = rest // out_height
    if FLOAT:
        upper = tl.full((BP, BC), float("-inf"), tl.float16)
    else:
        upper = tl.zeros((BP, BC), tl.int32)
        lower = tl.zeros((BP, BC), tl.int32)
    for r in tl.static_range(R):
        for s in tl.static_range(R):
            row = top + r
            column = left + s
            inside = (
                (row >= 0) & (row < height) & (column >= 0) & (column < width) & (pixel < pixels)
            )
            source = x + ((image * height + row) * width + column)[:, None] * words + c[None, :]
            known = inside[:, None] & (c < words)[None, :]
            if FLOAT:
                upper = tl.maximum(upper, tl.load(source, mask=known, other=float("-inf")))
            else:
                value = tl.load(source, mask=known, other=0)
                upper = _larger(upper, value)
                lower = _larger(lower, value & 0x00FF00FF)
    target = y + pixel[:, None] * words + c[None, :]
    if not FLOAT:
        upper = (upper & -16711936) | lower  # 0xFF00FF00
    tl.store(target, upper, mask=(pixel < pixels)[:, None] & (c < words)[None, :])


for _each in [each for each in globals().values() if isinstance(each, triton.JITFunction)]:
    # with Triton 3.6 the cache key of a function depends on whether its callees have keys, so every process makes all of them
    _each.cache_key  # noqa: B018


@triton.jit
def _write(target, value, inverse_scale, mask, END: tl.constexpr):
    if END == 1:
        tl.store(target, _quantized(value * inverse_scale, 0), mask=mask)
    elif END == 2:
        bounded = tl.minimum(tl.maximum(value * inverse_scale, -448.0), 448.0)
        tl.store(target, bounded.to(tl.float8e4nv), mask=mask)
    else:
        tl.store(target, value.to(tl.float16), mask=mask)


@triton.jit(do_not_specialize=["count"])
def fp16_quantize(x, y, inverse_scale, count, END: tl.constexpr, BLOCK: tl.constexpr):
    """FP16 values to INT8 (1) or E4M3 (2)."""
    _in_turn()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _write(
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
    _in_turn()
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
    _write(
        y + queries[:, None] * (H * D) + head * D + column[None, :],
        value,
        inverse_scale,
        asked[:, None],
        END,
    )
