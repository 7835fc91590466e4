"""Records of a judged profile, as in `profile.json` and `--json`.

If a part is None, `trace_quality.withheld` gives the reason; the roofline is None without the model's graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

import polars as pl

from optpipe.core.records import record_from_plain
from optpipe.trace.bottleneck import Bottleneck, Gaps, LimitingFactor, Quality
from optpipe.trace.kernels import KernelKind
from optpipe.trace.nsys import Stage
from optpipe.trace.read import Gpu
from optpipe.trace.roofline import Roofline
from optpipe.trace.tensor_cores import TensorCores
from optpipe.trace.timeline import IdleCause

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class FindingRow:
    """A row of the trace that supports a finding: a kernel, copy, call, range, or layer, or a gap and the operation after it."""

    name: str
    total_ns: float
    count: int = 1
    start_ns: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ProfileFinding:
    rule: str
    evidence: str
    gain_ns: int
    """An upper bound, over the measured part."""
    advice: str
    rows: tuple[FindingRow, ...] = ()
    gain_share: float = 0.0
    host_times: bool = False
    """True if the evidence is host times, which a profiler's overhead distorts."""


@dataclass(frozen=True, slots=True)
class StageFacts:
    """Facts about a stage that are not in its recording; the defaults are for other programs' recordings."""

    stage: Stage | None = None
    backend: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    expects_gpu: bool = True
    """If false, as for a CPU stage, missing GPU rows are not a defect of the trace."""
    unprofiled_iteration_ns: float | None = None
    """One iteration in the same process without a recording."""


@dataclass(frozen=True, slots=True)
class KernelRow:
    name: str
    count: int
    total_ns: int
    share: float
    kind: KernelKind
    tensor_core: bool | None
    """None if the name does not tell."""
    in_classic_list: bool
    """True for the kernels that together take the first 90% of the time."""
    mean_ns: float
    launch_ns: int | None
    """Time in the launching calls; None for kernels of CUDA graphs, which share one launch."""
    queue_ns: int | None
    """Time from the launching calls' ends to the kernels' starts."""


@dataclass(frozen=True, slots=True)
class CallRow:
    name: str
    count: int
    total_ns: int
    share: float
    in_classic_list: bool


@dataclass(frozen=True, slots=True)
class CopyRow:
    """All copies, or memsets, of one kind between the same kinds of memory; None if the trace does not say."""

    kind: str | None
    source_memory: str | None
    target_memory: str | None
    count: int
    total_ns: int
    bytes: int
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class RangeRow:
    """All NVTX ranges of one name, and the GPU operations that they launched."""

    name: str
    count: int
    wall_ns: int
    gpu_ns: int | None
    kernel_ns: int | None
    kernels: int | None
    projected_ns: int | None
    """From the start of each range's first operation to the end of its last."""
    busy_ns: int
    """The time in this window in which kernels run."""
    bottleneck: LimitingFactor | None


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over a trace or a part of it; None if the trace cannot support them."""

    kernels: int
    streams: int
    kernel_ns: int | None
    api_ns: int | None
    memcpy_ns: int | None
    memset_ns: int | None
    copy_beside_compute_ns: int | None
    span_ns: int
    busy_ns: int | None
    idle_ns: int | None
    idle_by_cause: Mapping[IdleCause, int]
    """Adds up to `idle_ns`; empty if that is None."""


@dataclass(frozen=True, slots=True)
class TraceViews:
    totals: Totals
    kernels: tuple[KernelRow, ...]
    api: tuple[CallRow, ...]
    copies: tuple[CopyRow, ...]
    os_runtime: tuple[CallRow, ...]
    ranges: tuple[RangeRow, ...]


@dataclass(frozen=True, slots=True)
class Iterations:
    """Host times are None if the profiler slowed the host too much."""

    range: str
    count: int
    first_wall_ns: int | None
    median_other_wall_ns: float | None
    period_ns: float | None
    """From the start of one iteration to the start of the next."""
    unprofiled_ns: float | None
    median_gpu_ns: float
    kernels: float


@dataclass(frozen=True, slots=True)
class TraceProfile:
    source: str
    tracer: str
    gpus: tuple[Gpu, ...]
    trace_quality: Quality
    scope: str
    measured: TraceViews
    iterations: Iterations | None
    gaps: Gaps | None
    tensor_cores: TensorCores | None
    roofline: Roofline | None
    bottleneck: Bottleneck
    findings: tuple[ProfileFinding, ...]
    """Sorted by gain, largest first."""


@dataclass(frozen=True, slots=True)
class StageSubject:
    """The profiled stage; None for fields that do not apply."""

    name: str
    kind: Literal["build", "preprocess", "inference"]
    artifact: str | None = None
    precision: str | None = None
    device: str | None = None
    batch_size: int | None = None
    implementation: str | None = None
    """`dali` or `cpu reference`, of preprocessing."""
    length: int | None = None
    """Tokens of every sequence, padding included."""
    sha256: str | None = None
    """`hash_engine` of the artifact."""


@dataclass(frozen=True, slots=True)
class StageProfile:
    """One profiled stage with all inputs of its judgment, so that it can be judged again."""

    subject: StageSubject
    folder: str
    range: str | None
    """The judged range; None for the measured range."""
    facts: StageFacts
    profile: TraceProfile


@dataclass(frozen=True, slots=True)
class FailedStage:
    name: str
    kind: Literal["build", "preprocess", "inference"]
    error: str
    exit_status: int


@dataclass(frozen=True, slots=True)
class ProfileRecord:
    stages: tuple[StageProfile, ...]
    failed: tuple[FailedStage, ...] = ()


def rows_from_table(table: pl.DataFrame, kind: type[Row]) -> tuple[Row, ...]:
    """Raises BadInputError if a value has another type, as in a damaged trace."""
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    return record_from_plain(table.select(names).to_dicts(), tuple[kind, ...], "the trace")  # type: ignore[valid-type]
