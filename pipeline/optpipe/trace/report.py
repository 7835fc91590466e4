"""Judges a trace: quality, tables, limiting factor, and findings.

The records are those of `profile.json` and `--json`. If a part is None, `trace_quality.withheld` gives the reason; the roofline is
None without the model's graph.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import nan
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import polars as pl

from optpipe.core.errors import BadInputError
from optpipe.core.metrics.sections import TENSOR_CORES
from optpipe.core.parquet import measure_parquet
from optpipe.core.records import Recomputed, record_from_files, record_from_plain
from optpipe.core.verdict import Blocker, Observation, Verdict
from optpipe.core.wording import Call
from optpipe.models.artifacts.judged_build import JudgedBuild
from optpipe.stats.means import MIN_VALUES, compute_part_interval
from optpipe.trace.analysis import (
    WHOLE,
    Analysis,
    IdleCause,
    analysis_from_trace,
    select_measured_part,
)
from optpipe.trace.bottleneck import (
    ABSOLUTE_TIMES,
    UNPROFILED,
    Bottleneck,
    Gap,
    LimitingFactor,
    Quality,
    check_quality,
    find_bottleneck,
    find_gaps,
)
from optpipe.trace.counters import Counters
from optpipe.trace.details import StageDetails, details_from_trace
from optpipe.trace.differences import ProfileDifference
from optpipe.trace.kernels import KernelKind
from optpipe.trace.loops import Loop, describe_loop
from optpipe.trace.modules import ModuleTree, make_module_tree
from optpipe.trace.nsys import ITERATION_RANGE, MEASURED_RANGE
from optpipe.trace.read import TABLES, Gpu, Trace, trace_from_files
from optpipe.trace.roofline import GraphCosts, Roofline, compute_roofline, graph_costs_from_roofline
from optpipe.trace.rules import ProfileFinding, RuleContext, StageFacts, apply_rules
from optpipe.trace.sources import SourceState
from optpipe.trace.tensor_cores import TensorCores, analyze_tensor_cores
from optpipe.workspace.energy import EnergyUse
from optpipe.workspace.entry import Run
from optpipe.workspace.file_names import PROFILE
from optpipe.workspace.runs import newest_runs

Row = TypeVar("Row")
_RANGES_SHOWN = 100
_NO_FACTS = StageFacts()


@dataclass(frozen=True, slots=True)
class CallRow:
    name: str
    count: int
    total_ns: int
    share: float
    in_classic_list: bool
    """True for the rows that together take the first 90% of the time."""


@dataclass(frozen=True, slots=True)
class KernelRow(CallRow):
    kind: KernelKind
    tensor_core: bool | None
    """None if the name does not tell."""
    mean_ns: float


@dataclass(frozen=True, slots=True)
class CopyRow:
    """All copies, or memsets, of one kind between the same kinds of memory; None if the trace does not say."""

    kind: str | None
    source_memory: str | None
    target_memory: str | None
    count: int
    total_ns: int
    bytes: int
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class RangeRow:
    """All NVTX ranges of one name, and the GPU operations that they launched."""

    name: str
    count: int
    wall_ns: int
    gpu_ns: int | None
    kernel_ns: int | None
    kernels: int | None
    projected_ns: int | None
    """From the start of each range's first operation to the end of its last."""
    busy_ns: int
    """The time in this window in which kernels run."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over a trace or a part of it; None if the trace cannot support them."""

    kernels: int
    streams: int
    kernel_ns: int | None
    api_ns: int | None
    memcpy_ns: int | None
    memset_ns: int | None
    copy_beside_compute_ns: int | None
    span_ns: int
    busy_ns: int | None
    idle_ns: int | None
    idle_by_cause: Mapping[IdleCause, int]
    """Adds up to `idle_ns`; empty if that is None."""


@dataclass(frozen=True, slots=True)
class TraceViews:
    totals: Totals
    kernels: tuple[KernelRow, ...]
    api: tuple[CallRow, ...]
    copies: tuple[CopyRow, ...]
    ranges: tuple[RangeRow, ...]


