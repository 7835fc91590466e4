"""Ties in a graph's selections, where torch and a runtime may each choose another of values that are equal up to rounding."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.onnx_graph import expose_tensors
from optpipe.backends.plain_session import PlainSession
from optpipe.core import onnx
from optpipe.core.errors import OptpipeError, escape

SELECTIONS = {"TopK": 0, "ArgMax": 0, "ArgMin": 0, "NonMaxSuppression": 1}
"""Operators that choose, and the place of the input that they choose by."""

ROUNDING = 64 * float(np.finfo(np.float32).eps)
"""Relative to the largest value: FP32 sums of a network differ by about this much between two runtimes."""


def describe_tie(model: Any, feeds: Mapping[str, NDArray[Any]]) -> str | None:
    """The first selection of `model` that chooses among values on `feeds` that are equal up to rounding, in words.

    None without one, and if the graph does not run with these tensors as outputs. Of equal values,
    ONNX's TopK takes the lower index; torch.topk promises no order ("not guaranteed to be stable").
    Of values that differ by less than ROUNDING, as the scores of a detector with random weights do,
    either may be the larger one in another runtime.
    """
    nodes = [node for node in model.graph.node if node.op_type in SELECTIONS]
    names = [
        name
        for node in nodes
        for name in (node.input[SELECTIONS[node.op_type]], *node.output)
        if name
    ]
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    try:
        with PlainSession(expose_tensors(copy, list(dict.fromkeys(names)))) as session:
            taken = {value.name for value in session.inputs}
            computed = session.run({name: value for name, value in feeds.items() if name in taken})
    except OptpipeError:
        return None
    computed = {**feeds, **computed}
    for node in nodes:
        ranked = node.input[SELECTIONS[node.op_type]]
        if ranked not in computed:
            continue
        for rounding, kind in ((0.0, "equal values"), (ROUNDING, "values equal up to rounding")):
            if _has_tie(node, computed[ranked], computed, rounding):
                return f"{node.op_type} chooses among {kind} of tensor '{escape(ranked)[:80]}'"
    return None


def _has_tie(
    node: Any, ranked: NDArray[Any], tensors: Mapping[str, NDArray[Any]], rounding: float
) -> bool:
    """Whether values that differ by at most `rounding` of the largest make the choice, or its order, open on some row."""
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    in_order = node.op_type in ("TopK", "NonMaxSuppression")
    axis = attributes.get("axis", -1 if in_order else 0)
    values = np.moveaxis(ranked, axis, -1)

    ordered = np.sort(values, axis=-1)
    if node.op_type != "ArgMin" and attributes.get("largest", 1):
        ordered = ordered[..., ::-1]
    count = values.shape[-1] if in_order else 1
    if node.op_type == "TopK":
        chosen = next(tensors[name] for name in node.output if name in tensors)
        count = chosen.shape[axis]
    compared = ordered[..., : count + 1]
    if not rounding or compared.dtype.kind != "f":
        return bool((compared[..., 1:] == compared[..., :-1]).any())
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(compared[..., 1:] - compared[..., :-1])
        return bool((apart <= rounding * np.abs(ordered).max(axis=-1, keepdims=True)).any())
