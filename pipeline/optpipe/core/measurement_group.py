"""What several processes show of one artifact under one load."""

from collections.abc import Mapping
from dataclasses import dataclass

from optpipe.core.estimate import Estimate
from optpipe.core.measurement import LoadSpec, Subject


@dataclass(frozen=True, slots=True)
class GroupFigure:
    """A figure over processes."""

    estimate: Estimate
    """The mean, with Student's t interval over processes; without one for fewer than three."""
    processes: tuple[float, ...]
    """Each process's own figure, by run."""
    between: float | None
    """Standard deviation between processes without what the noise inside them explains, as a share of the figure."""
    inside: float | None
    """Standard deviation of one process's figure from the noise inside it, likewise."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A try that does not count."""

    run: str
    measurement: str
    codes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeasurementGroup:
    """All processes of one artifact, settings and load."""

    subject: Subject
    load: LoadSpec
    processes: int
    """The VALID ones; figures are theirs."""
    runs: tuple[str, ...]
    figures: Mapping[str, GroupFigure]
    """`p50` … in ns, `throughput` in images or samples per s, `tokens` per s without padding, `energy` in J per image or sample, `cv`,
    `memory` in bytes."""
    left_out: tuple[LeftOut, ...] = ()
