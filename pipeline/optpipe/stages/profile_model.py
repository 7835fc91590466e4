"""Profiles a model's stages: each runs in a process of its own under nsys (or torch.profiler), and is judged from its trace."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optpipe.backends.registry import options_in_force
from optpipe.core.card import ModelCard, card_from_file
from optpipe.core.events import Listener
from optpipe.core.runs import MANIFEST, OpenRun, begin_run, finish_run, write_json
from optpipe.core.store import Entry, Store
from optpipe.core.tensors import InputSpec
from optpipe.errors import BadInputError, ExitStatus, MissingError, OptpipeError, StageError
from optpipe.inputs.samples import sample_inputs, samples_for
from optpipe.stages.build import BuiltArtifact
from optpipe.stages.export import CARD, ONNX
from optpipe.stages.preprocess.dali_pipeline import DaliPlan
from optpipe.trace.analysis import analysis_from_trace, measured_part
from optpipe.trace.capture import CaptureOptions, Recorded, exported, record, run_recorded
from optpipe.trace.files import trace_from_folder, write_trace
from optpipe.trace.frames import Trace
from optpipe.trace.importer import json_from_recording, nsys_path
from optpipe.trace.ncu import against_peaks, counters
from optpipe.trace.ort_nodes import Anchor, NodeRun, layer_times, source_names, with_node_ranges
from optpipe.trace.peaks import Peaks
from optpipe.trace.python_samples import samples_from_json
from optpipe.trace.read import trace_from_sqlite
from optpipe.trace.redaction import KEEP_RAW_WARNING
from optpipe.trace.report import document_from_profile, profile_from_trace
from optpipe.trace.roofline import Graph, costs_from_onnx, edge_bytes_from_onnx
from optpipe.trace.torch_trace import trace_from_torch

STAGES = ("export", "quantize", "build", "preprocess", "inference")
_LEAST_FREE_BYTES = 1 << 20
_BUILD_STAGES = ("export", "quantize", "build")
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
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """The documents of all stages, the failed ones with their error, and where everything is kept."""

    stages: tuple[dict[str, Any], ...]
    run_dir: Path
    status: ExitStatus

    @property
    def main(self) -> dict[str, Any] | None:
        """The stage shown in full: the first inference, else the last stage that has a trace."""
        done = [stage for stage in self.stages if "error" not in stage]
        inferences = [stage for stage in done if stage["kind"] == "inference"]
        return next(iter(inferences or done[::-1]), None)


@dataclass(frozen=True, slots=True)
class _Job:
    """One profiled process."""

    name: str
    kind: str
    on_gpu: bool
    details: Mapping[str, Any]
    judged: tuple[tuple[str, str | None], ...]
    """Stage names with the range that each is judged by."""
    source_graph: Path | None = None
    """The ONNX graph that the artifact was built from: its operators are ONNX's own, with known shapes."""
    inputs: tuple[InputSpec, ...] = ()


def require_profilable(tracer: str) -> None:
    """Fails at once, before anything is built, where the tracer is not here."""
    if tracer == "nsys":
        nsys_path()


