"""What decides between math, memory and neither: three iterations of 90 µs on a device of 1 TFLOP/s and 1 GB/s."""

from collections.abc import Callable

import pytest
from tests.golden import phenomena
from tests.golden.nsys_export import Recording

from optpipe.trace.bottleneck import LimitingFactor
from optpipe.trace.read import Trace
from optpipe.trace.report import profile_from_trace
from optpipe.trace.roofline import GraphCosts, LayerCost, Peaks

PEAKS = Peaks("a device", "measured", {"fp32": 1e12}, 1e9)
RELU = LayerCost("relu", "Relu", "fp32", macs=0, bytes=20_000, fused_bytes=0)


def _conv(math_us: int, bytes_alone: int, fused_bytes: int) -> LayerCost:
    return LayerCost("conv", "Conv", "fp32", math_us * 500_000, bytes_alone, fused_bytes=fused_bytes)


def _with_own_relu() -> Recording:
    """The convolution for 60 µs, then a ReLU for 30."""
    trace = Recording()
    for begin in (0, 100, 200):
        trace.range("iter", begin, begin + 99)
        trace.kernel(phenomena.GEMM, begin + 6, begin + 66, launch=(begin + 1, begin + 2))
        trace.kernel(phenomena.RELU, begin + 66, begin + 96, launch=(begin + 3, begin + 5))
    return trace


@pytest.mark.parametrize(
    ("recording", "conv", "limit", "counted"),
    [
        # 60 and 20 µs of memory, which a fused kernel never moves: 30 of 90 µs are left
        (
            phenomena.gpu_bound,
            _conv(10, 60_000, 30_000),
            LimitingFactor.BELOW_PEAKS,
            "counted as fused: 0 kernels for 1",
        ),
        (phenomena.gpu_bound, _conv(10, 60_000, 64_000), LimitingFactor.MEMORY, "counted as fused"),
        (phenomena.gpu_bound, _conv(64, 60_000, 30_000), LimitingFactor.MATH, "counted as fused"),
        (_with_own_relu, _conv(10, 60_000, 30_000), LimitingFactor.MEMORY, "counted individually: 1 kernels for 1"),
        (_with_own_relu, _conv(10, 30_000, 30_000), LimitingFactor.BELOW_PEAKS, "counted individually"),
    ],
)
def test_seventy_percent_of_a_peak_by_what_the_kernels_move(read, recording, conv, limit, counted):
    found = profile_from_trace(read(recording()), graph=GraphCosts((conv, RELU), PEAKS, 1)).bottleneck
    assert found.verdict is limit
    assert counted in found.why


def test_normalization_that_the_graph_has_folded_away_counts_as_memory(read: Callable[[Recording], Trace]) -> None:
    """30 µs of the graph's 90, and 50 in kernels that the graph knows nothing of."""
    recording = Recording()
    for begin in (0, 100, 200):
        recording.range("iter", begin, begin + 99)
        recording.kernel(phenomena.GEMM, begin + 6, begin + 46, launch=(begin + 1, begin + 2))
        recording.kernel("void batch_norm_transform_kernel(int)", begin + 46, begin + 96, launch=(begin + 3, begin + 5))
    trace, conv = read(recording), _conv(10, 30_000, 30_000)
    found = profile_from_trace(trace, graph=GraphCosts((conv,), PEAKS, 1)).bottleneck
    assert found.verdict is LimitingFactor.MEMORY
    assert "folded into other layers counts as memory time, 50.0 µs" in found.why
    node = LayerCost("bn", "BatchNormalization", "fp32", macs=0, bytes=20_000, fused_bytes=0)
    known = profile_from_trace(trace, graph=GraphCosts((conv, node), PEAKS, 1)).bottleneck
    assert known.verdict is LimitingFactor.BELOW_PEAKS
    assert "counted individually: 1 kernels for 1" in known.why
