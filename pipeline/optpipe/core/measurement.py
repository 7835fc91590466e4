"""Records of measurements: raw samples, their summary, and the validity of the summary.

A bench run folder (see `optpipe.workspace.runs` for what every run folder has)
    measurements.json          a `MeasurementsRecord`
    samples/<id>.parquet       one row per query, columns SAMPLE_COLUMNS, warm-up included and marked
    machine/<id>.parquet       one row per reading of the machine, columns MACHINE_COLUMNS
    comparison.json            only after `bench B --against A`: a `measure.pair.PairedComparison`

All times are integer nanoseconds of Linux's CLOCK_MONOTONIC (`time.perf_counter_ns`), so that samples and machine rows
of one run lie on one axis. Every statistic of a `Measurement` can be recomputed from its Parquet file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from optpipe.core.files import Files
from optpipe.core.load import LoadSpec
from optpipe.core.percentile_names import format_percentile_name
from optpipe.core.quantity import Dimension, Estimate
from optpipe.core.records import read_versioned
from optpipe.core.settings import format_cpus, format_option

MEASUREMENTS_FILE = "measurements.json"
COMPARISON_FILE = "comparison.json"

SAMPLE_COLUMNS: Mapping[str, str] = {
    "phase": "UInt8",  # a Phase: 0 warm-up, 1 measured
    "stream": "UInt16",  # which of the concurrent streams (multi-stream), otherwise 0
    "input": "UInt32",  # which of the rotated inputs was answered
    "images": "UInt32",  # images in this query
    "scheduled_ns": "Int64",  # when the query was due (server: the seeded arrival); start_ns in closed loops
    "start_ns": "Int64",  # when the runtime was called
    "end_ns": "Int64",  # when the answer was complete (device synchronized)
    "enqueue_ns": "Int64",  # time the host spent inside the launching call(s); equals the whole on the CPU
    "h2d_ns": "Int64",  # CUDA events; null if not measured (CPU, compute mode)
    "compute_ns": "Int64",  # CUDA events; null on the CPU
    "d2h_ns": "Int64",  # CUDA events; null if not measured
}
"""Polars type names of the raw samples. Latency is always `end_ns - scheduled_ns`."""

MACHINE_COLUMNS: Mapping[str, str] = {
    "time_ns": "Int64",
    "other_cpu_cores": "Float64",  # the worker's CPUs: busy with anything but it and its parent, stolen time included
    "worker_cpu_cores": "Float64",
    "worker_rss_bytes": "Int64",
    "cpu_mhz": "Float64",  # mean over the worker's CPUs; null if the host hides it
    "worker_waited_cores": "Float64",  # threads of the worker that were ready and had no core (Linux schedstat)
    "gpu_sm_mhz": "Int64",
    "gpu_mem_mhz": "Int64",
    "gpu_temperature_c": "Int64",
    "gpu_power_w": "Float64",
    "gpu_energy_mj": "Int64",  # the driver's running total
    "gpu_utilization": "Int64",  # percent
    "gpu_used_bytes": "Int64",  # whole device
    "gpu_worker_bytes": "Int64",  # the worker's share, null if the driver does not report it
    "gpu_other_processes": "Int64",
    "gpu_throttle_reasons": "Int64",  # NVML's bit mask
}
"""Polars type names of the machine's rows; GPU columns are null without a GPU."""


Options = Mapping[str, bool | int | str]


class Phase:
    WARM_UP = 0
    MEASURED = 1


class Validity(StrEnum):
    """Whether figures may be believed. INVALID figures are kept and shown, but judge nothing."""

    VALID = "VALID"
    INVALID = "INVALID"


@dataclass(frozen=True, slots=True)
class Reason:
    code: str
    """Stable and machine-readable: `drift`, `dispersion`, `wrong-output`, …; measure.validity has all."""
    message: str
    remedy: str
    invalidates: bool
    """False for a property of the artifact (enqueue-bound), True if it spoils the figures."""
    evidence: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Distribution of one duration over the measured queries, in ns, untrimmed."""

    samples: int
    percentiles: Mapping[str, Estimate]
    """By name (`p99.9`), each with a distribution-free interval from order statistics."""
    minimum: float
    maximum: float
    mean: float
    stddev: float
    withheld: Mapping[str, str]
    """Reasons for percentiles that the samples cannot support, by name."""
    cv: Estimate | None = None
    """Coefficient of variation of all samples: standard deviation over mean."""
    confidence: float = 0.95
    median: float | None = None
    """Present even if p50 is withheld for lack of an interval; None for too few samples."""

    def percentile(self, percent: float) -> Estimate | None:
        """None if the percentile was withheld or not requested."""
        return self.percentiles.get(format_percentile_name(percent))


@dataclass(frozen=True, slots=True)
class OutputCheck:
    checked: int
    passed: bool
    reference: str
    relative_error: float | None = None
    """Maximum ‖timed − reference‖ / ‖reference‖ over the checked outputs."""
    tolerance: str | None = None
    why_not: str | None = None
    """The fault, or why nothing was checked."""
    tells_inputs_apart: bool | None = None
    """False if different inputs give equal outputs, so that a stale answer would go unnoticed."""


@dataclass(frozen=True, slots=True)
class Subject:
    artifact: str
    backend: str
    precision: str
    device: str
    """`cpu` or `cuda:0`."""
    model: str | None = None
    sha256: str | None = None
    options: Options = field(default_factory=dict)
    """Runtime options in force: provider options, threads, layout."""
    cuda_graph: bool | None = None
    """None on a device without CUDA graphs."""
    threads: int | None = None
    affinity: tuple[int, ...] | None = None
    weights: str | None = None
    """`default`, a file's hash, or `random`."""
    packages: tuple[str, ...] = ()
    """The distributions whose versions decide how the artifact behaves, the runtime's first; empty in records of earlier versions."""

    @property
    def settings(self) -> dict[str, str]:
        """Options in force and affinity, as typed: everything that changes without another build."""
        affinity = {} if self.affinity is None else {"affinity": format_cpus(self.affinity)}
        return {
            name: format_option(value) for name, value in sorted(self.options.items())
        } | affinity


