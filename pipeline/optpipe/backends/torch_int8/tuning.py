"""Chooses each step's kernel by measuring all that could compute it, on the GPU at hand, and keeps what was measured."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from optpipe.backends.base import BuildRequest
from optpipe.backends.torch_int8 import steps
from optpipe.backends.torch_int8.precompile import collect_kernels, compile_side_by_side
from optpipe.backends.torch_int8.program import Program
from optpipe.backends.torch_int8.tactics import Kerneled, Tactic, list_tactics
from optpipe.core.errors import StageError
from optpipe.core.precision import Precision
from optpipe.stats.ratio import Ratio, alternate, ratio_from_rounds

LAUNCHES = 20
"""In one CUDA graph: a replay then outlasts its own launch."""
REPLAYS = 5
BATCHES = (1, 8, 64, 256)
"""Measured as far as the model's profile holds them, with its `opt`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was measured for one step at one batch size."""

    step: str
    tactic: Tactic
    microseconds: float
    tried: int
    slowest: float
    refused: tuple[str, ...] = ()
    """Tactics that failed or gave other numbers than the first, each with the reason."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "step": self.step,
            "kernel": self.tactic.kernel,
            "settings": dict(self.tactic.settings),
            "us": round(self.microseconds, 2),
            "tried": self.tried,
            "slowest_us": round(self.slowest, 2),
            "refused": list(self.refused),
        }


def choice_from_dict(record: Mapping[str, Any]) -> Choice:
    """Reads what `Choice.to_dict` wrote."""
    tactic = Tactic(record["kernel"], record["settings"])
    return Choice(record["step"], tactic, record["us"], record["tried"], record["slowest_us"], tuple(record["refused"]))


def choose_batch_sizes(low: int, usual: int, high: int) -> tuple[int, ...]:
    """The batch sizes to measure for a profile."""
    return tuple(sorted({usual, *(size for size in BATCHES if low <= size <= high)}))


def compile_tactics(network: steps.Network, drawn: Iterable[tuple[Any, ...]]) -> None:
    """Compiles what `tune_steps` will time on each of `drawn`, inputs on the GPU, side by side."""
    program = Program(network, {})
    with collect_kernels() as kernels:
        for inputs in drawn:
            values = dict(zip(network.inputs, inputs, strict=True))
            for step in network.steps:
                values[step.output] = _launch_all(program, step, values)
    compile_side_by_side([*kernels])


def _launch_all(program: Program, step: steps.Step, values: Mapping[str, Any]) -> Any:
    """A step's output: zeros, where its kernels are only collected."""
    if not isinstance(step, Kerneled):
        return program.launch(step, values, None)
    output = None
    for tactic in list_tactics(step, values[step.given]):
        with suppress(Exception):  # it is refused where it is timed
            output = program.launch(step, values, tactic)
    if output is None:
        raise StageError(f"no INT8 kernel takes {step.name}")
    return output.zero_()


def tune_steps(network: steps.Network, inputs: tuple[Any, ...]) -> tuple[Choice, ...]:
    """The fastest tactic of each step on `inputs`, torch tensors on the GPU. Equal steps on equal shapes are measured once.

    Raises StageError where no tactic of a step runs.
    """
    program = Program(network, {})
    values = dict(zip(network.inputs, inputs, strict=True))
    known: dict[tuple[Any, ...], Choice] = {}
    found = []
    for step in network.steps:
        tactic = None
        if isinstance(step, Kerneled):
            key = sign_step(step, values)
            if key not in known:
                known[key] = _find_fastest(program, step, values)
            seen = known[key]
            found.append(Choice(step.name, seen.tactic, seen.microseconds, seen.tried, seen.slowest, seen.refused))
            tactic = seen.tactic
        values[step.output] = program.launch(step, values, tactic)
    return tuple(found)


