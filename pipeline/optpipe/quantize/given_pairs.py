"""Brings the Q/DQ pairs of a user's graph into a form that a runtime has INT8 kernels for, without changing a range.

A checkpoint of quantization-aware training was trained on the grid of its own scales, so these are what must stay. Model
Optimizer writes pairs for TensorRT: symmetric, at the inputs of layers, behind the activation. ONNX Runtime's CPU provider has
INT8 kernels for a layer whose own output is quantized, and fuses nothing else into it. Each rewrite here is a function from
graph to graph, and `compare_ranges` counts what stayed as it was, bit by bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.graph_names import NameGiver
from optpipe.backends.onnx_graph import WEIGHTED_OPS, OnnxGraph, replace_nodes
from optpipe.backends.onnx_pairs import (
    DEQUANTIZE,
    QUANTIZE,
    STANDARD,
    find_constants,
    is_pair_node,
    read_constant,
)
from optpipe.backends.onnx_products import read_attributes
from optpipe.backends.rewrites import QUANTIZED_RELATIVE, Feeds, RewriteGuard
from optpipe.core import onnx
from optpipe.core.errors import BadInputError, StageError, escape

SIGNED_TO_UNSIGNED = 128


class Rewrite(NamedTuple):
    change: Callable[[Any], Any]
    """May change its argument."""
    said: str
    """What it did, with `{count}` for how many nodes it took away, added, or changed."""
    limit: float
    """The largest relative difference of the outputs: 0 for one that only moves exact operations."""


@dataclass(frozen=True, slots=True)
class KeptRanges:
    """What is in a graph bit by bit as in the user's file."""

    activations: int
    weights: int
    rescaled: int = 0
    """Weights whose integers are those of the file, and whose scales took up a batch normalization."""

    def __str__(self) -> str:
        text = f"{self.activations} ranges of activations and {self.weights} quantized weights are the file's, bit for bit"
        if self.rescaled:
            text += f"; {self.rescaled} more keep their integers, with a batch normalization in their scales"
        return text


def require_int8_granularity(model: Any, name: str) -> None:
    """Raises BadInputError for activations with a scale for each channel or block, which no INT8 kernel takes."""
    constants = find_constants(model)
    for node in model.graph.node:
        if node.op_type != QUANTIZE or node.domain not in STANDARD or node.input[0] in constants:
            continue
        scale = read_constant(node.input[1], constants)
        if scale is None or scale.size == 1:
            continue
        block = read_attributes(node).get("block_size")
        what = f"blocks of {block}" if block else f"{scale.size} channels"
        raise BadInputError(
            f"{name}: QuantizeLinear '{escape(node.name)[:80]}' has a scale for each of {what} of an activation,"
            " and INT8 kernels take one for a tensor",
            remedy="quantize its activations per tensor, or build it in fp32, which computes the same in floating point",
        )


def place_given_pairs(
    model: Any, feeds: Sequence[Feeds], name: str, *, cpu: bool
) -> tuple[Any, KeptRanges, tuple[str, ...]]:
    """The graph to build in INT8 from a user's Q/DQ graph, what stayed as it was, and what did not, in words.

    Raises BadInputError for a granularity without kernels, and StageError if a range or an output changed, which is a fault of
    optpipe.
    """
    require_int8_granularity(model, name)
    guard, graph, said = RewriteGuard(feeds), model, list[str]()
    for rewrite in (*BOTH, *(FOR_CPU if cpu else ())):
        counted = _Counter(rewrite.change)
        rewritten, difference = guard.apply(graph, counted, rewrite.limit or 1e-7)
        if difference is not None:
            said.append(
                f"not done, since it changes outputs ({difference}): "
                + rewrite.said.format(count=counted.count)
            )
        elif counted.count:
            said.append(rewrite.said.format(count=counted.count))
        graph = rewritten
    return graph, compare_ranges(model, graph, name), tuple(said)


