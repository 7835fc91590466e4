"""The folder that a recorded program finds first in PYTHONPATH."""
