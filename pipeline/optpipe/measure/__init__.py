"""Measurement: workers put loads on artifacts, the parent judges what came back, runs record it, and tables compare it.

`worker/` is the only code that runs inside a measured process. Everything else runs in the parent: it starts workers, watches
the machine, computes figures and validity from raw samples, and decides what to measure next.
"""
