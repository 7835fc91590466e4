"""Measurements as JSON and back: what `measurements.json` and `optpipe bench --json` hold.

The format, with its history, is described in `optpipe.core.measurement`.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from optpipe.core.measurement import (
    Estimate,
    LatencySummary,
    Measurement,
    Mode,
    OutputCheck,
    Percentile,
    Reason,
    Scenario,
    Subject,
    Validity,
    format_percentile_name,
)
from optpipe.errors import BadInputError

MEASUREMENTS_SCHEMA = "optpipe.measurements"
MEASUREMENTS_SCHEMA_VERSION = 1


def record_from_summary(summary: LatencySummary) -> dict[str, Any]:
    """`{"p50": {"value": …, "ci": [low, high]}, …, "min", "max", "mean", "stddev", "cv", "withheld"}`, in ms."""
    document: dict[str, Any] = {
        format_percentile_name(one.percent): {"value": one.value, "ci": list(one.ci)} for one in summary.percentiles
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
    """The inverse of `record_from_summary`."""
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


def record_from_measurement(measurement: Measurement) -> dict[str, Any]:
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
        "latency_ms": None if measurement.latency is None else record_from_summary(measurement.latency),
        "throughput_images_per_s": None if throughput is None else throughput.value,
        "memory_bytes": peak,
        "energy_j_per_image": None if energy is None else energy.value,
        "verdict": str(measurement.verdict),
        "reasons": [_plain(reason) for reason in measurement.reasons],
        "throughput_images_per_s_ci": None if throughput is None or throughput.ci is None else list(throughput.ci),
        "images_per_joule": 1.0 / energy.value if energy is not None and energy.value > 0 else None,
        "energy": {"value": None, "ci": None, "note": measurement.energy_why_not}
        if energy is None
        else _plain(energy) | {"approximate": True},
        "parts_ms": {name: record_from_summary(part) for name, part in measurement.parts.items()},
        "subject": _plain(subject),
        "output_check": None if check is None else _plain(check),
        "inputs": dict(measurement.inputs),
        "limits": dict(measurement.limits),
        "caveats": list(measurement.caveats),
        **{name: getattr(measurement, name) for name in _COPIED},
    }


def measurement_from_json(document: Mapping[str, Any]) -> Measurement:
    """The inverse of `record_from_measurement`. Raises BadInputError where a key is missing."""
    try:
        return _measurement(document)
    except (KeyError, TypeError, ValueError) as error:
        raise BadInputError(
            f"not a measurement of schema version {MEASUREMENTS_SCHEMA_VERSION}: {error!r}; measure again with optpipe bench"
        ) from error


def document_from_measurements(measurements: tuple[Measurement, ...]) -> dict[str, Any]:
    """The content of `measurements.json`."""
    return {
        "schema": MEASUREMENTS_SCHEMA,
        "schema_version": MEASUREMENTS_SCHEMA_VERSION,
        "measurements": [record_from_measurement(measurement) for measurement in measurements],
    }


def measurements_from_document(document: Mapping[str, Any]) -> tuple[Measurement, ...]:
    """The measurements in a `measurements.json`. Raises BadInputError for another schema or version, by number."""
    if document.get("schema") != MEASUREMENTS_SCHEMA or document.get("schema_version") != MEASUREMENTS_SCHEMA_VERSION:
        raise BadInputError(
            f"measurements of schema {document.get('schema')!r} version {document.get('schema_version')!r}; "
            f"this version of optpipe reads {MEASUREMENTS_SCHEMA!r} version {MEASUREMENTS_SCHEMA_VERSION}: measure again with optpipe bench"
        )
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


_COPIED = (  # the same in both forms
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
