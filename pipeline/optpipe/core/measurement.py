"""What a measurement is: raw samples, their summary, and whether the summary may be believed.

Format history
    1  first version: `measurements.json` beside one Parquet file of raw samples per measurement.

A bench run folder (see `optpipe.workspace.runs` for what every run folder has)
    measurements.json          {"schema": "optpipe.measurements", "schema_version": 1, "measurements": [as_json(m), …]}
    samples/<id>.parquet       one row per query, columns SAMPLE_COLUMNS, warm-up included and marked
    machine/<id>.parquet       one row per look at the machine, columns MACHINE_COLUMNS
    comparison.json            only after `bench A B --interleave`: the ratio, its interval, its blocks

All times are integer nanoseconds of Linux's CLOCK_MONOTONIC (`time.perf_counter_ns`), so that samples and machine rows
of one run lie on one axis. Every statistic of a `Measurement` can be recomputed from its Parquet file.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MEASUREMENTS_FILE = "measurements.json"
COMPARISON_FILE = "comparison.json"

SAMPLE_COLUMNS: Mapping[str, str] = {
    "phase": "UInt8",  # a Phase: 0 warm-up, 1 measured
    "stream": "UInt16",  # which of the concurrent streams (multi-stream), else 0
    "input": "UInt32",  # which of the rotated inputs was answered
    "images": "UInt32",  # images in this query (the batch size)
    "scheduled_ns": "Int64",  # when the query was due (server: the seeded arrival); start_ns in closed loops
    "start_ns": "Int64",  # when the runtime was called
    "end_ns": "Int64",  # when the answer was complete (device synchronized)
    "enqueue_ns": "Int64",  # time the host spent inside the launching call(s); equals the whole on the CPU
    "h2d_ns": "Int64",  # CUDA events; null where not measured (CPU, compute mode)
    "compute_ns": "Int64",  # CUDA events; null on the CPU
    "d2h_ns": "Int64",  # CUDA events; null where not measured
}
"""Polars type names of the raw samples. A query's latency is `end_ns - scheduled_ns`; nothing else is so called."""

MACHINE_COLUMNS: Mapping[str, str] = {
    "time_ns": "Int64",
    "other_cpu_cores": "Float64",  # the worker's CPUs: busy with anything but it and its parent, stolen time included
    "worker_cpu_cores": "Float64",
    "worker_rss_bytes": "Int64",
    "cpu_mhz": "Float64",  # mean over the worker's CPUs; null where the host hides it
    "worker_waited_cores": "Float64",  # threads of the worker that were ready and had no core (Linux schedstat)
    "gpu_sm_mhz": "Int64",
    "gpu_mem_mhz": "Int64",
    "gpu_temperature_c": "Int64",
    "gpu_power_w": "Float64",
    "gpu_energy_mj": "Int64",  # the driver's running total
    "gpu_utilization": "Int64",  # percent
    "gpu_used_bytes": "Int64",  # whole device
    "gpu_worker_bytes": "Int64",  # the worker's share, null where the driver does not say
    "gpu_other_processes": "Int64",
    "gpu_throttle_reasons": "Int64",  # NVML's bit mask
}
"""Polars type names of the machine's rows; GPU columns are null without one."""


class Phase:
    """Values of the `phase` column."""

    WARM_UP = 0
    MEASURED = 1


class Scenario(StrEnum):
    """How queries arrive, after MLPerf inference."""

    SINGLE_STREAM = "single-stream"
    MULTI_STREAM = "multi-stream"
    OFFLINE = "offline"
    SERVER = "server"


class Mode(StrEnum):
    """What a query contains: the computation alone (inputs already on the device), or the copies in and out too."""

    COMPUTE = "compute"
    END_TO_END = "end-to-end"


class Validity(StrEnum):
    """May the figures be believed? INVALID figures are kept and shown, and judge nothing."""

    VALID = "VALID"
    INVALID = "INVALID"


