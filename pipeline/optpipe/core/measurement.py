"""What a measurement is: raw samples, their summary, and whether the summary may be believed.

Format history
    1  first version: `measurements.json` beside one Parquet file of raw samples per measurement.

A bench run folder (see `optpipe.core.runs` for what every run folder has)
    measurements.json          {"schema": "optpipe.measurements", "schema_version": 1, "measurements": [as_json(m), …]}
    samples/<id>.parquet       one row per query, columns SAMPLE_COLUMNS, warm-up included and marked
    machine/<id>.parquet       one row per look at the machine, columns MACHINE_COLUMNS
    comparison.json            only after `bench A B --interleave`: the ratio, its interval, its blocks

All times are integer nanoseconds of Linux's CLOCK_MONOTONIC (`time.perf_counter_ns`), so that samples and machine rows
of one run lie on one axis. Every statistic of a `Measurement` can be recomputed from its Parquet file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from optpipe.errors import BadInputError

SCHEMA = "optpipe.measurements"
SCHEMA_VERSION = 1
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
    "other_cpu_cores": "Float64",  # cores busy with anything but the worker and its parent, stolen time included
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
    streams: int = 1
    offered_rate_per_s: float | None = None
    """Server: queries per second that were due."""
    device_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
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
    def key(self) -> tuple[object, ...]:
        """What must be equal for two measurements to measure the same thing."""
        graph = self.subject.cuda_graph
        return (
            self.subject.model, self.subject.backend, self.subject.precision, self.subject.device, graph,
            self.batch_size, self.scenario, self.mode, self.streams, self.offered_rate_per_s,
        )  # fmt: skip


def percentile_name(percent: float) -> str:
    """`p50`, `p99`, `p99.9`."""
    return f"p{percent:g}"


def summary_as_json(summary: LatencySummary) -> dict[str, Any]:
    """`{"p50": {"value": …, "ci": [low, high]}, …, "min", "max", "mean", "stddev", "cv", "withheld"}`, in ms."""
    document: dict[str, Any] = {
        percentile_name(one.percent): {"value": one.value, "ci": list(one.ci)} for one in summary.percentiles
    }
    return document | {
        "min": summary.minimum,
        "max": summary.maximum,
        "mean": summary.mean,
        "stddev": summary.stddev,
        "cv": summary.cv,
        "samples": summary.samples,
        "confidence": summary.confidence,
        "withheld": dict(summary.withheld),
    }


def summary_from_json(document: Mapping[str, Any]) -> LatencySummary:
    """The inverse of `summary_as_json`."""
    found = [
        Percentile(float(name[1:]), float(value["value"]), (float(value["ci"][0]), float(value["ci"][1])))
        for name, value in document.items()
        if name.startswith("p") and isinstance(value, Mapping)
    ]
    return LatencySummary(
        samples=document["samples"],
        percentiles=tuple(found),
        minimum=document["min"],
        maximum=document["max"],
        mean=document["mean"],
        stddev=document["stddev"],
        withheld=dict(document["withheld"]),
        confidence=document["confidence"],
    )


def as_json(measurement: Measurement) -> dict[str, Any]:
    """One element of `measurements[]`. Keys the issue tracker's schema names first, then the details."""
    subject = measurement.subject
    throughput, energy, check = (
        measurement.throughput_images_per_s,
        measurement.energy_j_per_image,
        measurement.output_check,
    )
    peak = measurement.host_peak_bytes if subject.device == "cpu" else measurement.device_peak_bytes
    return {
        "id": measurement.id,
        "artifact": subject.artifact,
        "model": subject.model,
        "backend": subject.backend,
        "precision": subject.precision,
        "batch_size": measurement.batch_size,
        "scenario": str(measurement.scenario),
        "mode": str(measurement.mode),
        "samples": measurement.samples,
        "latency_ms": None if measurement.latency is None else summary_as_json(measurement.latency),
        "throughput_images_per_s": None if throughput is None else throughput.value,
        "memory_bytes": peak,
        "energy_j_per_image": None if energy is None else energy.value,
        "verdict": str(measurement.verdict),
        "reasons": [_plain(reason) for reason in measurement.reasons],
        "throughput_images_per_s_ci": None if throughput is None or throughput.ci is None else list(throughput.ci),
        "throughput_batches_per_s": measurement.throughput_batches_per_s,
        "images_per_joule": 1.0 / energy.value if energy is not None and energy.value > 0 else None,
        "energy": {"value": None, "ci": None, "note": measurement.energy_why_not}
        if energy is None
        else _plain(energy) | {"approximate": True},
        "parts_ms": {name: summary_as_json(part) for name, part in measurement.parts.items()},
        "device_peak_bytes": measurement.device_peak_bytes,
        "host_peak_bytes": measurement.host_peak_bytes,
        "subject": _plain(subject),
        "streams": measurement.streams,
        "offered_rate_per_s": measurement.offered_rate_per_s,
        "warm_up_samples": measurement.warm_up_samples,
        "duration_s": measurement.duration_s,
        "output_check": None if check is None else _plain(check),
        "inputs": dict(measurement.inputs),
        "limits": dict(measurement.limits),
        "caveats": list(measurement.caveats),
        "interrupted": measurement.interrupted,
        "samples_file": measurement.samples_file,
        "machine_file": measurement.machine_file,
        "started_utc": measurement.started_utc,
    }