def sign_step(step: Kerneled, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """All of a step that its tactics and its time depend on: each field but names and values, and the shapes that it reads."""
    settings = {each.name: getattr(step, each.name) for each in fields(step) if each.name not in _WITHOUT_EFFECT}
    plain = ((name, getattr(value, "shape", value)) for name, value in settings.items())
    shapes = (tuple(values[name].shape) for name in steps.list_tensors_read(step))
    return (type(step).__name__, *plain, *shapes)


_WITHOUT_EFFECT = ("name", "given", "output", "added", "added_scale", "gate", "inverse_scale", "macs")
"""Whether there is an `added` or a `gate` shows in the shapes."""


def _find_fastest(program: Program, step: Any, values: Mapping[str, Any]) -> Choice:
    timed: list[tuple[float, Tactic]] = []
    refused = []
    first = None
    for tactic in list_tactics(step, values[step.given]):
        try:
            output = program.launch(step, values, tactic)
            first = output if first is None else first
            if not _agree(step, output, first):
                refused.append(f"{tactic}: gives other numbers than {timed[0][1]}")
                continue
            timed.append((time_launch(lambda each=tactic: program.launch(step, values, each)), tactic))  # type: ignore[misc]
        except Exception as error:  # noqa: BLE001 - what Triton and the driver refuse comes as many types
            refused.append(f"{tactic}: {str(error).splitlines()[0][:120]}")
    if not timed:
        raise StageError(f"no INT8 kernel runs {step.name} on this GPU: {refused[0] if refused else 'none was tried'}")
    best, tactic = min(timed, key=lambda each: each[0])
    return Choice(step.name, tactic, best, len(timed), max(each[0] for each in timed), tuple(refused))


def _agree(step: Any, output: Any, first: Any) -> bool:
    """Whether a tactic gives the first one's numbers: the same, or where sums in FP16 are ordered otherwise, to their rounding."""
    import torch

    if not isinstance(step, steps.Depthwise | steps.MeanPool):
        return bool(torch.equal(output, first))
    near = 1e-2 * float(first.float().abs().max()) if getattr(step, "half", False) else 1.0
    return bool(torch.allclose(output.float(), first.float(), rtol=1e-2, atol=near))


def time_launch(launch: Callable[[], Any]) -> float:
    """The shortest of a few replays of a CUDA graph of launches, in microseconds per launch. Nothing else runs on the GPU meanwhile."""
    replay = capture_launches(launch, LAUNCHES)
    replay()
    return min(time_replay(replay) / LAUNCHES for _ in range(REPLAYS))


def capture_launches(launch: Callable[[], Any], count: int) -> Callable[[], None]:
    """A CUDA graph of `count` launches: what replays it."""
    import torch

    launch()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            for _ in range(count):
                launch()
        except Exception:
            with suppress(Exception):  # left open, it would make everything fail that this process does later
                graph.capture_end()
            raise
        graph.capture_end()
    return lambda: graph.replay()


def time_replay(replay: Callable[[], None]) -> float:
    """Microseconds of one replay, by CUDA events."""
    import torch

    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    replay()
    ended.record()
    torch.cuda.synchronize()
    return float(begun.elapsed_time(ended) * 1e3)


ROUNDS = 10
PROGRAM_LAUNCHES = 4
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
    from optpipe.backends.torch_eager import fuse_convolutions
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
            ours = capture_launches(lambda drawn=drawn: low(*drawn), PROGRAM_LAUNCHES)  # type: ignore[misc]
            fp16 = capture_launches(lambda drawn=drawn: half(*drawn), PROGRAM_LAUNCHES)  # type: ignore[misc]
        found.append(SpeedOverFp16(size, compare_in_turns(ours, fp16, time_replay)))
    return tuple(found)


def explain_speeds(speeds: tuple[SpeedOverFp16, ...], precision: Precision = Precision.INT8) -> Iterator[str]:
    """What must be said where a precision does not pay; where it pays, nothing."""
    if behind := [each for each in speeds if not each.pays]:
        said = ", ".join(map(str, behind))
        yield f"{precision.upper()} is not shown to be faster than fp16 on this GPU: {said}; fp16 loses no accuracy to quantization"
