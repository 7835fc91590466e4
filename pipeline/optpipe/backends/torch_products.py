"""The precision and the multiply-adds of each layer, read from the operators of an exported torch program."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

from optpipe.backends.torch_graph import read_sizes
from optpipe.core import torch
from optpipe.core.precision import UNATTRIBUTED, LayerType, Precision

_NAMES = {
    "torch.float32": "fp32",
    "torch.float16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float64": "fp64",
    "torch.float8_e4m3fn": "fp8",
}


DATA_MOVEMENT = {
    "_to_copy", "clone", "view", "permute", "expand", "cat", "slice", "select", "unsqueeze", "squeeze", "alias",
}  # fmt: skip


def type_name_from_torch(dtype: Any) -> str:
    """`fp16` for `torch.float16`, and so on; other types keep torch's name."""
    return _NAMES.get(str(dtype), str(dtype).removeprefix("torch."))


_MORE_PRODUCTS: dict[str, Callable[..., int]] = {
    "_int_mm": lambda left, right: prod(left) * right[-1],
    "_scaled_dot_product_flash_attention_for_cpu": lambda query, key, value, *_: (
        prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    ),
    "addmv": lambda _, matrix, __: prod(matrix),
    "dot": lambda left, _: prod(left),
    "mv": lambda matrix, _: prod(matrix),
    "vdot": lambda left, _: prod(left),
}
"""MACs by the shapes of the tensors that an operator reads; torch's table of operations (torch.utils.flop_counter) lacks these."""


_UNKNOWN_COST = re.compile(
    r"_?(fft|linalg|cdist|trilinear|weight_int\d+pack|dyn_quant|thnn|mkldnn|cudnn|miopen)|.*(rnn|lstm|gru)"
)
"""Operators of ATen whose products nothing here counts; they compute in the type of their data."""


_WITHOUT_PRODUCTS = {
    f"torchvision.{name}"
    for name in ("nms", "ps_roi_align", "ps_roi_pool", "roi_align", "roi_pool")
}


_COUNTED_DOMAINS = ("aten", "prims", "optpipe", "quantized_decomposed")


def layers_from_program(program: Any, precision: Precision) -> tuple[LayerType, ...]:
    """The operators of an exported program with the type of their first floating-point input, and their MACs.

    The MACs are None for operators of other libraries, for those in `_UNKNOWN_COST`, and for products inside branches and
    loops (torch.cond, torch.while_loop), since how often these run is not known.
    """
    decomposed = program.run_decompositions()
    return tuple(_list_layers(decomposed.graph, decomposed.graph_module, precision))


def _list_layers(graph: Any, owner: Any, precision: Precision) -> Iterator[LayerType]:
    """The layers of a graph of `owner`, and those of the graphs that its operators run."""
    from torch.utils.flop_counter import flop_registry

    for node in graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if str(packet) == "optpipe.layer":
            from optpipe.kernels.steps import step_from_text

            step = step_from_text(node.args[5])
            kind = "fp16" if step.floating else "int8"
            macs = _count_flops(flop_registry[packet], node) // 2
            yield LayerType(node.name, type(step).__name__, kind, macs)
            continue
        for module in _list_inner_modules(node, owner):
            for layer in _list_layers(module.graph, module, precision):
                yield replace(
                    layer,
                    name=f"{node.name}.{layer.name}",
                    macs=None if layer.macs != 0 else 0,
                )
        tensors = [
            operand.meta["val"]
            for operand in node.all_input_nodes
            if isinstance(operand.meta.get("val"), torch.Tensor)
        ]
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        if (
            packet is None
            or not floats
            or not isinstance(node.meta.get("val"), torch.Tensor | tuple)
        ):
            continue
        op = str(packet).rpartition(".")[2]
        kind = type_name_from_torch(floats[0].dtype)
        amount: int | None = 0
        if packet in flop_registry:
            amount = _count_flops(flop_registry[packet], node) // 2
        elif op in _MORE_PRODUCTS:
            operands = [
                operand.meta["val"] for operand in node.args if isinstance(operand, torch.fx.Node)
            ]
            amount = _MORE_PRODUCTS[op](*map(read_sizes, operands))
        elif str(packet) in _WITHOUT_PRODUCTS:
            amount = 0
        elif str(packet).partition(".")[0] not in _COUNTED_DOMAINS:
            kind, amount = UNATTRIBUTED, None
        elif _UNKNOWN_COST.match(op):
            amount = None
        if kind == "fp32" and amount != 0 and precision is Precision.TF32:
            kind = "tf32"
        if amount != 0 or op not in DATA_MOVEMENT:
            yield LayerType(node.name, op, kind, amount)


def _list_inner_modules(node: Any, owner: Any) -> list[Any]:
    """The graph modules that a higher-order operator runs: its branches or its body."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    inner = [operand for operand in node.all_input_nodes if operand.op == "get_attr"]
    modules = [getattr(owner, str(operand.target), None) for operand in inner]
    return [module for module in modules if isinstance(module, torch.fx.GraphModule)]


def _count_flops(count: Any, node: Any) -> int:
    """Floating-point operations of a node for the example's sizes: two per multiply-add."""

    def sized(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            value = value.meta.get("val")
        if isinstance(value, torch.Tensor):
            return torch.empty(read_sizes(value), dtype=value.dtype, device="meta")
        return tuple(map(sized, value)) if isinstance(value, tuple | list) else value

    out = node.meta["val"]
    out = out[0] if isinstance(out, tuple) else out
    keywords = {key: sized(value) for key, value in node.kwargs.items()}
    return int(count(*(sized(argument) for argument in node.args), **keywords, out_val=sized(out)))