def measurement_from_json(document: Mapping[str, Any]) -> Measurement:
    """The inverse of `as_json`. Raises BadInputError where a key is missing."""
    try:
        return _measurement(document)
    except (KeyError, TypeError, ValueError) as error:
        message = f"not a measurement of schema version {SCHEMA_VERSION}: {error!r}; measure again with optpipe bench"
        raise BadInputError(message) from error


def document_of(measurements: tuple[Measurement, ...]) -> dict[str, Any]:
    """The content of `measurements.json`."""
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "measurements": [as_json(measurement) for measurement in measurements],
    }


def measurements_of(document: Mapping[str, Any]) -> tuple[Measurement, ...]:
    """The measurements in a `measurements.json`. Raises BadInputError for another schema or version, by number."""
    if document.get("schema") != SCHEMA or document.get("schema_version") != SCHEMA_VERSION:
        message = (
            f"measurements of schema {document.get('schema')!r} version {document.get('schema_version')!r}; "
            f"this optpipe reads {SCHEMA!r} version {SCHEMA_VERSION}: measure again with optpipe bench"
        )
        raise BadInputError(message)
    return tuple(measurement_from_json(one) for one in document["measurements"])


def _measurement(document: Mapping[str, Any]) -> Measurement:
    subject = dict(document["subject"])
    subject["affinity"] = None if subject["affinity"] is None else tuple(subject["affinity"])
    latency, check = document["latency_ms"], document["output_check"]
    energy = document["energy"] or {"value": None, "note": None}
    throughput, interval = document["throughput_images_per_s"], document["throughput_images_per_s_ci"]
    return Measurement(
        id=document["id"],
        subject=Subject(**subject),
        batch_size=document["batch_size"],
        scenario=Scenario(document["scenario"]),
        mode=Mode(document["mode"]),
        verdict=Validity(document["verdict"]),
        reasons=tuple(Reason(**reason) for reason in document["reasons"]),
        latency=None if latency is None else summary_from_json(latency),
        parts={name: summary_from_json(part) for name, part in document["parts_ms"].items()},
        throughput_images_per_s=None if throughput is None else Estimate(throughput, _interval(interval)),
        energy_j_per_image=(
            None if energy["value"] is None else Estimate(energy["value"], _interval(energy["ci"]), energy["note"])
        ),
        energy_why_not=energy["note"] if energy["value"] is None else None,
        output_check=None if check is None else OutputCheck(**check),
        inputs=dict(document["inputs"]),
        limits=dict(document["limits"]),
        caveats=tuple(document["caveats"]),
        **{name: document[name] for name in _COPIED},
    )


_COPIED = (
    "samples", "warm_up_samples", "duration_s", "throughput_batches_per_s", "streams", "offered_rate_per_s",
    "device_peak_bytes", "host_peak_bytes", "interrupted", "samples_file", "machine_file", "started_utc",
)  # fmt: skip


def _interval(values: Any) -> tuple[float, float] | None:
    return None if values is None else (float(values[0]), float(values[1]))


def _plain(value: Any) -> dict[str, Any]:
    found = {one.name: getattr(value, one.name) for one in fields(value)}
    return {
        name: list(item) if isinstance(item, tuple) else dict(item) if isinstance(item, Mapping) else item
        for name, item in found.items()
    }
