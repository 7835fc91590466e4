"""Records of measurements: raw samples, their summary, and the validity of the summary.

A bench run folder (see `optpipe.workspace.runs` for what every run folder has)
    measurements.json          a `MeasurementsRecord`
    samples/<id>.parquet       one row per query, columns SAMPLE_COLUMNS, warm-up included and marked
    machine/<id>.parquet       one row per reading of the machine, columns MACHINE_COLUMNS
    comparison.json            only after `bench B --against A`: a `measure.pair.PairedComparison`

All times are integer nanoseconds of Linux's CLOCK_MONOTONIC (`time.perf_counter_ns`), so that samples and machine rows
of one run lie on one axis. Every statistic of a `Measurement` can be recomputed from its Parquet file.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Annotated

from optpipe.core import plan as params
from optpipe.core.entries import Environment
from optpipe.core.errors import BadInputError
from optpipe.core.files import Files
from optpipe.core.quantity import Dimension, Estimate
from optpipe.core.records import read_versioned
from optpipe.core.wording import Argument

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


class Scenario(StrEnum):
    """How queries arrive, after MLPerf inference."""

    SINGLE_STREAM = "single-stream"
    MULTI_STREAM = "multi-stream"
    OFFLINE = "offline"
    SERVER = "server"


class Mode(StrEnum):
    """Content of a query: the computation alone (inputs already on the device), or the copies in and out too."""

    COMPUTE = "compute"
    END_TO_END = "end-to-end"


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
class LoadSpec:
    """A load, from the command line to the worker. The first five fields say what is measured, the others how long."""

    batch_size: Annotated[int, params.BATCH]
    scenario: Annotated[Scenario, params.SCENARIO] = Scenario.SINGLE_STREAM
    mode: Annotated[Mode, params.MODE] = Mode.COMPUTE
    streams: Annotated[int, params.STREAMS] = 1
    rate_per_s: Annotated[float | None, params.RATE] = None
    min_seconds: Annotated[float, params.MIN_TIME] = 1.0
    max_seconds: Annotated[float, params.MAX_TIME] = 60.0
    percentile: Annotated[float, params.PERCENTILE] = 99.0
    warm_up_seconds: Annotated[float, params.WARM_UP] = 0.5
    max_warm_up_seconds: Annotated[float, params.MAX_WARM_UP] = 20.0
    output_checks: int = 16
    cache_probes: int = 12
    length: Annotated[int | None, params.LENGTH] = None
    """Tokens per sequence, with padding; None without sequences, or if it was not recorded."""
    images: bool | None = None
    """None if it was not recorded."""

    @property
    def key(self) -> tuple[int, Scenario, Mode, int, float | None, int | None]:
        """Equal for measurements of the same load."""
        return self.batch_size, self.scenario, self.mode, self.streams, self.rate_per_s, self.length

    @property
    def size(self) -> str:
        """`batch 8`, or `batch 8, length 128` for sequences."""
        return ", ".join([f"batch {self.batch_size}", *self.list_lengths()])

    @property
    def sample(self) -> str:
        """Unit of rates and energy: `image`, or `sample` for sequences and other tensors."""
        return "sample" if self.images is False or self.length is not None else "image"

    def require_sound(self, *, needs_rate: bool = True) -> None:
        """Raises BadInputError for an impossible load; `needs_rate` is False while the rate is searched."""
        scenario, streams, rate = self.scenario, self.streams, self.rate_per_s
        if streams < 1 or (
            streams > 1 and scenario not in (Scenario.MULTI_STREAM, Scenario.OFFLINE)
        ):
            raise BadInputError(
                "must be at least 1; more than 1 requires "
                + Argument("scenario", Scenario.MULTI_STREAM)
                + " or offline",
                argument=Argument("streams", streams),
            )
        if rate is not None and (scenario is not Scenario.SERVER or not 0 < rate < inf):
            raise BadInputError(
                Argument("rate")
                + " must be positive and requires "
                + Argument("scenario", Scenario.SERVER)
            )
        if rate is None and needs_rate and scenario is Scenario.SERVER:
            raise BadInputError(
                Argument("scenario", Scenario.SERVER)
                + " requires "
                + Argument("rate", "QUERIES_PER_SECOND")
                + "; "
                + Argument("slo")
                + " finds the maximum rate"
            )
        if not 0 < self.percentile < 100:
            raise BadInputError(
                "expected a number between 0 and 100, such as 99 or 99.9",
                argument=Argument("percentile", self.percentile),
            )
        measuring = 0 < self.min_seconds <= self.max_seconds < inf
        if not (measuring and 0 <= self.warm_up_seconds <= self.max_warm_up_seconds < inf):
            raise BadInputError(
                "times must be positive and finite, with "
                + Argument("min_time")
                + " <= "
                + Argument("max_time")
                + " and warm-up <= max-warm-up"
            )

    def list_lengths(self) -> list[str]:
        """`length 128`; empty without sequences."""
        return [] if self.length is None else [f"length {self.length}"]

    @property
    def arrivals(self) -> str:
        """`at 500/s` or `in 4 streams`; empty for one stream without a rate."""
        if self.rate_per_s is not None:
            return f"at {self.rate_per_s:g}/s"
        return f"in {self.streams} streams" if self.streams > 1 else ""

    def __str__(self) -> str:
        """`batch 8, single-stream, compute`; `batch 1, length 128, server at 500/s, compute`."""
        return f"{self.size}, {self.scenario} {self.arrivals}".rstrip() + f", {self.mode}"


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
class PluginFigure:
    """A figure that a plug-in's metric computed for one process. Verification does not need the plug-in."""

    value: float | None
    """In `unit`; None if there is none."""
    unit: Dimension
    distribution: str
    """The distribution that computed it, and its version: `optpipe-jitter 1.0`."""
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
    figures: Mapping[str, PluginFigure] = field(default_factory=dict)
    """The figures of plug-ins, by the metric's name."""
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


