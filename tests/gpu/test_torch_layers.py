"""The layers on a real GPU: every tactic gives the emulation's numbers, and so does a compiled network from a CUDA graph."""

from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import pytest
import torch
from tests.fakes.emulation import compute_step
from tests.fakes.fp8_models import draw, run_onnx
from tests.fakes.int8_network import (
    NETWORKS,
    SPEC,
    make_int8_request,
    random_attention,
    random_block,
    random_convolution,
    random_depthwise,
    random_int8,
    random_sequences,
    random_stem,
    to_gpu,
)

from optpipe.backends.inductor import Inductor, find_old_gpu
from optpipe.core.entries import ArtifactInfo, WeightsRecord
from optpipe.core.precision import Precision, prove_precision
from optpipe.kernels import steps
from optpipe.kernels.operators import launch_step
from optpipe.kernels.tactics import Operands, list_tactics

pytestmark = pytest.mark.skipif(
    find_old_gpu("cuda", Precision.INT8) is not None, reason="needs compute capability 9.0"
)
CONVOLUTIONS = {
    "residual": partial(random_convolution, 64, 256, 1, 28, added=True),
    "half": partial(random_convolution, 256, 64, 1, 14, half=True),
    "half residual": partial(random_convolution, 48, 80, 3, 14, added=True, half=True),
    "strided": partial(random_convolution, 128, 128, 3, 28, stride=2),
    "odd": partial(random_convolution, 64, 128, 1, 7, stride=2, activation=""),
    "row": partial(random_convolution, 64, 48, (1, 3), 14),
    "column": partial(random_convolution, 32, 64, (3, 1), 14),
    "dilated": partial(random_convolution, 32, 32, 3, 14, dilation=2, padding=(2, 2, 2, 2)),
    "one side": partial(random_convolution, 64, 32, 3, 14, stride=2, padding=(0, 0, 1, 1)),
    "groups": partial(random_convolution, 32, 128, 3, 14, groups=4),
    "deep groups": partial(random_convolution, 48, 96, 3, 14, groups=2),
    "narrow": partial(random_convolution, 32, 24, 3, 14, half=True),
    "linear": partial(random_convolution, 64, 48, 1, 14, flat=True),
}
BLOCKS = {
    "block": partial(random_block, size=56),
    "block without a third": partial(random_block, following=0, size=28),
    "odd block": partial(random_block, wide=128, size=15),
    "deep block": partial(random_block, 128, 512, 0, 28),
    "strided block": partial(random_block, 128, 512, 0, 56, stride=2),
}
SMOOTH = ("silu", "hardswish", "relu6", "gelu")


@pytest.mark.parametrize("images", [1, 64])
@pytest.mark.parametrize("name", CONVOLUTIONS | BLOCKS)
def test_every_tactic_gives_the_emulation_s_numbers(images, name):
    step, given = (CONVOLUTIONS | BLOCKS)[name](images=images)
    expected, on_gpu = compute_step(step, given), to_gpu(given)
    for tactic in list_tactics(step, on_gpu.data):
        assert torch.equal(launch_step(step, on_gpu, tactic).cpu(), expected), tactic


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("activation", SMOOTH)
@pytest.mark.parametrize("kernel", [1, 3])
def test_smooth_activations_are_the_emulation_s_to_their_rounding(kernel, activation, half):
    step, given = random_convolution(32, 96, kernel, 28, images=8, activation=activation, half=half)
    expected, on_gpu = compute_step(step, given).float(), to_gpu(given)
    for tactic in list_tactics(step, on_gpu.data):
        found = launch_step(step, on_gpu, tactic).cpu().float()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 if half else 1.0)
        assert half or (found != expected).float().mean() < 1e-3


