"""What a profiled program marks its time with: the stages that are profiled, the names of their NVTX ranges, and the ranges themselves.

torch's own NVTX binding is used because every nsys sees it, also without a GPU; 2022.4 and 2023.4 do not see the `nvtx` package.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum


class Stage(StrEnum):
    """A stage that can be profiled; the first three are recorded in one process, each in a range `optpipe.STAGE`."""

    EXPORT = "export"
    QUANTIZE = "quantize"
    BUILD = "build"
    PREPROCESS = "preprocess"
    INFERENCE = "inference"


BUILD_STAGES = (Stage.EXPORT, Stage.QUANTIZE, Stage.BUILD)

CAPTURE_RANGE = "optpipe.capture"
"""Bounds a recording. It opens some iterations before the measured range: a recording that begins is itself a disturbance."""

MEASURED_RANGE = "optpipe.measure"
"""The range that bounds what is judged in a capture of optpipe's own."""

ITERATION_RANGE = "optpipe.iteration"

LAYERS_RANGE = "optpipe.layers"
"""Iterations in which every layer has a range of its own: they say what a layer launches, and nothing about time."""

LIBRARY_RANGES = (
    r"^(cuBLAS|cuBLASLt|cuDNN|cuSOLVER|cuSPARSE|CUB|CCCL|NCCL|DALI|nvjpeg|nvJPEG|nvImageCodec|TensorRT internal|"
    r"GIL Trace|Python Periodic Sampling)[: ]"
)
"""Ranges that libraries, and nsys for `-t python-gil`, open in domains of their own: no iterations or layers of the program."""


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
