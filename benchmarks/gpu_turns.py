"""Builds and torch.compile in one process, in turns in an order drawn for each round; `gpu_auto.py` and `gpu_against_compile.py` use it."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from optpipe.workspace.store import Store

ROUNDS, TIMED_S, WARM_UP_S = 10, 0.12, 0.2
LONGEST_KERNELS = 12


def load_artifact(artifact: str, size: int, workspace: Path, details: Any = None) -> Any:
    """Its binding at a batch size; `details` in place of its own."""
    from optpipe.backends.registry import BACKENDS
    from optpipe.models.artifacts.lookup import find_artifacts

    entry = find_artifacts(artifact, Store(workspace))[0].entry
    info = entry.info if details is None else replace(entry.info, details=details)
    return (
        BACKENDS[info.backend]
        .load(entry.path, info, {})
        .bind(draw_arrays(artifact, size, workspace))
    )


def draw_arrays(artifact: str, size: int, workspace: Path) -> dict[str, Any]:
    """A batch by input, in their order, from the samples that its model was verified on."""
    from optpipe.models.artifacts.lookup import find_artifacts
    from optpipe.models.export.exported import reference_from_file
    from optpipe.models.inputs.samples import vary_inputs
    from optpipe.workspace.file_names import REFERENCE

    found = find_artifacts(artifact, Store(workspace))[0]
    assert found.reference is not None
    rows = dict(reference_from_file(found.reference.file(REFERENCE)).inputs)
    arrays = vary_inputs(rows, size, 0, frozenset())
    return {each.name: arrays[each.name][:size] for each in found.card.inputs}


def compile_source(
    source: str, device: str, mode: str, weights: str
) -> Callable[[Iterable[Any]], Callable[[], None]]:
    """torch.compile's code for `source`, FP16 on a GPU: what binds it to arrays, as a function that enqueues one inference.

    The first inference compiles; arrays of the same shapes find its code again.
    """
    import torch

    from optpipe.core.entries import weights_from_text
    from optpipe.kernels.compilation import set_assembler
    from optpipe.models.sources.resolve import source_from_text

    set_assembler()
    dtype = torch.float16 if device == "cuda" else torch.float32
    module = source_from_text(source, {}).load(weights_from_text(weights, 0)).module
    module = module.to(device, dtype).to(memory_format=torch.channels_last).eval()
    torch.compiler.reset()  # else a second batch size would be compiled for all sizes
    compiled = torch.compile(module, mode=mode if device == "cuda" else "default", dynamic=False)
    half = {"dtype": dtype}

    def bind(arrays: Iterable[Any]) -> Callable[[], None]:
        inputs = [
            each.to(**half, memory_format=torch.channels_last)
            if each.dim() == 4
            else each.to(**half)
            if each.is_floating_point()
            else each
            for each in (torch.from_numpy(array).to(device) for array in arrays)
        ]

        def launch() -> None:
            with torch.inference_mode():
                torch.compiler.cudagraph_mark_step_begin()
                compiled(*inputs)

        return launch

    return bind


def time_in_turns(sides: Sequence[Callable[[], None]], device: str) -> list[list[float]]:
    """ms per inference of each round, around as many launches as take TIMED_S: by CUDA events, on a CPU by its clock."""
    import torch

    if device == "cpu":
        return _take_turns(sides, _time_on_cpu, lambda: None)
    with torch.cuda.stream(torch.cuda.Stream()):
        return _take_turns(sides, _time_on_gpu, torch.cuda.synchronize)


def _take_turns(sides: Sequence[Callable[[], None]], clock: Any, wait: Any) -> list[list[float]]:
    order, counts = Random(0), []
    times: list[list[float]] = [[] for _ in sides]
    for each in sides:
        each()
        wait()
        begun, count = time.monotonic(), 0
        while time.monotonic() - begun < WARM_UP_S:
            each()
            wait()
            count += 1
        counts.append(max(5, int(count * TIMED_S / WARM_UP_S)))
    for _ in range(ROUNDS):
        for side in order.sample(range(len(sides)), len(sides)):
            times[side].append(clock(sides[side], counts[side]) / counts[side])
    return times


def list_longest_kernels(launch: Callable[[], None]) -> list[tuple[str, float, int]]:
    """Name, µs and launches in one inference of the kernels that take most."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        launch()
        torch.cuda.synchronize()
    found = sorted(recorded.key_averages(), key=lambda each: -each.self_device_time_total)
    return [
        (each.key[:100], each.self_device_time_total, each.count)
        for each in found[:LONGEST_KERNELS]
    ]


def _time_on_gpu(launch: Any, count: int) -> float:
    import torch

    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(count):
        launch()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last))


def _time_on_cpu(launch: Any, count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        launch()
    return 1e3 * (time.perf_counter() - begun)
