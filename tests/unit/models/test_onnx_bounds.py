"""ONNX files of absurd size, depth, or declarations are refused before anything long or recursive reads them."""

from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.fakes.graphs import onnx_model

from optpipe.backends.bounded_run import read_limit_s
from optpipe.backends.plain_session import PlainSession
from optpipe.core.errors import BadInputError
from optpipe.models.sources import onnx_bounds
from optpipe.models.sources.onnx_file import find_external_files, onnx_from_file

SIDES = {"x": [1, 4]}, {"y": [1, 4]}


def assert_refused(path, *words):
    """In two lines, the second of which is a way out."""
    with pytest.raises(BadInputError) as caught:
        onnx_from_file(path)
    said = str(caught.value)
    assert all(each in said for each in (str(path), *words)), said
    assert len(said.splitlines()) == 2
    assert len(said) < 600


def tensor(kind, *dims, **data):
    made = onnx.TensorProto(name="w", data_type=kind, dims=dims)
    for name, value in data.items():
        if name == "raw_data":
            made.raw_data = value
        else:
            getattr(made, name).extend(value)
    return made


DECLARED = {
    "more bytes": tensor(TensorProto.FLOAT, 1, 4, raw_data=bytes(8)),
    "far more bytes": tensor(TensorProto.FLOAT, 2**20, 2**18, raw_data=bytes(16)),
    "fewer bytes": tensor(TensorProto.FLOAT, 1, 4, raw_data=bytes(32)),
    "no bytes": tensor(TensorProto.FLOAT, 1, 4, raw_data=b""),
    "halves": tensor(TensorProto.FLOAT16, 1, 4, raw_data=bytes(7)),
    "nibbles": tensor(TensorProto.INT4, 1, 5, raw_data=bytes(2)),
    "more numbers": tensor(TensorProto.FLOAT, 1, 4, float_data=[1.0, 2.0]),
    "more integers": tensor(TensorProto.INT64, 1, 4, int64_data=[1]),
    "a scalar": tensor(TensorProto.DOUBLE, double_data=[1.0, 2.0]),
}


@pytest.mark.parametrize("case", DECLARED)
@pytest.mark.parametrize("place", ["initializer", "Constant"])
def test_a_tensor_that_declares_other_data_is_refused(tmp_path, case, place) -> None:
    held, path = DECLARED[case], tmp_path / "net.onnx"
    model = onnx_model([("Relu", "x", "y")], *SIDES)
    if place == "initializer":
        model.graph.initializer.append(held)
    else:
        model.graph.node.append(helper.make_node("Constant", [], ["w"], value=held))
    onnx.save(model, path)
    assert_refused(path, "'w'", "declares")


@pytest.mark.parametrize(
    ("size", "said"),
    [(8, {}), (16, {"length": 8}), (0, {}), (15, {})],
)
def test_external_data_shorter_than_declared_is_refused(tmp_path, size, said) -> None:
    held, path = tensor(TensorProto.FLOAT, 1, 4), tmp_path / "net.onnx"
    held.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "w.bin", **said}.items():
        held.external_data.add(key=key, value=str(value))
    (tmp_path / "w.bin").write_bytes(bytes(size))
    model = onnx_model([("Add", "x w", "y")], *SIDES)
    model.graph.initializer.append(held)
    onnx.save(model, path)
    assert_refused(path)


@pytest.mark.parametrize("kind", ["INT4", "UINT4", "FLOAT16", "BFLOAT16", "FLOAT8E4M3FN", "BOOL"])
def test_complete_data_of_every_width_are_taken(tmp_path, kind) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(getattr(TensorProto, kind))
    values = np.array([[0, 1, 1, 0, 1]]).astype(dtype)
    onnx_bounds.require_complete_data(iter([numpy_helper.from_array(values, "w")]), tmp_path)


def test_a_sparse_file_of_external_data_is_not_hashed(tmp_path) -> None:
    held, path = tensor(TensorProto.FLOAT, 1, 4), tmp_path / "net.onnx"
    held.data_location = TensorProto.EXTERNAL
    held.external_data.add(key="location", value="w.bin")
    with (tmp_path / "w.bin").open("wb") as file:
        file.truncate(2**37)
    model = onnx_model([("Add", "x w", "y")], *SIDES)
    model.graph.initializer.append(held)
    onnx.save(model, path)
    with pytest.raises(BadInputError, match=r"w\.bin.*\n"):
        find_external_files(path)


