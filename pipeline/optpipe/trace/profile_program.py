"""Profiles a user's own program."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from optpipe.core.errors import BadInputError, OptpipeError, StageError
from optpipe.core.events import Listener
from optpipe.core.records import json_from_record
from optpipe.core.wording import Call
from optpipe.trace.analysis import Analysis, analysis_from_trace, select_measured_part
from optpipe.trace.chrome import write_timeline
from optpipe.trace.compared_profiles import compare_with
from optpipe.trace.counted_stage import count_longest, judge_with_counters, keep_raw
from optpipe.trace.granted_sources import grant_sources, require_counters
from optpipe.trace.nsys import ProfilePlan
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
from optpipe.trace.read import trace_from_folder, write_trace
from optpipe.trace.record import open_scratch_folder
from optpipe.trace.report import (
    ModelProfileDocument,
    ProfileRecord,
    StageProfile,
    StageSubject,
    make_stage_views,
    profile_from_trace,
)
from optpipe.trace.rules import StageFacts
from optpipe.trace.workers import name_trial_folder, read_loaders
from optpipe.workspace.entry import Status
from optpipe.workspace.file_names import PROFILE
from optpipe.workspace.files import write_bytes
from optpipe.workspace.runs import OpenRun, finish_run, open_run
from optpipe.workspace.store import Store


def profile_program(
    command: Sequence[str],
    plan: ProfilePlan,
    range_name: str | None,
    duration_s: float | None,
    store: Store,
    listener: Listener,
    against: Path | None = None,
    output: Path | None = None,
    workers: Sequence[int] = (),
) -> ModelProfileDocument:
    """Records a user's program, and judges its stages; then its loop with each of the numbers of `workers`.

    Raises BadInputError if there is no such program or range, MissingError without nsys, StageError if the recording is empty.
    """
    require_program(command)
    require_counters(plan, listener, on_gpu=has_gpu())
    granted = grant_sources(plan, store, listener, on_gpu=has_gpu())
    with open_run(store.workspace, "profile") as run, open_scratch_folder(store) as scratch:
        with listener.step(f"record {Path(command[0]).name}"):
            recorded = record_user_program(command, scratch, listener, granted, duration_s)
        folder = run.path / "program"
        write_trace(recorded.trace, folder)
        with listener.step("views"):
            whole = analysis_from_trace(trace_from_folder(folder))
            stages, missing = _judge_stages(whole, range_name, recorded, folder.name)
        if plan.kernels and has_gpu() and stages[0].profile.measured.kernels:
            stages[0] = _count_kernels(command, stages[0], whole, plan, scratch, listener)
        if plan.keep_raw:
            keep_raw(scratch, folder, listener)
        difference, failed = compare_with(against, stages, run, listener), dict[str, str]()

        def finish(status: Status) -> ProfileRecord:
            record = ProfileRecord(tuple(stages), failed, recorded.run, difference)
            write_bytes(run.path / PROFILE, json_from_record(record))
            finish_run(run, status=status)
            return record

        counts = _choose_counts(workers, whole, recorded, duration_s, listener)
        try:
            _try_all(counts, command, run, scratch, duration_s, listener, stages, failed)
        except KeyboardInterrupt:
            finish("interrupted")
            raise
        record = finish("complete")
        if output is not None:
            write_timeline(whole, stages[0], output, listener)
    if missing is not None:
        again = Call("profile", trace=folder, range="NAME")
        raise BadInputError(missing.message, remedy="the recording is kept: " + again) from missing
    if not has_ended_well(recorded.run, duration_s):
        listener.warn(describe_end(recorded.run))
    return ModelProfileDocument(
        record.stages,
        record.failed,
        program=recorded.run,
        against=difference,
        main=stages[0].subject.name,
        run_dir=run.path,
    )


def _judge_stages(
    whole: Analysis, range_name: str | None, recorded: RecordedProgram, folder: str
) -> tuple[list[StageProfile], BadInputError | None]:
    """The stages of the range, or of the whole recording with the error if it has no such range.

    The recording may have taken hours, so that it is kept in either case.
    """

    def judge(name: str | None) -> list[StageProfile]:
        return [
            _judge_program_stage(stage, whole, recorded, folder)
            for stage in list_program_stages(whole, name)
        ]

    if range_name is None:
        return judge(None), None
    try:
        return judge(range_name), None
    except BadInputError as error:
        return judge(None), error


def _choose_counts(
    workers: Sequence[int],
    whole: Analysis,
    recorded: RecordedProgram,
    duration_s: float | None,
    listener: Listener,
) -> Sequence[int]:
    """The numbers of workers to try: none if the program has no loader or did not end well."""
    if workers and not read_loaders(whole):
        listener.warn("no number of workers is tried: the program has no DataLoader of torch")
        return ()
    return workers if has_ended_well(recorded.run, duration_s) else ()


def _count_kernels(
    command: Sequence[str],
    stage: StageProfile,
    whole: Analysis,
    plan: ProfilePlan,
    scratch: Path,
    listener: Listener,
) -> StageProfile:
    """Runs the program once more under the counters of the longest kernels; the stage, judged with them."""
    with listener.step("count kernels"):
        words = make_program_command(command)
        counters = count_longest(stage.profile, words, plan, scratch, in_range=False)
    return judge_with_counters(stage, whole, counters)


def _try_all(
    counts: Sequence[int],
    command: Sequence[str],
    run: OpenRun,
    scratch: Path,
    duration_s: float | None,
    listener: Listener,
    stages: list[StageProfile],
    failed: dict[str, str],
) -> None:
    """Adds the stage of each number of workers to `stages`, or its error to `failed`."""
    for count in counts:
        try:
            stages.append(_try_workers(count, command, run, scratch, duration_s, listener))
        except OptpipeError as error:
            failed[f"{count} workers"] = error.message


def _try_workers(
    count: int,
    command: Sequence[str],
    run: OpenRun,
    scratch: Path,
    duration_s: float | None,
    listener: Listener,
) -> StageProfile:
    """Records the program with `count` workers, without more sources, so that only their number differs.

    Raises StageError if the program fails, or has no loader whose workers can be tried.
    """
    folder = run.path / name_trial_folder(count)
    with listener.step(f"record with {count} workers"):
        recorded = record_user_program(command, scratch, listener, (), duration_s, workers=count)
        write_trace(recorded.trace, folder)
        whole = analysis_from_trace(trace_from_folder(folder))
    if not has_ended_well(recorded.run, duration_s):
        raise StageError(describe_end(recorded.run))
    if count not in read_loaders(whole):
        raise StageError(
            "the program has no DataLoader of torch whose number of workers can be tried; one of an "
            "iterable data set keeps its own, since each worker would read all of the data"
        )
    stage = next(iter(list_program_stages(whole, None)))
    judged = _judge_program_stage(stage, whole, recorded, folder.name)
    return replace(judged, subject=StageSubject(f"{stage.name}, {count} workers", "program"))


def _judge_program_stage(
    stage: ProgramStage, whole: Analysis, recorded: RecordedProgram, folder: str
) -> StageProfile:
    facts = StageFacts(expects_gpu=bool(whole.trace.api.height))
    measured = select_measured_part(whole, stage.range)
    profile = profile_from_trace(whole, stage.range, facts, measured=measured)
    views = make_stage_views(whole, stage.range, recorded.sources, measured=measured)
    subject = StageSubject(stage.name, "program")
    return StageProfile(subject, folder, stage.range, facts, profile, *views)
