# mypy: ignore-errors
"""Kernels in Gluon, Triton's language with explicit layouts: a 1x1 convolution, a residual block, and a first convolution.

They start all loads of a tile at once, and those of the weights before the previous kernel ends, whereas Triton waits for one copy
after the other. A residual tile becomes the output tile in place. Source: Triton's Gluon tutorials, `03-async-copy` to `05-wgmma`.

The block and the first convolution are persistent: weights stay in shared memory, and the next tile is loaded during the present one.
A tile is 8 pixels wide. Its input is there once for each column of the kernel; a kernel row begins 8 pixels after the one above it,
which is a multiple of the Tensor Cores' swizzling pattern, so that all rows of the kernel read one copy.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from optpipe.kernels.triton.convolutions import find_box
from optpipe.kernels.triton.endings import activate, quantize


@gluon.jit
def _copy_pixels(
    upper,
    lower,
    target,
    copied,
    first,
    image,
    row,
    column,
    within,
    ROWS: gl.constexpr,
    MORE: gl.constexpr,
    SHIFTS: gl.constexpr,
):
    """ROWS + MORE rows of 8 pixels for each of SHIFTS kernel columns; `target` is (rows, 8, channels)."""
    channels: gl.constexpr = upper.block_shape[3]
    mbarrier.expect(
        copied,
        SHIFTS * (ROWS + MORE) * 8 * channels * (target.dtype.primitive_bitwidth // 8),
        pred=within,
    )
    for s in gl.static_range(SHIFTS):
        at = first + s * (ROWS + MORE)
        rows = target.index(at)._reinterpret(target.dtype, [1, ROWS, 8, channels], upper.layout)
        tma.async_copy_global_to_shared(
            upper, [image, row, column + s, 0], copied, rows, pred=within
        )
        rows = target.index(at + ROWS)._reinterpret(
            target.dtype, [1, MORE, 8, channels], lower.layout
        )
        tma.async_copy_global_to_shared(
            lower, [image, row + ROWS, column + s, 0], copied, rows, pred=within
        )


@gluon.jit
def _copy_added(
    added, target, copied, image, row, column, within, CHUNKS: gl.constexpr, BN: gl.constexpr
):
    mbarrier.expect(copied, CHUNKS * 64 * BN, pred=within)
    for c in gl.static_range(CHUNKS):
        part = target.index(c)._reinterpret(gl.int8, [1, 8, 8, BN], added.layout)
        tma.async_copy_global_to_shared(
            added, [image, row, column, c * BN], copied, part, pred=within
        )


@gluon.jit(do_not_specialize=["tiles"])
def int8_wgmma_block_at_once(
    upper,
    lower,
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
    tiles,
    DOWN: gl.constexpr,
    ALONG: gl.constexpr,
    MID: gl.constexpr,
    WIDE: gl.constexpr,
    NEXT: gl.constexpr,
    BN: gl.constexpr,
    num_warps: gl.constexpr,
):
    """A `steps.Block` with stride 1 over tiles of 8x8 pixels; BN columns of the sum at a time."""
    gdc_launch_dependents()
    CHUNKS: gl.constexpr = WIDE // BN
    narrow: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, MID, 32]
    )
    broad: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BN, 32]
    )
    xs = gl.allocate_shared_memory(gl.int8, [30, 8, MID], w.layout)
    ws = gl.allocate_shared_memory(gl.int8, [9, MID, MID], w.layout)
    w3s = gl.allocate_shared_memory(gl.int8, [CHUNKS, BN, MID], w3.layout)
    if NEXT > 0:
        w1s = gl.allocate_shared_memory(gl.int8, [CHUNKS, NEXT, BN], w1.layout)
    sums = gl.allocate_shared_memory(
        gl.int8,
        [CHUNKS, 64, BN],
        gl.NVMMASharedLayout(swizzle_byte_width=BN, element_bitwidth=8, rank=2),
    )
    middle = gl.allocate_shared_memory(gl.int8, [64, MID], w.layout)
    copied = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(3):
        mbarrier.init(copied.index(at), count=1)
    mbarrier.expect(copied.index(0), MID * (9 * MID + WIDE) + WIDE * NEXT)
    for tap in gl.static_range(9):
        tma.async_copy_global_to_shared(w, [0, tap * MID], copied.index(0), ws.index(tap))
    for chunk in gl.static_range(CHUNKS):
        tma.async_copy_global_to_shared(w3, [chunk * BN, 0], copied.index(0), w3s.index(chunk))
        if NEXT > 0:
            tma.async_copy_global_to_shared(w1, [0, chunk * BN], copied.index(0), w1s.index(chunk))
    columns = gl.arange(0, MID, layout=gl.SliceLayout(0, narrow))
    many = gl.arange(0, BN, layout=gl.SliceLayout(0, broad))
    gdc_wait()
    begin = gl.program_id(0)
    step = gl.num_programs(0)
    i, h, v = find_box(begin, DOWN, ALONG, 1, 8, 8)
    _copy_pixels(upper, lower, xs, copied.index(1), 0, i, h - 1, v - 1, begin < tiles, 8, 2, 3)
    _copy_added(added, sums, copied.index(2), i, h, v, begin < tiles, CHUNKS, BN)
    phase = 0
    mbarrier.wait(copied.index(0), 0)
    for tile in range(begin, tiles, step):
        mbarrier.wait(copied.index(1), phase)
        acc = gl.zeros([64, MID], gl.int32, narrow)
        for tap in gl.static_range(9):
            rows = xs.index(tap % 3 * 10 + tap // 3)._reinterpret(gl.int8, [64, MID], w.layout)
            acc = warpgroup_mma(
                rows, ws.index(tap).permute((1, 0)), acc, use_acc=tap > 0, is_async=True
            )
        a = gl.load(scale + columns)[None, :]
        b = gl.load(bias + columns)[None, :]
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        debug_barrier()
        i, h, v = find_box(tile + step, DOWN, ALONG, 1, 8, 8)
        _copy_pixels(
            upper, lower, xs, copied.index(1), 0, i, h - 1, v - 1, tile + step < tiles, 8, 2, 3
        )
        middle.store(quantize(gl.fma(acc.to(gl.float32), a, b), 1))
        fence_async_shared()
        debug_barrier()
        following = gl.zeros([64, NEXT if NEXT > 0 else MID], gl.int32, narrow)
        i, h, v = find_box(tile, DOWN, ALONG, 1, 8, 8)
        mbarrier.wait(copied.index(2), phase)
        for c in range(CHUNKS):
            none = gl.zeros([64, BN], gl.int32, broad)
            part = warpgroup_mma(
                middle, w3s.index(c).permute((1, 0)), none, use_acc=False, is_async=True
            )
            a3 = gl.load(scale3 + c * BN + many)[None, :]
            b3 = gl.load(bias3 + c * BN + many)[None, :]
            r = sums.index(c).load(broad)
            product = warpgroup_mma_wait(num_outstanding=0, deps=[part])
            # the conversion of INT8 has an eighth of the rate of additions, so that of small INT32 is done by one
            wide = (r.to(gl.int32) + 0x4B400000).to(gl.float32, bitcast=True) - 12582912.0
            value = gl.fma(wide, added_scale, gl.fma(product.to(gl.float32), a3, b3))
            sums.index(c).store(quantize(value, 1))
            fence_async_shared()
            debug_barrier()
            done = sums.index(c)._reinterpret(gl.int8, [1, 8, 8, BN], y.layout)
            tma.async_copy_shared_to_global(y, [i, h, v, c * BN], done)
            if NEXT > 0:
                following = warpgroup_mma(sums.index(c), w1s.index(c).permute((1, 0)), following)
        if NEXT > 0:
            debug_barrier()
            a = gl.load(scale1 + columns)[None, :]
            b = gl.load(bias1 + columns)[None, :]
            middle.store(quantize(gl.fma(following.to(gl.float32), a, b), 1))
            fence_async_shared()
            debug_barrier()
            done = middle._reinterpret(gl.int8, [1, 8, 8, NEXT], z.layout)
            tma.async_copy_shared_to_global(z, [i, h, v, 0], done)
        tma.store_wait(pendings=0)
        debug_barrier()
        i, h, v = find_box(tile + step, DOWN, ALONG, 1, 8, 8)
        _copy_added(added, sums, copied.index(2), i, h, v, tile + step < tiles, CHUNKS, BN)
        phase ^= 1
    for at in gl.static_range(3):
        mbarrier.invalidate(copied.index(at))


@gluon.jit(do_not_specialize=["tiles"])
def fp16_wgmma_stem_at_once(
    upper,
    lower,
    w,
    y,
    bias,
    inverse_scale,
    tiles,
    DOWN: gl.constexpr,
    ALONG: gl.constexpr,
    R: gl.constexpr,
    MORE: gl.constexpr,
    N: gl.constexpr,
    ROWS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HALF: gl.constexpr,
    num_warps: gl.constexpr,
):
    """A convolution of RxR cells as in `fp16_wgmma_stem`, over tiles of ROWS rows of 8 pixels."""
    gdc_launch_dependents()
    TALL: gl.constexpr = ROWS + MORE
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, N, 16]
    )
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    done: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=y.layout.swizzle_byte_width, element_bitwidth=16 if HALF else 8, rank=2
    )
    xs = gl.allocate_shared_memory(gl.float16, [2 * R * TALL, 8, 16], flat)
    ws = gl.allocate_shared_memory(gl.float16, [R * R, N, 16], flat)
    ys = gl.allocate_shared_memory(y.dtype, [ROWS * 8, N], done)
    copied = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(3):
        mbarrier.init(copied.index(at), count=1)
    mbarrier.expect(copied.index(2), R * R * N * 32)
    for tap in gl.static_range(R * R):
        tma.async_copy_global_to_shared(w, [0, tap * 16], copied.index(2), ws.index(tap))
    b = gl.load(bias + gl.arange(0, N, layout=gl.SliceLayout(0, layout)))[None, :]
    gdc_wait()
    begin = gl.program_id(0)
    step = gl.num_programs(0)
    i, h, v = find_box(begin, DOWN, ALONG, 1, ROWS, 8)
    _copy_pixels(upper, lower, xs, copied.index(0), 0, i, h, v, begin < tiles, ROWS, MORE, R)
    turn = 0
    mbarrier.wait(copied.index(2), 0)
    for tile in range(begin, tiles, step):
        side = turn & 1
        i, h, v = find_box(tile + step, DOWN, ALONG, 1, ROWS, 8)
        ahead = (1 - side) * R * TALL
        _copy_pixels(
            upper,
            lower,
            xs,
            copied.index(1 - side),
            ahead,
            i,
            h,
            v,
            tile + step < tiles,
            ROWS,
            MORE,
            R,
        )
        mbarrier.wait(copied.index(side), (turn >> 1) & 1)
        acc = gl.zeros([ROWS * 8, N], gl.float32, layout)
        for tap in gl.static_range(R * R):
            rows = xs.index((side * R + tap % R) * TALL + tap // R)._reinterpret(
                gl.float16, [ROWS * 8, 16], flat
            )
            acc = warpgroup_mma(
                rows, ws.index(tap).permute((1, 0)), acc, use_acc=tap > 0, is_async=True
            )
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        value = activate(acc + b, ACTIVATION)
        tma.store_wait(pendings=0)
        debug_barrier()
        if HALF:
            ys.store(value.to(gl.float16))
        else:
            ys.store(quantize(value * inverse_scale, 0))
        fence_async_shared()
        debug_barrier()
        i, h, v = find_box(tile, DOWN, ALONG, 1, ROWS, 8)
        tma.async_copy_shared_to_global(
            y, [i, h, v, 0], ys._reinterpret(y.dtype, [1, ROWS, 8, N], y.layout)
        )
        turn += 1  # noqa: SIM113 - Gluon has no enumerate
    tma.store_wait(pendings=0)
    for at in gl.static_range(3):
        mbarrier.invalidate(copied.index(at))


@gluon.jit(do_not_specialize=["across"])
def int8_wgmma_product_at_once(
    x,
    w,
    added,
    y,
    scale,
    bias,
    added_scale,
    across,
    ADD: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HALF: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    BLOCKS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """(pixels, BLOCKS * BK) times (channels, BLOCKS * BK); rounding as in `kernels`."""
    gdc_launch_dependents()
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, min(BN, 128), 32]
    )
    tile = gl.program_id(0)
    m = (tile // across) * BM
    n = (tile % across) * BN
    xs = gl.allocate_shared_memory(gl.int8, [BLOCKS, BM, BK], x.layout)
    ws = gl.allocate_shared_memory(gl.int8, [BLOCKS, BN, BK], w.layout)
    ys = gl.allocate_shared_memory(y.dtype, [BM, BN], y.layout)
    copied = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(copied, count=1)
    mbarrier.expect(copied, BLOCKS * (BM + BN) * BK + (BM * BN if ADD else 0))
    for k in gl.static_range(BLOCKS):
        tma.async_copy_global_to_shared(w, [n, k * BK], copied, ws.index(k))
    gdc_wait()
    for k in gl.static_range(BLOCKS):
        tma.async_copy_global_to_shared(x, [m, k * BK], copied, xs.index(k))
    if ADD:
        if HALF:
            added_tile = gl.allocate_shared_memory(gl.int8, [BM, BN], added.layout)
        else:
            added_tile = ys
        tma.async_copy_global_to_shared(added, [m, n], copied, added_tile)
    acc = gl.zeros([BM, BN], gl.int32, layout)
    mbarrier.wait(copied, 0)
    for k in gl.static_range(BLOCKS):
        acc = warpgroup_mma(xs.index(k), ws.index(k).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    columns = n + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
    value = gl.fma(
        acc.to(gl.float32), gl.load(scale + columns)[None, :], gl.load(bias + columns)[None, :]
    )
    if ADD:
        value = gl.fma(added_tile.load(layout).to(gl.float32), added_scale, value)
    if HALF:
        if ACTIVATION:
            value = gl.maximum(value, 0.0)
        ys.store(value.to(gl.float16))
    else:
        ys.store(quantize(value, ACTIVATION))
    fence_async_shared()
    tma.async_copy_shared_to_global(y, [m, n], ys)
    tma.store_wait(pendings=0)
    mbarrier.invalidate(copied)