@dataclass(frozen=True, slots=True)
class Iterations:
    """Host times are None if the profiler slowed the host too much."""

    range: str
    count: int
    first_wall_ns: int | None
    median_other_wall_ns: float | None
    period_ns: float | None
    """From the start of one iteration to the start of the next."""
    unprofiled_ns: float | None
    median_gpu_ns: float
    kernels: float


@dataclass(frozen=True, slots=True)
class TraceProfile:
    source: str
    tracer: str
    gpus: tuple[Gpu, ...]
    trace_quality: Quality
    scope: str
    measured: TraceViews
    iterations: Iterations | None
    gaps: tuple[Gap, ...]
    tensor_cores: TensorCores | None
    roofline: Roofline | None
    bottleneck: Bottleneck
    findings: tuple[ProfileFinding, ...]
    """Sorted by gain, largest first."""


@dataclass(frozen=True, slots=True)
class StageSubject:
    """The profiled stage; None for fields that do not apply."""

    name: str
    kind: Literal["build", "preprocess", "inference", "program"]
    artifact: str | None = None
    precision: str | None = None
    device: str | None = None
    batch_size: int | None = None
    length: int | None = None
    """Tokens of every sequence, padding included."""
    sha256: str | None = None
    """`hash_engine` of the artifact."""


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """A recorded program; `exit_status` is that of its first process, above 128 for a signal."""

    command: tuple[str, ...]
    exit_status: int
    wall_s: float
    output_tail: str = ""
    """The end of what it printed, if it failed."""
    energy: EnergyUse | None = None


@dataclass(frozen=True, slots=True)
class StageProfile:
    """One profiled stage with all inputs of its judgment, so that it can be judged again."""

    subject: StageSubject
    folder: str
    range: str | None
    """The judged range; None for the measured range."""
    facts: StageFacts
    profile: TraceProfile
    details: StageDetails | None = None
    """None in records of versions that did not have it."""
    modules: ModuleTree | None = None
    loop: Loop | None = None
    counters: Counters | None = None
    """None unless ncu was asked."""
    energy: EnergyUse | None = None
    """Of iterations without a recording."""


@dataclass(frozen=True, slots=True)
class ProfileRecord:
    stages: tuple[StageProfile, ...]
    failed: Mapping[str, str] = field(default_factory=dict)
    """The error by stage."""
    program: ProgramRun | None = None
    """The user's program, if one was recorded."""
    against: ProfileDifference | None = None
    """The comparison with another profile, if one was asked for."""


@dataclass(frozen=True, slots=True)
class RecordingProfile(TraceProfile):
    """The profile of an existing recording."""

    details: StageDetails | None = None
    modules: ModuleTree | None = None
    loop: Loop | None = None
    counters: Counters | None = None
    energy: EnergyUse | None = None
    against: ProfileDifference | None = None


class StageViews(NamedTuple):
    """What a stage shows beside its profile; None if the recording does not have it."""

    details: StageDetails
    modules: ModuleTree | None
    loop: Loop | None


def make_stage_views(
    whole: Analysis,
    range_name: str | None,
    sources: tuple[SourceState, ...] = (),
    *,
    measured: Analysis,
) -> StageViews:
    """`measured` is the part of `whole` inside `range_name`."""
    details = details_from_trace(whole, range_name, sources)
    return StageViews(details, make_module_tree(measured), describe_loop(measured))


def rows_from_table(table: pl.DataFrame, kind: type[Row]) -> tuple[Row, ...]:
    """Raises BadInputError if a value has another type, as in a damaged trace."""
    names = [column.name for column in fields(kind)]  # type: ignore[arg-type]
    return record_from_plain(table.select(names).to_dicts(), tuple[kind, ...], "the trace")  # type: ignore[valid-type]