class _Counter:
    """Calls a rewrite that returns its graph and how many places it changed."""

    def __init__(self, change: Callable[[Any], tuple[Any, int]]) -> None:
        self._change, self.count = change, 0

    def __call__(self, model: Any) -> Any:
        made, self.count = self._change(model)
        return made


def compare_ranges(before: Any, after: Any, name: str) -> KeptRanges:
    """Raises StageError if a pair of `after` has another range than the pair of the same name in `before`."""
    given, made = _read_ranges(before), _read_ranges(after)
    activations = weights = rescaled = 0
    for node, new in made.items():
        if (old := given.get(node)) is None:
            continue
        same_grid = new.scale.tobytes() == old.scale.tobytes() and new.offset == old.offset
        if new.integers is None or old.integers is None:
            if not same_grid:
                raise StageError(
                    f"the range of '{escape(node)[:80]}' in {name} is not the file's any more\nreport the model: this is a fault of optpipe"
                )
            activations += 1
        elif same_grid and np.array_equal(new.integers, old.integers):
            weights += 1
        elif np.array_equal(
            np.abs(new.integers.astype(np.int32)), np.abs(old.integers.astype(np.int32))
        ):
            rescaled += 1
        else:
            raise StageError(
                f"the weights of '{escape(node)[:80]}' in {name} are not the file's any more\nreport the model: this is a fault of optpipe"
            )
    return KeptRanges(activations, weights, rescaled)


class _Range(NamedTuple):
    scale: NDArray[Any]
    offset: int
    """The zero point less the smallest integer: the same for INT8 and UINT8 on one grid."""
    integers: NDArray[Any] | None
    """Of a weight."""


def _read_ranges(model: Any) -> dict[str, _Range]:
    constants, ranges = find_constants(model), {}
    for node in filter(is_pair_node, model.graph.node):
        scale = read_constant(node.input[1], constants)
        if scale is None:
            continue
        zero = read_constant(node.input[2], constants) if len(node.input) > 2 else None
        integers = read_constant(node.input[0], constants)
        if node.op_type == QUANTIZE or integers is None:
            if node.op_type == QUANTIZE:
                ranges[node.name] = _Range(scale, _read_offset(zero), None)
        else:
            ranges[node.name] = _Range(scale, _read_offset(zero), integers)
    return ranges


def _read_offset(zero: NDArray[Any] | None) -> int:
    if zero is None or zero.dtype.kind not in "iu" or not zero.size:
        return 0
    return int(zero.reshape(-1)[0]) - int(np.iinfo(zero.dtype).min)


def merge_repeated_pairs(model: Any) -> tuple[Any, int]:
    """Takes away a pair behind a pair on the same grid: rounding twice gives what rounding once does."""
    graph, constants = OnnxGraph(model), find_constants(model)
    read: dict[str, str] = {}
    """The integers that stand in for those of a QuantizeLinear that is taken away."""
    kept, count = [], 0
    for node in model.graph.node:
        before = graph.producers.get(node.input[0]) if node.op_type == QUANTIZE else None
        repeats = False
        if (
            before is not None
            and before.op_type == DEQUANTIZE
            and node.output[0] not in graph.outputs
        ):
            first, second = (_read_grid(pair, constants) for pair in (before, node))
            repeats = first is not None and second is not None and first.is_same(second)
        if repeats and before is not None:
            read[node.output[0]] = read.get(before.input[0], before.input[0])
            count += 1
        else:
            kept.append(node)
    for node in kept:
        node.input[:] = [read.get(name, name) for name in node.input]
    if count:
        replace_nodes(model.graph, kept)
    return model, count


class _Grid(NamedTuple):
    scale: NDArray[Any]
    zero: NDArray[Any]

    def is_same(self, other: "_Grid") -> bool:
        ours, theirs = (
            ((array.dtype, array.tobytes()) for array in self),
            ((array.dtype, array.tobytes()) for array in other),
        )
        return [*ours] == [*theirs]


