"""Triton's kernels on the CPU: in its interpreter the same numbers as the emulation; and compiled for a GPU that is not here."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.fakes.emulation import compute_step
from tests.fakes.hopper_driver import pretend_hopper
from tests.fakes.int8_network import random_block, random_convolution, random_depthwise, random_stem

from optpipe.kernels import compilation, launches, tuner
from optpipe.kernels.operators import launch_step
from optpipe.kernels.steps import ACTIVATIONS
from optpipe.kernels.tactics import list_tactics

CHECKOUT = Path(__file__).parents[3]


@pytest.mark.slow
def test_every_kernel_gives_the_emulation_s_numbers():
    command = [sys.executable, "-m", "tests.unit.kernels.interpreted"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    compared = json.loads(ran.stdout)
    kernels = {tactic.split()[0] for tactic, _ in compared}
    assert {
        "wgmma_product",
        "wgmma_convolution_gathered",
        "wgmma_convolution_boxes",
        "wgmma_attention",
        "fp16_depthwise",
        "fp16_wgmma_stem",
        "int8_wgmma_block",
    } <= kernels
    assert [row for row in compared if row[1] > 1e-3] == []  # INT8 equal, FP16 and FP32 to rounding


def compile_for_hopper(kernel, fixed, attributes=(), **types):
    """What Triton makes of a kernel without a GPU; arguments that `types` leaves out are INT32."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        kernel,
        signature={
            name: "constexpr" if name in fixed else types.get(name, "i32") for name in names
        },
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(names.index(name),): [("tt.divisibility", 16)] for name in attributes},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm


@pytest.mark.slow
@pytest.mark.parametrize("activation", range(len(ACTIVATIONS)))
@pytest.mark.parametrize(
    ("parts", "half", "floating"), [(1, False, False), (2, True, False), (1, True, True)]
)
def test_a_product_compiles_for_hopper_s_matrix_units_without_a_gpu(
    activation, parts, half, floating
):
    from optpipe.kernels.triton.convolutions import wgmma_product

    fixed = {
        "FLOAT": floating,
        "ADD": True,
        "ACTIVATION": activation,
        "HALF": half,
        "PERSISTENT": 0,
        "STAGES": 3,
        "PARTS": parts,
    }
    given = "fp16" if floating else "i8"
    made = compile_for_hopper(
        wgmma_product,
        fixed | dict.fromkeys(("BM", "BN", "BK"), 64),
        x=f"tensordesc<{given}[64, 64]>",
        w=f"tensordesc<{given}[64, 64]>",
        weights=f"*{given}",
        added=f"tensordesc<{given}[64, {64 // parts}]>",
        y=f"tensordesc<{'fp16' if half else 'i8'}[64, {64 // parts}]>",
        scale="*fp32",
        bias="*fp32",
        added_scale="fp32",
        inverse_scale="fp32",
    )
    assert "wgmma.mma_async" in made["ptx"]
    before, waits, _ = made["ptx"].partition("griddepcontrol.wait")
    assert waits
    assert "prefetch.global.L2" in before
    assert made["cubin"]


