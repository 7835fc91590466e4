"""Profile: what limits a stage, from a recording that exists or from one made here."""

from pathlib import Path

from optpipe.core.events import Listener
from optpipe.trace.analysis import analysis_from_trace, measured_part
from optpipe.trace.diff import Diff, diff
from optpipe.trace.files import redact, trace_from_path
from optpipe.trace.report import Profile, profile_from_trace


def profile_recording(path: Path, range_name: str | None, listener: Listener) -> Profile:
    """Judges a recording made by anyone: an .nsys-rep, its SQLite export, or an optpipe profile's folder."""
    with listener.step(f"read {path.name}"):
        trace = trace_from_path(path)
    with listener.step("views"):
        return profile_from_trace(trace, range_name)


def redact_recording(path: Path, target: Path, listener: Listener) -> None:
    """Writes a copy of a recording of nsys without the process environment: what may be passed on."""
    with listener.step(f"redact {path.name}"):
        redact(path, target)


def diff_recordings(before: Path, after: Path, range_name: str | None, listener: Listener) -> Diff:
    """Compares two recordings, kernel by kernel and layer by layer."""
    analyses = []
    for path in (before, after):
        with listener.step(f"read {path.name}"):
            analyses.append(measured_part(analysis_from_trace(trace_from_path(path)), range_name))
    return diff(*analyses)
