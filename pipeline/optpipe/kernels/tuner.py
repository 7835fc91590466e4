"""Measures the tactics of a step on the current GPU and remembers their times, in this process and in Triton's cache."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from optpipe.core import torch
from optpipe.core.errors import StageError
from optpipe.core.files import hash_value
from optpipe.kernels import steps
from optpipe.kernels.operators import launch_step
from optpipe.kernels.tactics import (
    Operands,
    Tactic,
    list_tactics,
    tactics_from_text,
    text_from_tactics,
)
from optpipe.workspace.environment import get_gpu_name, get_package_version

LAUNCHES = 20
"""Launches in one CUDA graph, so that a replay takes longer than its launch."""
REPLAYS = 5
Choice = tuple[Tactic, float]
"""A tactic of a step for one shape, and its microseconds."""
CHOSEN: dict[Any, tuple[Choice, ...]] = {}
"""The tactics that run, the fastest first, by step and shapes. They also lie in Triton's cache, for later builds of any network."""
NOTE = "tactics.txt"


def choose_tactic(step: steps.Step, given: Operands) -> Choice:
    """The fastest tactic; raises StageError if none runs."""
    return rank_tactics(step, given)[0]


def rank_tactics(step: steps.Step, given: Operands) -> tuple[Choice, ...]:
    """The tactics that run, the fastest first; raises StageError if none does."""
    key = describe_operands(step, given)
    if _recall_choices(key):
        with suppress(Exception):  # a driver may refuse what an older one ran
            launch_step(step, given, CHOSEN[key][0][0])
            return CHOSEN[key]
    CHOSEN[key] = _time_tactics(step, given)
    with suppress(OSError):  # a read-only cache only costs time
        lines = (f"{text_from_tactics({0: tactic})} {time}\n" for tactic, time in CHOSEN[key])
        _open_note(key).put("".join(lines), NOTE, binary=False)
    return CHOSEN[key]


def _recall_choices(key: Any) -> bool:
    """Whether the tactics' times are known, from this process or from Triton's cache."""
    if key not in CHOSEN and (note := _open_note(key).get_file(NOTE)) is not None:
        lines = Path(note).read_text(encoding="utf-8").splitlines()
        parts = (line.rpartition(" ") for line in lines)
        CHOSEN[key] = tuple((tactics_from_text(text)[0], float(time)) for text, _, time in parts)
    return key in CHOSEN


def _open_note(key: Any) -> Any:
    """A folder of Triton's cache for this step on this GPU, of these kernels and versions, by the unit that is measured."""
    from triton.runtime.cache import get_cache_manager

    step, *operands = key
    versions = (
        get_package_version("torch"),
        get_package_version("triton"),
        get_gpu_name(),
        _hash_kernels(),
    )
    return get_cache_manager(
        hash_value([*versions, time_launch.__name__, steps.text_from_step(step), str(operands)])
    )


@cache
def _hash_kernels() -> str:
    return hash_value(
        [file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.rglob("*.py"))]
    )


def make_finite(given: Operands) -> Operands:
    """Operands to time a step on: standard normal values in place of tensors that are not finite.

    Random weights, or images that are none, make some networks leave the range of FP16, and kernels cannot be compared on NaN. Minus
    infinity stays in a mask, where it bars a key.
    """
    added = given.added
    if added is not None and added.is_floating_point():
        barred = added.float().isneginf()
        added = added if bool((barred | added.float().isfinite()).all()) else _draw_like(added)
    data = given.data
    if data.is_floating_point() and not bool(data.float().isfinite().all()):
        data = _draw_like(data)
    return replace(given, data=data, added=added)


def _draw_like(tensor: Any) -> Any:
    generator = torch.Generator(device=tensor.device).manual_seed(0)
    values = torch.randn(tensor.shape, device=tensor.device, generator=generator)
    return torch.empty_like(tensor).copy_(values)


def describe_operands(step: steps.Step, given: Operands) -> Any:
    """What a step's time depends on: equal for layers of equal steps and shapes."""
    return step, *(
        (tensor.shape, tensor.stride(), tensor.dtype)
        for tensor in (given.data, given.added)
        if tensor is not None
    )


def launch_all_tactics(step: steps.Step, given: Operands) -> Any:
    """Launches all tactics of a step so that their kernels are collected; returns zeros as its output."""
    for tactic in (
        () if _recall_choices(describe_operands(step, given)) else list_tactics(step, given.data)
    ):
        with suppress(Exception):  # timing reports the failure
            launch_step(step, given, tactic)
    return steps.make_output(step, given.data).zero_()


def _time_tactics(step: steps.Step, given: Operands) -> tuple[Choice, ...]:
    timed: list[Choice] = []
    refused = []
    first = None
    for tactic in list_tactics(step, given.data):
        try:
            output = launch_step(step, given, tactic)
            first = output if first is None else first
            if not _agree(step, output, first):
                refused.append(f"{tactic}: gives other numbers than the first kernel")
                continue
            timed.append((tactic, time_launch(partial(launch_step, step, given, tactic))))
        except Exception as error:  # noqa: BLE001 - Triton and the driver raise many types
            refused.append(f"{tactic}: {str(error).splitlines()[0][:120]}")
    if not timed:
        why = refused[0] if refused else "none was tried"
        raise StageError(f"no kernel runs {steps.text_from_step(step)} on this GPU: {why}")
    return tuple(sorted(timed, key=lambda choice: choice[1]))


def _agree(step: steps.Step, output: Any, first: Any) -> bool:
    """Whether two kernels give the same numbers, to the rounding of FP16, wherever the first's are finite."""
    if not step.floating:
        return bool(torch.equal(output, first))
    expected, got = first.float(), output.float()
    known = expected.isfinite()
    expected, got = expected[known], got[known]
    near = 1e-2 * float(expected.abs().max()) if step.half and expected.numel() else 1.0
    return bool(torch.allclose(got, expected, rtol=1e-2, atol=near))


def time_launch(launch: Callable[[], Any]) -> float:
    """Microseconds per launch of the fastest of REPLAYS replays of a CUDA graph with LAUNCHES launches."""
    replay = capture_launches(launch, LAUNCHES)
    replay()
    return min(time_replay(replay) / LAUNCHES for _ in range(REPLAYS))


def capture_launches(launch: Callable[[], Any], count: int) -> Callable[[], None]:
    launch()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            for _ in range(count):
                launch()
        except Exception:
            with suppress(
                Exception
            ):  # an open capture would make all later work of this process fail
                graph.capture_end()
            raise
        graph.capture_end()
    return lambda: graph.replay()


def time_replay(replay: Callable[[], None]) -> float:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    replay()
    ended.record()
    torch.cuda.synchronize()
    return float(begun.elapsed_time(ended) * 1e3)