def _read_grid(node: Any, constants: Any) -> _Grid | None:
    """Scale and zero point of a pair's node with one scale for a tensor, both without axes; None for another."""
    scale = read_constant(node.input[1], constants)
    zero = read_constant(node.input[2], constants) if len(node.input) > 2 else np.uint8(0)
    if scale is None or zero is None or scale.size != 1:
        return None
    return _Grid(scale.reshape(()), np.asarray(zero).reshape(()))


def shift_to_unsigned(model: Any) -> tuple[Any, int]:
    """Turns INT8 activations into UINT8 with a zero point 128 higher: the same grid, which ONNX Runtime's CPU kernels take."""
    graph, constants, names = OnnxGraph(model), find_constants(model), NameGiver(model)
    count, shifted = 0, []
    for node in model.graph.node:
        if node.op_type != QUANTIZE or len(node.input) < 3 or node.input[0] in constants:
            continue
        zero, readers = (
            read_constant(node.input[2], constants),
            graph.consumers.get(node.output[0], []),
        )
        plain = readers and all(reader.op_type == DEQUANTIZE for reader in readers)
        if zero is None or zero.dtype != np.int8 or not plain or node.output[0] in graph.outputs:
            continue
        made = (zero.astype(np.int32) + SIGNED_TO_UNSIGNED).astype(np.uint8)
        shifted.append(onnx.numpy_helper.from_array(made, names.give(f"{node.input[2]}_unsigned")))
        for changed in (node, *readers):
            changed.input[2:] = [shifted[-1].name]
        count += 1
    if count:
        replace_nodes(model.graph, list(model.graph.node), shifted)
        del model.graph.value_info[:]  # they state INT8
    return model, count


def fold_batch_normalization(model: Any) -> tuple[Any, int]:
    """Moves a batch normalization behind a convolution with quantized weights into their scales and the bias.

    The integers stay, with their sign changed where a factor is below zero.
    """
    graph, constants, names = OnnxGraph(model), find_constants(model), NameGiver(model)
    folded, new = set[str](), list[Any]()
    for node in model.graph.node:
        layer = graph.producers.get(node.input[0]) if node.op_type == "BatchNormalization" else None
        held = (
            None
            if layer is None or layer.op_type != "Conv"
            else graph.producers.get(layer.input[1])
        )
        alone = layer is not None and len(graph.consumers.get(layer.output[0], [])) == 1
        if (
            layer is None
            or held is None
            or held.op_type != DEQUANTIZE
            or not alone
            or layer.output[0] in graph.outputs
        ):
            continue
        values = [read_constant(name, constants) for name in (*node.input[1:5], *held.input[:2])]
        bias = read_constant(layer.input[2], constants) if len(layer.input) > 2 else np.float32(0)
        zero = read_constant(held.input[2], constants) if len(held.input) > 2 else np.int8(0)
        if (
            bias is None
            or zero is None
            or np.any(zero)
            or any(array is None for array in values)
            or len(graph.consumers[held.output[0]]) > 1
        ):
            continue
        gain, shift, mean, variance, integers, scale = (np.asarray(array) for array in values)
        epsilon = float(read_attributes(node).get("epsilon", 1e-5))
        factor = (gain.astype(np.float64) / np.sqrt(variance.astype(np.float64) + epsilon)).reshape(
            -1
        )
        if (
            integers.dtype != np.int8
            or scale.size not in (1, factor.size)
            or (factor == 0).any()
            or (integers[factor < 0] == -128).any()
        ):
            continue
        signs = np.where(factor < 0, -1, 1).astype(np.int8).reshape(-1, *[1] * (integers.ndim - 1))
        made = {
            "integers": (integers * signs).astype(np.int8),
            "scale": (np.broadcast_to(scale.reshape(-1), factor.shape) * np.abs(factor)).astype(
                np.float32
            ),
            "zero_point": np.zeros(factor.shape, np.int8),
            "bias": ((bias - mean.astype(np.float64)) * factor + shift).astype(np.float32),
        }
        stored = {
            what: onnx.numpy_helper.from_array(value, names.give(f"{layer.name}_{what}"))
            for what, value in made.items()
        }
        new += stored.values()
        held.input[:] = [stored[what].name for what in ("integers", "scale", "zero_point")]
        _set_axis(held, 0)
        layer.input[:] = [*layer.input[:2], stored["bias"].name]
        layer.output[0] = node.output[0]
        folded.add(node.name)
    if folded:
        replace_nodes(
            model.graph, [node for node in model.graph.node if node.name not in folded], new
        )
    return model, len(folded)


