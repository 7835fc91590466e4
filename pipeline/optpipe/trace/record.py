"""Records one stage of a profile in another process, `python -m optpipe.trace.record JOB.json`, under nsys.

The process warms up outside the measured range, times the same iterations without a recording, opens the measured range, and
writes its results, or its error, to the job's result file.
"""

import faulthandler
import os
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from msgspec import Struct

from optpipe.backends.base import Device
from optpipe.backends.registry import BACKENDS, load_artifact
from optpipe.backends.torch_marks import turn_marks_on
from optpipe.core import torch
from optpipe.core.card import InputSpec, ModelCard, Shape
from optpipe.core.entries import ArtifactInfo, ModelInfo, WeightsRequest
from optpipe.core.errors import BadInputError, MissingError, OptpipeError, StageError
from optpipe.core.events import Listener, ProgressStep, SilentListener
from optpipe.core.message_wire import message_from_text, text_from_message
from optpipe.core.precision import Precision
from optpipe.core.process import make_python_command
from optpipe.core.records import json_from_record, read_record
from optpipe.core.wording import Argument
from optpipe.measure.trials import time_calls
from optpipe.models.artifacts.lookup import find_reference
from optpipe.models.artifacts.named import find_model_by_id, model_from_entry
from optpipe.models.export.exported import Model, reference_from_file
from optpipe.models.inputs.rows import Arrays, batch_from_rows, fill_sequences
from optpipe.models.inputs.samples import choose_samples, load_sample_inputs
from optpipe.models.sources.resolve import source_from_text
from optpipe.models.stored_card import read_stored_card
from optpipe.preprocess.dali_pipeline import DaliPlan, make_reading_pipeline
from optpipe.preprocess.end_to_end import open_stream
from optpipe.trace.analysis import analysis_from_trace, select_measured_part
from optpipe.trace.nsys import (
    CAPTURE_RANGE,
    ITERATION_RANGE,
    MEASURED_RANGE,
    Capture,
    ProfilePlan,
    Recording,
    Stage,
    export_recording,
    json_from_recording,
    list_program_lines,
    mark_begin,
    mark_range,
    record_program,
)
from optpipe.trace.python_stacks import read_python_stacks
from optpipe.trace.read import TRACER_NOTE, Trace, trace_from_sqlite
from optpipe.trace.report import StageSubject
from optpipe.trace.roofline import Peaks, measure_cpu_peaks, measure_gpu_peaks
from optpipe.trace.rules import StageFacts
from optpipe.trace.sources import Source, SourceState
from optpipe.workspace.arrays import read_arrays, write_arrays
from optpipe.workspace.energy import EnergyUse, compute_energy_use, read_energy
from optpipe.workspace.entry import Entry
from optpipe.workspace.file_names import REFERENCE
from optpipe.workspace.store import Store

_LEAST_FREE_BYTES = 1 << 20
_ERRORS: Mapping[int, type[OptpipeError]] = {2: BadInputError, 3: MissingError, 4: StageError}


class BuildJob(Struct, frozen=True, tag=True):
    """Exports, quantizes, and builds in a new store, so that nothing is cached."""

    model: str
    """MODEL as typed; its ID is looked up in `workspace`."""
    workspace: Path
    weights: WeightsRequest
    batch: tuple[int, int, int] | None
    shapes: Mapping[str, tuple[Shape, Shape, Shape]]
    precisions: tuple[Precision, ...]
    backends: tuple[str, ...]
    automatic: bool
    """Whether optpipe chose the backends, as in `BuildPlan`."""
    device: Device | None
    """As asked for; None where each backend chooses."""
    on_gpu: bool
    calibration: Path | None
    options: Mapping[str, Mapping[str, Any]]
    truncate: bool = False


class InferenceJob(Struct, frozen=True, tag=True):
    workspace: Path
    artifact: str
    backend: str
    device: Device
    options: Mapping[str, Any]
    batch_size: int
    length: int | None = None
    """Tokens of every sequence; None for the texts themselves, padded."""


class PreprocessJob(Struct, frozen=True, tag=True):
    workspace: Path
    model: str
    images: tuple[Path, ...]
    plan: DaliPlan


Work = BuildJob | InferenceJob | PreprocessJob
JOB, RESULT, INPUTS = "job.json", "job-result.json", "inputs.npz"
"""Files in the scratch folder: the job, its result, and a batch of each input."""
LOG = "job-worker.log"
"""The reason of a crash; the file exists as soon as the process runs."""


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """One profiled process."""

    scratch: Path
    warm_up: int = 0
    iterations: int = 0
    work: Work | None = None
    modules: bool = False
    """Opens a range around each layer, if the backend knows its module."""
    folder: Path = field(default_factory=Path.cwd)
    """Where its relative paths start: nsys runs the process elsewhere."""


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """Results of a profiled process in addition to its recording, or its error."""

    unprofiled_iteration_ns: float | None = None
    energy: EnergyUse | None = None
    """Of iterations without a recording."""
    peaks: Peaks | None = None
    marked: bool = False
    """Whether the session opens ranges around its layers."""
    layer_ns: Mapping[str, float] | None = None
    """Median time of each node in ONNX Runtime on the CPU."""
    error: str | None = None
    """As `core.message_wire` writes it."""
    exit_status: int = 0


