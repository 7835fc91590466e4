"""Ranges and histograms computed in the GPU's memory are those of the CPU."""

import numpy as np
import pytest
from tests.fakes.graphs import onnx_model

from optpipe.core.errors import StageError
from optpipe.quantize.collect import Collector
from optpipe.quantize.ranges import METHODS, compute_range

X = np.random.default_rng(0).standard_normal((24, 16, 32, 32)).astype(np.float32)
TENSORS = ("x", "r", "c")


def collect(collector, batches):
    for each in batches:
        collector.add(each)
    return collector.statistics()


@pytest.fixture
def graph(tmp_path):
    weight = np.random.default_rng(1).standard_normal((32, 16, 3, 3)).astype(np.float32) / 12
    nodes = [
        ("Conv", "x w", "c", {"name": "conv", "pads": [1, 1, 1, 1]}),
        ("Relu", "c", "r", {"name": "relu"}),
        ("GlobalAveragePool", "r", "y", {"name": "pool"}),
    ]
    shapes = {"x": ["n", 16, 32, 32]}, {"y": ["n", 32, 1, 1]}
    onnx_model(nodes, *shapes, path=tmp_path / "m.onnx", w=weight)
    return tmp_path / "m.onnx"


def test_statistics_are_those_of_the_cpu(graph) -> None:
    parts = [{"x": X[:10]}, {"x": X[10:]}]
    on_gpu, on_cpu = (
        collect(Collector(graph, TENSORS, histograms=True, device=device), parts) for device in ("cuda", "cpu")
    )
    assert np.array_equal(on_gpu["x"].counts, on_cpu["x"].counts)
    for name in TENSORS:
        assert on_gpu[name].counts.sum() == on_cpu[name].counts.sum()
        assert on_gpu[name].low == pytest.approx(on_cpu[name].low, rel=1e-4, abs=1e-5)
        assert on_gpu[name].high == pytest.approx(on_cpu[name].high, rel=1e-4)
    for method in METHODS:
        gpu, cpu = ({name: compute_range(each, method) for name, each in seen.items()} for seen in (on_gpu, on_cpu))
        assert gpu == pytest.approx(cpu, rel=0.02)


def test_what_is_not_finite_is_named(graph) -> None:
    poisoned = X.copy()
    poisoned[3, 0, 0, 0] = np.nan
    with pytest.raises(StageError, match="tensor 'x' contains NaN or Inf"):
        Collector(graph, TENSORS, histograms=True, device="cuda").add({"x": poisoned})
