"""Rounds the weights of a layer together, up or down, so that the layer's results change least: learned rounding.

Rounding each weight to the nearest step gives the smallest error of the weights, not of the products. As AdaRound does (Nagel et
al., "Up or Down? Adaptive Rounding for Post-Training Quantization", 2020) each weight goes to one of its two neighbors, such that
the expected squared error of the layer on calibration data is smallest. AdaRound relaxes that problem and trains it; here it is
solved as it stands, by descent over one weight at a time: with the second moments of the layer's inputs, an exact change costs one
product, so that the error never rises, nothing is drawn, and no rate is to be chosen.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

SWEEPS = 4


def round_together(
    values: NDArray[np.float64],
    steps: NDArray[np.int32],
    scale: NDArray[np.float64],
    moments: NDArray[np.float64],
    levels: int,
) -> NDArray[np.int32]:
    """Integers that bring the products nearest to those of `values`, (outputs, inputs).

    `steps` are the nearest integers, `scale` is of each output, `moments` is E[x xᵀ], (inputs, inputs). Weights at the end of the
    grid stay, so that the scale stays the same. The objective, tr((Q s - W) M (Q s - W)ᵀ), never rises.
    """
    exact = values / scale[:, None]
    rounded = steps.astype(np.int64)
    error = (rounded - exact) * scale[:, None]
    slope = error @ moments
    diagonal = np.diag(moments)
    below = np.floor(exact).astype(np.int64)
    on_grid = below == exact
    for _ in range(SWEEPS):
        changed = 0
        for column in range(values.shape[1]):
            other = np.where(
                rounded[:, column] > below[:, column], below[:, column], below[:, column] + 1
            )
            change = (other - rounded[:, column]) * scale
            gain = 2 * slope[:, column] * change + diagonal[column] * change**2
            free = (
                (np.abs(rounded[:, column]) < levels)
                & (np.abs(other) < levels)
                & ~on_grid[:, column]
            )
            rows = np.flatnonzero(free & (gain < -1e-12 * np.abs(diagonal[column] * change**2)))
            if not rows.size:
                continue
            rounded[rows, column] = other[rows]
            slope[rows] += change[rows, None] * moments[column]
            changed += rows.size
        if not changed:
            break
    return rounded.astype(np.int32)


def collect_moments(
    data: NDArray[Any], node: Any, attributes: dict[str, Any], weight: NDArray[Any]
) -> NDArray[np.float64] | None:
    """The sum of x xᵀ over the rows that a layer multiplies, (groups, inputs, inputs); None for a layer of another kind."""
    if node.op_type in ("Gemm", "MatMul"):
        rows = data.reshape(-1, data.shape[-1]).astype(np.float32)
        return (rows.T @ rows)[None].astype(np.float64)
    if node.op_type != "Conv" or weight.ndim not in (3, 4):
        return None
    patches = _unfold(data, attributes, weight)
    if patches is None:
        return None
    groups = int(attributes.get("group", 1))
    size = patches.shape[1] // groups
    grouped = patches.transpose(1, 0, 2).reshape(groups, size, -1)
    return (grouped @ grouped.transpose(0, 2, 1)).astype(np.float64)


def _unfold(
    data: NDArray[Any], attributes: dict[str, Any], weight: NDArray[Any]
) -> NDArray[np.float32] | None:
    """The patches of a convolution, (samples, channels × kernel, places)."""
    from optpipe.core import torch

    if attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", "NOTSET", b"VALID", "VALID"):
        return None
    kernel = list(weight.shape[2:])
    axes = len(kernel)
    stride = list(attributes.get("strides", [1] * axes))
    dilation = list(attributes.get("dilations", [1] * axes))
    pads = list(attributes.get("pads", [0] * 2 * axes))
    tensor = torch.from_numpy(np.ascontiguousarray(data, np.float32))
    if axes == 1:
        tensor, kernel, stride, dilation = (
            tensor[:, :, None],
            [1, *kernel],
            [1, *stride],
            [1, *dilation],
        )
        pads = [0, pads[0], 0, pads[1]]
    tensor = torch.nn.functional.pad(tensor, (pads[1], pads[3], pads[0], pads[2]))
    patches: NDArray[np.float32] = torch.nn.functional.unfold(
        tensor, kernel, dilation=dilation, stride=stride
    ).numpy()
    return patches
