"""Rows that TopK, a sort, or NonMaxSuppression selects: two runs may give them in another order, and are compared as sets.

Scores that are equal, or nearly, swap places from one runtime to another. What is selected is then the same, and a comparison
row by row would call every swapped row wrong. Every comparison of outputs goes through `align_rows` before it measures an
error: the export's, a build's verification, an evaluation, a bench's check, a proof on a server, and a recheck.

A set has the same rows as often as the other: each row of one belongs to one row of the other. Where a sorted TopK gives
the scores as an output, their order is part of the result: rows whose scores are out of order are compared as they stand.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

MOST_ROWS = 2048
"""Larger selections are compared in order: an assignment takes time with the cube of their number."""
OUT_OF_ORDER = 2**-10
"""Sorted scores may rise by this share of the largest: the rounding of FP16, which an operator behind the selection may add."""
Arrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Selection:
    """The outputs of a graph that depend on selected rows."""

    outputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By name, the nodes that select an output's rows, as places in the graph; none if it has no rows, such as their mean."""
    counts: tuple[int, ...] = ()
    """The numbers of rows that the selections take, in ascending order."""
    ranked: tuple[str, ...] = ()
    """Outputs with the scores of a sorted TopK, in its order."""

    def find_axis(self, values: NDArray[np.generic]) -> int | None:
        """The axis of the rows in an output of (samples, …): the first whose size a selection takes; None without one."""
        axes = (at for at in range(1, values.ndim) if values.shape[at] in self.counts)
        return next(axes, None)

    def leave_out(self, names: Collection[str]) -> "Selection":
        """The selection of the other outputs."""
        kept = {name: nodes for name, nodes in self.outputs.items() if name not in names}
        return replace(
            self, outputs=kept, ranked=tuple(name for name in self.ranked if name in kept)
        )


EMPTY = Selection()


def align_rows(
    expected: Arrays, actual: Arrays, selection: Selection, tolerated: float
) -> dict[str, NDArray[np.generic]]:
    """`actual` with the selected rows of each sample in the order in which they are nearest to those of `expected`.

    Outputs are (samples, …). Those with one number of rows that share a node which selects are ordered together: a box moves
    with its score and its class. Outputs that agree within `tolerated`, ‖actual − expected‖ / ‖expected‖ of the whole, stay as
    they are, and so do those of other shapes, and samples whose scores are out of order in `actual` alone. Without a
    selection, nothing is reordered.

        >>> one = {"v": np.array([[3.0, 2.0]]), "i": np.array([[7, 4]])}
        >>> other = {"v": np.array([[2.0, 3.0]]), "i": np.array([[4, 7]])}
        >>> align_rows(one, other, Selection({"i": (0,), "v": (0,)}, (2,)), 1e-5)["i"]
        array([[7, 4]])
        >>> align_rows(one, other, Selection({"i": (0,), "v": (0,)}, (2,), ranked=("v",)), 1e-5)["i"]
        array([[4, 7]])
    """
    aligned = {name: np.asarray(value) for name, value in actual.items()}
    moved: dict[str, NDArray[np.generic]] = {}
    for sample, axes in iterate_samples(expected, aligned, selection, tolerated):
        order = _match_rows(
            *(
                {name: _put_rows_first(side[name], axis)[sample] for name, axis in axes.items()}
                for side in (expected, aligned)
            )
        )
        for name, axis in axes.items():
            value = moved.setdefault(name, aligned[name].copy())
            value[sample] = np.take(aligned[name][sample], order, axis - 1)
    return aligned | moved


def iterate_samples(
    expected: Arrays, actual: Arrays, selection: Selection, tolerated: float
) -> Iterator[tuple[int, dict[str, int]]]:
    """Each sample with outputs whose rows are one set, and the axis of the rows in each of them.

    Without outputs that agree within `tolerated` over all samples, and samples whose scores are out of order in `actual`.
    """
    for axes in _group_outputs(expected, actual, selection):
        if all(_agree(expected[name], actual[name], tolerated) for name in axes):
            continue
        ranked = [name for name in selection.ranked if name in axes]
        for sample in range(min(min(len(expected[name]), len(actual[name])) for name in axes)):
            if not any(
                _loses_order(expected[name][sample], actual[name][sample]) for name in ranked
            ):
                yield sample, axes


