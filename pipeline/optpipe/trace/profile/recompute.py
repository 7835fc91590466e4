"""A profile run's figures, computed again from the tables of its trace."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import nan

from optpipe.core.records import Recomputed, record_from_files
from optpipe.core.verdict import Blocker, Observation, Verdict
from optpipe.models.artifacts.facts import JudgedBuild
from optpipe.stats.means import MIN_VALUES, compute_ratio_of_sums_interval
from optpipe.trace.findings.records import ProfileRecord, StageProfile, TraceProfile
from optpipe.workspace.entry import Run
from optpipe.workspace.file_names import PROFILE
from optpipe.workspace.runs import newest_runs

MORE_ITERATIONS = 30
"""Suggested where the iterations of a profile do not decide."""


def suggest_profile(build: JudgedBuild) -> str:
    """The command that records inference of the build under the profiler."""
    return f"optpipe profile {build.argument} --backend {build.backend} --precision {build.precision} --stage inference"


def read_profile(run: Run) -> ProfileRecord:
    """The stages of a profile run. Raises BadInputError where they cannot be read."""
    return record_from_files(run.files, PROFILE, ProfileRecord)


def observe_tensor_cores(runs: Sequence[Run], build: JudgedBuild, confidence: float) -> Observation | None:
    """Share of the eligible kernel time that used Tensor Cores, from the newest profile of the build's file and its raw tables.

    One process is profiled: the engine fixes which kernels run, and the interval over iterations holds how long they take.
    """
    for run in newest_runs(runs, "profile"):
        if has_profiled_other_file(run, build):
            continue
        for stage in read_profile(run).stages:
            cores = stage.profile.tensor_cores
            if stage.subject.artifact == build.artifact and cores is not None and cores.eligible_ns:
                again = recompute_stage(run, stage)
                seen = _observe_share(again or stage.profile, stage.subject.name, build, confidence)
                large = Blocker(
                    "the trace tables are too large for a dossier",
                    f"profile fewer iterations: {suggest_profile(build)} --iterations 10",
                )
                return replace(seen, blockers=seen.blockers if again else (large, *seen.blockers), source=run.name)
    return None


def has_profiled_other_file(run: Run, build: JudgedBuild) -> bool:
    """Whether a profile run is of another file under the build's id. Raises BadInputError as `read_profile`."""
    return any(build.has_other_file(stage.subject.artifact, stage.subject.sha256) for stage in read_profile(run).stages)


def _observe_share(profile: TraceProfile, name: str, build: JudgedBuild, confidence: float) -> Observation:
    import numpy as np

    cores, quality, again = profile.tensor_cores, profile.trace_quality.verdict, suggest_profile(build)
    blockers = [] if quality is Verdict.PASS else [Blocker(f"trace quality: {quality}", f"profile again: {again}")]
    if cores is None or not cores.eligible_ns:
        return Observation(
            nan, blockers=(*blockers, Blocker("no eligible kernel was recorded", f"profile again: {again}"))
        )
    used, eligible = (np.array(each) for each in (cores.used_ns_by_iteration, cores.eligible_ns_by_iteration))
    about = f"{name}, {len(used)} iterations of one process"
    interval = compute_ratio_of_sums_interval(used, eligible, confidence)
    if interval is None:
        few = f"fewer than {MIN_VALUES} iterations: how far the share scatters is not known"
        blockers.append(Blocker(few, f"profile more iterations: {again} --iterations {MORE_ITERATIONS}"))
        return Observation(cores.used_ns / cores.eligible_ns, blockers=tuple(blockers), about=about)
    low, high = interval
    share = float(used.sum() / eligible.sum())
    return Observation(share, max(0.0, low), min(1.0, high), tuple(blockers), about)


def recompute_profile(run: Run) -> Iterator[Recomputed]:
    """The stages of a profile whose tables are all there, without the sentences of their findings."""
    for stage in read_profile(run).stages:
        if (again := recompute_stage(run, stage)) is not None:
            said, found = (
                replace(each, findings=tuple(replace(finding, evidence="") for finding in each.findings))
                for each in (stage.profile, again)
            )
            yield f"{PROFILE}: {stage.subject.name}", said, found


def recompute_stage(run: Run, stage: StageProfile) -> TraceProfile | None:
    """A stage of `profile.json` from the tables of its trace; None where not all of them are there."""
    from optpipe.trace.findings.report import profile_from_trace
    from optpipe.trace.layers.roofline import graph_costs_from_roofline
    from optpipe.trace.recording.files import trace_from_files

    mine = [path for path in run.manifest.files if path.startswith(f"{stage.folder}/")]
    if not mine or not all(run.files.has(path) for path in mine):
        return None
    roofline = stage.profile.roofline
    graph = graph_costs_from_roofline(roofline) if roofline else None
    return profile_from_trace(trace_from_files(run.files.below(stage.folder)), stage.range, stage.facts, graph)
