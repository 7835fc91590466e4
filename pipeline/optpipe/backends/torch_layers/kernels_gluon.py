# mypy: ignore-errors
"""A 1x1 convolution in Gluon, Triton's language with explicit layouts, for layers that write much and compute little.

It starts all loads of a tile at once, and those of the weights before the previous kernel ends, whereas Triton waits for one copy
after the other. The residual tile becomes the output tile in place. Source: Triton's Gluon tutorials, `03-async-copy` to `05-wgmma`.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.jit(do_not_specialize=["across"])
def int8_wgmma_product_at_once(
    x, w, added, y, scale, bias, added_scale, across, ADD: gl.constexpr, ACTIVATION: gl.constexpr, HALF: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BLOCKS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
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
    value = gl.fma(acc.to(gl.float32), gl.load(scale + columns)[None, :], gl.load(bias + columns)[None, :])
    if ADD:
        value = gl.fma(added_tile.load(layout).to(gl.float32), added_scale, value)
    if HALF:
        if ACTIVATION:
            value = gl.maximum(value, 0.0)
        ys.store(value.to(gl.float16))
    else:
        low: gl.constexpr = 0.0 if ACTIVATION else -128.0
        value = gl.minimum(gl.maximum(value, low), 127.0) + 12582912.0
        ys.store(value.to(gl.int32, bitcast=True).to(gl.int8))
    fence_async_shared()
    tma.async_copy_shared_to_global(y, [m, n], ys)
    tma.store_wait(pendings=0)
    mbarrier.invalidate(copied)
