"""Nsight Systems: run it, read its SQLite export into frames, break the time down."""