@dataclass(frozen=True, slots=True)
class ProfileJob:
    name: str
    on_gpu: bool
    work: Work
    stages: tuple[tuple[StageSubject, StageFacts], ...]
    source_graph: Path | None = None
    """The ONNX graph that the artifact was built from: its operators are ONNX's, with known shapes."""
    inputs: tuple[InputSpec, ...] = ()
    read_rows: Callable[[], tuple[ModelCard, Arrays]] | None = None
    """`read_profiled_rows` of an inference's artifact, read once for all sizes."""


@dataclass(frozen=True, slots=True)
class RecordedJob:
    trace: Trace
    result: WorkerResult
    sources: tuple[SourceState, ...]


def record_job(
    job: ProfileJob,
    plan: ProfilePlan,
    scratch: Path,
    listener: Listener,
    granted: tuple[SourceState, ...] = (),
) -> RecordedJob:
    """Runs `job` with the sources that `granted` names. Raises the stage's error, MissingError if nsys refused."""
    worker_job = make_worker_job(job, plan, scratch)
    (scratch / JOB).write_bytes(json_from_record(worker_job))
    sources = tuple(state.name for state in granted if state.recorded)
    if not job.on_gpu:
        sources = tuple(source for source in sources if source is not Source.GPU_METRICS)
    for whole in (False, True):
        capture = Capture(job.on_gpu, whole=whole, sources=sources)
        came = record_program(make_worker_command(scratch), scratch, capture)
        result = read_result(worker_job, came)
        trace = add_crash(trace_from_sqlite(export_recording(came, scratch)), came, listener)
        if whole or not job.on_gpu or isinstance(job.work, BuildJob):
            break
        if select_measured_part(analysis_from_trace(trace)).trace.kernels.height:
            break
        nothing = "nsys recorded no kernels in the measured range"
        listener.warn(f"{job.name}: {nothing}; recording the whole process instead")
    states = tuple(_limit_source(state, job, result) for state in granted)
    return RecordedJob(add_python_stacks(trace, came, scratch, sources, listener), result, states)


def make_worker_command(scratch: Path) -> list[str]:
    return make_python_command("optpipe.trace.record", str((scratch / JOB).resolve()))


def add_crash(trace: Trace, recorded: Recording, listener: Listener) -> Trace:
    """Names a crash of nsys at its start beside its version, which each record and report of the trace repeats; and warns."""
    if not recorded.crash:
        return trace
    crash = f"nsys crashed before the program began ({recorded.crash}), and was started again"
    listener.warn(crash)
    return replace(trace, tracer=trace.tracer + TRACER_NOTE + "started again after a crash")


def add_python_stacks(
    trace: Trace,
    recorded: Recording,
    scratch: Path,
    sources: Sequence[Source],
    listener: Listener,
) -> Trace:
    """Adds Python's stacks from the JSON export; a warning, and the trace as it is, if they cannot be read."""
    if Source.PYTHON not in sources or recorded.recording is None:
        return trace
    try:
        stacks = read_python_stacks(json_from_recording(recorded.recording, scratch))
    except OptpipeError as error:
        listener.warn("cannot read the Python stacks: " + error.message)
        return trace
    if stacks.unread:
        listener.warn(f"{stacks.unread} Python stacks have an unknown format and are left out")
    return replace(trace, stacks=pl.concat([trace.stacks, stacks.frames]))


def _limit_source(state: SourceState, job: ProfileJob, result: WorkerResult) -> SourceState:
    """What this stage cannot have of a source that the machine grants."""
    if state.name is Source.GPU_METRICS and state.recorded and not job.on_gpu:
        return SourceState(state.name, False, "the stage does not use the GPU")
    if state.name is not Source.MODULES or not isinstance(job.work, InferenceJob):
        return state
    if not result.marked:
        return SourceState(state.name, False, f"{job.work.backend} does not name its modules here")
    if job.work.options.get("cuda_graph"):
        why = "a replayed CUDA graph does not run the modules"
        return SourceState(
            state.name, False, why, Argument("option", {job.work.backend: {"cuda_graph": "false"}})
        )
    return state


