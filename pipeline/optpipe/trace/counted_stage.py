"""The counters of a stage: measured for its longest kernels, and judged with them."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from optpipe.core.events import Listener
from optpipe.trace.analysis import Analysis
from optpipe.trace.counters import Counters, count_kernels
from optpipe.trace.kernels import find_function_name
from optpipe.trace.nsys import ProfilePlan
from optpipe.trace.read import KEEP_RAW_WARNING
from optpipe.trace.report import StageProfile, TraceProfile, profile_from_trace
from optpipe.trace.roofline import GraphCosts


def count_longest(
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


def judge_with_counters(
    stage: StageProfile, whole: Analysis, counters: Counters, graph: GraphCosts | None = None
) -> StageProfile:
    profile = profile_from_trace(whole, stage.range, stage.facts, graph, counters=counters)
    return replace(stage, profile=profile, counters=counters)


def keep_raw(scratch: Path, folder: Path, listener: Listener) -> None:
    kept = folder / "raw"
    kept.mkdir(mode=0o700)
    for path in (*scratch.glob("recording*"), *scratch.glob("ncu*")):
        shutil.copy2(path, kept / path.name)
    listener.warn(f"{kept}: {KEEP_RAW_WARNING}")
