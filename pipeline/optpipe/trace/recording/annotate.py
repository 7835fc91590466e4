"""NVTX ranges, and the same for torch.profiler: what a profiled program marks its stages, iterations and batches with.

torch's own NVTX binding is used because every nsys sees it, also without a GPU; the `nvtx` package goes unseen by 2022.4
and 2023.4.
"""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def mark_range(name: str) -> Iterator[None]:
    """Opens a range called `name` on this thread for as long as the block runs."""
    import torch

    with torch.profiler.record_function(name):
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()
