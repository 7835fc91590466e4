"""`optpipe build` and `optpipe doctor`: engines from ONNX graphs, their precision proof and their verification."""