@dataclass(frozen=True, slots=True)
class Reason:
    """Something a reader must know about a measurement: what was seen, and what to do about it."""

    code: str
    """Stable and machine-readable: `drift`, `dispersion`, `wrong-output`, …; all are in measuring.validity."""
    message: str
    remedy: str
    invalidates: bool
    """False for a property of the artifact that one must know (enqueue-bound), True for what spoils the figures."""
    evidence: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Percentile:
    """One percentile, in ms, with a distribution-free interval from order statistics."""

    percent: float
    value: float
    ci: tuple[float, float]


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """The distribution of one duration over the measured queries, in ms. Nothing is trimmed."""

    samples: int
    percentiles: tuple[Percentile, ...]
    minimum: float
    maximum: float
    mean: float
    stddev: float
    withheld: Mapping[str, str]
    """Percentiles that the sample cannot support, by name (`p99.9`), with the reason."""
    confidence: float = 0.95

    @property
    def cv(self) -> float:
        """Coefficient of variation: standard deviation over mean, of all samples."""
        return self.stddev / self.mean if self.mean else 0.0

    def percentile(self, percent: float) -> Percentile | None:
        """The percentile `percent` (99.0), or None where it was withheld or not asked for."""
        return next((found for found in self.percentiles if found.percent == percent), None)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its interval (None where it has none, with the reason in `note`)."""

    value: float
    ci: tuple[float, float] | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """A random sample of the timed run's own outputs, compared with the reference."""

    checked: int
    passed: bool
    reference: str
    relative_error: float | None = None
    """Largest ‖timed − reference‖ / ‖reference‖ over the checked outputs."""
    tolerance: str | None = None
    why_not: str | None = None
    """What was wrong, or why nothing was checked."""
    tells_inputs_apart: bool | None = None
    """False where different inputs give equal outputs: then a stale answer could not be seen."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured, and how it was configured. Recorded, never implied."""

    artifact: str
    """Id in the store."""
    backend: str
    precision: str
    device: str
    """`cpu` or `cuda:0`."""
    model: str | None = None
    sha256: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Runtime options in force: provider options, threads, layout."""
    cuda_graph: bool | None = None
    """None where the device has none."""
    threads: int | None = None
    affinity: tuple[int, ...] | None = None
    weights: str | None = None
    """`default`, a file's hash, or `random`."""

    @property
    def settings(self) -> dict[str, str]:
        """What could be set otherwise without another build, as it is typed: the options in force and the processors."""
        affinity = {} if self.affinity is None else {"affinity": format_cpus(self.affinity)}
        return {name: format_option(value) for name, value in sorted(self.options.items())} | affinity


@dataclass(frozen=True, slots=True)
class Measurement:
    """One subject under one load, in one process."""

    id: str
    subject: Subject
    batch_size: int
    scenario: Scenario
    mode: Mode
    verdict: Validity
    reasons: tuple[Reason, ...]
    samples: int = 0
    warm_up_samples: int = 0
    duration_s: float = 0.0
    latency: LatencySummary | None = None
    """None where nothing could be measured (out of memory, refused shape): the reasons say which."""
    parts: Mapping[str, LatencySummary] = field(default_factory=dict)
    """`enqueue`, `h2d`, `compute`, `d2h`, `queue`, where measured."""
    throughput_images_per_s: Estimate | None = None
    throughput_batches_per_s: float | None = None
    """Batches of `batch_size`: a query of multi-stream holds one for each stream."""
    streams: int = 1
    offered_rate_per_s: float | None = None
    """Server: queries per second that were due."""
    device_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    """The worker's largest resident memory while it measured, without what it held for rotating and comparing."""
    energy_j_per_image: Estimate | None = None
    """Approximate: the driver's counter over the measured window; `note` says how."""
    energy_why_not: str | None = None
    """Why there is no figure of energy."""
    output_check: OutputCheck | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """`kind` (images, synthetic), `count`, `seed`, `sha256`."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Thresholds that the verdict was judged by."""
    caveats: tuple[str, ...] = ()
    """What caps a sign-off: random weights, synthetic inputs, a fallback."""
    interrupted: bool = False
    samples_file: str | None = None
    machine_file: str | None = None
    started_utc: str | None = None

    @property
    def load(self) -> tuple[int, Scenario, Mode, int, float | None]:
        """What was put on the subject: batch size, scenario, mode, streams and queries per second."""
        return self.batch_size, self.scenario, self.mode, self.streams, self.offered_rate_per_s

    @property
    def key(self) -> tuple[object, ...]:
        """What must be equal for two measurements to measure the same thing: the build, its settings and the load."""
        of = self.subject
        return of.model, of.backend, of.precision, of.device, tuple(of.settings.items()), *self.load


def format_percentile_name(percent: float) -> str:
    """`p50`, `p99`, `p99.9`."""
    return f"p{percent:g}"


def format_option(value: object) -> str:
    """An option's value as `--option` takes it: `2`, `true`, `HEURISTIC`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_cpus(cpus: Iterable[int]) -> str:
    """Processors as `--affinity` takes them: `0,4-7`."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and spans[-1][1] == cpu - 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans)


def find_differing_settings(settings: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    """The names that do not have one value in all of `settings`, in alphabetical order."""
    known = list(settings)
    names = sorted({name for each in known for name in each})
    return tuple(name for name in names if len({each.get(name) for each in known}) > 1)


def format_settings(settings: Mapping[str, str], names: Iterable[str]) -> str:
    """`spinning=false threads=2`: those of `settings` that are among `names`."""
    return " ".join(f"{name}={settings[name]}" for name in names if name in settings)
