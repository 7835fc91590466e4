"""What takes DALI's batches: an artifact on the CPU that reads DALI's memory, or one on a GPU, by DLPack.

`launch` begins a batch, `finish` gives its predictions; `in_flight` batches may be unfinished while the next is launched.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from optpipe.backends.base import Session
from optpipe.core.transform import Transform
from optpipe.preprocess.dali.pipeline import DaliPlan

IN_FLIGHT = 2
"""Batches whose predictions may be outstanding on a GPU while the next is launched."""
TOP_K = 5
"""The best classes that come back from the GPU, as a server would send them."""


class Consumer(Protocol):
    """An artifact that takes DALI's tensors."""

    handover: str
    """What is copied between the two."""
    in_flight: int

    def launch(self, tensor: Any) -> Any:
        """Begins the inference of a batch, whose memory must stay until it is finished."""

    def finish(self, launched: Any) -> np.ndarray:
        """Waits for what `launch` began; the best class of each image, `(images,)`."""


class HostConsumer:
    """Computes on the CPU, in this thread, while DALI's threads prepare the next batches."""

    handover = "none: the runtime reads DALI's memory"
    in_flight = 0

    def __init__(self, session: Session) -> None:
        self._session = session
        self._input, self._output = session.inputs[0], session.outputs[0].name

    def launch(self, tensor: Any) -> np.ndarray:
        """Runs the batch; its scores, `(images, classes)`."""
        inputs = {self._input.name: np.asarray(tensor).astype(self._input.dtype, copy=False)}
        return self._session.run(inputs)[self._output]

    def finish(self, launched: np.ndarray) -> np.ndarray:
        """The best class of each image, `(images,)`."""
        best: np.ndarray = np.argmax(launched.reshape(len(launched), -1), axis=1)
        return best


class DeviceConsumer:
    """Computes on a GPU: enqueued on the stream, fetched when the event has passed."""

    in_flight = IN_FLIGHT

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
        """Enqueues inference, the top classes, their copy to pinned memory, and an event."""
        pixels = self._torch.from_dlpack(tensor)
        if pixels.dtype != self._dtype:
            pixels = pixels.to(self._dtype)
        binding = self._bind(pixels)
        binding.launch()
        scores = binding.outputs[self._output].reshape(len(pixels), -1)
        best = self._torch.topk(scores, min(TOP_K, scores.shape[1])).indices
        host = self._torch.empty(best.shape, dtype=best.dtype, pin_memory=True)
        host.copy_(best, non_blocking=True)
        event = self._torch.cuda.Event()
        event.record(self._stream)
        return event, host, pixels

    def _bind(self, pixels: Any) -> Any:
        if self._bind_in_place is None:
            self._fixed.inputs[self._input.name].copy_(pixels, non_blocking=True)
            return self._fixed
        address = pixels.data_ptr()
        if address not in self._bindings:
            outputs = {name: self._torch.empty_like(each) for name, each in self._fixed.outputs.items()}
            self._bindings[address] = self._bind_in_place({self._input.name: pixels}, outputs)
        return self._bindings[address]

    def finish(self, launched: Any) -> np.ndarray:
        """Waits for the event; the best class of each image, `(images,)`."""
        event, host, _ = launched
        event.synchronize()
        first: np.ndarray = host[:, 0].numpy()
        return first


def consumer_from_session(session: Session, plan: DaliPlan, transform: Transform, stream: Any) -> Consumer:
    """The artifact in `session`; on a GPU it works on `stream`."""
    if session.device == "cpu":
        return HostConsumer(session)
    return DeviceConsumer(session, get_batch_shape(plan, transform), stream)


def get_batch_shape(plan: DaliPlan, transform: Transform) -> tuple[int, int, int, int]:
    """Of a batch of the model's input: `(images, *transform.shape)`."""
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
