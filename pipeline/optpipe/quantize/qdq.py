"""Writes INT8 or FP8 into an ONNX graph as Q/DQ nodes: per-channel symmetric weights (FP8: per-tensor), per-tensor activations.

For TensorRT activations are symmetric INT8 with zero point 0. ONNX Runtime's CPU kernels are fastest, and can fuse a
ReLU, with unsigned activations: the same range becomes UINT8 with zero point 0 if nothing is negative, and 128 otherwise.
A scale is never 0, NaN or inf.
"""

from collections.abc import Mapping
from math import ceil, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.onnx_graph import OnnxGraph, list_read_names, name_nodes, rename_inner_twins
from optpipe.core.errors import BadInputError, StageError
from optpipe.core.plan import for_workspace
from optpipe.quantize.placement import Placement, Target
from optpipe.quantize.ranges import TensorRange

LEVELS = 127
OPSET = 19
"""The first opset whose Q/DQ nodes take FP16 scales."""


def round_up_to_fp16(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """`scale` rounded up to FP16, in FP32.

    If the graph becomes FP16, so do its scales: integers made with another scale would then be wrong.
    """
    smallest, largest = np.float32(2.0**-24), np.float32(np.finfo(np.float16).max)
    clipped = np.clip(scale, smallest, largest).astype(np.float32)
    half = clipped.astype(np.float16)
    below = half.astype(np.float32) < clipped
    above = np.nextafter(half, np.finfo(np.float16).max, dtype=np.float16)
    return np.where(below, above, half).astype(np.float32)


def quantize_activation(each: TensorRange, target: Target) -> tuple[np.float32, int, Any]:
    """Scale, zero point and dtype."""
    if target == "fp8":
        return choose_scale(each.amax), 0, get_e4m3()
    unsigned = target == "cpu" and each.low >= 0
    scale = round_up_to_fp16(np.array([each.amax / (255 if unsigned else LEVELS)], np.float32))[0]
    if target != "cpu":
        return scale, 0, np.int8
    return scale, 0 if unsigned else 128, np.uint8


def quantize_weights(values: NDArray[np.float32], axis: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """`values` as INT8 with one scale per index of `axis`, (channels,)."""
    others = tuple(each for each in range(values.ndim) if each != axis)
    scale = round_up_to_fp16(np.abs(values).max(axis=others) / np.float32(LEVELS))
    shape = [-1 if each == axis else 1 for each in range(values.ndim)]
    steps = np.rint(values / scale.reshape(shape))
    return np.clip(steps, -LEVELS, LEVELS).astype(np.int8), scale


def qdq_from_onnx(model: Any, placed: Placement, ranges: Mapping[str, TensorRange]) -> Any:
    """A copy of `model` (FP32) with the Q/DQ pairs of `placed`; everything else stays in FP32.

    Raises BadInputError for a missing range: the calibration table belongs to another graph or target.
    """
    if missing := [name for name in placed.tensors if name not in ranges]:
        raise BadInputError(
            f"the calibration table does not match this graph: no range for '{missing[0]}'"
            f" and {len(missing) - 1} more; create a matching table with `{for_workspace('optpipe calibrate MODEL')}`"
        )
    writer = _Writer(_convert_opset(model, OPSET), placed.target)
    for name in placed.tensors:
        writer.activation(name, ranges[name])
    writer.connect(placed)
    for name in placed.layers:
        writer.weights(name, bias=placed.target == "cpu")
    return writer.finished()


def _convert_opset(model: Any, least: int) -> Any:
    """A copy at opset `least` or later, with a name for every node."""
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    version = next((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), 0)
    if version < least:
        try:
            copy = onnx.version_converter.convert_version(copy, least)
            rename_inner_twins(copy)
        except (RuntimeError, ValueError, onnx.version_converter.ConvertError) as error:
            raise StageError(
                f"cannot convert the graph from opset {version} to {least}, required for FP16 Q/DQ: {error}"
            ) from error
    return name_nodes(copy)


class _Writer:
    def __init__(self, model: Any, target: Target) -> None:
        self._model = model
        self._graph = OnnxGraph(model)
        self._target = target
        self._nodes = {node.name: node for node in model.graph.node}
        self._scales: dict[str, np.float32] = {}
        self._new: list[Any] = []
        self._initializers: dict[str, Any] = {}

    def activation(self, name: str, each: TensorRange) -> None:
        import onnx

        self._scales[name], zero_point, dtype = quantize_activation(each, self._target)
        scale = self._constant(f"{name}_scale", np.array(self._scales[name], np.float32))
        zero = self._constant(f"{name}_zero_point", np.array(zero_point, dtype))
        make = onnx.helper.make_node
        self._new += [
            make("QuantizeLinear", [name, scale, zero], [f"{name}_q"], name=f"{name}_QuantizeLinear"),
            make("DequantizeLinear", [f"{name}_q", scale, zero], [f"{name}_dq"], name=f"{name}_DequantizeLinear"),
        ]

    def connect(self, placed: Placement) -> None:
        for layer, position in placed.edges:
            node = self._nodes[layer]
            node.input[position] = f"{node.input[position].removesuffix('_dq')}_dq"
        for name in placed.after:
            for node in self._graph.consumers.get(name, []):
                for position, read in enumerate(node.input):
                    if read == name:
                        node.input[position] = f"{name}_dq"

    def weights(self, layer: str, *, bias: bool) -> None:
        """Turns a layer's weights into INT8 or FP8 with a DequantizeLinear, and optionally its bias into INT32.

        On a CPU, each layer that shares weights reads a copy: ONNX Runtime without VNNI converts them for each (see `EXACT_SUMS`).
        """
        node = self._nodes[layer]
        transposed = node.op_type == "Gemm" and any(each.name == "transB" and each.i for each in node.attribute)
        name, axis = node.input[1], 0 if node.op_type == "Conv" or transposed else 1  # axis of the output channels
        stem = f"{layer}_{name}" if self._target == "cpu" and f"{name}_q{axis}" in self._initializers else name
        if f"{stem}_q{axis}" not in self._initializers:
            import onnx

            values = onnx.numpy_helper.to_array(self._graph.weights[name])
            if self._target == "fp8":
                scale: Any = choose_scale(float(np.abs(values).max()))
                steps: Any = round_to_e4m3(values, scale)
            else:
                steps, scale = quantize_weights(values, axis)
            self._dequantize(stem, axis, steps, scale, np.zeros(scale.shape, steps.dtype))
        node.input[1] = f"{stem}_dq{axis}"
        if bias and len(node.input) > 2 and node.input[2] in self._graph.weights:
            self._bias(node, stem, axis)

    def _bias(self, node: Any, weight: str, axis: int) -> None:
        import onnx

        values = onnx.numpy_helper.to_array(self._graph.weights[node.input[2]])
        source = node.input[0].removesuffix("_dq")
        per_channel = onnx.numpy_helper.to_array(self._initializers[f"{weight}_scale{axis}"])
        scale = (per_channel * self._scales[source]).astype(np.float32)
        steps = np.rint(values.astype(np.float64) / scale)
        if values.ndim != 1 or np.abs(steps).max(initial=0) >= 2**31:
            return
        name = f"{node.name}_bias"
        self._dequantize(name, 0, steps.astype(np.int32), scale, np.zeros(scale.shape, np.int32))
        node.input[2] = f"{name}_dq0"

    def _dequantize(
        self, name: str, axis: int, steps: NDArray[Any], scale: NDArray[np.float32], zero: NDArray[Any]
    ) -> None:
        import onnx

        inputs = [
            self._constant(f"{name}_q{axis}", steps),
            self._constant(f"{name}_scale{axis}", scale),
            self._constant(f"{name}_zero_point{axis}", zero),
        ]
        self._new.append(
            onnx.helper.make_node(
                "DequantizeLinear", inputs, [f"{name}_dq{axis}"], name=f"{name}_DequantizeLinear{axis}", axis=axis
            )
        )

    def _constant(self, name: str, values: NDArray[Any]) -> str:
        import onnx

        self._initializers[name] = onnx.numpy_helper.from_array(
            np.ascontiguousarray(values).reshape(values.shape), name
        )
        return name

    def finished(self) -> Any:
        graph = self._model.graph
        graph.initializer.extend(self._initializers.values())
        nodes = _sort_nodes(
            [*graph.node, *self._new], {each.name for each in (*graph.input, *graph.initializer)} | {""}
        )
        del graph.node[:]
        graph.node.extend(nodes)
        used = {each.name for each in graph.output}.union(*map(list_read_names, nodes))
        kept = [each for each in graph.initializer if each.name in used]
        del graph.initializer[:]
        graph.initializer.extend(kept)
        return self._model


def _sort_nodes(nodes: list[Any], known: set[str]) -> list[Any]:
    """`nodes` sorted so that each comes after its inputs; otherwise in the given order, constants' nodes first."""
    inner = {output for node in nodes for output in node.output}
    waiting: dict[str, list[int]] = {}
    missing = []
    for index, node in enumerate(nodes):
        needs = {name for name in list_read_names(node) if name in inner and name not in known}
        missing.append(len(needs))
        for name in needs:
            waiting.setdefault(name, []).append(index)
    ready = [index for index, count in enumerate(missing) if count == 0]
    order = []
    while ready:
        index = ready.pop()
        order.append(nodes[index])
        for output in nodes[index].output:
            for reader in waiting.get(output, []):
                missing[reader] -= 1
                if missing[reader] == 0:
                    ready.append(reader)
    return order


# FP8 numbers with 4 bits of exponent and 3 of mantissa: from 2**-9 to 448, no infinity.
#
# Scales are powers of two: multiplying by them is exact, so NumPy, ONNX Runtime and torch round the same values; and the relative
# error of a floating-point number does not depend on its scale. Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.


LARGEST = 448.0
_EXPONENTS = (-24, 24)


def get_e4m3() -> Any:
    import ml_dtypes

    return np.dtype(ml_dtypes.float8_e4m3fn)


def choose_scale(amax: float) -> np.float32:
    """The smallest power of two that brings `amax` to at most LARGEST; never 0."""
    low, high = _EXPONENTS
    exponent = low if amax <= 0 else min(max(ceil(log2(amax / LARGEST)), low), high)
    return np.float32(2.0**exponent)


def round_to_e4m3(values: NDArray[np.float32], scale: np.float32) -> NDArray[Any]:
    """`values / scale`, clamped to the range of E4M3 and rounded half to even."""
    rounded: NDArray[Any] = np.clip(values / scale, -LARGEST, LARGEST).astype(get_e4m3())
    return rounded
