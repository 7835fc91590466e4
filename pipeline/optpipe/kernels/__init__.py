"""Kernels of 8-bit and FP16 layers for NVIDIA GPUs, with their tuner and its cache.

A layer is a step (`steps`), which one of several kernels can compute, with settings (`tactics`). The operator `optpipe::layer`
(`operators`) takes a step as text and launches a kernel (`launches`); `tuner` finds the fastest tactic on the GPU that is there. One
kernel computes convolution, bias, residual addition, activation, and requantization, or the convolutions of a residual block.
Activations are in NHWC, and in INT8 between such layers. The room knows no programs, files, or models.
"""
