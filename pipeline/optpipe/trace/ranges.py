"""The names of the NVTX ranges that a profiled program marks its time with."""

CAPTURE_RANGE = "optpipe.capture"
"""Bounds a recording. It opens some iterations before the measured range: a recording that begins is itself a disturbance."""


MEASURED_RANGE = "optpipe.measure"
"""The range that bounds what is judged in a capture of optpipe's own."""


ITERATION_RANGE = "optpipe.iteration"


LIBRARY_RANGES = (
    r"^(cuBLAS|cuBLASLt|cuDNN|cuSOLVER|cuSPARSE|CUB|CCCL|NCCL|DALI|nvjpeg|nvJPEG|nvImageCodec|TensorRT internal|"
    r"GIL Trace|Python Periodic Sampling)[: ]"
)
"""Ranges that libraries, and nsys for `-t python-gil`, open in domains of their own: no iterations or layers of the program."""


LAYERS_RANGE = "optpipe.layers"
"""Iterations in which every layer has a range of its own: they say what a layer launches, and nothing about time."""
