"""Arrays between two processes: a line of JSON, `{"tensors": [{name, dtype, shape, bytes, offset}], …}`, through a pipe.

Their bytes lie in a file in memory that both have mapped, or without one come through the pipe, after the line. A server's
interpreter loads a copy of this file, so it imports nothing of optpipe.
"""

import json
import os
from collections.abc import Mapping
from mmap import mmap
from typing import IO, Any

import numpy as np

Arrays = Mapping[str, np.ndarray]
_ALIGNMENT = 64
_LEAST = 1 << 20


class SharedMemory:
    """A file in memory that grows. After `rewind`, its content may be overwritten."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._end = descriptor, 0
        self._view: mmap | None = None

    def rewind(self) -> None:
        self._end = 0

    def put(self, array: np.ndarray) -> int:
        """Copies `array` into the file and returns the offset."""
        offset = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        self._end = offset + array.nbytes
        if os.fstat(self._descriptor).st_size < self._end:
            os.ftruncate(self._descriptor, max(2 * self._end, _LEAST))
        self.view(offset, array.dtype, array.shape)[...] = np.ascontiguousarray(array).reshape(
            array.shape
        )
        return offset

    def view(self, offset: int, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """The array at `offset`, without a copy."""
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        if count == 0:
            return np.empty(shape, kind)
        if self._view is None or len(self._view) < offset + count * kind.itemsize:
            self._view = mmap(self._descriptor, 0)  # older views keep the older mapping alive
        return np.frombuffer(self._view, kind, count, offset).reshape(shape)


def write_frame(
    pipe: IO[bytes], header: Mapping[str, Any], arrays: Arrays, memory: SharedMemory | None = None
) -> None:
    tensors = [
        {"name": name, "dtype": str(array.dtype), "shape": list(array.shape), "bytes": array.nbytes}
        | ({} if memory is None else {"offset": memory.put(array)})
        for name, array in arrays.items()
    ]
    pipe.write(json.dumps({**header, "tensors": tensors}).encode() + b"\n")
    if memory is None:
        for array in arrays.values():
            pipe.write(array.tobytes())
    pipe.flush()


def read_frame(
    pipe: IO[bytes], memory: SharedMemory | None = None
) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """The next frame's header and arrays; None at the end. Arrays in `memory` are valid until they are answered."""
    if not (line := pipe.readline()):
        return None
    header = json.loads(line)
    arrays = {}
    for tensor in header["tensors"]:
        if memory is not None and "offset" in tensor:
            arrays[tensor["name"]] = memory.view(
                tensor["offset"], tensor["dtype"], tuple(tensor["shape"])
            )
        else:
            arrays[tensor["name"]] = np.frombuffer(
                pipe.read(tensor["bytes"]), tensor["dtype"]
            ).reshape(tensor["shape"])
    return header, arrays
