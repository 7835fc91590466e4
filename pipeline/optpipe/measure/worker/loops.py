"""Loops of the scenarios. Each writes every sample, warm-up included, and reads the clock only where a sample needs it.

Scenarios follow MLPerf inference's LoadGen. Single-stream: the next query after the last answer. Multi-stream: a query
is a batch on each stream at once, answered when all are. Offline: as many in flight as fit. Server: seeded Poisson
arrivals in an open loop; a query's latency starts when it was due, so that a growing queue is never hidden.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count, repeat
from threading import Lock
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from optpipe.core import torch
from optpipe.core.load import LoadSpec, Mode, Scenario
from optpipe.core.measurement import Phase
from optpipe.measure.trials import iterate_arrivals, warm_up
from optpipe.measure.worker.checks import Reservoir, Rotation
from optpipe.measure.worker.messages import Spool
from optpipe.stats.percentiles import (
    choose_sample_count,
    count_queries_needed,
    count_samples_needed,
    count_transient_queries,
)

if TYPE_CHECKING:
    from optpipe.backends.base import Binding, Session

QueryTimes = tuple[int, int, int, int, int, int]
"""start, end, enqueue, h2d, compute, d2h in ns; -1 for a missing part."""


class CpuLane:
    """One stream of one session with its inputs. A call returns when it is done, so one clock times everything.

    In compute mode every rotated input has its own bound buffers; in end-to-end mode the caller's arrays are copied in
    and the answers out, inside the query.
    """

    def __init__(self, session: "Session", turns: Rotation, mode: Mode) -> None:
        self._batches = [dict(batch) for batch in turns.batches]
        self._copies = mode is Mode.END_TO_END
        count = 1 if self._copies else len(self._batches)
        self._bindings = [session.bind(self._batches[index]) for index in range(count)]
        self._binding: Binding = self._bindings[0]
        self._batch = self._batches[0]
        self._results: dict[str, np.ndarray] = {}
        self._launch = self._binding.launch

    def stage(self, index: int) -> None:
        """Prepares rotated input `index` for the next query, outside its time."""
        if self._copies:
            self._batch = self._batches[index]
        else:
            self._binding = self._bindings[index]
            self._launch = self._binding.launch

    def query(self) -> QueryTimes:
        if self._copies:
            return self._copied()
        launch = self._launch
        start = perf_counter_ns()
        launch()
        end = perf_counter_ns()
        return start, end, end - start, -1, -1, -1

    def _copied(self) -> QueryTimes:
        binding = self._binding
        start = perf_counter_ns()
        for name, array in self._batch.items():
            binding.inputs[name][...] = array
        binding.launch()
        self._results = {name: array.copy() for name, array in binding.outputs.items()}
        end = perf_counter_ns()
        return start, end, end - start, -1, -1, -1

    def outputs(self) -> dict[str, np.ndarray]:
        """A copy of the last answer, still on its device; `on_host` reads it."""
        return (
            self._results
            if self._copies
            else {name: array.copy() for name, array in self._binding.outputs.items()}
        )

    def on_host(self, kept: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return kept

    def replace(self, index: int, batch: Mapping[str, np.ndarray]) -> None:
        """Replaces the values of rotated input `index`."""
        if self._copies:
            self._batches[index] = dict(batch)
            return
        for name, array in batch.items():
            self._bindings[index].inputs[name][...] = array

    def list_spare_arrays(self) -> list[np.ndarray]:
        """Host memory for rotation alone: all but one of the caller's arrays (end-to-end), and of the bindings' buffers."""
        buffers = [
            arrays for binding in self._bindings[1:] for arrays in (binding.inputs, binding.outputs)
        ]
        return [
            array
            for arrays in (*self._batches[int(self._copies) :], *buffers)
            for array in arrays.values()
        ]


class CudaLane:
    """One CUDA stream. Events time the parts on the device; the host's clock times the query and the enqueueing.

    Bindings launch on torch's current stream, so that a lane makes its stream current before it enqueues; between
    queries of the same lane that costs one comparison.
    """

    _current: ClassVar["CudaLane | None"] = None

    def __init__(self, session: "Session", turns: Rotation, mode: Mode, stream: Any) -> None:
        self.stream = stream
        self._copies = mode is Mode.END_TO_END
        with torch.cuda.stream(stream):
            self._binding = session.bind(turns.batches[0])
            held = [
                {name: torch.from_numpy(array) for name, array in batch.items()}
                for batch in turns.batches
            ]
            if self._copies:
                self._held = [
                    {name: tensor.pin_memory() for name, tensor in batch.items()} for batch in held
                ]
                self._results = {
                    name: torch.empty_like(tensor, device="cpu", pin_memory=True)
                    for name, tensor in self._binding.outputs.items()
                }
            else:
                self._held = [
                    {name: tensor.cuda() for name, tensor in batch.items()} for batch in held
                ]
        self._batches = turns.batches
        self._index = 0
        self.marks = self.create_marks()
        stream.synchronize()

    def create_marks(self) -> list[Any]:
        """Four events: before and after H2D, after compute, after D2H."""
        return [torch.cuda.Event(enable_timing=True) for _ in range(4)]

    def stage(self, index: int) -> None:
        """Copies the input on the device (compute mode) and waits for it; end-to-end mode copies inside the query."""
        self._index = index
        if not self._copies:
            self.copy_in()
            self.stream.synchronize()

    def copy_in(self) -> None:
        """Enqueues the copy of the staged input into the bound buffers."""
        self._make_current()
        for name, tensor in self._held[self._index].items():
            self._binding.inputs[name].copy_(tensor, non_blocking=True)

    def query(self) -> QueryTimes:
        self._make_current()
        start = perf_counter_ns()
        enqueue = self.launch(self.marks)
        self.marks[-1].synchronize()
        end = perf_counter_ns()
        return start, end, enqueue, *self.parts(self.marks)

    def launch(self, marks: list[Any]) -> int:
        """Enqueues one query with its four events; returns the host's ns for it."""
        self._make_current()
        start = perf_counter_ns()
        if self._copies:
            marks[0].record(self.stream)
            self.copy_in()
        marks[1].record(self.stream)
        self._binding.launch()
        marks[2].record(self.stream)
        if self._copies:
            for name, tensor in self._binding.outputs.items():
                self._results[name].copy_(tensor, non_blocking=True)
        marks[3].record(self.stream)
        return perf_counter_ns() - start

    def _make_current(self) -> None:
        if CudaLane._current is not self:
            torch.cuda.set_stream(self.stream)
            CudaLane._current = self

    def advance(self, index: int) -> None:
        """Stages without waiting, for loops that keep several queries in flight."""
        self._index = index
        if not self._copies:
            self.copy_in()

    def parts(self, marks: list[Any]) -> tuple[int, int, int]:
        compute = round(marks[1].elapsed_time(marks[2]) * 1e6)
        if not self._copies:
            return -1, compute, -1
        return (
            round(marks[0].elapsed_time(marks[1]) * 1e6),
            compute,
            round(marks[2].elapsed_time(marks[3]) * 1e6),
        )

    def outputs(self) -> Any:
        """A copy enqueued on the stream, so that nothing waits."""
        self._make_current()
        source = self._results if self._copies else self._binding.outputs
        return {name: tensor.clone() for name, tensor in source.items()}

    def on_host(self, kept: Any) -> dict[str, np.ndarray]:
        torch.cuda.synchronize()
        return {name: tensor.float().cpu().numpy() for name, tensor in kept.items()}

    def replace(self, index: int, batch: Mapping[str, np.ndarray]) -> None:
        self._make_current()
        for name, array in batch.items():
            self._held[index][name].copy_(torch.from_numpy(array))
        self.stream.synchronize()

    def list_spare_arrays(self) -> list[np.ndarray]:
        return [array for batch in self._batches for array in batch.values()]


