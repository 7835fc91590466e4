"""Analyzes an existing recording."""

from dataclasses import fields
from pathlib import Path

from optpipe.core.events import Listener
from optpipe.trace.against import ComparedStage
from optpipe.trace.analysis import analysis_from_trace, select_measured_part
from optpipe.trace.chrome import write_chrome_trace
from optpipe.trace.compared_profiles import compare_with_run, find_stage, find_stage_facts
from optpipe.trace.read import trace_from_path
from optpipe.trace.report import (
    RecordingProfile,
    StageSubject,
    make_stage_views,
    profile_from_trace,
)


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
        stage = find_stage(path, range_name)
        facts, graph = find_stage_facts(stage)
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
    own = {field.name: getattr(profile, field.name) for field in fields(profile)}
    return RecordingProfile(
        **own, **views._asdict(), counters=counters, energy=energy, against=difference
    )
