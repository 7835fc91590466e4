"""A metric for optpipe: by how much one query in a hundred takes longer than the median."""

import numpy as np

from optpipe.core.metrics.contract import Metric, Window
from optpipe.core.quantity import Dimension


class Spread(Metric):
    name = "spread"
    title = "spread of the latency"
    dimension = Dimension.TIME
    fewest = 100

    def compute(self, window: Window) -> float | str:
        count = len(window.latencies_ns)
        if count < self.fewest:
            return f"{count} queries are fewer than {self.fewest}"
        middle, late = np.quantile(window.latencies_ns, [0.5, 0.99])
        return float(late - middle)
