"""What `optpipe bench` and `optpipe bench --against` say: measurements, a limit's answer, tuning, a paired comparison."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from optpipe.core.entries import Environment
from optpipe.core.measurement import Measurement, MeasurementGroup, Options, Validity
from optpipe.stats.ratio import Ratio


class PairMetric(StrEnum):
    P50 = "p50"
    P90 = "p90"
    P99 = "p99"
    MEAN = "mean"
    THROUGHPUT = "throughput"


class BenchSort(StrEnum):
    """How the table of a bench run is sorted."""

    GIVEN = "given"
    LATENCY = "latency"
    THROUGHPUT = "throughput"
    MEMORY = "memory"
    ENERGY = "energy"


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Contender over baseline, and the figure of every process that it rests on: the content of `comparison.json`."""

    metric: PairMetric
    ratio: Ratio
    baseline_artifact: str
    contender_artifact: str
    baseline_ns: tuple[float, ...]
    contender_ns: tuple[float, ...]
    """Per query, in order of the rounds; for `throughput`, per image."""
    first_rounds: int
    """Rounds whose scatter decided how many there would be, and gives the interval."""
    seed: int
    """Of the order within the rounds."""
    invalid: Mapping[str, int]
    """Processes whose measurement is INVALID, by the code of each reason. They count: their order was drawn too."""
    invalid_processes: int
    measurements: tuple[str, ...]
    """Ids, in the order in which they were measured."""
    schema_version: int = 1


@dataclass(frozen=True, slots=True)
class UnjudgedPoint:
    batch_size: int
    rate_per_s: float | None
    why: str


@dataclass(frozen=True, slots=True)
class ArtifactLimit:
    """What the measurements of one artifact say of a latency limit."""

    artifact: str
    label: str
    slo: str
    met: bool | None
    """None where no VALID measurement decides it."""
    inside: bool
    measurement: str | None
    """The largest point inside the limit, else the closest to it; the next five are of it."""
    batch_size: int | None
    rate_per_s: float | None
    value_ns: float | None
    upper_bound_ns: float | None
    verdict: Validity | None
    not_judged: tuple[UnjudgedPoint, ...] = ()


@dataclass(frozen=True, slots=True)
class LimitRecord:
    """The answers of all artifacts: met where one meets it, and not met only where none may."""

    slo: str
    met: bool | None
    artifacts: tuple[ArtifactLimit, ...]


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """Options that were tried, with what each round gave, by batch size."""

    options: Options
    throughput_images_per_s: Mapping[int, tuple[float | None, ...]]
    verdicts: Mapping[int, tuple[Validity, ...]]
    reasons: Mapping[int, tuple[str, ...]]
    wrong_outputs: tuple[int, ...]
    """Batch sizes at which outputs were wrong."""


@dataclass(frozen=True, slots=True)
class TuningRecord:
    artifact: str
    label: str
    seed: int
    """Of the order of the processes."""
    chosen: Mapping[int, Options] = field(default_factory=dict)
    """Options by batch size; empty where it was interrupted."""
    final: Mapping[int, Ratio] = field(default_factory=dict)
    """Times of the winner of the races over those of the defaults, by batch size; empty where the defaults won the races."""
    trials: tuple[TrialRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class TuningFile:
    """The content of `tuning.json`."""

    tuning: tuple[TuningRecord, ...]
    schema_version: int = 1


@dataclass(frozen=True, slots=True)
class BenchRecord:
    """The JSON document of `optpipe bench`; with `--against` of the comparison alone."""

    run_dir: str
    run_id: str
    measurements: tuple[Measurement, ...]
    environment: Environment
    exit_status: int
    groups: tuple[MeasurementGroup, ...] = ()
    """The measurements by artifact, settings and load: what the processes show together."""
    baseline: str | None = None
    """With `--against`."""
    contender: str | None = None
    comparison: PairedComparison | None = None
    """None where it was interrupted."""
    limit: LimitRecord | None = None
    tuning: tuple[TuningRecord, ...] = ()
    interrupted: bool = False
    warnings: tuple[str, ...] = field(default=())
