"""NVTX ranges around the layers of an exported program, so that a recording shows which module launches a kernel."""

from typing import Any

from optpipe.backends.torch_graph import get_layer_name
from optpipe.core import torch

LAYER_MARK = "optpipe.module:"


class _Switch:
    """Whether ranges are opened; off while iterations are timed without a recording."""

    is_on = False


def turn_marks_on() -> None:
    _Switch.is_on = True


def _open_range(name: str) -> None:
    if _Switch.is_on:
        torch.cuda.nvtx.range_push(name)


def _close_range() -> None:
    if _Switch.is_on:
        torch.cuda.nvtx.range_pop()


def mark_layers(program: Any) -> int:
    """Opens a range for each run of nodes of one module in the GraphModule `program`; returns the number of ranges.

    Replayed CUDA graphs do not run the program's Python, and open none.
    """
    graph = program.graph
    opened, last = 0, ""
    nodes = [
        node for node in graph.nodes if node.op in ("call_function", "call_module", "call_method")
    ]
    for node in nodes:
        name = get_layer_name(node) if node.meta.get("nn_module_stack") else ""
        name = name.removeprefix("model.") if name != "model" else ""
        if name == last:
            continue
        with graph.inserting_before(node):
            if last:
                graph.call_function(_close_range)
            if name:
                graph.call_function(_open_range, (LAYER_MARK + name,))
                opened += 1
        last = name
    if last:
        with graph.inserting_before(next(node for node in graph.nodes if node.op == "output")):
            graph.call_function(_close_range)
    program.recompile()
    return opened
