"""INT8 networks in torch on NVIDIA GPUs: a Q/DQ graph becomes a chain of fused kernels.

Between layers activations are INT8 in NHWC. Convolution, bias, residual addition, ReLU and requantization are one Triton
kernel, and so are a depthwise convolution with all that follows it and a product with a gate; what the graph leaves in floating
point runs in FP16.
"""
