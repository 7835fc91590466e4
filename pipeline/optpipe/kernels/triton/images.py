# mypy: ignore-errors
"""Layers of images with few products for each value: first convolutions, depthwise convolutions, and max pooling, in NHWC."""

import triton
import triton.language as tl

from optpipe.kernels.triton.endings import activate, make_cache_keys, quantize, start_in_turn


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
    STRIDE: tl.constexpr,
    BP: tl.constexpr,
):
    """Converts FP32 images, channels first, to FP16 cells of STRIDE x STRIDE pixels by 4 channels: (images, rows, columns, numbers of
    a cell), zero outside.

    Cell q begins at pixel STRIDE * q - shift. A convolution with that stride has stride 1 over cells.
    """
    start_in_turn()
    CELL: tl.constexpr = 4 * STRIDE * STRIDE
    cell = tl.program_id(0) * BP + tl.arange(0, BP)
    p = cell % columns
    rest = cell // columns
    q = rest % rows
    image = rest // rows
    part = tl.arange(0, CELL)
    c = part % 4
    row = STRIDE * q[:, None] - shift + (part // (4 * STRIDE))[None, :]
    column = STRIDE * p[:, None] - shift + ((part // 4) % STRIDE)[None, :]
    inside = (
        (row >= 0) & (row < height) & (column >= 0) & (column < width) & (c < CHANNELS)[None, :]
    )
    source = x + ((image[:, None] * CHANNELS + c[None, :]) * height + row) * width + column
    value = tl.load(source, mask=inside & (cell < cells)[:, None], other=0.0)
    tl.store(
        y + cell[:, None] * CELL + part[None, :], value.to(tl.float16), mask=(cell < cells)[:, None]
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
    CELL: tl.constexpr,
    TOGETHER: tl.constexpr,
    N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HALF: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A convolution of RxR cells of CELL numbers in FP16 with FP32 sums, bias, and activation; the output is FP16 or INT8.

    TOGETHER cells of a row, which divide R, are multiplied at once.
    """
    start_in_turn()
    DEPTH: tl.constexpr = TOGETHER * CELL
    PARTS: tl.constexpr = R // TOGETHER
    m = tl.program_id(0) * BM
    pixel = tl.minimum(m + tl.arange(0, BM), pixels - 1)
    rest = pixel // out_width
    first = ((rest // out_height) * rows + rest % out_height) * columns + pixel % out_width
    base = x + first[:, None] * CELL + tl.arange(0, DEPTH)[None, :]
    acc = tl.zeros((BM, N), tl.float32)
    for step in tl.range(0, R * PARTS, num_stages=STAGES):
        a = tl.load(base + (step // PARTS * columns + step % PARTS * TOGETHER) * CELL)
        b = w.load([0, step * DEPTH])
        acc = tl.dot(a, b.T, acc)
    value = activate(acc + tl.load(bias + tl.arange(0, N))[None, :], ACTIVATION)
    if HALF:
        y.store([m, 0], value.to(tl.float16))
    else:
        y.store([m, 0], quantize(value * inverse_scale, False))


@triton.jit
def _add_row_of_taps(acc, r, w, c, strip, known, S: tl.constexpr, AHEAD: tl.constexpr):
    """Adds row `r` of the kernel to one output pixel per row of a tile, whose kernel is AHEAD columns to the right of the strip's."""
    base, row, column, height, width, channels = strip
    down = row + r
    for s in tl.static_range(S):
        along = column + (AHEAD + s)
        inside = (down >= 0) & (down < height) & (along >= 0) & (along < width)
        value = tl.load(
            base + (r * width + (AHEAD + s)) * channels, mask=inside[:, None] & known, other=0.0
        )
        weight = tl.load(w + (r * S + s) * channels + c, mask=c < channels, other=0.0)
        acc += value.to(tl.float32) * weight.to(tl.float32)[None, :]
    return acc


@triton.jit
def _add_row_to_strip(
    sums, r, w, c, strip, known, S: tl.constexpr, STRIDE: tl.constexpr, ALONG: tl.constexpr
):
    """Adds row `r` of the kernel to the ALONG output pixels of a strip."""
    one, two, three, four = sums
    one = _add_row_of_taps(one, r, w, c, strip, known, S, 0)
    if ALONG > 1:
        two = _add_row_of_taps(two, r, w, c, strip, known, S, STRIDE)
    if ALONG > 2:
        three = _add_row_of_taps(three, r, w, c, strip, known, S, 2 * STRIDE)
        four = _add_row_of_taps(four, r, w, c, strip, known, S, 3 * STRIDE)
    return one, two, three, four


@triton.jit
def _end_depthwise(
    acc, target, bias, inverse_scale, written, ACTIVATION: tl.constexpr, HALF: tl.constexpr
):
    value = activate(acc + bias[None, :], ACTIVATION)
    if HALF:
        tl.store(target, value.to(tl.float16), mask=written)
    else:
        tl.store(target, quantize(value * inverse_scale, False), mask=written)


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
    LOOP: tl.constexpr = False,
):
    """A depthwise convolution with FP32 sums, bias, and activation; the output is FP16 or INT8, zero-padded after the last channel.

    Weights are (R * S, channels); channels are multiples of ALIGN. A strip is ALONG (1, 2, or 4) output pixels of a row, whose kernels
    overlap, and the compiler loads shared pixels once. The strips of a tile are neighbors, so most of their input is in the cache.
    With LOOP the rows of the kernel are a loop; otherwise they are unrolled, which large kernels have no registers for.
    """
    start_in_turn()
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
    place = base, row, column, height, width, channels
    zeros = tl.zeros(known.shape, tl.float32)
    sums = zeros, zeros, zeros, zeros
    if LOOP:
        for r in range(R):
            sums = _add_row_to_strip(sums, r, w, c, place, known, S, STRIDE, ALONG)
    else:
        for r in tl.static_range(R):
            sums = _add_row_to_strip(sums, r, w, c, place, known, S, STRIDE, ALONG)
    one, two, three, four = sums
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
    start_in_turn()
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


make_cache_keys(globals())
