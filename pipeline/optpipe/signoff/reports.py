"""The reports in a dossier and on a comparison, computed only from raw files, so that `verify` renders the same bytes."""

import base64
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from optpipe.core.comparison import Comparison, Goal
from optpipe.core.entries import ArtifactInfo, Environment
from optpipe.core.measurement import read_measurements
from optpipe.core.records import json_from_record, record_from_files
from optpipe.core.verdict import VerdictRecord
from optpipe.measure.compare import compare_measurements
from optpipe.measure.document import draw_measurements, list_raw_files
from optpipe.measure.figures import measurements_from_run
from optpipe.measure.groups import find_environment_differences
from optpipe.measure.overview import Overview, collect_build_facts
from optpipe.models.artifacts.facts import judged_build_from_entry
from optpipe.preprocess.records import PreprocessRecord
from optpipe.report.charts import Bar
from optpipe.report.document import Figure, Page, RawFile
from optpipe.signoff.document import page_from_comparison, page_from_verdict, render_junit
from optpipe.signoff.dossier import Dossier
from optpipe.trace.document import draw_profile
from optpipe.trace.records import TraceProfile
from optpipe.trace.report import read_profile
from optpipe.workspace.entry import MANIFEST, Entry, Run
from optpipe.workspace.file_names import BUILDS, PREPROCESSING, PROFILE, ROWS
from optpipe.workspace.files import write_bytes
from optpipe.workspace.runs import newest_runs

REPORTS = HTML, MARKDOWN, JUNIT, COMPARISON = "report.html", "report.md", "junit.xml", "comparison.json"
DRAWN_WITH = ("altair", "vl-convert-python")
"""Packages whose versions decide the bytes of a figure."""
MAX_IMAGES = 6


def render_dossier(dossier: Dossier, verdict: VerdictRecord, *, figures: bool) -> dict[str, str]:
    found = overview_from_dossier(dossier)
    page = make_dossier_page(dossier, verdict, found, figures=figures)
    return _render_reports(page, found.comparison, verdict)


def make_dossier_page(dossier: Dossier, verdict: VerdictRecord, found: Overview, *, figures: bool) -> Page:
    folder = dossier.folder
    profile, profile_files = _find_profile(found.runs, folder)
    drawn: list[Figure] = []
    if figures:
        names = [f"{BUILDS}/{entry.path.name}/{MANIFEST}" for entry in dossier.builds]
        stage_files = tuple(RawFile(name, dossier.files.hash(name), len(dossier.files.read(name))) for name in names)
        stages = tuple(_list_stage_bars(dossier))
        drawn = draw_measurements(found.comparison, found.measured, found.runs, folder, stages, stage_files)
        drawn += [] if profile is None else list(draw_profile(profile, profile_files))
    pictures, files = list(_list_pictures(found.runs, folder)), list_raw_files(found.runs, folder)
    return page_from_verdict(verdict, found.comparison, drawn, pictures, profile, files)


def write_comparison(found: Overview, folder: Path) -> list[Path]:
    figures = draw_measurements(found.comparison, found.measured, found.runs, folder)
    page = page_from_comparison(found.comparison, figures, list_raw_files(found.runs, folder))
    return write_reports(_render_reports(page, found.comparison, None), folder)


def write_reports(texts: Mapping[str, str], folder: Path) -> list[Path]:
    for name, text in texts.items():
        write_bytes(folder / name, text.encode())
    return [folder / name for name in texts]


def _render_reports(page: Page, comparison: Comparison, verdict: VerdictRecord | None) -> dict[str, str]:
    from optpipe.report.html import render_html
    from optpipe.report.markdown import render_page

    texts = {HTML: render_html(page), MARKDOWN: render_page(page)}
    if verdict is not None:
        texts[JUNIT] = render_junit(verdict)
    return texts | {COMPARISON: json_from_record(comparison).decode()}


def list_drawing_versions() -> dict[str, str]:
    return {name: version(name) for name in DRAWN_WITH}


def explain_no_drawing(drawn_with: Mapping[str, str]) -> list[str]:
    """The reason why `report.html` cannot be rendered here with the same bytes; empty if it can."""
    here = list_drawing_versions()
    other = [
        f"{name} {drawn_with[name]} (here: {here.get(name)})"
        for name in drawn_with
        if drawn_with[name] != here.get(name)
    ]
    return [f"{HTML}: its figures were drawn by {', '.join(other)}"] if other else []


