"""One kind of MODEL per file: each turns it into a card and a module or an ONNX file."""
