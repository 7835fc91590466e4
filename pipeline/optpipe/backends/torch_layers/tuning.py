"""Chooses the tactics of a lowered program's layers on the current GPU, and compares whole networks with FP16."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from optpipe.backends.torch_layers.blocks import find_blocks, gather_operands, join_layers
from optpipe.backends.torch_layers.layouts import arrange_operands, make_arranger, wrap_layer
from optpipe.core import torch
from optpipe.core.card import InputSpec
from optpipe.core.errors import StageError
from optpipe.core.precision import Precision
from optpipe.kernels import steps
from optpipe.kernels.compilation import collect_kernels, compile_side_by_side
from optpipe.kernels.launches import split_block
from optpipe.kernels.operators import launch_step, register_operator
from optpipe.kernels.tactics import Operands, Tactic, text_from_tactics
from optpipe.kernels.tuner import (
    Choice,
    capture_launches,
    choose_tactic,
    launch_all_tactics,
    make_finite,
    time_launch,
    time_replay,
)
from optpipe.stats.ratio import Ratio, alternate, ratio_from_rounds

BATCHES = (1, 8, 64, 256)
"""Batch sizes to measure if the model's profile contains them, in addition to its `opt`."""


def draw_inputs(inputs: tuple[InputSpec, ...]) -> dict[int, tuple[Any, ...]]:
    """Seeded tensors on the GPU by the batch sizes to measure; integer tensors are ones."""
    first = inputs[0]
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(spec: InputSpec, size: int) -> Any:
        shape = (size, *spec.opt[1:])
        if spec.dtype.startswith("float"):
            return torch.randn(shape, device="cuda", generator=generator)
        return torch.ones(shape, device="cuda", dtype=getattr(torch, spec.dtype))

    sizes = {first.opt[0], *(size for size in BATCHES if first.min[0] <= size <= first.max[0])}
    return {size: tuple(draw(spec, size) for spec in inputs) for size in sorted(sizes)}


@dataclass(frozen=True, slots=True)
class Tuned:
    """What tuning found, by batch size."""

    choices: Mapping[int, Mapping[Any, Choice]]
    """The chosen tactic of each layer's node, with its time alone."""
    in_place: Mapping[str, Mapping[str, Any]]
    """What `settle_tactics` tried and changed."""


def tune_program(program: Any, drawn: Mapping[int, tuple[Any, ...]]) -> Tuned:
    """Sets the fastest tactics of every layer of a lowered GraphModule on the GPU, for each of `drawn`, inputs by batch size.

    Equal steps on equal shapes are measured once, then their nearest rivals in the whole program. Raises StageError if no tactic of
    a step runs.
    """
    from optpipe.backends.torch_layers.in_place import settle_tactics

    compile_tactics(program, drawn)
    choices = choose_tactics(program, drawn)
    return Tuned(choices, settle_tactics(program, drawn, choices))


def compile_tactics(program: Any, drawn: Mapping[int, tuple[Any, ...]]) -> None:
    with collect_kernels() as kernels:
        for inputs in drawn.values():
            run_layers(
                program,
                inputs,
                lambda _, step, given: launch_all_tactics(step, given),
                lambda _, block, given, __: launch_all_tactics(block, given),
            )
    compile_side_by_side([*kernels])


def choose_tactics(
    program: Any, drawn: Mapping[int, tuple[Any, ...]]
) -> dict[int, dict[Any, Choice]]:
    """Sets the tactics that are fastest alone; returns the choices of the layers' nodes by batch size."""
    chosen: dict[Any, dict[int, Tactic]] = {}
    measured: dict[int, dict[Any, Choice]] = {size: {} for size in drawn}
    joined: dict[tuple[tuple[Any, ...], steps.Block], dict[int, Choice]] = {}
    for size, inputs in drawn.items():

        def choose(node: Any, step: steps.Step, given: Operands, size: int = size) -> Any:
            given = make_finite(given)
            measured[size][node] = tactic, _ = choose_tactic(step, given)
            chosen.setdefault(node, {})[given.data.shape[0]] = tactic
            return launch_step(step, given, tactic)

        def compare(
            nodes: tuple[Any, ...],
            block: steps.Block,
            given: Operands,
            outputs: Sequence[Any],
            size: int = size,
        ) -> None:
            """Notes a block that gives its layers' numbers in less time."""
            with suppress(StageError):
                tactic, microseconds = choice = choose_tactic(block, given)
                parts = split_block(block, launch_step(block, given, tactic), given.data)
                same = all(
                    torch.equal(part, other) for part, other in zip(parts, outputs, strict=True)
                )
                if same and microseconds < sum(measured[size][node][1] for node in nodes):
                    joined.setdefault((nodes, block), {})[size] = choice

        run_layers(program, inputs, choose, compare)
    for (nodes, block), by_size in joined.items():
        if by_size.keys() == drawn.keys():
            new = join_layers(program, nodes, block)
            chosen[new] = {size: tactic for size, (tactic, _) in by_size.items()}
            for node in nodes:
                del chosen[node]
            for size, choices in measured.items():
                choices[new] = by_size[size]
                for node in nodes:
                    del choices[node]
    for node, tactics in chosen.items():
        node.update_arg(6, text_from_tactics(tactics))
    program.recompile()
    return measured


