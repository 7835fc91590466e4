"""From a worker's answer to a `Measurement`: samples to Parquet, summary, memory, energy, verdict."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import randbits
from typing import Any

import numpy as np
import polars as pl

from optpipe.backends.selections import read_verified_selection
from optpipe.core.bench_defaults import PROCESSES
from optpipe.core.entries import ArtifactInfo, VerificationInfo
from optpipe.core.errors import BadInputError, OptpipeError, StageError
from optpipe.core.events import Listener, SilentListener
from optpipe.core.files import Files, hash_arrays
from optpipe.core.load import LoadSpec, Scenario
from optpipe.core.measurement import (
    MACHINE_COLUMNS,
    MEASUREMENTS_FILE,
    SAMPLE_COLUMNS,
    InputPool,
    Measurement,
    MeasurementsRecord,
    Options,
    Phase,
    ProcessFigure,
    Reason,
    Subject,
    Validity,
)
from optpipe.core.metrics.measured import LOAD_TIME, PACKAGES_NOTE
from optpipe.core.metrics.registry import figure_from_witness
from optpipe.core.parquet import read_parquet
from optpipe.core.precision import Precision
from optpipe.core.quantity import Dimension, format_quantity
from optpipe.core.records import json_from_record, read_record
from optpipe.core.settings import format_cpus
from optpipe.core.wording import Argument, Call, for_workspace
from optpipe.measure.figures import (
    compute_worker_peak_bytes,
    judge_measurement,
    recompute_from_samples,
    select_rows_during,
)
from optpipe.measure.invariants import (
    RawMeasurement,
    RawQueries,
    find_contradicting_spans,
    list_broken_rules,
    list_spans,
)
from optpipe.measure.process import MachineRow, PointResult, WorkerPool, WorkerProcess
from optpipe.measure.search import Slo
from optpipe.measure.validity import LIMITS, ValidityEvidence
from optpipe.measure.worker.messages import (
    CacheProbe,
    Point,
    PointReport,
    SessionSpec,
    frame_from_spool,
)
from optpipe.models.artifacts.engine_files import hash_engine
from optpipe.models.artifacts.lookup import StoredArtifact
from optpipe.models.export.exported import reference_from_file, run_onnx_graph
from optpipe.models.inputs.program_data import store_python_file
from optpipe.models.inputs.rows import compute_padding, fill_sequences, list_runs, read_length
from optpipe.models.inputs.sample_set import draw_subset
from optpipe.models.inputs.samples import (
    POOL_SIZE,
    choose_samples,
    load_sample_inputs,
    save_pool,
    vary_inputs,
)
from optpipe.models.inputs.tensor_files import holds_tensors
from optpipe.stats.paired import TOLERATED_RELATIVE_ERROR
from optpipe.stats.percentiles import count_samples_needed
from optpipe.workspace.energy import EnergyUse
from optpipe.workspace.entry import get_utc_time
from optpipe.workspace.environment import list_gpus
from optpipe.workspace.file_names import ONNX, REFERENCE
from optpipe.workspace.files import write_bytes, write_parquet
from optpipe.workspace.runs import OpenRun
from optpipe.workspace.store import Store


def measure_load(
    worker: WorkerProcess, blank: Measurement, load: LoadSpec, name: str, directory: Path
) -> tuple[Measurement, PointResult]:
    """Measures one point into `directory`; a failure is an INVALID measurement with its reason.

    `blank` has the subject, its inputs, caveats and limits, and in its load the length and kind of the inputs.
    """
    spool = directory / "samples" / f"{name}.spool"
    spool.parent.mkdir(parents=True, exist_ok=True)
    blank = _begin(worker, blank, load, name)
    begun = spool.with_suffix(".json")  # describes the samples if this process is killed
    write_bytes(begun, json_from_record(blank))
    answer = worker.measure(Point(name, str(spool), load, blank.arrivals_seed or 0))
    done = answer.done
    if blank.inputs is not None and done is not None:
        blank = replace(
            blank,
            inputs=replace(blank.inputs, rotated=done.rotated, rotated_bytes=done.rotated_bytes),
        )
    filled, measured = _add_samples(
        replace(blank, interrupted=answer.interrupted), Path(answer.point.spool)
    )
    machine = frame_from_rows(answer.rows)
    if len(machine):
        write_parquet(directory / "machine" / f"{blank.id}.parquet", machine)
    filled = replace(filled, machine_file=f"machine/{blank.id}.parquet" if len(machine) else None)
    measurement = _judge_answer(filled, measured, machine, answer, worker)
    begun.unlink()
    return _leave_out_impossible(measurement, blank, directory), answer


def measure_trial(
    worker: WorkerProcess, blank: Measurement, load: LoadSpec, name: str, directory: Path
) -> tuple[Measurement, pl.DataFrame]:
    """Measures one point that is part of a larger observation, which its caller checks and stores; returns its samples too.

    It is judged as `measure_load` does; the machine is not recorded.
    """
    spool = directory / f"{name}.spool"
    directory.mkdir(parents=True, exist_ok=True)
    blank = _begin(worker, blank, load, name)
    answer = worker.measure(Point(name, str(spool), load, blank.arrivals_seed or 0))
    samples = frame_from_spool(spool) if spool.exists() else _make_empty_samples()
    spool.unlink(missing_ok=True)
    filled, measured = _count_samples(replace(blank, interrupted=answer.interrupted), samples)
    measurement = _judge_answer(filled, measured, frame_from_rows(answer.rows), answer, worker)
    return measurement, samples


def _begin(worker: WorkerProcess, blank: Measurement, load: LoadSpec, name: str) -> Measurement:
    """`blank` as it is before the first query of the point `name`."""
    return replace(
        blank,
        id=name,
        subject=replace(blank.subject, affinity=worker.affinity),
        load=replace(load, length=blank.load.length, images=blank.load.images),
        arrivals_seed=randbits(32) if load.scenario is Scenario.SERVER else None,
        limits={**LIMITS, **blank.limits},
        started_utc=get_utc_time("milliseconds"),
    )


def _judge_answer(
    filled: Measurement,
    measured: pl.DataFrame,
    machine: pl.DataFrame,
    answer: PointResult,
    worker: WorkerProcess,
) -> Measurement:
    """The measurement with its figures and verdict, of its `measured` samples and the readings of the `machine`."""
    failure, done = _make_failure_reasons(answer), answer.done
    if measured.is_empty():
        nothing = Reason(
            "too-few-samples",
            "nothing was measured",
            "increase " + Argument("max_time"),
            invalidates=True,
        )
        if answer.interrupted:
            what = "interrupted before anything was measured"
            nothing = Reason("interrupted", what, "run it again", invalidates=True)
        return replace(filled, reasons=failure or (nothing,))
    filled = replace(
        filled,
        output_check=done.output_check if done else None,
        host_peak_bytes=done.host_peak_bytes if done else None,
        figures={LOAD_TIME.name: _read_load_time(done)} if done else {},
        device_peak_bytes=_compute_device_peak(machine, worker, answer),
    )
    evidence = ValidityEvidence(
        filled,
        measured,
        select_rows_during(machine, measured),
        steady=done is not None and done.steady,
        wanted_samples=done.queries_needed
        if done
        else count_samples_needed(filled.load.percentile),
        cache_probe=done.cache_probe if done else CacheProbe(),
    )
    judged = judge_measurement(filled, failure, evidence, filled.load.percentile)
    if judged.energy_why_not is None or judged.subject.device != "cpu" or answer.energy is None:
        return judged
    images = int(measured["images"].sum())
    packages = describe_package_energy(answer.energy, judged.duration_s, images, judged.load)
    return replace(judged, energy_why_not=judged.energy_why_not + packages)


def describe_package_energy(energy: EnergyUse, seconds: float, images: int, load: LoadSpec) -> str:
    """What RAPL says of the CPU packages; in words, because no raw file keeps it, so that no verdict rests on it."""
    if energy.cpu_j is None:
        return f"{PACKAGES_NOTE}: not counted ({energy.cpu_why_not})"
    if not energy.cpu_j or not images or not energy.seconds:
        return f"{PACKAGES_NOTE}: their counter did not move"
    watts = energy.cpu_j / energy.seconds
    of_images = load.sample == "image"
    dimension = Dimension.ENERGY if of_images else Dimension.SAMPLE_ENERGY
    return (
        f"{PACKAGES_NOTE} took about {format_quantity(watts * seconds / images, dimension)}, "
        f"{images / seconds / watts:.3g} {load.sample}s/s/W ({watts:.0f} W over {energy.seconds:.1f} s by RAPL, other "
        "work included), which is not judged"
    )


def _read_load_time(done: PointReport) -> ProcessFigure:
    value = None if done.load_ns is None else float(done.load_ns)
    return figure_from_witness(LOAD_TIME, value, done.load_why_not)


def _leave_out_impossible(
    measurement: Measurement, blank: Measurement, directory: Path
) -> Measurement:
    """A measurement whose raw data contradict themselves is a try without figures, and its raw data are deleted."""
    if measurement.samples_file is None:
        return measurement
    files = Files(directory)
    samples = read_parquet(files, measurement.samples_file).sort("start_ns", maintain_order=True)
    machine = (
        None if measurement.machine_file is None else read_parquet(files, measurement.machine_file)
    )
    queries = RawQueries(measurement.load, measurement.subject.device, samples)
    gpu_bytes = max((gpu.memory_bytes for gpu in list_gpus()), default=None)
    raw = RawMeasurement(measurement, queries, machine, os.cpu_count(), gpu_bytes)
    broken = list_broken_rules(raw)
    if not broken:
        return measurement
    for name in filter(None, (measurement.samples_file, measurement.machine_file)):
        (directory / name).unlink()
    what = f"its raw data contradict themselves: {broken[0]}"
    way = "measure again; if it happens again, report it with this message"
    return replace(blank, reasons=(Reason("impossible", what, way, invalidates=True),))


def require_one_clock(folder: Path, measured: Sequence[Measurement]) -> None:
    """Raises StageError if measurements of the run in `folder` overlap, or the machine's date was set between them."""
    spans = [
        span
        for measurement in measured
        if measurement.samples_file is not None and (folder / measurement.samples_file).is_file()
        for span in list_spans(measurement, read_parquet(Files(folder), measurement.samples_file))
    ]
    for problem in find_contradicting_spans(spans, get_utc_time("milliseconds")):
        raise StageError(
            f"{problem}\nmeasure again while nothing sets the date or suspends the machine"
        )