def _set_axis(node: Any, axis: int) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name != "axis"]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute("axis", axis)])


def move_before_activations(model: Any) -> tuple[Any, int]:
    """Lets a QuantizeLinear read a layer's own result, and clips its integers behind it as the activation clipped the values.

    Rounding to a grid never swaps two values, so that clipping before and after it gives the same integers. ONNX Runtime then
    has an INT8 kernel for the layer. Where the smallest integer stands for zero, it takes a Relu away itself.
    """
    graph, constants, names = OnnxGraph(model), find_constants(model), NameGiver(model)
    new, added, count, gone = [], {}, 0, set[str]()
    for node in model.graph.node:
        activation = graph.producers.get(node.input[0]) if node.op_type == QUANTIZE else None
        bounds = None if activation is None else _read_bounds(activation, constants)
        grid = None if bounds is None else _read_grid(node, constants)
        layer = None if activation is None else graph.producers.get(activation.input[0])
        moves = (
            activation is not None
            and bounds is not None
            and grid is not None
            and grid.zero.dtype in (np.uint8, np.int8)
            and layer is not None
            and _reads_pairs(layer, graph)
            and len(graph.consumers.get(activation.output[0], [])) == 1
            and len(graph.consumers.get(activation.input[0], [])) == 1
            and not {activation.input[0], activation.output[0], node.output[0]} & graph.outputs
        )
        if not moves or activation is None or bounds is None or grid is None:
            continue
        limits = _quantize_bounds(bounds, grid)
        if activation.op_type == "Relu" and limits[0] == np.iinfo(grid.zero.dtype).min:
            continue
        inner = names.give(f"{node.output[0]}_unclipped")
        held = [
            onnx.numpy_helper.from_array(limit, names.give(f"{node.output[0]}_{end}"))
            for limit, end in zip(limits, ("low", "high"), strict=True)
        ]
        clip = onnx.helper.make_node(
            "Clip",
            [inner, *(tensor.name for tensor in held)],
            [node.output[0]],
            name=names.give(f"{node.name}_Clip"),
        )
        added[node.name] = clip
        new += held
        node.input[0], node.output[0] = activation.input[0], inner
        gone.add(activation.output[0])
        count += 1
    if count:
        nodes = []
        for node in model.graph.node:
            if gone.isdisjoint(node.output):
                nodes += [node, added[node.name]] if node.name in added else [node]
        replace_nodes(model.graph, nodes, new)
    return model, count


def _reads_pairs(node: Any, graph: OnnxGraph) -> bool:
    """Whether a layer or an addition reads dequantized tensors, so that an INT8 kernel may take it."""
    if node.op_type not in (*WEIGHTED_OPS, "Add"):
        return False
    read = [graph.producers.get(name) for name in node.input[:2]]
    return all(node is not None and node.op_type == DEQUANTIZE for node in read)


def _read_bounds(node: Any, constants: Any) -> tuple[float, float] | None:
    """The bounds of a Relu or a Clip with constant bounds; None for another node."""
    if node.op_type == "Relu":
        return 0.0, np.inf
    if node.op_type != "Clip":
        return None
    bounds = []
    for position, default in ((1, -np.inf), (2, np.inf)):
        name = node.input[position] if len(node.input) > position else ""
        value = read_constant(name, constants) if name else np.float32(default)
        if value is None or np.size(value) != 1:
            return None
        bounds.append(float(np.asarray(value).reshape(())))
    return bounds[0], bounds[1]


