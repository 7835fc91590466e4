"""What answers DALI's batches: an artifact on the CPU that reads DALI's memory, or one on a GPU, by DLPack.

`launch` begins a batch, `finish` gives its top answers; `in_flight` batches may be unanswered while the next is launched.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from optpipe.backends.base import Session
from optpipe.core.transform import Transform
from optpipe.preprocess.dali.pipeline import DaliPlan

IN_FLIGHT = 2
"""Batches whose answers may be outstanding on a GPU while the next is launched."""
TOP_K = 5
"""The best classes that come back from the GPU, as a server would send them."""


class Consumer(Protocol):
    """An artifact that takes DALI's tensors."""

    handover: str
    """What is copied between the two."""
    in_flight: int
    streams: int
    """Batches that end at about the same time."""

    def launch(self, tensor: Any) -> Any:
        """Begins the inference of a batch, whose memory must stay until its answer was given."""

    def finish(self, answer: Any) -> np.ndarray:
        """Waits for what `launch` began; the best class of each image."""


class HostConsumer:
    """Answers on the CPU: in this thread, or in so many streams as batches may be worked on at once."""

    handover = "none: the runtime reads DALI's memory"

    def __init__(self, session: Session, streams: int = 1) -> None:
        self.streams = streams
        # one more than work at once, so that no stream waits for this thread (12 % for 32 pictures of 8×8)
        self.in_flight = streams if streams > 1 else 0
        # one stream stays in the thread that loaded the session: to torch threads differ in their settings
        self._pool = ThreadPoolExecutor(streams) if streams > 1 else None
        self._session = session
        self._input, self._output = session.inputs[0], session.outputs[0].name

    def launch(self, tensor: Any) -> Callable[[], dict[str, np.ndarray]]:
        """Runs the batch, or gives it to a stream: inference releases the interpreter's lock, so this thread goes on."""
        inputs = {self._input.name: np.asarray(tensor).astype(self._input.dtype, copy=False)}
        if self._pool is not None:
            return self._pool.submit(self._session.run, inputs).result
        answer = self._session.run(inputs)
        return lambda: answer

    def finish(self, answer: Callable[[], dict[str, np.ndarray]]) -> np.ndarray:
        """Waits for the stream."""
        scores = answer()[self._output]
        best: np.ndarray = np.argmax(scores.reshape(len(scores), -1), axis=1)
        return best


class DeviceConsumer:
    """Answers on a GPU: enqueued on the stream, fetched when their event has passed."""

    in_flight = IN_FLIGHT
    streams = 1

    def __init__(self, session: Session, shape: tuple[int, ...], stream: Any) -> None:
        import torch

        self._torch, self._stream = torch, stream
        self._input, self._output = session.inputs[0], session.outputs[0].name
        self._dtype = getattr(torch, self._input.dtype)
        self._fixed = session.bind({self._input.name: np.zeros(shape, self._input.dtype)})
        self._bind_in_place = getattr(session, "bind_in_place", None)
        self._bindings: dict[int, Any] = {}
        self.handover = "none: DLPack" if self._bind_in_place else "copy on the device"

    def launch(self, tensor: Any) -> Any:
        """Enqueues inference, the top answers, their copy to pinned memory, and an event."""
        pixels = self._torch.from_dlpack(tensor)
        if pixels.dtype != self._dtype:
            pixels = pixels.to(self._dtype)
        binding = self._bound(pixels)
        binding.launch()
        scores = binding.outputs[self._output].reshape(len(pixels), -1)
        best = self._torch.topk(scores, min(TOP_K, scores.shape[1])).indices
        host = self._torch.empty(best.shape, dtype=best.dtype, pin_memory=True)
        host.copy_(best, non_blocking=True)
        event = self._torch.cuda.Event()
        event.record(self._stream)
        return event, host, pixels

    def _bound(self, pixels: Any) -> Any:
        if self._bind_in_place is None:
            self._fixed.inputs[self._input.name].copy_(pixels, non_blocking=True)
            return self._fixed
        address = pixels.data_ptr()
        if address not in self._bindings:
            outputs = {name: self._torch.empty_like(each) for name, each in self._fixed.outputs.items()}
            self._bindings[address] = self._bind_in_place({self._input.name: pixels}, outputs)
        return self._bindings[address]

    def finish(self, answer: Any) -> np.ndarray:
        """Waits for the event."""
        event, host, _ = answer
        event.synchronize()
        first: np.ndarray = host[:, 0].numpy()
        return first


def consumer_from_session(session: Session, plan: DaliPlan, transform: Transform, stream: Any) -> Consumer:
    """The artifact in `session` with one stream, which on a GPU is `stream`."""
    if session.device == "cpu":
        return HostConsumer(session)
    return DeviceConsumer(session, get_batch_shape(plan, transform), stream)


def get_batch_shape(plan: DaliPlan, transform: Transform) -> tuple[int, int, int, int]:
    """Of a batch of the model's input."""
    return plan.batch_size, *transform.shape


@contextmanager
def open_stream(device: str) -> Iterator[Any]:
    """On a GPU a stream of our own, which runtimes take as theirs when they load; None on the CPU."""
    if device == "cpu":
        yield None
        return
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream
