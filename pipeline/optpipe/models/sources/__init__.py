"""One kind of model name per file: each turns a MODEL into a card and a module or an ONNX file."""
