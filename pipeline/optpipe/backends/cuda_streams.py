"""Streams that the driver orders with torch's default stream, so that no call has to order them with events."""

import ctypes
import threading
from typing import Any

from optpipe.core import torch


class Streams:
    """The streams of this process's sessions; one that is given back is lent again, and none is destroyed while work is on it.

    torch's default stream is CUDA's legacy default stream: its work and that of a stream made by `cudaStreamCreate` wait for each
    other in the order in which they are submitted. torch's own streams are made without that, and need events. Source: CUDA
    Runtime API, "Stream synchronization behavior".
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: set[int] = set()
        self._free: dict[int, list[int]] = {}

    def take(self, device: int) -> Any:
        """A stream on that GPU as torch's, for one session; one of torch's own if the driver makes no more."""
        with self._lock:
            free = self._free.setdefault(device, [])
            handle = free.pop() if free else self._create(device)
        return torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.Stream(device)

    def _create(self, device: int) -> int:
        handle = ctypes.c_void_p(0)
        with torch.cuda.device(device):
            if int(torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle))) != 0:
                return 0
        created = int(handle.value or 0)
        self._known.add(created)
        return created

    def give_back(self, stream: Any) -> None:
        with self._lock:
            if stream.cuda_stream in self._known:
                self._free[stream.device_index].append(stream.cuda_stream)

    def are_ordered(self, handle: int) -> bool:
        """Whether the driver orders the stream with this handle and torch's default stream."""
        return handle in self._known


STREAMS = Streams()
