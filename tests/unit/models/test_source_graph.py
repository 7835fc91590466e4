"""The reference is the user's file: what optpipe's rewrites and the runtime's optimizer make of it is compared with it."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.fakes.bare import measure_snr, run_bare
from tests.fakes.graphs import node_of, onnx_model, value_of

from optpipe.backends.onnxruntime import OnnxRuntime
from optpipe.build.build import build_model
from optpipe.build.plan import BuildPlan
from optpipe.core.card import InputSpec, ModelCard, Task, card_from_file
from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import BadInputError, GateError
from optpipe.core.events import SilentListener
from optpipe.core.precision import Precision
from optpipe.models.export import source_graph
from optpipe.models.export.exported import (
    Model,
    compute_reference,
    export_model,
    reference_from_file,
)
from optpipe.models.sources.onnx_file import OnnxFileSource
from optpipe.workspace.file_names import CARD, ONNX, REFERENCE
from optpipe.workspace.store import Store

RANDOM = np.random.default_rng(0)


def normal(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def window(size):
    return np.hanning(size + 2)[1:-1].astype(np.float32)


def export(path, shapes=None):
    """The exported model's entry, its reference, the warnings, and the store."""
    shapes = shapes or {}
    model = Model(OnnxFileSource(path, shapes=shapes), WeightsRequest(), shapes=shapes)
    store, listener = Store(path.parent / ".optpipe"), SilentListener()
    entry, _ = export_model(model, store, listener)
    found, _ = compute_reference(model, entry, None, store, listener)
    return entry, reference_from_file(found.file(REFERENCE)), listener.warnings


def assert_true_to(path, shapes=None):
    """The reference and the graph that is built give what the file gives; returns the warnings."""
    entry, reference, warnings = export(path, shapes)
    expected = run_bare(path, reference.inputs)
    exported = run_bare(entry.file(ONNX), reference.inputs)
    for name, value in expected.items():
        assert measure_snr(value, reference.outputs[name]) > 140
        assert measure_snr(value, exported[name]) > 100
    return warnings


def convolution(rank, *after, shape=None):
    """A convolution of `rank` axes with 16 channels, then `after`; its last axis has 16 places."""
    sizes = [4] * (rank - 1) + [16]
    kernel = [1] * (rank - 1) + [3]
    nodes = [("Conv", "x w b", "c", {"kernel_shape": kernel}), *after]
    constants = {"w": normal(16, 8, *kernel), "b": normal(16)}
    inputs = {"x": ["N", 8, *sizes[:-1], 18]}
    return nodes, inputs, {"y": shape or ["N", 16, *sizes]}, constants


WINDOWED = {
    **{
        f"{rank}-D, {operator} of a window {given}": (
            *convolution(rank, (operator, given, "y")),
            shape,
        )
        for rank in (1, 2, 3)
        for operator in ("Mul", "Add", "Sub", "Div")
        for given in ("c h", "h c")
        for shape in ((16,), (1, 16))
        if operator not in ("Sub", "Div") or given == "c h"
    },
}


@pytest.mark.parametrize("case", WINDOWED)
def test_a_window_over_places_is_not_one_over_channels(tmp_path, case) -> None:
    nodes, inputs, outputs, constants, shape = WINDOWED[case]
    held = window(16).reshape(shape) + 0.5
    onnx_model(nodes, inputs, outputs, path=tmp_path / "net.onnx", h=held, **constants)
    assert_true_to(tmp_path / "net.onnx")