def list_load_options(load: LoadSpec) -> dict[str, object]:
    """Options of `bench` that define what is measured, not how long: batch 8, scenario server, rate 500."""
    how_long = (
        "min_seconds",
        "max_seconds",
        "percentile",
        "warm_up_seconds",
        "max_warm_up_seconds",
    )
    return params.list_options(load, *how_long)


def name_sample(samples: Iterable[str]) -> str:
    """Unit of the rates of several loads: `sample` if any of them counts samples."""
    return "sample" if "sample" in samples else "image"


MEAN = "mean_"
"""Prefix of a percentile above p50 that is the mean of the processes' percentiles instead of that of all requests."""


def format_percentile_name(percent: float) -> str:
    """`p50`, `p99`, `p99.9`."""
    return f"p{percent:g}"


def percent_from_name(name: str) -> float:
    """99.9 for `p99.9` and `mean_p99.9`; 0 for another figure's name."""
    name = name.removeprefix(MEAN)
    return float(name[1:]) if name.startswith("p") and name[1:].replace(".", "").isdigit() else 0.0


def pooled_percent_from_name(name: str) -> float:
    """The percentile if it is over all requests; 0 for a mean over processes and other figures."""
    percent = percent_from_name(name)
    return percent if percent > 50 and not name.startswith(MEAN) else 0.0


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
    """Names whose values differ among `settings`, in alphabetical order."""
    known = list(settings)
    names = sorted({name for each in known for name in each})
    return tuple(name for name in names if len({each.get(name) for each in known}) > 1)


def format_settings(settings: Mapping[str, str], names: Iterable[str]) -> str:
    """`spinning=false threads=2`: the `settings` among `names`."""
    return " ".join(f"{name}={settings[name]}" for name in names if name in settings)


@dataclass(frozen=True, slots=True)
class GroupFigure:
    estimate: Estimate
    """Mean over processes (p50: of their medians). A percentile above p50 is over all requests. No interval below three processes."""
    processes: tuple[float, ...]
    """Figure of each process, by run."""
    between: float | None
    """Standard deviation between processes beyond the noise inside them, as a share of the figure."""
    inside: float | None
    """Standard deviation of one process's figure due to the noise inside it, as a share of the figure."""
    unit: Dimension | None = None
    """The unit of a plug-in's figure."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    run: str
    measurement: str
    codes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeasurementGroup:
    subject: Subject
    load: LoadSpec
    processes: int
    """VALID processes; the figures are theirs."""
    runs: tuple[str, ...]
    figures: Mapping[str, GroupFigure]
    """`p50` … in ns, `throughput` in images or samples per s, `tokens` per s without padding, `energy` in J per image or sample, `cv`,
    `memory` in bytes."""
    left_out: tuple[LeftOut, ...] = ()


MAX_CV = 0.025
"""Maximum coefficient of variation of a VALID measurement; trtexec warns above the same value."""
SENSOR_SHARE = 0.05
"""Relative error of the board's power sensor (NVML documentation of nvmlDeviceGetPowerUsage)."""
PROCESSES = 5
"""Fresh processes of a measurement (Georges et al., OOPSLA 2007; Kalibera & Jones, ISMM 2013)."""
ROUNDS = 10
"""Default rounds of a paired comparison."""


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
    memory_bytes: int | None = None
    size_bytes: int | None = None
    build_s: float | None = None
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
        return next(one for one in self.rows if one.id == row_id)
