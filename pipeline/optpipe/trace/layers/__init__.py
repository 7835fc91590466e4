"""What each layer of the network cost: kernels attributed to ONNX nodes, roofline, Tensor Cores, hardware counters."""
