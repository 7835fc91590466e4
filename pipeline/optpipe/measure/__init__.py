"""Measurement: workers run loads on artifacts, the parent judges the results, runs record them, and tables compare them.

`worker/` is the only code that runs inside a measured process. Everything else runs in the parent: it starts workers,
watches the machine, computes figures and validity from raw samples, and decides what to measure next.
"""
