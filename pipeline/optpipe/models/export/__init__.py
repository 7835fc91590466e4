"""The source model as ONNX, with its card and its reference inputs and outputs. Precision and engines come later."""
