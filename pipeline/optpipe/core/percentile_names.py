"""The names of percentiles: `p50`, `p99.9`, and `mean_p99` for the mean over processes."""

MEAN = "mean_"
"""Prefix of a percentile above p50 that is the mean of the processes' percentiles instead of that of all requests."""


def format_percentile_name(percent: float) -> str:
    """`p50`, `p99`, `p99.9`."""
    return f"p{percent:g}"


def percent_from_name(name: str) -> float:
    """99.9 for `p99.9` and `mean_p99.9`; 0 for another figure's name."""
    name = name.removeprefix(MEAN)
    return float(name[1:]) if name.startswith("p") and name[1:].replace(".", "").isdigit() else 0.0


def pooled_percent_from_name(name: str) -> float:
    """The percentile if it is over all requests; 0 for a mean over processes and other figures."""
    percent = percent_from_name(name)
    return percent if percent > 50 and not name.startswith(MEAN) else 0.0