def _add_samples(blank: Measurement, spool: Path) -> tuple[Measurement, pl.DataFrame]:
    """Stores the samples as Parquet; returns `blank` with their count, and the measured ones in order of their end."""
    stored = spool.with_suffix(".parquet")
    if spool.exists():
        samples = frame_from_spool(spool)
        write_parquet(stored, samples)
        spool.unlink()
    elif stored.exists():
        samples = read_parquet(Files(stored.parent), stored.name)
    else:  # the worker never opened a spool
        samples = _make_empty_samples()
    return _count_samples(blank, samples)


def _make_empty_samples() -> pl.DataFrame:
    return pl.DataFrame(schema={name: getattr(pl, kind) for name, kind in SAMPLE_COLUMNS.items()})


def _count_samples(blank: Measurement, samples: pl.DataFrame) -> tuple[Measurement, pl.DataFrame]:
    """`blank` with the count of its samples, and the measured ones in order of their end."""
    measured = samples.filter(samples["phase"] == Phase.MEASURED).sort(
        "end_ns", maintain_order=True
    )
    counted = replace(
        blank,
        samples=len(measured),
        warm_up_samples=len(samples) - len(measured),
        samples_file=f"samples/{blank.id}.parquet" if len(samples) else None,
    )
    return counted, measured


