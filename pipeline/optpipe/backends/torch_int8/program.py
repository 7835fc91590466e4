"""A lowered network on a GPU: its constants, and a call that runs every step with the kernel chosen for it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import numpy as np

from optpipe.backends.base import NodeCost, ProgramCosts
from optpipe.backends.torch_int8 import steps
from optpipe.backends.torch_int8.launches import LAUNCHERS
from optpipe.backends.torch_int8.operators import compute_operator
from optpipe.backends.torch_int8.tactics import Tactic, list_tactics, upload_constants
from optpipe.backends.torch_program import set_assembler

Chosen = Mapping[int, Mapping[str, Tactic]]
"""By batch size and name of the step."""


class Program:
    """Callable on FP32 tensors on the GPU; gives a tuple of FP32 tensors. Outputs are allocated anew each time."""

    def __init__(self, network: steps.Network, chosen: Chosen, device: str = "cuda") -> None:
        set_assembler()
        self.network = network
        self._chosen = chosen
        self._constants = {step.name: upload_constants(step, device) for step in network.steps}
        self._last = {name: step.name for step in network.steps for name in steps.list_tensors_read(step)}

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """All steps, each tensor kept until its last reader."""
        return self.run_marked(inputs, lambda _: nullcontext())

    def run_marked(
        self, inputs: tuple[Any, ...], mark: Callable[[str], AbstractContextManager[Any]]
    ) -> tuple[Any, ...]:
        """The same with each step inside of `mark` of its name."""
        values = dict(zip(self.network.inputs, inputs, strict=True))
        chosen = self._choose_tactics(inputs[0].shape[0])
        for step in self.network.steps:
            with mark(step.name):
                values[step.output] = self.launch(step, values, chosen.get(step.name))
            for name in steps.list_tensors_read(step):
                if self._last[name] == step.name and name not in self.network.outputs:
                    values.pop(name, None)  # a step may read one twice
        return tuple(values[name].float() for name in self.network.outputs)

    def _choose_tactics(self, batch: int) -> Mapping[str, Tactic]:
        """Those measured at the nearest batch size."""
        if not self._chosen:
            return {}
        return self._chosen[min(self._chosen, key=lambda size: (abs(size - batch), size))]

    def launch(self, step: steps.Step, values: Mapping[str, Any], tactic: Tactic | None) -> Any:
        """Enqueues one step on torch's current stream; gives its output. Without a tactic the likeliest runs."""
        kept = self._constants[step.name]
        match step:
            case steps.Floating():
                operands = (
                    values[each] if isinstance(each, str) else kept.get(str(index))
                    for index, each in enumerate(step.inputs)
                )
                return compute_operator(step.operator, tuple(operands), step.attributes)
            case steps.Dequantize():
                return values[step.given].half() * step.scale
        given, *others = (values[name] for name in steps.list_tensors_read(step))
        chosen = tactic or next(list_tactics(step, given))
        return LAUNCHERS[chosen.kernel](step, given, others[0] if others else None, kept, chosen.settings)


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
