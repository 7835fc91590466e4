"""A first look at builds in this process, which spares those a build or a race that cannot win one."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from statistics import median
from time import perf_counter
from typing import Any

from optpipe.backends.base import Backend, Binding, Device
from optpipe.backends.registry import BACKENDS
from optpipe.backends.torch_program import cast_module, make_example_inputs
from optpipe.build.records import BuiltArtifact
from optpipe.core import np, torch
from optpipe.core.card import ModelCard
from optpipe.core.precision import Precision

HOPELESS: dict[Device, float] = {"cuda": 1.25, "cpu": 4.0}
"""A build that takes this many times as long as the fastest, each for a moment in this process, is not raced.

On a CPU other work disturbs a moment more, so that only a clear lag counts.
"""
LAGGING = 2.0
"""A build of torch that is estimated to take this many times as long as the fastest on a CPU is not made."""
LOOKS = 3
"""How often a build that seems hopeless on a CPU is timed; the best time counts."""
LOOK_S = 0.3
"""How long each build is called."""


def measure_slowdowns(
    built: Sequence[BuiltArtifact],
    sizes: Sequence[int],
    card: ModelCard,
    times: dict[str, list[float]],
) -> dict[str, float]:
    """The time of each build over that of the fastest, in this process, at the batch size at which it does best.

    Builds in `times` are not timed again; the others are added to it. On a CPU those that seem hopeless are timed again, and the
    best time counts: threads of the build before, or other work, may have held the cores.
    """
    new = [build for build in built if build.entry.id not in times]
    for build in new:
        if (medians_s := _time_build(build, sizes, card)) is not None:
            times[build.entry.id] = medians_s

    for _ in range(LOOKS - 1):
        slowdowns = _compare_times(built, times)
        for build in new:
            id, device = build.entry.id, build.entry.info.device
            if device == "cpu" and slowdowns.get(id, 0.0) > HOPELESS[device]:
                again = _time_build(build, sizes, card) or times[id]
                times[id] = [min(pair) for pair in zip(times[id], again, strict=True)]
    return _compare_times(built, times)


def _time_build(build: BuiltArtifact, sizes: Sequence[int], card: ModelCard) -> list[float] | None:
    """Seconds at each batch size; None if it does not run here, of which a race tells why."""
    info = build.entry.info
    with (
        suppress(Exception),
        BACKENDS[info.backend].load(build.entry.path, info, {}) as session,
    ):
        medians_s = []
        for size in sizes:
            inputs = card.with_batch(size).inputs
            binding = session.bind({spec.name: np.ones(spec.opt, spec.dtype) for spec in inputs})
            medians_s.append(_time_launches(binding, session.device))
        return medians_s
    return None


def _compare_times(
    built: Sequence[BuiltArtifact], times: Mapping[str, list[float]]
) -> dict[str, float]:
    own = {build.entry.id: times[build.entry.id] for build in built if build.entry.id in times}
    least = [min(at_size) for at_size in zip(*own.values(), strict=True)]
    return {
        id: min(mine / best for mine, best in zip(medians_s, least, strict=True))
        for id, medians_s in own.items()
    }


def explain_hopeless(slowdowns: Mapping[str, float], device: Device) -> dict[str, str]:
    """Builds that cannot win, and why; in a race each would start several processes of many seconds."""
    return {
        id: f"{slowdown:.1f} times the time of the fastest in one process"
        for id, slowdown in slowdowns.items()
        if slowdown > HOPELESS[device]
    }


def rule_out_backend(
    backend: Backend, built: Sequence[BuiltArtifact], slowdowns: Mapping[str, float]
) -> str | None:
    """Why none of a backend's other builds can win, by its TF32 build in `built`; None if one may, or nothing was measured."""
    own = [
        slowdowns.get(build.entry.id, 0.0)
        for build in built
        if build.entry.info.backend == backend.name
    ]
    gain = backend.speed_bounds("cuda").gain_over_tf32
    if max(own, default=0.0) <= gain * HOPELESS["cuda"]:
        return None
    return (
        f"its tf32 build takes {max(own):.1f} times the time of the fastest build in one process, "
        f"and its others are at most {gain} times as fast as that one"
    )


def measure_gain(
    module: Callable[[], Any], card: ModelCard, precision: Precision, sizes: Sequence[int]
) -> float:
    """How many times as fast as in FP32 torch computes a module in `precision` on this CPU, without a compiler.

    `module` makes a new copy, since casting changes it. Of several batch sizes the one counts at which `precision` does best.
    Infinite where torch cannot compute it: its build tells why.
    """
    gains = []
    for size in sizes:
        inputs = make_example_inputs(card.with_batch(size).inputs, "cpu")
        wide, narrow = (
            partial(cast_module(kind, module(), "cpu"), *inputs)
            for kind in (Precision.FP32, precision)
        )
        try:
            with torch.no_grad():
                gains.append(_time_calls(wide) / _time_calls(narrow))
        except Exception:  # noqa: BLE001 - its build tells why
            return inf
    return max(gains)


def rule_out_precision(
    backend: Backend,
    precision: Precision,
    built: Sequence[BuiltArtifact],
    slowdowns: Mapping[str, float],
    gain: float,
) -> str | None:
    """Why a build of torch in `precision` cannot win on a CPU; None if it may, or if nothing was measured that could tell.

    It is taken to be `gain` times as fast as the backend's FP32 build in `built`. Without one, that build is taken to be at most
    the backend's `gain_over_eager` times as fast as the FP32 build of the eager backend. A CPU without arithmetic for a narrow
    type computes in FP32, and converts each value there and back.
    """
    wide = {
        build.entry.info.backend: slowdowns[build.entry.id]
        for build in built
        if build.entry.info.precision is Precision.FP32 and build.entry.id in slowdowns
    }
    eager = next(
        (name for name in wide if BACKENDS[name].speed_bounds("cuda").compiled_by == backend.name),
        "",
    )
    speedup = backend.speed_bounds("cpu").gain_over_eager
    if backend.name in wide:
        measured, speedup, assumed = backend.name, 1.0, ""
    elif eager and speedup < inf:
        measured = eager
        assumed = f", {backend.name} is taken to be at most {speedup:g} times as fast as that"
    else:
        return None
    if wide[measured] / speedup / gain <= LAGGING:
        return None

    behind = "is the fastest"
    if wide[measured] > 1:
        behind = f"takes {wide[measured]:.1f} times the time of the fastest"
    trial = f", and torch computes the model in {precision} {gain:.2g} times as fast as in fp32"
    return (
        f"the fp32 build of {measured} {behind} in one process{assumed}"
        f"{trial if precision is not Precision.FP32 else ''} on this CPU"
    )


def _time_launches(binding: Binding, device: Device) -> float:
    """Seconds of a launch, or on a GPU of ten, over LOOK_S."""
    if device == "cpu":
        return _time_calls(binding.launch)
    times_s: list[float] = []
    ends = perf_counter() + LOOK_S
    while perf_counter() < ends:
        begun = perf_counter()
        for _ in range(10):
            binding.launch()
        torch.cuda.synchronize()
        times_s.append(perf_counter() - begun)
    return median(times_s)


def _time_calls(call: Callable[[], object]) -> float:
    """The least time of several calls within LOOK_S, which other work on the CPU disturbs the least; two at the least."""
    call()
    times_s: list[float] = []
    ends = perf_counter() + LOOK_S
    while perf_counter() < ends or len(times_s) < 2:
        begun = perf_counter()
        call()
        times_s.append(perf_counter() - begun)
    return min(times_s)
