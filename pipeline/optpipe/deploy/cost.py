"""What the server adds to a request: the same requests at the same load, in-process and through gRPC, in rounds that alternate.

Arrivals are those of `optpipe.measure.worker.loops`: one request after the other, or a seeded Poisson process in an open loop, whose
latency counts from when a request was due.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from time import perf_counter_ns, sleep
from typing import TYPE_CHECKING

from optpipe.core.errors import StageError
from optpipe.core.estimate import Estimate
from optpipe.core.events import Listener
from optpipe.core.measurement import LatencySummary, LoadSpec, Mode, Scenario
from optpipe.deploy.check import CheckedDeployment
from optpipe.deploy.load_client import open_load_clients, prepare_requests, send_in_flight
from optpipe.deploy.records import ServerCost, ServerThroughput
from optpipe.deploy.session_process import Answer
from optpipe.deploy.triton_config import list_positions
from optpipe.models.inputs.rows import fill_sequences, read_length
from optpipe.signoff.policy import Policy
from optpipe.stats.means import mean_from_values
from optpipe.stats.percentiles import summary_from_ns

if TYPE_CHECKING:
    import numpy as np

    from optpipe.backends.base import Serving
    from optpipe.deploy.server import RunningServer

ROUNDS = 4
WARM_UP_REQUESTS = 20
WARM_UP_CALLS = 3
WARM_UP_S = 0.5
RATE_CONFIDENCE = 0.95
PERCENTS = (50.0, 90.0, 99.0)
MAX_IN_FLIGHT = 256
Lap = Callable[[LoadSpec, float, int], list[int]]
"""Puts a load on something for a number of seconds with a seed of its arrivals; the latencies in ns."""


@dataclass(frozen=True, slots=True)
class CostPlan:
    """The loads to measure at, and how long each."""

    loads: tuple[tuple[LoadSpec, str], ...]
    """With where they come from."""
    seconds: float = 4.0
    concurrency: tuple[int, ...] = (1, 8, 32)
    """How many requests are in flight where throughput is measured."""


def loads_from_policy(policy: Policy, largest: int) -> tuple[tuple[LoadSpec, str], ...]:
    """The loads that the policy limits latency at; one request at a time where it names none."""
    found = {}
    for each in policy.criteria:
        where = each.where
        if each.section == "latency" and (
            where.scenario is None or where.scenario in (Scenario.SINGLE_STREAM, Scenario.SERVER)
        ):
            size = min(where.batch_size or 1, max(largest, 1))
            scenario = where.scenario or Scenario.SINGLE_STREAM
            rate = None if where.rate is None else float(where.rate)
            found[LoadSpec(size, scenario, Mode.END_TO_END, rate_per_s=rate, length=where.length)] = (
                f"{each.name} of the policy"
            )
    return tuple(found.items()) or (
        (LoadSpec(1, mode=Mode.END_TO_END), "the policy has no latency limit: one request at a time"),
    )


def measure_costs(
    checked: CheckedDeployment,
    server: "RunningServer",
    plan: CostPlan,
    inputs: "Mapping[str, np.ndarray]",
    engine: Answer,
    listener: Listener,
) -> Iterator[ServerCost]:
    """The cost at each load of `plan` beside that of `engine` in-process, with `inputs` as rows to draw from."""
    record = checked.record
    for wanted, source in plan.loads:
        rows = dict(inputs)
        if wanted.length is not None:
            rows = fill_sequences(checked.card, rows, wanted.length, wanted.batch_size)
        load = replace(wanted, length=read_length(checked.card, rows))
        rows = _take_rows(rows, load.batch_size)
        with listener.step(f"server cost, {load}"):
            own = _lap_in_process(partial(engine, [rows]))
            served = _lap_served(server.grpc, record.engine, name_inputs(checked.serving, rows))
            cost = _alternate(own, served, load, source, plan.seconds)
        yield cost


def measure_throughputs(
    checked: CheckedDeployment,
    server: "RunningServer",
    plan: CostPlan,
    inputs: "Mapping[str, np.ndarray]",
    engine: Answer,
    largest: int,
    listener: Listener,
) -> Iterator[ServerThroughput]:
    """Requests/s of one sample each at every concurrency of `plan`; `largest` is the deployment's batch, 0 where it has none."""
    record = checked.record
    rows = _take_rows(inputs, 1) if largest else dict(inputs)
    with open_load_clients(server.grpc, record.engine, name_inputs(checked.serving, rows)) as clients:
        for count in plan.concurrency:
            joined = min(count, largest) or 1
            own: list[float] = []
            served: list[float] = []
            latencies: list[int] = []
            with listener.step(f"throughput, {count} in flight"):
                clients.run_lap(count, WARM_UP_S)
                for turn in range(ROUNDS):
                    for alone in (True, False) if turn % 2 else (False, True):
                        if alone:
                            own.append(joined * _count_calls(partial(engine, [rows] * joined), plan.seconds / ROUNDS))
                        else:
                            rate, found = clients.run_lap(count, plan.seconds / ROUNDS)
                            served.append(rate)
                            latencies += found
            yield ServerThroughput(count, _estimate(own), _estimate(served), _summarize(latencies))


