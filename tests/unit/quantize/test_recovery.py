"""Steps that win accuracy back: what moves between layers changes nothing in FP32, and what is learned stays near its source."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.graphs import onnx_model

from optpipe.backends.onnx_graph import expose_tensors, name_nodes
from optpipe.backends.plain_session import PlainSession
from optpipe.core.errors import BadInputError
from optpipe.quantize.qdq import place_qdq, qdq_from_onnx, quantize_weights
from optpipe.quantize.ranges import TensorRange
from optpipe.quantize.recovery.biases import MeanCounter, correct_biases
from optpipe.quantize.recovery.recover import STEPS, compare_samples, round_weight, steps_from_text
from optpipe.quantize.recovery.rounding import collect_moments, round_together
from optpipe.quantize.recovery.scaling import divide_channels, find_sites, list_scaled_tensors

WIDTH = 16


def make_weights(random, *shape, spread=2.0):
    """Weights whose channels differ in size by orders of magnitude."""
    sizes = np.exp(random.normal(0, spread, (shape[0], *[1] * (len(shape) - 1))))
    return (random.standard_normal(shape) * sizes).astype(np.float32)


def make_convolutions(random, activation="Relu"):
    """An inverted residual: expand, filter, project. x (n, 16, 6, 6)."""
    nodes = [
        ("Conv", "x w1 b1", "a"),
        (activation, "a", "r1"),
        ("Conv", "r1 w2", "c", {"group": 2 * WIDTH, "pads": [1, 1, 1, 1]}),
        (activation, "c", "r2"),
        ("Conv", "r2 w3 b3", "y"),
    ]
    weights = {
        "w1": make_weights(random, 2 * WIDTH, WIDTH, 1, 1),
        "b1": random.standard_normal(2 * WIDTH).astype(np.float32),
        "w2": make_weights(random, 2 * WIDTH, 1, 3, 3),
        "w3": make_weights(random, WIDTH, 2 * WIDTH, 1, 1),
        "b3": random.standard_normal(WIDTH).astype(np.float32),
    }
    sizes = {"x": ["n", WIDTH, 6, 6]}, {"y": ["n", WIDTH, 6, 6]}
    return name_nodes(onnx_model(nodes, *sizes, opset=19, **weights))


def make_transformer(random):
    """A normalization that two products read, then an MLP. x (n, 5, 16)."""
    nodes = [
        ("LayerNormalization", "x g h", "m"),
        ("MatMul", "m w1", "q0"),
        ("Add", "q0 b1", "q"),
        ("MatMul", "m w2", "k0"),
        ("Add", "b2 k0", "k"),
        ("Add", "q k", "s"),
        ("LayerNormalization", "s g h", "z"),
        ("MatMul", "z w3", "u0"),
        ("Add", "u0 b3", "u"),
        ("Relu", "u", "r"),
        ("MatMul", "r w4", "y"),
    ]
    weights = {
        "g": np.exp(random.normal(0, 1.5, WIDTH)).astype(np.float32),
        "h": random.standard_normal(WIDTH).astype(np.float32),
        "w1": make_weights(random, WIDTH, WIDTH),
        "w2": make_weights(random, WIDTH, WIDTH),
        "w3": make_weights(random, WIDTH, 2 * WIDTH),
        "w4": make_weights(random, 2 * WIDTH, WIDTH),
        **{
            f"b{n}": random.standard_normal(WIDTH * (1 + (n == 3))).astype(np.float32)
            for n in (1, 2, 3)
        },
    }
    sizes = {"x": ["n", 5, WIDTH]}, {"y": ["n", 5, WIDTH]}
    return name_nodes(onnx_model(nodes, *sizes, opset=19, **weights))


def run(model, feeds, tensors=("y",)):
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    with PlainSession(expose_tensors(copy, tensors)) as session:
        return {name: value for name, value in session.run(feeds).items() if name in tensors}


def find_peaks(model, kind, feeds):
    axes = list_scaled_tensors(model, kind, ())
    found = run(model, feeds, tuple(axes)) if axes else {}
    return {
        name: np.abs(np.moveaxis(value, axes[name], -1))
        .reshape(-1, value.shape[axes[name]])
        .max(axis=0)
        for name, value in found.items()
    }


def snr(expected, found) -> float:
    off = float(np.linalg.norm(expected - found))
    return 20 * float(np.log10(float(np.linalg.norm(expected)) / max(off, 1e-30)))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    make=st.sampled_from([make_convolutions, make_transformer]),
    kind=st.sampled_from(["layer", "normalization"]),
)
def test_balanced_channels_compute_the_same(seed, make, kind) -> None:
    random = np.random.default_rng(seed)
    model = make(random)
    shape = (4, WIDTH, 6, 6) if make is make_convolutions else (4, 5, WIDTH)
    feeds = {"x": random.standard_normal(shape).astype(np.float32)}
    made, count = divide_channels(model, kind, (), find_peaks(model, kind, feeds))
    expected = {
        (make_convolutions, "layer"): 2,
        (make_transformer, "layer"): 1,
        (make_transformer, "normalization"): 2,
    }
    assert count == expected.get((make, kind), 0)
    assert snr(run(model, feeds)["y"], run(made, feeds)["y"]) > 100
    onnx.checker.check_model(made, full_check=True)
    assert [node.op_type for node in made.graph.node] == [node.op_type for node in model.graph.node]


def test_a_depthwise_reader_lets_all_channels_become_equally_large() -> None:
    random = np.random.default_rng(0)
    model, feeds = (
        make_convolutions(random),
        {"x": random.standard_normal((4, WIDTH, 6, 6)).astype(np.float32)},
    )
    made, _ = divide_channels(model, "layer", (), find_peaks(model, "layer", feeds))
    before, after = (run(each, feeds, ("r1",))["r1"].max(axis=(0, 2, 3)) for each in (model, made))
    assert before.max() / before[before > 0].min() > 50
    assert after.max() / after[after > 0].min() < 1.01


@pytest.mark.parametrize("activation", ["HardSwish", "Sigmoid", "Softplus"])
def test_an_activation_that_does_not_scale_ends_the_search(activation) -> None:
    from optpipe.quantize.recovery.layers import EditedGraph

    model = make_convolutions(np.random.default_rng(0), activation)
    assert find_sites(EditedGraph(model), "layer", ()) == []


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    outputs=st.integers(1, 5),
    inputs=st.integers(1, 12),
    rows=st.integers(1, 40),
)
def test_learned_rounding_stays_beside_the_weight_and_never_errs_more(
    seed, outputs, inputs, rows
) -> None:
    random = np.random.default_rng(seed)
    values = random.standard_normal((outputs, inputs)).astype(np.float32)
    data = random.standard_normal((rows, inputs)) + random.standard_normal(inputs)
    moments = data.T @ data
    steps, scale = quantize_weights(values, 0)
    wide = scale.astype(np.float64)
    found = round_together(values.astype(np.float64), steps.astype(np.int32), wide, moments, 127)
    exact = values / wide[:, None]
    assert (np.abs(found - exact) < 1).all()

    def measure(integers):
        error = (integers - exact) * wide[:, None]
        return float(np.einsum("oi,ij,oj->", error, moments, error))

    assert measure(found) <= measure(steps) * (1 + 1e-9) + 1e-12


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), target=st.sampled_from(["tensorrt", "cpu", "cpu-7bit"]))
def test_a_rounded_weight_gives_its_own_integers_again(seed, target) -> None:
    random = np.random.default_rng(seed)
    values = make_weights(random, 6, 10)
    data = random.standard_normal((50, 10)) + 1
    made = round_weight(values, 0, (data.T @ data)[None], target)
    if made is None:
        return
    steps, scale = quantize_weights(made, 0, target)
    np.testing.assert_allclose(steps * scale[:, None], made, rtol=1e-6)
    assert (np.abs(made - values) < scale[:, None] * (1 + 1e-6)).all()


@pytest.mark.parametrize("groups", [1, 4])
def test_moments_are_those_of_the_rows_that_a_convolution_multiplies(groups) -> None:
    random = np.random.default_rng(0)
    weight = random.standard_normal((8, 8 // groups, 3, 3)).astype(np.float32)
    data = random.standard_normal((2, 8, 7, 9)).astype(np.float32)
    attributes = {"group": groups, "pads": [1, 0, 2, 1], "strides": [2, 1]}
    model = onnx_model(
        [("Conv", "x w", "y", attributes)], {"x": ["n", 8, 7, 9]}, {"y": None}, w=weight
    )
    moments = collect_moments(data, model.graph.node[0], attributes, weight)
    expected = np.square(run(model, {"x": data})["y"].astype(np.float64)).sum(axis=(0, 2, 3))
    rows = weight.reshape(groups, 8 // groups, -1).astype(np.float64)
    np.testing.assert_allclose(
        np.einsum("goi,gij,goj->go", rows, moments, rows).reshape(-1), expected, rtol=1e-4
    )


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), make=st.sampled_from([make_convolutions, make_transformer]))
def test_bias_correction_brings_the_mean_error_to_zero(seed, make) -> None:
    random = np.random.default_rng(seed)
    model = make(random)
    shape = (8, WIDTH, 6, 6) if make is make_convolutions else (8, 5, WIDTH)
    feeds = {"x": random.standard_normal(shape).astype(np.float32)}
    placed = place_qdq(model, "tensorrt")
    values = run(model, feeds, placed.tensors) | {"x": feeds["x"]}
    peaks = {name: float(np.abs(values[name]).max()) * 0.7 for name in placed.tensors}
    ranges = {name: TensorRange(peak, -peak, peak) for name, peak in peaks.items()}

    def quantize(graph):
        return qdq_from_onnx(graph, place_qdq(graph, "tensorrt"), ranges)

    def measure(graph, axes):
        counter = MeanCounter(axes)
        counter.add(run(graph, feeds, tuple(axes)))
        return counter.means()

    made, count = correct_biases(model, placed.layers, quantize, measure)
    assert count
    nodes = {node.name: node for node in model.graph.node}
    outputs = [nodes[name].output[0] for name in placed.layers]
    able = [name for name in outputs if name != "y" or make is make_convolutions]
    axes = dict.fromkeys(able, 1 if make is make_convolutions else -1)
    # of a MatMul the addition behind it is corrected
    moved = {name: name.removesuffix("0") for name in able}
    wanted = measure(model, {moved[name]: axis for name, axis in axes.items()})
    found = measure(quantize(made), {moved[name]: axis for name, axis in axes.items()})
    before = measure(quantize(model), {moved[name]: axis for name, axis in axes.items()})
    for name in wanted:
        size = np.abs(wanted[name]).max()
        assert np.abs(found[name] - wanted[name]).max() < 1e-4 * size + 1e-5
    assert any(np.abs(before[name] - wanted[name]).max() > 1e-3 for name in wanted)


def test_a_step_helps_only_beyond_its_interval() -> None:
    random = np.random.default_rng(0)
    before = random.normal(30, 3, 64)
    assert compare_samples(before, before, 0.95)[1] is None  # no spread gives no interval
    _, noisy = compare_samples(before, before + random.normal(0, 1, 64), 0.95)
    assert noisy is not None
    assert noisy[0] < 0 < noisy[1]
    gain, sure = compare_samples(before, before + 2 + random.normal(0, 1, 64), 0.95)
    assert gain is not None
    assert sure is not None
    assert 0 < sure[0] < gain < sure[1]


def test_steps_are_in_the_order_of_the_search() -> None:
    assert steps_from_text("auto") == tuple(STEPS)
    assert steps_from_text("bias,equalize") == ("equalize", "bias")
    assert steps_from_text("none") == steps_from_text(None) == ()
    with pytest.raises(BadInputError, match="evenout"):
        steps_from_text("evenout")
