"""INT8 networks in torch on NVIDIA GPUs: a Q/DQ graph becomes a chain of fused kernels.

Between layers activations are INT8 in NHWC. Convolution, bias, residual addition, ReLU and requantization are one Triton
kernel, and so are a depthwise convolution with all that follows it and a product with a gate; what the graph leaves in floating
point runs in FP16.
"""

from optpipe.core.entries import ArtifactInfo

LOWERING = 4
"""Raised where a graph becomes other steps: an artifact's proof is of the steps that it was built with."""


def find_stale_lowering(info: ArtifactInfo) -> str | None:
    """Why an artifact's proof is not of the steps that would run; None where it is."""
    if "tactics" not in info.details or info.details.get("lowering") == LOWERING:
        return None
    return "built by an older version of the INT8 lowering; build it again"
