"""Compiles all tactics of each step, measures them on the current GPU, chooses the fastest, and compares whole networks with FP16.

Triton compiles kernels one after the other, in the process that launches them. `triton.knobs.runtime.jit_cache_hook` sees each
kernel before it is compiled and can skip it; kernels that another process compiled are in Triton's cache on disk
(triton/runtime/jit.py). So this module is also the program of processes that compile in parallel.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from optpipe.backends.torch_layers import steps
from optpipe.backends.torch_layers.blocks import find_blocks, gather_operands, join_layers
from optpipe.backends.torch_layers.launches import split_block
from optpipe.backends.torch_layers.layouts import arrange_operands, make_arranger, wrap_layer
from optpipe.backends.torch_layers.operators import launch_step, register_operator
from optpipe.backends.torch_layers.tactics import (
    Operands,
    Tactic,
    list_tactics,
    tactics_from_text,
    text_from_tactics,
)
from optpipe.core import torch
from optpipe.core.card import InputSpec
from optpipe.core.errors import StageError
from optpipe.core.files import hash_value
from optpipe.core.precision import Precision
from optpipe.core.process import end_with_parent, make_python_command, open_process_group
from optpipe.stats.ratio import Ratio, alternate, ratio_from_rounds
from optpipe.workspace.environment import get_gpu_name, get_package_version

LAUNCHES = 20
"""Launches in one CUDA graph, so that a replay takes longer than its launch."""
REPLAYS = 5
BATCHES = (1, 8, 64, 256)
"""Batch sizes to measure if the model's profile contains them, in addition to its `opt`."""
LEAST_KERNELS = 4
"""With fewer kernels, starting processes takes longer."""
MOST_PROCESSES = 16
"""The most processes; each takes up to 0.6 GB."""
Choice = tuple[Tactic, float]
"""The fastest tactic of a step for one shape, and its microseconds."""
CHOSEN: dict[Any, Choice] = {}
"""By step and shapes. The choices also lie in Triton's cache, for later builds of any network."""


def draw_inputs(inputs: tuple[InputSpec, ...]) -> dict[int, tuple[Any, ...]]:
    """Seeded tensors on the GPU by the batch sizes to measure; integer tensors are ones."""
    first = inputs[0]
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(each: InputSpec, size: int) -> Any:
        shape = (size, *each.opt[1:])
        if each.dtype.startswith("float"):
            return torch.randn(shape, device="cuda", generator=generator)
        return torch.ones(shape, device="cuda", dtype=getattr(torch, each.dtype))

    sizes = {first.opt[0], *(size for size in BATCHES if first.min[0] <= size <= first.max[0])}
    return {size: tuple(draw(each, size) for each in inputs) for size in sorted(sizes)}


def tune_program(
    program: Any, drawn: Mapping[int, tuple[Any, ...]]
) -> dict[int, tuple[Choice, ...]]:
    """Sets the fastest tactics of every layer of a lowered GraphModule on the GPU, for each of `drawn`, inputs by batch size.

    Equal steps on equal shapes are measured once. Raises StageError if no tactic of a step runs. Returns the layers' choices by
    batch size.
    """
    compile_tactics(program, drawn)
    return choose_tactics(program, drawn)


def compile_tactics(program: Any, drawn: Mapping[int, tuple[Any, ...]]) -> None:
    with collect_kernels() as kernels:
        for inputs in drawn.values():
            run_layers(
                program,
                inputs,
                lambda _, step, given: _launch_all(step, given),
                lambda _, block, given, __: _launch_all(block, given),
            )
    compile_side_by_side([*kernels])


def choose_tactics(
    program: Any, drawn: Mapping[int, tuple[Any, ...]]
) -> dict[int, tuple[Choice, ...]]:
    chosen: dict[Any, dict[int, Tactic]] = {}
    measured: dict[int, dict[Any, Choice]] = {size: {} for size in drawn}
    joined: dict[tuple[tuple[Any, ...], steps.Block], dict[int, Choice]] = {}
    for size, inputs in drawn.items():

        def choose(node: Any, step: steps.Step, given: Operands, size: int = size) -> Any:
            given = make_finite(given)
            measured[size][node] = tactic, _ = _choose(step, given)
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
                tactic, microseconds = choice = _choose(block, given)
                parts = split_block(block, launch_step(block, given, tactic), given.data)
                same = all(
                    torch.equal(one, other) for one, other in zip(parts, outputs, strict=True)
                )
                if same and microseconds < sum(measured[size][each][1] for each in nodes):
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
    return {size: tuple(choices.values()) for size, choices in measured.items()}


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


