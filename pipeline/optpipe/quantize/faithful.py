"""The guard of quantization: a Q/DQ graph is its source once every pair is taken away and every weight is itself again.

What a Q/DQ graph computes differs from its source by rounding, which hides a wrong edge, axis, or name. So each part is checked
by itself: weights and biases are within half a step of those that they replace, scales are those of the calibration table, and
the graph without its pairs computes what its source computes, as a `RewriteGuard` compares.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from optpipe.backends.graph_names import NameGiver
from optpipe.backends.onnx_graph import OnnxGraph
from optpipe.backends.rewrites import Feeds, RewriteGuard
from optpipe.core import onnx
from optpipe.core.errors import StageError, escape
from optpipe.core.precision import Precision
from optpipe.core.wording import Argument
from optpipe.quantize.qdq import Placement, find_weight, quantize_activation
from optpipe.quantize.ranges import TensorRange
from optpipe.stats.paired import TOLERATED_RELATIVE_ERROR

HALF_STEP = 0.5 + 1e-3
"""In steps of the scale; the rest is rounding of the division in FP32."""
E4M3_STEP = 2**-4 + 1e-6
"""FP8 has three bits of mantissa: half a unit in the last place, relative to the value."""
E4M3_SMALLEST = 2**-10
"""Half of the smallest step of FP8, in units of the scale."""


def require_faithful(
    source: Any,
    quantized: Any,
    placed: Placement,
    ranges: Mapping[str, TensorRange],
    feeds: Sequence[Feeds],
    name: str,
) -> None:
    """Raises StageError, with what differs, if a Q/DQ graph differs from its FP32 `source` by more than quantization.

    `feeds` are inputs on which both run; a source that does not run on them is compared by its constants alone.
    """
    problem = f"the quantized graph of {name} differs from its source by more than rounding"
    way_out = "build it in fp32 or fp16, and report the model: this is a fault of optpipe"
    plain, wrong = _take_pairs_away(source, quantized, placed, ranges)
    if wrong is None and (difference := RewriteGuard(feeds).find_difference(source, plain)):
        wrong = str(difference)
    if wrong is not None:
        raise StageError(f"{problem}: {wrong}\n{way_out}")


def require_half_step(
    before: Any, source: Any, convert: Callable[[Any], Any], feeds: Sequence[Feeds], name: str
) -> Any:
    """What `convert` makes of a Q/DQ graph, `before`, whose other layers it puts into FP16.

    A value that FP16 moves over the edge of an INT8 step changes by that step, so the result may differ from `before` as much
    as `before` from its `source`. Raises StageError beyond that.
    """
    guard = RewriteGuard(feeds)
    if not guard.run(source):
        return convert(before)
    copy = onnx.ModelProto()
    copy.CopyFrom(before)
    quantized = guard.measure(source, before, 0.0)
    converted = convert(copy)
    rounding = TOLERATED_RELATIVE_ERROR[Precision.FP16]
    known = quantized is not None and np.isfinite(quantized.relative)
    limit = max(rounding, quantized.relative) if known and quantized else rounding
    difference = RewriteGuard(feeds).measure(before, converted, limit)
    if difference is not None and not difference.unknown:
        raise StageError(
            f"FP16 around the INT8 layers of {name} changes more than rounding does: {difference}",
            remedy="build it in fp16, or for a runtime whose INT8 graphs stay in FP32 ("
            + Argument("backend", "onnxruntime")
            + ")",
        )
    return converted


def _take_pairs_away(
    source: Any, quantized: Any, placed: Placement, ranges: Mapping[str, TensorRange]
) -> tuple[Any, str | None]:
    """`quantized` with an Identity for each pair and the source's weights in its layers; and what is wrong with a constant."""
    plain = onnx.ModelProto()
    plain.CopyFrom(quantized)
    graph, given = OnnxGraph(quantized), OnnxGraph(source)
    names = NameGiver(plain)
    nodes = {node.name: node for node in plain.graph.node}
    for layer in placed.layers:
        old = next((node for node in given.model.graph.node if node.name == layer), None)
        new = nodes.get(layer)
        if old is None or new is None:
            return plain, f"layer '{escape(layer)[:80]}' is missing"
        for position in (1, 2):
            held = graph.producers.get(new.input[position]) if len(new.input) > position else None
            if held is None or held.op_type != "DequantizeLinear":
                continue
            if position == 1:
                weight = find_weight(old.input[1], given)
                values = None if weight is None else weight.read()
            else:
                values = onnx.numpy_helper.to_array(given.weights[old.input[2]])
            if values is None or (off := _find_wrong_constant(held, values, graph)):
                what = "weights" if position == 1 else "bias"
                return (
                    plain,
                    f"the {what} of layer '{escape(layer)[:80]}' are off by {off:.3g} steps",
                )
            size = tuple(graph.weights[held.input[0]].dims)
            name = names.give(f"{layer}_plain")
            shaped = np.ascontiguousarray(
                np.broadcast_to(values.reshape(-1), size)
                if values.size == 1
                else values.reshape(size)
            )
            plain.graph.initializer.append(onnx.numpy_helper.from_array(shaped, name))
            new.input[position] = name
    for node in plain.graph.node:
        before = graph.producers.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if before is None or before.op_type != "QuantizeLinear":
            continue
        tensor = before.input[0]
        reshaped = graph.producers.get(tensor)
        if tensor not in ranges and reshaped is not None and reshaped.op_type == "Unsqueeze":
            tensor = reshaped.input[0]
        if tensor not in ranges or [*before.input[1:]] != [*node.input[1:]]:
            return (
                plain,
                f"the pair of tensor '{escape(tensor)[:80]}' has other scales than the table",
            )
        scale, zero, _ = quantize_activation(ranges[tensor], placed.target)
        grid = [onnx.numpy_helper.to_array(graph.weights[name]) for name in node.input[1:3]]
        if grid[0].size != 1 or float(grid[0]) != float(scale) or float(grid[1]) != float(zero):
            return plain, f"the scale of tensor '{escape(tensor)[:80]}' is not that of the table"
        kept = before.input[0]
        made = node.output[0]
        node.Clear()
        node.CopyFrom(
            onnx.helper.make_node("Identity", [kept], [made], name=names.give(f"{made}_plain"))
        )
    return plain, None


def _find_wrong_constant(node: Any, values: Any, graph: OnnxGraph) -> float:
    """How far, in steps, the constant of a DequantizeLinear is from the values that it stands for; 0 within half a step."""
    held = graph.weights[node.input[0]]
    scale = onnx.numpy_helper.to_array(graph.weights[node.input[1]]).astype(np.float64)
    steps = onnx.numpy_helper.to_array(held).astype(np.float64)
    if values.size not in (1, steps.size):
        return np.inf
    wanted = (
        values.astype(np.float64).reshape(-1)
        if values.size == 1
        else values.astype(np.float64).reshape(steps.shape)
    )
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
    shape = (
        [-1 if at == axis else 1 for at in range(steps.ndim)]
        if scale.size > 1
        else [1] * steps.ndim
    )
    wanted = wanted / scale.reshape(shape)
    off = np.abs(steps - wanted)
    if held.data_type == onnx.TensorProto.FLOAT8E4M3FN:
        allowed = np.maximum(np.abs(wanted) * E4M3_STEP, E4M3_SMALLEST * 1.001)
    else:
        allowed = np.maximum(HALF_STEP, np.abs(wanted) * 1e-5)
    largest = float((off / allowed).max(initial=0.0))
    return 0.0 if largest <= 1 else largest