@dataclass(frozen=True, slots=True)
class InputPool:
    kind: str
    """`images`, `texts` or `synthetic`."""
    count: int
    real: int
    """Inputs that are not variations of others."""
    seed: int
    sha256: str
    rotated: int = 0
    rotated_bytes: int = 0
    """Device memory of the rotated batches, which is not the artifact's."""
    padding: float = 0.0
    """Share of sequence positions that the attention mask excludes."""
    lengths: tuple[int, int] | None = None
    """(min, max) sequence length of the build; equal if texts are padded to one length."""


@dataclass(frozen=True, slots=True)
class ProcessFigure:
    """A figure of one process without a field of its own: of a plug-in's metric, or of `core.metrics.measured.RECORDED`.

    Verification does not need the plug-in.
    """

    value: float | None
    """In `unit`; None if there is none."""
    unit: Dimension
    distribution: str
    """The distribution that computed it, and its version: `optpipe-jitter 1.0`; `optpipe` alone for its own."""
    why_not: str | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """One subject under one load, in one process."""

    id: str
    subject: Subject
    load: LoadSpec
    verdict: Validity
    reasons: tuple[Reason, ...]
    samples: int = 0
    warm_up_samples: int = 0
    duration_s: float = 0.0
    latency_ns: LatencySummary | None = None
    """None if nothing could be measured (out of memory, refused shape)."""
    parts_ns: Mapping[str, LatencySummary] = field(default_factory=dict)
    """`enqueue`, `h2d`, `compute`, `d2h`, `queue`, `service`, if measured."""
    throughput_images_per_s: Estimate | None = None
    throughput_batches_per_s: float | None = None
    """Batches of `batch_size`; a query of multi-stream holds one per stream."""
    throughput_tokens_per_s: Estimate | None = None
    """Without padding; None without sequences."""
    device_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    """Peak resident memory of the worker, without the memory for rotation and comparison."""
    energy_j_per_image: Estimate | None = None
    """Approximate, from the driver's counter over the measured window; `note` has the details."""
    energy_why_not: str | None = None
    figures: Mapping[str, ProcessFigure] = field(default_factory=dict)
    """Figures without a field of their own, by the metric's name."""
    output_check: OutputCheck | None = None
    inputs: InputPool | None = None
    arrivals_seed: int | None = None
    """Server: drawn for every measurement, so that none repeats another's luck."""
    limits: Mapping[str, float] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()
    """Facts that cap a sign-off: random weights, synthetic inputs, a fallback."""
    interrupted: bool = False
    process: int = 0
    second_stage: bool = False
    """Whether the scatter of earlier processes required this one (Stein's two-stage rule), as in runs of version 0.1."""
    samples_file: str | None = None
    machine_file: str | None = None
    started_utc: str = ""

    @property
    def is_valid(self) -> bool:
        return self.verdict is Validity.VALID

    @property
    def invalid_codes(self) -> tuple[str, ...]:
        """The codes that make it INVALID, sorted: a set, whatever the order in which they were found."""
        return tuple(sorted({reason.code for reason in self.invalid_reasons}))

    @property
    def invalid_reasons(self) -> tuple[Reason, ...]:
        """The reasons that make it INVALID."""
        return tuple(reason for reason in self.reasons if reason.invalidates)

    @property
    def memory_bytes(self) -> int | None:
        return self.host_peak_bytes if self.subject.device == "cpu" else self.device_peak_bytes

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for measurements of the same build, settings and load."""
        of = self.subject
        return (
            of.model,
            of.backend,
            of.precision,
            of.device,
            tuple(of.settings.items()),
            *self.load.key,
        )


@dataclass(frozen=True, slots=True)
class MeasurementsRecord:
    measurements: tuple[Measurement, ...]
    schema_version: int = 1


def read_measurements(files: Files) -> tuple[Measurement, ...]:
    """Raises BadInputError if the measurements are missing or of another version."""
    return read_versioned(files, MEASUREMENTS_FILE, MeasurementsRecord).measurements