def profile_from_trace(
    trace: Trace | Analysis,
    range_name: str | None = None,
    facts: StageFacts = _NO_FACTS,
    graph: GraphCosts | None = None,
    *,
    measured: Analysis | None = None,
    counters: Counters | None = None,
) -> TraceProfile:
    """Judges the part of `trace` inside `range_name`, or inside optpipe's measured range, or all of it.

    With the model's `graph` its layers are compared with the roofline. Several ranges of one trace share one `Analysis`;
    `measured` is that of the part, if it is already known. `counters` of most kernel time decide what limits the kernels. Raises
    BadInputError if the trace has no range called `range_name`.
    """
    whole = trace if isinstance(trace, Analysis) else analysis_from_trace(trace)
    measured = select_measured_part(whole, range_name) if measured is None else measured
    gpus = whole.trace.gpus
    quality = check_quality(measured, facts.unprofiled_iteration_ns, expects_gpu=facts.expects_gpu)
    cores, layer_ns = None, {}
    if TENSOR_CORES.name not in quality.withheld:
        cores = analyze_tensor_cores(measured, graph)
        if cores.basis == "layers":
            layer_ns = {layer.name: layer.time_ns / cores.iterations for layer in cores.layers}
    roofline = compute_roofline(graph, facts.unprofiled_iteration_ns, layer_ns) if graph else None
    undisturbed_ns, scale, timeline = None, 1.0, measured.timeline
    if quality.distorts_host and UNPROFILED not in quality.withheld and measured.iterations.height:
        undisturbed_ns = facts.unprofiled_iteration_ns
    waiting_ns = timeline.span_ns - timeline.busy.total_ns - timeline.copy_only_ns
    if undisturbed_ns is not None and waiting_ns:
        # Kernels and copies take as long without the profiler: iterations are shorter without it because the GPU waits less.
        left_ns = (
            undisturbed_ns * measured.iterations.height
            - timeline.busy.total_ns
            - timeline.copy_only_ns
        )
        scale = min(1.0, max(0.0, left_ns / waiting_ns))
    bottleneck = find_bottleneck(measured, roofline, scale, counters)
    with_gaps = "idle_by_cause" not in quality.withheld
    if not with_gaps and (measured.trace.kernels.height or measured.trace.api.height):
        bottleneck = Bottleneck(LimitingFactor.WITHHELD, 0.0, {}, quality.withheld["idle_by_cause"])
    context = RuleContext(measured, facts, cores, roofline, undisturbed_ns, scale)
    return TraceProfile(
        source=whole.trace.source,
        tracer=whole.trace.tracer,
        gpus=gpus,
        trace_quality=quality,
        scope=measured.scope,
        measured=_make_views(measured, quality, every_range=range_name == WHOLE),
        iterations=_describe_iterations(measured, quality, facts),
        gaps=find_gaps(measured) if with_gaps and not quality.distorts_host else (),
        tensor_cores=cores,
        roofline=roofline,
        bottleneck=bottleneck,
        findings=() if "totals" in quality.withheld else apply_rules(context, with_gaps=with_gaps),
    )


def _make_views(analysis: Analysis, quality: Quality, *, every_range: bool) -> TraceViews:
    """Makes the tables without those that `quality` withholds."""
    ranges = analysis.ranges if every_range else analysis.ranges.head(_RANGES_SHOWN)
    kernels = analysis.kernels.clear() if "kernels" in quality.withheld else analysis.kernels
    return TraceViews(
        totals=_sum_totals(analysis, quality),
        kernels=rows_from_table(kernels, KernelRow),
        api=rows_from_table(analysis.api, CallRow),
        copies=rows_from_table(analysis.copies, CopyRow),
        ranges=rows_from_table(ranges, RangeRow),
    )


def _sum_totals(analysis: Analysis, quality: Quality) -> Totals:
    known = "totals" not in quality.withheld
    # without a kernel, an idle GPU looks like one that was not traced
    is_split = analysis.trace.kernels.height > 0 and "idle_by_cause" not in quality.withheld
    is_memset, timeline = pl.col("kind") == "Memset", analysis.timeline
    return Totals(
        kernels=analysis.trace.kernels.height,
        streams=analysis.trace.kernels.select("device", "stream").n_unique(),
        kernel_ns=analysis.kernel_ns if known else None,
        api_ns=int(analysis.api["total_ns"].sum()) if known else None,
        memcpy_ns=int(analysis.copies.filter(~is_memset)["total_ns"].sum()) if known else None,
        memset_ns=int(analysis.copies.filter(is_memset)["total_ns"].sum()) if known else None,
        copy_beside_compute_ns=analysis.overlapped_copy_ns if known else None,
        span_ns=timeline.span_ns,
        busy_ns=timeline.busy.total_ns if is_split else None,
        idle_ns=timeline.span_ns - timeline.busy.total_ns if is_split else None,
        idle_by_cause=timeline.idle_by_cause if is_split else {},
    )


