"""Defaults that several commands share; those of a load are `core.measurement.LoadSpec`'s."""

MAX_CV = 0.025
"""Largest coefficient of variation of a VALID measurement; trtexec warns over the same."""
PROCESSES = 5
"""Fresh processes of a measurement (Georges et al., OOPSLA 2007; Kalibera & Jones, ISMM 2013)."""
MAX_PROCESS_FACTOR = 4
"""Processes are at most this many times those asked for where an interval is to be reached."""
ROUNDS = 10
"""Of a paired comparison."""