@pytest.mark.slow
@pytest.mark.parametrize(("padded", "rows"), [(128, 64), (256, 64)])
def test_attention_in_8_bits_compiles_for_hopper_s_matrix_units_without_a_gpu(padded, rows):
    from optpipe.kernels.triton.attention import wgmma_attention

    fixed = {"H": 12, "D": 64, "P": padded, "BM": rows, "BIASED": False, "MASK": 1, "END": 2}
    types = {
        "x": "*fp8e4nv",
        "bias": "*fp8e4nv",
        "mask": "*u8",
        "y": "*fp8e4nv",
        "scale": "fp32",
        "inverse_scale": "fp32",
    }
    made = compile_for_hopper(wgmma_attention, fixed, ("x", "mask", "y"), **types)
    assert "e4m3.e4m3" in made["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "along", "loop"),
    [(3, 1, False), (3, 4, False), (5, 2, False), (7, 4, False), (7, 4, True), (9, 2, True)],
)
def test_a_depthwise_kernel_loads_what_the_outputs_of_a_strip_share_once_and_16_bytes_at_a_time(
    kernel, along, loop
):
    from optpipe.kernels.triton.images import fp16_depthwise

    fixed = {
        "R": kernel,
        "S": kernel,
        "STRIDE": 1,
        "TOP": 1,
        "LEFT": 1,
        "ACTIVATION": 2,
        "HALF": True,
    }
    fixed |= {"ALIGN": 8, "BP": 16, "BC": 64, "ALONG": along, "LOOP": loop}
    made = compile_for_hopper(
        fp16_depthwise,
        fixed,
        ("x", "w", "y", "bias"),
        x="*fp16",
        w="*fp16",
        y="*fp16",
        bias="*fp32",
        inverse_scale="fp32",
    )
    rows = 1 if loop else kernel
    bias, weights, values = 2, rows * kernel, rows * (kernel + along - 1)
    loads = made["ptx"].count("ld.global")
    assert made["ptx"].count("ld.global.v4") == loads == bias + weights + values


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
def test_kernels_with_overlapping_views_compile_for_hopper_where_triton_accepts_them(
    version, tmp_path
):
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = [
        "uv",
        "run",
        "--no-project",
        "--isolated",
        "--python",
        python,
        "--with",
        f"triton=={version}",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(CHECKOUT / "pipeline"),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    here = [*command, "python", "-m", "tests.unit.kernels.overlapping"]
    ran = subprocess.run(
        here, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False
    )
    if any(
        said in ran.stderr for said in ("No solution found", "Failed to fetch", "error sending")
    ):
        pytest.skip(f"triton {version} cannot be fetched: {ran.stderr}")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("activation", "added"), [("relu", False), ("relu", True), ("", True), ("gelu", False)]
)
@pytest.mark.parametrize("channels", [64, 88])
def test_a_library_computes_products_of_any_depth_without_a_copy_of_the_weights(
    channels, activation, added, flat
):
    end = {"flat": flat, "added": added, "activation": activation}
    step, given = random_convolution(channels, 24, 1, 5, half=True, floating=True, **end)
    tactic = next(
        each for each in list_tactics(step, given.data) if each.kernel == "product_by_cublas"
    )
    expected, found = compute_step(step, given), launch_step(step, given, tactic)
    assert (found.shape, found.dtype, found.stride()) == (
        expected.shape,
        expected.dtype,
        expected.stride(),
    )
    assert (found.float() - expected.float()).abs().max() < 5e-3
    assert given.constants[0].shape == (24, channels)


STEPS = (
    random_convolution(64, 64, 1, half=True),
    random_depthwise(activation="hardswish"),
    random_stem(activation="silu"),
    random_block(64, 128, 64, 8),
)


@pytest.mark.slow
def test_what_other_processes_compiled_is_not_compiled_again_where_it_is_launched(
    tmp_path, monkeypatch
):
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launches, "_count_multiprocessors", lambda _: 132)
    with pretend_hopper():
        with compilation.collect_kernels() as kernels:
            for step, given in (*STEPS, *STEPS):
                tuner.launch_all_tactics(step, given)
        assert knobs.runtime.jit_cache_hook is None
        assert (
            len(kernels)
            == len({json.dumps(json.loads(each), sort_keys=True) for each in kernels})
            > 5
        )
        compilation.compile_side_by_side([*kernels])
        compiled = {path.name for path in tmp_path.rglob("*.cubin")}
        names = (
            "fp16_depthwise",
            "fp16_wgmma_stem",
            "wgmma_product",
            "int8_wgmma_product_at_once",
            "int8_wgmma_block",
        )
        assert {f"{name}.cubin" for name in names} <= compiled
        folders = set(tmp_path.iterdir())
        for step, given in STEPS:
            for tactic in list_tactics(step, given.data):
                with suppress(Exception):  # compiled, and then no GPU runs it
                    launch_step(step, given, tactic)
    assert {each for each in set(tmp_path.iterdir()) - folders if [*each.glob("*.cubin")]} == set()
