"""Chooses each step's kernel by measuring all that could compute it, on the GPU at hand, and keeps what was measured."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from optpipe.backends.torch_int8 import steps
from optpipe.backends.torch_int8.operators import launch_step, register_operator
from optpipe.backends.torch_int8.precompile import collect_kernels, compile_side_by_side
from optpipe.backends.torch_int8.tactics import Operands, Tactic, list_tactics, text_from_tactics
from optpipe.core.card import InputSpec
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
    """What was measured for one step on what it reads."""

    tactic: Tactic
    microseconds: float
    refused: tuple[str, ...] = ()
    """Tactics that failed or gave other numbers than the first, each with the reason."""


def choose_batch_sizes(low: int, usual: int, high: int) -> tuple[int, ...]:
    """The batch sizes to measure for a profile."""
    return tuple(sorted({usual, *(size for size in BATCHES if low <= size <= high)}))


def draw_inputs(inputs: tuple[InputSpec, ...]) -> dict[int, tuple[Any, ...]]:
    """Seeded tensors on the GPU at each batch size that is measured; ones where they are whole numbers."""
    import torch

    first = inputs[0]
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(each: InputSpec, size: int) -> Any:
        shape = (size, *each.opt[1:])
        if each.dtype.startswith("float"):
            return torch.randn(shape, device="cuda", generator=generator)
        return torch.ones(shape, device="cuda", dtype=getattr(torch, each.dtype))

    sizes = choose_batch_sizes(first.min[0], first.opt[0], first.max[0])
    return {size: tuple(draw(each, size) for each in inputs) for size in sizes}


def tune_program(program: Any, drawn: Mapping[int, tuple[Any, ...]]) -> dict[int, tuple[Choice, ...]]:
    """Gives every INT8 layer of a lowered GraphModule on the GPU its fastest tactics on each of `drawn`, inputs by batch size.

    Equal steps on equal shapes are measured once. Raises StageError where no tactic of a step runs.
    """
    with collect_kernels() as kernels:
        for inputs in drawn.values():
            run_layers(program, inputs, lambda _, step, given: _launch_all(step, given))
    compile_side_by_side([*kernels])
    known: dict[tuple[Any, ...], Choice] = {}
    chosen: dict[Any, dict[int, Tactic]] = {}
    measured = {}
    for size, inputs in drawn.items():
        found: list[Choice] = []

        def choose(node: Any, step: steps.Step, given: Operands, found: list[Choice] = found) -> Any:
            key = (step, tuple(given.data.shape))
            if key not in known:
                known[key] = _find_fastest(step, given)
            found.append(known[key])
            chosen.setdefault(node, {})[given.data.shape[0]] = known[key].tactic
            return launch_step(step, given, known[key].tactic)

        run_layers(program, inputs, choose)
        measured[size] = tuple(found)
    for node, by_size in chosen.items():
        node.update_arg(6, text_from_tactics(by_size))
    program.recompile()
    return measured


def run_layers(program: Any, inputs: Iterable[Any], compute: Callable[[Any, steps.Step, Operands], Any]) -> Any:
    """Runs the GraphModule node by node, its INT8 layers by `compute`, which takes the node, the step and what it reads."""
    import torch

    layer = register_operator()

    class Layers(torch.fx.Interpreter):
        def run_node(self, n: Any) -> Any:
            if n.target is not layer:
                return super().run_node(n)
            given, added, constants, added_scale, inverse_scale, step, _ = self.fetch_args_kwargs_from_env(n)[0]
            operands = Operands(given, added, constants, added_scale, inverse_scale)
            return compute(n, steps.step_from_text(step), operands)

    with torch.inference_mode():
        return Layers(program).run(*inputs)


def summarize_choices(measured: Mapping[int, tuple[Choice, ...]]) -> dict[str, Any]:
    """Per batch size how many layers each kernel computes, and the sum of the measured times."""
    summary = {}
    for size, chosen in measured.items():
        kernels: dict[str, int] = {}
        for each in chosen:
            kernels[each.tactic.kernel] = kernels.get(each.tactic.kernel, 0) + 1
        summary[str(size)] = {"kernels": kernels, "sum_us": round(sum(each.microseconds for each in chosen), 1)}
    return summary


def _launch_all(step: steps.Step, given: Operands) -> Any:
    """A step's output: zeros, where its kernels are only collected."""
    for tactic in list_tactics(step, given.data):
        with suppress(Exception):  # it is refused where it is timed
            launch_step(step, given, tactic)
    return steps.make_output(step, given.data).zero_()


def _find_fastest(step: steps.Step, given: Operands) -> Choice:
    timed: list[tuple[float, Tactic]] = []
    refused = []
    first = None
    for tactic in list_tactics(step, given.data):
        try:
            output = launch_step(step, given, tactic)
            first = output if first is None else first
            if not _agree(step, output, first):
                refused.append(f"{tactic}: gives other numbers than {timed[0][1]}")
                continue
            timed.append((time_launch(partial(launch_step, step, given, tactic)), tactic))
        except Exception as error:  # noqa: BLE001 - what Triton and the driver refuse comes as many types
            refused.append(f"{tactic}: {str(error).splitlines()[0][:120]}")
    if not timed:
        why = refused[0] if refused else "none was tried"
        raise StageError(f"no INT8 kernel runs {steps.text_from_step(step)} on this GPU: {why}")
    best, tactic = min(timed, key=lambda each: each[0])
    return Choice(tactic, best, tuple(refused))


def _agree(step: steps.Step, output: Any, first: Any) -> bool:
    """Whether a tactic gives the first one's numbers: the same, or where sums in FP16 are ordered otherwise, to their rounding."""
    import torch

    if not isinstance(step, steps.Depthwise):
        return bool(torch.equal(output, first))
    near = 1e-2 * float(first.float().abs().max()) if step.half else 1.0
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
