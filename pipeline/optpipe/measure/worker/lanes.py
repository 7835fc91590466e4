"""A lane answers one query at a time on one stream and times its parts; loops put load on lanes."""

from collections.abc import Mapping
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from optpipe.core.measurement import Mode

if TYPE_CHECKING:
    import numpy as np

    from optpipe.backends.base import Binding, Session
    from optpipe.measure.worker.rotation import Rotation

QueryTimes = tuple[int, int, int, int, int, int]
"""start, end, enqueue, h2d, compute, d2h in ns; -1 where there is no such part."""


class Lane(Protocol):
    """One stream of one session, with its inputs at hand."""

    def stage(self, index: int) -> None:
        """Puts rotated input `index` where the next query finds it; not part of the query."""

    def query(self) -> QueryTimes:
        """Answers one query to its end."""

    def outputs(self) -> Any:
        """A copy of the last answer, still on its device; `on_host` reads it."""

    def on_host(self, kept: Any) -> dict[str, "np.ndarray"]:
        """What `outputs` kept, as host arrays."""

    def replace(self, index: int, batch: Mapping[str, "np.ndarray"]) -> None:
        """Puts other values in place of rotated input `index`."""

    def list_spare_arrays(self) -> "list[np.ndarray]":
        """What lies in host memory for the rotation alone: a program with one input at a time would not hold it."""


class CpuLane:
    """On the CPU a call returns when it is done, so one clock times everything.

    In compute mode every rotated input has its own bound buffers; in end-to-end mode the caller's arrays are copied in and
    the answers out, inside the query.
    """

    def __init__(self, session: "Session", turns: "Rotation", mode: Mode) -> None:
        self._batches = [dict(batch) for batch in turns.batches]
        self._copies = mode is Mode.END_TO_END
        count = 1 if self._copies else len(self._batches)
        self._bindings = [session.bind(self._batches[index]) for index in range(count)]
        self._binding: Binding = self._bindings[0]
        self._batch = self._batches[0]
        self._results: dict[str, Any] = {}
        self._launch = self._binding.launch

    def stage(self, index: int) -> None:
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

    def outputs(self) -> dict[str, "np.ndarray"]:
        return self._results if self._copies else {name: array.copy() for name, array in self._binding.outputs.items()}

    def on_host(self, kept: dict[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
        return kept

    def replace(self, index: int, batch: Mapping[str, "np.ndarray"]) -> None:
        if self._copies:
            self._batches[index] = dict(batch)
            return
        for name, array in batch.items():
            self._bindings[index].inputs[name][...] = array

    def list_spare_arrays(self) -> "list[np.ndarray]":
        """The caller's arrays, of which copying in needs one at a time, and the buffers of all bindings but one."""
        buffers = [each for binding in self._bindings[1:] for each in (binding.inputs, binding.outputs)]
        return [array for each in (*self._batches[int(self._copies) :], *buffers) for array in each.values()]


class CudaLane:
    """One CUDA stream. Events time the parts on the device; the host's clock times the query and the enqueueing.

    Bindings launch on torch's current stream, so a lane makes its own stream current before it enqueues; between queries of
    the same lane that costs one comparison.
    """

    _current: ClassVar["CudaLane | None"] = None

    def __init__(self, session: "Session", turns: "Rotation", mode: Mode, stream: Any) -> None:
        import torch

        self._torch, self.stream = torch, stream
        self._copies = mode is Mode.END_TO_END
        with torch.cuda.stream(stream):
            self._binding = session.bind(turns.batches[0])
            held = [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in turns.batches]
            if self._copies:
                self._held = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in held]
                self._results = {
                    name: torch.empty_like(tensor, device="cpu", pin_memory=True)
                    for name, tensor in self._binding.outputs.items()
                }
            else:
                self._held = [{name: tensor.cuda() for name, tensor in batch.items()} for batch in held]
        self._batches = turns.batches
        self._index = 0
        self.marks = self.create_marks()
        stream.synchronize()

    def create_marks(self) -> list[Any]:
        """Four events: before and after H2D, after compute, after D2H."""
        return [self._torch.cuda.Event(enable_timing=True) for _ in range(4)]

    def stage(self, index: int) -> None:
        """Copies the input on the device (compute mode) and waits for it; end-to-end copies inside the query."""
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
        """Enqueues one query with its four events; returns the ns that the host spent on it."""
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
            self._torch.cuda.set_stream(self.stream)
            CudaLane._current = self

    def advance(self, index: int) -> None:
        """Stages without waiting, for loops that keep several queries in flight."""
        self._index = index
        if not self._copies:
            self.copy_in()

    def parts(self, marks: list[Any]) -> tuple[int, int, int]:
        """H2D, compute and D2H in ns, of finished events."""
        compute = round(marks[1].elapsed_time(marks[2]) * 1e6)
        if not self._copies:
            return -1, compute, -1
        return round(marks[0].elapsed_time(marks[1]) * 1e6), compute, round(marks[2].elapsed_time(marks[3]) * 1e6)

    def outputs(self) -> Any:
        """A copy enqueued on the stream, so that nothing waits."""
        self._make_current()
        source = self._results if self._copies else self._binding.outputs
        return {name: tensor.clone() for name, tensor in source.items()}

    def on_host(self, kept: Any) -> dict[str, "np.ndarray"]:
        self._torch.cuda.synchronize()
        return {name: tensor.float().cpu().numpy() for name, tensor in kept.items()}

    def replace(self, index: int, batch: Mapping[str, "np.ndarray"]) -> None:
        self._make_current()
        for name, array in batch.items():
            self._held[index][name].copy_(self._torch.from_numpy(array))
        self.stream.synchronize()

    def list_spare_arrays(self) -> "list[np.ndarray]":
        return [array for batch in self._batches for array in batch.values()]
