"""Q/DQ graphs of layers that are not plain: grouped, shared, tied, one-dimensional, tiny, empty."""

import numpy as np
import onnx
import pytest
from onnx import helper
from tests.fakes.graphs import onnx_model

from optpipe.core.errors import BadInputError
from optpipe.quantize.qdq import place_qdq, qdq_from_onnx, quantize_weights
from optpipe.quantize.ranges import TensorRange, open_model_session


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(model, feeds):
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return open_model_session(copy).run(None, feeds)


def quantize(model, target, feeds, **form):
    """The Q/DQ graph of a model with the ranges of `feeds`."""
    placed = place_qdq(model, target)
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    inner = [name for name in placed.tensors if name not in feeds]
    exposed.graph.output.extend(map(helper.make_empty_tensor_value_info, inner))
    values = dict(
        zip([each.name for each in exposed.graph.output], run(exposed, feeds), strict=True)
    )
    values |= feeds
    ranges = {
        name: TensorRange(float(np.abs(value).max()), float(value.min()), float(value.max()))
        for name, value in ((name, values[name]) for name in placed.tensors)
    }
    graph = qdq_from_onnx(model, placed, ranges, **form)
    onnx.checker.check_model(graph, full_check=True)
    return graph, placed


def snr_db(expected, found) -> float:
    error = np.square(expected.astype(np.float64) - found).sum()
    return float(10 * np.log10(np.square(expected.astype(np.float64)).sum() / max(error, 1e-300)))