def name_inputs(serving: "Serving | None", rows: "Mapping[str, np.ndarray]") -> "Mapping[str, np.ndarray]":
    """By the names that the server knows."""
    if serving is None or not serving.by_position:
        return rows
    return dict(zip(list_positions("INPUT", len(rows)), rows.values(), strict=True))


def _estimate(rates: Sequence[float]) -> Estimate:
    mean = mean_from_values(rates)
    assert mean is not None
    low, high = mean.interval(RATE_CONFIDENCE)
    return Estimate(mean.value, low, high, f"{RATE_CONFIDENCE:.0%}, over {ROUNDS} laps")


def _count_calls(call: Callable[[], object], seconds: float) -> float:
    """Calls per second."""
    for _ in range(WARM_UP_CALLS):
        call()
    started, count = perf_counter_ns(), 0
    while (now := perf_counter_ns()) - started < seconds * 1e9:
        call()
        count += 1
    return count / (now - started) * 1e9


def _take_rows(inputs: "Mapping[str, np.ndarray]", size: int) -> "dict[str, np.ndarray]":
    import numpy as np

    return {name: np.resize(array, (size, *array.shape[1:])) for name, array in inputs.items()}


def _alternate(own: Lap, served: Lap, load: LoadSpec, source: str, seconds: float) -> ServerCost:
    each = seconds / ROUNDS
    before: list[int] = []
    after: list[int] = []
    for turn in range(ROUNDS):
        for lap, kept in ((own, before), (served, after)) if turn % 2 else ((served, after), (own, before)):
            kept += lap(load, each, turn)
    alone, through = _summarize(before), _summarize(after)
    added = through.mean - alone.mean
    return ServerCost(str(replace(load)), source, alone, through, added)


def _summarize(latencies: Sequence[int]) -> LatencySummary:
    import numpy as np

    if not latencies:
        raise StageError("no request was answered in the time given; increase --seconds")
    return summary_from_ns(np.asarray(latencies), PERCENTS)


def _lap_in_process(call: Callable[[], object]) -> Lap:
    def lap(load: LoadSpec, seconds: float, seed: int) -> list[int]:
        for _ in range(WARM_UP_REQUESTS):
            call()
        found = []
        for due in _arrivals(load, seconds, seed):
            call()
            found.append(perf_counter_ns() - due)
        return found

    return lap


def _arrivals(load: LoadSpec, seconds: float, seed: int) -> Iterator[int]:
    """When each request is due: now in a closed loop, else by a Poisson process; waits until then."""
    gaps, started = Random(f"arrivals {seed}"), perf_counter_ns()
    due = started
    while due - started < seconds * 1e9:
        if load.scenario is Scenario.SERVER and load.rate_per_s:
            due += round(gaps.expovariate(load.rate_per_s) * 1e9)
            while (left := due - perf_counter_ns()) > 0:
                sleep(left / 1e9 if left > 200_000 else 0)
        else:
            due = perf_counter_ns()
        yield due


def _lap_served(url: str, model: str, rows: "Mapping[str, np.ndarray]") -> Lap:
    """Through gRPC; in an open loop requests are in flight together, so that the server can form batches."""
    client, inputs = prepare_requests(url, rows)

    def lap(load: LoadSpec, seconds: float, seed: int) -> list[int]:
        for _ in range(WARM_UP_REQUESTS):
            client.infer(model, inputs)
        arrivals = _arrivals(load, seconds, seed)
        if load.scenario is Scenario.SERVER:
            return send_in_flight(client, model, inputs, MAX_IN_FLIGHT, arrivals)
        found: list[int] = []
        for due in arrivals:
            client.infer(model, inputs)
            found.append(perf_counter_ns() - due)
        return found

    return lap
