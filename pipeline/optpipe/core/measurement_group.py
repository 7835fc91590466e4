"""The figures of one build under one load over several processes."""

from collections.abc import Mapping
from dataclasses import dataclass

from optpipe.core.load import LoadSpec
from optpipe.core.measurement import Subject
from optpipe.core.quantity import Dimension, Estimate


@dataclass(frozen=True, slots=True)
class GroupFigure:
    estimate: Estimate
    """Mean over processes (p50: of their medians). A percentile above p50 is over all requests. No interval below three processes."""
    processes: tuple[float, ...]
    """Figure of each process, by run."""
    between: float | None
    """Standard deviation between processes beyond the noise inside them, as a share of the figure."""
    inside: float | None
    """Standard deviation of one process's figure due to the noise inside it, as a share of the figure."""
    unit: Dimension | None = None
    """The unit of a figure that has no field of its own in a measurement."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    run: str
    measurement: str
    codes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeasurementGroup:
    subject: Subject
    load: LoadSpec
    processes: int
    """VALID processes; the figures are theirs."""
    runs: tuple[str, ...]
    figures: Mapping[str, GroupFigure]
    """`p50` … in ns, `throughput` in images or samples per s, `tokens` per s without padding, `energy` in J per image or sample, `cv`,
    `memory` in bytes; others say their unit."""
    left_out: tuple[LeftOut, ...] = ()
