"""FP8 on a real GPU: each product gives the CPU's sums, a whole network stays as near to FP32, and its speed is recorded."""

import numpy as np
import onnx
import pytest
import torch
from tests.fakes.fp8_models import BERT, VIT, draw, make_request, run_onnx

from optpipe.backends.inductor import Inductor, find_old_gpu
from optpipe.backends.onnx_quantized import QuantizedLayer
from optpipe.backends.torch_fp8 import lower_fp8, make_linear, quantize
from optpipe.core.precision import Precision, prove_precision
from optpipe.quantize.qdq import choose_scale, round_to_e4m3

pytestmark = pytest.mark.skipif(
    find_old_gpu("cuda", Precision.FP8) is not None, reason="needs compute capability 8.9"
)


@pytest.mark.parametrize(
    ("rows", "features", "outputs"), [(1, 768, 768), (197, 768, 3072), (1024, 3072, 768)]
)
def test_a_product_gives_the_cpu_s_sums(rows, features, outputs):
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((outputs, features)) / np.sqrt(features)).astype(np.float32)
    weight_scale = choose_scale(float(np.abs(values).max()))
    layer = QuantizedLayer(
        "layer", round_to_e4m3(values, weight_scale), np.full(outputs, weight_scale), 2.0**-6
    )
    given = torch.from_numpy(rng.standard_normal((rows, features)).astype(np.float16))
    bias = torch.from_numpy(rng.standard_normal(outputs).astype(np.float16))
    codes = quantize(given, 1 / layer.scale)
    expected = make_linear(layer, "cpu", torch.float16, bias)(codes).float()
    found = make_linear(layer, "cuda", torch.float16, bias.cuda())(codes.cuda()).cpu().float()
    # the matrix units add up with fewer bits than FP32
    assert (found - expected).norm() < 2e-3 * expected.norm()


@pytest.mark.parametrize("text", [VIT, BERT], ids=["vit", "bert"])
def test_a_network_is_compiled_proven_and_compared_with_fp16(text, tmp_path):
    wanted = make_request(text, tmp_path, "cuda")
    spec = wanted.card.inputs[0]
    batch = draw(spec)
    expected, reference = (
        run_onnx(onnx.load(wanted.graph), batch)[0],
        run_onnx(onnx.load(tmp_path / "model.onnx"), batch)[0],
    )
    built = Inductor().build(wanted)
    assert prove_precision(Precision.FP8, built.layers).proven
    program, missed = lower_fp8(wanted, kernels=True)
    assert missed == ()
    with torch.inference_mode():
        found = program(batch.cuda())[0].cpu().numpy()
    noise = np.square(expected - reference).sum()
    assert np.square(found - reference).sum() < 2 * noise