def _describe_iterations(
    measured: Analysis, quality: Quality, facts: StageFacts
) -> Iterations | None:
    rows, withheld = measured.iterations, quality.withheld
    if rows.is_empty() or "iterations" in withheld:
        return None
    walls, known = rows["wall_ns"].to_numpy(), ABSOLUTE_TIMES not in withheld
    return Iterations(
        range=str(rows["family"][0]),
        count=rows.height,
        first_wall_ns=int(walls[0]) if known else None,
        median_other_wall_ns=float(np.median(walls[1:])) if known else None,
        period_ns=measured.iteration_ns if known else None,
        unprofiled_ns=None if UNPROFILED in withheld else facts.unprofiled_iteration_ns,
        median_gpu_ns=float(np.median(rows["gpu_ns"].to_numpy())),
        kernels=float(np.median(rows["kernels"].to_numpy())),
    )


MORE_ITERATIONS = 30
"""Suggested if the iterations of a profile do not decide."""
FEWER_ITERATIONS = 10
"""Suggested if the tables of a profile are too large for a dossier."""


def suggest_profile(build: JudgedBuild, iterations: int | None = None) -> str:
    """Empty for a module in memory, which cannot be profiled."""
    which = {"backend": build.backend, "precision": build.precision}
    command = Call("profile", build.argument, **which, stage="inference", iterations=iterations)
    return build.choose_way(command)


def read_profile(run: Run) -> ProfileRecord:
    """Raises BadInputError if the record cannot be read."""
    try:
        return record_from_files(run.files, PROFILE, ProfileRecord)
    except BadInputError as error:
        way = "another version of optpipe may have written it: profile again, and remove the run from its workspace: "
        raise BadInputError(error.message, remedy=way + Call("store rm", run.name)) from error


def observe_tensor_cores(
    runs: Sequence[Run], build: JudgedBuild, confidence: float
) -> Observation | None:
    """Share of the eligible kernel time on Tensor Cores, recomputed from the newest profile of the build's file.

    One process is profiled: the engine fixes the kernels, and the interval over iterations covers their durations.
    """
    command = suggest_profile(build)
    for run in newest_runs(runs, "profile"):
        if has_profiled_other_file(run, build):
            continue
        for stage in read_profile(run).stages:
            cores, blockers = stage.profile.tensor_cores, list[Blocker]()
            if (
                stage.subject.artifact != build.artifact
                or cores is None
                or not any(cores.eligible_ns_by_iteration)
            ):
                continue
            again = recompute_stage(run, stage)
            if again is None:
                few = "profile fewer iterations: " + suggest_profile(build, FEWER_ITERATIONS)
                blockers.append(Blocker("the trace tables are too large for a dossier", few))
            profile = (again or stage).profile
            if profile.trace_quality.verdict is not Verdict.PASS:
                why = f"trace quality: {profile.trace_quality.verdict}"
                blockers.append(Blocker(why, "profile again: " + command))
            cores = profile.tensor_cores
            named = profile.iterations is None or profile.iterations.range == ITERATION_RANGE
            if (
                cores is None
                or not any(cores.eligible_ns_by_iteration)
                or not named
                or profile.scope != MEASURED_RANGE
            ):
                blockers.append(
                    Blocker("no eligible kernel was recorded", "profile again: " + command)
                )
                return Observation(nan, blockers=tuple(blockers), source=run.name)
            used, eligible = cores.used_ns_by_iteration, cores.eligible_ns_by_iteration
            about = f"{stage.subject.name}, {len(used)} iterations of one process"
            share = sum(used) / sum(eligible)
            interval = compute_part_interval(used, eligible, confidence)
            if interval is None:
                why = f"fewer than {MIN_VALUES} iterations: how far the share scatters is not known"
                blockers.append(
                    Blocker(
                        why, "profile more iterations: " + suggest_profile(build, MORE_ITERATIONS)
                    )
                )
                return Observation(share, blockers=tuple(blockers), about=about, source=run.name)
            return Observation(share, *interval, tuple(blockers), about, run.name)
    return None


