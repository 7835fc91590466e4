"""A session on a GPU that answers requests from CUDA graphs: one for each power of two of samples, captured at its first use.

A graph has one batch size, and a server's batches have any: a batch is put into the next larger graph, whose other rows are not read.
"""

from typing import TYPE_CHECKING, Any

from optpipe.core.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from optpipe.backends.base import Session


def list_captured_sizes(largest: int) -> list[int]:
    """The powers of two below `largest`, which is 1 or more, and `largest`."""
    return [*(1 << power for power in range((largest - 1).bit_length())), largest]


def can_capture(session: "Session") -> bool:
    """Whether only the number of samples changes from request to request, and the session is on a GPU."""
    rest = [size for each in session.inputs for size in each.shape[1:]]
    return session.device == "cuda" and all(isinstance(size, int) and size > 0 for size in rest)


class CapturedSession:
    """Answers batches of up to `largest` samples."""

    def __init__(self, session: "Session", largest: int) -> None:
        self._session, self._sizes = session, list_captured_sizes(largest)
        self._buffers: dict[int, _Buffers] = {}

    def run(self, requests: "Sequence[Mapping[str, np.ndarray]]") -> "dict[str, np.ndarray]":
        """Outputs for all rows of `requests`, in order; (rows, …) each. Raises BadInputError for other shapes and larger batches."""
        for spec in self._session.inputs:
            for found in (each[spec.name].shape for each in requests):
                if found[1:] != spec.shape[1:]:
                    raise BadInputError(f"input '{spec.name}' is {list(found)}, the model takes {list(spec.shape)}")
        count = sum(len(next(iter(each.values()))) for each in requests)
        size = next((each for each in self._sizes if each >= count), None)
        if size is None:
            raise BadInputError(f"{count} samples exceed the largest batch, {self._sizes[-1]}")
        if size not in self._buffers:
            self._buffers[size] = _Buffers(self._session, size)
        return self._buffers[size].run(requests, count)


class _Buffers:
    """A binding for one batch size, with pinned memory of the host on both sides."""

    def __init__(self, session: "Session", size: int) -> None:
        import numpy as np
        import torch

        rows = {each.name: np.zeros((size, *map(int, each.shape[1:])), each.dtype) for each in session.inputs}
        self._binding = session.bind(rows)
        self._given = {name: torch.from_numpy(array).pin_memory() for name, array in rows.items()}
        self._found = {
            name: torch.empty_like(tensor, device="cpu", pin_memory=True)
            for name, tensor in self._binding.outputs.items()
        }

    def run(self, requests: "Sequence[Mapping[str, np.ndarray]]", count: int) -> "dict[str, np.ndarray]":
        import torch

        for name, tensor in self._given.items():
            held: Any = tensor.numpy()
            start = 0
            for each in requests:
                held[start : start + len(each[name])] = each[name]
                start += len(each[name])
            self._binding.inputs[name].copy_(tensor, non_blocking=True)
        self._binding.launch()
        for name, tensor in self._found.items():
            tensor.copy_(self._binding.outputs[name], non_blocking=True)
        torch.cuda.synchronize()
        return {name: tensor.numpy()[:count].copy() for name, tensor in self._found.items()}
