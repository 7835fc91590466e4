"""Records one stage of a profile: its job for the profiled process, the run under nsys or torch.profiler, what came of it."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optpipe.core.card import card_from_file
from optpipe.core.events import Listener
from optpipe.core.tensors import InputSpec
from optpipe.errors import (
    BadInputError,
    MissingError,
    OptpipeError,
    StageError,
)
from optpipe.export.reference import reference_from_file
from optpipe.inputs.rows import batch_from_rows
from optpipe.inputs.samples import choose_samples, load_sample_inputs
from optpipe.trace.layers.ort_nodes import (
    ClockAnchor,
    NodeRun,
    add_node_ranges,
    match_source_names,
)
from optpipe.trace.recording.capture import (
    CaptureOptions,
    Recording,
    export_recording,
    record_program,
    run_recorded,
)
from optpipe.trace.recording.frames import Trace
from optpipe.trace.recording.python_samples import add_samples
from optpipe.trace.recording.read import trace_from_sqlite
from optpipe.trace.recording.redaction import KEEP_RAW_WARNING
from optpipe.trace.recording.torch_trace import trace_from_torch
from optpipe.trace.timeline.analysis import analysis_from_trace, select_measured_part
from optpipe.workspace.file_names import CARD, REFERENCE
from optpipe.workspace.store import Store

STAGES = ("export", "quantize", "build", "preprocess", "inference")
_LEAST_FREE_BYTES = 1 << 20
_ERRORS: Mapping[int, type[OptpipeError]] = {2: BadInputError, 3: MissingError, 4: StageError}


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What to profile, and how."""

    model: Mapping[str, Any]
    """The options that name the model and its builds, as the profiled process needs them."""
    stages: tuple[str, ...] = STAGES
    batch_sizes: tuple[int, ...] = (1,)
    iterations: int = 20
    warm_up: int = 5
    tracer: str = "nsys"
    capture: CaptureOptions = field(default_factory=CaptureOptions)
    ncu: bool = False
    keep_raw: bool = False
    images: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class ProfileJob:
    """One profiled process."""

    name: str
    kind: str
    on_gpu: bool
    details: Mapping[str, Any]
    judged_ranges: tuple[tuple[str, str | None], ...]
    """Stage names with the range that each is judged by."""
    source_graph: Path | None = None
    """The ONNX graph that the artifact was built from: its operators are ONNX's own, with known shapes."""
    inputs: tuple[InputSpec, ...] = ()


def record_job(job: ProfileJob, plan: ProfilePlan, scratch: Path, listener: Listener) -> tuple[Trace, dict[str, Any]]:
    """Runs `job` and gives its trace, layers and samples included, and what the profiled process found out.

    Raises:
        OptpipeError: the stage's own error; MissingError: nsys refused, or never started it.
    """
    _write_job(job, plan, scratch)
    trace, found = (
        _record_with_torch(scratch) if plan.tracer == "torch" else _record_with_nsys(job, plan, scratch, listener)
    )
    trace = _add_node_ranges(trace, job, found, listener)
    _warn_about_missing_tables(trace, job, plan.capture, listener)
    return trace, found


def _record_with_nsys(
    job: ProfileJob, plan: ProfilePlan, scratch: Path, listener: Listener
) -> tuple[Trace, dict[str, Any]]:
    came = record_program(make_worker_command(scratch / "job.json"), scratch, plan.capture, on_gpu=job.on_gpu)
    found = read_result(scratch, came)
    trace = trace_from_sqlite(export_recording(came, scratch))
    if job.on_gpu and job.kind != "build" and select_measured_part(analysis_from_trace(trace)).trace.kernels.is_empty():
        listener.warn(
            f"{job.name}: nsys recorded no kernels in the measured range; recording the whole process instead"
        )
        came = record_program(make_worker_command(scratch / "job.json"), scratch, plan.capture, on_gpu=True, whole=True)
        found = read_result(scratch, came)
        trace = trace_from_sqlite(export_recording(came, scratch))
    if plan.capture.python_sampling and came.recording is not None:
        trace = add_samples(trace, came.recording, scratch, listener.warn)
    return trace, found


def _warn_about_missing_tables(trace: Trace, job: ProfileJob, asked: CaptureOptions, listener: Listener) -> None:
    """What was asked for and is not there is said, not left out."""
    wanted = (
        ("memory", asked.memory_use, "memory usage", True),
        ("metrics", asked.gpu_metrics, "GPU metrics", True),
        ("samples", asked.python_sampling, "Python stacks", False),
        ("os_runtime", asked.os_runtime, "OS runtime calls", False),
    )
    for table, is_wanted, what, of_gpu in wanted:
        if is_wanted and trace.tables[table].is_empty():
            why = " (the stage does not use the GPU)" if of_gpu and not job.on_gpu else ""
            listener.warn(f"{job.name}: {trace.tracer} recorded no {what}{why}")


def _record_with_torch(scratch: Path) -> tuple[Trace, dict[str, Any]]:
    status, said = run_recorded(make_worker_command(scratch / "job.json"), scratch)
    found = read_result(scratch, Recording(None, status, said))
    return trace_from_torch(scratch / "torch.json"), found


