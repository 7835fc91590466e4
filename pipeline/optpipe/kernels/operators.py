"""A torch operator for INT8 layers, with which programs are exported, compiled, and packaged.

`optpipe::layer` takes a layer's constants as tensors, and its step and tactics as text, and launches a kernel. Register the operator
before loading such a program.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from optpipe.core import torch
from optpipe.kernels import steps
from optpipe.kernels.launches import LAUNCHERS
from optpipe.kernels.tactics import Operands, Tactic, list_tactics, tactics_from_text

SCHEMA = (
    "layer(Tensor given, Tensor? added, Tensor[] constants, float added_scale, float inverse_scale, str step, "
    "str tactics) -> Tensor"
)


@cache
def register_operator() -> Any:
    from torch.utils.flop_counter import register_flop_formula

    from optpipe.kernels.compilation import set_assembler

    set_assembler()
    library = torch.library.Library("optpipe", "DEF")
    library.define(SCHEMA)
    library.impl("layer", _launch, "CUDA")
    torch.library.register_fake("optpipe::layer", _make_empty, lib=library)
    register_flop_formula(torch.ops.optpipe.layer, get_raw=True)(_count_flops)
    _KEPT.append(library)
    return torch.ops.optpipe.layer.default


_KEPT: list[Any] = []
"""torch unregisters an operator when its library is garbage-collected."""


def _launch(*arguments: Any) -> Any:
    step, given, tactics = _read(*arguments)
    known, size = tactics_from_text(tactics), given.data.shape[0]
    nearest = min(known, key=lambda batch: (abs(batch - size), batch), default=None)
    return launch_step(step, given, None if nearest is None else known[nearest])


def _read(
    given: Any,
    added: Any,
    constants: Sequence[Any],
    added_scale: float,
    inverse_scale: float,
    step: str,
    tactics: str,
) -> tuple[steps.Step, Operands, str]:
    return (
        steps.step_from_text(step),
        Operands(given, added, constants, added_scale, inverse_scale),
        tactics,
    )


def _make_empty(*arguments: Any) -> Any:
    step, given, _ = _read(*arguments)
    return steps.make_output(step, given.data)


def launch_step(step: steps.Step, given: Operands, tactic: Tactic | None = None) -> Any:
    """Enqueues a step on torch's current stream and returns its output; by default with its likeliest tactic."""
    chosen = tactic or next(list_tactics(step, given.data))
    return LAUNCHERS[chosen.kernel](step, given, chosen.settings)


def _count_flops(*arguments: Any, out_val: Any) -> int:
    step, *_ = _read(*arguments)
    return int(2 * step.macs * (out_val.numel() // step.outputs))