@pytest.mark.parametrize("target", ["tensorrt", "cpu"])
@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_convolutions_with_biases_stay_near(target, operator, rank, groups) -> None:
    channels, made = 64, 32
    kernel = (3,) * rank
    shape = (
        (made, channels // groups, *kernel)
        if operator == "Conv"
        else (channels, made // groups, *kernel)
    )
    model = onnx_model(
        [(operator, "x w b", "y", {"group": groups})],
        {"x": ["n", channels, *[6] * rank]},
        {"y": ["n", made, *[None] * rank]},
        w=draw(*shape),
        b=draw(made, seed=1),
    )
    feeds = {"x": draw(2, channels, *[6] * rank, seed=2)}
    graph, placed = quantize(model, target, feeds)
    assert placed.layers == ("y",)
    assert snr_db(run(model, feeds)[0], run(graph, feeds)[0]) > 35


@pytest.mark.parametrize("target", ["tensorrt", "cpu"])
@pytest.mark.parametrize("operator", ["Conv", "MatMul", "Gemm"])
def test_layers_that_share_a_weight_run(target, operator) -> None:
    """A Siamese network: its session refused to convert one tensor twice on a CPU without VNNI."""
    x, w = (
        (draw(2, 16, 8, 8), draw(16, 16, 1, 1))
        if operator == "Conv"
        else (draw(4, 16), draw(16, 16))
    )
    shape = [None, *x.shape[1:]]
    model = onnx_model(
        [(operator, "x w", "a"), ("Relu", "a", "r"), (operator, "r w", "c"), ("Add", "c x", "y")],
        {"x": shape},
        {"y": shape},
        w=w / 4,
    )
    graph, placed = quantize(model, target, {"x": x})
    assert placed.layers == ("a", "c")
    assert snr_db(run(model, {"x": x})[0], run(graph, {"x": x})[0]) > 35


@pytest.mark.parametrize("target", ["tensorrt", "cpu"])
@pytest.mark.parametrize("perm", [None, [1, 0]])
def test_an_output_layer_tied_to_an_embedding_is_quantized(target, perm) -> None:
    nodes = [
        ("Gather", "table ids", "e"),
        ("MatMul", "e w", "h"),
        ("Identity", "table", "same"),
        ("Transpose", "same", "turned", {} if perm is None else {"perm": perm}),
        ("MatMul", "h turned", "y"),
    ]
    model = onnx_model(
        nodes,
        {"ids": ("INT64", ["n", 5])},
        {"y": ["n", 5, 40]},
        table=draw(40, 16),
        w=draw(16, 16, seed=1),
    )
    feeds = {"ids": np.arange(10).reshape(2, 5)}
    graph, placed = quantize(model, target, feeds)
    assert placed.layers == ("h", "y")
    assert not [node for node in graph.graph.node if node.op_type in ("Transpose", "Identity")]
    assert snr_db(run(model, feeds)[0], run(graph, feeds)[0]) > 35


def test_a_weight_that_is_read_as_it_is_and_transposed_keeps_both_forms() -> None:
    nodes = [
        ("MatMul", "x w", "a"),
        ("Transpose", "w", "t"),
        ("MatMul", "a t", "c"),
        ("Add", "c t", "y"),
    ]
    model = onnx_model(nodes, {"x": [16, 16]}, {"y": [16, 16]}, w=draw(16, 16))
    feeds = {"x": draw(16, 16, seed=1)}
    graph, placed = quantize(model, "tensorrt", feeds)
    assert placed.layers == ("a", "c")
    assert snr_db(run(model, feeds)[0], run(graph, feeds)[0]) > 35


CONVOLUTIONS: dict[str, tuple[str, dict]] = {
    "plain": ("Conv", {}),
    "strided": ("Conv", {"strides": [2], "pads": [1, 2], "dilations": [2], "kernel_shape": [3]}),
    "same": ("Conv", {"auto_pad": "SAME_UPPER", "strides": [2]}),
    "grouped": ("Conv", {"group": 2, "pads": [1, 1]}),
    "transposed": ("ConvTranspose", {"strides": [2], "output_padding": [1], "pads": [1, 1]}),
    "sized": ("ConvTranspose", {"strides": [2], "output_shape": [20]}),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_one_dimensional_convolutions_become_two_dimensional_and_compute_the_same(kind) -> None:
    operator, attributes = CONVOLUTIONS[kind]
    shape = (32, 32 // attributes.get("group", 1), 3)
    nodes = [
        (operator, "x w b", "a", attributes),
        ("Relu", "a", "r"),
        (operator, "r w", "c", attributes),
        ("Tanh", "c", "y"),
    ]
    model = onnx_model(
        nodes, {"x": ["n", 32, 20]}, {"y": ["n", 32, None]}, w=draw(*shape) / 20, b=draw(32, seed=1)
    )
    feeds = {"x": draw(2, 32, 20, seed=2)}
    narrow, _ = quantize(model, "tensorrt", feeds)
    wide, _ = quantize(model, "tensorrt", feeds, widen=True)
    weights = {len(each.dims) for each in wide.graph.initializer if each.data_type == 3}
    assert weights >= {4}
    assert 3 not in weights
    assert snr_db(run(narrow, feeds)[0], run(wide, feeds)[0]) > 100
    assert snr_db(run(model, feeds)[0], run(wide, feeds)[0]) > 30


def test_a_widened_convolution_whose_result_others_read_keeps_it() -> None:
    """The Relu is not the only reader: the result is an output, and a branch of If reads it."""
    branch = [
        helper.make_graph(
            [helper.make_node(op, ["a"], [f"{op}_out"])],
            op,
            [],
            [helper.make_empty_tensor_value_info(f"{op}_out")],
        )
        for op in ("Neg", "Abs")
    ]
    nodes = [
        ("Conv", "x w", "a", {"pads": [1, 1]}),
        ("Relu", "a", "r"),
        ("If", "flag", "z", {"then_branch": branch[0], "else_branch": branch[1]}),
        ("Add", "r z", "y"),
    ]
    model = onnx_model(
        nodes, {"x": ["n", 16, 20]}, {"y": ["n", 16, 20]}, w=draw(16, 16, 3), flag=np.array(True)
    )
    feeds = {"x": draw(2, 16, 20, seed=2)}
    graph, _ = quantize(model, "tensorrt", feeds, widen=True)
    assert snr_db(run(model, feeds)[0], run(graph, feeds)[0]) > 30


@pytest.mark.parametrize("size", [1e-9, 1e-20, 1e-30])
def test_tiny_weights_and_activations_keep_their_accuracy_on_a_cpu(size) -> None:
    model = onnx_model(
        [("MatMul", "x w", "a"), ("MatMul", "a v", "y")],
        {"x": ["n", 32]},
        {"y": ["n", 16]},
        w=draw(32, 32) * np.float32(size),
        v=draw(32, 16, seed=1),
    )
    feeds = {"x": draw(64, 32, seed=2)}
    graph, _ = quantize(model, "cpu", feeds)
    assert snr_db(run(model, feeds)[0], run(graph, feeds)[0]) > 35


def test_a_channel_of_zeros_gets_the_scale_of_the_others() -> None:
    values = draw(4, 8)
    values[1] = 0
    steps, scale = quantize_weights(values, 0, "cpu")
    assert not steps[1].any()
    assert scale[1] == scale.max()
    assert (quantize_weights(np.zeros_like(values), 0, "cpu")[1] > 0).all()


def test_weights_with_nan_are_refused_by_name() -> None:
    values = draw(16, 16)
    values[3, 3] = np.nan
    model = onnx_model([("MatMul", "x w", "y")], {"x": ["n", 16]}, {"y": ["n", 16]}, w=values)
    placed = place_qdq(model, "cpu")
    with pytest.raises(BadInputError, match="'w' contain NaN"):
        qdq_from_onnx(model, placed, {"x": TensorRange(1.0, -1.0, 1.0)})


def test_a_layer_with_an_empty_weight_stays_in_floating_point() -> None:
    model = onnx_model([("MatMul", "x w", "y")], {"x": ["n", 16]}, {"y": ["n", 0]}, w=draw(16, 0))
    placed = place_qdq(model, "cpu")
    assert not placed.layers
    assert "empty" in placed.skipped[0].reason
