"""The Q/DQ pairs of a graph that a user gives: what no runtime can make sense of, and the quantizers of constants."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from optpipe.backends.graph_names import iterate_graphs
from optpipe.backends.onnx_graph import OnnxGraph, read_constants, replace_nodes
from optpipe.core import np, onnx
from optpipe.core.errors import escape

if TYPE_CHECKING:
    from numpy.typing import NDArray

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
STANDARD = ("", "ai.onnx")
_READS_INTEGERS_AS_VALUES = ("Cast", "CastLike")


def is_pair_node(node: Any) -> bool:
    return node.op_type in (QUANTIZE, DEQUANTIZE) and node.domain in STANDARD


def find_constants(model: Any) -> "dict[str, onnx.TensorProto]":
    """The initializers of all graphs and the tensors of Constant nodes, by name."""
    stored = {
        tensor.name: tensor for graph in iterate_graphs(model.graph) for tensor in graph.initializer
    }
    return {**read_constants(model), **stored}


def read_constant(name: str, constants: "dict[str, onnx.TensorProto]") -> "NDArray[Any] | None":
    tensor = constants.get(name)
    return None if tensor is None else np.asarray(onnx.numpy_helper.to_array(tensor))


def find_faulty_pair(model: Any) -> str | None:
    """Why the Q/DQ nodes of a graph are no quantization: two lines, the fault with its place and the way out; None if they are.

    That is a scale of zero, below zero, infinite, or NaN, a QuantizeLinear without its DequantizeLinear, and a pair with
    two different scales or zero points.
    """
    return next(_iterate_faults(model), None)


def _iterate_faults(model: Any) -> Iterator[str]:
    constants = find_constants(model)
    for inner in iterate_graphs(model.graph):
        if not any(map(is_pair_node, inner.node)):
            continue
        readers: dict[str, list[Any]] = {}
        for node in inner.node:
            for name in node.input:
                readers.setdefault(name, []).append(node)
        for node in filter(is_pair_node, inner.node):
            place = f"{node.op_type} '{escape(node.name or node.output[0])[:80]}'"
            if (fault := _find_scale_fault(node, constants)) is not None:
                way_out = "calibrate or train the model again, and export it again"
                yield f"{place} has {fault}: a range that no value fits\n{way_out}"
            if node.op_type == QUANTIZE:
                for reader in readers.get(node.output[0], ()):
                    if (fault := _find_partner_fault(node, reader, constants)) is not None:
                        yield f"{place} {fault}"


def _find_scale_fault(node: Any, constants: "dict[str, onnx.TensorProto]") -> str | None:
    scale = read_constant(node.input[1], constants)
    if scale is None or scale.dtype.kind not in "fV":
        return None
    values = scale.astype(np.float32)
    if not np.isfinite(values).all():
        return "a scale of NaN or infinity"
    if (values < 0).any():
        return "a scale below zero"
    # a channel of zeros may have the scale 0 in its DequantizeLinear, which gives these zeros
    if (values == 0).any() and node.op_type == QUANTIZE:
        return "a scale of zero"
    if (values == 0).any() and node.input[0] not in constants:
        return "a scale of zero"
    return None


def _find_partner_fault(
    node: Any, reader: Any, constants: "dict[str, onnx.TensorProto]"
) -> str | None:
    """What is wrong between a QuantizeLinear and a node that reads it."""
    if reader.op_type in _READS_INTEGERS_AS_VALUES:
        name = escape(reader.name or reader.output[0])[:80]
        return (
            f"has no DequantizeLinear: {reader.op_type} '{name}' reads its integers as values\n"
            "export the model with Q/DQ pairs"
        )
    if reader.op_type != DEQUANTIZE or reader.domain not in STANDARD:
        return None
    for position, what in ((1, "scale"), (2, "zero point")):
        own, other = (_read_position(side, position, constants) for side in (node, reader))
        if own is None or other is None:
            continue
        if own.shape != other.shape and own.size == other.size == 1:
            own, other = own.reshape(()), other.reshape(())
        if own.shape != other.shape or own.tobytes() != other.tobytes():
            name = escape(reader.name or reader.output[0])[:80]
            return (
                f"and its DequantizeLinear '{name}' have different {what}s, so the pair does more than round\n"
                "export the model with the same range in both"
            )
    return None


def _read_position(
    node: Any, position: int, constants: "dict[str, onnx.TensorProto]"
) -> "NDArray[Any] | None":
    """The constant at a position; None if it is missing, computed, or all zero as a missing zero point is."""
    name = node.input[position] if len(node.input) > position else ""
    constant = read_constant(name, constants)
    if constant is None or (position == 2 and not constant.astype(np.float32).any()):
        return (
            np.zeros((), np.float32)
            if position == 2 and (constant is not None or not name)
            else None
        )
    return constant


def fold_constant_quantizers(model: Any) -> Any:
    """`model` with the integers of each QuantizeLinear of a constant, which ModelOpt exports in floating point, in place."""
    graph = OnnxGraph(model)
    constants = find_constants(model)
    kept, folded = [], []
    for node in model.graph.node:
        fits = (
            node.op_type == QUANTIZE
            and node.domain in STANDARD
            and all(name in constants for name in node.input)
            and node.output[0] not in graph.outputs
        )
        if not fits:
            kept.append(node)
            continue
        held = onnx.TensorProto()
        held.CopyFrom(_quantize_constant(model, node, constants))
        held.name = node.output[0]
        folded.append(held)
    if folded:
        replace_nodes(model.graph, kept, folded)
    return model


def _quantize_constant(model: Any, node: Any, constants: "dict[str, onnx.TensorProto]") -> Any:
    """The tensor that a QuantizeLinear of constants makes, by onnx's reference implementation."""
    from onnx.reference import ReferenceEvaluator

    given = [
        onnx.helper.make_tensor_value_info(n, constants[n].data_type, [*constants[n].dims])
        for n in dict.fromkeys(node.input)
    ]
    made = onnx.helper.make_empty_tensor_value_info(node.output[0])
    alone = onnx.helper.make_model(
        onnx.helper.make_graph([node], "alone", given, [made]), opset_imports=model.opset_import
    )
    values = {name: onnx.numpy_helper.to_array(constants[name]) for name in node.input}
    (codes,) = ReferenceEvaluator(alone).run(None, values)
    return onnx.numpy_helper.from_array(np.asarray(codes), node.output[0])
