"""ONNX files of anyone: what is wrong with a bad one is its own fault, said at once; what is open in a good one is proposed."""

import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.fakes.graphs import node_of, onnx_model

from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import BadInputError
from optpipe.models.sources.onnx_file import (
    OnnxFileSource,
    find_batch_axes,
    name_dimensions,
    read_input_specs,
)


def linear():
    """x (batch, 8) times a matrix."""
    product = [("MatMul", "x w", "y", {"name": "product"})]
    return onnx_model(
        product, {"x": ["batch", 8]}, {"y": ["batch", 4]}, w=np.ones((8, 4), np.float32)
    )


def source(folder, model):
    (folder / "net.onnx").write_bytes(
        model if isinstance(model, bytes) else model.SerializeToString()
    )
    return OnnxFileSource(folder / "net.onnx")


def replace_bytes(old, new):
    return lambda model: model.SerializeToString().replace(old, new, 1)


def put(place, value):
    """A change of the field at `place`, such as "graph.node.0.domain"."""

    def changed(model):
        *steps, last = place.split(".")
        for step in steps:
            model = model[int(step)] if step.isdigit() else getattr(model, step)
        if last.isdigit():
            model[int(last)] = value
        else:
            setattr(model, last, value)

    return changed


def external(location):
    def changed(model):
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)

    return changed


def name(text):
    def changed(model):
        model.graph.input[0].name = model.graph.node[0].input[0] = text

    return changed


def convolution_of(kind):
    """Another operator, whose tensors are all of the type `kind`."""

    def changed(model):
        shapes = {"x": [1, 4, 8, 8], "w": [8, 4, 3, 3]}
        inputs = {key: (kind, shape) for key, shape in shapes.items()}
        model.CopyFrom(
            onnx_model(
                [("Conv", "x w", "y", {"name": "product"})], inputs, {"y": (kind, [1, 8, 6, 6])}
            )
        )

    return changed


def two_nodes_of_one_name(model):
    model.graph.node.append(node_of("Relu", "y", "r", {"name": "product"}))


def strings_out(model):
    """The name of the largest output."""
    model.graph.node.extend(
        [
            node_of("ArgMax", "y", "place", {"axis": 1, "keepdims": 0}),
            node_of("Gather", "names place", "label"),
        ]
    )
    model.graph.initializer.append(
        helper.make_tensor("names", TensorProto.STRING, [4], list("abcd"))
    )
    model.graph.output.append(helper.make_tensor_value_info("label", TensorProto.STRING, ["batch"]))


def draw(operator, **attributes):
    def changed(model):
        model.graph.node.append(helper.make_node(operator, ["y"], ["noise"], **attributes))

    return changed


X = "graph.input.0.type.tensor_type"
SMALLER = numpy_helper.from_array(np.ones((7, 4), np.float32), "w")
BAD = {
    "opset 2^62": (put("opset_import.0.version", 2**62), "the newest that onnx"),
    "an operator that is not UTF-8": (replace_bytes(b"MatMul", b"Mat\xff\x1b["), "is not UTF-8"),
    "no output": (lambda model: model.graph.ClearField("output"), "has no outputs"),
    "an operator with an escape": (put("graph.node.0.op_type", "Evil\x1b[31mred"), r"Evil\\x1b\[31mred"),
    "a domain with an escape": (put("graph.node.0.domain", "my\x1b]0;title\x07"), r"my\\x1b"),
    "weights of type -1": (put("graph.initializer.0.data_type", -1), "unknown data type -1"),
    "weights of type 2^31 - 1": (put("graph.initializer.0.data_type", 2**31 - 1), "unknown data type"),
    "an input of type 99": (put(f"{X}.elem_type", 99), "unknown data type 99"),
    "an input of 2^31": (put(f"{X}.shape.dim.1.dim_value", 2**31), "has a dimension of 2147483648"),
    "an input of 2^62": (put(f"{X}.shape.dim.1.dim_value", 2**62), "has a dimension of"),
    "weights of 2^62": (put("graph.initializer.0.dims.0", 2**62), "has a dimension of"),
    "a name of 100,000 characters": (name("a" * 100_000), "too long or has control characters"),
    "a name with a NUL": (name("a\0b"), r"a\\x00b"),
    "external data with a NUL": (external("a\0b"), "is not a file name"),
    "external data of 5,000 characters": (external("a" * 5000), "is not a file name"),
    "external data elsewhere": (external("../../etc/passwd"), "outside its folder"),
    "external data that is missing": (external("w.bin"), "external data w.bin is missing"),
    "two nodes of one name": (two_nodes_of_one_name, "2 nodes are named 'product'"),
    "an output of strings": (strings_out, "output 'label' is a tensor of strings"),
    "random numbers without a spread": (draw("RandomNormalLike", scale=0.0), "draws from an empty range"),
    "random numbers from 1 to 0": (draw("RandomUniformLike", low=1.0, high=0.0), "draws from an empty range"),
    "a shape that is another": (put("graph.output.0.type.tensor_type.shape.dim.1.dim_value", 5), "correct the shape"),
    "an input of doubles": (put(f"{X}.elem_type", TensorProto.DOUBLE), "cannot be read|is double"),
    "weights of one name": (lambda model: model.graph.initializer.append(model.graph.initializer[0]), "a name of its own"),
    "an output twice": (lambda model: model.graph.output.append(model.graph.output[0]), "'y' is listed twice"),
    "an output from nowhere": (put("graph.output.0.name", "nowhere"), "nowhere"),
    "sizes that do not fit": (lambda model: model.graph.initializer[0].CopyFrom(SMALLER), "cannot be read as ONNX"),
    "convolutions in BF16 at opset 17": (convolution_of("BFLOAT16"), "bfloat16"),
    "convolutions in INT32": (convolution_of("INT32"), "int32"),
    "a cycle": (lambda model: model.graph.node.append(node_of("Relu", "z", "z")), "cannot be read as ONNX"),
}  # fmt: skip


