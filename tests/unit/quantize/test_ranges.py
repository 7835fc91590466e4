"""Ranges of activations: collected histograms, the methods that choose a bound, and the table."""

import math

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.fakes.bare import run_bare
from tests.fakes.graphs import onnx_model

from optpipe.core.entries import SampleSetSummary
from optpipe.core.errors import BadInputError
from optpipe.quantize.ranges import (
    BINS,
    LOWEST,
    METHODS,
    MIN_AMAX,
    CalibrationTable,
    Collector,
    TensorRange,
    TensorStatistics,
    choose_batch_size,
    compute_range,
    count_magnitudes,
    count_on_device,
    find_least_error,
    find_nonzero,
    find_percentile,
    is_table,
    open_model_session,
    read_table,
    write_table,
)

arrays = hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(-1e6, 1e6, width=32))


def seen(values) -> TensorStatistics:
    values = np.asarray(values, np.float32)
    return TensorStatistics(float(values.min()), float(values.max()), count_magnitudes(values))


def int8_error(values, bound: float) -> float:
    scale = bound / 127
    return float(np.mean((values - np.clip(np.rint(values / scale), -127, 127) * scale) ** 2))


@pytest.mark.parametrize("method", METHODS)
@given(arrays)
def test_a_bound_is_finite_positive_and_inside_what_was_seen(method, values) -> None:
    bound = compute_range(seen(values), method)
    assert math.isfinite(bound)
    assert MIN_AMAX <= bound <= max(float(np.abs(values).max()) * (1 + 1e-6), MIN_AMAX)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [0.0, 3.5, -1e-30, 6e4])
def test_a_constant_tensor_has_a_usable_bound(method, value) -> None:
    bound = compute_range(seen(np.full(100, value)), method)
    assert bound == pytest.approx(max(abs(value), MIN_AMAX), rel=0.04)


def test_percentile_is_numpys_on_many_values() -> None:
    values = np.abs(np.random.default_rng(0).standard_normal(200_000)).astype(np.float32)
    for percent in (90.0, 99.0, 99.9, 99.99):
        expected = np.percentile(values, percent)
        assert find_percentile(seen(values), percent) == pytest.approx(expected, rel=0.004)


def test_mse_is_as_good_as_trying_every_bound() -> None:
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.standard_normal(50_000), rng.standard_normal(20) * 40]).astype(
        np.float32
    )
    tried = min(int8_error(values, bound) for bound in np.linspace(0.5, np.abs(values).max(), 600))
    assert int8_error(values, find_least_error(seen(values))) <= tried * 1.01


@pytest.mark.parametrize(("size", "clips"), [(15.0, True), (1000.0, False)])
@pytest.mark.slow
def test_mse_weighs_outliers_by_their_squares(size, clips) -> None:
    """Six in a million: at 15 times the rest they are clipped, at 1000 times their squares outweigh all other values.

    Trying every bound says the same, so this is what the criterion is, and not how it is searched.
    """
    rng = np.random.default_rng(4)
    values = np.concatenate(
        [np.maximum(rng.standard_normal(1_000_000), 0), np.full(6, size)]
    ).astype(np.float32)
    tried = np.geomspace(size / 500, size, 200)
    best = float(tried[np.argmin([int8_error(values, bound) for bound in tried])])
    assert (best < 0.7 * size) == clips
    assert (find_least_error(seen(values)) < 0.7 * size) == clips
    assert int8_error(values, find_least_error(seen(values))) <= int8_error(values, best) * 1.01
    assert find_percentile(seen(values)) < 6


finite = hnp.arrays(np.float32, st.integers(0, 300), elements=st.floats(-1e6, 1e6, width=32))


@given(finite)
def test_every_element_is_counted_once(values) -> None:
    assert count_magnitudes(values).sum() == values.size


@given(finite, finite)
def test_parts_add_up_to_the_whole(one, other) -> None:
    whole = count_magnitudes(np.concatenate([one, other]))
    assert np.array_equal(count_magnitudes(one) + count_magnitudes(other), whole)


@given(st.floats(2.0**-31, 2.0**60, width=32))
def test_a_value_lies_in_its_bin_which_is_narrow(value) -> None:
    low, high, counts = find_nonzero(count_magnitudes(np.array([value], np.float32)))
    assert counts.tolist() == [1]
    assert low[0] <= value < high[0]
    assert high[0] / low[0] <= 1 + 1 / 512


