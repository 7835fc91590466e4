"""Profile: what limits a stage, from a recording that exists."""

from pathlib import Path

from optpipe.core.errors import BadInputError
from optpipe.core.events import Listener
from optpipe.core.records import read_record
from optpipe.trace.findings.context import StageFacts
from optpipe.trace.findings.diff import DiffSide, ProfileDiff, diff_profiles
from optpipe.trace.findings.records import ProfileRecord, TraceProfile
from optpipe.trace.findings.report import profile_from_trace
from optpipe.trace.layers.layers import select_layered_part
from optpipe.trace.layers.roofline import GraphCosts, graph_costs_from_roofline
from optpipe.trace.recording.files import redact, trace_from_path
from optpipe.trace.timeline.analysis import analysis_from_trace, select_measured_part
from optpipe.workspace.file_names import PROFILE


def profile_recording(path: Path, range_name: str | None, listener: Listener) -> TraceProfile:
    """Judges a recording made by anyone: an .nsys-rep, its SQLite export, or an optpipe profile's folder."""
    with listener.step(f"read {path.name}"):
        trace = trace_from_path(path)
    with listener.step("views"):
        return profile_from_trace(trace, range_name, *_find_stage_facts(path, range_name))


def _find_stage_facts(path: Path, range_name: str | None) -> tuple[StageFacts, GraphCosts | None]:
    """What a profile's run knows of the stage whose folder is `path`, beside the trace; nothing of any other recording."""
    try:
        stages = read_record(path.parent / PROFILE, ProfileRecord).stages
    except BadInputError:
        return StageFacts(), None  # no run of optpipe's, or of another version
    stage = next((each for each in stages if (each.folder, each.range) == (path.name, range_name)), None)
    if stage is None:
        return StageFacts(), None
    roofline = stage.profile.roofline
    return stage.facts, graph_costs_from_roofline(roofline) if roofline else None


def redact_recording(path: Path, target: Path, listener: Listener) -> None:
    """Writes a copy of a recording of nsys without the process environment: what may be passed on."""
    with listener.step(f"redact {path.name}"):
        redact(path, target)


def diff_recordings(before: Path, after: Path, range_name: str | None, listener: Listener) -> ProfileDiff:
    """Compares two recordings, kernel by kernel and layer by layer."""
    sides = []
    for path in (before, after):
        with listener.step(f"read {path.name}"):
            whole = analysis_from_trace(trace_from_path(path))
            measured, (facts, graph) = select_measured_part(whole, range_name), _find_stage_facts(path, range_name)
            layered, layer_ns = select_layered_part(whole, measured), graph.layer_ns if graph else {}
            sides.append(DiffSide(measured, layered, layer_ns, facts.unprofiled_iteration_ns))
    return diff_profiles(*sides)
