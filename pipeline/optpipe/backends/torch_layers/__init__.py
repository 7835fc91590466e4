"""Layers of torch programs on NVIDIA GPUs, in INT8 and FP16.

torch exports and compiles the module's program, in which an operator with the kernels of `optpipe.kernels` computes convolutions,
attention over few tokens, linear layers before an activation, and in INT8 all linear layers. Everything else is torch's compiler's,
which fuses the quantization with the code before it.
"""

LOWERING = 10
"""Increase it if programs become other steps or the operator's arguments change: packages call the operator they were built for."""