def _choose(step: steps.Step, given: Operands) -> Choice:
    key = _describe(step, given)
    if _recall_choice(key):
        with suppress(Exception):  # a driver may refuse what an older one ran
            launch_step(step, given, CHOSEN[key][0])
            return CHOSEN[key]
    tactic, microseconds = CHOSEN[key] = _find_fastest(step, given)
    with suppress(OSError):  # a read-only cache only costs time
        _open_note(key).put(f"{text_from_tactics({0: tactic})} {microseconds}", NOTE, binary=False)
    return CHOSEN[key]


NOTE = "tactic.txt"


def _recall_choice(key: Any) -> bool:
    """Whether the fastest tactic is known, from this process or from Triton's cache."""
    if key not in CHOSEN and (note := _open_note(key).get_file(NOTE)) is not None:
        text, _, microseconds = Path(note).read_text(encoding="utf-8").rpartition(" ")
        CHOSEN[key] = tactics_from_text(text)[0], float(microseconds)
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
        [each.read_text(encoding="utf-8") for each in sorted(Path(__file__).parent.glob("*.py"))]
    )


def run_layers(
    program: Any,
    inputs: Iterable[Any],
    compute: Callable[[Any, steps.Step, Operands], Any],
    compare: Callable[[tuple[Any, ...], steps.Block, Operands, Sequence[Any]], None] = lambda *_: (
        None
    ),
) -> Any:
    """Runs the GraphModule node by node, and optpipe's layers by `compute(node, step, operands)`.

    After the last layer of a residual block, `compare` gets its nodes, the step that joins them, its operands, and the outputs of all
    but the first.
    """
    layer = register_operator()
    blocks = find_blocks(program)
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
            if (nodes := last.get(n)) is not None:
                layers, outputs = zip(*(held.pop(each) for each in nodes), strict=True)
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
    return sorted(measured, key=lambda each: -each["us"])


def explain_copies(copies: Sequence[Mapping[str, Any]]) -> str:
    """A remark on `measure_copies`, which found some."""
    total = sum(each["us"] for each in copies)
    longest = copies[0]
    shape = "x".join(map(str, longest["shape"]))
    return (
        f"{len(copies)} tensors are copied into another layout, in {total:.0f} us alone; "
        f"the longest, {shape} before {longest['layer']}, takes {longest['us']:.0f} us"
    )


def summarize_choices(
    measured: Mapping[int, tuple[Choice, ...]],
) -> Mapping[str, Mapping[str, float]]:
    """Microseconds of each kernel, the longest first, by batch size."""
    found: dict[str, Counter[str]] = {str(size): Counter() for size in measured}
    for size, chosen in measured.items():
        for tactic, microseconds in chosen:
            found[str(size)][tactic.kernel] += microseconds  # type: ignore[assignment]
    return {
        size: {kernel: round(each, 1) for kernel, each in sums.most_common()}
        for size, sums in found.items()
    }


def _describe(step: steps.Step, given: Operands) -> Any:
    return step, *(
        (each.shape, each.stride(), each.dtype)
        for each in (given.data, given.added)
        if each is not None
    )


def _launch_all(step: steps.Step, given: Operands) -> Any:
    """Launches all tactics of a step so that their kernels are collected; returns zeros as its output."""
    for tactic in () if _recall_choice(_describe(step, given)) else list_tactics(step, given.data):
        with suppress(Exception):  # timing reports the failure
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
                refused.append(f"{tactic}: gives other numbers than the first kernel")
                continue
            timed.append((time_launch(partial(launch_step, step, given, tactic)), tactic))
        except Exception as error:  # noqa: BLE001 - Triton and the driver raise many types
            refused.append(f"{tactic}: {str(error).splitlines()[0][:120]}")
    if not timed:
        why = refused[0] if refused else "none was tried"
        raise StageError(f"no kernel runs {steps.text_from_step(step)} on this GPU: {why}")
    microseconds, tactic = min(timed, key=lambda each: each[0])
    return tactic, microseconds


def _agree(step: steps.Step, output: Any, first: Any) -> bool:
    """Whether two kernels give the same numbers, to the rounding of FP16, wherever the first's are finite."""
    if not step.floating:
        return bool(torch.equal(output, first))
    expected, found = first.float(), output.float()
    known = expected.isfinite()
    expected, found = expected[known], found[known]
    near = 1e-2 * float(expected.abs().max()) if step.half and expected.numel() else 1.0
    return bool(torch.allclose(found, expected, rtol=1e-2, atol=near))


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


ROUNDS = 10
PROGRAM_LAUNCHES = 4
"""Launches of the whole network in one CUDA graph."""
LITTLE = 1.3  # times the speed of FP16: if INT8 gains less, the build says what takes its time


def is_faster(speed: Ratio) -> bool:
    return speed.ci[0] > 1