def overview_from_dossier(dossier: Dossier) -> Overview:
    """Compares the builds in a dossier on the machine that measured the judged build last."""
    request, every = dossier.request, dossier.every_run
    bench = [run for run in dossier.runs if run.kind == "bench"]
    measured = tuple(one for run in bench for one in measurements_from_run(run, whole=False))
    stated = sum(len(read_measurements(run.files)) for run in bench)
    mine = [one for one in measured if one.measurement.subject.artifact == request.artifact]
    place = (
        max(mine or measured, key=lambda one: one.measurement.started_utc).environment if measured else Environment()
    )
    near = tuple(one for one in measured if not find_environment_differences(place, one.environment))
    others = _find_namesakes(dossier)
    here = tuple(one for one in near if one.measurement.subject.artifact not in others)
    if not here:
        reason = f"no measurements of {request.model}; first run optpipe bench {request.model}"
        nothing = Comparison((), dict.fromkeys(Goal), dict.fromkeys(Goal, reason), environment=place)
        return Overview(nothing, (), every)
    comparison = compare_measurements(
        here, known=collect_build_facts(dossier.artifacts, dossier.runs, dossier.manifests)
    )
    notes = (
        (stated - len(measured), "not in this dossier: raw samples too large or missing"),
        (len(measured) - len(near), "excluded: from another machine"),
        (len(near) - len(here), "excluded: of another build or model that is called the same"),
        (
            sum(len(read_measurements(run.files)) for run in dossier.earlier_runs if run.kind == "bench"),
            "excluded: earlier than --since or the policy",
        ),
    )
    said = tuple(f"{count} measurement{'s are' if count > 1 else ' is'} {why}" for count, why in notes if count)
    return Overview(replace(comparison, warnings=(*comparison.warnings, *said)), here, every)


def _find_namesakes(dossier: Dossier) -> set[str]:
    """Builds that a table would show as the judged one, or as builds of its model, although they are not."""
    judged, exported = dossier.request.artifact, dossier.manifests
    labels = {each.id: each.info.label for each in dossier.artifacts}
    models = {each.id: judged_build_from_entry(each, exported).model_sha256 for each in dossier.artifacts}
    return {
        each
        for each in labels
        if each != judged and (labels[each] == labels.get(judged) or models[each] != models.get(judged))
    }


def _list_stage_bars(dossier: Dossier) -> Iterator[Bar]:
    """The seconds of each stage of each build."""
    counts = Counter(_describe_build(each) for each in dossier.artifacts)
    for build in dossier.artifacts:
        label = _describe_build(build) + (f" {build.id[:8]}" if counts[_describe_build(build)] > 1 else "")
        ancestry = [dossier.manifests[each] for each in build.manifest.parents if each in dossier.manifests]
        yield from (Bar(label, each.kind, each.seconds) for each in (*ancestry, build.manifest))


def _describe_build(build: Entry[ArtifactInfo]) -> str:
    return f"{build.info.backend} {build.info.precision}"


def _find_profile(runs: Sequence[Run], root: Path) -> tuple[TraceProfile | None, tuple[RawFile, ...]]:
    """The newest profile of an inference, otherwise of another stage, with its files relative to `root`."""
    for run in newest_runs(runs, "profile"):
        stages = read_profile(run).stages
        if stages:
            shown = next((stage for stage in stages[::-1] if stage.subject.kind == "inference"), stages[-1])
            tables = [path for path in run.manifest.files if path.startswith(f"{shown.folder}/tables/")]
            files = (file for name in (PROFILE, *tables) for file in list_raw_files((run,), root, name))
            return shown.profile, tuple(files)
    return None, ()


def _list_pictures(runs: Sequence[Run], root: Path) -> Iterator[Figure]:
    """The images of the newest parity proof that differ most."""
    for run in newest_runs(runs, "preprocess")[:1]:
        worst = record_from_files(run.files, PREPROCESSING, PreprocessRecord).parity.worst
        for each in worst[:MAX_IMAGES]:
            if run.files.has(each.file):
                data = base64.b64encode(run.files.read(each.file)).decode()
                caption = f"The model's own, DALI's, and their difference (×{each.difference_times:.3g})"
                files = (*list_raw_files((run,), root, each.file), *list_raw_files((run,), root, ROWS))
                yield Figure(Path(each.image).name, caption, f"data:image/png;base64,{data}", files)
