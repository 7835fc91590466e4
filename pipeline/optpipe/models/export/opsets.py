"""Raises the opset of a graph, with the meaning of its operators.

Operators that onnx's converter (1.23) translates wrongly, or into an invalid graph, are written in others first.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from optpipe.backends.graph_names import NameGiver, iterate_graphs
from optpipe.backends.onnx_graph import iterate_nodes, name_nodes
from optpipe.backends.onnx_mends import rename_inner_twins
from optpipe.core import np, onnx
from optpipe.core.errors import StageError, first_line

RESIZE_CHANGED = 11
"""The opset whose Resize has `coordinate_transformation_mode` and `nearest_mode`, with other defaults than before."""
HARDMAX_CHANGED = 13
"""The opset whose Hardmax takes one axis, instead of `axis` and all after it."""
GROUP_NORM_CHANGED = 21
"""The opset whose GroupNormalization scales by channel. The one of opset 18, which scales by group, is deprecated: runtimes run
it, tools refuse it."""


def read_opset(model: Any) -> int:
    """The version of the standard operators; 0 if the graph states none."""
    versions = (opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx"))
    return max(versions, default=0)


def needs_conversion(model: Any, least: int) -> bool:
    """Whether `raise_opset` changes more than names."""
    version = read_opset(model)
    return version < least or any(
        node.op_type == "GroupNormalization" and version < GROUP_NORM_CHANGED
        for node in iterate_nodes(model.graph)
    )


def raise_opset(model: Any, least: int) -> Any:
    """A copy of `model` at opset `least` or later, with a name for every node.

    onnx's converter gives a Resize or Upsample of opset 10 and earlier the defaults of opset 11, which sample other
    places (onnx 1.23, `Operators-Changelog`): they get the modes that mean what they meant.

    Raises StageError with the operator that cannot be converted.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    name_nodes(copy)
    version = read_opset(copy)
    if version < GROUP_NORM_CHANGED:
        _rewrite_nodes(copy, "GroupNormalization", _split_group_norm)
    if version >= least:
        return name_nodes(copy)
    if version < HARDMAX_CHANGED:
        _rewrite_nodes(copy, "Hardmax", _flatten_hardmax)
    modes = list(_list_resize_modes(copy)) if version < RESIZE_CHANGED else []
    try:
        if modes:
            copy = onnx.version_converter.convert_version(copy, RESIZE_CHANGED)
            _state_resize_modes(copy, modes)
        if least > read_opset(copy):
            copy = onnx.version_converter.convert_version(copy, least)
        rename_inner_twins(copy)
    except (RuntimeError, ValueError, onnx.version_converter.ConvertError) as error:
        raise StageError(
            f"cannot convert the graph from opset {version} to {least}: {first_line(error)}"
        ) from error
    return name_nodes(copy)


def _list_resize_modes(model: Any) -> Iterator[str]:
    """The rounding of each Resize or Upsample, in order: ONNX Runtime rounds down to enlarge, and up to shrink."""
    for graph in iterate_graphs(model.graph):
        constants = {tensor.name: tensor for tensor in graph.initializer}
        constants |= {
            node.output[0]: held.t
            for node in graph.node
            if node.op_type == "Constant"
            for held in node.attribute
            if held.HasField("t")
        }
        for node in graph.node:
            if node.op_type not in ("Resize", "Upsample") or node.domain not in ("", "ai.onnx"):
                continue
            scales = next(
                (attribute.floats for attribute in node.attribute if attribute.name == "scales"), ()
            )
            if not scales and len(node.input) > 1 and node.input[1] in constants:
                scales = onnx.numpy_helper.to_array(constants[node.input[1]]).reshape(-1)
            shrinks = bool(len(scales)) and bool((np.asarray(scales) < 1).any())
            yield "ceil" if shrinks else "floor"


def _state_resize_modes(model: Any, modes: Sequence[str]) -> None:
    """The converter keeps the order of the nodes, but not the names of their outputs."""
    left = iter(modes)
    for graph in iterate_graphs(model.graph):
        for node in graph.node:
            if node.op_type != "Resize" or node.domain not in ("", "ai.onnx"):
                continue
            kept = [
                attribute
                for attribute in node.attribute
                if attribute.name not in ("coordinate_transformation_mode", "nearest_mode")
            ]
            stated = {
                "coordinate_transformation_mode": "asymmetric",
                "nearest_mode": next(left),
            }
            del node.attribute[:]
            node.attribute.extend(kept)
            node.attribute.extend(
                onnx.helper.make_attribute(name, value) for name, value in stated.items()
            )


def _rewrite_nodes(
    model: Any, operator: str, rewrite: Callable[[Any, NameGiver], list[Any]]
) -> None:
    """Puts the nodes of `rewrite` in the place of each `operator`."""
    names = NameGiver(model)
    for graph in iterate_graphs(model.graph):
        if not any(node.op_type == operator for node in graph.node):
            continue
        nodes = []
        for node in graph.node:
            fits = node.op_type == operator and node.domain in ("", "ai.onnx")
            nodes += rewrite(node, names) if fits else [node]
        nodes = [_copy_node(node) for node in nodes]
        del graph.node[:]
        graph.node.extend(nodes)


def _copy_node(node: Any) -> Any:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


def _make_node(operator: str, given: list[str], made: str, **attributes: Any) -> Any:
    """A node with the name of its only output."""
    return onnx.helper.make_node(operator, given, [made], name=made, **attributes)


def _flatten_hardmax(node: Any, names: NameGiver) -> list[Any]:
    """Over `axis` and all after it, in any opset: as a matrix, whose rows are those axes."""
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
    data, result = node.input[0], node.output[0]
    shape, rows, hard = (names.give(f"{result}_{part}") for part in ("shape", "rows", "hard"))
    return [
        _make_node("Shape", [data], shape),
        _make_node("Flatten", [data], rows, axis=axis),
        _make_node("Hardmax", [rows], hard, axis=1),
        onnx.helper.make_node("Reshape", [hard, shape], [result], name=node.name),
    ]


def _split_group_norm(node: Any, names: NameGiver) -> list[Any]:
    """As the InstanceNormalization of groups, which scales by group too."""
    attributes = {attribute.name: attribute for attribute in node.attribute}
    groups = attributes["num_groups"].i
    epsilon = attributes["epsilon"].f if "epsilon" in attributes else 1e-5
    data, scale, bias = node.input
    result = node.output[0]
    shape, sizes, split, norm = (
        names.give(f"{result}_{part}") for part in ("shape", "sizes", "groups", "norm")
    )
    by_group = onnx.numpy_helper.from_array(np.array([0, groups, -1], np.int64))
    return [
        _make_node("Shape", [data], shape),
        _make_node("Constant", [], sizes, value=by_group),
        _make_node("Reshape", [data, sizes], split),
        _make_node("InstanceNormalization", [split, scale, bias], norm, epsilon=epsilon),
        onnx.helper.make_node("Reshape", [norm, shape], [result], name=node.name),
    ]