def call(name, *callees):
    """A function of the domain `own` that calls others one after the other."""
    nodes, last = [], "a"
    for index, callee in enumerate(callees):
        domain = "" if callee == "Relu" else "own"
        nodes.append(helper.make_node(callee, [last], [f"t{index}"], domain=domain))
        last = f"t{index}"
    nodes[-1].output[0] = "b"
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["a"], ["b"], nodes, opsets)


CALLS = {
    "itself": [call("f0", "f0")],
    "in a circle": [call("f0", "f1"), call("f1", "f0")],
    "twice, 30 deep": [
        *(call(f"f{at}", *[f"f{at + 1}"] * 2) for at in range(30)),
        call("f30", "Relu"),
    ],
    "3,000 deep": [*(call(f"f{at}", f"f{at + 1}") for at in range(3000)), call("f3000", "Relu")],
}


@pytest.mark.parametrize("case", CALLS)
def test_functions_that_call_each_other_without_end_are_refused(tmp_path, case) -> None:
    node = helper.make_node("f0", ["x"], ["y"], domain="own")
    model = onnx_model([node], *SIDES, opset={"": 17, "own": 1})
    model.functions.extend(CALLS[case])
    onnx.save(model, tmp_path / "net.onnx")
    assert_refused(tmp_path / "net.onnx")


def loops(trips):
    """A Loop inside a Loop, and so on, with these trip counts from the inside."""
    nodes = [helper.make_node("Add", ["v", "one"], ["w"])]
    for level, trip in enumerate(trips):
        values = [
            helper.make_tensor_value_info(f"i{level}", TensorProto.INT64, []),
            helper.make_tensor_value_info(f"c{level}", TensorProto.BOOL, []),
            helper.make_tensor_value_info(
                "v" if not level else f"v{level}", TensorProto.FLOAT, None
            ),
        ]
        again = helper.make_node("Identity", [f"c{level}"], [f"d{level}"])
        made = [
            helper.make_tensor_value_info(f"d{level}", TensorProto.BOOL, []),
            helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None),
        ]
        body = helper.make_graph([again, *nodes], f"b{level}", values, made)
        start = "x" if level == len(trips) - 1 else f"v{level + 1}"
        output = "y" if level == len(trips) - 1 else f"w{level}"
        nodes = [helper.make_node("Loop", [f"trip{trip}", "go", start], [output], body=body)]
    return nodes


@pytest.mark.parametrize("trips", [(2**40,), (10**6,), (1000, 1000), (50, 50, 50)])
def test_loops_are_counted_with_those_around_them(tmp_path, trips) -> None:
    held = {f"trip{trip}": np.array(trip) for trip in trips}
    held |= {"go": np.array(True), "one": np.ones(1, np.float32)}
    onnx_model(loops(trips), *SIDES, path=tmp_path / "net.onnx", **held)
    assert_refused(tmp_path / "net.onnx", "Loop", str(np.prod(trips)))


def test_a_graph_whose_build_would_take_minutes_is_refused(tmp_path) -> None:
    count = 30_001
    names = ["x", *map("t{}".format, range(count - 1)), "y"]
    onnx_model([("Relu", *pair) for pair in pairwise(names)], *SIDES, path=tmp_path / "net.onnx")
    assert_refused(tmp_path / "net.onnx", f"{count} nodes", "30000 is the most")


def test_nodes_lists_ends_and_axes_are_bounded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(onnx_bounds, "MOST_NODES", 20)
    monkeypatch.setattr(onnx_bounds, "MOST_ENTRIES", 20)
    names = ["x", *(f"t{index}" for index in range(20)), "y"]
    chain = [("Relu", *pair) for pair in pairwise(names)]
    path = tmp_path / "net.onnx"
    onnx_model(chain, *SIDES, path=path)
    assert_refused(path, "21 nodes")
    onnx_model([("Sum", ["x"] * 21, "y")], *SIDES, path=path)
    assert_refused(path, "Sum", "21 tensors")
    onnx_model([("Relu", "x", "y")], *SIDES, path=path, **{f"w{at}": [1.0] for at in range(21)})
    assert_refused(path, "'initializer'", "21 entries")
    onnx_model([("Relu", "x", "y")], *SIDES, path=path, w=np.zeros([1] * 1))
    model = onnx.load(path)
    model.graph.initializer[0].dims.extend([1] * 100)
    onnx.save(model, path)
    assert_refused(path, "101 axes")


