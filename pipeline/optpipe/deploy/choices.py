"""Chooses a server's settings by the measurements in a dossier and the limits of its policy.

Batching follows Triton's description (docs/user_guide/batcher.md): a request waits at most the queue delay for others, then
its batch waits for the running one, then it runs. So with a latency limit L and the largest batch's latency t,
delay + 2·t ≤ L keeps a lone instance inside the limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from optpipe.core.measurement import Options, Scenario
from optpipe.core.quantity import Dimension, format_quantity
from optpipe.deploy.records import Choice
from optpipe.deploy.signed_build import SignedBuild
from optpipe.measure.groups import ProcessGroup, group_processes
from optpipe.measure.search import MIN_SWEEP_GAIN
from optpipe.signoff.policy import Criterion

NOT_MEASURED = "no VALID single-stream measurement"


@dataclass(frozen=True, slots=True)
class Settings:
    max_batch_size: int
    """0 for a model without a batch axis, or with a fixed batch."""
    preferred: tuple[int, ...]
    delay_us: int
    instances: int
    options: Options
    """Runtime options of the measurements that the choices rest on."""
    choices: tuple[Choice, ...]
    batching: bool = True


@dataclass(frozen=True, slots=True)
class _Point:
    """A measured batch size, with the upper bound of its latency."""

    size: int
    latency_ns: float
    rate: float
    sample: str
    source: str


def choose_settings(build: SignedBuild) -> Settings:
    """The longest measured sequence length decides, within the strictest latency limit that the policy sets for it."""
    every = group_processes(build.measured)
    valid = [group for group in every if group.valid]
    length = max((group.load.length or 0 for group in valid), default=0) or None
    groups = [group for group in valid if group.load.length == length]
    options = dict(every[-1].newest.measurement.subject.options) if every else dict(build.artifact.info.options)
    limits = [
        (each, float(each.threshold))
        for each in build.policy.criteria
        if each.section == "latency" and each.where.length in (None, length)
    ]
    limit = min(limits, key=lambda each: each[1], default=None)
    low, _, high = build.card.batch_range
    instances, why_instances = _choose_instances(groups, limit)
    choice = Choice("instance_group.count", str(instances), why_instances)
    batched = {each.batch for each in build.card.inputs} | {each.batch for each in build.card.outputs} == {0}
    if not batched or low > 1:
        why = "the model has no batch axis" if high == 1 else f"the build takes batches of {low} to {high} only"
        fixed = Choice("max_batch_size", "0", f"{why}: shapes are written whole, and no batches are formed")
        return Settings(0, (), 0, instances, options, (fixed, choice))
    points = _list_points(groups, limit[0].metric if limit else None)
    size, why = _choose_max_batch(points, limit, high)
    known = [each for each in points if each.size <= size]
    preferred, why_preferred = _choose_preferred(known)
    delay_us, why_delay = _choose_delay(known, limit)
    source = f"run {every[-1].newest.run}" if every else "the build's own: nothing was measured"
    choices = (
        Choice("max_batch_size", str(size), why),
        Choice("dynamic_batching.preferred_batch_size", str(list(preferred)), why_preferred),
        Choice("dynamic_batching.max_queue_delay_microseconds", str(delay_us), why_delay),
        choice,
        Choice("runtime options", format_options(options), source),
    )
    return Settings(size, preferred, delay_us, instances, options, choices)


def format_options(options: Options) -> str:
    """`threads=2`, or `none`."""
    return ", ".join(f"{name}={value}" for name, value in sorted(options.items())) or "none"


def leave_out_batching(settings: Settings) -> Settings:
    """The settings for a server that does not join requests."""
    kept = tuple(each for each in settings.choices if not each.setting.startswith("dynamic_batching"))
    off = Choice("dynamic_batching", "off", "asked for with --no-batching")
    return replace(settings, preferred=(), delay_us=0, batching=False, choices=(*kept, off))


def _list_points(groups: Sequence[ProcessGroup], limited: str | None) -> list[_Point]:
    """Single-stream measurements, without waits in a queue, by batch size; of `limited`, otherwise of p99 or p50."""
    found = {}
    for group in groups:
        latency = group.estimate(limited or "p99", 0.95) or (None if limited else group.estimate("p50", 0.95))
        rate = group.estimate("throughput", 0.95)
        if group.load.scenario is Scenario.SINGLE_STREAM and latency is not None and rate is not None:
            text = f"run {group.newest.run}, {group.load}, {group.count_processes()} processes"
            found[group.load.batch_size] = _Point(
                group.load.batch_size, latency.bounds[1], rate.value, group.load.sample, text
            )
    return [found[size] for size in sorted(found)]


def _choose_max_batch(points: Sequence[_Point], limit: tuple[Criterion, float] | None, high: int) -> tuple[int, str]:
    if not points and limit:
        return 1, f"{NOT_MEASURED} of {limit[0].metric}, which the policy limits: no batches are formed"
    if not points:
        return high, f"{NOT_MEASURED}: the largest batch of the build's profile"
    limit_ns = limit[1] if limit else None
    inside = [each for each in points if limit_ns is None or each.latency_ns <= limit_ns]
    chosen = (inside or points[:1])[-1]
    latency = format_quantity(chosen.latency_ns, Dimension.TIME)
    if limit_ns is None:
        return chosen.size, f"the largest batch that was measured ({latency}; {chosen.source})"
    text = format_quantity(limit_ns, Dimension.TIME)
    if not inside:
        return chosen.size, f"the smallest measured; none keeps the limit of {text} ({latency}; {chosen.source})"
    return chosen.size, f"the largest measured within the limit of {text} ({latency}; {chosen.source})"


def _choose_preferred(points: Sequence[_Point]) -> tuple[tuple[int, ...], str]:
    """The sizes with more throughput than every smaller one, by the gain that ends a sweep."""
    best, chosen = 0.0, []
    for each in points:
        if each.size > 1 and each.rate >= best * MIN_SWEEP_GAIN:
            chosen.append(each)
        best = max(best, each.rate)
    if not points:
        return (), f"{NOT_MEASURED}: batches are formed as requests wait"
    if not chosen:
        return (), "no measured batch has more throughput than a smaller one: batches are formed as requests wait"
    rates = ", ".join(f"{each.size}: {each.rate:,.0f} {each.sample}s/s" for each in chosen)
    return tuple(
        each.size for each in chosen
    ), f"at least 5% more throughput than any smaller ({rates}; {chosen[-1].source})"


def _choose_delay(known: Sequence[_Point], limit: tuple[Criterion, float] | None) -> tuple[int, str]:
    if limit is None or not known:
        why = "the policy has no latency limit" if limit is None else "no single-stream latency was measured"
        return 0, f"{why}: no request waits for others"
    criterion, limit_ns = limit
    at = known[-1]
    room = limit_ns - 2 * at.latency_ns
    delay_us = int(max(0.0, min(room, at.latency_ns)) // 1000)
    latency = format_quantity(at.latency_ns, Dimension.TIME)
    return delay_us, (
        f"{criterion.metric} {criterion.limit}, less twice the {latency} of batch {at.size}, and no more than one of them "
        f"({at.source})"
    )


def _choose_instances(groups: Sequence[ProcessGroup], limit: tuple[Criterion, float] | None) -> tuple[int, str]:
    """The streams with clearly more throughput than one, if they meet the latency limit."""
    rates = [(group, rate.value) for group in groups if (rate := group.estimate("throughput", 0.95)) is not None]
    alone = max((rate for group, rate in rates if group.load.streams == 1), default=0.0)
    several = [each for each in rates if each[0].load.streams > 1]
    if not several:
        return 1, "several streams were not measured"
    best, best_rate = max(several, key=lambda each: each[1])
    latency = best.estimate(limit[0].metric, 0.95) if limit else None
    shown = f"run {best.newest.run}, {best.load}: {best_rate:,.0f} {best.load.sample}s/s; one stream: {alone:,.0f}"
    if best_rate < alone * MIN_SWEEP_GAIN or (limit and (latency is None or latency.bounds[1] > limit[1])):
        return 1, f"several streams are not faster within the limit ({shown})"
    return best.load.streams, shown
