"""A judged profile as records: what `profile.json` and `--json` hold and reports show.

Where a part is None, `trace_quality.withheld` says why; the roofline is None where the model's graph was not given.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

import polars as pl

from optpipe.core.records import record_from_plain
from optpipe.trace.bottleneck import Bottleneck, Gaps, LimitingFactor, Quality
from optpipe.trace.kernels import KernelKind
from optpipe.trace.ranges import Stage
from optpipe.trace.read import Gpu
from optpipe.trace.roofline import Roofline
from optpipe.trace.tensor_cores import TensorCores
from optpipe.trace.timeline import IdleCause

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class FindingRow:
    """A row of the trace that a finding rests on: a kernel, copy, call, range or layer, or a gap and what follows it."""

    name: str
    total_ns: float
    count: int = 1
    start_ns: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ProfileFinding:
    """Something that costs time, with the evidence and the next thing to try."""

    rule: str
    evidence: str
    gain_ns: int
    """An upper bound, over the measured part."""
    advice: str
    rows: tuple[FindingRow, ...] = ()
    gain_share: float = 0.0
    host_times: bool = False
    """Whether the evidence is times of the host, which a profiler's overhead distorts."""


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What is known of a stage beside its recording; the defaults are for a recording made by someone else."""

    stage: Stage | None = None
    backend: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    expects_gpu: bool = True
    """Without it, as for a stage of the CPU, missing GPU rows are not a defect of the trace."""
    unprofiled_iteration_ns: float | None = None
    """One iteration timed in the same process without a recording."""


@dataclass(frozen=True, slots=True)
class KernelRow:
    name: str
    count: int
    total_ns: int
    share: float
    kind: KernelKind
    tensor_core: bool | None
    """None where the name does not tell."""
    in_classic_list: bool
    """Whether it belongs to the first 90 % of the time."""
    mean_ns: float
    median_ns: float
    min_ns: int
    max_ns: int
    launch_ns: int | None
    """Time in the launching calls; None for kernels of CUDA graphs, which have one launch for all."""
    queue_ns: int | None
    """Time from the launching calls' ends to the kernels' starts."""


@dataclass(frozen=True, slots=True)
class KindRow:
    """All kernels of one kind of work."""

    kind: KernelKind
    count: int
    total_ns: int
    tensor_core_ns: int
    share: float


@dataclass(frozen=True, slots=True)
class CallRow:
    """All calls of one name, to CUDA or to the operating system."""

    name: str
    count: int
    total_ns: int
    share: float
    in_classic_list: bool


@dataclass(frozen=True, slots=True)
class CopyRow:
    """All copies, or memsets, of one kind between the same kinds of memory; None where the trace does not say."""

    kind: str | None
    source_memory: str | None
    target_memory: str | None
    count: int
    total_ns: int
    bytes: int
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class RangeRow:
    """All NVTX ranges of one name: on the host, and on the GPU what they launched."""

    name: str
    count: int
    wall_ns: int
    gpu_ns: int | None
    kernel_ns: int | None
    kernels: int | None
    projected_ns: int | None
    """From the start of the first operation that each range launched to the end of its last."""
    busy_ns: int
    """The part of it in which kernels run."""
    bottleneck: LimitingFactor | None


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over a trace or a part of it; None where the trace cannot support them."""

    kernels: int
    streams: int
    kernel_ns: int | None
    api_ns: int | None
    memcpy_ns: int | None
    memset_ns: int | None
    copy_beside_compute_ns: int | None
    streams_concurrent_ns: int | None
    """Time in which kernels of at least two streams run."""
    span_ns: int
    busy_ns: int | None
    idle_ns: int | None
    idle_by_cause: Mapping[IdleCause, int]
    """Adds up to `idle_ns`; empty where that is None."""


@dataclass(frozen=True, slots=True)
class TraceViews:
    """The tables of a trace, or of a part of it, each with what takes longest first."""

    totals: Totals
    kernels: tuple[KernelRow, ...]
    kernel_kinds: tuple[KindRow, ...]
    api: tuple[CallRow, ...]
    copies: tuple[CopyRow, ...]
    os_runtime: tuple[CallRow, ...]
    ranges: tuple[RangeRow, ...]


@dataclass(frozen=True, slots=True)
class Iterations:
    """The measured iterations; host times are None where the profiler slowed the host too much to give them."""

    range: str
    count: int
    first_wall_ns: int | None
    median_other_wall_ns: float | None
    median_wall_ns: float | None
    median_projected_ns: float | None
    period_ns: float | None
    """From the start of one to the start of the next."""
    unprofiled_ns: float | None
    median_gpu_ns: float
    kernels: float


@dataclass(frozen=True, slots=True)
class TraceProfile:
    """Everything said about one trace; its tables are of the measured part, `totals` of the whole trace."""

    source: str
    tracer: str
    gpus: tuple[Gpu, ...]
    trace_quality: Quality
    scope: str
    """`trace`, or the range that bounds what is judged."""
    totals: Totals
    measured: TraceViews
    iterations: Iterations | None
    gaps: Gaps | None
    tensor_cores: TensorCores | None
    roofline: Roofline | None
    bottleneck: Bottleneck
    findings: tuple[ProfileFinding, ...]
    """The largest gain first."""


@dataclass(frozen=True, slots=True)
class StageSubject:
    """What was profiled; None where it does not apply to the stage."""

    name: str
    kind: Literal["build", "preprocess", "inference"]
    artifact: str | None = None
    precision: str | None = None
    device: str | None = None
    batch_size: int | None = None
    implementation: str | None = None
    """Of preprocessing: `dali` or `cpu reference`."""
    length: int | None = None
    """Tokens of every sequence, padding included."""
    sha256: str | None = None
    """Of the artifact's files (`hash_engine`)."""


@dataclass(frozen=True, slots=True)
class StageProfile:
    """One profiled stage with all that it was judged by, so that it can be judged again."""

    subject: StageSubject
    folder: str
    """Where its trace lies, inside the run's folder."""
    range: str | None
    """The range of that trace that it is judged by; None for the measured range."""
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
    """`profile.json`: every stage of one run."""

    stages: tuple[StageProfile, ...]
    failed: tuple[FailedStage, ...] = ()


def rows_from_table(table: pl.DataFrame, kind: type[Row]) -> tuple[Row, ...]:
    """The rows of `table` as records of type `kind`, whose fields are among its columns.

    Raises:
        BadInputError: a value is of another type, as in a damaged trace.
    """
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    return record_from_plain(table.select(names).to_dicts(), tuple[kind, ...], "the trace")  # type: ignore[valid-type]
