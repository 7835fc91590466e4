"""Moves channel scales between layers, so that one range fits all channels of a tensor: equalization and SmoothQuant.

Before a tensor, its channels are divided by factors; its readers multiply them back in their weights. Both happen in constants,
so that the graph computes the same in FP32 and no node is added. What divides is a layer (Nagel et al., "Data-Free Quantization
Through Weight Equalization and Bias Correction", 2019) or a normalization (Xiao et al., "SmoothQuant", 2023). Between them may be
operators that scale with their data, such as Relu, but no GELU, hard-swish, or clip at a constant.

Weights have a scale for each output channel here, so that dividing a layer's outputs costs nothing. The factors balance the
largest value of an activation's channel with the largest weight that reads it; a depthwise reader pays nothing either, so that
its channels become equally large.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.onnx_graph import WEIGHTED_OPS
from optpipe.backends.onnx_products import read_attributes
from optpipe.quantize.recovery.layers import EditedGraph, find_channel_axis, find_output_axis

SCALES_WITH_DATA = ("Relu", "LeakyRelu", "Identity", "MaxPool", "AveragePool", "GlobalAveragePool")
BALANCE = 0.5
LARGEST_FACTOR = 1e4
Divider = Literal["layer", "normalization"]


class Site(NamedTuple):
    """A tensor whose channels can be scaled."""

    tensor: str
    axis: int
    """Of its channels."""
    divider: str
    """The node whose constants divide."""
    readers: tuple[str, ...]
    """All layers that read the tensor."""


def find_sites(edited: EditedGraph, kind: Divider, layers: Collection[str]) -> list[Site]:
    """The tensors that a divider of this kind makes and that at least one of the quantized `layers` reads, in the graph's order."""
    sites = []
    for node in edited.model.graph.node:
        for tensor in node.output:
            readers = edited.graph.consumers.get(tensor, [])
            fits = readers and all(
                reader.op_type in WEIGHTED_OPS
                and reader.op_type != "ConvTranspose"
                and reader.input[0] == tensor
                and tensor not in reader.input[1:]
                and edited.read_weight(reader) is not None
                and (reader.op_type != "Gemm" or not read_attributes(reader).get("transA", 0))
                for reader in readers
            )
            axes = {find_channel_axis(reader) for reader in readers}
            if not fits or len(axes) != 1 or tensor in edited.graph.outputs:
                continue
            if layers and not {reader.name for reader in readers} & {*layers}:
                continue
            divider = _find_divider(edited, tensor, next(iter(axes)), kind)
            if divider is not None:
                names = tuple(reader.name for reader in readers)
                sites.append(Site(tensor, next(iter(axes)), divider.name, names))
    return sites


def _find_divider(edited: EditedGraph, tensor: str, axis: int, kind: Divider) -> Any | None:
    graph = edited.graph
    node = graph.producers.get(tensor)
    while node is not None and node.op_type in SCALES_WITH_DATA:
        source = node.input[0]
        pools = node.op_type.endswith("Pool") and axis != 1
        if (
            pools
            or len(graph.consumers.get(source, [])) != 1
            or source in graph.outputs
            or len(node.output) > 1
        ):
            return None
        node = graph.producers.get(source)
    if node is None:
        return None
    if kind == "normalization":
        return node if _is_normalization(edited, node, axis) else None
    if (node.op_type == "Conv" and axis == 1) or (node.op_type == "Gemm" and axis == -1):
        weight, bias = edited.read_weight(node), edited.find_bias(node)
        return node if weight is not None and bias is not None else None
    if node.op_type == "Add" and axis == -1:
        for name in node.input:
            made = graph.producers.get(name)
            if made is not None and made.op_type == "MatMul" and len(graph.consumers[name]) == 1:
                bias, weight = edited.find_bias(made), edited.read_weight(made)
                if bias is None or weight is None or bias.node.name != node.name:
                    return None
                return made if weight.ndim == 2 else None
    return None


def _is_normalization(edited: EditedGraph, node: Any, axis: int) -> bool:
    """Whether a node ends in a product with, and a sum of, constants for each channel."""
    if node.op_type == "LayerNormalization" and axis == -1:
        on_last = (
            read_attributes(node).get("axis", -1) == -1 or edited.read(node.input[1]) is not None
        )
        return (
            on_last
            and len(node.output) == 1
            and all(
                (held := edited.read(name)) is not None and held.ndim == 1
                for name in node.input[1:]
                if name
            )
        )
    if node.op_type == "BatchNormalization" and axis == 1:
        return all(edited.read(name) is not None for name in node.input[1:3])
    return False


