"""Models: a name becomes a card, a module or an ONNX file, and samples; what is stored of it is found again."""