def compare_in_turns(
    low: Callable[[], None], fp16: Callable[[], None], clock: Callable[..., float]
) -> Ratio:
    """The ratio of FP16's time to that of `low` over ROUNDS rounds in random order, after one round of warm-up."""
    subjects = {"low": partial(clock, low), "fp16": partial(clock, fp16)}
    for each in subjects.values():
        each()
    times = alternate(subjects, ROUNDS, 0)
    return ratio_from_rounds(times["low"], times["fp16"])


def compare_calls(
    low: Callable[..., Any], half: Callable[..., Any], inputs: Mapping[int, tuple[Any, ...]]
) -> dict[int, Ratio]:
    """The ratio of the time of `half` to that of `low`, by batch size, on torch tensors on the GPU: above 1, `low` is faster."""
    found = {}
    for size, drawn in inputs.items():
        with torch.inference_mode():
            ours = capture_launches(lambda drawn=drawn: low(*drawn), PROGRAM_LAUNCHES)  # type: ignore[misc]
            fp16 = capture_launches(lambda drawn=drawn: half(*drawn), PROGRAM_LAUNCHES)  # type: ignore[misc]
        found[size] = compare_in_turns(ours, fp16, time_replay)
    return found


def explain_speeds(
    speeds: Mapping[int, Ratio], precision: Precision, kernels: Any
) -> Iterator[str]:
    """A remark if a precision is not shown to be faster than FP16, and which kernels of `summarize_choices` take INT8's time."""
    if slow := {size: each for size, each in speeds.items() if not is_faster(each)}:
        said = ", ".join(
            f"{each} times the speed of fp16 at batch {size}" for size, each in slow.items()
        )
        yield f"{precision.upper()} is not shown to be faster than fp16 on this GPU: {said}; fp16 loses no accuracy to quantization"
    for size, each in speeds.items() if precision is Precision.INT8 else ():
        if each.value < LITTLE and (times := kernels.get(str(size), {})):
            longest = ", ".join(
                f"{name} {time / sum(times.values()):.0%}" for name, time in [*times.items()][:3]
            )
            yield f"INT8 is {each} times the speed of fp16 at batch {size}; its layers' time by kernel: {longest}"


@contextmanager
def collect_kernels() -> "Iterator[dict[str, None]]":
    """Collects kernels that are not compiled yet instead of launching them, as JSON from Triton, without duplicates."""
    from triton import knobs

    found: dict[str, None] = {}

    def collect(*, compile: dict[str, Any], **_: Any) -> bool:
        found[compile["specialization_data"]] = None
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = collect
    try:
        yield found
    finally:
        knobs.runtime.jit_cache_hook = before


def compile_side_by_side(kernels: Sequence[str]) -> None:
    """Compiles kernels into Triton's cache for the current GPU; those that do not compile fail again when they are launched."""
    from triton.runtime import driver

    count = min(len(kernels), len(os.sched_getaffinity(0)), MOST_PROCESSES)
    if len(kernels) < LEAST_KERNELS or count < 2:
        return
    target = driver.active.get_current_target()
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        jobs = Path(scratch, "jobs.json")
        jobs.write_text(
            json.dumps({"target": vars(target), "kernels": list(kernels)}), encoding="utf-8"
        )
        processes = []
        for first in range(count):
            command = make_python_command(__name__, str(jobs), str(first), str(count))
            log = Path(scratch, f"{first}.log")
            processes.append(stack.enter_context(open_process_group(command, log, os.environ)))
        for process in processes:
            process.wait()


def compile_kernel(kernel: str, target: Any) -> Any:
    """Compiles JSON from `collect_kernels` without a GPU, as in Triton's `JITFunction.preload`."""
    import triton
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    job = json.loads(kernel)
    module, _, name = job["name"].rpartition(".")
    function = getattr(import_module(module), name)
    signature = {key: _freeze(value) for key, value in job["signature"].items()}
    constants = {
        tuple(key): value["constexpr"] if isinstance(value, dict) else value
        for key, value in zip(job["constant_keys"], job["constant_vals"], strict=True)
    }
    attributes = dict(zip(map(tuple, job["attrs_keys"]), job["attrs_vals"], strict=True))
    source = (GluonASTSource if function.is_gluon() else ASTSource)(
        function, signature, constants, attributes
    )
    options = {key: _freeze(value) for key, value in job["options"].items()}
    return triton.compile(source, target=target, options=options)


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value


def main() -> None:
    from triton.backends.compiler import GPUTarget

    end_with_parent()
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    target = GPUTarget(**jobs["target"])
    for kernel in jobs["kernels"][int(sys.argv[2]) :: int(sys.argv[3])]:
        try:
            compile_kernel(kernel, target)
        except Exception as error:  # noqa: BLE001 - Triton raises many types; timing reports the failure
            print(f"{type(error).__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