POOLED = [
    [("MaxPool", "x", "y", {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1})],
    [("AveragePool", "x", "y", {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1})],
    [("AveragePool", "x", "y", {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER"})],
    [("AveragePool", "x", "y", {"kernel_shape": [2, 2], "auto_pad": "SAME_LOWER"})],
    [
        ("Pad", "x p", "z", {"mode": "constant"}),
        ("AveragePool", "z", "y", {"kernel_shape": [3, 3], "count_include_pad": 0}),
    ],
    [
        ("Pad", "x p v", "z", {"mode": "constant"}),
        ("MaxPool", "z", "y", {"kernel_shape": [3, 3]}),
    ],
    [("Pad", "x p", "z", {"mode": "reflect"}), ("Conv", "z w", "y", {"kernel_shape": [3, 3]})],
    [("Pad", "x p v", "z"), ("Conv", "z w", "y", {"kernel_shape": [3, 3]})],
    [("LpPool", "x", "y", {"kernel_shape": [3, 3]})],
    [("GlobalLpPool", "x", "y")],
]


@pytest.mark.parametrize("nodes", POOLED, ids=lambda nodes: "-".join(each[0] for each in nodes))
def test_pools_and_pads_keep_their_meaning(tmp_path, nodes) -> None:
    constants = {
        "p": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        "v": np.float32(-0.5),
        "w": normal(4, 4, 3, 3),
    }
    read = {name for each in nodes for name in each[1].split()}
    held = {name: value for name, value in constants.items() if name in read}
    path = tmp_path / "net.onnx"
    onnx_model(nodes, {"x": ["N", 4, 9, 9]}, {"y": ["N", None, None, None]}, path=path, **held)
    assert_true_to(path)


def test_a_simplification_that_changes_the_model_is_left_out_and_named(
    tmp_path, monkeypatch
) -> None:
    path = tmp_path / "net.onnx"
    onnx_model(
        [("MatMul", "x w", "y")], {"x": ["N", 8]}, {"y": ["N", 4]}, path=path, w=normal(8, 4)
    )

    def spoil(model):
        model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(normal(8, 4), "w"))
        return model

    monkeypatch.setattr(source_graph, "simplify", spoil)
    warnings = assert_true_to(path)
    assert [each for each in warnings if "onnxslim" in each and "'y' of MatMul" in each]


def test_a_change_that_only_real_inputs_show_is_refused_with_the_tensor(
    tmp_path, monkeypatch
) -> None:
    """Noise is never beyond 100; the data are."""
    path = tmp_path / "net.onnx"
    nodes = [("Clip", "x low high", "z"), ("Neg", "z", "y")]
    ends = {"low": np.float32(-1000), "high": np.float32(1000)}
    onnx_model(nodes, {"x": ["N", 4]}, {"y": ["N", 4]}, path=path, **ends)

    def spoil(model):
        for each in model.graph.initializer:
            if each.name == "high":
                each.CopyFrom(onnx.numpy_helper.from_array(np.float32(100), "high"))
        return model

    monkeypatch.setattr(source_graph, "simplify", spoil)
    np.savez(tmp_path / "data.npz", x=np.full((4, 4), 500, np.float32) + normal(4, 4))
    model = Model(OnnxFileSource(path), WeightsRequest())
    store = Store(tmp_path / ".optpipe")
    entry, _ = export_model(model, store, SilentListener())
    with pytest.raises(GateError, match="'z' of Clip"):
        compute_reference(model, entry, tmp_path / "data.npz", store, SilentListener())


# what a file states of its inputs and outputs


def test_a_size_of_zero_is_a_size(tmp_path) -> None:
    path = tmp_path / "net.onnx"
    nodes = [("Concat", "past x", "seen", {"axis": 1}), ("MatMul", "seen w", "y")]
    inputs = {"past": ["N", 0, 8], "x": ["N", 4, 8]}
    onnx_model(nodes, inputs, {"y": ["N", None, 3]}, path=path, w=normal(8, 3))
    _, reference, _ = export(path)
    assert reference.inputs["past"].shape[1:] == (0, 8)
    assert reference.outputs["y"].shape[1:] == (4, 3)
    with pytest.raises(BadInputError, match="past"):
        export(path, {"past": ((1, 128, 8),) * 3, "x": ((1, 4, 8),) * 3})


def test_an_input_and_an_output_without_rank_take_the_given_shape(tmp_path) -> None:
    path = tmp_path / "net.onnx"
    model = onnx_model([("MatMul", "x w", "y")], {"x": [1]}, {"y": [1]}, w=normal(8, 3))
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.ClearField("shape")
    onnx.save(model, path)
    with pytest.raises(BadInputError, match=r"no shape.*\n.*--shape x="):
        export(path)
    shapes = {"x": ((1, 8), (4, 8), (16, 8))}
    assert_true_to(path, shapes)
    entry, reference, _ = export(path, shapes)
    card = card_from_file(entry.file(CARD))
    assert card.batch_range == (1, 4, 16)
    assert reference.outputs["y"].shape == (8, 3)


def test_an_input_that_nothing_reads_is_left_out_and_named(tmp_path) -> None:
    path = tmp_path / "net.onnx"
    nodes = [("MatMul", "x w", "y"), ("Neg", "mask", "nowhere")]
    inputs = {"x": ["N", 8], "mask": ["N", "other"], "unused": ("INT64", [3])}
    onnx_model(nodes, inputs, {"y": ["N", 3]}, path=path, w=normal(8, 3))
    _, reference, warnings = export(path)
    assert list(reference.inputs) == ["x"]
    assert len([each for each in warnings if "'mask'" in each or "'unused'" in each]) == 2
    given = {
        **reference.inputs,
        "mask": np.zeros((8, 2), np.float32),
        "unused": np.zeros(3, np.int64),
    }
    assert measure_snr(run_bare(path, given)["y"], reference.outputs["y"]) > 140


@pytest.mark.parametrize(
    ("x", "z", "y"),
    [
        (["N", "batch"], ["N", 3], ["N", "batch"]),
        (["batch", "x_dim1", 3], ["batch", "?", 3], ["batch", None, 3]),
        (["?", "?", 3], ["?", "?", 3], ["?", "?", 3]),
        (["-1", "-1", 3], ["-1", "x_dim1", 3], ["-1", "batch", 3]),
    ],
)
def test_names_of_dimensions_never_collide(tmp_path, x, z, y) -> None:
    """`x` and `z` have two open sizes that differ; no name may make them one."""
    path = tmp_path / "net.onnx"
    axis = len(x) - 2
    nodes = [("Concat", "x z", "y", {"axis": 1})]
    onnx_model(nodes, {"x": x, "z": z}, {"y": [None] * len(y)}, path=path)
    model = onnx.load(path)
    model.graph.output[0].CopyFrom(value_of("y", y if axis else [y[0], None]))
    onnx.save(model, path)
    shapes = {
        "x": ((1, 5, 3), (4, 5, 3), (4, 5, 3)) if axis else ((1, 5), (4, 5), (4, 5)),
        "z": ((1, 7, 3), (4, 7, 3), (4, 7, 3)) if axis else ((1, 3), (4, 3), (4, 3)),
    }
    entry, reference, _ = export(path, shapes)
    graph = onnx.load(entry.file(ONNX)).graph
    names = [
        (axis, dim.dim_param)
        for value in graph.input
        for axis, dim in enumerate(value.type.tensor_type.shape.dim)
        if dim.dim_param
    ]
    assert {axis for axis, name in names if name == "batch"} == {0}
    inner = [name for axis, name in names if axis == 1]
    assert len(inner) == len(set(inner))
    joined = np.concatenate([reference.inputs["x"], reference.inputs["z"]], 1)
    assert np.array_equal(reference.outputs["y"], joined)


def with_function(path):
    """Two calls of a function of the file, Block: relu(conv(x, w))."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    body = [node_of("Conv", "a w", "p"), node_of("Relu", "p", "b")]
    block = helper.make_function("own", "Block", ["a", "w"], ["b"], body, opsets)
    nodes = [
        helper.make_node("Block", ["x", "w1"], ["z"], domain="own", name="one"),
        helper.make_node("Block", ["z", "w2"], ["y"], domain="own", name="two"),
    ]
    weights = [onnx.numpy_helper.from_array(normal(16, 16, 1, 1), name) for name in ("w1", "w2")]
    shape = ["N", 16, 6, 6]
    graph = helper.make_graph(nodes, "g", [value_of("x", shape)], [value_of("y", shape)], weights)
    model = helper.make_model(graph, opset_imports=opsets, functions=[block], ir_version=9)
    onnx.save(model, path)
    return path


def test_functions_of_the_file_are_inlined(tmp_path) -> None:
    path = with_function(tmp_path / "net.onnx")
    assert_true_to(path)
    entry, _, _ = export(path)
    graph = onnx.load(entry.file(ONNX))
    assert not graph.functions
    assert {node.op_type for node in graph.graph.node} == {"Conv", "Relu"}


def group_norm(path, opset=18):
    nodes = [
        ("Conv", "x w", "c", {"kernel_shape": [1, 1]}),
        ("GroupNormalization", "c scale bias", "y", {"num_groups": 4}),
    ]
    constants = {"w": normal(16, 16, 1, 1), "scale": normal(4), "bias": normal(4)}
    inputs, outputs = {"x": ["N", 16, 6, 6]}, {"y": ["N", 16, 6, 6]}
    onnx_model(nodes, inputs, outputs, path=path, opset=opset, **constants)
    return path


@pytest.mark.parametrize("opset", [18, 19, 20])
def test_a_deprecated_operator_that_runtimes_run_is_built(tmp_path, opset) -> None:
    assert_true_to(group_norm(tmp_path / "net.onnx", opset))


@pytest.mark.parametrize("make", [with_function, group_norm])
@pytest.mark.slow
def test_they_are_built_in_fp32_and_int8(tmp_path, make) -> None:
    path = make(tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=normal(24, 16, 6, 6))
    model, store = Model(OnnxFileSource(path), WeightsRequest()), Store(tmp_path / ".optpipe")
    plan = BuildPlan(
        (Precision.FP32, Precision.INT8),
        (OnnxRuntime(),),
        named=True,
        device="cpu",
        calibration=tmp_path / "data.npz",
    )
    built = build_model(model, plan, store, SilentListener())
    assert not built.failed
    assert all(each.verification.info.passed for each in built.artifacts)


def test_a_file_with_a_random_operator_is_called_random(tmp_path) -> None:
    path = tmp_path / "net.onnx"
    noise = ("RandomNormalLike", "x", "r", {"dtype": TensorProto.FLOAT})
    onnx_model([noise, ("Add", "x r", "y")], {"x": ["N", 4]}, {"y": ["N", 4]}, path=path)
    with pytest.raises(GateError, match="not deterministic"):
        export(path)


def test_a_graph_whose_outputs_depend_on_no_input_is_refused(tmp_path) -> None:
    path = tmp_path / "net.onnx"
    nodes = [("Neg", "w", "y")]
    onnx_model(nodes, {"x": ("FLOAT8E4M3FN", [2])}, {"y": [2]}, path=path, w=normal(2))
    with pytest.raises(BadInputError, match=r"depend on no input\n"):
        export(path)


def spell_the_domain_out(model) -> None:
    model.opset_import[0].domain = "ai.onnx"
    for node in model.graph.node:
        node.domain = "ai.onnx"


def import_the_domain_by_its_long_name(model) -> None:
    model.opset_import[0].domain = "ai.onnx"


def turn_the_nodes_around(model) -> None:
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def make_sparse(*, by_axis: bool):
    """Weights of which every third is there, with one index or one for each axis."""

    def change(model) -> None:
        found = next(each for each in model.graph.initializer if each.name == "w")
        dense = onnx.numpy_helper.to_array(found)
        places = np.arange(0, dense.size, 3)
        values = onnx.numpy_helper.from_array(dense.reshape(-1)[places], "w")
        indices = np.stack(np.unravel_index(places, dense.shape), 1) if by_axis else places
        model.graph.initializer.remove(found)
        model.graph.sparse_initializer.append(
            helper.make_sparse_tensor(
                values, onnx.numpy_helper.from_array(indices.astype(np.int64), "i"), dense.shape
            )
        )

    return change


ODD_FORMS = {
    "the standard domain by its long name": spell_the_domain_out,
    "an import of it by its long name": import_the_domain_by_its_long_name,
    "nodes before those that they read": turn_the_nodes_around,
    "sparse weights": make_sparse(by_axis=False),
    "sparse weights by axis": make_sparse(by_axis=True),
}


@pytest.mark.parametrize("change", ODD_FORMS.values(), ids=ODD_FORMS)
def test_a_form_that_only_runtimes_read_is_built(tmp_path, change) -> None:
    path = tmp_path / "net.onnx"
    nodes = [("MatMul", "x w", "z"), ("Relu", "z", "r"), ("MatMul", "r v", "y")]
    model = onnx_model(nodes, {"x": ["N", 8]}, {"y": ["N", 4]}, w=normal(8, 6), v=normal(6, 4))
    change(model)
    onnx.save(model, path)
    assert_true_to(path)
    entry, _, _ = export(path)
    onnx.checker.check_model(onnx.load(entry.file(ONNX)), full_check=True)


@pytest.mark.parametrize("place", [-1, 48])
def test_sparse_weights_at_places_that_are_none_are_refused(tmp_path, place) -> None:
    path = tmp_path / "net.onnx"
    model = onnx_model(
        [("MatMul", "x w", "y")], {"x": ["N", 8]}, {"y": ["N", 6]}, path=path, w=normal(8, 6)
    )
    make_sparse(by_axis=False)(model)
    indices = model.graph.sparse_initializer[0].indices
    changed = onnx.numpy_helper.to_array(indices).copy()
    changed[-1] = place
    indices.CopyFrom(onnx.numpy_helper.from_array(changed, "i"))
    onnx.save(model, path)
    with pytest.raises(BadInputError, match="places that it does not have"):
        export(path)


def test_a_graph_of_many_outputs_is_not_simplified_and_says_so() -> None:
    """The simplifier takes time with the square of their number: 15 s for 4,000 on two cores."""
    names = [f"y{index}" for index in range(source_graph.MOST_SIMPLIFIED_ENDS)]
    model = onnx_model(
        [("Sin", "x", name) for name in names], {"x": [1, 4]}, {name: [1, 4] for name in names}
    )
    spec = InputSpec("x", "float32", *[(1, 4)] * 3)
    card = ModelCard("net", "net.py", Task.OTHER, (spec,))
    prepared = source_graph.prepare_graph(model, card, own_file=False)
    assert not prepared.simplified
    assert any("not simplified" in remark for remark in prepared.remarks)
