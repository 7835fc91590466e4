"""From an answer of the worker to a `Measurement`: samples to Parquet, summary, memory, energy, verdict."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from secrets import randbits
from typing import TYPE_CHECKING, Any

from optpipe.core.measurement import (
    MACHINE_COLUMNS,
    Measurement,
    Mode,
    OutputCheck,
    Phase,
    Reason,
    Scenario,
    Subject,
    Validity,
)
from optpipe.core.measurement_json import measurement_from_json, record_from_measurement
from optpipe.measuring.figures import (
    ROTATED_BYTES,
    compute_figures,
    compute_worker_peak_bytes,
    evidence_from_measurement,
    judge_measurement,
)
from optpipe.measuring.process import PointResult, WorkerProcess
from optpipe.measuring.validity import LIMITS, find_reasons
from optpipe.stats.percentiles import count_samples_needed
from optpipe.worker.plan import Point
from optpipe.worker.spool import frame_from_spool
from optpipe.workspace.runs import write_json, write_parquet

if TYPE_CHECKING:
    import polars as pl

ROTATED = {"rotated": "rotated", ROTATED_BYTES: "rotation_bytes"}
"""What the record says of the inputs that the worker went through, by the worker's own name for it."""

ARRIVALS_SEED = "arrivals_seed"
"""Key of `Measurement.inputs`: server; drawn anew for every measurement, so that none repeats another's luck."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What to put on a subject, before it has a name and files."""

    batch_size: int
    scenario: Scenario = Scenario.SINGLE_STREAM
    mode: Mode = Mode.COMPUTE
    streams: int = 1
    rate_per_s: float | None = None
    min_seconds: float = 3.0
    max_seconds: float = 60.0
    percentile: float = 99.0
    """The highest percentile that is wanted: it decides the sample count."""
    warm_up_seconds: float = 0.5
    max_warm_up_seconds: float = 20.0
    output_checks: int = 16
    cache_probes: int = 12

    @property
    def wanted_samples(self) -> int:
        """As many as the percentile needs."""
        return count_samples_needed(self.percentile)


@dataclass(frozen=True, slots=True)
class RunContext:
    """Where measurements of a run go, and what is said of all of them."""

    directory: Path
    limits: Mapping[str, float] = field(default_factory=lambda: LIMITS)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()


def measure_load(
    worker: WorkerProcess, subject: Subject, load: LoadSpec, name: str, frame: RunContext
) -> tuple[Measurement, PointResult]:
    """Measures one point; a failure is a measurement too, INVALID with its reason."""
    spool = frame.directory / "samples" / f"{name}.spool"
    spool.parent.mkdir(parents=True, exist_ok=True)
    blank = Measurement(
        id=name,
        subject=replace(subject, affinity=worker.affinity),
        batch_size=load.batch_size,
        scenario=load.scenario,
        mode=load.mode,
        verdict=Validity.INVALID,
        reasons=(),
        streams=load.streams,
        offered_rate_per_s=load.rate_per_s,
        inputs={**frame.inputs, **({ARRIVALS_SEED: randbits(32)} if load.scenario is Scenario.SERVER else {})},
        limits=dict(frame.limits),
        caveats=frame.caveats,
        started_utc=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )
    begun = spool.with_suffix(".json")  # should this process be killed, the samples still say what they are of
    write_json(begun, record_from_measurement(blank))
    answer = worker.measure(point_from_load(load, name, spool, int(blank.inputs.get(ARRIVALS_SEED, 0))))
    done = answer.done or {}
    filled = replace(
        blank,
        inputs={**blank.inputs, **{said: done.get(key, 0) for said, key in ROTATED.items()}},
        interrupted=answer.interrupted,
    )
    found = measurement_from_result(filled, answer, load, worker, frame)
    begun.unlink()
    return found, answer


def point_from_load(load: LoadSpec, name: str, spool: Path, arrivals_seed: int = 0) -> Point:
    """The load as the worker is told of it."""
    return Point(
        id=name,
        batch_size=load.batch_size,
        scenario=load.scenario,
        mode=load.mode,
        spool=str(spool),
        min_seconds=load.min_seconds,
        max_seconds=max(load.max_seconds, load.min_seconds),
        percentile=load.percentile,
        warm_up_seconds=load.warm_up_seconds,
        max_warm_up_seconds=max(load.max_warm_up_seconds, load.warm_up_seconds),
        rate_per_s=load.rate_per_s,
        arrivals_seed=arrivals_seed,
        output_checks=load.output_checks,
        cache_probes=load.cache_probes,
    )