Lane = CpuLane | CudaLane
IN_FLIGHT = 2
MAX_SAMPLE_FACTOR = 4
"""Correlated samples are worth fewer: up to this many times as many are measured for the percentile."""


@dataclass
class PointRun:
    spec: LoadSpec
    spool: Spool
    lanes: Sequence[Lane]
    inputs: int
    kept: Reservoir
    on_measuring: Callable[[], None]
    seed: int = 0
    steady: bool = False
    service_ns: float = 0.0
    """Median time of one query in the last window of the warm-up."""
    write: Callable[..., None] = field(init=False)
    lock: Lock = field(default_factory=Lock)
    started_ns: int = 0
    count: int = 0
    _enough: int = 0
    """Total samples: of a server by its utilization, otherwise by one look when there would be enough independent ones."""

    def __post_init__(self) -> None:
        self.write = self.spool.writer()

    def finished(self, started_ns: int, now_ns: int, count: int) -> bool:
        """Whether the minimum time and the percentile's samples are reached, or the maximum time, or the parent stopped it."""
        if self.over(started_ns, now_ns):
            return True
        if (now_ns - started_ns) / 1e9 < self.spec.min_seconds or count < count_samples_needed(
            self.spec.percentile
        ):
            return False
        if not self._enough and self.spec.scenario is Scenario.SERVER:
            self._enough = self.queries_needed
        elif not self._enough:
            latencies = self.spool.read_last_latencies_ns(count)
            self._enough = choose_sample_count(
                latencies, self.spec.percentile, MAX_SAMPLE_FACTOR * count
            )
        return count >= self._enough

    @property
    def queries_needed(self) -> int:
        """Queries for the percentile; for a server more, the closer it is to saturation."""
        if self.spec.scenario is Scenario.SERVER:
            return count_queries_needed(self.utilization, self.spec.percentile)
        return count_samples_needed(self.spec.percentile)

    @property
    def utilization(self) -> float:
        """Share of time in which a server is busy at this rate, by the warm-up's service time."""
        return (self.spec.rate_per_s or 0.0) * self.service_ns / 1e9

    def over(self, started_ns: int, now_ns: int) -> bool:
        """Whether the maximum time is reached, or the parent stopped it."""
        return (now_ns - started_ns) / 1e9 >= self.spec.max_seconds or self.spool.stopped

    def keep(self, lane: Lane, index: int) -> None:
        if (slot := self.kept.slot()) is not None:
            self.kept.keep(slot, index, lane.outputs())


