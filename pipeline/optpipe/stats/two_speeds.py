"""What a few processes that agree cannot exclude: that the build has two speeds, and all of them ran at one.

Memory layout and core placement are drawn anew for each process, and a host may give a build two speeds. Student's t over processes
that happened to draw the same one is as narrow as the scatter at that one. With a share p of the processes at the other speed, the
long run lies p · gap from the one that was drawn, and n processes all drew it with probability (1 - p)ⁿ. Distances and gaps are
logarithms of ratios.
"""

from math import ceil, exp, inf, log, log1p

SPEED_GAP = log1p(0.05)
"""How far apart two speeds of one build are taken to be at least: processes of one host were seen 5 % apart (`benchmarks/README.md`)."""


def compute_unseen_reach(processes: int, level: float, gap: float = SPEED_GAP) -> float:
    """How far the long run may lie from `processes` that agree; farther with a probability of at most `level`."""
    return gap * (1 - exp(log(level) / processes))


def compute_unseen_p_value(distance: float, processes: int, gap: float = SPEED_GAP) -> float:
    """The largest probability of drawing `processes` at one speed where the long run lies `distance` from it."""
    return max(0.0, 1 - distance / gap) ** processes


def count_processes_for_reach(distance: float, level: float, gap: float = SPEED_GAP) -> float:
    """How many processes bring the reach down to `distance`; infinite for none."""
    other = 1 - distance / gap
    return inf if distance <= 0 else 1 if other <= 0 else ceil(log(level) / log(other) - 1e-9)
