"""Profiles a model's stages: each runs in a separate process under nsys."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from optpipe.backends.registry import BACKENDS, resolve_effective_options
from optpipe.build.build import build_model, require_artifacts
from optpipe.build.plan import BuildPlan
from optpipe.build.records import BuiltArtifact, ModelBuild
from optpipe.core.card import ModelCard
from optpipe.core.entries import ArtifactInfo, Device, ModelInfo
from optpipe.core.errors import BadInputError, OptpipeError
from optpipe.core.events import Listener
from optpipe.core.precision import Precision
from optpipe.core.records import group_pairs, json_from_record, read_record
from optpipe.core.wording import Argument, Call
from optpipe.measure.targets import find_targets
from optpipe.models.artifacts.engine_files import hash_engine
from optpipe.models.artifacts.lookup import StoredArtifact, find_artifacts
from optpipe.models.artifacts.profile_sizes import require_lengths
from optpipe.models.export.exported import Model
from optpipe.models.inputs.image_set import ImageSet
from optpipe.models.inputs.rows import read_length
from optpipe.models.inputs.samples import SAMPLE_COUNT, choose_samples
from optpipe.models.stored_card import read_stored_card
from optpipe.preprocess.preprocess import choose_dali_plan
from optpipe.trace.against import ComparedStage, compare_stages
from optpipe.trace.analysis import Analysis, analysis_from_trace, select_measured_part
from optpipe.trace.bottleneck import describe_quality
from optpipe.trace.chrome import write_chrome_trace
from optpipe.trace.counters import Counters, count_kernels, find_ncu
from optpipe.trace.differences import ProfileDifference
from optpipe.trace.kernels import find_function_name
from optpipe.trace.nsys import BUILD_STAGES, ProfilePlan, Stage, probe_sources
from optpipe.trace.program import (
    ProgramStage,
    RecordedProgram,
    describe_end,
    has_ended_well,
    has_gpu,
    list_program_stages,
    make_program_command,
    record_user_program,
    require_program,
)
from optpipe.trace.read import KEEP_RAW_WARNING, trace_from_folder, trace_from_path, write_trace
from optpipe.trace.record import (
    BuildJob,
    InferenceJob,
    PreprocessJob,
    ProfileJob,
    WorkerResult,
    make_worker_command,
    open_scratch_folder,
    read_profiled_rows,
    record_job,
)
from optpipe.trace.report import (
    ProfileRecord,
    RecordingProfile,
    StageProfile,
    StageSubject,
    TraceProfile,
    make_stage_views,
    profile_from_trace,
)
from optpipe.trace.roofline import (
    GraphCosts,
    graph_costs_from_onnx,
    graph_costs_from_roofline,
    sum_layer_times,
)
from optpipe.trace.rules import StageFacts
from optpipe.trace.sources import SourceState
from optpipe.workspace.entry import Entry, Status
from optpipe.workspace.file_names import ONNX, PROFILE
from optpipe.workspace.files import write_bytes
from optpipe.workspace.runs import RUNS, OpenRun, finish_run, list_runs, open_run
from optpipe.workspace.store import Store

_DALI_THREADS = {"cuda": 8, "cpu": 2}


@dataclass(frozen=True, slots=True)
class ModelProfileDocument(ProfileRecord):
    main: str | None = None
    """The stage that is shown in full: the first inference, otherwise the last stage with a trace."""
    not_run: Mapping[str, str] = field(default_factory=dict)
    """The reason by artifact."""
    run_dir: Path = field(default_factory=Path)
    warnings: tuple[str, ...] = ()


def choose_preprocess_images(
    card: ModelCard, folder: Path | None, batch_size: int
) -> tuple[Path, ...]:
    """Images of `folder`, or the model's samples, at least a batch of them; none for a model without images."""
    if card.transform is None:
        return ()
    drawn = choose_samples(card, folder).drawn
    files = drawn.paths[: max(batch_size, SAMPLE_COUNT)] if isinstance(drawn, ImageSet) else ()
    return files * -(-batch_size // len(files)) if files else ()


def build_or_find(
    text: str, model: Model, plan: BuildPlan, store: Store, listener: Listener
) -> ModelBuild:
    """INT8 artifacts without calibration data come from the store if it has any. Raises the errors of building."""
    stored: tuple[StoredArtifact, ...] = ()
    if plan.calibration is None and Precision.INT8 in plan.precisions:
        with suppress(BadInputError):  # the store has none
            stored = find_artifacts(
                text, store, (Precision.INT8,), [each.name for each in plan.backends], plan.device
            )
    entries = [each.entry for each in stored]
    found = [
        BuiltArtifact(each, None, BACKENDS[each.info.backend].find_run_blocker(each.info))
        for each in entries
    ]
    precisions = tuple(each for each in plan.precisions if each is not Precision.INT8 or not stored)
    if not precisions:
        return ModelBuild(stored[0].model, None, found)
    built = build_model(model, replace(plan, precisions=precisions), store, listener)
    built.artifacts += found
    require_artifacts(built)
    return built


def can_calibrate(plan: BuildPlan, model: Entry[ModelInfo]) -> bool:
    """Whether all of `plan` can be built again: INT8 of the store may have been calibrated on data that are not given now."""
    if Precision.INT8 not in plan.precisions or model.info.own_precision is not None:
        return True
    return plan.calibration is not None or "calibration" in read_stored_card(model).data


def find_build_by_id(
    text: str,
    store: Store,
    listener: Listener,
    *,
    precision: str | None = None,
    backend: str | None = None,
    device: Device | None = None,
) -> ModelBuild:
    """The stored builds that the ID `text` means, as `bench` finds them; nothing is built.

    Raises BadInputError if there is none of that precision, backend, and device.
    """
    ((first, *others),) = find_targets(
        [text], store, listener, precision=precision, backend=backend, device=device
    )
    artifacts = [BuiltArtifact(each.entry, None, None) for each in (first, *others)]
    return ModelBuild(first.model, None, artifacts)


def plan_from_builds(plan: BuildPlan, artifacts: Sequence[BuiltArtifact]) -> BuildPlan:
    """`plan` for the precisions, backends, and device of stored builds."""
    precisions = dict.fromkeys(Precision(each.entry.info.precision) for each in artifacts)
    backends = dict.fromkeys(each.entry.info.backend for each in artifacts)
    return replace(
        plan,
        precisions=tuple(precisions),
        backends=tuple(BACKENDS[name] for name in backends),
        automatic=False,
        device=artifacts[0].entry.info.device,
    )


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
    card = read_stored_card(model)
    for each in artifacts:
        require_lengths(StoredArtifact(each.entry, card, model, None), plan.length)
    jobs = [] if build is None else list(_list_build_jobs(plan, build, images, card, model, store))
    if Stage.INFERENCE in (plan.stage or tuple(Stage)):
        able = [each.entry for each in artifacts if each.why_not is None]
        jobs += _list_inference_jobs(plan, able, options, card, store)
    if not jobs:
        blocked = "; ".join(
            f"{each.entry.info.backend}: {each.why_not}" for each in artifacts if each.why_not
        )
        raise BadInputError(f"nothing to profile: {blocked or 'the model has no such stage'}")
    stages: list[StageProfile] = []
    failed: dict[str, str] = {}
    errors: list[OptpipeError] = []
    parents = (model.id, *(each.entry.id for each in artifacts))
    granted = grant_sources(plan, store, listener, on_gpu=any(job.on_gpu for job in jobs))
    _require_counters(plan, listener, on_gpu=any(job.on_gpu for job in jobs))
    with open_run(store.workspace, "profile") as run:

        def finish(record: ProfileRecord, status: Status) -> None:
            write_bytes(run.path / PROFILE, json_from_record(record))
            finish_run(run, parents=parents, status=status)

        try:
            for job in jobs:
                try:
                    with listener.step(f"profile {job.name}"):
                        stages += list(_profile_job(job, plan, run, store, listener, granted))
                except OptpipeError as error:
                    errors.append(error)
                    failed[job.name] = error.message
                    listener.inform(f"profile {job.name}: INVALID (failed)")
        except KeyboardInterrupt:
            if stages:
                finish(ProfileRecord(tuple(stages), failed), "interrupted")
            raise
        if not stages:
            raise errors[0]
        difference = _compare_with(against, stages, run, listener)
        record = ProfileRecord(tuple(stages), failed, against=difference)
        finish(record, "complete")
        if output is not None:
            last = stages[-1]
            whole = analysis_from_trace(trace_from_folder(run.path / last.folder))
            _write_timeline(whole, last, output, listener)
    main = next(
        (each for each in stages if each.subject.kind == "inference"), stages[-1]
    ).subject.name
    not_run = {each.entry.id: each.why_not for each in artifacts if each.why_not is not None}
    return ModelProfileDocument(
        record.stages,
        record.failed,
        against=difference,
        main=main,
        not_run=not_run,
        run_dir=run.path,
    )


def _compare_with(
    against: Path | None, stages: Sequence[StageProfile], run: OpenRun, listener: Listener
) -> ProfileDifference | None:
    if against is None:
        return None
    with listener.step(f"compare with {against.name}"):
        return compare_with_run(list(_read_compared(run.path, stages)), against)


def _require_counters(plan: ProfilePlan, listener: Listener, *, on_gpu: bool) -> None:
    """Before anything runs: raises MissingError without ncu, and warns that a CPU has no counters."""
    if plan.kernels and on_gpu:
        find_ncu()
    elif plan.kernels:
        listener.warn(
            Argument("kernels", plan.kernels) + ": no GPU is used, so no kernel is counted"
        )


def _write_timeline(whole: Analysis, stage: StageProfile, output: Path, listener: Listener) -> None:
    count = write_chrome_trace(whole, output)
    listener.inform(f"wrote {output}: {count} events of {stage.subject.name}")


def grant_sources(
    plan: ProfilePlan, store: Store, listener: Listener, *, on_gpu: bool
) -> tuple[SourceState, ...]:
    """Tries each source that the plan asks for; what is refused is warned about, and the profile goes on without it."""
    if not plan.record:
        return ()
    with open_scratch_folder(store) as scratch, listener.step("try sources"):
        states = probe_sources(plan.record, scratch, on_gpu=on_gpu)
    for state in states:
        if not state.recorded:
            way = f"; what allows it: {state.remedy}" if state.remedy else ""
            listener.warn(f"{state.name} is not recorded: {state.why}{way}")
    return states


def profile_program(
    command: Sequence[str],
    plan: ProfilePlan,
    range_name: str | None,
    duration_s: float | None,
    store: Store,
    listener: Listener,
    against: Path | None = None,
    output: Path | None = None,
) -> ModelProfileDocument:
    """Records a user's program, and judges its stages.

    Raises BadInputError if there is no such program or range, MissingError without nsys, StageError if the recording is empty.
    """
    require_program(command)
    name = Path(command[0]).name
    _require_counters(plan, listener, on_gpu=has_gpu())
    granted = grant_sources(plan, store, listener, on_gpu=has_gpu())
    with open_run(store.workspace, "profile") as run, open_scratch_folder(store) as scratch:
        with listener.step(f"record {name}"):
            recorded = record_user_program(command, scratch, listener, granted, duration_s)
        folder = run.path / "program"
        write_trace(recorded.trace, folder)
        with listener.step("views"):
            whole = analysis_from_trace(trace_from_folder(folder))

            def judge(name: str | None) -> list[StageProfile]:
                return [
                    _judge_program_stage(each, whole, recorded, folder.name)
                    for each in list_program_stages(whole, name)
                ]

            missing: BadInputError | None = None
            try:
                stages = judge(range_name)
            except BadInputError as error:  # the recording may have taken hours: it is kept
                if range_name is None:
                    raise
                stages, missing = judge(None), error
        if plan.kernels and has_gpu() and stages[0].profile.measured.kernels:
            with listener.step("count kernels"):
                words = make_program_command(command)
                counters = _count_longest(stages[0].profile, words, plan, scratch, in_range=False)
            stages[0] = _judge_with_counters(stages[0], whole, counters)
        if plan.keep_raw:
            _keep_raw(scratch, folder, listener)
        difference = _compare_with(against, stages, run, listener)
        record = ProfileRecord(tuple(stages), program=recorded.run, against=difference)
        write_bytes(run.path / PROFILE, json_from_record(record))
        finish_run(run)
        if output is not None:
            _write_timeline(whole, stages[0], output, listener)
    if missing is not None:
        again = Call("profile", trace=folder, range="NAME")
        raise BadInputError(missing.message, remedy="the recording is kept: " + again) from missing
    if not has_ended_well(recorded.run, duration_s):
        listener.warn(describe_end(recorded.run))
    main = stages[0].subject.name
    return ModelProfileDocument(
        record.stages,
        program=recorded.run,
        against=difference,
        main=main,
        run_dir=run.path,
    )


def _judge_program_stage(
    stage: ProgramStage, whole: Analysis, recorded: RecordedProgram, folder: str
) -> StageProfile:
    facts = StageFacts(expects_gpu=bool(whole.trace.api.height))
    measured = select_measured_part(whole, stage.range)
    profile = profile_from_trace(whole, stage.range, facts, measured=measured)
    views = make_stage_views(whole, stage.range, recorded.sources, measured=measured)
    subject = StageSubject(stage.name, "program")
    return StageProfile(subject, folder, stage.range, facts, profile, *views)


def _list_build_jobs(
    plan: ProfilePlan,
    build: BuildJob,
    images: tuple[Path, ...],
    card: ModelCard,
    model: Entry,
    store: Store,
) -> Iterator[ProfileJob]:
    """The job of all stages of the build, and that of preprocessing."""
    wanted, on_gpu = plan.stage or tuple(Stage), build.on_gpu
    if built := tuple(stage for stage in BUILD_STAGES if stage in wanted):
        stages = tuple(
            (StageSubject(stage, "build"), StageFacts(stage, expects_gpu=False)) for stage in built
        )
        yield ProfileJob("+".join(built), on_gpu, build, stages)
    if Stage.PREPROCESS in wanted and card.transform is not None and images:
        batch_size = max(plan.batch_size)
        dali = choose_dali_plan(
            "mixed" if on_gpu else "cpu", _DALI_THREADS["cuda" if on_gpu else "cpu"], batch_size
        )
        work = PreprocessJob(store.workspace.resolve(), model.id, images, dali)
        name = f"preprocess dali batch {batch_size}"
        subject = StageSubject(name, "preprocess", batch_size=batch_size)
        yield ProfileJob(
            name, on_gpu, work, ((subject, StageFacts(Stage.PREPROCESS, expects_gpu=on_gpu)),)
        )


def _list_inference_jobs(
    plan: ProfilePlan,
    artifacts: Sequence[Entry[ArtifactInfo]],
    options_by_backend: Mapping[str, Mapping[str, Any]],
    card: ModelCard,
    store: Store,
) -> Iterator[ProfileJob]:
    for entry in artifacts:
        info, sha256, read_rows = (
            entry.info,
            hash_engine(entry),
            cache(partial(read_profiled_rows, entry, store)),
        )
        backend, precision, device = info.backend, info.precision, info.device
        known = BACKENDS[backend].runtime_options(device)
        given = options_by_backend.get(backend, {})  # the other options were for the build
        options = resolve_effective_options(
            info, {name: value for name, value in given.items() if name in known}
        )
        facts = StageFacts(Stage.INFERENCE, backend, options, expects_gpu=device == "cuda")
        graphs = [store.find(parent) for parent in entry.manifest.parents if parent]
        path = next(
            (each.file(ONNX) for each in reversed(graphs) if each.file(ONNX).is_file()), None
        )
        for wanted, batch_size in product(plan.length or (None,), plan.batch_size):
            inference = InferenceJob(
                store.workspace.resolve(), entry.id, backend, device, options, batch_size, wanted
            )
            length = wanted
            if length is None and card.length_range is not None:
                length = read_length(*read_rows())
            name = f"{backend} {precision} batch {batch_size}" + (
                f" length {length}" if length else ""
            )
            subject = StageSubject(
                name, "inference", entry.id, precision, device, batch_size, length, sha256
            )
            inputs = card.inputs if length is None else card.with_usual_length(length).inputs
            yield ProfileJob(
                name, device == "cuda", inference, ((subject, facts),), path, inputs, read_rows
            )


def _make_graph(job: ProfileJob, found: WorkerResult) -> GraphCosts | None:
    """Costs of `job.source_graph`; None without peaks or a graph."""
    subject, peaks = job.stages[0][0], found.peaks
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
        replace(graph, layer_ns=sum_layer_times(job.source_graph, found.layer_ns))
        if found.layer_ns
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
        trace, found = recorded.trace, recorded.result
        folder = run.path / job.name.replace(" ", "-").replace("+", "-")
        write_trace(trace, folder)
        # judge the files that are kept, so that they can be judged again
        whole = analysis_from_trace(trace_from_folder(folder))
        graph = _make_graph(job, found)
        for subject, given in job.stages:
            facts = replace(given, unprofiled_iteration_ns=found.unprofiled_iteration_ns)
            judged = f"optpipe.{facts.stage}" if facts.stage in BUILD_STAGES else None
            measured = select_measured_part(whole, judged)
            profile = profile_from_trace(whole, judged, facts, graph, measured=measured)
            listener.inform(f"profile {subject.name}: {describe_quality(profile.trace_quality)}")
            views = make_stage_views(whole, judged, recorded.sources, measured=measured)
            stage = StageProfile(
                subject, folder.name, judged, facts, profile, *views, energy=found.energy
            )
            if plan.kernels and job.on_gpu and subject.kind != "build":
                with listener.step(f"count kernels of {subject.name}"):
                    counters = _count_longest(profile, make_worker_command(scratch), plan, scratch)
                stage = _judge_with_counters(stage, whole, counters, graph)
            yield stage
        if plan.keep_raw:
            _keep_raw(scratch, folder, listener)


def _count_longest(
    profile: TraceProfile,
    program: Sequence[str],
    plan: ProfilePlan,
    scratch: Path,
    *,
    in_range: bool = True,
) -> Counters:
    """Counts the kernels that take longest, of which the launches of one iteration suffice."""
    longest = profile.measured.kernels[: plan.kernels]
    functions = {find_function_name(row.name) for row in longest}  # ncu tells no more apart
    alike = [row for row in profile.measured.kernels if find_function_name(row.name) in functions]
    iterations = profile.iterations.count if profile.iterations else 1
    return count_kernels(
        program,
        [row.name for row in longest],
        scratch,
        in_range=in_range,
        launches=-(-sum(row.count for row in alike) // iterations),
    )


def _judge_with_counters(
    stage: StageProfile, whole: Analysis, counters: Counters, graph: GraphCosts | None = None
) -> StageProfile:
    profile = profile_from_trace(whole, stage.range, stage.facts, graph, counters=counters)
    return replace(stage, profile=profile, counters=counters)


def _keep_raw(scratch: Path, folder: Path, listener: Listener) -> None:
    kept = folder / "raw"
    kept.mkdir(mode=0o700)
    for path in (*scratch.glob("recording*"), *scratch.glob("ncu*")):
        shutil.copy2(path, kept / path.name)
    listener.warn(f"{kept}: {KEEP_RAW_WARNING}")


def profile_recording(
    path: Path,
    range_name: str | None,
    listener: Listener,
    against: Path | None = None,
    output: Path | None = None,
) -> RecordingProfile:
    """Judges any recording: an .nsys-rep, its SQLite export, or the folder of an optpipe profile."""
    with listener.step(f"read {path.name}"):
        whole = analysis_from_trace(trace_from_path(path))
    with listener.step("views"):
        stage = _find_stage(path, range_name)
        facts, graph = _find_stage_facts(stage)
        counters, energy = (None, None) if stage is None else (stage.counters, stage.energy)
        measured = select_measured_part(whole, range_name)
        profile = profile_from_trace(
            whole, range_name, facts, graph, measured=measured, counters=counters
        )
        sources = stage.details.sources if stage is not None and stage.details else ()
        views = make_stage_views(whole, range_name, sources, measured=measured)
    if output is not None:
        write_chrome_trace(whole, output)
    difference = None
    if against is not None:
        subject = StageSubject(path.stem, "program") if stage is None else stage.subject
        side = ComparedStage(subject, measured)
        with listener.step(f"read {against.name}"):
            difference = compare_with_run([side], against, range_name)
    own = {each.name: getattr(profile, each.name) for each in fields(profile)}
    return RecordingProfile(
        **own, **views._asdict(), counters=counters, energy=energy, against=difference
    )


def compare_with_run(
    sides: Sequence[ComparedStage], against: Path, range_name: str | None = None
) -> ProfileDifference:
    """Compares each stage with that of a profile run or a recording that has the same name, or else the same kind."""
    others = read_compared_stages(against, range_name)
    pairs: list[tuple[ComparedStage, ComparedStage]] = []
    for is_same in (_has_same_name, _has_same_kind, _is_any_program):
        for side in sides:
            if any(side is pair[1] for pair in pairs):
                continue
            free = [each for each in others if not any(each is pair[0] for pair in pairs)]
            match = next((each for each in free if is_same(each.subject, side.subject)), None)
            if match is not None:
                pairs.append((match, side))
    matched = {id(each) for pair in pairs for each in pair}
    left = [
        f"{each.subject.name} ({when})"
        for when, group in (("before", others), ("after", sides))
        for each in group
        if id(each) not in matched
    ]
    return ProfileDifference(
        against.name, tuple(compare_stages(*pair) for pair in pairs), tuple(left)
    )


def _has_same_name(one: StageSubject, other: StageSubject) -> bool:
    return one.name == other.name


def _has_same_kind(one: StageSubject, other: StageSubject) -> bool:
    return one.kind == other.kind != "build"


def _is_any_program(one: StageSubject, other: StageSubject) -> bool:
    return "program" in (one.kind, other.kind)


def read_compared_stages(place: Path, range_name: str | None = None) -> list[ComparedStage]:
    """The stages of a profile run's folder, one stage's folder, or any recording.

    Raises BadInputError if there is no profile or recording at `place`.
    """
    if (place / PROFILE).is_file():
        record = read_record(place / PROFILE, ProfileRecord)
        return list(_read_compared(place, record.stages))
    stage = _find_stage(place, range_name)
    if stage is not None:
        return list(_read_compared(place.parent, [stage]))
    whole = analysis_from_trace(trace_from_path(place))
    subject = StageSubject(place.stem, "program")
    return [ComparedStage(subject, select_measured_part(whole, range_name))]


def _read_compared(run: Path, stages: Sequence[StageProfile]) -> Iterator[ComparedStage]:
    """Stages of one folder share its trace."""
    for folder, together in group_pairs((stage.folder, stage) for stage in stages).items():
        whole = analysis_from_trace(trace_from_folder(run / folder))
        for stage in together:
            measured = select_measured_part(whole, stage.range)
            yield ComparedStage(stage.subject, measured, stage.facts.unprofiled_iteration_ns)


def find_profile_run(text: str, store: Store) -> Path:
    """The folder of a profile run by its name in the workspace, or any path. Raises BadInputError if there is neither."""
    named = store.workspace / RUNS / text
    for place in (named, Path(text)):
        if place.exists():
            return place
    known = [run.path.name for run in list_runs(store.workspace, "profile")][-3:]
    hint = f"; newest profiles: {', '.join(known)}" if known else ""
    raise BadInputError(
        f"no profile run or recording with that name{hint}", argument=Argument("against", text)
    )


def _find_stage(path: Path, range_name: str | None) -> StageProfile | None:
    """The stage of a profile run whose folder is `path`; None for any other recording."""
    try:
        stages = read_record(path.parent / PROFILE, ProfileRecord).stages
    except BadInputError:
        return None  # not a run of optpipe, or of another version
    return next(
        (each for each in stages if (each.folder, each.range) == (path.name, range_name)), None
    )


def _find_stage_facts(stage: StageProfile | None) -> tuple[StageFacts, GraphCosts | None]:
    """The facts and the graph that a profile run stored with a stage."""
    if stage is None:
        return StageFacts(), None
    roofline = stage.profile.roofline
    return stage.facts, graph_costs_from_roofline(roofline) if roofline else None