def run_layers(
    program: Any,
    inputs: Iterable[Any],
    compute: Callable[[Any, steps.Step, Operands], Any],
    compare: Callable[[tuple[Any, ...], steps.Block, Operands, Sequence[Any]], None] | None = None,
) -> Any:
    """Runs the GraphModule node by node, and optpipe's layers by `compute(node, step, operands)`.

    After the last layer of a residual block, `compare` gets its nodes, the step that joins them, its operands, and the outputs of all
    but the first.
    """
    layer = register_operator()
    blocks = {} if compare is None else find_blocks(program)
    last = {nodes[-1]: nodes for nodes in blocks}
    held: dict[Any, Any] = dict.fromkeys(node for nodes in blocks for node in nodes)

    class Layers(make_arranger()):  # type: ignore[misc]  # its base needs torch
        def run_node(self, n: Any) -> Any:
            if n.target is not layer:
                return super().run_node(n)
            given, added, constants, added_scale, inverse_scale, step, _ = arrange_operands(
                self, self.fetch_args_kwargs_from_env(n)[0]
            )
            operands = Operands(given, added, constants, added_scale, inverse_scale)
            output = compute(n, steps.step_from_text(step), operands)
            if n in held:
                held[n] = operands, output
            if compare is not None and (nodes := last.get(n)) is not None:
                layers, outputs = zip(*(held.pop(node) for node in nodes), strict=True)
                compare(nodes, blocks[nodes], gather_operands(layers), outputs[1:])
            return wrap_layer(output, step)

    with torch.inference_mode():
        return Layers(program).run(*inputs)


def measure_copies(program: Any, inputs: Iterable[Any]) -> list[dict[str, Any]]:
    """The tensors that a GraphModule copies into another layout, with their microseconds on the GPU, the longest first."""
    arranger = make_arranger()(program)
    with torch.inference_mode():
        arranger.run(*inputs)
        measured = []
        for copy in arranger.copies:
            tensor = torch.empty(copy.shape, dtype=copy.dtype, device="cuda")
            launch = partial(tensor.contiguous, memory_format=torch.channels_last)
            microseconds = round(time_launch(launch), 1)
            measured.append({"layer": copy.node, "shape": [*copy.shape], "us": microseconds})
    return sorted(measured, key=lambda copy: -copy["us"])


def explain_copies(copies: Sequence[Mapping[str, Any]]) -> str:
    """A remark on `measure_copies`, which found some."""
    total = sum(copy["us"] for copy in copies)
    longest = copies[0]
    shape = "x".join(map(str, longest["shape"]))
    return (
        f"{len(copies)} tensors are copied into another layout, in {total:.0f} us alone; "
        f"the longest, {shape} before {longest['layer']}, takes {longest['us']:.0f} us"
    )


def summarize_choices(
    choices: Mapping[int, Mapping[Any, Choice]],
) -> Mapping[str, Mapping[str, float]]:
    """Microseconds of each kernel alone, the longest first, by batch size."""
    sums_by_size: dict[str, Counter[str]] = {str(size): Counter() for size in choices}
    for size, chosen in choices.items():
        for tactic, microseconds in chosen.values():
            sums_by_size[str(size)][tactic.kernel] += microseconds  # type: ignore[assignment]
    return {
        size: {kernel: round(microseconds, 1) for kernel, microseconds in sums.most_common()}
        for size, sums in sums_by_size.items()
    }


ROUNDS = 10
PROGRAM_LAUNCHES = 4
"""Launches of the whole network in one CUDA graph."""
LITTLE = 1.3  # times the speed of FP16: if INT8 gains less, the build says what takes its time


def is_faster(speed: Ratio) -> bool:
    return speed.ci[0] > 1


def compare_in_turns(
    low: Callable[[], None],
    fp16: Callable[[], None],
    clock: Callable[..., float],
    confidence: float = 0.95,
) -> Ratio:
    """The ratio of FP16's time to that of `low` over ROUNDS rounds in random order, after one round of warm-up."""
    subjects = {"low": partial(clock, low), "fp16": partial(clock, fp16)}
    for call in subjects.values():
        call()
    times = alternate(subjects, ROUNDS, 0)
    return ratio_from_rounds(times["low"], times["fp16"], confidence)


def compare_calls(
    low: Callable[..., Any], half: Callable[..., Any], inputs: Mapping[int, tuple[Any, ...]]
) -> dict[int, Ratio]:
    """The ratio of the time of `half` to that of `low`, by batch size, on torch tensors on the GPU: above 1, `low` is faster."""
    ratios = {}
    for size, drawn in inputs.items():
        with torch.inference_mode():
            ours = capture_launches(lambda drawn=drawn: low(*drawn), PROGRAM_LAUNCHES)  # type: ignore[misc]
            fp16 = capture_launches(lambda drawn=drawn: half(*drawn), PROGRAM_LAUNCHES)  # type: ignore[misc]
        ratios[size] = compare_in_turns(ours, fp16, time_replay)
    return ratios


def explain_speeds(
    speeds: Mapping[int, Ratio], precision: Precision, kernels: Any
) -> Iterator[str]:
    """A remark if a precision is not shown to be faster than FP16, and which kernels of `summarize_choices` take INT8's time."""
    if slow := {size: ratio for size, ratio in speeds.items() if not is_faster(ratio)}:
        said = ", ".join(
            f"{ratio} times the speed of fp16 at batch {size}" for size, ratio in slow.items()
        )
        yield f"{precision.upper()} is not shown to be faster than fp16 on this GPU: {said}; fp16 loses no accuracy to quantization"
    for size, ratio in speeds.items() if precision is Precision.INT8 else ():
        if ratio.value < LITTLE and (times := kernels.get(str(size), {})):
            longest = ", ".join(
                f"{name} {time / sum(times.values()):.0%}" for name, time in [*times.items()][:3]
            )
            yield f"INT8 is {ratio} times the speed of fp16 at batch {size}; its layers' time by kernel: {longest}"
