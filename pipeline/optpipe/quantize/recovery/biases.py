"""Bias correction: moves the biases of quantized layers so that their mean results are those in FP32.

Rounding shifts the mean of a channel, and the shifts of one layer add to those of the next (Nagel et al., 2019, section 4.2). The
means are those of the quantized network on calibration data, layer by layer in the graph's order, because a corrected layer
changes the shift of those behind it. Networks with more layers than `PASSES` correct several neighbors in one pass.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.quantize.recovery.layers import EditedGraph

PASSES = 24

Means = Mapping[str, NDArray[np.float64]]
"""The mean of each channel, by tensor."""


def correct_biases(
    model: Any,
    layers: Sequence[str],
    quantize: Callable[[Any], Any],
    measure_means: Callable[[Any, Mapping[str, int]], Means],
) -> tuple[Any, int]:
    """`model` with other biases, and how many; `layers` are those that `quantize` quantizes, in the graph's order.

    `measure_means` gives the means of tensors, with the axes of their channels, in a graph.
    """
    edited = EditedGraph(model)
    able = [name for name in layers if edited.find_bias(edited.nodes[name]) is not None]
    if not able:
        return model, 0
    axes = {edited.nodes[name].output[0]: _find_axis(edited.nodes[name]) for name in able}
    wanted = measure_means(model, axes)
    size = -(-len(able) // PASSES)
    for start in range(0, len(able), size):
        edited = EditedGraph(model)
        group = [edited.nodes[name] for name in able[start : start + size]]
        outputs = {node.output[0]: axes[node.output[0]] for node in group}
        means = measure_means(quantize(model), outputs)
        for node in group:
            _shift(edited, node, wanted[node.output[0]] - means[node.output[0]])
        model = edited.finish()
    return model, len(able)


def _find_axis(node: Any) -> int:
    return 1 if node.op_type in ("Conv", "ConvTranspose") else -1


def _shift(edited: EditedGraph, node: Any, by: NDArray[np.float64]) -> None:
    bias = edited.find_bias(node)
    assert bias is not None
    before = (
        0.0 if bias.values is None else np.broadcast_to(bias.values.astype(np.float64), by.shape)
    )
    edited.write(bias.node, bias.position, before + by)


class MeanCounter:
    """Adds up the values of tensors by channel."""

    def __init__(self, axes: Mapping[str, int]) -> None:
        self._axes = axes
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._counts = dict.fromkeys(axes, 0)

    def add(self, values: Mapping[str, NDArray[Any]]) -> None:
        for name, axis in self._axes.items():
            value = values[name].astype(np.float64)
            rows = np.moveaxis(value, axis, -1).reshape(-1, value.shape[axis])
            self._sums[name] = self._sums.get(name, np.zeros(rows.shape[1])) + rows.sum(axis=0)
            self._counts[name] += len(rows)

    def means(self) -> dict[str, NDArray[np.float64]]:
        return {name: total / max(self._counts[name], 1) for name, total in self._sums.items()}
