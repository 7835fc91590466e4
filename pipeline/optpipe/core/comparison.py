"""A comparison of measured builds: its rows, its frontier, the best build for each goal, and what has no counterpart."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from optpipe.core.measurement import Mode, Scenario


class Goal(StrEnum):
    """What `--for` can ask for."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    EFFICIENCY = "efficiency"


@dataclass(frozen=True, slots=True)
class ComparedValue:
    """A figure with its interval; both bounds None where the data cannot support one."""

    value: float
    low: float | None = None
    high: float | None = None

    def as_json(self) -> dict[str, Any]:
        """`{"value": …, "ci": [low, high]}`, or `"ci": null`."""
        return {"value": self.value, "ci": None if self.low is None else [self.low, self.high]}


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
    batch_size: int
    scenario: str
    mode: str
    build: str
    """`onnxruntime int8`, with its model first and its device last where other rows have others."""
    valid: bool
    streams: int = 1
    rate_per_s: float | None = None
    """Server: queries per second that were due."""
    reasons: tuple[str, ...] = ()
    reason_codes: tuple[str, ...] = ()
    """Of what invalidates it."""
    samples: int = 0
    latency_ms: Mapping[str, ComparedValue] = field(default_factory=dict)
    """By percentile name; one that the sample cannot support is not there."""
    throughput_images_per_s: ComparedValue | None = None
    energy_j_per_image: ComparedValue | None = None
    memory_bytes: int | None = None
    size_bytes: int | None = None
    build_s: float | None = None
    top1: ComparedValue | None = None
    speedup: ComparedValue | None = None
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
        return ", ".join([self.configuration, f"batch {self.batch_size}", *self._unusual])

    @property
    def series(self) -> str:
        """The label without its batch size: what a line in a figure is of."""
        return ", ".join([self.configuration, *self._unusual])

    @property
    def _unusual(self) -> list[str]:
        """What is not as usual of the load."""
        usual = (Scenario.SINGLE_STREAM, Mode.COMPUTE)
        return [said for said in (self.load, self.mode) if said not in usual]

    @property
    def configuration(self) -> str:
        """`onnxruntime int8 threads=2`: the build with its setting, which it keeps over all batch sizes."""
        return f"{self.build} {self.setting}".rstrip()

    @property
    def load(self) -> str:
        """`single-stream`, `server at 500/s`, `multi-stream in 4 streams`."""
        return f"{self.scenario} {self.arrivals}".rstrip()

    @property
    def arrivals(self) -> str:
        """`at 500/s` or `in 4 streams`; empty for one query after the other."""
        if self.rate_per_s is not None:
            return f"at {self.rate_per_s:g}/s"
        return f"in {self.streams} streams" if self.streams > 1 else ""

    def as_json(self) -> dict[str, Any]:
        """One element of `rows[]`."""
        document = asdict(self) | {"label": self.label}
        for name in ("throughput_images_per_s", "energy_j_per_image", "top1", "speedup"):
            figure = getattr(self, name)
            document[name] = None if figure is None else figure.as_json()
        document["latency_ms"] = {name: figure.as_json() for name, figure in self.latency_ms.items()}
        document["verdict"] = "VALID" if self.valid else "INVALID"
        document["images_per_joule"] = 1 / self.energy_j_per_image.value if self.energy_j_per_image else None
        return document


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything `optpipe compare` has to say."""

    rows: tuple[ComparisonRow, ...]
    best: Mapping[str, str | None]
    """Row id for each goal; None where no valid row meets the limits."""
    best_reason: Mapping[str, str]
    unmatched: tuple[Mapping[str, str], ...] = ()
    """`{"row", "reason"}`: what has no counterpart in the baseline."""
    baseline: Mapping[str, Any] | None = None
    slo: str | None = None
    warnings: tuple[str, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)

    def row(self, row_id: str) -> ComparisonRow:
        """The row of that id."""
        return next(one for one in self.rows if one.id == row_id)

    @property
    def frontier(self) -> tuple[ComparisonRow, ...]:
        """The rows that no other dominates."""
        return tuple(one for one in self.rows if one.on_frontier)

    def as_json(self) -> dict[str, Any]:
        """The document of `compare --json`."""
        return {
            "rows": [one.as_json() for one in self.rows],
            "frontier": [one.id for one in self.frontier],
            "best": {
                goal: None if row is None else {"row": row, "label": self.row(row).label, "why": self.best_reason[goal]}
                for goal, row in self.best.items()
            },
            "why_no_best": {goal: self.best_reason[goal] for goal, row in self.best.items() if row is None},
            "unmatched": [dict(one) for one in self.unmatched],
            "baseline": None if self.baseline is None else dict(self.baseline),
            "slo": self.slo,
            "warnings": list(self.warnings),
            "environment": dict(self.environment),
        }
