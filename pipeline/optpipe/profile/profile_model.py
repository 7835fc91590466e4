"""Profiles a model's stages: each runs in a process of its own under nsys (or torch.profiler), and is judged from its trace."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optpipe.backends.registry import get_runtime_options, resolve_effective_options
from optpipe.build.build import BuiltArtifact
from optpipe.core.card import ModelCard, card_from_file
from optpipe.core.events import Listener
from optpipe.core.records import plain_from_record
from optpipe.errors import ExitStatus, OptpipeError
from optpipe.inputs.samples import choose_samples
from optpipe.preprocess.dali.pipeline import DaliPlan
from optpipe.profile.recompute import runtime_from_stage
from optpipe.profile.record import (
    ProfileJob,
    ProfilePlan,
    keep_raw_recording,
    make_worker_command,
    open_scratch_folder,
    record_job,
)
from optpipe.trace.findings.report import document_from_profile, profile_from_trace
from optpipe.trace.layers.graph_costs import graph_costs_from_onnx, graph_costs_from_program
from optpipe.trace.layers.ncu import add_peak_shares, record_counters
from optpipe.trace.layers.ort_nodes import sum_layer_times
from optpipe.trace.layers.peaks import Peaks
from optpipe.trace.layers.roofline import GraphCosts
from optpipe.trace.recording.capture import require_nsys
from optpipe.trace.recording.files import trace_from_folder, write_trace
from optpipe.trace.timeline.analysis import analysis_from_trace
from optpipe.workspace.file_names import CARD, ONNX, PROFILE
from optpipe.workspace.runs import (
    MANIFEST,
    OpenRun,
    begin_run,
    finish_run,
    write_json,
)
from optpipe.workspace.store import Entry, Store

_BUILD_STAGES = ("export", "quantize", "build")


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


def require_profilable(plan: ProfilePlan) -> None:
    """Fails at once, before anything is built, where the tracer is not here or cannot record what is asked for."""
    if plan.tracer == "nsys":
        require_nsys(plan.capture)


def choose_preprocess_images(card: ModelCard, folder: Path | None, batch_size: int) -> tuple[Path, ...]:
    """The pictures of `folder`, or the model's own samples, at least a batch of them; none for a model without pictures."""
    if card.transform is None:
        return ()
    files = choose_samples(card, folder).files
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
        for job in _list_jobs(plan, artifacts, card, store):
            try:
                with listener.step(f"profile {job.name}"):
                    documents += _profile_job(job, plan, run, store, listener)
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
    write_json(run.path / PROFILE, {"stages": documents})
    stages = [{"name": each["name"], "bottleneck": each.get("bottleneck")} for each in documents]
    finish_run(run, command=command, parents=parents, details={"stages": stages}, status=status)


def _list_jobs(
    plan: ProfilePlan, artifacts: Sequence[BuiltArtifact], card: ModelCard, store: Store
) -> Iterator[ProfileJob]:
    built = tuple(stage for stage in _BUILD_STAGES if stage in plan.stages)
    if built:
        judged = tuple((stage, f"optpipe.{stage}") for stage in built)
        yield ProfileJob(
            "+".join(built), "build", on_gpu=plan.model["device"] == "cuda", details=plan.model, judged_ranges=judged
        )
    if "preprocess" in plan.stages and card.transform is not None and plan.images:
        yield _make_preprocess_job(plan, card)
    if "inference" in plan.stages:
        for artifact in artifacts:
            if artifact.why_not is None:
                for batch_size in plan.batch_sizes:
                    yield _make_inference_job(plan, artifact.entry, card, batch_size, store)


def _make_preprocess_job(plan: ProfilePlan, card: ModelCard) -> ProfileJob:
    assert card.transform is not None
    on_gpu = plan.model["device"] == "cuda"
    batch_size = max(plan.batch_sizes)
    implementation = "dali" if _has_dali() else "cpu reference"
    details = {
        "transform": card.transform.to_dict(),
        "images": [str(path) for path in plan.images],
        "implementation": implementation,
        "plan": plain_from_record(
            DaliPlan(
                decode="mixed" if on_gpu else "cpu",
                device="gpu" if on_gpu else "cpu",
                batch_size=batch_size,
                threads=8 if on_gpu else 2,
            )
        ),
        "batch_size": batch_size,
        "threads": 2,
    }
    name = f"preprocess {implementation} batch {batch_size}"
    return ProfileJob(name, "preprocess", on_gpu=on_gpu, details=details, judged_ranges=((name, None),))


