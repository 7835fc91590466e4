"""Nsight Systems: record stages under it, read its SQLite export into typed Polars frames, and say what limits them."""
