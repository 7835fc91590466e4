"""What a report shows, as values: filled by `compare.report_data`, drawn by the reporters."""

from dataclasses import dataclass, field

from optpipe.core.comparison import Comparison
from optpipe.core.environment import Environment
from optpipe.core.verdict import VerdictRecord
from optpipe.trace.findings.records import TraceProfile


@dataclass(frozen=True, slots=True)
class RawFile:
    """A file that figures were computed from; `path` is relative to the report."""

    path: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Curve:
    """A line in a figure: `points` are (x, y) in the figure's units."""

    label: str
    points: tuple[tuple[float, float], ...]
    files: tuple[RawFile, ...] = ()


@dataclass(frozen=True, slots=True)
class MachineTrace:
    """A quantity of the machine over a measurement, in seconds from its start."""

    quantity: str
    """With its unit: `CPU clock (MHz)`."""
    curves: tuple[Curve, ...]


@dataclass(frozen=True, slots=True)
class StageBar:
    """How long a step took."""

    label: str
    stage: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ReportImage:
    """An image inside the page: `uri` holds it whole."""

    caption: str
    uri: str
    files: tuple[RawFile, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Everything one page shows. `verdict` is None for a plain comparison."""

    title: str
    comparison: Comparison
    verdict: VerdictRecord | None = None
    latencies: tuple[Curve, ...] = ()
    """Empirical distribution functions: latency in ms, share of the queries in [0, 1]."""
    machine: tuple[MachineTrace, ...] = ()
    stages: tuple[StageBar, ...] = ()
    profile: TraceProfile | None = None
    """The newest profile of an inference, or of another stage where there is none."""
    profile_files: tuple[RawFile, ...] = ()
    pictures: tuple[ReportImage, ...] = ()
    """Of the parity proof."""
    stage_files: tuple[RawFile, ...] = ()
    """Where `stages` come from."""
    files: tuple[RawFile, ...] = ()
    created_utc: str = ""
    optpipe: str = ""
    environment: Environment = field(default_factory=Environment)
