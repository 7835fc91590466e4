"""A first look at GPU builds in this process, which spares those a race that cannot win one."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import median
from time import perf_counter

from optpipe.backends.base import Backend, Binding
from optpipe.backends.registry import BACKENDS
from optpipe.build.records import BuiltArtifact
from optpipe.core import np, torch
from optpipe.core.card import ModelCard

HOPELESS = 1.25
"""A build that takes this many times as long as the fastest, each for a moment in this process, is not raced."""


def measure_slowdowns(
    built: Sequence[BuiltArtifact],
    sizes: Sequence[int],
    card: ModelCard,
    times: dict[str, list[float]],
) -> dict[str, float]:
    """The time of each build on a GPU over that of the fastest, in this process, at the batch size at which it does best.

    Builds in `times` are not timed again; the others are added to it.
    """
    for build in built:
        info = build.entry.info
        if build.entry.id in times:
            continue
        with (
            suppress(Exception),  # a race tells why
            BACKENDS[info.backend].load(build.entry.path, info, {}) as session,
        ):
            medians_s = []
            for size in sizes:
                inputs = (
                    card.with_profile((size, size, size), {}).inputs
                    if card.batched
                    else card.inputs
                )
                binding = session.bind(
                    {spec.name: np.ones(spec.opt, spec.dtype) for spec in inputs}
                )
                medians_s.append(_time_launches(binding))
            times[build.entry.id] = medians_s
    own = {build.entry.id: times[build.entry.id] for build in built if build.entry.id in times}
    least = [min(at_size) for at_size in zip(*own.values(), strict=True)]
    return {
        id: min(mine / best for mine, best in zip(medians_s, least, strict=True))
        for id, medians_s in own.items()
    }


def explain_hopeless(slowdowns: Mapping[str, float]) -> dict[str, str]:
    """Builds that cannot win, and why; in a race each would start several processes of many seconds."""
    return {
        id: f"{slowdown:.1f} times the time of the fastest in one process"
        for id, slowdown in slowdowns.items()
        if slowdown > HOPELESS
    }


def rule_out_backend(
    backend: Backend, built: Sequence[BuiltArtifact], slowdowns: Mapping[str, float]
) -> str | None:
    """Why none of a backend's other builds can win, by its TF32 build in `built`; None if one may, or nothing was measured."""
    own = [
        slowdowns.get(each.entry.id, 0.0)
        for each in built
        if each.entry.info.backend == backend.name
    ]
    gain = backend.speed_bounds("cuda").gain_over_tf32
    if max(own, default=0.0) <= gain * HOPELESS:
        return None
    return (
        f"its tf32 build takes {max(own):.1f} times the time of the fastest build in one process, "
        f"and its others are at most {gain} times as fast as that one"
    )


def _time_launches(binding: Binding) -> float:
    """The median time of ten launches over 0.3 s."""
    times_s: list[float] = []
    ends = perf_counter() + 0.3
    while perf_counter() < ends:
        begun = perf_counter()
        for _ in range(10):
            binding.launch()
        torch.cuda.synchronize()
        times_s.append(perf_counter() - begun)
    return median(times_s)