def _has_dali() -> bool:
    from importlib.util import find_spec

    return find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None


def _make_inference_job(plan: ProfilePlan, entry: Entry, card: ModelCard, batch_size: int, store: Store) -> ProfileJob:
    info = entry.info
    known = get_runtime_options(info["backend"], info["device"])
    given = plan.model["options"].get(info["backend"], {})  # what is not among `known` was for the build
    options = resolve_effective_options(info, {name: value for name, value in given.items() if name in known})
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
    return ProfileJob(name, "inference", on_gpu, details, ((name, None),), source_graph=path, inputs=card.inputs)


def _make_graph(job: ProfileJob, found: Mapping[str, Any]) -> GraphCosts | None:
    """The layers of the program that ran, else of `job.source_graph`, with the peaks that were found; None without."""
    if not found.get("peaks"):
        return None
    batch_size, tf32 = int(job.details["batch_size"]), job.details["precision"] == "tf32"
    peaks = Peaks(**found["peaks"])
    if program := found.get("program"):
        return graph_costs_from_program(program, batch_size, peaks, tf32=tf32)
    if job.source_graph is None:
        return None
    graph = graph_costs_from_onnx(job.source_graph, job.inputs, batch_size, peaks, tf32=tf32)
    node_ns = found.get("layer_ns")
    return replace(graph, layer_ns=sum_layer_times(job.source_graph, node_ns)) if node_ns else graph


def _profile_job(
    job: ProfileJob, plan: ProfilePlan, run: OpenRun, store: Store, listener: Listener
) -> list[dict[str, Any]]:
    """Records and judges one job; raw recordings are gone when this returns, unless they are asked for."""
    with open_scratch_folder(store.workspace) as scratch:
        trace, found = record_job(job, plan, scratch, listener)
        folder = run.path / _name_folder(job.name)
        write_trace(trace, folder)
        # What is kept is what is judged, so that it can be judged again.
        whole = analysis_from_trace(trace_from_folder(folder))
        if plan.keep_raw:
            keep_raw_recording(scratch, folder, listener)
        graph = _make_graph(job, found)
        documents = []
        for name, range_name in job.judged_ranges:
            how: dict[str, Any] = {
                "unprofiled_iteration_ns": found.get("unprofiled_iteration_ns"),
                "expects_gpu": job.on_gpu and job.kind != "build",
                "stage": get_rule_stage(name, job.kind),
            }
            facts = {"name": name, "kind": job.kind, **_read_facts(job)}
            profile = profile_from_trace(whole, range_name, graph=graph, **how, **runtime_from_stage(facts))
            facts["recording"] = {"folder": folder.name, "range": range_name, **how}
            document = {**facts, **document_from_profile(profile)}
            if plan.ncu and job.kind == "inference" and job.on_gpu:
                _count_with_ncu(scratch, document, listener)
            elif plan.ncu and job.kind == "inference":
                listener.warn(f"{name}: ncu only applies to GPU stages")
            documents.append(document)
    return documents


def _count_with_ncu(scratch: Path, document: dict[str, Any], listener: Listener) -> None:
    """Puts ncu's counters for one iteration beside the roofline, whose peaks they are held against."""
    once = {
        **json.loads((scratch / "job.json").read_text(encoding="utf-8")),
        "iterations": 1,
        "layers": False,
        "peaks": False,
    }
    once |= {"result": str(scratch / "ncu.json"), "log": str(scratch / "ncu.log"), "torch_trace": None}
    (scratch / "ncu-job.json").write_text(json.dumps(once), encoding="utf-8")
    rows = record_counters(
        make_worker_command(scratch / "ncu-job.json"), scratch, document["measured_views"]["kernels"], listener
    )
    if "withheld" not in document["roofline"]:
        rows = add_peak_shares(rows, document["roofline"]["peaks"]["bytes_per_s"])
    document["roofline"]["ncu"] = rows


def get_rule_stage(name: str, kind: str) -> str:
    """The stage that rules know: export, quantize and build are recorded as one, and named apart."""
    return name if kind == "build" else kind


def _read_facts(job: ProfileJob) -> dict[str, Any]:
    wanted = ("artifact", "backend", "precision", "device", "batch_size", "options", "implementation")
    return {key: job.details[key] for key in wanted if key in job.details and job.kind != "build"}


def _name_folder(name: str) -> str:
    return name.replace(" ", "-").replace("+", "-")
