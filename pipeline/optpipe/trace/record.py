"""Records one stage of a profile in another process, under nsys."""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from optpipe.backends.base import Device, NodeRun, ProgramCosts
from optpipe.core.card import InputSpec, ModelCard, Shape, card_from_file
from optpipe.core.entries import ArtifactInfo, ModelInfo, WeightsRequest
from optpipe.core.errors import BadInputError, MissingError, OptpipeError, StageError
from optpipe.core.events import Listener
from optpipe.core.precision import Precision
from optpipe.core.records import json_from_record, read_record
from optpipe.models.artifacts.lookup import find_reference
from optpipe.models.export.exported import reference_from_file
from optpipe.models.inputs.rows import Arrays, batch_from_rows, fill_sequences
from optpipe.models.inputs.samples import choose_samples, load_sample_inputs
from optpipe.preprocess.dali_pipeline import DaliPlan
from optpipe.trace.analysis import analysis_from_trace, select_measured_part
from optpipe.trace.graph import ClockAnchor, add_node_ranges, match_source_names
from optpipe.trace.nsys import Extra, ProfilePlan, Recording, export_recording, record_program
from optpipe.trace.read import Trace, trace_from_sqlite
from optpipe.trace.records import StageFacts, StageSubject
from optpipe.trace.roofline import Peaks
from optpipe.workspace.entry import Entry
from optpipe.workspace.file_names import CARD, REFERENCE
from optpipe.workspace.store import Store

_LEAST_FREE_BYTES = 1 << 20
_NSYS_LINES = (
    "generat",
    "importer",
    "processing",
    "/",
    "capture range",
    "unable to retrieve",
    "collecting",
    "the target application",
)
_ERRORS: Mapping[int, type[OptpipeError]] = {2: BadInputError, 3: MissingError, 4: StageError}


@dataclass(frozen=True, slots=True)
class BuildJob:
    """Exports, quantizes, and builds in a new store, so that nothing is cached."""

    model: str
    weights: WeightsRequest
    batch: tuple[int, int, int] | None
    shapes: Mapping[str, tuple[Shape, Shape, Shape]]
    precisions: tuple[Precision, ...]
    backends: tuple[str, ...]
    device: Device
    calibration: Path | None
    options: Mapping[str, Mapping[str, Any]]
    truncate: bool = False


@dataclass(frozen=True, slots=True)
class InferenceJob:
    workspace: Path
    artifact: str
    backend: str
    device: Device
    options: Mapping[str, Any]
    batch_size: int
    length: int | None = None
    """Tokens of every sequence; None for the texts themselves, padded."""


@dataclass(frozen=True, slots=True)
class PreprocessJob:
    workspace: Path
    model: str
    images: tuple[Path, ...]
    batch_size: int
    plan: DaliPlan | None
    """None for the CPU reference."""


JOB, RESULT, INPUTS = "job.json", "job-result.json", "inputs.npz"
"""Files in the scratch folder: the job, its result, and a batch of each input."""
LOG = "job-worker.log"
"""The reason of a crash; the file exists as soon as the process runs."""


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """One profiled process; exactly one of the three kinds of work is set."""

    scratch: Path
    warm_up: int = 0
    iterations: int = 0
    build: BuildJob | None = None
    inference: InferenceJob | None = None
    preprocess: PreprocessJob | None = None


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """Results of a profiled process in addition to its recording, or its error."""

    unprofiled_iteration_ns: float | None = None
    peaks: Peaks | None = None
    program: ProgramCosts | None = None
    """Costs of a torch program's layers."""
    layer_ns: Mapping[str, float] | None = None
    """Median time of each node in ONNX Runtime on the CPU."""
    node_runs: tuple[NodeRun, ...] = ()
    """Times of each node in ONNX Runtime on a GPU; `anchors` align its clock with the recording's."""
    anchors: tuple[ClockAnchor, ...] = ()
    error: str | None = None
    exit_status: int = 0


@dataclass(frozen=True, slots=True)
class ProfileJob:
    name: str
    on_gpu: bool
    work: BuildJob | InferenceJob | PreprocessJob
    stages: tuple[tuple[StageSubject, StageFacts], ...]
    source_graph: Path | None = None
    """The ONNX graph that the artifact was built from: its operators are ONNX's, with known shapes."""
    inputs: tuple[InputSpec, ...] = ()
    read_rows: Callable[[], tuple[ModelCard, Arrays]] | None = None
    """`read_profiled_rows` of an inference's artifact, read once for all sizes."""


