"""The metrics by name."""

from optpipe.core.measurement import percent_from_name
from optpipe.core.metrics.contract import Metric
from optpipe.core.metrics.measured import OTHERS, SHOWN, Percentile
from optpipe.core.plugins import Registry

METRICS: Registry[Metric] = Registry("metric", {one.name: one for one in (*SHOWN, *OTHERS)})


def find_metric(name: str) -> Metric:
    """The metric called `name`, such as `p99.95`. Raises MissingError for one that this installation does not have."""
    if name not in METRICS and percent_from_name(name):
        return Percentile(name)
    return METRICS[name]
