import numpy as np
import onnx
import pytest

from optpipe.core.errors import BadInputError, StageError
from optpipe.quantize.collect import Collector, choose_batch_size

X = np.random.default_rng(0).standard_normal((10, 16, 8, 8)).astype(np.float32)
TENSORS = ("x", "r1", "s")


def collect(collector, batches):
    for each in batches:
        collector.add(each)
    return collector.statistics()


@pytest.fixture
def graph(residual_model, tmp_path):
    onnx.save(residual_model, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_batches_do_not_matter(graph) -> None:
    parts = collect(Collector(graph, TENSORS, histograms=True), [{"x": X[:3]}, {"x": X[3:4]}, {"x": X[4:]}])
    whole = collect(Collector(graph, TENSORS, histograms=True), [{"x": X}])
    for name in TENSORS:
        assert parts[name].amax == pytest.approx(whole[name].amax, rel=1e-6)
        assert parts[name].magnitudes.total == whole[name].magnitudes.total
    assert np.array_equal(parts["x"].magnitudes.counts, whole["x"].magnitudes.counts)
    assert whole["x"].amax == np.abs(X).max()
    assert whole["r1"].unsigned
    assert not whole["s"].unsigned


def test_extremes_alone_keep_no_histogram(graph) -> None:
    assert collect(Collector(graph, TENSORS, histograms=False), [{"x": X}])["s"].magnitudes is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_named(graph, bad) -> None:
    poisoned = X.copy()
    poisoned[0, 0, 0, 0] = bad
    with pytest.raises(StageError, match="tensor 'x' contains NaN or Inf"):
        Collector(graph, TENSORS, histograms=True).add({"x": poisoned})


def test_what_the_graph_rejects_is_bad_input(graph) -> None:
    with pytest.raises(BadInputError, match="ONNX Runtime rejected these inputs"):
        Collector(graph, TENSORS, histograms=True).add({"x": X.astype(np.float64)})


def test_the_batch_size_follows_from_the_measured_size(graph, monkeypatch) -> None:
    for room, size in ((1 << 30, 16), (4 * 2 * 16 * 8 * 8 * 4, 4), (1, 1)):
        monkeypatch.setattr("optpipe.quantize.collect.BATCH_BYTES", room)
        assert choose_batch_size(graph, TENSORS, {"x": X[:1]}, "cpu") == size
