"""Sequences of tensors, as torch's exporter writes `split` and `unbind`, become slices that every runtime has."""

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from tests.fakes.graphs import node_of, onnx_model

from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.models.export.sequences import split_without_sequences
from optpipe.models.export.source_graph import prepare_graph

X = {"x": [2, 7, 4]}
FEEDS = {"x": np.arange(56, dtype=np.float32).reshape(2, 7, 4)}
NUMBERS = {f"n{at}": np.array(at) for at in range(-2, 6)} | {"sizes": np.array([3, 1, 3])}


def build_split(split, places, axis=1, keepdims=1, more=()):
    """A graph with one output for each place of the sequence."""
    given = "x" if split is None else f"x {split}"
    nodes = [("SplitToSequence", given, "s", {"axis": axis, "keepdims": keepdims}), *more]
    nodes += [("SequenceAt", f"s n{place}", f"y{at}") for at, place in enumerate(places)]
    outputs = {f"y{at}": None for at in range(len(places))}
    return onnx_model(nodes, X, outputs, **NUMBERS)


CASES = {
    "unbind": (None, [0, 3, 5], 1, 0),
    "unbind from behind": (None, [-1, -2, 0], 1, 0),
    "single places that stay": (None, [1, -1], 2, 1),
    "a negative axis": (None, [1, 2], -1, 0),
    "chunks, the last one smaller": ("n3", [0, 1, 2], 1, 1),
    "one chunk twice": ("n2", [1, 1], 1, 1),
    "sizes": ("sizes", [0, 1, 2], 1, 1),
    "sizes from behind": ("sizes", [-1, 0, -2], 1, 1),
    "sizes, which keep the axis all the same": ("sizes", [1], 1, 0),
    "first axis": ("n1", [0, 1], 0, 1),
}


def read_operators(model):
    return {each.op_type for each in model.graph.node}


@pytest.mark.parametrize("case", CASES)
def test_parts_at_constant_places_are_slices(case) -> None:
    model = build_split(*CASES[case])
    split = onnx.ModelProto()
    split.CopyFrom(model)
    split = split_without_sequences(split)
    assert read_operators(split) <= {"Constant", "Slice", "Squeeze"}
    expected, found = (ReferenceEvaluator(each).run(None, FEEDS) for each in (model, split))
    for one, two in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, two)


OTHERS = {
    "a length": build_split("n2", [0], more=[("SequenceLength", "s", "length")]),
    "the last of chunks": build_split("n2", [-1]),
    "a place beyond the end": build_split("sizes", [4]),
    "a place that is computed": onnx_model(
        [("SplitToSequence", "x", "s"), ("SequenceAt", "s at", "y")],
        {**X, "at": ("INT64", [])},
        {"y": None},
    ),
    "sizes that are computed": onnx_model(
        [("SplitToSequence", "x at", "s"), ("SequenceAt", "s zero", "y")],
        {**X, "at": ("INT64", [2])},
        {"y": None},
        zero=np.array(0),
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_sequences_stay_as_they_are(case) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(OTHERS[case])
    assert split_without_sequences(model) == OTHERS[case]


def test_an_export_with_sequences_is_prepared_without_them() -> None:
    model = build_split(None, [0, 6], 1, 0)
    constant = node_of("Constant", [], "six", {"value_int": 6})
    model.graph.node.insert(0, constant)
    model.graph.node[-1].input[1] = "six"
    card = ModelCard("net", "net.py", Task.OTHER, (InputSpec("x", "float32", *[(2, 7, 4)] * 3),))
    prepared = prepare_graph(model, card, own_file=False)
    assert prepared.remarks == ()
    assert "SplitToSequence" not in read_operators(prepared.graph)
