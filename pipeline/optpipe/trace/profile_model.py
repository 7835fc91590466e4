"""Profiles a model's stages: each runs in a separate process under nsys."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optpipe.build.records import BuiltArtifact
from optpipe.core.errors import BadInputError, OptpipeError
from optpipe.core.events import Listener
from optpipe.core.precision import Precision
from optpipe.core.records import json_from_record
from optpipe.models.artifacts.lookup import StoredArtifact
from optpipe.models.artifacts.profile_sizes import require_lengths
from optpipe.models.stored_card import read_stored_card
from optpipe.trace.analysis import analysis_from_trace, select_measured_part
from optpipe.trace.bottleneck import describe_quality
from optpipe.trace.chrome import write_timeline
from optpipe.trace.compared_profiles import compare_with
from optpipe.trace.counted_stage import count_longest, judge_with_counters, keep_raw
from optpipe.trace.granted_sources import grant_sources, require_counters
from optpipe.trace.model_jobs import list_build_jobs, list_inference_jobs
from optpipe.trace.nsys import BUILD_STAGES, ProfilePlan, Stage
from optpipe.trace.read import trace_from_folder, write_trace
from optpipe.trace.record import (
    BuildJob,
    ProfileJob,
    WorkerResult,
    make_worker_command,
    open_scratch_folder,
    record_job,
)
from optpipe.trace.report import (
    ModelProfileDocument,
    ProfileRecord,
    StageProfile,
    make_stage_views,
    profile_from_trace,
)
from optpipe.trace.roofline import GraphCosts, graph_costs_from_onnx, sum_layer_times
from optpipe.trace.sources import SourceState
from optpipe.workspace.entry import Entry, Status
from optpipe.workspace.file_names import PROFILE
from optpipe.workspace.files import write_bytes
from optpipe.workspace.runs import OpenRun, finish_run, open_run
from optpipe.workspace.store import Store


def profile_model(
    plan: ProfilePlan,
    artifacts: Sequence[BuiltArtifact],
    model: Entry,
    store: Store,
    listener: Listener,
    options: Mapping[str, Mapping[str, Any]],
    build: BuildJob | None = None,
    images: tuple[Path, ...] = (),
    against: Path | None = None,
    output: Path | None = None,
) -> ModelProfileDocument:
    """Profiles every stage in `plan`; a failed one does not stop the others.

    `options` are those of each backend, for inference. Without `build`, inference alone is profiled. Raises MissingError
    without nsys, BadInputError if no stage can be profiled or a length is outside the builds' profile, and the first
    stage's error if all failed.
    """
    jobs = _list_jobs(plan, artifacts, model, store, options, build, images)
    stages: list[StageProfile] = []
    failed: dict[str, str] = {}
    parents = (model.id, *(artifact.entry.id for artifact in artifacts))
    granted = grant_sources(plan, store, listener, on_gpu=any(job.on_gpu for job in jobs))
    require_counters(plan, listener, on_gpu=any(job.on_gpu for job in jobs))
    with open_run(store.workspace, "profile") as run:

        def finish(record: ProfileRecord, status: Status) -> None:
            write_bytes(run.path / PROFILE, json_from_record(record))
            finish_run(run, parents=parents, status=status)

        try:
            error = _profile_jobs(jobs, plan, run, store, listener, granted, stages, failed)
        except KeyboardInterrupt:
            if stages:
                finish(ProfileRecord(tuple(stages), failed), "interrupted")
            raise
        if error is not None and not stages:
            raise error
        difference = compare_with(against, stages, run, listener)
        record = ProfileRecord(tuple(stages), failed, against=difference)
        finish(record, "complete")
        if output is not None:
            last = stages[-1]
            whole = analysis_from_trace(trace_from_folder(run.path / last.folder))
            write_timeline(whole, last, output, listener)
    inference = (stage for stage in stages if stage.subject.kind == "inference")
    not_run = {
        artifact.entry.id: artifact.why_not
        for artifact in artifacts
        if artifact.why_not is not None
    }
    return ModelProfileDocument(
        record.stages,
        record.failed,
        against=difference,
        main=next(inference, stages[-1]).subject.name,
        not_run=not_run,
        run_dir=run.path,
    )


def _list_jobs(
    plan: ProfilePlan,
    artifacts: Sequence[BuiltArtifact],
    model: Entry,
    store: Store,
    options: Mapping[str, Mapping[str, Any]],
    build: BuildJob | None,
    images: tuple[Path, ...],
) -> list[ProfileJob]:
    """Raises BadInputError if there is none, or a length is outside the builds' profile."""
    card = read_stored_card(model)
    for artifact in artifacts:
        require_lengths(StoredArtifact(artifact.entry, card, model, None), plan.length)
    jobs = [] if build is None else list(list_build_jobs(plan, build, images, card, model, store))
    if Stage.INFERENCE in (plan.stage or tuple(Stage)):
        able = [artifact.entry for artifact in artifacts if artifact.why_not is None]
        jobs += list_inference_jobs(plan, able, options, card, store)
    if not jobs:
        blocked = "; ".join(
            f"{artifact.entry.info.backend}: {artifact.why_not}"
            for artifact in artifacts
            if artifact.why_not
        )
        raise BadInputError(f"nothing to profile: {blocked or 'the model has no such stage'}")
    return jobs