def test_chunks_do_not_show(monkeypatch) -> None:
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    whole = count_magnitudes(values)
    monkeypatch.setattr("optpipe.quantize.ranges._CHUNK", 77)
    assert np.array_equal(count_magnitudes(values), whole)


@given(finite)
def test_counting_on_a_device_is_the_same_but_for_zeros(values) -> None:
    import torch

    counts = torch.zeros(BINS, dtype=torch.int64)
    count_on_device(torch.from_numpy(values), counts)
    expected = count_magnitudes(values)
    expected[:LOWEST] = 0
    assert np.array_equal(counts.numpy(), expected)


finite_table = st.floats(-(2.0**90), 2.0**90, width=32)
ranges = st.builds(TensorRange, st.floats(2.0**-17, 2.0**90, width=32), finite_table, finite_table)


def table(**changes) -> CalibrationTable:
    values = {
        "method": "mse",
        "model": "digits",
        "graph_sha256": "a" * 64,
        "set": SampleSetSummary("digits/calibration", "b" * 64, 500, 0),
        "transform_sha256": None,
        "ranges": {"image": TensorRange(2.0, -1.0, 2.0)},
        "keep": ("head",),
    }
    return CalibrationTable(**{**values, **changes})


@given(st.dictionaries(st.text(min_size=1, max_size=9), ranges, max_size=4))
def test_reading_gives_what_was_written(tmp_path_factory, values) -> None:
    path = tmp_path_factory.mktemp("table") / "t.json"
    write_table(path, table(ranges=values))
    assert read_table(path) == table(ranges=values)
    assert is_table(path)
    assert not is_table(path.parent)


@pytest.mark.parametrize("amax", [0.0, -1.0, float("nan"), float("inf")])
def test_no_range_without_a_usable_bound(amax) -> None:
    with pytest.raises(BadInputError, match="finite positive amax"):
        TensorRange(amax, 0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "truncated"),
        ("[]", "expected `object`"),
        ("{}", "missing required field `method`"),
        (
            '{"ranges": {"x": {"amax": 0, "low": 0, "high": 1}}}',
            r"finite positive amax.*\$\.ranges",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path, text, said) -> None:
    path = tmp_path / "my.json"
    path.write_text(text)
    with pytest.raises(BadInputError, match=rf"my\.json: .*{said}"):
        read_table(path)


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
    parts = collect(
        Collector(graph, TENSORS, histograms=True), [{"x": X[:3]}, {"x": X[3:4]}, {"x": X[4:]}]
    )
    whole = collect(Collector(graph, TENSORS, histograms=True), [{"x": X}])
    for name in TENSORS:
        assert parts[name].amax == pytest.approx(whole[name].amax, rel=1e-6)
        assert parts[name].counts.sum() == whole[name].counts.sum()
    assert np.array_equal(parts["x"].counts, whole["x"].counts)
    assert whole["x"].amax == np.abs(X).max()
    assert whole["r1"].low >= 0 > whole["s"].low


def test_extremes_alone_keep_no_histogram(graph) -> None:
    assert collect(Collector(graph, TENSORS, histograms=False), [{"x": X}])["s"].counts is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_named(graph, bad) -> None:
    poisoned = X.copy()
    poisoned[0, 0, 0, 0] = bad
    with pytest.raises(BadInputError, match="tensor 'x' contains NaN or Inf"):
        Collector(graph, TENSORS, histograms=True).add({"x": poisoned})


@pytest.fixture
def selecting(tmp_path):
    """A head on the rows of `x` that pass a threshold: `rows` and `h` may be empty."""
    nodes = [
        ("ReduceMax", "x", "top", {"axes": [1], "keepdims": 0}),
        ("Greater", "top t", "wanted"),
        ("Compress", "x wanted", "rows", {"axis": 0}),
        ("MatMul", "rows w", "h"),
    ]
    constants = {"t": np.float32(0.5), "w": np.eye(4, dtype=np.float32)}
    onnx_model(nodes, {"x": ["n", 4]}, {"h": ["m", 4]}, path=tmp_path / "select.onnx", **constants)
    return tmp_path / "select.onnx"


