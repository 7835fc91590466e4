"""What every node of a torch program computes and moves, from the tensors of one call."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from operator import attrgetter
from typing import Any

from optpipe.backends.base import NodeCost, ProgramCosts
from optpipe.backends.torch_program import type_name_from_torch

_OPERATORS = {
    "conv1d": "Conv", "conv2d": "Conv", "conv3d": "Conv", "convolution": "Conv", "cudnn_convolution_relu": "Conv",
    "cudnn_convolution_add_relu": "Conv", "linear": "Gemm", "mm": "MatMul", "bmm": "MatMul", "matmul": "MatMul",
    "batch_norm": "BatchNormalization", "layer_norm": "LayerNormalization", "group_norm": "GroupNormalization",
}  # fmt: skip
"""Operators that rules know by their names in ONNX; the others keep torch's. `torch.export` leaves linear layers whole."""


def count_program_costs(program: Any, inputs: Mapping[str, Any], name_of: Callable[[Any], str]) -> ProgramCosts:
    """Calls the GraphModule once on `inputs`, node by node.

    `name_of(node)` names a node; nodes of one name are one row, with the operator and type of its largest. Bytes are those of inputs,
    weights and outputs, each moved once; what is only another view of an input moves none. Raises what the program raises.
    """
    import torch

    rows: list[NodeCost] = []

    class Counted(torch.fx.Interpreter):
        def run_node(self, n: Any) -> Any:
            given, _ = self.fetch_args_kwargs_from_env(n)
            result = super().run_node(n)
            if n.op == "call_function" and isinstance(result, torch.Tensor):
                rows.append(_count_cost(name_of(n), n.target, given, result))
            return result

    with torch.inference_mode():
        answer = Counted(program).run(*inputs.values())
    weights = {node.target: attrgetter(node.target)(program) for node in program.graph.nodes if node.op == "get_attr"}
    edges = [*inputs.values(), *weights.values(), *_flatten([answer])]
    return ProgramCosts(tuple(_sum_by_name(rows)), sum(each.nbytes for each in edges))


def _count_cost(label: str, operation: Any, given: tuple[Any, ...], result: Any) -> NodeCost:
    import torch

    tensors = [each for each in _flatten(given) if isinstance(each, torch.Tensor)]
    floats = [each for each in tensors if each.is_floating_point()]
    name = str(getattr(operation, "overloadpacket", operation)).rpartition(".")[2]
    view = any(each.data_ptr() == result.data_ptr() and each.numel() == result.numel() for each in tensors)
    in_place = bool(getattr(getattr(operation, "_schema", None), "is_mutable", False))
    operator = _OPERATORS.get(name, name)
    return NodeCost(
        name=label,
        op=operator,
        type=type_name_from_torch((floats or [result])[0].dtype),
        macs=_count_macs(operator, given, result),
        bytes=0 if view and not in_place else sum(each.nbytes for each in (*tensors, result)),
        channels=_count_channels(given[0], given[1]) if operator in ("Conv", "Gemm") else None,
    )


def _flatten(values: Any) -> Iterator[Any]:
    for each in values:
        if isinstance(each, tuple | list):
            yield from _flatten(each)
        else:
            yield each


def _count_macs(operator: str, given: tuple[Any, ...], result: Any) -> int:
    """Each value of a product takes one multiply-add per value that it sums over; attention is two products."""
    match operator:
        case "Conv":
            return int(result.numel() * prod(given[1].shape[1:]))
        case "Gemm" | "MatMul":
            return int(result.numel() * given[0].shape[-1])
        case "scaled_dot_product_attention":
            query, key, value = given[:3]
            return int(prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]))
    return 0


def _count_channels(given: Any, weight: Any) -> tuple[int, int]:
    groups = given.shape[1] // weight.shape[1] if weight.dim() > 2 else 1
    return int(weight.shape[1]), int(weight.shape[0]) // groups


def _sum_by_name(rows: list[NodeCost]) -> Iterator[NodeCost]:
    """One row per name: sums, and the operator, type and channels of the largest node."""
    grouped: dict[str, list[NodeCost]] = {}
    for row in rows:
        grouped.setdefault(row.name, []).append(row)
    for same in grouped.values():
        largest = max(same, key=lambda row: (row.macs, row.bytes))
        yield replace(largest, macs=sum(row.macs for row in same), bytes=sum(row.bytes for row in same))