def has_profiled_other_file(run: Run, build: JudgedBuild) -> bool:
    """True if a profile run used another file under the build's id. Raises BadInputError as `read_profile`."""
    return any(
        build.has_other_file(stage.subject.artifact, stage.subject.sha256)
        for stage in read_profile(run).stages
    )


def recompute_profile(run: Run) -> Iterator[Recomputed]:
    """Recomputes stages with all their tables; the sentences of findings are not compared."""
    for stage in read_profile(run).stages:
        if (again := recompute_stage(run, stage)) is not None:
            said, recomputed = (
                replace(profiled, profile=_without_sentences(profiled.profile))
                for profiled in (stage, again)
            )
            yield f"{PROFILE}: {stage.subject.name}", said, recomputed


def _without_sentences(profile: TraceProfile) -> TraceProfile:
    return replace(
        profile, findings=tuple(replace(finding, evidence="") for finding in profile.findings)
    )


def recompute_stage(run: Run, stage: StageProfile) -> StageProfile | None:
    """A stage of `profile.json`, judged again from its trace with all that it shows beside; None if tables are missing.

    Its subject, its facts, and its counters are statements, and so is which sources were asked for.
    """
    trace, roofline = _read_stage(run, stage), stage.profile.roofline
    if trace is None:
        return None
    whole = analysis_from_trace(trace)
    measured = select_measured_part(whole, stage.range)
    graph = graph_costs_from_roofline(roofline) if roofline else None
    profile = profile_from_trace(
        whole, stage.range, stage.facts, graph, measured=measured, counters=stage.counters
    )
    again = replace(stage, profile=profile)
    if (stage.details, stage.modules, stage.loop) == (None, None, None):
        return again
    sources = () if stage.details is None else stage.details.sources
    views = make_stage_views(whole, stage.range, sources, measured=measured)
    return replace(again, **views._asdict())


def analyze_stage(run: Run, stage: StageProfile) -> Analysis | None:
    """The measured part of a stage's trace; None if tables are missing, or if the profiler lost events."""
    trace = _read_stage(run, stage)
    if trace is None or "idle_by_cause" in stage.profile.trace_quality.withheld:
        return None
    return select_measured_part(analysis_from_trace(trace), stage.range)


def _read_stage(run: Run, stage: StageProfile) -> Trace | None:
    return trace_from_files(run.files.below(stage.folder)) if has_tables(run, stage) else None


MAX_TRACE_ROWS = 2**20
"""The limit of the rows of all traces of a dossier: section 1.1 of docs/dossier-format.md."""


def count_trace_rows(run: Run) -> int:
    """The rows of all tables of a run's traces that are there, by their headers."""
    return sum(count_rows(run, name) for name in run.manifest.files if run.files.has(name))


def count_rows(run: Run, name: str) -> int:
    """Of a table of a trace; 0 of another file."""
    if f"/{TABLES}/" not in name or not name.endswith(".parquet"):
        return 0
    return measure_parquet(run.files.read(name), run.path / name).rows


def has_tables(run: Run, stage: StageProfile) -> bool:
    """Whether all files of the stage's trace are there; a dossier leaves large ones out."""
    mine = [path for path in run.manifest.files if path.startswith(f"{stage.folder}/")]
    return bool(mine) and all(run.files.has(path) for path in mine)


@dataclass(frozen=True, slots=True)
class ModelProfileDocument(ProfileRecord):
    main: str | None = None
    """The stage that is shown in full: the first inference, otherwise the last stage with a trace."""
    not_run: Mapping[str, str] = field(default_factory=dict)
    """The reason by artifact."""
    run_dir: Path = field(default_factory=Path)
    warnings: tuple[str, ...] = ()
