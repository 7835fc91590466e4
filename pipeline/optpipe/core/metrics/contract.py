"""What a measured metric is: one subclass of `Metric` for each figure."""

from typing import TYPE_CHECKING, Protocol

from optpipe.core.comparison import ComparisonRow
from optpipe.core.load import LoadSpec
from optpipe.core.measurement import Measurement
from optpipe.core.quantity import Dimension, Estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import polars as pl


class Window(Protocol):
    """The raw data of one process's measured queries, and the statistics that a figure needs.

    `measure.figures.SampledWindow` is one. An `Estimate` has an interval at the confidence that was asked for, or none
    where the samples cannot support one.
    """

    load: LoadSpec
    samples: "pl.DataFrame"
    """One row per measured query, in the order of its end; columns `core.measurement.SAMPLE_COLUMNS`."""
    machine: "pl.DataFrame"
    """One row per reading during the measurement; columns `core.measurement.MACHINE_COLUMNS`."""
    padding: float
    """Share of sequence positions that the attention mask excludes."""

    @property
    def latencies_ns(self) -> "np.ndarray":
        """(queries,): from when a query was due to its answer."""

    @property
    def images(self) -> int:
        """Images, or samples of another kind, in all measured queries."""

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""

    def estimate_mean(self, values: "Sequence[float] | np.ndarray") -> Estimate:
        """The mean of independent values (n,), with Student's t interval; without one below three values."""

    def estimate_rate(self, amounts: "np.ndarray", times_ns: "np.ndarray") -> Estimate:
        """Sum of `amounts` (queries,) over the sum of `times_ns` (queries,), per second.

        The interval is that of a ratio of sums over consecutive groups: neighboring queries resemble each other.
        """


class Metric:
    """One figure: what a process's raw samples say, and how the processes of a build are judged together.

    A build's figure is the mean of its processes' figures, with Student's t interval over processes, unless the class says
    otherwise. A figure is a finite number of at least 0, in the base unit of `dimension`.
    """

    name: str
    """The key in records and columns: `p99`, `energy`."""
    column: str = ""
    """The key with its unit, as a column of a data frame: `p99_ns`, `energy_j`; the name if it is empty."""
    mark: str = ""
    """Precedes a value that stands alone: `p99 `, `≈ ` for an approximate one."""
    title: str
    """In a sentence: `energy`, `p99 latency`."""
    dimension: Dimension
    higher_is_better: bool = False

    in_regression: bool = False
    """Whether `[regression]` of a policy may limit its loss against the approved baseline."""
    in_history: bool = True
    """Whether a history looks for changes in it: not in a figure that follows from others, or that one slow request decides."""
    has_speeds: bool = True
    """False if two speeds of one build do not differ in it, so that its interval needs no allowance for an unseen speed."""
    sensor_share: float = 0.0
    """Relative error that all processes share, because one sensor reads it."""
    judges_peak: bool = False
    """Whether the largest process is judged, with a margin for the next one, instead of the mean."""
    is_optional: bool = False
    """Whether a VALID process may lack it without a doubt about the others."""
    remedy: str = "measure again"
    """What to do for a missing figure; the command of the measurement follows."""
    needs_longer: bool = False
    """Whether more samples would give a missing figure."""
    least_seconds: float = 0.0
    """The shortest measurement that gives it."""
    needs_gpu: bool = False
    is_witnessed: bool = False
    """Whether only the worker saw it: the record states it, and no raw file shows how it came about."""
    inverse_of: "Metric | None" = None
    """The metric whose reciprocal it is: both are judged and shown from the same figures."""
    percent: float = 0.0
    """The percentile of the latency that it is; 0 for any other metric."""
    is_over_processes: bool = True
    """False for a percentile above p50, which is over all requests, and for p50 beside it."""
    is_pooled: bool = False
    """Whether it is over the requests of all processes, not the mean of the processes' figures."""

    @property
    def is_listed(self) -> bool:
        """Whether records have it among their `figures`, and not in a field: those of earlier versions may lack it."""
        return type(self).read is Metric.read

    def allow_for_sensor(self, low: float, high: float) -> tuple[float, float]:
        """The bounds of what a sensor may have read as `low` to `high`: a reading 5% low is the truth times 0.95."""
        return low / (1 + self.sensor_share), high / (1 - self.sensor_share)

    def remove_sensor(self, low: float, high: float) -> tuple[float, float]:
        """The bounds before `allow_for_sensor`: those of what was read."""
        return low * (1 + self.sensor_share), high * (1 - self.sensor_share)

    def compute(self, window: Window) -> Estimate | float | str:
        """The figure of one process from its raw data, as a number or an Estimate, or the reason why there is none.

        Percentiles and the variation of the latency are read from the summary that `stats.percentiles` makes of all of it, and
        memory from the worker's record: they have nothing to compute.
        """
        raise NotImplementedError

    def read(self, measured: Measurement) -> Estimate | None:
        """The figure of one process from its record; None if it has none. A plug-in's lies in `Measurement.figures`."""
        figure = measured.figures.get(self.name)
        return None if figure is None or figure.value is None else Estimate(figure.value)

    def read_without_interval(self, measured: Measurement) -> float | None:
        """The figure of one process even if its samples cannot support an interval; over processes it needs none."""
        estimate = self.read(measured)
        return None if estimate is None else estimate.value

    def read_row(self, row: ComparisonRow) -> Estimate | None:
        """The figure of a row of a comparison; None if it has none. Those of no other place lie in `ComparisonRow.figures`."""
        figure = row.figures.get(self.name)
        return None if figure is None else figure.estimate

    def explain_missing(self, measured: Measurement) -> str:
        """Why a VALID process has no figure: a clause."""
        why = self.find_reason(measured)
        return f"the {self.title} was not measured{f': {why}' if why else ''}"

    def find_reason(self, measured: Measurement) -> str | None:
        """Why one process withheld the figure, as its record says; None if it does not."""
        figure = measured.figures.get(self.name)
        return None if figure is None else figure.why_not

    @property
    def loss_sign(self) -> float:
        """1 if a larger figure is a loss, -1 if a smaller one is."""
        return -1.0 if self.higher_is_better else 1.0
