"""The document of `compare`: builds side by side, each with its figures, and the best of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from optpipe.core.entries import Environment
from optpipe.core.load import LoadSpec, Mode, Scenario
from optpipe.core.measurement_group import GroupFigure
from optpipe.core.quantity import Estimate


class Goal(StrEnum):
    LATENCY = "latency"
    THROUGHPUT = "throughput"
    EFFICIENCY = "efficiency"


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One build with one set of options under one load."""

    id: str
    run: str
    artifact: str
    model: str
    backend: str
    precision: str
    device: str
    load: LoadSpec
    build: str
    """`onnxruntime int8`, with its model first and its device last if other rows differ in them."""
    valid: bool
    reasons: tuple[str, ...] = ()
    reason_codes: tuple[str, ...] = ()
    """Codes of the reasons that invalidate it."""
    processes: int = 0
    """VALID processes; the figures are theirs."""
    left_out: int = 0
    samples: int = 0
    """Samples of the newest process."""
    latency_ns: Mapping[str, Estimate] = field(default_factory=dict)
    """By percentile name, without those that the samples cannot support."""
    throughput_images_per_s: Estimate | None = None
    throughput_tokens_per_s: Estimate | None = None
    """Without padding; None without sequences."""
    energy_j_per_image: Estimate | None = None
    figures: Mapping[str, GroupFigure] = field(default_factory=dict)
    """Figures that have no field here, by the metric's name, each with its unit."""
    memory_bytes: int | None = None
    size_bytes: int | None = None
    build_s: float | None = None
    """As the build's manifest states it: one build, of which no raw file shows anything."""
    top1: Estimate | None = None
    speedup: Estimate | None = None
    """Ratio of p50 latencies, baseline over this row; above 1 is faster."""
    change: str | None = None
    """`faster`, `slower` or `no difference shown`."""
    held_against: str | None = None
    """Id and configuration of the baseline's measurement that `speedup` refers to."""
    on_frontier: bool = False
    dominated_by: str | None = None
    """Id of a row that is better in some objectives and worse in none, with those objectives."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Every option in force, as typed on the command line."""
    setting: str = ""
    """The settings that differ from other rows of its build: `threads=2`."""
    caveats: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    """Raw files and their sha256."""

    @property
    def label(self) -> str:
        """`onnxruntime int8 threads=2, batch 8`; unique among the rows."""
        return ", ".join([self.configuration, f"batch {self.load.batch_size}", *self._unusual])

    @property
    def series(self) -> str:
        """The label without its batch size; names a line in a figure."""
        return ", ".join([self.configuration, *self._unusual])

    @property
    def _unusual(self) -> list[str]:
        """The parts of the load other than single-stream and compute."""
        usual = (Scenario.SINGLE_STREAM, Mode.COMPUTE)
        return [
            *self.load.list_lengths(),
            *(said for said in (self.scenario, self.load.mode) if said not in usual),
        ]

    @property
    def configuration(self) -> str:
        """`onnxruntime int8 threads=2`: build and setting, the same for all batch sizes."""
        return f"{self.build} {self.setting}".rstrip()

    @property
    def scenario(self) -> str:
        """`single-stream`, `server at 500/s`, `multi-stream in 4 streams`."""
        return f"{self.load.scenario} {self.load.arrivals}".rstrip()


@dataclass(frozen=True, slots=True)
class Levels:
    """Confidences of the intervals in a comparison; in a dossier those of its verdict."""

    figures: float = 0.95
    """The confidence of latencies, rates, and energy."""
    unseen: float = 0.95
    """The confidence of the second speed that these intervals allow for."""
    top1: float = 0.95
    speedup: float = 0.99


@dataclass(frozen=True, slots=True)
class Comparison:
    rows: tuple[ComparisonRow, ...]
    best: Mapping[str, str | None]
    """Row id by goal; None if no valid row meets the limits."""
    best_reason: Mapping[str, str]
    unmatched: Mapping[str, str] = field(default_factory=dict)
    """Reasons by the label of a row without a counterpart in the baseline; `baseline: ` precedes labels of the baseline's rows."""
    baseline: str | None = None
    slo: str | None = None
    warnings: tuple[str, ...] = ()
    environment: Environment = field(default_factory=Environment)
    written: tuple[str, ...] = ()
    confidence: Levels = field(default_factory=Levels)

    def row(self, row_id: str) -> ComparisonRow:
        return next(row for row in self.rows if row.id == row_id)