def whole(*values):
    return np.array(values, np.int64)


TO_IMAGE = ("Reshape", "x q", "r")
ONE = np.ones((1, 1, 1, 1), np.float32)
LARGE = {
    "ConstantOfShape": ([("ConstantOfShape", "s", "big")], {"s": whole(2**31)}),
    "Expand": ([("Expand", "x s", "big")], {"s": whole(2**29, 4)}),
    "Tile": ([("Tile", "x s", "big")], {"s": whole(2**15, 2**14)}),
    "Pad": ([("Pad", "x s", "big")], {"s": whole(0, 0, 2**31, 0)}),
    "Range": (
        [("Range", "a b d", "t"), ("Cast", "t", "big", {"to": 1})],
        {"a": np.array(0), "b": np.array(2**31), "d": np.array(1)},
    ),
    "Range that inference computes": (
        [("Range", "a b d", "t"), ("Cast", "t", "big", {"to": 1})],
        {"a": np.array(0), "b": np.array(2**23), "d": np.array(1)},
    ),
    "Range of numbers in attributes": (
        [
            ("Constant", [], "a", {"value_int": 0}),
            ("Constant", [], "e", {"value_float": float(2**31)}),
            ("Cast", "e", "b", {"to": 7}),
            ("Constant", [], "d", {"value_int": 1}),
            ("Range", "a b d", "t"),
            ("Cast", "t", "big", {"to": 1}),
        ],
        {},
    ),
    "Resize by sizes": (
        [TO_IMAGE, ("Resize", ["r", "", "", "sizes"], "big")],
        {"q": whole(1, 1, 2, 2), "sizes": whole(1, 1, 2**16, 2**15)},
    ),
    "Resize by scales": (
        [TO_IMAGE, ("Resize", ["r", "", "scales"], "big")],
        {"q": whole(1, 1, 2, 2), "scales": np.array([1, 1, 2**15, 2**15], np.float32)},
    ),
    "OneHot": (
        [("Cast", "x", "at", {"to": 7}), ("OneHot", "at depth v", "big")],
        {"depth": np.array(2**31), "v": np.array([0, 1], np.float32)},
    ),
    "HannWindow": ([("HannWindow", "n", "big")], {"n": np.array(2**31)}),
    "Mul": (
        [("Mul", "a b", "big")],
        {"a": np.ones((2**16, 1), np.float32), "b": np.ones((1, 2**16), np.float32)},
    ),
    "Einsum": (
        [("Einsum", "a a", "big", {"equation": "i,j->ij"})],
        {"a": np.ones(2**16, np.float32)},
    ),
    "ConvTranspose": (
        [TO_IMAGE, ("ConvTranspose", "r w", "big", {"strides": [2**15, 2**16]})],
        {"q": whole(1, 1, 2, 2), "w": ONE},
    ),
    "Conv with pads": (
        [TO_IMAGE, ("Conv", "r w", "big", {"pads": [2**16] * 4})],
        {"q": whole(1, 1, 2, 2), "w": ONE},
    ),
    "Concat of itself": (
        [("Concat", [f"k{at}" if at else "x"] * 2, f"k{at + 1}", {"axis": 0}) for at in range(40)]
        + [("Identity", "k40", "big")],
        {},
    ),
}


@pytest.mark.parametrize("case", LARGE)
def test_a_node_that_makes_a_tensor_of_absurd_size_is_refused(tmp_path, case) -> None:
    made: Any = LARGE[case]
    nodes, held = made
    ends = [("ReduceMax", "big", "m"), ("Add", "x m", "y")]
    path = tmp_path / "net.onnx"
    onnx_model([*nodes, *ends], {"x": [1, 4]}, {"y": ("FLOAT", None)}, path=path, **held)
    assert_refused(path, case.split()[0])


