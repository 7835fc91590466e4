"""A profile compared with another, stage by stage."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from optpipe.core.errors import BadInputError
from optpipe.core.events import Listener
from optpipe.core.records import group_pairs, read_record
from optpipe.core.wording import Argument
from optpipe.trace.against import ComparedStage, compare_stages
from optpipe.trace.analysis import analysis_from_trace, select_measured_part
from optpipe.trace.differences import ProfileDifference
from optpipe.trace.read import trace_from_folder, trace_from_path
from optpipe.trace.report import ProfileRecord, StageProfile, StageSubject
from optpipe.trace.roofline import GraphCosts, graph_costs_from_roofline
from optpipe.trace.rules import StageFacts
from optpipe.workspace.file_names import PROFILE
from optpipe.workspace.runs import RUNS, OpenRun, list_runs
from optpipe.workspace.store import Store


def compare_with(
    against: Path | None, stages: Sequence[StageProfile], run: OpenRun, listener: Listener
) -> ProfileDifference | None:
    if against is None:
        return None
    with listener.step(f"compare with {against.name}"):
        return compare_with_run(list(_read_compared(run.path, stages)), against)


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
            free = [stage for stage in others if not any(stage is pair[0] for pair in pairs)]
            match = next((stage for stage in free if is_same(stage.subject, side.subject)), None)
            if match is not None:
                pairs.append((match, side))
    matched = {id(stage) for pair in pairs for stage in pair}
    left = [
        f"{stage.subject.name} ({when})"
        for when, group in (("before", others), ("after", sides))
        for stage in group
        if id(stage) not in matched
    ]
    return ProfileDifference(
        against.name, tuple(compare_stages(*pair) for pair in pairs), tuple(left)
    )


def _has_same_name(earlier: StageSubject, later: StageSubject) -> bool:
    return earlier.name == later.name


def _has_same_kind(earlier: StageSubject, later: StageSubject) -> bool:
    return earlier.kind == later.kind != "build"


def _is_any_program(earlier: StageSubject, later: StageSubject) -> bool:
    return "program" in (earlier.kind, later.kind)


def read_compared_stages(place: Path, range_name: str | None = None) -> list[ComparedStage]:
    """The stages of a profile run's folder, one stage's folder, or any recording.

    Raises BadInputError if there is no profile or recording at `place`.
    """
    if (place / PROFILE).is_file():
        record = read_record(place / PROFILE, ProfileRecord)
        return list(_read_compared(place, record.stages))
    stage = find_stage(place, range_name)
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


def find_stage(path: Path, range_name: str | None) -> StageProfile | None:
    """The stage of a profile run whose folder is `path`; None for any other recording."""
    try:
        stages = read_record(path.parent / PROFILE, ProfileRecord).stages
    except BadInputError:
        return None  # not a run of optpipe, or of another version
    return next(
        (stage for stage in stages if (stage.folder, stage.range) == (path.name, range_name)), None
    )


def find_stage_facts(stage: StageProfile | None) -> tuple[StageFacts, GraphCosts | None]:
    """The facts and the graph that a profile run stored with a stage."""
    if stage is None:
        return StageFacts(), None
    roofline = stage.profile.roofline
    return stage.facts, graph_costs_from_roofline(roofline) if roofline else None