def preprocess_images(card: ModelCard, folder: Path | None, batch_size: int) -> tuple[Path, ...]:
    """The pictures of `folder`, or the model's own samples, at least a batch of them; none for a model without pictures."""
    if card.transform is None:
        return ()
    files = samples_for(card, folder).files
    return files * -(-batch_size // len(files)) if files else ()


def profile_model(
    plan: ProfilePlan,
    artifacts: Sequence[BuiltArtifact],
    model: Entry,
    store: Store,
    listener: Listener,
    command: Sequence[str],
) -> ModelProfile:
    """Profiles every stage in `plan`; one that fails does not stop the others.

    Raises:
        MissingError: nsys is not here. The stage's own error where all of them failed.
    """
    run = begin_run(store.workspace, "profile")
    card = card_from_file(model.file(CARD))
    documents: list[dict[str, Any]] = []
    errors: list[OptpipeError] = []
    parents = (model.id, *(each.entry.id for each in artifacts))
    try:
        for job in _jobs(plan, artifacts, card, store):
            try:
                with listener.step(f"profile {job.name}"):
                    documents += _profiled(job, plan, run, store, listener)
            except OptpipeError as error:
                errors.append(error)
                documents.append(
                    {"name": job.name, "kind": job.kind, "error": str(error), "exit_status": int(error.exit_status)}
                )
        if len(errors) < len(documents):
            _finish(run, documents, command, parents, "complete")
    except KeyboardInterrupt:
        if len(errors) < len(documents):
            _finish(run, documents, command, parents, "interrupted")
        raise
    finally:
        if not (run.path / MANIFEST).is_file():
            shutil.rmtree(run.path, ignore_errors=True)
    if len(errors) == len(documents):
        raise errors[0]
    return ModelProfile(tuple(documents), run.path, ExitStatus.STAGE_FAILED if errors else ExitStatus.DONE)


def _finish(
    run: OpenRun, documents: Sequence[dict[str, Any]], command: Sequence[str], parents: Sequence[str], status: str
) -> None:
    write_json(run.path / "profile.json", {"stages": documents})
    stages = [{"name": each["name"], "bottleneck": each.get("bottleneck")} for each in documents]
    finish_run(run, command=command, parents=parents, details={"stages": stages}, status=status)


def _jobs(plan: ProfilePlan, artifacts: Sequence[BuiltArtifact], card: ModelCard, store: Store) -> Iterator[_Job]:
    built = tuple(stage for stage in _BUILD_STAGES if stage in plan.stages)
    if built:
        judged = tuple((stage, f"optpipe.{stage}") for stage in built)
        yield _Job("+".join(built), "build", on_gpu=plan.model["device"] == "cuda", details=plan.model, judged=judged)
    if "preprocess" in plan.stages and card.transform is not None and plan.images:
        yield _preprocess_job(plan, card)
    if "inference" in plan.stages:
        for artifact in artifacts:
            if artifact.why_not is None:
                for batch_size in plan.batch_sizes:
                    yield _inference_job(plan, artifact.entry, card, batch_size, store)


def _preprocess_job(plan: ProfilePlan, card: ModelCard) -> _Job:
    assert card.transform is not None
    on_gpu = plan.model["device"] == "cuda"
    batch_size = max(plan.batch_sizes)
    implementation = "dali" if _has_dali() else "cpu reference"
    details = {
        "transform": card.transform.to_dict(),
        "images": [str(path) for path in plan.images],
        "implementation": implementation,
        "plan": DaliPlan(
            decode="mixed" if on_gpu else "cpu",
            device="gpu" if on_gpu else "cpu",
            batch_size=batch_size,
            threads=8 if on_gpu else 2,
        ).to_dict(),
        "batch_size": batch_size,
        "threads": 2,
    }
    name = f"preprocess {implementation} batch {batch_size}"
    return _Job(name, "preprocess", on_gpu=on_gpu, details=details, judged=((name, None),))


def _has_dali() -> bool:
    from importlib.util import find_spec

    return find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None


def _inference_job(plan: ProfilePlan, entry: Entry, card: ModelCard, batch_size: int, store: Store) -> _Job:
    info = entry.info
    options = options_in_force(info, plan.options.get(info["backend"], {}))
    name = f"{info['backend']} {info['precision']} batch {batch_size}"
    details = {
        "workspace": str(store.workspace.resolve()),
        "artifact": entry.id,
        "backend": info["backend"],
        "precision": info["precision"],
        "device": info["device"],
        "options": options,
        "batch_size": batch_size,
        "peaks": True,
    }
    graphs = [store.find(parent) for parent in entry.manifest.parents if parent]
    path = next((each.file(ONNX) for each in reversed(graphs) if each.file(ONNX).is_file()), None)
    on_gpu = info["device"] == "cuda"
    return _Job(name, "inference", on_gpu, details, ((name, None),), source_graph=path, inputs=card.inputs)


def _graph(job: _Job, found: Mapping[str, Any]) -> Graph | None:
    """The model's layers by `job.source_graph`, with the peaks that were found; None without either."""
    if job.source_graph is None or not found.get("peaks"):
        return None
    batch_size = int(job.details["batch_size"])
    return Graph(
        costs=costs_from_onnx(job.source_graph, job.inputs, batch_size, tf32=job.details["precision"] == "tf32"),
        peaks=Peaks(**found["peaks"]),
        batch_size=batch_size,
        edge_bytes=edge_bytes_from_onnx(job.source_graph, job.inputs, batch_size),
        layer_ns=layer_times(job.source_graph, found["layer_ns"]) if found.get("layer_ns") else {},
    )


def _with_nodes(trace: Trace, job: _Job, found: Mapping[str, Any], listener: Listener) -> Trace:
    """`trace` with ONNX Runtime's nodes as ranges, by the names of the graph; as it is, with a warning, where that fails."""
    nodes = found.get("nodes")
    if not nodes:
        return trace
    runs = [NodeRun(**run) for run in nodes["runs"]]
    names = source_names(job.source_graph, [run.name for run in runs]) if job.source_graph else {}
    try:
        return with_node_ranges(trace, runs, [Anchor(**each) for each in nodes["anchors"]], names)
    except StageError as error:
        listener.warn(f"{job.name}: Tensor Cores are told by kernel, not by layer: {error}")
        return trace


def _profiled(job: _Job, plan: ProfilePlan, run: OpenRun, store: Store, listener: Listener) -> list[dict[str, Any]]:
    """Records and judges one job; raw recordings are gone when this returns, unless they are asked for."""
    with _scratch(store.workspace) as scratch:
        trace, found = _recorded(job, plan, scratch, listener)
        trace = _with_nodes(trace, job, found, listener)
        _say_what_is_lacking(trace, job, plan.capture, listener)
        folder = run.path / _folder_name(job.name)
        write_trace(trace, folder)
        trace = trace_from_folder(folder)  # what is judged is what is kept, so that it can be judged again
        if plan.keep_raw:
            _keep_raw(scratch, folder, listener)
        graph = _graph(job, found)
        documents = []
        for name, range_name in job.judged:
            how: dict[str, Any] = {
                "unprofiled_iteration_ns": found.get("unprofiled_iteration_ns"),
                "expects_gpu": job.on_gpu and job.kind != "build",
                "stage": stage_of(name, job.kind),
            }
            profile = profile_from_trace(trace, range_name, graph=graph, **how)
            recording = {"folder": folder.name, "range": range_name, **how}
            facts = {"name": name, "kind": job.kind, **_facts(job), "recording": recording}
            document = {**facts, **document_from_profile(profile)}
            if plan.ncu and job.kind == "inference" and job.on_gpu:
                _count(scratch, document, listener)
            documents.append(document)
    return documents


def _count(scratch: Path, document: dict[str, Any], listener: Listener) -> None:
    """Puts ncu's counters for one iteration beside the roofline, whose peaks they are held against."""
    once = {
        **json.loads((scratch / "job.json").read_text(encoding="utf-8")),
        "iterations": 1,
        "layers": False,
        "peaks": False,
    }
    once |= {"result": str(scratch / "ncu.json"), "log": str(scratch / "ncu.log"), "torch_trace": None}
    (scratch / "ncu-job.json").write_text(json.dumps(once), encoding="utf-8")
    rows = counters(_program(scratch / "ncu-job.json"), scratch, document["kernels"], listener)
    if "withheld" not in document["roofline"]:
        rows = against_peaks(rows, document["roofline"]["peaks"]["bytes_per_s"])
    document["roofline"]["ncu"] = rows


def stage_of(name: str, kind: str) -> str:
    """The stage that rules know: export, quantize and build are recorded as one, and named apart."""
    return name if kind == "build" else kind


def _facts(job: _Job) -> dict[str, Any]:
    wanted = ("artifact", "backend", "precision", "device", "batch_size", "options", "implementation")
    return {key: job.details[key] for key in wanted if key in job.details and job.kind != "build"}


def _recorded(job: _Job, plan: ProfilePlan, scratch: Path, listener: Listener) -> tuple[Trace, dict[str, Any]]:
    _write_job(job, plan, scratch)
    if plan.tracer == "torch":
        return _recorded_by_torch(scratch)
    recorded = record(_program(scratch / "job.json"), scratch, plan.capture, on_gpu=job.on_gpu)
    found = _result(scratch, recorded)
    trace = trace_from_sqlite(exported(recorded, scratch))
    if job.on_gpu and job.kind != "build" and measured_part(analysis_from_trace(trace)).trace.kernels.is_empty():
        listener.warn(f"{job.name}: nsys recorded no kernels inside the measured range; recorded again as a whole")
        recorded = record(_program(scratch / "job.json"), scratch, plan.capture, on_gpu=True, whole=True)
        found = _result(scratch, recorded)
        trace = trace_from_sqlite(exported(recorded, scratch))
    if plan.capture.python_sampling and recorded.recording is not None:
        trace = _with_samples(trace, recorded.recording, scratch, listener)
    return trace, found


def _with_samples(trace: Trace, recording: Path, scratch: Path, listener: Listener) -> Trace:
    try:
        samples, unread = samples_from_json(json_from_recording(recording, scratch))
    except StageError as error:
        listener.warn(f"Python's stacks cannot be read: {error}")
        return trace
    if unread:
        listener.warn(f"{unread} of Python's stacks are in a form that is not known here")
    return replace(trace, samples=samples, absent=tuple(each for each in trace.absent if each != "samples"))


def _say_what_is_lacking(trace: Trace, job: _Job, asked: CaptureOptions, listener: Listener) -> None:
    """What was asked for with --record and is not there is said, not left out."""
    wanted = {"memory": asked.memory_use, "metrics": asked.gpu_metrics, "samples": asked.python_sampling}
    for table, is_wanted in wanted.items():
        if is_wanted and trace.tables[table].is_empty():
            why = "" if job.on_gpu or table == "samples" else " (the stage does not use the GPU)"
            listener.warn(f"{job.name}: {trace.tracer} recorded no {table}{why}")


def _recorded_by_torch(scratch: Path) -> tuple[Trace, dict[str, Any]]:
    status, said = run_recorded(_program(scratch / "job.json"), scratch)
    found = _result(scratch, Recorded(None, status, said))
    return trace_from_torch(scratch / "torch.json"), found


def _write_job(job: _Job, plan: ProfilePlan, scratch: Path) -> None:
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


def _write_inputs(job: _Job, scratch: Path) -> Path:
    """The rows that the model is verified on, repeated to the batch size.

    Raises:
        BadInputError: the batch size is outside the profile that the artifact was built for.
    """
    import numpy as np

    store = Store(Path(job.details["workspace"]))
    model = store.find(store.find(job.details["artifact"]).manifest.parents[0])
    card = card_from_file(model.file(CARD))
    batch_size = int(job.details["batch_size"])
    rows = sample_inputs(card, samples_for(card, None))
    for each in card.inputs:
        if not each.min[0] <= batch_size <= each.max[0]:
            message = f"--batch-size {batch_size}: {card.name} was built for {each.min[0]} to {each.max[0]}; widen it with --batch"
            raise BadInputError(message)
    batch = {name: values[np.arange(batch_size) % len(values)] for name, values in rows.items()}
    np.savez(scratch / "inputs.npz", **batch)  # type: ignore[arg-type]
    return scratch / "inputs.npz"


def _program(job_file: Path) -> list[str]:
    return [sys.executable, "-m", "optpipe.stages.profiled", str(job_file)]


def _result(scratch: Path, recorded: Recorded) -> dict[str, Any]:
    """What the profiled process found out; its own error comes before anything nsys has to say.

    Raises:
        OptpipeError: the process failed, or died; MissingError: nsys never started it.
    """
    result, log = scratch / "result.json", scratch / "worker.log"
    if result.is_file():
        try:
            found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        except ValueError as error:
            message = f"the profiled process left a damaged result: {error}"
            raise StageError(message) from error
        if "error" in found:
            raise _ERRORS.get(found["exit_status"], StageError)(found["error"])
        return found
    if not log.is_file():
        exported(recorded, scratch)  # says why nsys, or the interpreter, refused
        message = f"the profiled process never started: {recorded.said.strip()[-300:]}"
        raise StageError(message)
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    why = lines[-1] if lines and lines[0].startswith("Traceback") else lines[0] if lines else _last_words(recorded.said)
    message = f"the profiled process died under the profiler (exit status {recorded.exit_status}): {why[:300]}"
    raise StageError(message)


def _last_words(said: str) -> str:
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
    return (own or ["it was killed, or ran out of memory"])[-1]


def _keep_raw(scratch: Path, folder: Path, listener: Listener) -> None:
    kept = folder / "raw"
    kept.mkdir(mode=0o700)
    for path in (*scratch.glob("recording*"), *scratch.glob("torch.json")):
        shutil.copy2(path, kept / path.name)
    listener.warn(f"{kept}: {KEEP_RAW_WARNING}")


@contextmanager
def _scratch(workspace: Path) -> Iterator[Path]:
    """A folder for nobody else's eyes, removed in every case."""
    try:
        (workspace / "tmp").mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix="profile-", dir=workspace / "tmp")).resolve()
    except OSError as error:
        message = f"cannot write in {workspace}: {error.strerror}; choose another place with --workspace"
        raise StageError(message) from error
    try:
        yield path
    except (OSError, OptpipeError) as error:
        # Whoever ran out of space first, nsys or the program, says it in its own way, or not at all.
        if shutil.disk_usage(path).free < _LEAST_FREE_BYTES:
            message = (
                f"the disk is full: {workspace} has no room for the recording; choose another place with --workspace"
            )
            raise StageError(message) from error
        if isinstance(error, OSError):
            message = f"cannot write in {workspace}: {error.strerror}; choose another place with --workspace"
            raise StageError(message) from error
        raise
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _folder_name(name: str) -> str:
    return name.replace(" ", "-").replace("+", "-")