def measurement_from_result(
    blank: Measurement, answer: PointResult, load: LoadSpec, worker: WorkerProcess, frame: RunContext
) -> Measurement:
    """Fills `blank` from the answer's samples and machine rows, and judges it."""
    samples = store_samples(Path(answer.point.spool))
    machine = store_machine_rows(frame.directory / "machine" / f"{blank.id}.parquet", answer)
    measured = samples.filter(samples["phase"] == Phase.MEASURED).sort("end_ns", maintain_order=True)
    filled = replace(
        blank,
        samples=len(measured),
        warm_up_samples=len(samples) - len(measured),
        samples_file=f"samples/{blank.id}.parquet" if len(samples) else None,
        machine_file=f"machine/{blank.id}.parquet" if len(machine) else None,
    )
    failure = _make_failure_reasons(answer)
    if measured.is_empty():
        return replace(filled, reasons=failure or (_make_empty_reason(answer),))
    check = OutputCheck(**answer.done["output_check"]) if answer.done else None
    evidence = evidence_from_measurement(
        replace(filled, output_check=check),
        measured,
        machine,
        steady=bool(answer.done and answer.done["steady"]),
        wanted_samples=answer.done["queries_needed"] if answer.done else load.wanted_samples,
        cache_probe=answer.done["cache_probe"] if answer.done else {},
    )
    return judge_measurement(
        replace(
            filled,
            host_peak_bytes=answer.done["host_peak_bytes"] if answer.done else None,
            device_peak_bytes=_compute_device_peak(machine, worker, answer),
            output_check=check,
        ),
        (*failure, *find_reasons(evidence)),
        evidence,
        load.percentile,
    )


def store_samples(spool: Path) -> "pl.DataFrame":
    """Turns the spool into Parquet beside it, if that is not done; empty where the worker never opened one."""
    import polars as pl

    from optpipe.core.measurement import SAMPLE_COLUMNS

    if not spool.exists():
        if (done := spool.with_suffix(".parquet")).exists():
            return pl.read_parquet(done)
        return pl.DataFrame(schema={name: getattr(pl, kind) for name, kind in SAMPLE_COLUMNS.items()})
    frame = frame_from_spool(spool)
    write_parquet(spool.with_suffix(".parquet"), frame)
    spool.unlink()
    return frame


def store_machine_rows(path: Path, answer: PointResult) -> "pl.DataFrame":
    """Writes the machine's rows to Parquet, all columns of the schema."""
    import polars as pl

    schema = {name: getattr(pl, kind) for name, kind in MACHINE_COLUMNS.items()}
    frame = pl.DataFrame([{name: row.get(name) for name in schema} for row in answer.rows], schema=schema)
    if len(frame):
        write_parquet(path, frame)
    return frame


def recover_unfinished(directory: Path, known: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """What was begun in the run folder `directory` and is not among `known`, from the samples that it left."""
    found = []
    for path in sorted((directory / "samples").glob("*.json")):
        begun = measurement_from_json(json.loads(path.read_text(encoding="utf-8")))
        if all(each.id != begun.id for each in known):
            found.append(recover_measurement(begun, path.with_suffix(".spool")))
        path.unlink()
    return tuple(found)


def recover_measurement(blank: Measurement, spool: Path) -> Measurement:
    """The measurement whose parent was killed: figures from its samples, INVALID because nobody watched its end."""
    samples = store_samples(spool)
    measured = samples.filter(samples["phase"] == Phase.MEASURED).sort("end_ns", maintain_order=True)
    reason = Reason(
        "interrupted", "interrupted before completion; recovered from its samples", "run it again", invalidates=True
    )
    found = compute_figures(blank, measured) if len(measured) else {}
    return replace(
        blank,
        reasons=(reason,),
        interrupted=True,
        samples=len(measured),
        warm_up_samples=len(samples) - len(measured),
        samples_file=f"samples/{blank.id}.parquet" if len(samples) else None,
        **found,
    )


def _compute_device_peak(machine: "pl.DataFrame", worker: WorkerProcess, answer: PointResult) -> int | None:
    """The worker's own peak where the driver says it, else the device's growth; without the rotated inputs."""
    if machine.is_empty() or not answer.done:
        return None
    whole, rotated = machine["gpu_used_bytes"].max(), int(answer.done["rotation_bytes"])
    if (own := compute_worker_peak_bytes(machine, rotated)) is not None:
        return own
    if isinstance(whole, int) and worker.baseline_gpu_bytes is not None:
        return max(0, whole - worker.baseline_gpu_bytes - rotated)
    return None


def _make_failure_reasons(answer: PointResult) -> tuple[Reason, ...]:
    if answer.failure is None:
        return ()
    remedies = {
        "out-of-memory": "use a smaller batch, fewer streams, or a lower precision",
        "died": "run it again; if it fails again, report it with the message above",
        "refused": "rebuild it on this machine with optpipe build",
    }
    what, _, remedy = answer.message.partition("\n")  # an expected failure says on its second line what mends it
    return (Reason(answer.failure, what, remedy or remedies[answer.failure], invalidates=True),)


def _make_empty_reason(answer: PointResult) -> Reason:
    if answer.interrupted:
        return Reason("interrupted", "interrupted before anything was measured", "run it again", invalidates=True)
    return Reason("too-few-samples", "nothing was measured", "increase --max-time", invalidates=True)