def frame_from_rows(rows: Sequence[MachineRow]) -> pl.DataFrame:
    schema = {name: getattr(pl, kind) for name, kind in MACHINE_COLUMNS.items()}
    return pl.DataFrame([{name: row.get(name) for name in schema} for row in rows], schema=schema)


def write_measurements(folder: Path, measurements: Sequence[Measurement]) -> None:
    write_bytes(
        folder / MEASUREMENTS_FILE, json_from_record(MeasurementsRecord(tuple(measurements)))
    )


def recover_unfinished(directory: Path, known: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """Recovers measurements that began in the run folder `directory` and are not in `known` from their samples."""
    message = "interrupted before completion; recovered from its samples"
    reason = Reason("interrupted", message, "run it again", invalidates=True)
    recovered = []
    for path in sorted((directory / "samples").glob("*.json")):
        begun = read_record(path, Measurement)
        if all(measurement.id != begun.id for measurement in known):
            blank = replace(begun, reasons=(reason,), interrupted=True)
            measurement, measured = _add_samples(blank, path.with_suffix(".spool"))
            if not measured.is_empty():
                measurement = recompute_from_samples(
                    measurement, measured, frame_from_rows(()), highest=begun.load.percentile
                )
            recovered.append(measurement)
        path.unlink()
    return tuple(recovered)


def _compute_device_peak(
    machine: pl.DataFrame, worker: WorkerProcess, answer: PointResult
) -> int | None:
    """The worker's own peak if the driver reports it, otherwise the growth of the device; without the rotated inputs."""
    if machine.is_empty() or not answer.done:
        return None
    whole, rotated = machine["gpu_used_bytes"].max(), answer.done.rotated_bytes
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
        "refused": "rebuild it on this machine with " + Call("build"),
    }
    what, _, remedy = answer.message.partition(
        "\n"
    )  # an expected failure has its remedy on the second line
    return (Reason(answer.failure, what, remedy or remedies[answer.failure], invalidates=True),)


