"""`max`: the largest magnitude seen. Nothing is clipped; one outlier decides the resolution of all other values."""

from optpipe.quantize.statistics import TensorStatistics

HISTOGRAM = False


def amax(statistics: TensorStatistics) -> float:
    """The range's bound."""
    return statistics.amax
