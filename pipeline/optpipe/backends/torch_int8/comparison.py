"""Whether INT8 or FP8 pays for the whole network on this GPU: its program and the FP16 one, replayed in turns."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from optpipe.backends.base import BuildRequest
from optpipe.backends.torch_int8.program import Program
from optpipe.backends.torch_int8.tuning import capture_launches, time_replay
from optpipe.core.bench_record import Ratio
from optpipe.core.precision import Precision
from optpipe.stats.ratio import alternate, ratio_from_rounds

ROUNDS = 10
LAUNCHES = 4
"""Of the whole network in one CUDA graph."""
Clock = Callable[[Callable[[], None]], float]
"""Runs something once and gives the time it took."""


@dataclass(frozen=True, slots=True)
class SpeedOverFp16:
    """How many times as fast as FP16 a network is at one batch size."""

    batch_size: int
    speed: Ratio
    """FP16's time over the other's: above 1, the other is faster."""

    @property
    def pays(self) -> bool:
        """Whether it is shown to be faster."""
        return self.speed.ci[0] > 1

    def to_dict(self) -> dict[str, float]:
        """The JSON form."""
        low, high = self.speed.ci
        return {"speed": round(self.speed.value, 4), "low": round(low, 4), "high": round(high, 4), "pays": self.pays}

    def __str__(self) -> str:
        return f"{self.speed} times the speed of fp16 at batch {self.batch_size}"


def compare_in_turns(low: Callable[[], None], fp16: Callable[[], None], clock: Clock, seed: int = 0) -> Ratio:
    """FP16's time over that of `low` over ROUNDS rounds, in an order drawn for each; one round before them is not counted."""
    subjects = {"low": partial(clock, low), "fp16": partial(clock, fp16)}
    for each in subjects.values():
        each()
    times = alternate(subjects, ROUNDS, seed)
    return ratio_from_rounds(times["low"], times["fp16"])


def compare_programs(
    request: BuildRequest, program: Program, inputs: Mapping[int, tuple[Any, ...]]
) -> tuple[SpeedOverFp16, ...]:
    """`program` against the module's own fused FP16 program on `inputs`, torch tensors on the GPU by batch size.

    Empty where the model has no torch module.
    """
    from optpipe.backends.torch_fusion import fuse_convolutions
    from optpipe.backends.torch_program import export_program

    if request.module is None:
        return ()
    half = export_program(replace(request, precision=Precision.FP16)).module()
    fuse_convolutions(half)
    return compare_calls(program, half, inputs)


def compare_calls(
    low: Callable[..., Any], half: Callable[..., Any], inputs: Mapping[int, tuple[Any, ...]]
) -> tuple[SpeedOverFp16, ...]:
    """`low` against `half`, both callable on the torch tensors on the GPU that `inputs` has by batch size."""
    import torch

    found = []
    for size, drawn in inputs.items():
        with torch.inference_mode():
            ours = capture_launches(lambda drawn=drawn: low(*drawn), LAUNCHES)  # type: ignore[misc]
            fp16 = capture_launches(lambda drawn=drawn: half(*drawn), LAUNCHES)  # type: ignore[misc]
        found.append(SpeedOverFp16(size, compare_in_turns(ours, fp16, time_replay)))
    return tuple(found)


def explain_speeds(speeds: tuple[SpeedOverFp16, ...], precision: Precision = Precision.INT8) -> Iterator[str]:
    """What must be said where a precision does not pay; where it pays, nothing."""
    if behind := [each for each in speeds if not each.pays]:
        said = ", ".join(map(str, behind))
        yield f"{precision.upper()} is not shown to be faster than fp16 on this GPU: {said}; fp16 loses no accuracy to quantization"
