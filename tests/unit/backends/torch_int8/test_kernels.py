"""Triton's kernels on the CPU: in its interpreter the same numbers as the emulation; and compiled for a GPU that is not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from optpipe.backends.torch_int8.steps import ACTIVATIONS

CHECKOUT = Path(__file__).parents[4]


@pytest.mark.slow
def test_every_kernel_gives_the_emulation_s_numbers():
    command = [sys.executable, "-m", "tests.unit.backends.torch_int8.interpreted"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    compared = json.loads(ran.stdout)
    kernels = {tactic.split()[0] for tactic, _ in compared}
    assert {
        "int8_wgmma_product",
        "int8_wgmma_convolution_gathered",
        "int8_wgmma_convolution_boxes",
        "fp16_depthwise",
        "fp16_wgmma_stem",
    } <= kernels
    assert [row for row in compared if row[1] > 1e-3] == []  # INT8 equal, FP16 and FP32 to rounding


@pytest.mark.slow
@pytest.mark.parametrize("activation", range(len(ACTIVATIONS)))
@pytest.mark.parametrize(("parts", "half"), [(1, False), (2, True)])
def test_a_product_compiles_for_hopper_s_matrix_units_without_a_gpu(activation, parts, half):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from optpipe.backends.torch_int8.kernels import int8_wgmma_product

    fixed = {"ADD": True, "ACTIVATION": activation, "HALF": half, "PERSISTENT": 0, "STAGES": 3, "PARTS": parts}
    fixed |= {"BM": 64, "BN": 64, "BK": 64}
    types = {"x": "tensordesc<i8[64, 64]>", "w": "tensordesc<i8[64, 64]>", "scale": "*fp32", "bias": "*fp32"}
    types |= {
        "added": f"tensordesc<i8[64, {64 // parts}]>",
        "y": f"tensordesc<{'fp16' if half else 'i8'}[64, {64 // parts}]>",
    }
    types |= {
        "added_scale": "fp32",
        "inverse_scale": "fp32",
        "tiles": "i32",
        "across": "i32",
        "depth": "i32",
        **dict.fromkeys(fixed, "constexpr"),
    }
    names = int8_wgmma_product.arg_names
    source = ASTSource(
        int8_wgmma_product,
        signature={name: types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert compiled.asm["cubin"]


@pytest.mark.slow
@pytest.mark.parametrize("along", [1, 2, 4])
@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_a_depthwise_kernel_loads_what_the_outputs_of_a_strip_share_once_and_16_bytes_at_a_time(kernel, along):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from optpipe.backends.torch_int8.kernels import fp16_depthwise

    fixed = {
        "R": kernel,
        "S": kernel,
        "STRIDE": 1,
        "TOP": 1,
        "LEFT": 1,
        "ACTIVATION": 2,
        "HALF": True,
        "ALIGN": 8,
        "BP": 16,
        "BC": 64,
        "ALONG": along,
    }
    types = {"x": "*fp16", "w": "*fp16", "y": "*fp16", "bias": "*fp32", "inverse_scale": "fp32"}
    names = fp16_depthwise.arg_names
    aligned = [("tt.divisibility", 16)]
    source = ASTSource(
        fp16_depthwise,
        signature={name: types.get(name, "constexpr" if name in fixed else "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(names.index(name),): aligned for name in ("x", "w", "y", "bias")},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    bias, weights, values = 2, kernel**2, kernel * (kernel + along - 1)
    assert (
        compiled.asm["ptx"].count("ld.global.v4") == compiled.asm["ptx"].count("ld.global") == bias + weights + values
    )