def identified_and_loaded(found):
    found.collect_identity()
    found.load(WeightsRequest())


@pytest.mark.parametrize(("change", "said"), BAD.values(), ids=BAD)
def test_a_bad_file_is_refused_with_the_reason(tmp_path, change, said) -> None:
    model = linear()
    changed = change(model)
    found = source(tmp_path, changed if isinstance(changed, bytes) else model)
    with pytest.raises(BadInputError, match=said) as raised:
        identified_and_loaded(found)
    assert all(line.isprintable() for line in str(raised.value).splitlines())
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("content", [b"just text", b"\x08", b"\xff" * 100, bytes(range(256)) * 4])
def test_what_is_no_onnx_at_all(tmp_path, content) -> None:
    with pytest.raises(BadInputError, match=r"cannot be read as ONNX|holds no ONNX graph"):
        source(tmp_path, content).load(WeightsRequest())


def test_one_batch_that_no_memory_holds(tmp_path) -> None:
    model = linear()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2**31 - 1
    with pytest.raises(BadInputError, match="exceeds this machine's memory"):
        source(tmp_path, model).load(WeightsRequest())


def test_external_data_of_an_attribute_counts(tmp_path) -> None:
    value = numpy_helper.from_array(np.ones((8, 4), np.float32), "held")
    constant = helper.make_node("Constant", [], ["w"], value=value)
    held = constant.attribute[0].t
    (tmp_path / "w.bin").write_bytes(held.raw_data)
    held.ClearField("raw_data")
    held.data_location = TensorProto.EXTERNAL
    held.external_data.add(key="location", value="w.bin")
    model = linear()
    del model.graph.initializer[:]
    model.graph.node.insert(0, constant)
    found = source(tmp_path, model)
    before = found.collect_identity()
    (tmp_path / "w.bin").write_bytes(bytes(128))
    assert found.collect_identity() != before


@pytest.mark.parametrize(
    ("inputs", "axes"),
    [
        ([["batch", "sequence"], [2, "batch", 64], []], [0, 1, None]),
        ([[None, None], [2, None, 128], []], [0, 1, None]),
        ([[1, 576], [2, 1, 128]], [0, 1]),
        ([["sequence_length", 576], [1, 1, 128]], [None, None]),
        ([["unk__749", 3, 8, 8]], [0]),
        ([["N", 4], ["N", 7], [3]], [0, 0, None]),
        ([[2, "batch", 64], ["batch", 7]], [1, 0]),
        ([[4, 8], [2]], [0, None]),
    ],
)
def test_which_axis_is_the_batch(inputs, axes) -> None:
    assert find_batch_axes(inputs) == axes


def image(dims, outputs, metadata=()):
    model = onnx_model([("Identity", "pixels", "y")], {"pixels": dims}, {"y": outputs})
    helper.set_model_props(model, dict(metadata))
    return model


