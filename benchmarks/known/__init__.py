"""Sign-offs of trained models that people know, one script each.

`python -m benchmarks.known.NAME` makes reports/gallery/NAME again. The weights come from packages of others, at a pinned version and
hash; the data are made here, so that their truth is known. Each asks the same: may the INT8 build replace FP32 on this CPU? It may
lose one point, and must be faster.
"""