def _profile_jobs(
    jobs: Sequence[ProfileJob],
    plan: ProfilePlan,
    run: OpenRun,
    store: Store,
    listener: Listener,
    granted: tuple[SourceState, ...],
    stages: list[StageProfile],
    failed: dict[str, str],
) -> OptpipeError | None:
    """Adds the stages of each job to `stages`, or the job with its error to `failed`; returns the first error."""
    first = None
    for job in jobs:
        try:
            with listener.step(f"profile {job.name}"):
                stages += list(_profile_job(job, plan, run, store, listener, granted))
        except OptpipeError as error:
            first = first or error
            failed[job.name] = error.message
            listener.inform(f"profile {job.name}: INVALID (failed)")
    return first


def _make_graph(job: ProfileJob, result: WorkerResult) -> GraphCosts | None:
    """Costs of `job.source_graph`; None without peaks or a graph."""
    subject, peaks = job.stages[0][0], result.peaks
    if peaks is None or subject.batch_size is None or job.source_graph is None:
        return None
    graph = graph_costs_from_onnx(
        job.source_graph,
        job.inputs,
        subject.batch_size,
        peaks,
        precision=subject.precision or Precision.FP32,
    )
    return (
        replace(graph, layer_ns=sum_layer_times(job.source_graph, result.layer_ns))
        if result.layer_ns
        else graph
    )


def _profile_job(
    job: ProfileJob,
    plan: ProfilePlan,
    run: OpenRun,
    store: Store,
    listener: Listener,
    granted: tuple[SourceState, ...],
) -> Iterator[StageProfile]:
    """Records and judges one job; deletes the raw recording unless the plan keeps it."""
    with open_scratch_folder(store) as scratch:
        recorded = record_job(job, plan, scratch, listener, granted)
        trace, result = recorded.trace, recorded.result
        folder = run.path / job.name.replace(" ", "-").replace("+", "-")
        write_trace(trace, folder)
        # judge the files that are kept, so that they can be judged again
        whole = analysis_from_trace(trace_from_folder(folder))
        graph = _make_graph(job, result)
        for subject, given in job.stages:
            facts = replace(given, unprofiled_iteration_ns=result.unprofiled_iteration_ns)
            judged = f"optpipe.{facts.stage}" if facts.stage in BUILD_STAGES else None
            measured = select_measured_part(whole, judged)
            profile = profile_from_trace(whole, judged, facts, graph, measured=measured)
            listener.inform(f"profile {subject.name}: {describe_quality(profile.trace_quality)}")
            views = make_stage_views(whole, judged, recorded.sources, measured=measured)
            stage = StageProfile(
                subject, folder.name, judged, facts, profile, *views, energy=result.energy
            )
            if plan.kernels and job.on_gpu and subject.kind != "build":
                with listener.step(f"count kernels of {subject.name}"):
                    counters = count_longest(profile, make_worker_command(scratch), plan, scratch)
                stage = judge_with_counters(stage, whole, counters, graph)
            yield stage
        if plan.keep_raw:
            keep_raw(scratch, folder, listener)
