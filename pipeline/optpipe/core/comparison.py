"""A comparison of measured builds: its rows, its frontier, the best build for each goal, and what has no counterpart."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from optpipe.core.entries import Environment
from optpipe.core.measurement import LoadSpec, Mode, Scenario
from optpipe.core.quantity import Estimate


class Goal(StrEnum):
    """What `--for` can ask for."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    EFFICIENCY = "efficiency"


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One measured build with one set of options at one batch size under one load."""

    id: str
    run: str
    artifact: str
    model: str
    backend: str
    precision: str
    device: str
    load: LoadSpec
    build: str
    """`onnxruntime int8`, with its model first and its device last where other rows have others."""
    valid: bool
    reasons: tuple[str, ...] = ()
    reason_codes: tuple[str, ...] = ()
    """Of what invalidates it."""
    processes: int = 0
    """VALID ones, which the figures are of."""
    left_out: int = 0
    """INVALID ones."""
    samples: int = 0
    """Of the newest."""
    latency_ns: Mapping[str, Estimate] = field(default_factory=dict)
    """By percentile name; one that the sample cannot support is not there."""
    throughput_images_per_s: Estimate | None = None
    throughput_tokens_per_s: Estimate | None = None
    """Without padding; None for a model without sequences."""
    energy_j_per_image: Estimate | None = None
    memory_bytes: int | None = None
    size_bytes: int | None = None
    build_s: float | None = None
    top1: Estimate | None = None
    speedup: Estimate | None = None
    """Of the p50 latency against the baseline; above 1 is faster."""
    change: str | None = None
    """`faster`, `slower` or `no difference shown`."""
    held_against: str | None = None
    """What `speedup` is over: the id and the configuration of the baseline's measurement."""
    on_frontier: bool = False
    dominated_by: str | None = None
    """The id of a row that is better in something and worse in nothing, and in what."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Every option in force, as it is typed."""
    setting: str = ""
    """Those that tell it from other rows of its build: `threads=2`."""
    caveats: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    """Raw files and their sha256."""

    @property
    def label(self) -> str:
        """`onnxruntime int8 threads=2, batch 8`; `torch fp16, batch 1, server at 500/s`: no other row has it."""
        return ", ".join([self.configuration, f"batch {self.load.batch_size}", *self._unusual])

    @property
    def series(self) -> str:
        """The label without its batch size: what a line in a figure is of."""
        return ", ".join([self.configuration, *self._unusual])

    @property
    def _unusual(self) -> list[str]:
        """What is not as usual of the load."""
        usual = (Scenario.SINGLE_STREAM, Mode.COMPUTE)
        return [*self.load.list_lengths(), *(said for said in (self.scenario, self.load.mode) if said not in usual)]

    @property
    def configuration(self) -> str:
        """`onnxruntime int8 threads=2`: the build with its setting, which it keeps over all batch sizes."""
        return f"{self.build} {self.setting}".rstrip()

    @property
    def scenario(self) -> str:
        """`single-stream`, `server at 500/s`, `multi-stream in 4 streams`."""
        return f"{self.load.scenario} {self.load.arrivals}".rstrip()


@dataclass(frozen=True, slots=True)
class UnmatchedRow:
    """A row without a counterpart in the baseline, or the other way round."""

    row: str
    label: str
    reason: str


@dataclass(frozen=True, slots=True)
class BaselineRecord:
    """What speed-ups are over."""

    name: str
    kind: str
    """`run`, `approved` or `precision`."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything `optpipe compare` has to say."""

    rows: tuple[ComparisonRow, ...]
    best: Mapping[str, str | None]
    """Row id for each goal; None where no valid row meets the limits."""
    best_reason: Mapping[str, str]
    unmatched: tuple[UnmatchedRow, ...] = ()
    baseline: BaselineRecord | None = None
    slo: str | None = None
    warnings: tuple[str, ...] = ()
    environment: Environment = field(default_factory=Environment)
    written: tuple[str, ...] = ()
    """The files of the report, where one was asked for."""

    def row(self, row_id: str) -> ComparisonRow:
        return next(one for one in self.rows if one.id == row_id)

    @property
    def frontier(self) -> tuple[ComparisonRow, ...]:
        return tuple(one for one in self.rows if one.on_frontier)
