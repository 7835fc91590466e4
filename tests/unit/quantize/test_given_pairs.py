"""A user's own Q/DQ graph: its ranges stay bit for bit, whatever form a runtime needs, and one that is no quantization is refused."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from tests.fakes.graphs import onnx_model

from optpipe.backends.onnx_graph import name_nodes
from optpipe.backends.onnx_pairs import find_faulty_pair, fold_constant_quantizers
from optpipe.backends.onnx_quantized import find_own_precision
from optpipe.backends.plain_session import PlainSession
from optpipe.core.errors import BadInputError, StageError
from optpipe.core.precision import Precision
from optpipe.quantize.given_pairs import compare_ranges, place_given_pairs

CHANNELS = 8


def make_checkpoint(
    seed=0, *, batch_norm=False, activation="Relu", zero=0, dtype=np.int8, twice=False
):
    """Two convolutions in the form of Model Optimizer: pairs at their inputs, behind the activation. x (n, 8, 6, 6)."""
    random = np.random.default_rng(seed)
    zeros = np.array(zero, dtype)
    weights: dict[str, object] = {"s": np.float32(0.05), "z": zeros, "t": np.float32(0.03)}
    nodes: list[tuple] = []
    last = "x"
    for layer in ("a", "b"):
        scale = "s" if layer == "a" else "t"
        nodes += [
            ("QuantizeLinear", f"{last} {scale} z", f"{layer}_q"),
            ("DequantizeLinear", f"{layer}_q {scale} z", f"{layer}_x"),
        ]
        data = f"{layer}_x"
        if twice:
            nodes += [
                ("QuantizeLinear", f"{data} {scale} z", f"{layer}_q2"),
                ("DequantizeLinear", f"{layer}_q2 {scale} z", f"{layer}_x2"),
            ]
            data = f"{layer}_x2"
        nodes += [
            ("DequantizeLinear", f"{layer}_w {layer}_ws {layer}_wz", f"{layer}_dw", {"axis": 0}),
            ("Conv", f"{data} {layer}_dw {layer}_b", f"{layer}_c", {"pads": [1, 1, 1, 1]}),
        ]
        last = f"{layer}_c"
        weights |= {
            f"{layer}_w": random.integers(-127, 128, (CHANNELS, CHANNELS, 3, 3)).astype(np.int8),
            f"{layer}_ws": random.uniform(1e-3, 3e-3, CHANNELS).astype(np.float32),
            f"{layer}_wz": np.zeros(CHANNELS, np.int8),
            f"{layer}_b": random.standard_normal(CHANNELS).astype(np.float32),
        }
        if batch_norm:
            nodes.append(
                (
                    "BatchNormalization",
                    f"{last} {layer}_g {layer}_h {layer}_m {layer}_v",
                    f"{layer}_n",
                )
            )
            last = f"{layer}_n"
            weights |= {
                f"{layer}_g": random.uniform(0.5, 1.5, CHANNELS).astype(np.float32)
                * random.choice([-1, 1], CHANNELS).astype(np.float32),
                f"{layer}_h": random.standard_normal(CHANNELS).astype(np.float32),
                f"{layer}_m": random.standard_normal(CHANNELS).astype(np.float32),
                f"{layer}_v": random.uniform(0.5, 2, CHANNELS).astype(np.float32),
            }
        if layer == "a" and activation:
            limits = " low high" if activation == "Clip" else ""
            nodes.append((activation, f"{last}{limits}", f"{layer}_r"))
            last = f"{layer}_r"
            weights |= (
                {"low": np.float32(0), "high": np.float32(2.5)} if activation == "Clip" else {}
            )
    nodes.append(("Identity", last, "y"))
    model = onnx_model(
        nodes, {"x": ["n", CHANNELS, 6, 6]}, {"y": ["n", CHANNELS, 6, 6]}, opset=19, **weights
    )
    return name_nodes(model)


def make_feeds(seed=0):
    return [
        {"x": np.random.default_rng(seed).standard_normal((3, CHANNELS, 6, 6)).astype(np.float32)}
    ]


def run(model, feeds):
    with PlainSession(model) as session:
        return session.run(feeds[0])["y"]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    activation=st.sampled_from(["Relu", "Clip", ""]),
    grid=st.sampled_from(
        [(0, np.int8), (-7, np.int8), (0, np.uint8), (93, np.uint8), (128, np.uint8)]
    ),
    twice=st.booleans(),
)
def test_moving_pairs_changes_no_value(seed, activation, grid, twice) -> None:
    zero, dtype = grid
    model, feeds = (
        make_checkpoint(seed, activation=activation, zero=zero, dtype=dtype, twice=twice),
        make_feeds(seed),
    )
    for cpu in (True, False):
        placed, kept, _ = place_given_pairs(model, feeds, "net", cpu=cpu)
        assert (kept.activations, kept.weights, kept.rescaled) == (2, 2, 0)
        expected, found = run(model, feeds), run(placed, feeds)
        off = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert off < 5e-3  # of biases, which become INT32 on a CPU
        assert cpu or np.array_equal(found, expected)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_batch_normalization_leaves_the_integers(seed) -> None:
    model, feeds = make_checkpoint(seed, batch_norm=True), make_feeds(seed)
    placed, kept, said = place_given_pairs(model, feeds, "net", cpu=True)
    assert not any(node.op_type == "BatchNormalization" for node in placed.graph.node)
    assert (kept.activations, kept.rescaled) == (2, 2)
    assert any("batch normalization" in each for each in said)
    expected, found = run(model, feeds), run(placed, feeds)
    assert np.linalg.norm(found - expected) < 1e-2 * np.linalg.norm(expected)


def test_what_was_moved_is_said() -> None:
    _, _, said = place_given_pairs(make_checkpoint(twice=True), make_feeds(), "net", cpu=True)
    assert len(said) == 4
    assert not any(each.startswith("not done") for each in said)


@pytest.mark.parametrize("name", ["s", "t", "a_w", "z"])
def test_a_changed_range_is_found(name) -> None:
    before = make_checkpoint()
    after = onnx.ModelProto()
    after.CopyFrom(before)
    held = next(each for each in after.graph.initializer if each.name == name)
    values = numpy_helper.to_array(held)
    changed = (
        np.nextafter(values, np.float32(9))
        if values.dtype.kind == "f"
        else values + values.dtype.type(1)
    )
    held.CopyFrom(numpy_helper.from_array(changed, name))
    with pytest.raises(StageError, match="not the file's"):
        compare_ranges(before, after, "net")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("s", 0.0, "scale of zero"),
        ("s", np.nan, "NaN"),
        ("s", np.inf, "infinity"),
        ("t", -0.1, "below zero"),
        ("a_ws", np.nan, "NaN"),
    ],
)
def test_a_range_that_no_value_fits_is_refused(name, value, told) -> None:
    model = make_checkpoint()
    held = next(each for each in model.graph.initializer if each.name == name)
    values = np.full_like(numpy_helper.to_array(held), value)
    held.CopyFrom(numpy_helper.from_array(values, name))
    fault = find_faulty_pair(model)
    assert fault is not None
    assert told in fault
    assert fault.count("\n") == 1


def test_a_pair_with_two_scales_is_refused() -> None:
    model = make_checkpoint()
    next(node for node in model.graph.node if node.op_type == "DequantizeLinear").input[1] = "t"
    assert "different scales" in str(find_faulty_pair(model))


def test_a_quantizer_without_its_partner_is_refused() -> None:
    nodes = [
        ("QuantizeLinear", "x s z", "q"),
        ("Cast", "q", "f", {"to": TensorProto.FLOAT}),
        ("Relu", "f", "y"),
    ]
    model = onnx_model(nodes, {"x": ["n", 4]}, {"y": ["n", 4]}, s=np.float32(0.1), z=np.int8(0))
    assert "no DequantizeLinear" in str(find_faulty_pair(name_nodes(model)))


def test_a_dead_channel_of_a_weight_is_no_fault() -> None:
    model = make_checkpoint()
    held = next(each for each in model.graph.initializer if each.name == "a_ws")
    values = numpy_helper.to_array(held).copy()
    values[0] = 0
    held.CopyFrom(numpy_helper.from_array(values, "a_ws"))
    assert find_faulty_pair(model) is None


def test_ranges_by_channel_of_an_activation_are_refused() -> None:
    nodes = [
        ("QuantizeLinear", "x s z", "q", {"axis": 1}),
        ("DequantizeLinear", "q s z", "y", {"axis": 1}),
    ]
    scales = np.full(4, 0.1, np.float32)
    model = onnx_model(
        nodes, {"x": ["n", 4]}, {"y": ["n", 4]}, opset=19, s=scales, z=np.zeros(4, np.int8)
    )
    with pytest.raises(BadInputError, match="4 channels of an activation"):
        place_given_pairs(name_nodes(model), [], "net", cpu=True)


def make_fp8(data_type):
    zero = helper.make_tensor("z", data_type, [], [0])
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("MatMul", ["d", "w"], ["y"]),
    ]
    model = onnx_model(
        nodes,
        {"x": ["n", 4]},
        {"y": ["n", 4]},
        opset=19,
        s=np.float32(0.1),
        w=np.eye(4, dtype=np.float32),
    )
    model.graph.initializer.append(zero)
    return model


@pytest.mark.parametrize(
    ("data_type", "own"),
    [
        (TensorProto.INT8, Precision.INT8),
        (TensorProto.UINT8, Precision.INT8),
        (TensorProto.FLOAT8E4M3FN, Precision.FP8),
    ],
)
def test_the_type_of_the_pairs_is_the_model_s_precision(data_type, own) -> None:
    assert find_own_precision(make_fp8(data_type)) is own


def test_pairs_around_weights_alone_are_no_quantized_model() -> None:
    nodes = [
        ("QuantizeLinear", "w s z", "q", {"axis": 0}),
        ("DequantizeLinear", "q s z", "d", {"axis": 0}),
        ("MatMul", "x d", "y"),
    ]
    weights = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    given_model = onnx_model(
        nodes,
        {"x": ["n", 4]},
        {"y": ["n", 4]},
        opset=19,
        w=weights,
        s=np.full(4, 0.02, np.float32),
        z=np.zeros(4, np.int8),
    )
    assert find_own_precision(given_model) is None
    folded = fold_constant_quantizers(onnx.ModelProto.FromString(given_model.SerializeToString()))
    assert [node.op_type for node in folded.graph.node] == ["DequantizeLinear", "MatMul"]
    feeds = {"x": np.eye(4, dtype=np.float32)}
    with PlainSession(given_model) as one, PlainSession(folded) as other:
        assert np.array_equal(one.run(feeds)["y"], other.run(feeds)["y"])
