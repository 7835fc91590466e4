"""NVTX ranges, and the same for torch.profiler: what a profiled program marks its stages, iterations and batches with.

torch's own NVTX binding is used because every nsys sees it, also without a GPU; the `nvtx` package goes unseen by 2022.4
and 2023.4.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from optpipe.trace.projection import ITERATION_RANGE, LAYERS_RANGE, MEASURED_RANGE

CAPTURE_RANGE = "optpipe.capture"
"""Bounds a recording. It opens some iterations before the measured range: a recording that begins is itself a disturbance."""
__all__ = ["CAPTURE_RANGE", "ITERATION_RANGE", "LAYERS_RANGE", "MEASURED_RANGE", "marked"]


@contextmanager
def marked(name: str) -> Iterator[None]:
    """Opens a range called `name` on this thread for as long as the block runs."""
    import torch

    with torch.profiler.record_function(name):
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()
