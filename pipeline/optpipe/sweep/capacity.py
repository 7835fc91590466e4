"""How many GPUs a load needs within a latency limit, on paper: a queue simulated from measured service times, with batching.

Requests arrive at random (Poisson) and wait in one queue, first come first served. A free GPU takes all that wait, up to the largest
batch; where they are fewer than that it first waits until the oldest has waited for `delay_s`. A batch takes as long as was measured
for its size, between two measured sizes in proportion. Seeded: the same question has the same answer. What it leaves out, such as the
network and the scatter of service times, comes on top.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import ceil
from typing import TYPE_CHECKING

from optpipe.core.errors import BadInputError
from optpipe.stats.percentiles import count_queries_needed, count_transient_queries

if TYPE_CHECKING:
    import numpy as np

MOST_GPUS = 100_000
MOST_REQUESTS = 400_000
"""Of one simulation; at a higher utilization the percentile would need more, and the load is too high for the limit in practice."""


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """Seconds that a batch takes on one GPU, by batch size."""

    seconds: Mapping[int, float]

    def __post_init__(self) -> None:
        if not self.seconds or min(self.seconds) < 1 or min(self.seconds.values()) <= 0:
            raise BadInputError("service times need one or more batch sizes, all times above 0")

    @property
    def largest(self) -> int:
        """The largest batch that was measured."""
        return max(self.seconds)

    @property
    def highest_rate(self) -> float:
        """Requests per second of one GPU at its best batch size."""
        return max(size / time for size, time in self.seconds.items())

    def list_times(self) -> list[float]:
        """Seconds by batch size, from 0 (which is none) to the largest; sizes below the smallest measured take as long as it."""
        sizes = sorted(self.seconds)
        found = [0.0]
        for size in range(1, self.largest + 1):
            at = bisect_left(sizes, size)
            high = sizes[at]
            if at == 0 or high == size:
                found.append(self.seconds[high])
                continue
            low = sizes[at - 1]
            share = (size - low) / (high - low)
            found.append(self.seconds[low] + share * (self.seconds[high] - self.seconds[low]))
        return found


def simulate_queue(
    rate_per_s: float, gpus: int, service: ServiceTimes, *, requests: int, delay_s: float = 0.0, seed: int = 0
) -> "np.ndarray":
    """Latencies in seconds, shape `(requests,)`, in order of arrival. Raises BadInputError for a load that is none."""
    import numpy as np

    if not rate_per_s > 0 or gpus < 1 or requests < 1:
        raise BadInputError(
            f"a simulation needs a positive rate, GPUs and requests, got {rate_per_s:g}, {gpus}, {requests}"
        )
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate_per_s, requests)).tolist()
    times, most = service.list_times(), service.largest
    free = [0.0] * gpus
    heapify(free)
    latencies = [0.0] * requests
    at = 0
    while at < requests:
        begin = max(free[0], arrivals[at])
        full = at + most - 1
        if delay_s > 0 and (full >= requests or arrivals[full] > begin):
            limit = max(begin, arrivals[at] + delay_s)
            begin = min(limit, arrivals[full]) if full < requests else limit
        end = at + 1
        while end < requests and end - at < most and arrivals[end] <= begin:
            end += 1
        done = begin + times[end - at]
        heapreplace(free, done)
        for index in range(at, end):
            latencies[index] = done - arrivals[index]
        at = end
    return np.asarray(latencies)


@dataclass(frozen=True, slots=True)
class GpuNeed:
    """How many GPUs a load needs."""

    gpus: int | None
    """None where no number keeps the limit: one request alone takes longer."""
    utilization: float
    latency_s: float | None
    """The simulated percentile at that number."""


def count_gpus_needed(
    rate_per_s: float, service: ServiceTimes, percent: float, limit_s: float, *, delay_s: float = 0.0, seed: int = 0
) -> GpuNeed:
    """The smallest number of GPUs whose simulated percentile of latency keeps the limit."""
    if min(service.seconds.values()) > limit_s:
        return GpuNeed(None, 0.0, None)
    low = max(1, ceil(rate_per_s / service.highest_rate * (1 + 1e-9)))
    high = low
    found: dict[int, float] = {}

    def percentile(gpus: int) -> float:
        if gpus not in found:
            found[gpus] = _simulate_percentile(rate_per_s, gpus, service, percent, delay_s, seed)
        return found[gpus]

    while percentile(high) > limit_s:
        low, high = high + 1, high + max(1, high // 8)
        if high > MOST_GPUS:
            return GpuNeed(None, 0.0, None)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if percentile(middle) <= limit_s else (middle + 1, high)
    return GpuNeed(high, rate_per_s / (high * service.highest_rate), percentile(high))


def _simulate_percentile(
    rate_per_s: float, gpus: int, service: ServiceTimes, percent: float, delay_s: float, seed: int
) -> float:
    import numpy as np

    utilization = rate_per_s / (gpus * service.highest_rate)
    if utilization >= 1:
        return float("inf")
    left_out = count_transient_queries(utilization, percent) + gpus * service.largest
    requests = min(MOST_REQUESTS, left_out + count_queries_needed(utilization, percent))
    latencies = simulate_queue(rate_per_s, gpus, service, requests=requests, delay_s=delay_s, seed=seed)
    return float(np.percentile(latencies[min(left_out, requests // 2) :], percent, method="higher"))
