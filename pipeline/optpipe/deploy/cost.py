"""The time that a server adds to a request: equal requests in-process and through gRPC, in alternating rounds.

Requests follow each other, or a Poisson process in an open loop schedules them: then latency counts from the scheduled time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from itertools import count as numbers_from
from secrets import randbits
from time import perf_counter_ns
from typing import TYPE_CHECKING

from optpipe.core.errors import StageError
from optpipe.core.events import Listener
from optpipe.core.measurement import LatencySummary, LoadSpec, Mode, Scenario
from optpipe.core.quantity import Estimate
from optpipe.deploy.check import CheckedDeployment
from optpipe.deploy.load_client import open_load_clients, prepare_inputs, send_in_flight
from optpipe.deploy.records import ServerCost, ServerThroughput
from optpipe.deploy.session_process import Answer
from optpipe.deploy.triton_config import list_positions
from optpipe.measure.trials import iterate_arrivals, time_call, time_calls_for, warm_up
from optpipe.models.inputs.rows import fill_sequences, read_length
from optpipe.signoff.policy import Policy, policy_from_toml
from optpipe.stats.means import mean_from_values
from optpipe.stats.percentiles import summary_from_ns
from optpipe.stats.ratio import alternate
from optpipe.workspace.file_names import POLICY

if TYPE_CHECKING:
    import numpy as np

    from optpipe.backends.base import Serving

ROUNDS = 4
WARM_UP_S = 0.1
MAX_WARM_UP_S = 0.5
RATE_CONFIDENCE = 0.95
PERCENTS = (50.0, 90.0, 99.0)
MAX_IN_FLIGHT = 256
CONCURRENCY = (1, 8, 32)
"""Requests in flight during throughput trials."""
Trial = Callable[[LoadSpec, float, int], list[int]]
"""Loads a subject for a number of seconds, with a seed for the arrivals; returns latencies in ns."""


def loads_from_policy(policy: Policy, largest: int) -> tuple[tuple[LoadSpec, str], ...]:
    """The loads of the policy's latency limits; single requests if there are none."""
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


def measure_server(
    checked: CheckedDeployment,
    url: str,
    seconds: float,
    inputs: "Mapping[str, np.ndarray]",
    engine: Answer,
    largest: int,
    listener: Listener,
) -> tuple[tuple[ServerCost, ...], tuple[ServerThroughput, ...]]:
    """Measures latencies at each load that the policy limits, and requests/s of one sample at every concurrency.

    `url` is the server's gRPC address, `engine` answers in-process; `inputs` are rows to draw from, and `largest` is the
    deployment's batch, 0 without one.
    """
    record, costs, rates = checked.record, [], []
    policy = policy_from_toml(checked.files.read(POLICY), str(checked.folder / POLICY))
    for wanted, source in loads_from_policy(policy, checked.card.batch_range[2]):
        rows = dict(inputs)
        if wanted.length is not None:
            rows = fill_sequences(checked.card, rows, wanted.length, wanted.batch_size)
        load = replace(wanted, length=read_length(checked.card, rows))
        rows = _take_rows(rows, load.batch_size)
        with listener.step(f"server cost, {load}"):
            served = _make_served_trial(url, record.engine, name_inputs(checked.serving, rows))
            costs.append(_compare(partial(_time_requests, partial(engine, [rows])), served, load, source, seconds))
    rows = _take_rows(inputs, 1) if largest else dict(inputs)
    with open_load_clients(url, record.engine, name_inputs(checked.serving, rows)) as clients:
        for count in CONCURRENCY:
            joined, seed = min(count, largest) or 1, randbits(32)
            subjects = {
                "in-process": partial(_measure_rate, partial(engine, [rows] * joined), joined, seconds / ROUNDS),
                "server": partial(clients.run_trial, count, seconds / ROUNDS),
            }
            with listener.step(f"throughput, {count} in flight"):
                clients.run_trial(count, MAX_WARM_UP_S)
                found = alternate(subjects, ROUNDS, seed)
            own, through = (_estimate([rate for rate, _ in each]) for each in found.values())
            latency = _summarize(chain.from_iterable(several for _, several in found["server"]))
            rates.append(ServerThroughput(count, own, through, latency, seed))
    return tuple(costs), tuple(rates)