@pytest.mark.parametrize("histograms", [True, False])
def test_a_tensor_that_is_empty_in_some_batches_has_the_range_of_the_others(
    selecting, histograms
) -> None:
    kept, none = np.full((2, 4), 3, np.float32), np.zeros((3, 4), np.float32)
    tensors = ("x", "rows", "h")
    mixed, alone = (
        collect(Collector(selecting, tensors, histograms), [{"x": each} for each in batches])
        for batches in ([none, kept, none], [kept])
    )
    for name in ("rows", "h"):
        assert (mixed[name].low, mixed[name].high) == (alone[name].low, alone[name].high) == (3, 3)
        if histograms:
            assert np.array_equal(mixed[name].counts, alone[name].counts)
    assert (mixed["x"].low, mixed["x"].high) == (0, 3)


@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_that_is_empty_in_all_batches_has_a_usable_bound(selecting, method) -> None:
    none = {"x": np.zeros((3, 4), np.float32)}
    found = collect(Collector(selecting, ("rows", "h"), method != "max"), [none, none])
    for each in found.values():
        assert (each.low, each.high) == (0, 0)
        assert math.isfinite(compute_range(each, method))


def test_no_sample_at_all_selects_no_value(selecting) -> None:
    empty = {"x": np.zeros((0, 4), np.float32)}
    found = collect(Collector(selecting, ("x", "h"), histograms=True), [empty])
    assert (found["x"].low, found["h"].high) == (0, 0)


@pytest.mark.parametrize(
    ("operator", "value", "kind"),
    [("Sqrt", -1, "NaN"), ("Log", 0, "Inf"), ("Log", -1, "NaN"), ("Exp", 1e3, "Inf"),
     ("Reciprocal", 0, "Inf")],
)  # fmt: skip
def test_the_node_that_makes_nan_or_inf_is_named_with_a_way_out(
    tmp_path, operator, value, kind
) -> None:
    nodes = [
        ("Relu", "x", "before"),
        (operator, "x", "broken", {"name": "culprit"}),
        ("MatMul", "broken w", "after"),
    ]
    path, w = tmp_path / "broken.onnx", np.eye(4, dtype=np.float32)
    onnx_model(nodes, {"x": ["n", 4]}, {"before": ["n", 4], "after": ["n", 4]}, path=path, w=w)
    batch = {"x": np.full((2, 4), value, np.float32)}
    with pytest.raises(BadInputError) as caught:
        Collector(path, ("before", "after"), histograms=True).add(batch)
    problem, remedy = str(caught.value).splitlines()
    assert f"{operator} 'culprit' is the first that makes {kind}" in problem
    assert "'after'" in problem
    assert "optpipe build" in remedy


def test_data_with_nan_are_blamed_before_any_node(tmp_path) -> None:
    path, w = tmp_path / "m.onnx", np.eye(4, dtype=np.float32)
    onnx_model([("MatMul", "x w", "y")], {"x": ["n", 4]}, {"y": ["n", 4]}, path=path, w=w)
    with pytest.raises(BadInputError, match="the data themselves contain NaN or Inf"):
        Collector(path, ("y",), histograms=False).add({"x": np.full((1, 4), np.nan, np.float32)})


def test_what_the_graph_rejects_is_bad_input(graph) -> None:
    with pytest.raises(BadInputError, match="ONNX Runtime rejected these inputs"):
        Collector(graph, TENSORS, histograms=True).add({"x": X.astype(np.float64)})


def test_the_batch_size_follows_from_the_measured_size(graph, monkeypatch) -> None:
    for room, size in ((1 << 30, 16), (4 * 2 * 16 * 8 * 8 * 4, 4), (1, 1)):
        monkeypatch.setattr("optpipe.quantize.ranges.BATCH_BYTES", room)
        assert choose_batch_size(graph, TENSORS, {"x": X[:1]}, "cpu") == size


def test_ranges_are_those_of_the_graph_as_it_is_written() -> None:
    """ONNX Runtime folds the normalization into the convolution, which rounds in another place."""
    random = np.random.default_rng(0)
    constants = {
        "w": random.standard_normal((4, 3, 3, 3)),
        **{name: random.uniform(0.5, 2, 4) for name in ("scale", "bias", "mean", "var")},
    }
    nodes = [("Conv", "x w", "c"), ("BatchNormalization", "c scale bias mean var", "y")]
    held = {name: value.astype(np.float32) for name, value in constants.items()}
    model = onnx_model(nodes, {"x": [2, 3, 8, 8]}, {"y": [2, 4, 6, 6]}, **held)
    feeds = {"x": random.standard_normal((2, 3, 8, 8)).astype(np.float32)}
    [found] = open_model_session(model).run(None, feeds)
    assert np.array_equal(found, run_bare(model, feeds)["y"])