def make_worker_job(job: ProfileJob, plan: ProfilePlan, scratch: Path) -> WorkerJob:
    """Makes the job file's content, and writes the inputs of an inference into `scratch`.

    The inputs are the rows that the model is verified on, repeated to the batch size, or to `length` tokens. Raises BadInputError
    for a batch size outside the artifact's profile.
    """
    work = job.work
    modules = Source.MODULES in (plan.record or ())
    worker_job = WorkerJob(scratch, plan.warm_up, plan.iterations, work, modules)
    if not isinstance(work, InferenceJob):
        return worker_job
    assert job.read_rows is not None
    card, rows = job.read_rows()
    low, _, high = card.batch_range
    if not low <= work.batch_size <= high:
        raise BadInputError(
            f"{card.name} was built for {low} to {high}; widen it with " + Argument("batch"),
            argument=Argument("batch_size", work.batch_size),
        )
    if work.length is not None:
        rows = fill_sequences(card, rows, work.length, work.batch_size)
    chosen = {
        name: values[np.arange(work.batch_size) % len(values)] for name, values in rows.items()
    }
    write_arrays(scratch / INPUTS, batch_from_rows(card, chosen))
    return worker_job


def read_profiled_rows(artifact: Entry[ArtifactInfo], store: Store) -> tuple[ModelCard, Arrays]:
    """The card of an artifact's model, and the rows that verified the artifact, (samples, ...) by input."""
    model = store.find(artifact.manifest.parents[0], ModelInfo)
    card = read_stored_card(model)
    if (kept := find_reference(artifact, model, store)) is not None:
        return card, dict(
            reference_from_file(store.verify_entry(kept, REFERENCE).file(REFERENCE)).inputs
        )
    return card, load_sample_inputs(card, choose_samples(card, None))


