"""Profile: what limits a stage, from a recording that exists or from one made here."""

import json
from pathlib import Path
from typing import Any

from optpipe.core.events import Listener
from optpipe.profile.recompute import read_stage_facts
from optpipe.trace.findings.diff import DiffSide, ProfileDiff, diff_profiles
from optpipe.trace.findings.report import Profile, profile_from_trace
from optpipe.trace.layers.layers import select_layered_part
from optpipe.trace.recording.files import redact, trace_from_path
from optpipe.trace.timeline.analysis import analysis_from_trace, select_measured_part
from optpipe.workspace.file_names import PROFILE


def profile_recording(path: Path, range_name: str | None, listener: Listener) -> Profile:
    """Judges a recording made by anyone: an .nsys-rep, its SQLite export, or an optpipe profile's folder."""
    with listener.step(f"read {path.name}"):
        trace = trace_from_path(path, listener.warn)
    with listener.step("views"):
        return profile_from_trace(trace, range_name, **_find_stage_facts(path, range_name))


def _find_stage_facts(path: Path, range_name: str | None) -> dict[str, Any]:
    """What a profile's run knows of the stage whose folder is `path`, beside the trace: its graph, its times outside nsys."""
    try:
        stages = json.loads((path.parent / PROFILE).read_text(encoding="utf-8"))["stages"]
        mine = (each for each in stages if each.get("recording", {}).get("folder") == path.name)
        stage = next((each for each in mine if each["recording"]["range"] == range_name), None)
        return {} if stage is None else read_stage_facts(stage)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # no run of optpipe's, or of a time when less was written


def redact_recording(path: Path, target: Path, listener: Listener) -> None:
    """Writes a copy of a recording of nsys without the process environment: what may be passed on."""
    with listener.step(f"redact {path.name}"):
        redact(path, target)


def diff_recordings(before: Path, after: Path, range_name: str | None, listener: Listener) -> ProfileDiff:
    """Compares two recordings, kernel by kernel and layer by layer."""
    sides = []
    for path in (before, after):
        with listener.step(f"read {path.name}"):
            whole = analysis_from_trace(trace_from_path(path, listener.warn))
            measured, known = select_measured_part(whole, range_name), _find_stage_facts(path, range_name)
            graph = known.get("graph")
            unprofiled_ns = known.get("unprofiled_iteration_ns")
            sides.append(
                DiffSide(measured, select_layered_part(whole, measured), graph.layer_ns if graph else {}, unprofiled_ns)
            )
    return diff_profiles(*sides)