def run_load(load: PointRun) -> None:
    _warm_up(load)
    load.on_measuring()
    load.started_ns = perf_counter_ns()
    scenario = load.spec.scenario
    if scenario is Scenario.SINGLE_STREAM:
        _run_lane(load, 0, repeat(None))
    elif scenario is Scenario.MULTI_STREAM:
        _run_multi_stream(load)
    elif scenario is Scenario.SERVER:
        if load.spec.rate_per_s is None:
            raise ValueError("the server scenario needs a rate")
        # at a low rate the end may come between two arrivals
        due = iterate_arrivals(
            load.spec.rate_per_s, load.seed, lambda: load.over(load.started_ns, perf_counter_ns())
        )
        _run_lane(load, 0, due, count_transient_queries(load.utilization, load.spec.percentile))
    elif isinstance(load.lanes[0], CudaLane):
        _run_pipelined(load, [lane for lane in load.lanes if isinstance(lane, CudaLane)])
    elif len(load.lanes) == 1:
        _run_lane(load, 0, repeat(None))
    else:
        with ThreadPoolExecutor(len(load.lanes)) as threads:  # runtimes release Python's lock
            list(
                threads.map(
                    lambda stream: _run_lane(load, stream, repeat(None)), range(len(load.lanes))
                )
            )


def _warm_up(load: PointRun) -> None:
    turns = count()

    def ask() -> int:
        turn = next(turns)
        stream, index = turn % len(load.lanes), turn % load.inputs
        load.lanes[stream].stage(index)
        times = load.lanes[stream].query()
        load.write(Phase.WARM_UP, stream, index, load.spec.batch_size, 0, times[0], *times)
        return times[1] - times[0]

    limits = load.spec.warm_up_seconds, load.spec.max_warm_up_seconds
    load.steady, load.service_ns = warm_up(ask, *limits, lambda: load.spool.stopped)


def _run_lane(
    load: PointRun, stream: int, arrivals: Iterable[int | None], transient: int = 0
) -> None:
    """Runs one query after the other on one lane, each when it is due; the first `transient` ones are not measured."""
    lane, write, size, inputs = load.lanes[stream], load.write, load.spec.batch_size, load.inputs
    stage, query, lock = lane.stage, lane.query, load.lock
    stage(0)
    for issued, due in enumerate(arrivals):
        index, measured = issued % inputs, issued >= transient
        times = query()
        now = times[1]
        phase = Phase.MEASURED if measured else Phase.WARM_UP
        with lock:
            write(phase, stream, index, size, 0, times[0] if due is None else due, *times)
            if measured:
                load.keep(lane, index)
                load.count += 1
            else:
                load.started_ns = now
            if load.finished(load.started_ns, now, load.count):
                return
        stage((issued + 1) % inputs)


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


def _run_pipelined(load: PointRun, lanes: Sequence[CudaLane]) -> None:
    """Offline on a GPU: one thread keeps IN_FLIGHT queries on every stream, with copies of inputs inside the time."""
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


def _collect_query(
    load: PointRun, lanes: Sequence[CudaLane], query: tuple[int, int, int, int, list[Any]]
) -> int:
    stream, index, begun, enqueue, marks = query
    marks[-1].synchronize()
    now = perf_counter_ns()
    parts = lanes[stream].parts(marks)
    load.write(
        Phase.MEASURED, stream, index, load.spec.batch_size, 0, begun, begun, now, enqueue, *parts
    )
    return now