def _write_job(job: ProfileJob, plan: ProfilePlan, scratch: Path) -> None:
    details = {
        **job.details,
        "stage": job.kind,
        "warm_up": plan.warm_up,
        "iterations": plan.iterations,
        "result": str(scratch / "result.json"),
        "log": str(scratch / "worker.log"),
        "scratch": str(scratch / "store"),
        "torch_trace": str(scratch / "torch.json") if plan.tracer == "torch" else None,
    }
    if job.kind == "inference":
        details["inputs"] = str(_write_inputs(job, scratch))
    (scratch / "job.json").write_text(json.dumps(details), encoding="utf-8")


def _write_inputs(job: ProfileJob, scratch: Path) -> Path:
    """The rows that the model is verified on, repeated to the batch size.

    Raises:
        BadInputError: the batch size is outside the profile that the artifact was built for.
    """
    import numpy as np

    store = Store(Path(job.details["workspace"]))
    model = store.find(store.find(job.details["artifact"]).manifest.parents[0])
    card = card_from_file(model.file(CARD))
    batch_size = int(job.details["batch_size"])
    low, _, high = card.batch_range
    if not low <= batch_size <= high:
        raise BadInputError(
            f"--batch-size {batch_size}: {card.name} was built for {low} to {high}; widen it with --batch"
        )
    kept = [
        each for each in store.list_entries() if each.manifest.kind == "reference" and model.id in each.manifest.parents
    ]
    if kept:
        rows = dict(reference_from_file(store.verify_entry(kept[-1], REFERENCE).file(REFERENCE)).inputs)
    else:
        rows = load_sample_inputs(card, choose_samples(card, None))
    chosen = {name: values[np.arange(batch_size) % len(values)] for name, values in rows.items()}
    np.savez(scratch / "inputs.npz", **batch_from_rows(card, chosen))  # type: ignore[arg-type]
    return scratch / "inputs.npz"


def make_worker_command(job_file: Path) -> list[str]:
    """The profiled process for a job."""
    return [sys.executable, "-m", "optpipe.profile.profiled_worker", str(job_file)]


def read_result(scratch: Path, recorded: Recording) -> dict[str, Any]:
    """What the profiled process found out; its own error comes before anything nsys has to say.

    Raises:
        OptpipeError: the process failed, or died; MissingError: nsys never started it.
    """
    result, log = scratch / "result.json", scratch / "worker.log"
    if result.is_file():
        try:
            found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        except ValueError as error:
            raise StageError(f"the profiled process wrote an invalid result: {error}") from error
        if "error" in found:
            raise _ERRORS.get(found["exit_status"], StageError)(found["error"])
        return found
    if not log.is_file():
        export_recording(recorded, scratch)  # says why nsys, or the interpreter, refused
        raise StageError(f"the profiled process never started: {recorded.log.strip()[-300:]}")
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    why = (
        lines[-1]
        if lines and lines[0].startswith("Traceback")
        else lines[0]
        if lines
        else _find_last_words(recorded.log)
    )
    raise StageError(f"the profiled process crashed (exit status {recorded.exit_status}): {why[:300]}")


def _find_last_words(said: str) -> str:
    """The program's last line; what nsys wrote around it is left out."""
    of_nsys = (
        "generat",
        "importer",
        "processing",
        "/",
        "capture range",
        "unable to retrieve",
        "collecting",
        "the target application",
    )
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    own = [line for line in lines if not line.lower().startswith(of_nsys)]
    return (own or ["it was killed or ran out of memory"])[-1]


def keep_raw_recording(scratch: Path, folder: Path, listener: Listener) -> None:
    """Copies the raw recording out of the scratch folder, and warns."""
    kept = folder / "raw"
    kept.mkdir(mode=0o700)
    for path in (*scratch.glob("recording*"), *scratch.glob("torch.json")):
        shutil.copy2(path, kept / path.name)
    listener.warn(f"{kept}: {KEEP_RAW_WARNING}")


@contextmanager
def open_scratch_folder(workspace: Path) -> Iterator[Path]:
    """A folder for nobody else's eyes, removed in every case."""
    try:
        (workspace / "tmp").mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix="profile-", dir=workspace / "tmp")).resolve()
    except OSError as error:
        raise StageError(
            f"cannot write in {workspace}: {error.strerror}; choose another place with --workspace"
        ) from error
    try:
        yield path
    except (OSError, OptpipeError) as error:
        # Whoever ran out of space first, nsys or the program, says it in its own way, or not at all.
        if shutil.disk_usage(path).free < _LEAST_FREE_BYTES:
            raise StageError(
                f"disk full: no space for the recording in {workspace}; choose another location with --workspace"
            ) from error
        if isinstance(error, OSError):
            raise StageError(
                f"cannot write in {workspace}: {error.strerror}; choose another place with --workspace"
            ) from error
        raise
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _add_node_ranges(trace: Trace, job: ProfileJob, found: Mapping[str, Any], listener: Listener) -> Trace:
    """`trace` with ONNX Runtime's nodes as ranges, by the names of the graph; as it is, with a warning, where that fails."""
    nodes = found.get("nodes")
    if not nodes:
        return trace
    runs = [NodeRun(**run) for run in nodes["runs"]]
    names = match_source_names(job.source_graph, [run.name for run in runs]) if job.source_graph else {}
    try:
        return add_node_ranges(trace, runs, [ClockAnchor(**each) for each in nodes["anchors"]], names)
    except StageError as error:
        listener.warn(f"{job.name}: Tensor Core usage is reported by kernel, not by layer: {error}")
        return trace
