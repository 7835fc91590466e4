"""`optpipe preprocess` and `bench --from-images`: the DALI pipeline derived from the model's transform, proven equal, and measured.

Alone (`throughput/`) and overlapped with an engine, from files to predictions (`end_to_end/`).
"""
