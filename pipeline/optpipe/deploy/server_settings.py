"""Chooses a server's settings by the measurements in the dossier and the limits of its policy.

Batching follows Triton's description (docs/user_guide/batcher.md): a request waits at most the queue delay for others, then its
batch waits for the running one, then it runs. So with a latency limit L and the largest batch's latency t, delay + 2·t ≤ L keeps a
lone instance inside the limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from optpipe.core.load import Scenario
from optpipe.core.measurement import Options
from optpipe.core.metrics.measured import P50, P99, THROUGHPUT
from optpipe.core.metrics.sections import LATENCY
from optpipe.core.quantity import Dimension, format_quantity
from optpipe.core.wording import Argument
from optpipe.deploy.records import (
    Choice,
)
from optpipe.deploy.signed_build import SignedBuild
from optpipe.measure.groups import ProcessGroup, group_processes
from optpipe.signoff.policy import Criterion

NOT_MEASURED = "no VALID single-stream measurement"
NO_INTERVAL = "its latency has no interval"
NONE_MEETS = "the smallest measured; none is shown to meet"


@dataclass(frozen=True, slots=True)
class Settings:
    max_batch_size: int
    """0 for a model without a batch axis, or with a fixed batch."""
    delay_us: int
    options: Options
    """Runtime options of the measurements that the choices rest on."""
    choices: tuple[Choice, ...]


def choose_settings(build: SignedBuild) -> Settings:
    """The longest measured sequence length decides, within the strictest latency limit that the policy sets for it."""
    every = group_processes(build.measured)
    valid = [group for group in every if group.valid]
    length = max((group.load.length or 0 for group in valid), default=0) or None
    groups = [group for group in valid if group.load.length == length]
    options = (
        dict(every[-1].newest.measurement.subject.options)
        if every
        else dict(build.artifact.info.options)
    )
    instances = Choice(
        "instance_group.count", "1", Argument("tune") + " measures more instances on the server"
    )
    low, _, high = build.card.batch_range
    axes = {spec.batch for spec in build.card.inputs} | {spec.batch for spec in build.card.outputs}
    batched = axes == {0}
    if not batched or low > 1:
        why = (
            "the model has no batch axis"
            if high == 1
            else f"the build takes batches of {low} to {high} only"
        )
        fixed = Choice(
            "max_batch_size", "0", f"{why}: shapes are written whole, and no batches are formed"
        )
        return Settings(max_batch_size=0, delay_us=0, options=options, choices=(fixed, instances))

    limit = _find_strictest_limit(build, length)
    points = _list_points(groups, limit.criterion.metric if limit else None)
    size, why_size = _choose_max_batch(points, limit, high)
    served = [point for point in points if point.batch_size <= size]
    delay_us, why_delay = _choose_delay(served, limit)
    source = f"run {every[-1].newest.run}" if every else "the build's own: nothing was measured"
    choices = (
        Choice("max_batch_size", str(size), why_size),
        Choice("dynamic_batching.max_queue_delay_microseconds", str(delay_us), why_delay),
        instances,
        Choice("runtime options", format_options(options), source),
    )
    return Settings(max_batch_size=size, delay_us=delay_us, options=options, choices=choices)


@dataclass(frozen=True, slots=True)
class _Limit:
    criterion: Criterion
    latency_ns: float


@dataclass(frozen=True, slots=True)
class _Point:
    """A single-stream measurement."""

    group: ProcessGroup
    latency_ns: float | None
    """The upper bound of its latency; None without an interval, so that it is within no limit."""

    @property
    def batch_size(self) -> int:
        return self.group.load.batch_size

    @property
    def latency(self) -> str:
        if self.latency_ns is None:
            return NO_INTERVAL
        return format_quantity(self.latency_ns, Dimension.TIME)

    @property
    def source(self) -> str:
        group = self.group
        return f"run {group.newest.run}, {group.load}, {group.count_processes()} processes"


def _find_strictest_limit(build: SignedBuild, length: int | None) -> _Limit | None:
    limits = [
        _Limit(criterion, float(criterion.threshold))
        for criterion in build.policy.criteria
        if criterion.is_of(LATENCY) and criterion.where.length in (None, length)
    ]
    return min(limits, key=lambda limit: limit.latency_ns, default=None)


def format_options(options: Options) -> str:
    """`threads=2`, or `none`."""
    return ", ".join(f"{name}={value}" for name, value in sorted(options.items())) or "none"


def _list_points(groups: Sequence[ProcessGroup], limited: str | None) -> list[_Point]:
    """Single-stream measurements, without waits in a queue, by batch size.

    The latency is `limited`, otherwise p99 or p50.
    """
    by_size: dict[int, _Point] = {}
    for group in groups:
        latency = group.estimate(limited or P99.name, 0.95)
        if latency is None and limited is None:
            latency = group.estimate(P50.name, 0.95)
        rate = group.estimate(THROUGHPUT.name, 0.95)
        alone = group.load.scenario is Scenario.SINGLE_STREAM
        if alone and latency is not None and rate is not None:
            by_size[group.load.batch_size] = _Point(group, latency.high)
    return [by_size[size] for size in sorted(by_size)]


def _choose_max_batch(points: Sequence[_Point], limit: _Limit | None, high: int) -> tuple[int, str]:
    """The largest batch that was measured within the limit, otherwise the smallest measured; and why.

    Without a measurement it is 1 under a limit, otherwise the largest of the build's profile, `high`.
    """
    if not points and limit is not None:
        metric = limit.criterion.metric
        return 1, f"{NOT_MEASURED} of {metric}, which the policy limits: no batches are formed"
    if not points:
        return high, f"{NOT_MEASURED}: the largest batch of the build's profile"
    if limit is None:
        chosen = points[-1]
        why = "the largest batch that was measured"
    else:
        within = [
            point
            for point in points
            if point.latency_ns is not None and point.latency_ns <= limit.latency_ns
        ]
        chosen = within[-1] if within else points[0]
        measured = "the largest measured within" if within else NONE_MEETS
        why = f"{measured} the limit of {format_quantity(limit.latency_ns, Dimension.TIME)}"
    return chosen.batch_size, f"{why} ({chosen.latency}; {chosen.source})"


def _choose_delay(points: Sequence[_Point], limit: _Limit | None) -> tuple[int, str]:
    """How long a request may wait for others, in µs, by the largest batch of `points`; and why."""
    if limit is None:
        return 0, "the policy has no latency limit: no request waits for others"
    if not points:
        return 0, "no single-stream latency was measured: no request waits for others"
    largest = points[-1]
    if largest.latency_ns is None:
        return 0, f"{NO_INTERVAL}: no request waits for others ({largest.source})"
    left_ns = limit.latency_ns - 2 * largest.latency_ns
    delay_us = int(max(0.0, min(left_ns, largest.latency_ns)) // 1000)
    stated = f"{limit.criterion.metric} {limit.criterion.limit}"
    left = f"{stated}, minus twice the {largest.latency} of batch {largest.batch_size}"
    return delay_us, f"{left}, but at most once that latency ({largest.source})"
