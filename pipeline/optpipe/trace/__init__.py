"""Nsight Systems: run it, read its SQLite export into typed Polars frames, and say what limits the traced program."""