@pytest.mark.parametrize(
    ("dims", "outputs", "metadata", "proposed"),
    [
        (["n", 3, "h", "w"], [None] * 4, {}, "--shape pixels=1x3x640x640:8x3x640x640:64x3x640x640"),
        (["n", 3, "h", "w"], [None] * 4, {"imgsz": "[320, 320]"}, "--shape pixels=1x3x320x320:8x3x320x320:64x3x320x320"),
        ([1, 3, "?", "?"], [None] * 4, {}, "--shape pixels=1x3x640x640"),
        ([None, None], [None] * 2, {}, "--shape pixels=1x128:8x128:64x128"),
    ],
)  # fmt: skip
def test_open_dimensions_are_refused_with_a_line_to_paste(
    tmp_path, dims, outputs, metadata, proposed
) -> None:
    with pytest.raises(BadInputError) as raised:
        source(tmp_path, image(dims, outputs, metadata)).load(WeightsRequest())
    assert str(raised.value).splitlines()[1] == proposed
    assert shlex.split(proposed) == proposed.split(), "it can be pasted"


def test_names_that_are_none_become_names() -> None:
    model = image(["?", 3, "?", "-1"], ["?", 3, "?", "?"])
    shapes = {"pixels": ((1, 3, 32, 64), (4, 3, 32, 64), (8, 3, 32, 64))}
    name_dimensions(model, read_input_specs(model, shapes, Path("net.onnx")))
    dims = model.graph.input[0].type.tensor_type.shape.dim
    assert [each.dim_param or each.dim_value for each in dims] == [
        "batch",
        3,
        "pixels_dim2",
        "pixels_dim3",
    ]
    assert not any(each.dim_param for each in model.graph.output[0].type.tensor_type.shape.dim)
    onnx.checker.check_model(model, full_check=True)


def test_weights_beyond_what_one_file_holds_are_refused_before_they_are_read(tmp_path) -> None:
    model = linear()
    weight = model.graph.initializer[0]
    weight.CopyFrom(TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1 << 15, 1 << 14]))
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="w.data")
    (tmp_path / "w.data").touch()
    with pytest.raises(
        BadInputError, match=r"weights take 2\.00 GiB; an ONNX file holds 2 GiB at most"
    ):
        source(tmp_path, model).load(WeightsRequest())


def test_a_sequence_as_output_is_refused_with_the_line_that_cuts_it(tmp_path) -> None:
    model = onnx_model(
        [("Relu", "x", "y"), ("SplitToSequence", "y", "parts", {"axis": 1})],
        {"x": ["batch", 8]},
        {"y": ["batch", 8]},
    )
    kind = helper.make_tensor_type_proto(TensorProto.FLOAT, ["batch", 1])
    model.graph.output.append(
        helper.make_value_info("parts", helper.make_sequence_type_proto(kind))
    )
    with pytest.raises(
        BadInputError, match="output 'parts' is a sequence, not a tensor"
    ) as refused:
        source(tmp_path, model).load(WeightsRequest())
    exec(shlex.split(str(refused.value).partition("python -c ")[2])[0])
    cut = OnnxFileSource(tmp_path / "net-tensors.onnx").load(WeightsRequest())
    assert [each.name for each in cut.card.inputs] == ["x"]


def test_functions_nested_beyond_any_time_are_refused(tmp_path, monkeypatch) -> None:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    calls = [[helper.make_node("Relu", ["x"], ["y"])]]
    calls += [
        [helper.make_node(f"f{n}", [a], [b], domain="own") for a, b in ("xt", "ty")]
        for n in range(40)
    ]
    made = [
        helper.make_function("own", f"f{n}", ["x"], ["y"], body, opsets)
        for n, body in enumerate(calls)
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 8]) for name in "xy")
    graph = helper.make_graph([helper.make_node("f40", ["x"], ["y"], domain="own")], "g", [x], [y])
    monkeypatch.setattr("optpipe.models.sources.onnx_file.INFERENCE_S", 1)
    monkeypatch.setattr("optpipe.models.sources.onnx_bounds.MOST_NODES", 2**62)
    model = helper.make_model(graph, opset_imports=opsets, functions=made, ir_version=9)
    with pytest.raises(
        BadInputError, match="nested functions or subgraphs cannot be inferred within 1 s"
    ):
        source(tmp_path, model).load(WeightsRequest())