def _quantize_bounds(bounds: tuple[float, float], grid: _Grid) -> tuple[NDArray[Any], NDArray[Any]]:
    """The integers of two bounds, as QuantizeLinear rounds them, without axes."""
    ends = np.iinfo(grid.zero.dtype)
    with np.errstate(over="ignore"):
        steps = np.rint(np.array(bounds, grid.scale.dtype) / grid.scale) + float(grid.zero)
    low, high = np.clip(steps, ends.min, ends.max).astype(grid.zero.dtype)
    return np.asarray(low), np.asarray(high)


def quantize_biases(model: Any) -> tuple[Any, int]:
    """Turns the bias of a layer between pairs into INT32 in steps of its sums, without which ONNX Runtime has no INT8 kernel."""
    graph, constants, names = OnnxGraph(model), find_constants(model), NameGiver(model)
    new, added, count = [], {}, 0
    for node in model.graph.node:
        if node.op_type not in ("Conv", "Gemm") or len(node.input) < 3:
            continue
        data, held = (graph.producers.get(name) for name in node.input[:2])
        bias = read_constant(node.input[2], constants)
        if (
            bias is None
            or bias.ndim != 1
            or {pair.op_type for pair in (data, held) if pair} != {DEQUANTIZE}
            or data is None
            or held is None
        ):
            continue
        data_scale, weight_scale = (
            read_constant(pair.input[1], constants) for pair in (data, held)
        )
        if (
            data_scale is None
            or weight_scale is None
            or data_scale.size != 1
            or weight_scale.size not in (1, bias.size)
            or bias.dtype != np.float32
        ):
            continue
        scale = (
            data_scale.reshape(()) * np.broadcast_to(weight_scale.reshape(-1), bias.shape)
        ).astype(np.float32)
        steps = np.rint(bias.astype(np.float64) / np.where(scale == 0, 1, scale))
        if not scale.all() or not np.abs(steps).max(initial=0) < 2**31:
            continue
        stored = [
            onnx.numpy_helper.from_array(value, names.give(f"{node.name}_bias_{what}"))
            for what, value in (
                ("q", steps.astype(np.int32)),
                ("scale", scale),
                ("zero_point", np.zeros(scale.shape, np.int32)),
            )
        ]
        made = names.give(f"{node.name}_bias_dq")
        added[node.name] = onnx.helper.make_node(
            DEQUANTIZE,
            [tensor.name for tensor in stored],
            [made],
            name=names.give(f"{node.name}_bias_{DEQUANTIZE}"),
            axis=0,
        )
        new += stored
        node.input[2] = made
        count += 1
    if count:
        nodes = [
            part
            for node in model.graph.node
            for part in ((added[node.name], node) if node.name in added else (node,))
        ]
        replace_nodes(model.graph, nodes, new)
    return model, count


BOTH = (
    Rewrite(
        merge_repeated_pairs,
        "{count} pairs behind a pair on the same grid are left out, which changes no value",
        0.0,
    ),
)
FOR_CPU = (
    Rewrite(
        fold_batch_normalization,
        "{count} batch normalizations moved into the scales of the weights before them, whose integers stay",
        QUANTIZED_RELATIVE,
    ),
    Rewrite(
        shift_to_unsigned,
        "{count} activations are UINT8 instead of INT8, with a zero point 128 higher: the same values",
        0.0,
    ),
    Rewrite(
        move_before_activations,
        "{count} pairs moved before the activation, which clips their integers instead: the same values",
        0.0,
    ),
    Rewrite(
        quantize_biases,
        "{count} biases rounded to INT32 in steps of their layer's sums",
        QUANTIZED_RELATIVE,
    ),
)
"""In the order in which they are made."""