def _put_rows_first(values: NDArray[np.generic], axis: int) -> NDArray[np.generic]:
    """(samples, rows, …) of an output with its rows in `axis`."""
    return np.moveaxis(np.asarray(values), axis, 1)


def _group_outputs(
    expected: Arrays, actual: Arrays, selection: Selection
) -> Iterator[dict[str, int]]:
    """The outputs whose rows move together, each with the axis of its rows."""
    groups: list[tuple[int, set[int], dict[str, int]]] = []
    for name in sorted(selection.outputs.keys() & expected.keys() & actual.keys()):
        values, others = np.asarray(expected[name]), actual[name]
        axis = selection.find_axis(values)
        same = values.ndim == others.ndim and values.shape[1:] == others.shape[1:]
        nodes = set(selection.outputs[name])
        if not nodes or axis is None or not same or values.shape[axis] > MOST_ROWS:
            continue
        count, axes = values.shape[axis], {name: axis}
        for group in [known for known in groups if known[0] == count and known[1] & nodes]:
            groups.remove(group)
            nodes |= group[1]
            axes |= group[2]
        groups.append((count, nodes, axes))
    yield from (axes for _, _, axes in groups)


def _loses_order(expected: NDArray[np.generic], actual: NDArray[np.generic]) -> bool:
    """Whether scores of one sample, one value a row, fall from row to row in `expected`, and not in `actual`; or rise."""
    if expected.size != max(expected.shape) or expected.dtype.kind != "f":
        return False
    first, second = (side.astype(np.float64).ravel() for side in (expected, actual))
    if not np.isfinite(first).all():
        return False
    for sign in (1.0, -1.0):
        if _falls(sign * first):
            return not _falls(sign * second)
    return False


def _falls(scores: NDArray[np.float64]) -> bool:
    """False also with NaN in it."""
    finite = scores[np.isfinite(scores)]
    allowed = OUT_OF_ORDER * float(np.abs(finite).max(initial=0.0))
    with np.errstate(invalid="ignore"):
        return bool((np.diff(scores) <= allowed).all())


def _agree(expected: NDArray[np.generic], actual: NDArray[np.generic], tolerated: float) -> bool:
    count = min(len(expected), len(actual))
    if expected.dtype.kind not in "fc":
        return bool((expected[:count] == actual[:count]).all())
    first, second = (side[:count].astype(np.float64) for side in (expected, actual))
    return bool(np.linalg.norm(second - first) <= tolerated * np.linalg.norm(first))


def _match_rows(expected: Arrays, actual: Arrays) -> NDArray[np.intp]:
    """For each row of `expected` the row of `actual` that belongs to it: the smallest sum of distances over all outputs.

    Values are measured in units of an output's root mean square; integers are equal or not.
    """
    from scipy.optimize import linear_sum_assignment

    count = len(next(iter(expected.values())))
    cost = np.zeros((count, count))
    for name, values in expected.items():
        expected_rows, actual_rows = (
            output.reshape(count, -1) for output in (values, actual[name])
        )
        if expected_rows.dtype.kind in "fc":
            left, right = (
                np.nan_to_num(rows.astype(np.float64)) for rows in (expected_rows, actual_rows)
            )
            scale = max(float(np.square(left).sum(axis=1).mean()), np.finfo(np.float32).tiny)
            squares = np.square(left).sum(1)[:, None] + np.square(right).sum(1) - 2 * left @ right.T
            cost += np.minimum(np.maximum(squares, 0) / scale, 1e6)
        else:
            cost += np.mean(expected_rows[:, None, :] != actual_rows[None, :, :], axis=2)
    order: NDArray[np.intp] = linear_sum_assignment(cost)[1]
    return order
