"""How queries arrive. Each loop writes every sample, warm-up included, and reads the clock only where a sample needs it.

Source of the scenarios: MLPerf inference, LoadGen. Single-stream: the next query when the last is answered. Multi-stream:
one query is a batch on each stream at once, answered when all are. Offline: as many as fit in flight. Server: seeded
Poisson arrivals in an open loop; a query's latency starts when it was due, so falling behind is never hidden.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from statistics import median
from threading import Lock
from time import perf_counter_ns, sleep
from typing import Any

from optpipe.core.measurement import LoadSpec, Phase, Scenario
from optpipe.measure.worker.checks import Reservoir
from optpipe.measure.worker.lanes import CudaLane, Lane
from optpipe.measure.worker.spool import Spool
from optpipe.stats.percentiles import (
    count_queries_needed,
    count_samples_needed,
    count_transient_queries,
    plan_sample_count,
)
from optpipe.stats.stability import is_steady

WINDOWS_PER_WARM_UP = 6
IN_FLIGHT = 2
MAX_SAMPLE_FACTOR = 4
"""Samples that follow each other closely are worth fewer: up to this many times as many are measured for the percentile."""
SPIN_NS = 150_000
"""Sleeping is not exact; the last part before an arrival is waited for by reading the clock."""
POLL_NS = 200_000_000
"""How long is slept at most before it is looked whether the measurement is over."""


@dataclass
class PointRun:
    """One point being measured: where samples go, when to end, which answers to keep."""

    spec: LoadSpec
    spool: Spool
    lanes: Sequence[Lane]
    inputs: int
    kept: Reservoir
    on_measuring: Callable[[], None]
    """Called once, between warm-up and measuring."""
    seed: int = 0
    """Of the arrivals; drawn for every measurement, and recorded."""
    steady: bool = False
    service_ns: float = 0.0
    """Of one query in the last window of the warm-up, median."""
    write: Callable[..., None] = field(init=False)
    _enough: int = 0
    """How many samples there will be: decided once, when there are as many as independent samples would be enough."""

    def __post_init__(self) -> None:
        self.write = self.spool.writer()

    def finished(self, started_ns: int, now_ns: int, count: int) -> bool:
        """Both minimum time and what the percentile needs, or the most time, or the parent's word."""
        if self.over(started_ns, now_ns):
            return True
        if (now_ns - started_ns) / 1e9 < self.spec.min_seconds or count < count_samples_needed(self.spec.percentile):
            return False
        if not self._enough:
            self._enough = self._decided(count)
        return count >= self._enough

    def _decided(self, count: int) -> int:
        """How many samples there will be: of a server by its utilization, else by one look at the `count` samples so far."""
        spec = self.spec
        if spec.scenario is Scenario.SERVER:
            return self.queries_needed
        return plan_sample_count(self.spool.read_last_latencies_ns(count), spec.percentile, MAX_SAMPLE_FACTOR * count)

    @property
    def queries_needed(self) -> int:
        """As many as the percentile needs; of a server more, the closer it is to saturation."""
        if self.spec.scenario is Scenario.SERVER:
            return count_queries_needed(self.utilization, self.spec.percentile)
        return count_samples_needed(self.spec.percentile)

    @property
    def utilization(self) -> float:
        """Share of the time in which a server is busy at this rate, by the warm-up's service time."""
        return (self.spec.rate_per_s or 0.0) * self.service_ns / 1e9

    def over(self, started_ns: int, now_ns: int) -> bool:
        """The most time, or the parent's word."""
        return (now_ns - started_ns) / 1e9 >= self.spec.max_seconds or self.spool.stopped

    def keep(self, lane: Lane, index: int) -> None:
        """Keeps the lane's last answer if the reservoir wants it."""
        if (slot := self.kept.slot()) is not None:
            self.kept.keep(slot, index, lane.outputs())


def run_load(load: PointRun) -> None:
    """Warms up until steady, then measures."""
    _warm_up(load)
    load.on_measuring()
    scenario = load.spec.scenario
    if scenario is Scenario.SINGLE_STREAM:
        _run_closed_loop(load)
    elif scenario is Scenario.MULTI_STREAM:
        _run_multi_stream(load)
    elif scenario is Scenario.SERVER:
        _run_server(load)
    elif isinstance(load.lanes[0], CudaLane):
        _run_pipelined(load, [lane for lane in load.lanes if isinstance(lane, CudaLane)])
    else:
        _run_threads(load)


def _warm_up(load: PointRun) -> None:
    """Every lane in turn, in windows of equal time, until the windows' medians agree or the time is up."""
    spec = load.spec
    window_ns = int(max(spec.warm_up_seconds, 0.05) / WINDOWS_PER_WARM_UP * 1e9)
    begun, turn = perf_counter_ns(), 0
    medians: list[float] = []
    while not load.spool.stopped:
        window_began = perf_counter_ns()
        durations: list[int] = []
        while len(durations) < 3 or perf_counter_ns() - window_began < window_ns:
            stream = turn % len(load.lanes)
            index = turn % load.inputs
            times = _run_query(load, stream, index, Phase.WARM_UP)
            durations.append(times[1] - times[0])
            turn += 1
        medians.append(median(durations))
        load.service_ns = medians[-1]
        seconds = (perf_counter_ns() - begun) / 1e9
        if seconds >= spec.warm_up_seconds and is_steady(medians):
            load.steady = True
            return
        if seconds >= spec.max_warm_up_seconds:
            return


