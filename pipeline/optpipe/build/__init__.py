"""`optpipe build` and `optpipe doctor`: engines from ONNX graphs, their precision proof and their verification.

`choose/` is `build --precision auto`: the fastest of the builds that keep an accuracy budget.
"""