OTHERS = [
    *(
        partial(random_depthwise, channels, kernel, stride, size, 8, spare=0 if half else -channels % 16, activation=activation, half=half)
        for kernel, stride, channels, size in ((3, 1, 96, 28), (3, 2, 40, 15), (5, 1, 480, 14), (7, 1, 96, 28))
        for activation, half in (("", True), ("silu", True), ("hardswish", False), ("relu6", False))
    ),
    *(partial(random_stem, activation=activation, half=half) for activation, half in (("relu", False), ("silu", True))),
    partial(random_stem, 32, 3, 7, 3, (32, 32), 8, activation="hardswish", half=False),
    partial(random_stem, 64, 3, 11, 2, (99, 97), 8, activation="relu", stride=4),
    partial(random_stem, 32, 3, 7, 3, (64, 60), 8, half=False, stride=4),
    random_attention,
    partial(random_attention, 12, 64, 64, 1, 8),
    partial(random_attention, 2, 16, 9),
    partial(random_sequences, mask=torch.bool, least=1),
    *(
        partial(random_sequences, 12, 64, tokens, 8, **end)
        for tokens in (128, 197)
        for end in (
            {}, {"half": False}, {"half": False, "e4m3": True}, {"mask": torch.float16, "kind": torch.float8_e4m3fn},
        )
    ),
    partial(random_convolution, 96, 384, 1, 14, 8, half=True, floating=True, flat=True, activation="gelu"),
    *(
        partial(random_convolution, channels, outputs, kernel, 14, 8, half=True, floating=True, **more)
        for channels, outputs, kernel, more in (
            (64, 256, 1, {"added": True}), (128, 96, 3, {"stride": 2, "activation": "silu"}), (24, 40, 1, {"activation": "hardswish"}),
            (32, 128, 3, {"groups": 4, "added": True}), (72, 72, 3, {}), (64, 64, 3, {"added": True, "activation": ""}),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("make", OTHERS)
def test_layers_in_fp16_give_the_emulation_s_numbers_to_their_rounding(make):
    step, given = make()
    expected, on_gpu = compute_step(step, given), to_gpu(given)
    for tactic in list_tactics(step, on_gpu.data):
        found = launch_step(step, on_gpu, tactic).cpu()
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), tactic
        if found.dtype == torch.float8_e4m3fn:
            assert (found.float() != expected.float()).float().mean() < 1e-2, tactic
        else:
            torch.testing.assert_close(
                found.float(), expected.float(), rtol=1e-2, atol=2e-2 if step.half else 1.0
            )


@pytest.mark.parametrize("half", [False, True])
def test_max_pooling_gives_the_emulation_s_numbers(half):
    step = steps.MaxPool(64, (3, 3), 2, (1, 1, 1, 1), half)
    data = random_int8(0, 8, 64, 15, 16)
    given = Operands(data.half() / 7 if half else data.clamp(0), None, [])
    for tactic in list_tactics(step, given.data):
        assert torch.equal(
            launch_step(step, to_gpu(given), tactic).cpu(), compute_step(step, given)
        ), tactic


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.FP16])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_tuned_compiled_and_gives_its_graph_s_outputs_from_a_cuda_graph(
    name, precision, tmp_path
):
    wanted = replace(make_int8_request(name, tmp_path, "cuda"), precision=precision)
    batch = draw(SPEC)
    if precision is Precision.INT8:
        expected = run_onnx(onnx.load(wanted.graph), batch)[0]
    else:
        with torch.inference_mode():
            expected = wanted.module().eval()(batch).numpy()
    built = Inductor().build(wanted)
    proof = prove_precision(precision, built.layers)
    sizes = {"1", "4", "8", "64"}
    assert built.details["tactics"].keys() == sizes
    info = ArtifactInfo(
        "small",
        "small",
        "inductor",
        precision,
        "cuda",
        built.file,
        WeightsRecord("random", ""),
        proof,
        options=built.options,
        details=built.details,
    )
    with Inductor().load(tmp_path, info, {}) as session:
        binding = session.bind({"image": batch.numpy()})
        binding.launch()
        found = next(iter(binding.outputs.values())).cpu().numpy()
        alone = next(iter(session.run({"image": batch[:1].numpy()}).values()))
    noise = np.square(expected).sum()
    assert (
        np.square(found - expected).sum() < 1e-3 * noise
    )  # what is in FP16 may round a few values the other way
    assert np.square(alone - expected[:1]).sum() < 2e-3 * np.square(expected[:1]).sum()
