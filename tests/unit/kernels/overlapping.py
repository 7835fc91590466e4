"""Run by `test_kernels` with a Triton that accepts overlapping views of shared memory: compiles the kernels with such views for Hopper."""

from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from optpipe.kernels.triton import gluon as kernels


def tiles(kind, *block):
    bits = {"i8": 8, "fp16": 16}[kind]
    width = block[-1] * bits // 8
    layout = gl.NVMMASharedLayout(min(width, 128) if width > 16 else 0, bits, rank=len(block))
    return f"tensordesc<{kind}{list(block)},{layout!r}>"


def compile_for_hopper(kernel, warps, fixed, **types):
    fixed, names = {**fixed, "num_warps": warps}, kernel.arg_names
    signature = {name: "constexpr" if name in fixed else types.get(name, "*fp32") for name in names}
    source = GluonASTSource(
        kernel, signature, {(names.index(name),): value for name, value in fixed.items()}, {}
    )
    ptx = compile_kernel(
        source, GPUTarget("cuda", 90, 32), {"num_warps": warps, "launch_pdl": True}
    ).asm["ptx"]
    assert "wgmma.mma_async" in ptx


def compile_all():
    numbers = {"tiles": "i32", "added_scale": "fp32", "inverse_scale": "fp32"}
    place = {"DOWN": 7, "ALONG": 7}
    for following in (0, 64):
        block = tiles("i8", 1, 8, 8, 128)
        compile_for_hopper(
            kernels.int8_wgmma_block_at_once,
            4,
            place | {"MID": 64, "WIDE": 256, "NEXT": following, "BN": 128},
            upper=tiles("i8", 1, 8, 8, 64),
            lower=tiles("i8", 1, 2, 8, 64),
            w=tiles("i8", 64, 64),
            w3=tiles("i8", 128, 64),
            added=block,
            y=block,
            w1=tiles("i8", 64, 128),
            z=tiles("i8", 1, 8, 8, 64),
            **numbers,
        )
    for cells, more, outputs, half in ((4, 4, 64, False), (2, 1, 16, False), (2, 1, 32, True)):
        fixed = place | {
            "R": cells,
            "MORE": more,
            "N": outputs,
            "ROWS": 16,
            "ACTIVATION": 2,
            "HALF": half,
        }
        compile_for_hopper(
            kernels.fp16_wgmma_stem_at_once,
            8,
            fixed,
            upper=tiles("fp16", 1, 16, 8, 16),
            lower=tiles("fp16", 1, more, 8, 16),
            w=tiles("fp16", outputs, 16),
            y=tiles("fp16" if half else "i8", 1, 16, 8, outputs),
            **numbers,
        )


if __name__ == "__main__":
    compile_all()
