"""ONNX files of anyone: what is wrong with a bad one is its own fault, said at once; what is open in a good one is proposed."""

import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import BadInputError
from optpipe.models.sources.onnx_file import OnnxFileSource, find_batch_axes, name_dimensions


def linear():
    """x (batch, 8) times a matrix."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(np.ones((8, 4), np.float32), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def source(folder, model):
    (folder / "net.onnx").write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return OnnxFileSource(folder / "net.onnx")


def opset(model):
    model.opset_import[0].version = 2**62


def operator(model):
    return model.SerializeToString().replace(b"MatMul", b"Mat\xff\x1b[", 1)


def escape(model):
    model.graph.node[0].op_type = "Evil\x1b[31mred"


def domain(model):
    model.graph.node[0].domain = "my\x1b]0;title\x07"


def data_type(number):
    def change(model):
        model.graph.initializer[0].data_type = number

    return change


def input_type(model):
    model.graph.input[0].type.tensor_type.elem_type = 99


def size(number):
    def change(model):
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = number

    return change


def weight_size(model):
    model.graph.initializer[0].dims[0] = 2**62


def name(text):
    def change(model):
        model.graph.input[0].name = model.graph.node[0].input[0] = text

    return change


def external(location):
    def change(model):
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)

    return change


def without_output(model):
    del model.graph.output[:]


def disconnected(model):
    model.graph.output[0].name = "nowhere"


def mismatched(model):
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((7, 4), np.float32), "w"))


def type_of_all(kind):
    """Another operator, whose tensors are all of the type `kind`."""

    def change(model):
        model.graph.node[0].op_type = "Conv"
        del model.graph.initializer[:]
        tensors = ("x", [1, 4, 8, 8]), ("w", [8, 4, 3, 3])
        del model.graph.input[:]
        model.graph.input.extend(helper.make_tensor_value_info(name, kind, shape) for name, shape in tensors)
        model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", kind, [1, 8, 6, 6]))

    return change


def cycle(model):
    model.graph.node.append(helper.make_node("Relu", ["z"], ["z"]))


BAD = {
    "opset 2^62": (opset, "the newest that onnx"),
    "an operator that is not UTF-8": (operator, "is not UTF-8"),
    "no output": (without_output, "has no outputs"),
    "an operator with an escape": (escape, r"Evil\\x1b\[31mred"),
    "a domain with an escape": (domain, r"my\\x1b"),
    "weights of type -1": (data_type(-1), "unknown data type -1"),
    "weights of type 99": (data_type(99), "unknown data type 99"),
    "weights of type 2^31 - 1": (data_type(2**31 - 1), "unknown data type"),
    "an input of type 99": (input_type, "unknown data type 99"),
    "an input of 2^31": (size(2**31), "has a dimension of 2147483648"),
    "an input of 2^62": (size(2**62), "has a dimension of"),
    "weights of 2^62": (weight_size, "has a dimension of"),
    "a name of 100,000 characters": (name("a" * 100_000), "too long or has control characters"),
    "a name with a NUL": (name("a\0b"), r"a\\x00b"),
    "external data with a NUL": (external("a\0b"), "is not a file name"),
    "external data of 5,000 characters": (external("a" * 5000), "is not a file name"),
    "external data elsewhere": (external("../../etc/passwd"), "outside its folder"),
    "external data that is missing": (external("w.bin"), "external data w.bin is missing"),
    "an output from nowhere": (disconnected, "nowhere"),
    "sizes that do not fit": (mismatched, "cannot be read as ONNX"),
    "convolutions in BF16 at opset 17": (
        type_of_all(TensorProto.BFLOAT16),
        r"Conv \('product'\) does not take bfloat16 tensors at opset 17, only from opset 22 on\n"
        "export the model in float32; `optpipe build --precision bf16` converts it",
    ),
    "convolutions in INT32": (type_of_all(TensorProto.INT32), r"int32 tensors at opset 17\nexport it in another type"),
    "a cycle": (cycle, "cannot be read as ONNX"),
}


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
    constant = helper.make_node(
        "Constant", [], ["w"], value=numpy_helper.from_array(np.ones((8, 4), np.float32), "held")
    )
    held = constant.attribute[0].t
    (tmp_path / "w.bin").write_bytes(held.raw_data)
    external("w.bin")(helper.make_model(helper.make_graph([], "g", [], [], [held])))
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
    graph = helper.make_graph(
        [helper.make_node("Identity", ["pixels"], ["y"])],
        "g",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, outputs)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(model, dict(metadata))
    return model


@pytest.mark.parametrize(
    ("dims", "outputs", "metadata", "proposed"),
    [
        (["n", 3, "h", "w"], [None] * 4, {}, "--shape pixels=1x3x640x640:8x3x640x640:64x3x640x640"),
        (
            ["n", 3, "h", "w"],
            [None] * 4,
            {"imgsz": "[320, 320]"},
            "--shape pixels=1x3x320x320:8x3x320x320:64x3x320x320",
        ),
        ([1, 3, "?", "?"], [None] * 4, {}, "--shape pixels=1x3x640x640"),
        ([None, None], [None] * 2, {}, "--shape pixels=1x128:8x128:64x128"),
    ],
)
def test_open_dimensions_are_refused_with_a_line_to_paste(tmp_path, dims, outputs, metadata, proposed) -> None:
    with pytest.raises(BadInputError) as raised:
        source(tmp_path, image(dims, outputs, metadata)).load(WeightsRequest())
    assert str(raised.value).splitlines()[1] == proposed
    assert (
        subprocess.run(["bash", "-c", f"echo {proposed}"], capture_output=True, text=True, check=True).stdout.strip()
        == proposed
    )


def test_names_that_are_none_become_names() -> None:
    model = image(["?", 3, "?", "-1"], ["?", 3, "?", "?"])
    shapes = {"pixels": ((1, 3, 32, 64), (4, 3, 32, 64), (8, 3, 32, 64))}
    from optpipe.models.sources.onnx_file import read_input_specs

    name_dimensions(model, read_input_specs(model, shapes, Path("net.onnx")))
    dims = model.graph.input[0].type.tensor_type.shape.dim
    assert [each.dim_param or each.dim_value for each in dims] == ["batch", 3, "pixels_dim2", "pixels_dim3"]
    assert not any(each.dim_param for each in model.graph.output[0].type.tensor_type.shape.dim)
    onnx.checker.check_model(model, full_check=True)


def test_weights_beyond_what_one_file_holds_are_refused_before_they_are_read(tmp_path) -> None:
    model = linear()
    weight = model.graph.initializer[0]
    weight.CopyFrom(TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1 << 15, 1 << 14]))
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="w.data")
    (tmp_path / "w.data").touch()
    with pytest.raises(BadInputError, match=r"weights take 2\.00 GiB; an ONNX file holds 2 GiB at most"):
        source(tmp_path, model).load(WeightsRequest())
