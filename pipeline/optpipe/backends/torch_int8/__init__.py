"""INT8 layers of torch programs on NVIDIA GPUs.

The program is the module's own, exported and compiled by torch; its convolutions and linear layers are an operator with kernels in
Triton. Between such layers activations are INT8 in NHWC. Convolution, bias, residual addition, activation and requantization are one
kernel; what stays in floating point runs in FP16, and quantizing is code that torch's compiler joins with what is ahead of it.
"""

from optpipe.core.entries import ArtifactInfo

LOWERING = 5
"""Raised where a program becomes other steps, or the operator takes other arguments: a package calls it as it was then."""


def find_stale_lowering(info: ArtifactInfo) -> str | None:
    """Why the operator here is not the one that an artifact was compiled for; None where it is."""
    if "tactics" not in info.details or info.details.get("lowering") == LOWERING:
        return None
    return "built by an older version of the INT8 lowering; build it again"
