"""Models: resolves a name to a card, a module or an ONNX file, and samples, and finds stored builds again."""