def read_result(job: WorkerJob, recorded: Recording) -> WorkerResult:
    """Raises the error of the profiled process, which takes precedence over that of nsys, or StageError if it died."""
    log, result = job.scratch / LOG, job.scratch / RESULT
    if result.is_file():
        try:
            outcome = read_record(result, WorkerResult)
        except BadInputError as error:
            raise StageError(
                "the profiled process wrote an invalid result: " + error.message
            ) from error
        if outcome.error is not None:
            raise _ERRORS.get(outcome.exit_status, StageError)(message_from_text(outcome.error))
        return outcome
    if not log.is_file():
        export_recording(recorded, job.scratch)  # raises the reason of nsys, or of the interpreter
        raise StageError(f"the profiled process never started: {recorded.log.strip()[-300:]}")
    lines = [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    # a traceback tells the error in its last line, faulthandler in its first
    lines = lines or list_program_lines(recorded)[-1:]
    why = (
        lines[-1 if lines[0].startswith("Traceback") else 0]
        if lines
        else "it was killed or ran out of memory"
    )
    raise StageError(
        f"the profiled process crashed (exit status {recorded.exit_status}): {why[:300]}"
    )


@contextmanager
def open_scratch_folder(store: Store) -> Iterator[Path]:
    """A scratch folder that only this user can read, because recordings contain the environment."""
    with store.scratch("profile") as folder:
        folder.chmod(0o700)
        try:
            yield folder.resolve()
        except (OSError, OptpipeError) as error:
            # nsys and the program report a full disk in different ways, or not at all
            if shutil.disk_usage(folder).free >= _LEAST_FREE_BYTES:
                raise
            problem = f"the disk is full: no space for the recording in {store.workspace}"
            raise StageError(
                f"{problem}; choose another location with " + Argument("workspace")
            ) from error


_WARM_UP_S = 0.3
"""Clocks, caches, and thread pools settle by time, not by count."""
_ENERGY_S = 2.0
"""Energy counters move in steps of up to a tenth of a second."""
_SETTLING = 3
"""Iterations between the start of a recording and the first that counts."""


def main(job_file: str) -> None:
    """Runs the job, writes its result file, and exits with the status of its error."""
    mark_begin()
    job = read_record(Path(job_file), WorkerJob)
    os.chdir(job.folder)
    log = (job.scratch / LOG).open("w", encoding="utf-8")
    faulthandler.enable(log)
    try:
        result = run_job(job)
    except OptpipeError as error:
        result = WorkerResult(
            error=text_from_message(error.message), exit_status=int(error.exit_status)
        )
    except Exception:
        traceback.print_exc(file=log)
        log.flush()
        raise
    (job.scratch / RESULT).write_bytes(json_from_record(result))
    sys.exit(result.exit_status)


def run_job(job: WorkerJob) -> WorkerResult:
    if isinstance(job.work, BuildJob):
        return _run_build(job.work, job.scratch / "store")
    if isinstance(job.work, PreprocessJob):
        measured = _measure(_make_preprocess_iteration(job.work), job)
        return WorkerResult(measured.iteration_ns, measured.energy)
    if isinstance(job.work, InferenceJob):
        return _run_inference(job.work, job)
    raise StageError(f"{job.scratch / JOB} names no work")


class _MarkingListener(SilentListener):
    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[ProgressStep]:
        """Opens a range for the step's stage, and one for its name inside."""
        word = name.split()[0]  # the graph of a precision belongs to stage `quantize`
        stage = f"optpipe.{Stage.QUANTIZE if word == 'graph' else word}"
        with mark_range(stage), mark_range(name), super().step(name, total) as step:
            yield step


def _run_build(job: BuildJob, workspace: Path) -> WorkerResult:
    import onnx  # noqa: F401
    import torch  # noqa: F401

    from optpipe.build.build import build_model
    from optpipe.build.plan import BuildPlan

    exported = find_model_by_id(job.model, Store(job.workspace))
    model = (
        Model(source_from_text(job.model, job.shapes), job.weights, job.batch, job.shapes)
        if exported is None
        else model_from_entry(exported)
    )
    plan = BuildPlan(
        precisions=job.precisions,
        backends=tuple(BACKENDS[name] for name in job.backends),
        named=False,
        automatic=job.automatic,
        device=job.device,
        calibration=job.calibration,
        options=job.options,
        truncate=job.truncate,
    )
    with mark_range(CAPTURE_RANGE), mark_range(MEASURED_RANGE):
        result = build_model(model, plan, Store(workspace), _MarkingListener())
    if not result.artifacts:
        why = "; ".join(candidate.reason for candidate in (*result.failed, *result.skipped))
        raise StageError(f"no artifact was built: {why}")
    return WorkerResult()


def _run_inference(work: InferenceJob, job: WorkerJob) -> WorkerResult:
    """Each iteration launches once and waits for the outputs."""
    store = Store(work.workspace)
    entry = store.find(work.artifact, ArtifactInfo)
    inputs = read_arrays(job.scratch / INPUTS)
    on_gpu = work.device == "cuda"
    with (
        open_stream(work.device),
        load_artifact(entry, store, work.options) as session,
    ):
        mark = getattr(session, "mark_layers", None) if job.modules else None
        marked = mark is not None and mark()
        binding = session.bind(inputs)
        synchronize = _make_synchronizer(on_gpu=on_gpu)

        def iteration() -> None:
            binding.launch()
            synchronize()

        measured = _measure(iteration, job)
        threads = int(work.options.get("threads", 0)) or None
        peaks = measure_gpu_peaks() if on_gpu else measure_cpu_peaks(threads)
        layer_ns = BACKENDS[work.backend].time_layers(
            entry.path, entry.info, work.options, inputs, job.scratch
        )
        return WorkerResult(
            measured.iteration_ns, measured.energy, peaks, layer_ns=layer_ns, marked=marked
        )


def _make_preprocess_iteration(job: PreprocessJob) -> Callable[[], None]:
    transform = read_stored_card(Store(job.workspace).find(job.model, ModelInfo)).transform
    assert transform is not None
    pipeline = make_reading_pipeline(job.images, transform, job.plan)
    synchronize = _make_synchronizer(on_gpu=torch.cuda.is_available() and job.plan.device == "gpu")

    def iteration() -> None:
        pipeline.run()
        synchronize()

    return iteration


class _Unprofiled(NamedTuple):
    """Of iterations without a recording: the median time, and their energy."""

    iteration_ns: float
    energy: EnergyUse


def _measure(iteration: Callable[[], None], job: WorkerJob) -> _Unprofiled:
    """Warms up, times, and records."""
    deadline = time.perf_counter() + _WARM_UP_S
    warmed = 0
    while warmed < job.warm_up or time.perf_counter() < deadline:
        iteration()
        warmed += 1
    times = [end - begun for begun, _, end in islice(time_calls(iteration), job.iterations)]
    energy = _measure_energy(iteration)
    if job.modules:
        turn_marks_on()
    with mark_range(CAPTURE_RANGE):
        for _ in range(_SETTLING):
            iteration()
        with mark_range(MEASURED_RANGE):
            for _ in times:
                with mark_range(ITERATION_RANGE):
                    iteration()
    return _Unprofiled(statistics.median(times), energy)


def _measure_energy(iteration: Callable[[], None]) -> EnergyUse:
    """Runs iterations for as long as the counters need; none without a counter."""
    before, count = read_energy(), 0
    while before.has_counters and time.monotonic() < before.at_s + _ENERGY_S:
        iteration()
        count += 1
    return compute_energy_use(before, read_energy(), count)


def _make_synchronizer(*, on_gpu: bool) -> Callable[[], None]:
    if not on_gpu:
        return lambda: None
    return lambda: torch.cuda.current_stream().synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