LENGTH = [("Shape", "x", "dims"), ("Gather", "dims at", "k"), ("Mul", "k many", "length")]
"""A size that follows from the shape of the input."""
ROWS = [*LENGTH, ("Reshape", "length single", "rows")]
LARGE_BY_SHAPE = {
    "ConstantOfShape": ([*ROWS, ("ConstantOfShape", "rows", "big")], {}),
    "Expand": (
        [*ROWS, ("Concat", "rows four", "s", {"axis": 0}), ("Expand", "x s", "big")],
        {"four": whole(4)},
    ),
    "Tile": (
        [*ROWS, ("Concat", "one rows", "s", {"axis": 0}), ("Tile", "x s", "big")],
        {"one": whole(1)},
    ),
    "Pad": (
        [*ROWS, ("Concat", "none rows zero", "s", {"axis": 0}), ("Pad", "x s", "big")],
        {"none": whole(0, 0), "zero": whole(0)},
    ),
    "Range": (
        [*LENGTH, ("Range", "a length d", "t"), ("Cast", "t", "big", {"to": 1})],
        {"a": np.array(0), "d": np.array(1)},
    ),
    "OneHot": (
        [*LENGTH, ("Cast", "x", "at1", {"to": 7}), ("OneHot", "at1 length v", "big")],
        {"v": np.array([0, 1], np.float32)},
    ),
    "Resize": (
        [
            *ROWS,
            TO_IMAGE,
            ("Concat", "three rows", "sizes", {"axis": 0}),
            ("Resize", ["r", "", "", "sizes"], "big"),
        ],
        {"q": whole(1, 1, 2, 2), "three": whole(1, 1, 2)},
    ),
}


@pytest.mark.parametrize("batch", [1, "n"])
@pytest.mark.parametrize("case", LARGE_BY_SHAPE)
def test_a_size_that_follows_from_a_shape_is_bounded(tmp_path, case, batch) -> None:
    made: Any = LARGE_BY_SHAPE[case]
    nodes, held = made
    ends = [("ReduceMax", "big", "m"), ("Add", "x m", "y")]
    path, own = tmp_path / "net.onnx", {"at": np.array(1), "single": whole(1), **held}

    def save(many: int) -> None:
        sides: Any = {"x": [batch, 4]}, {"y": ("FLOAT", None)}
        onnx_model([*nodes, *ends], *sides, path=path, many=np.array(many), **own)

    save(2**29)
    assert_refused(path, case)
    save(2)
    onnx_from_file(path)


def test_texts_of_many_megabytes_are_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(onnx_bounds, "MOST_TEXT_BYTES", 1000)
    model = onnx_model([("Relu", "x", "y")], *SIDES)
    model.graph.initializer.append(tensor(TensorProto.STRING, 1, string_data=[b"a" * 1001]))
    onnx.save(model, tmp_path / "net.onnx")
    assert_refused(tmp_path / "net.onnx", "1001 bytes")


COMPUTED = [
    ("ReduceSum", "x", "sum", {"keepdims": 0}),
    ("Mul", "sum zero", "none"),
    ("Cast", "none", "whole", {"to": 7}),
    ("Add", "whole n", "trip2"),
]
"""A number that a run computes."""
HELD = {"zero": np.array(0, np.float32), "go": np.array(True), "one": np.ones(1, np.float32)}


def test_ifs_inside_of_each_other_are_bounded(tmp_path, monkeypatch) -> None:
    """Both branches of each hold the next one."""
    monkeypatch.setattr(onnx_bounds, "MOST_GRAPHS", 60)
    made = helper.make_node("Identity", ["x"], ["z"])
    for _ in range(6):
        end = helper.make_tensor_value_info(made.output[0], TensorProto.FLOAT, [1, 4])
        inner = helper.make_graph([made], "inner", [], [end])
        made = helper.make_node("If", ["go"], ["y"], then_branch=inner, else_branch=inner)
    both = {"then_branch": inner, "else_branch": inner}
    onnx_model([("If", "go", "y", both)], *SIDES, path=tmp_path / "net.onnx", go=np.array(True))
    assert_refused(tmp_path / "net.onnx", "graphs lie inside its Ifs and Loops")