def name_inputs(serving: "Serving | None", rows: "Mapping[str, np.ndarray]") -> "Mapping[str, np.ndarray]":
    """Renames inputs for a server that addresses them by position."""
    if serving is None or not serving.by_position:
        return rows
    return dict(zip(list_positions("INPUT", len(rows)), rows.values(), strict=True))


def _estimate(rates: Sequence[float]) -> Estimate:
    mean = mean_from_values(rates)
    assert mean is not None
    low, high = mean.interval(RATE_CONFIDENCE)
    return Estimate(mean.value, low, high, f"{RATE_CONFIDENCE:.0%}, over {ROUNDS} rounds")


def _measure_rate(call: Callable[[], object], requests: int, seconds: float) -> tuple[float, list[int]]:
    """Requests per second of calls with `requests` each, and the calls' times in ns."""
    times = _time_requests(call, LoadSpec(requests), seconds, 0)
    return requests * len(times) / sum(times) * 1e9, times


def _take_rows(inputs: "Mapping[str, np.ndarray]", size: int) -> "dict[str, np.ndarray]":
    import numpy as np

    return {name: np.resize(array, (size, *array.shape[1:])) for name, array in inputs.items()}


def _compare(own: Trial, served: Trial, load: LoadSpec, source: str, seconds: float) -> ServerCost:
    def in_turn(trial: Trial) -> Callable[[], list[int]]:
        turns = numbers_from(0)
        return lambda: trial(load, seconds / ROUNDS, next(turns))  # the same arrivals for both

    seed = randbits(32)
    found = alternate({"in-process": in_turn(own), "server": in_turn(served)}, ROUNDS, seed)
    alone, through = (_summarize(chain.from_iterable(each)) for each in found.values())
    return ServerCost(str(load), source, alone, through, through.mean - alone.mean, seed)


def _summarize(latencies: Iterable[int]) -> LatencySummary:
    import numpy as np

    found = np.fromiter(latencies, np.int64)
    if not found.size:
        raise StageError("no request was answered in the time given; increase --seconds")
    return summary_from_ns(found, PERCENTS)


def _time_requests(call: Callable[[], object], load: LoadSpec, seconds: float, seed: int) -> list[int]:
    """Latencies in ns of successive requests; in an open loop since the scheduled time."""
    warm_up(partial(time_call, call), WARM_UP_S, MAX_WARM_UP_S)
    if load.rate_per_s is None:
        return time_calls_for(call, seconds)
    return [time_call(call, due) for due in _iterate_due(load.rate_per_s, seconds, seed)]


def _iterate_due(rate_per_s: float, seconds: float, seed: int) -> Iterator[int]:
    """Times at which requests are due; the last one is the first after `seconds`."""
    end = perf_counter_ns() + seconds * 1e9
    for due in iterate_arrivals(rate_per_s, seed):
        yield due
        if due >= end:
            return


def _make_served_trial(url: str, model: str, rows: "Mapping[str, np.ndarray]") -> Trial:
    """Keeps requests of an open loop in flight together, so that the server can form batches."""
    from tritonclient import grpc

    client, inputs = grpc.InferenceServerClient(url), prepare_inputs(grpc, rows)
    ask = partial(client.infer, model, inputs)

    def run(load: LoadSpec, seconds: float, seed: int) -> list[int]:
        if load.rate_per_s is None:
            return _time_requests(ask, load, seconds, seed)
        warm_up(partial(time_call, ask), WARM_UP_S, MAX_WARM_UP_S)
        return send_in_flight(client, model, inputs, MAX_IN_FLIGHT, _iterate_due(load.rate_per_s, seconds, seed))

    return run
