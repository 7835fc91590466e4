"""Steps that win accuracy back in INT8 without labels: each is a function from an FP32 graph to an FP32 graph.

The graph that a step makes is calibrated, gets its Q/DQ pairs, and is built as any other. Equalization and smoothing compute the
same in FP32; learned rounding, bias correction, and distillation move weights and biases so that they are right in INT8. Model
Optimizer 0.47 has none of them for ONNX graphs: its SmoothQuant, GPTQ, and distillation take torch's modules
(`modelopt.torch.quantization`, `modelopt.torch.distill`), which a user's ONNX file has not, and it has no equalization, no bias
correction, and no learned rounding of convolutions.
"""