POOL_LIMIT = 256
REFERENCE_BATCH = 8
"""Batch of the exported FP32 model when inputs are filled to a length."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    load: LoadSpec
    batches: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    """Tokens per sequence; None for the lengths of the build's verification inputs."""
    slo: Slo | None = None
    processes: int = PROCESSES
    keep_going: bool = True
    """Continues after two processes that are INVALID for the same cause on the host."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    images: Path | None = None
    affinity: tuple[int, ...] | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0


def _find_coarsest_precision(info: ArtifactInfo) -> Precision:
    """INT8 if any layer computes in it: a dynamically quantized model has scales per batch."""
    return Precision.INT8 if info.precision_proof.share.macs.get("int8") else info.precision


@dataclass(frozen=True, slots=True)
class TrialSubject:
    artifact: StoredArtifact
    session: SessionSpec
    pool: WorkerPool
    blank: Measurement
    """As `measure_load` takes it."""
    directory: Path

    def expect(self, processes: int) -> None:
        self.pool.expect(self.artifact.label, processes)

    def open(self) -> WorkerProcess:
        return WorkerProcess(self.session, self.pool, self.artifact.label)

    def measure(self, worker: WorkerProcess, load: LoadSpec, name: str) -> Measurement:
        return measure_load(worker, self.blank, load, name, self.directory)[0]

    def measure_trial(
        self, worker: WorkerProcess, load: LoadSpec, name: str
    ) -> tuple[Measurement, pl.DataFrame]:
        return measure_trial(worker, self.blank, load, name, self.directory)

    def with_options(self, options: Options) -> "TrialSubject":
        session = replace(
            self.session, arguments={**self.session.arguments, "options": dict(options)}
        )
        return replace(
            self,
            session=session,
            blank=replace(self.blank, subject=_describe(self.artifact, options)),
        )


def prepare_subject(
    artifact: StoredArtifact,
    plan: BenchPlan,
    store: Store,
    pool: WorkerPool,
    scratch: Path,
    directory: Path,
    length: int | None = None,
) -> TrialSubject:
    """The artifact with the plan's options and its inputs in `scratch`; measurements go to `directory`.

    With a `length` the inputs are filled up to it, and the reference is the output of the exported model for them.
    """
    card = artifact.card
    real, expected, kind = _choose_inputs(artifact, plan, store)
    if length is not None:
        real = fill_sequences(card, real, length, POOL_LIMIT)
        expected = run_onnx_graph(
            store.verify_entry(artifact.model, ONNX).file(ONNX), card, real, REFERENCE_BATCH
        )[0]
    count = min(len(array) for array in real.values())
    shared = frozenset(spec.name for spec in card.inputs if spec.batch is None and card.batched)
    rows = vary_inputs(real, max(POOL_SIZE, count), plan.seed, shared)
    options = artifact.resolve_effective_options(plan.options)
    session = SessionSpec(
        loader="optpipe.measure.worker.messages:session_from_store",
        arguments={
            "workspace": str(store.workspace),
            "entry": artifact.entry.path.name,
            "options": options,
        },
        inputs=save_pool(scratch, "input", rows),
        reference=save_pool(scratch, "reference", expected),
        smallest=card.batch_range[0],
        input_axes={spec.name: spec.batch for spec in card.inputs},
        output_axes={spec.name: spec.batch for spec in card.outputs},
        selection=read_verified_selection(
            _list_verifications(artifact, store), artifact.model, store
        ),
        reference_name="the source model" if length is None else "the exported model in FP32",
        tolerance=TOLERATED_RELATIVE_ERROR[_find_coarsest_precision(artifact.entry.info)],
        device=artifact.entry.info.device,
        streams=plan.load.streams,
        seed=plan.seed,
    )
    inputs = InputPool(
        kind,
        count=min(len(array) for array in rows.values()),
        real=0 if kind == "synthetic" else count,
        seed=plan.seed,
        sha256=hash_arrays(rows),
        padding=compute_padding(rows) if card.length_range else 0.0,
        lengths=card.length_range,
    )
    load = replace(plan.load, length=read_length(card, rows), images=card.takes_images)
    blank = _make_blank(artifact, plan, options, load, inputs)
    return TrialSubject(artifact, session, pool, blank, directory)


def _choose_inputs(
    artifact: StoredArtifact, plan: BenchPlan, store: Store
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], str]:
    """Inputs that can share a batch, the source model's answers for them where they are known, and the kind of the inputs.

    They are the plan's own images or samples, otherwise those of the build's verification.
    """
    card = artifact.card
    inputs, answers = _known_inputs(artifact, store)
    assert artifact.reference is not None
    kind = artifact.reference.info.samples_kind
    if plan.images is not None:
        given = store_python_file(plan.images, card, store, SilentListener(), POOL_SIZE)
        samples = choose_samples(card, given, model=artifact.model)
        assert samples.drawn is not None
        samples = replace(samples, drawn=draw_subset(samples.drawn, POOL_SIZE))
        inputs, answers = load_sample_inputs(card, samples, artifact.model), {}
        kind = "tensors" if holds_tensors(given) else "texts" if card.tokenization else "images"
    if card.batched:  # samples with different unbatched inputs cannot share a batch
        run = max(list_runs(card.inputs, inputs), key=lambda span: span.stop - span.start)
        inputs, answers = (
            {name: value[run] for name, value in arrays.items()} for arrays in (inputs, answers)
        )
    return inputs, answers, kind


def _make_blank(
    artifact: StoredArtifact,
    plan: BenchPlan,
    options: Options,
    load: LoadSpec,
    inputs: InputPool,
) -> Measurement:
    """A measurement without figures, as `measure_load` takes it."""
    doubts = {
        "random-weights": not artifact.entry.info.weights.trained,
        "synthetic-inputs": inputs.kind == "synthetic",
    }
    return Measurement(
        id="",
        subject=_describe(artifact, options),
        load=load,
        verdict=Validity.INVALID,
        reasons=(),
        inputs=inputs,
        limits=plan.limits,
        caveats=tuple(name for name, holds in doubts.items() if holds),
    )


@contextmanager
def offer_recovery(run: OpenRun, listener: Listener) -> Iterator[None]:
    """If the block fails, warns how to finish the run; removes the run if it is empty."""
    try:
        yield
    except (OptpipeError, OSError, KeyboardInterrupt):
        if [*run.path.glob("samples/*.spool"), *run.path.glob("samples/*.parquet")]:
            finish = Call("bench", resume=run.path)
            listener.warn("completed measurements were kept; `" + finish + "` finishes the run")
        elif not any(run.path.iterdir()):
            run.path.rmdir()
        raise


def _list_verifications(artifact: StoredArtifact, store: Store) -> list[VerificationInfo]:
    return [
        entry.info
        for entry in store.list_entries(VerificationInfo)
        if artifact.entry.id in entry.manifest.parents
    ]


def _known_inputs(
    artifact: StoredArtifact, store: Store
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The inputs of the build's verification with the source model's answers; at most POOL_LIMIT of them.

    Answers that were verified by boxes are left out: their rows may differ in order.
    """
    if artifact.reference is None:
        problem = f"{artifact.label} has no reference in the store"
        raise BadInputError(
            f"{problem}; create it with `{for_workspace(artifact.model.manifest.command)}`"
        )
    known = reference_from_file(store.verify_entry(artifact.reference, REFERENCE).file(REFERENCE))
    by_boxes = {
        name
        for verification in _list_verifications(artifact, store)
        for name in verification.by_boxes
    }
    inputs = {
        name: array[:POOL_LIMIT] for name, array in known.inputs.items() if name not in by_boxes
    }
    outputs = {
        name: array[:POOL_LIMIT] for name, array in known.outputs.items() if name not in by_boxes
    }
    return inputs, outputs