def record_job(job: ProfileJob, plan: ProfilePlan, scratch: Path, listener: Listener) -> tuple[Trace, WorkerResult]:
    """Runs `job`; returns its trace, layers included, and its results. Raises the stage's error, MissingError if nsys refused."""
    worker_job = make_worker_job(job, plan, scratch)
    (scratch / JOB).write_bytes(json_from_record(worker_job))
    for whole in (False, True):
        came = record_program(
            make_worker_command(worker_job), scratch, set(plan.record), on_gpu=job.on_gpu, whole=whole
        )
        found = read_result(worker_job, came)
        trace = trace_from_sqlite(export_recording(came, scratch))
        if whole or not job.on_gpu or isinstance(job.work, BuildJob):
            break
        if select_measured_part(analysis_from_trace(trace)).trace.kernels.height:
            break
        listener.warn(
            f"{job.name}: nsys recorded no kernels in the measured range; recording the whole process instead"
        )
    if Extra.OS_CALLS in plan.record and trace.os_runtime.is_empty():
        listener.warn(f"{job.name}: {trace.tracer} recorded no OS runtime calls")
    if found.node_runs:
        names = match_source_names(job.source_graph, [run.name for run in found.node_runs]) if job.source_graph else {}
        try:
            trace = add_node_ranges(trace, found.node_runs, found.anchors, names)
        except StageError as error:
            listener.warn(f"{job.name}: Tensor Core usage is reported by kernel, not by layer: {error}")
    return trace, found


def make_worker_job(job: ProfileJob, plan: ProfilePlan, scratch: Path) -> WorkerJob:
    """Makes the job file's content, and writes the inputs of an inference into `scratch`.

    The inputs are the rows that the model is verified on, repeated to the batch size, or to `length` tokens. Raises BadInputError
    for a batch size outside the artifact's profile.
    """
    common = WorkerJob(scratch, warm_up=plan.warm_up, iterations=plan.iterations)
    work = job.work
    if isinstance(work, BuildJob):
        return replace(common, build=work)
    if isinstance(work, PreprocessJob):
        return replace(common, preprocess=work)
    assert job.read_rows is not None
    card, rows = job.read_rows()
    low, _, high = card.batch_range
    if not low <= work.batch_size <= high:
        raise BadInputError(
            f"--batch-size {work.batch_size}: {card.name} was built for {low} to {high}; widen it with --batch"
        )
    if work.length is not None:
        rows = fill_sequences(card, rows, work.length, work.batch_size)
    chosen = {name: values[np.arange(work.batch_size) % len(values)] for name, values in rows.items()}
    np.savez(scratch / INPUTS, **batch_from_rows(card, chosen))  # type: ignore[arg-type]
    return replace(common, inference=work)


def read_profiled_rows(artifact: Entry[ArtifactInfo], store: Store) -> tuple[ModelCard, Arrays]:
    """The card of an artifact's model, and the rows that verified the artifact, (samples, ...) by input."""
    model = store.find(artifact.manifest.parents[0], ModelInfo)
    card = card_from_file(model.file(CARD))
    if (kept := find_reference(artifact, model, store)) is not None:
        return card, dict(reference_from_file(store.verify_entry(kept, REFERENCE).file(REFERENCE)).inputs)
    return card, load_sample_inputs(card, choose_samples(card, None))


def make_worker_command(job: WorkerJob) -> list[str]:
    return [sys.executable, "-m", "optpipe.trace.profiled_worker", str(job.scratch / JOB)]


def read_result(job: WorkerJob, recorded: Recording) -> WorkerResult:
    """Raises the error of the profiled process, which takes precedence over that of nsys, or StageError if it died."""
    log, result = job.scratch / LOG, job.scratch / RESULT
    if result.is_file():
        try:
            found = read_record(result, WorkerResult)
        except BadInputError as error:
            raise StageError(f"the profiled process wrote an invalid result: {error}") from error
        if found.error is not None:
            raise _ERRORS.get(found.exit_status, StageError)(found.error)
        return found
    if not log.is_file():
        export_recording(recorded, job.scratch)  # raises the reason of nsys, or of the interpreter
        raise StageError(f"the profiled process never started: {recorded.log.strip()[-300:]}")
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    # a traceback tells the error in its last line, faulthandler in its first
    if not lines:  # the program's last line, without the lines of nsys
        own = (line.strip() for line in recorded.log.splitlines() if line.strip())
        lines = [line for line in own if not line.lower().startswith(_NSYS_LINES)][-1:]
    why = lines[-1 if lines[0].startswith("Traceback") else 0] if lines else "it was killed or ran out of memory"
    raise StageError(f"the profiled process crashed (exit status {recorded.exit_status}): {why[:300]}")


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
            raise StageError(
                f"the disk is full: no space for the recording in {store.workspace}; choose another location with --workspace"
            ) from error
