"""Residual blocks in a lowered program: INT8 convolutions that one kernel may compute."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from optpipe.kernels import steps
from optpipe.kernels.launches import split_block
from optpipe.kernels.operators import register_operator
from optpipe.kernels.tactics import Operands

_NARROWEST, _WIDEST = 64, 128
"""Channels inside a block. A third convolution is included for the fewest: with more, its weights leave room for one tile at a time."""


def find_blocks(program: Any) -> dict[tuple[Any, ...], steps.Block]:
    """The step that joins layers, by their nodes: a 3x3 convolution, a 1x1 convolution with a residual addition, which alone reads it,
    and a 1x1 convolution of the sum.
    """
    layer, blocks = register_operator(), {}
    convolutions = {
        node: step
        for node in program.graph.nodes
        if node.target is layer
        and isinstance(step := steps.step_from_text(node.args[5]), steps.Convolution)
    }
    for node, step in convolutions.items():
        middle = step.outputs
        plain = replace(step, macs=0, stride=1) == steps.Convolution(
            middle, (3, 3), middle, 0, padding=(1, 1, 1, 1), activation="relu"
        )
        if not plain or middle not in (_NARROWEST, _WIDEST) or len(node.users) != 1:
            continue
        after = [
            reader
            for reader in convolutions
            if reader.args[0] is node and _is_product(convolutions[reader], middle, added=True)
        ]
        if not after or convolutions[after[0]].outputs % _WIDEST:
            continue
        wide = convolutions[after[0]].outputs
        third = [
            reader
            for reader in convolutions
            if reader.args[0] is after[0]
            and middle == _NARROWEST == convolutions[reader].outputs
            and _is_product(convolutions[reader], wide, added=False)
        ][:1]
        blocks[node, after[0], *third] = steps.Block(
            middle, wide, middle if third else 0, step.stride
        )
    return blocks


def _is_product(step: steps.Convolution, depth: int, *, added: bool) -> bool:
    """Whether it is an INT8 convolution 1x1 with ReLU."""
    return step == steps.Convolution(
        step.outputs, (1, 1), depth, depth * step.outputs, activation="relu", added=added
    )


def gather_operands(layers: Sequence[Operands]) -> Operands:
    """The operands of a block from those of its layers."""
    first, second, *_ = layers
    constants = [constant for operands in layers for constant in operands.constants]
    return Operands(first.data, second.added, constants, second.added_scale)


def join_layers(program: Any, nodes: tuple[Any, ...], block: steps.Block) -> Any:
    """Replaces the layers of a block by one step, without tactics; returns its node."""
    first, second, *third = nodes
    constants = [constant for node in nodes for constant in node.args[2]]
    for constant in constants:
        first.prepend(constant)
    with program.graph.inserting_after(second):
        text = steps.text_from_step(block)
        arguments: Any = (first.args[0], second.args[1], constants, second.args[3], 1.0, text, "")
        new = program.graph.call_function(register_operator(), arguments)
    for at, node in enumerate((second, *third)):
        with program.graph.inserting_after(new):
            part = program.graph.call_function(_take_part, (new, first.args[0], text, at))
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
    for node in reversed(nodes):
        program.graph.erase_node(node)
    return new


def _take_part(output: Any, given: Any, step: str, at: int) -> Any:
    block = steps.step_from_text(step)
    assert isinstance(block, steps.Block)
    return split_block(block, output, given)[at]