def describe_validity(measurement: Measurement) -> str:
    """`VALID`, or `INVALID (loaded-host)`: known as soon as a process ends."""
    codes = f" ({', '.join(measurement.invalid_codes)})" if measurement.invalid_codes else ""
    return f"{measurement.verdict}{codes}"


@contextmanager
def announce_round(number: int, listener: Listener) -> Iterator[None]:
    """Says whether the processes of a round that measured in turns are VALID, as soon as they end.

    Both meet the same load, which their ratio leaves out: the round is INVALID only if it gave none.
    """
    try:
        yield
    except StageError as error:
        problem = str(error).splitlines()[0]
        listener.inform(f"round {number}, both processes: INVALID ({problem})")
        raise
    listener.inform(f"round {number}, both processes: VALID")


def warn_about_threads(
    artifact: StoredArtifact, options: Options, affinity: Sequence[int] | None, listener: Listener
) -> None:
    """Warns if --affinity changes nothing, and if a runtime may use more threads than the worker has processors.

    ONNX Runtime counts the machine's processors: pinned to one of two, `digits` scattered by 217%; with threads=1 it
    was VALID.
    """
    if affinity is not None and set(affinity) == os.sched_getaffinity(0):
        listener.warn(
            Argument("affinity", format_cpus(affinity))
            + " changes nothing: no other CPU is available to this process"
        )
    usable, every = len(affinity or os.sched_getaffinity(0)), os.cpu_count() or 1
    if artifact.entry.info.device == "cpu" and options.get("threads") == 0 and usable < every:
        fewer = Argument("option", {artifact.entry.info.backend: {"threads": usable}})
        state = f"{artifact.label}: {usable} of {every} CPUs are available"
        listener.warn(state + "; the runtime may use more threads: use " + fewer)


def _describe(artifact: StoredArtifact, options: Options) -> Subject:
    info = artifact.entry.info
    return Subject(
        artifact=artifact.entry.id,
        backend=info.backend,
        precision=info.precision,
        device="cuda:0" if info.device == "cuda" else "cpu",
        model=info.model,
        sha256=hash_engine(artifact.entry),
        options=dict(options),
        cuda_graph=None if info.device == "cpu" else bool(options.get("cuda_graph", False)),
        threads=int(options["threads"]) or None if "threads" in options else None,
        weights=info.weights.sha256 if info.weights.trained else info.weights.source,
        packages=info.packages,
    )
