"""Records of `optpipe bench`: measurements, a limit's answer, tuning, a paired comparison."""

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
    GIVEN = "given"
    LATENCY = "latency"
    THROUGHPUT = "throughput"
    MEMORY = "memory"
    ENERGY = "energy"


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Contender over baseline, with the figure of every process: the content of `comparison.json`."""

    metric: PairMetric
    ratio: Ratio
    baseline_artifact: str
    contender_artifact: str
    baseline_ns: tuple[float, ...]
    contender_ns: tuple[float, ...]
    """Per query, in order of the rounds; for `throughput`, per image."""
    first_rounds: int
    """Rounds whose scatter determined the total and gives the interval."""
    seed: int
    """Seed of the order within rounds."""
    invalid: Mapping[str, int]
    """INVALID processes by reason code. They count, since their order was drawn too."""
    invalid_processes: int
    measurements: tuple[str, ...]
    schema_version: int = 1


@dataclass(frozen=True, slots=True)
class ArtifactLimit:
    artifact: str
    label: str
    slo: str
    met: bool | None
    """None if no VALID measurement decides it."""
    inside: bool
    measurement: str | None
    """The largest point inside the limit, otherwise the closest; the next five fields describe it."""
    batch_size: int | None
    rate_per_s: float | None
    value_ns: float | None
    upper_bound_ns: float | None
    verdict: Validity | None
    not_judged: Mapping[str, str] = field(default_factory=dict)
    """The reason by point, `batch 8` or `200 queries/s`."""


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """Options that were tried, with each round's results by batch size."""

    options: Options
    throughput_images_per_s: Mapping[int, tuple[float | None, ...]]
    verdicts: Mapping[int, tuple[Validity, ...]]
    reasons: Mapping[int, tuple[str, ...]]
    wrong_outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TuningRecord:
    artifact: str
    label: str
    seed: int
    """Seed of the order of processes."""
    chosen: Mapping[int, Options] = field(default_factory=dict)
    """Options by batch size; empty if it was interrupted."""
    final: Mapping[int, Ratio] = field(default_factory=dict)
    """Times of the races' winner over the defaults', by batch size; empty if the defaults won the races."""
    trials: tuple[TrialRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchRecord:
    """The JSON document of `optpipe bench`; with `--against` only of the comparison."""

    run_dir: str
    run_id: str
    measurements: tuple[Measurement, ...]
    environment: Environment
    exit_status: int
    groups: tuple[MeasurementGroup, ...] = ()
    baseline: str | None = None
    contender: str | None = None
    comparison: PairedComparison | None = None
    """None if it was interrupted."""
    limits: tuple[ArtifactLimit, ...] = ()
    tuning: tuple[TuningRecord, ...] = ()
    interrupted: bool = False
    warnings: tuple[str, ...] = field(default=())
