"""INT8 layers of torch programs on NVIDIA GPUs.

torch exports and compiles the module's program, in which an operator with Triton kernels computes convolutions and linear layers.
Activations between such layers are INT8 in NHWC. One kernel computes convolution, bias, residual addition, activation, and
requantization; other layers run in FP16, and torch's compiler fuses the quantization with the code before it.
"""

LOWERING = 5
"""Increase it if programs become other steps or the operator's arguments change: packages call the operator they were built for."""
