"""What every step of an INT8 network computes and moves, from the tensors of one call."""

from math import prod
from typing import Any

import numpy as np

from optpipe.backends.base import NodeCost, ProgramCosts
from optpipe.backends.torch_int8 import steps
from optpipe.backends.torch_int8.program import Program


def count_costs(program: Program, inputs: tuple[Any, ...]) -> ProgramCosts:
    """Runs `program` once on `inputs` and counts what each step computes and moves.

    Bytes are those of what a step reads and writes, each moved once.
    """
    values = dict(zip(program.network.inputs, inputs, strict=True))
    rows = []
    for step in program.network.steps:
        values[step.output] = output = program.launch(step, values, None)
        read = [values[name] for name in steps.list_tensors_read(step)]
        moved = sum(each.nbytes for each in (*read, output)) + _count_weight_bytes(step)
        rows.append(_describe_step(step, output, moved))
    outputs = [values[name] for name in program.network.outputs]
    weights = sum(map(_count_weight_bytes, program.network.steps))
    return ProgramCosts(tuple(rows), weights + sum(each.nbytes for each in (*inputs, *outputs)))


def _describe_step(step: steps.Step, output: Any, moved: int) -> NodeCost:
    weight = getattr(step, "weight", None)
    kind = "int8" if isinstance(step, steps.Convolution | steps.Linear | steps.MaxPool) else "fp16"
    operator = step.operator if isinstance(step, steps.Floating) else _OPERATORS.get(type(step), type(step).__name__)
    channels, macs = None, 0
    if weight is not None:
        depth = prod(weight.shape[1:])
        inside = {steps.Stem: weight.shape[1], steps.Depthwise: 1}.get(type(step), weight.shape[-1])
        channels, macs = (int(inside), int(weight.shape[0])), int(output.numel() * depth)
    return NodeCost(step.name, operator, kind, macs, moved, channels)


_OPERATORS: dict[type, str] = {
    steps.Convolution: "Conv",
    steps.Stem: "Conv",
    steps.Depthwise: "Conv",
    steps.Linear: "Gemm",
}


def _count_weight_bytes(step: steps.Step) -> int:
    operands = step.inputs if isinstance(step, steps.Floating) else ()
    constants = [getattr(step, name, None) for name in ("weight", "scale", "bias")]  # a scale may be one number
    return sum(int(each.nbytes) for each in (*constants, *operands) if isinstance(each, np.ndarray))