def _run_query(load: PointRun, stream: int, index: int, phase: int) -> Any:
    lane = load.lanes[stream]
    lane.stage(index)
    times = lane.query()
    load.write(phase, stream, index, load.spec.batch_size, 0, times[0], *times)
    return times


def _run_closed_loop(load: PointRun) -> None:
    lane, write, size, inputs = load.lanes[0], load.write, load.spec.batch_size, load.inputs
    stage, query, started, count, now, measured = lane.stage, lane.query, perf_counter_ns(), 0, 0, Phase.MEASURED
    while not load.finished(started, now or started, count):
        index = count % inputs
        stage(index)
        times = query()
        write(measured, 0, index, size, 0, times[0], *times)
        load.keep(lane, index)
        count += 1
        now = times[1]


def _run_multi_stream(load: PointRun) -> None:
    lanes, size, count = load.lanes, load.spec.batch_size * len(load.lanes), 0
    started = now = perf_counter_ns()
    on_gpu = [lane for lane in lanes if isinstance(lane, CudaLane)]
    with ThreadPoolExecutor(len(lanes)) as threads:
        while not load.finished(started, now, count):
            index = count % load.inputs
            for lane in lanes:
                lane.stage(index)
            begun = perf_counter_ns()
            enqueued = sum(lane.launch(lane.marks) for lane in on_gpu)
            for lane in on_gpu:
                lane.marks[-1].synchronize()
            if not on_gpu:
                list(threads.map(lambda lane: lane.query(), lanes))
            now = perf_counter_ns()
            enqueue = enqueued if on_gpu else now - begun
            load.write(Phase.MEASURED, 0, index, size, 0, begun, begun, now, enqueue, -1, -1, -1)
            load.keep(lanes[count % len(lanes)], index)
            count += 1


def _run_server(load: PointRun) -> None:
    spec, lane, write, size = load.spec, load.lanes[0], load.write, load.spec.batch_size
    if spec.rate_per_s is None:
        raise ValueError("the server scenario needs a rate")
    gaps = Random(f"arrivals {load.seed}")  # no other draw follows the same numbers
    arrival = started = perf_counter_ns() + 10_000_000
    count, now, transient = 0, started, count_transient_queries(load.utilization, spec.percentile)
    while not load.finished(started, now, count):
        arrival += round(gaps.expovariate(spec.rate_per_s) * 1e9)
        index = count % load.inputs
        lane.stage(index)
        if not _wait_until(arrival, load, started):
            return
        times = lane.query()
        now = times[1]
        if transient:
            transient -= 1
            started = now
            write(Phase.WARM_UP, 0, index, size, 0, arrival, *times)
            continue
        write(Phase.MEASURED, 0, index, size, 0, arrival, *times)
        load.keep(lane, index)
        count += 1


def _wait_until(due_ns: int, load: PointRun, started_ns: int) -> bool:
    """Whether the next query came before the end: at a low rate the time is up, or the parent's word comes, in between."""
    while (left := due_ns - SPIN_NS - perf_counter_ns()) > 0:
        sleep(min(left, POLL_NS) / 1e9)
        if load.over(started_ns, perf_counter_ns()):
            return False
    while perf_counter_ns() < due_ns:
        pass
    return True


def _run_pipelined(load: PointRun, lanes: Sequence[CudaLane]) -> None:
    """Offline on a GPU: one thread keeps IN_FLIGHT queries on every stream; copies of inputs are inside the time."""
    rings = [[lane.create_marks() for _ in range(IN_FLIGHT)] for lane in lanes]
    pending: list[tuple[int, int, int, int, list[Any]]] = []
    started = now = perf_counter_ns()
    count = issued = 0
    while not load.finished(started, now, count):
        while len(pending) < IN_FLIGHT * len(lanes):
            stream, index = issued % len(lanes), issued % load.inputs
            marks = rings[stream][issued // len(lanes) % IN_FLIGHT]
            begun = perf_counter_ns()
            lanes[stream].advance(index)
            enqueue = lanes[stream].launch(marks)
            load.keep(lanes[stream], index)
            pending.append((stream, index, begun, enqueue, marks))
            issued += 1
        now = _collect_query(load, lanes, pending.pop(0))
        count += 1
    for left in pending:
        _collect_query(load, lanes, left)


def _collect_query(load: PointRun, lanes: Sequence[CudaLane], query: tuple[int, int, int, int, list[Any]]) -> int:
    stream, index, begun, enqueue, marks = query
    marks[-1].synchronize()
    now = perf_counter_ns()
    parts = lanes[stream].parts(marks)
    load.write(Phase.MEASURED, stream, index, load.spec.batch_size, 0, begun, begun, now, enqueue, *parts)
    return now


def _run_threads(load: PointRun) -> None:
    """Offline on the CPU: a closed loop per stream, each in a thread of its own (runtimes release Python's lock)."""
    if len(load.lanes) == 1:
        _run_closed_loop(load)
        return
    lock, started, counts = Lock(), perf_counter_ns(), [0] * len(load.lanes)

    def serve(stream: int) -> None:
        lane, now = load.lanes[stream], started
        while True:
            with lock:
                if load.finished(started, now, sum(counts)):
                    return
            index = counts[stream] % load.inputs
            lane.stage(index)
            times = lane.query()
            now = times[1]
            with lock:
                size = load.spec.batch_size
                load.write(Phase.MEASURED, stream, index, size, 0, times[0], *times)
                load.keep(lane, index)
                counts[stream] += 1

    with ThreadPoolExecutor(len(load.lanes)) as threads:
        list(threads.map(serve, range(len(load.lanes))))
