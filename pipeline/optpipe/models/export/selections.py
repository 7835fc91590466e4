"""Rows that TopK, a sort, or NonMaxSuppression selects: two runs may give them in another order, and are compared as sets.

Scores that are equal, or nearly, swap places from one runtime to another. What is selected is then the same, and a comparison
row by row would call every swapped row wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.onnx_graph import OnnxGraph, find_selected_outputs, load_onnx
from optpipe.core import onnx

MOST_ROWS = 2048
"""Larger selections are compared in order: an assignment takes time with the cube of their number."""
Arrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Selection:
    """The outputs of a graph whose rows are selected, and the numbers of rows that its selections take."""

    outputs: frozenset[str] = frozenset()
    counts: frozenset[int] = frozenset()

    def find_axis(self, values: NDArray[np.generic]) -> int | None:
        """The axis of the rows in an output of (samples, …): the first whose size a selection takes; None without one."""
        axes = (at for at in range(1, values.ndim) if values.shape[at] in self.counts)
        return next(axes, None)


def read_selection(path: Path) -> Selection:
    """The selection of the graph in a file; empty without TopK or NonMaxSuppression."""
    graph = OnnxGraph(load_onnx(path))
    constants = dict(graph.weights)
    for node in graph.model.graph.node:
        for held in node.attribute if node.op_type == "Constant" else ():
            if held.HasField("t"):
                constants[node.output[0]] = held.t
    counts = set()
    for node in graph.model.graph.node:
        if node.op_type == "TopK" and len(node.input) > 1 and node.input[1] in constants:
            counts |= {*onnx.numpy_helper.to_array(constants[node.input[1]]).ravel().tolist()}
        elif node.op_type == "NonMaxSuppression" and len(node.input) > 2:
            most = constants.get(node.input[2])
            counts |= {*onnx.numpy_helper.to_array(most).ravel().tolist()} if most else set()
    return Selection(find_selected_outputs(path), frozenset(n for n in counts if n > 1))


def align_rows(
    expected: Arrays, found: Arrays, selection: Selection, tolerated: float
) -> dict[str, NDArray[np.generic]]:
    """`found` with the selected rows of each sample in the order in which they are nearest to those of `expected`.

    All outputs with one number of rows are ordered together: a box moves with its score and its class. Outputs that agree
    within `tolerated`, ‖found − expected‖ / ‖expected‖ of the whole, stay as they are, and so do those of other shapes.

        >>> one = {"v": np.array([[3.0, 2.0]]), "i": np.array([[7, 4]])}
        >>> other = {"v": np.array([[2.0, 3.0]]), "i": np.array([[4, 7]])}
        >>> align_rows(one, other, Selection(frozenset("vi"), frozenset((2,))), 1e-5)["i"]
        array([[7, 4]])
    """
    aligned = {name: np.asarray(value) for name, value in found.items()}
    groups: dict[int, dict[str, int]] = {}
    for name in selection.outputs & expected.keys() & found.keys():
        values, others = expected[name], found[name]
        axis = selection.find_axis(values)
        same = values.ndim == others.ndim and values.shape[1:] == others.shape[1:]
        if axis is not None and same and values.shape[axis] <= MOST_ROWS:
            groups.setdefault(values.shape[axis], {})[name] = axis
    for axes in groups.values():
        if all(_agree(expected[name], found[name], tolerated) for name in axes):
            continue
        samples = min(min(len(expected[name]), len(found[name])) for name in axes)
        moved = {name: aligned[name].copy() for name in axes}
        for sample in range(samples):
            order = _match_rows(
                {
                    name: np.moveaxis(expected[name][sample], axis - 1, 0)
                    for name, axis in axes.items()
                },
                {
                    name: np.moveaxis(found[name][sample], axis - 1, 0)
                    for name, axis in axes.items()
                },
            )
            for name, axis in axes.items():
                moved[name][sample] = np.take(found[name][sample], order, axis - 1)
        aligned |= moved
    return aligned


def _agree(one: NDArray[np.generic], other: NDArray[np.generic], tolerated: float) -> bool:
    count = min(len(one), len(other))
    if one.dtype.kind not in "fc":
        return bool((one[:count] == other[:count]).all())
    first, second = (each[:count].astype(np.float64) for each in (one, other))
    return bool(np.linalg.norm(second - first) <= tolerated * np.linalg.norm(first))


def _match_rows(expected: Arrays, found: Arrays) -> NDArray[np.intp]:
    """For each row of `expected` the row of `found` that belongs to it: the smallest sum of distances over all outputs.

    Values are measured in units of an output's root mean square; integers are equal or not.
    """
    from scipy.optimize import linear_sum_assignment

    count = len(next(iter(expected.values())))
    cost = np.zeros((count, count))
    for name, values in expected.items():
        one, other = (each.reshape(count, -1) for each in (values, found[name]))
        if one.dtype.kind in "fc":
            left, right = (np.nan_to_num(each.astype(np.float64)) for each in (one, other))
            scale = max(float(np.square(left).sum(axis=1).mean()), np.finfo(np.float32).tiny)
            squares = np.square(left).sum(1)[:, None] + np.square(right).sum(1) - 2 * left @ right.T
            cost += np.minimum(np.maximum(squares, 0) / scale, 1e6)
        else:
            cost += np.mean(one[:, None, :] != other[None, :, :], axis=2)
    order: NDArray[np.intp] = linear_sum_assignment(cost)[1]
    return order