def divide_channels(
    model: Any, kind: Divider, layers: Collection[str], peaks: Mapping[str, NDArray[Any]]
) -> tuple[Any, int]:
    """`model` with balanced channels, and of how many tensors. `peaks` has the largest magnitude of each channel by tensor."""
    edited, count = EditedGraph(model), 0
    for site in find_sites(edited, kind, layers):
        # channels of earlier tensors are scaled in the weights alone: peaks of this one are as before
        peak = peaks.get(site.tensor)
        if peak is None:
            continue
        factors = _choose_factors(edited, site, peak)
        if factors is None or np.allclose(factors, 1.0, rtol=1e-3):
            continue
        _divide(edited, edited.nodes[site.divider], factors)
        for name in site.readers:
            _multiply(edited, edited.nodes[name], factors)
        count += 1
    return edited.finish(), count


def list_scaled_tensors(model: Any, kind: Divider, layers: Collection[str]) -> dict[str, int]:
    """The tensors whose channels' peaks `divide_channels` needs, with the axis of their channels."""
    return {site.tensor: site.axis for site in find_sites(EditedGraph(model), kind, layers)}


def _choose_factors(
    edited: EditedGraph, site: Site, peak: NDArray[Any]
) -> NDArray[np.float64] | None:
    readers = [edited.nodes[name] for name in site.readers]
    weights = []
    for node in readers:
        peaks = _find_input_peaks(edited, node, peak.size)
        if peaks is None:
            return None
        weights.append(peaks)
    weight = np.max(weights, axis=0)
    used = (peak > 0) & (weight > 0)
    if not used.any():
        return None
    free = all(_is_depthwise(edited, node) for node in readers)
    balance = 1.0 if free else BALANCE
    factors = np.ones(peak.size)
    factors[used] = peak[used] ** balance / weight[used] ** (1 - balance)
    factors[used] /= np.exp(np.log(factors[used]).mean())
    return np.clip(factors, 1 / LARGEST_FACTOR, LARGEST_FACTOR)


def _is_depthwise(edited: EditedGraph, node: Any) -> bool:
    weight = edited.read_weight(node)
    return (
        node.op_type == "Conv"
        and weight is not None
        and weight.shape[1] == 1
        and _count_groups(node) > 1
    )


def _count_groups(node: Any) -> int:
    return int(read_attributes(node).get("group", 1)) if node.op_type == "Conv" else 1


def _find_input_peaks(edited: EditedGraph, node: Any, channels: int) -> NDArray[np.float64] | None:
    """The largest weight that reads each input channel; None if there are other channels."""
    weight = edited.read_weight(node)
    assert weight is not None
    if node.op_type == "Conv":
        groups = _count_groups(node)
        grouped = np.abs(weight).reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
        peaks = grouped.max(axis=(1, 3)).reshape(-1)
    else:
        peaks = np.abs(weight).max(axis=find_output_axis(node))
    return peaks.astype(np.float64) if peaks.size == channels else None


def _divide(edited: EditedGraph, node: Any, factors: NDArray[np.float64]) -> None:
    if node.op_type in ("LayerNormalization", "BatchNormalization"):
        for position in (1, 2):
            if len(node.input) > position and node.input[position]:
                values = edited.read(node.input[position])
                assert values is not None
                edited.write(node, position, values.astype(np.float64) / factors)
        return
    weight, bias = edited.read_weight(node), edited.find_bias(node)
    assert weight is not None
    axis = find_output_axis(node)
    shape = [-1 if dim == axis else 1 for dim in range(weight.ndim)]
    edited.write(node, 1, weight.astype(np.float64) / factors.reshape(shape))
    if bias is not None and bias.values is not None:
        edited.write(bias.node, bias.position, bias.values.astype(np.float64) / factors)


def _multiply(edited: EditedGraph, node: Any, factors: NDArray[np.float64]) -> None:
    weight = edited.read_weight(node)
    assert weight is not None
    if node.op_type == "Conv":
        groups = _count_groups(node)
        by_group = factors.reshape(groups, 1, weight.shape[1], *[1] * (weight.ndim - 2))
        made = (
            weight.astype(np.float64).reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
            * by_group
        )
        edited.write(node, 1, made.reshape(weight.shape))
        return
    shape = [1, -1] if find_output_axis(node) == 0 else [-1, 1]
    edited.write(node, 1, weight.astype(np.float64) * factors.reshape(shape))
