"""Reads and edits the graphs of exported torch programs."""

from collections.abc import Iterable, Sequence
from typing import Any

from optpipe.core import torch


def copy_where_needed(program: Any) -> None:
    """Turns the views of a GraphModule into reshapes: in another export, a tensor may have other strides than the recorded ones."""
    aten = torch.ops.aten
    for node in program.graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
    program.recompile()


def read_arguments(node: Any) -> dict[str, Any]:
    """The arguments of a torch operator's call by name, in the order of its schema, including defaults."""
    schema = getattr(node.target, "_schema", None)
    known = () if schema is None else schema.arguments
    by_position = {argument.name: value for argument, value in zip(known, node.args, strict=False)}
    given = {**by_position, **node.kwargs}
    return {argument.name: given.get(argument.name, argument.default_value) for argument in known}


def read_product(node: Any) -> tuple[Any, Any, Any, bool] | None:
    """A linear layer's input, weight, and bias, and whether the weight is (input features, output features).

    The first three are nodes of the program; the bias may be None. None if `node` is not a product with a stored weight.
    """
    aten = torch.ops.aten
    given = read_arguments(node) if node.op == "call_function" else {}
    if node.target is aten.linear.default:
        product = (given["input"], given["weight"], given["bias"], False)
    elif node.target is aten.addmm.default and given["alpha"] == given["beta"] == 1:  # as in GPT-2
        product = (given["mat1"], given["mat2"], given["self"], True)
    elif node.target in (aten.mm.default, aten.matmul.default):
        product = (*node.args, None, True)
    else:
        return None
    return product if getattr(product[1], "op", None) == "get_attr" else None


def fold_normalization(
    weight: Any, bias: Any, parts: Iterable[Any], epsilon: float
) -> tuple[Any, Any]:
    """Weight and bias of a convolution that replaces it and the batch normalization after it.

    `parts` are scale and shift, which may be None, mean, and variance.
    """
    scale, shift, mean, variance = parts
    factor = (variance + epsilon).rsqrt()
    factor = factor if scale is None else factor * scale
    bias = (bias - mean) * factor
    bias = bias if shift is None else bias + shift
    return weight * factor.view(-1, *[1] * (weight.dim() - 1)), bias


def add_constant(program: Any, name: str, value: Any) -> Any:
    program.register_buffer(name, value)
    return program.graph.get_attr(name)


def split_outputs(graph: Any, joined: Any, nodes: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """Replaces `nodes` by parts of the last axis of `joined`; returns the parts."""
    parts = []
    for at, (node, size) in enumerate(zip(nodes, sizes, strict=True)):
        part = graph.call_function(torch.narrow, (joined, -1, sum(sizes[:at]), size))
        part.meta = {**node.meta, "value": node}
        node.replace_all_uses_with(part)
        parts.append(part)
    return parts


def read_sizes(value: Any) -> list[int]:
    """The sizes of a tensor; for symbolic ones, those of the example."""
    return [int(size.node.hint) if hasattr(size, "node") else int(size) for size in value.shape]


def get_layer_name(node: Any) -> str:
    """The module that a node of an exported program comes from, such as `layer1.0.conv1`, or the node's own name."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.removeprefix("L['self'].") or str(node.name)
