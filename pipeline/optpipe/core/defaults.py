"""Defaults that several commands share; those of a load are `core.measurement.LoadSpec`'s."""

MAX_CV = 0.025
"""Largest coefficient of variation of a VALID measurement; trtexec warns over the same."""
ROUNDS = 10
"""Of a paired comparison."""
