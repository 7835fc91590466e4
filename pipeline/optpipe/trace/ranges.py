"""The stages that are profiled, and the NVTX ranges that mark them.

The ranges use torch's NVTX binding because every nsys sees it, also without a GPU; 2022.4 and 2023.4 do not see the `nvtx`
package.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum


class Stage(StrEnum):
    """A stage that can be profiled; one process records the first three, each in a range `optpipe.STAGE`."""

    EXPORT = "export"
    QUANTIZE = "quantize"
    BUILD = "build"
    PREPROCESS = "preprocess"
    INFERENCE = "inference"


BUILD_STAGES = (Stage.EXPORT, Stage.QUANTIZE, Stage.BUILD)

CAPTURE_RANGE = "optpipe.capture"
"""Bounds a recording. It opens some iterations before the measured range, because the start of a recording disturbs."""

MEASURED_RANGE = "optpipe.measure"
"""Bounds the judged part of optpipe's recordings."""

ITERATION_RANGE = "optpipe.iteration"

LAYERS_RANGE = "optpipe.layers"
"""Iterations with a range for every layer: they show what a layer launches, not how long it takes."""

LIBRARY_RANGES = (
    r"^(cuBLAS|cuBLASLt|cuDNN|cuSOLVER|cuSPARSE|CUB|CCCL|NCCL|DALI|nvjpeg|nvJPEG|nvImageCodec|TensorRT internal|"
    r"GIL Trace|Python Periodic Sampling)[: ]"
)
"""Ranges that libraries, and nsys for `-t python-gil`, open in separate domains: not iterations or layers of the program."""


@contextmanager
def mark_range(name: str) -> Iterator[None]:
    import torch

    with torch.profiler.record_function(name):
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()