def write_doubling(path, rounds, times=2):
    """A Loop whose value is `times` as large after each of its rounds."""
    sides = [("i", "INT64", []), ("go", "BOOL", []), ("v", "FLOAT", None)]
    starts = [
        onnx.helper.make_tensor_value_info(name, getattr(onnx.TensorProto, kind), shape)
        for name, kind, shape in sides
    ]
    ends = [("kept", "BOOL", []), ("w", "FLOAT", None)]
    ends = [
        onnx.helper.make_tensor_value_info(name, getattr(onnx.TensorProto, kind), shape)
        for name, kind, shape in ends
    ]
    nodes = [
        onnx.helper.make_node("Concat", ["v"] * times, ["w"], axis=0),
        onnx.helper.make_node("Identity", ["go"], ["kept"]),
    ]
    body = onnx.helper.make_graph(nodes, "body", starts, ends)
    loop = ("Loop", "rounds go x", "y", {"body": body})
    onnx_model(
        [loop],
        {"x": [1, 4]},
        {"y": ("FLOAT", None)},
        path=path,
        rounds=np.array(rounds),
        go=np.array(True),
    )


@pytest.mark.parametrize(("times", "refused"), [(1, False), (2, True)])
def test_a_loop_whose_value_doubles_is_refused(tmp_path, times, refused) -> None:
    write_doubling(tmp_path / "net.onnx", 60, times)
    if refused:
        assert_refused(tmp_path / "net.onnx", "Loop 'y'", "grow")
    else:
        onnx_from_file(tmp_path / "net.onnx")


def test_a_run_whose_loop_takes_the_memory_is_ended(tmp_path, monkeypatch) -> None:
    write_doubling(tmp_path / "net.onnx", 30)
    monkeypatch.setattr("optpipe.backends.bounded_run._NOTICEABLE_BYTES", 1 << 20)
    monkeypatch.setattr("optpipe.backends.bounded_run._POLL_S", 0.001)
    monkeypatch.setattr("optpipe.backends.bounded_run._read_memory", lambda _: 1 << 22)
    assert "in its loops" in run_bounded(tmp_path / "net.onnx")


def run_bounded(path):
    with pytest.raises(BadInputError) as caught, PlainSession(path) as session:
        session.run({"x": np.zeros((1, 4), np.float32)})
    assert len(str(caught.value).splitlines()) == 2
    return str(caught.value)


def test_a_loop_whose_rounds_are_computed_ends_in_time_and_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OPTPIPE_LONGEST_RUN_S", "0.15")
    path, nodes = tmp_path / "net.onnx", [*COMPUTED, *loops((2,))]
    onnx_model(nodes, *SIDES, path=path, n=np.array(2**50), **HELD)
    onnx_from_file(path)
    said = run_bounded(path)
    assert "Loop 'y'" in said
    assert "OPTPIPE_LONGEST_RUN_S" in said


def test_a_computed_size_beyond_the_memory_names_the_node(tmp_path) -> None:
    nodes = [*COMPUTED, ("Reshape", "trip2 single", "s"), ("ConstantOfShape", "s", "big")]
    ends = [("ReduceMax", "big", "m"), ("Add", "x m", "y")]
    held = HELD | {"n": np.array(2**45), "single": whole(1)}
    sides = {"x": [1, 4]}, {"y": ("FLOAT", None)}
    onnx_model([*nodes, *ends], *sides, path=tmp_path / "net.onnx", **held)
    assert "ConstantOfShape" in run_bounded(tmp_path / "net.onnx")


@pytest.mark.parametrize("text", ["zero", "-1", "0", "nan", "inf"])
def test_a_time_that_is_none_is_refused(text, monkeypatch) -> None:
    monkeypatch.setenv("OPTPIPE_LONGEST_RUN_S", text)
    with pytest.raises(BadInputError, match="OPTPIPE_LONGEST_RUN_S"):
        read_limit_s()


def test_a_short_loop_runs_with_the_usual_bounds(tmp_path) -> None:
    path = tmp_path / "net.onnx"
    onnx_model([*COMPUTED, *loops((2,))], *SIDES, path=path, n=np.array(3), **HELD)
    onnx_from_file(path)
    with PlainSession(path) as session:
        assert session.run({"x": np.zeros((1, 4), np.float32)})["y"].tolist() == [[3.0] * 4]
