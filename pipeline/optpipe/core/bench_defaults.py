"""How often a measurement is repeated, and the scatter that it may have."""

MAX_CV = 0.025
"""Maximum coefficient of variation of a VALID measurement; trtexec warns above the same value."""
PROCESSES = 5
"""Fresh processes of a measurement (Georges et al., OOPSLA 2007; Kalibera & Jones, ISMM 2013)."""
ROUNDS = 10
"""Default rounds of a paired comparison."""
