"""From evidence to a dossier with its reports, and back: what signoff, verify and run compose of the verbs and reporters."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain, count
from pathlib import Path
from typing import Any

from optpipe import __version__
from optpipe.core.disagreements import find_disagreements, list_read_errors
from optpipe.core.errors import BadInputError, MissingError, first_line
from optpipe.core.events import Listener
from optpipe.core.records import json_from_record, plain_from_record
from optpipe.core.verdict import VerdictRecord
from optpipe.measure.overview import Overview
from optpipe.measure.report_data import list_raw_files, report_from_comparison
from optpipe.report.report import Report
from optpipe.signoff.collect import SignoffRequest, collect_evidence, require_valid_request
from optpipe.signoff.consistency import COMPARISON, HTML, JUNIT, MARKDOWN, REPORTS, describe_looser_limits
from optpipe.signoff.dossier import DossierCheck, check_dossier, finish_dossier
from optpipe.signoff.dossier_overview import list_build_files, overview_from_dossier, stage_bars_from_dossier
from optpipe.signoff.judge import judge_dossier, read_request
from optpipe.signoff.report_documents import collect_report_documents
from optpipe.workspace.file_names import VERDICT
from optpipe.workspace.places import require_unused_path, require_writable_file
from optpipe.workspace.runs import read_json, write_bytes
from optpipe.workspace.seal import require_key
from optpipe.workspace.store import Store

DRAWN_WITH = ("altair", "vl-convert-python")
"""The packages whose versions decide the bytes of a figure."""


@dataclass(frozen=True, slots=True)
class SignedDossier:
    """A finished dossier."""

    folder: Path
    verdict: VerdictRecord
    report: Report


def document_from_signed(signed: SignedDossier, warnings: list[str]) -> dict[str, Any]:
    """The JSON document of `optpipe signoff`: the verdict with the dossier's place."""
    return {**plain_from_record(signed.verdict), "dossier": str(signed.folder), "warnings": warnings}


def require_possible(
    wanted: SignoffRequest, store: Store, output: Path | None, key: Path | None, junit: Path | None
) -> None:
    """Raises BadInputError where the sign-off could only fail at its end: said before anything is built or measured."""
    require_valid_request(wanted, store)
    if output is not None:
        require_unused_path(output)
    if key is not None:
        require_key(key)
    if junit is not None:
        require_writable_file(junit, "--junit")
        if output is not None and junit.resolve().is_relative_to(output.resolve()):
            raise BadInputError(f"--junit {junit}: {output} is sealed when it is written; choose a place outside it")


def sign_off(
    wanted: SignoffRequest,
    store: Store,
    output: Path | None,
    key: Path | None,
    listener: Listener,
    *,
    figures: bool = True,
) -> SignedDossier:
    """Gathers, judges, writes the reports, seals and moves the dossier to its place in one step."""
    with store.scratch("dossier") as scratch:
        with listener.step("gather evidence"):
            collect_evidence(wanted, store, scratch, drawn_with=list_drawing_versions() if figures else {})
        with listener.step("judge"):
            verdict = judge_dossier(scratch)
            write_bytes(scratch / VERDICT, json_from_record(verdict))
        if looser := describe_looser_limits(scratch, verdict.artifact.id):
            listener.warn(looser)
        with listener.step("write the report"):
            report = _report_from_dossier(scratch, verdict)
            write_reports(report, scratch, figures=figures)
        target = output or _choose_unused_path(store.workspace / "dossiers" / verdict.dossier_name)
        finish_dossier(scratch, target, key)
    return SignedDossier(target, verdict, report)


def _choose_unused_path(preferred: Path) -> Path:
    """`preferred`, or with -2, -3, ... behind it: a name ends in its second, and one build may be judged twice in it."""
    numbered = (preferred.with_name(f"{preferred.name}-{n}") for n in count(2))
    return next(path for path in chain([preferred], numbered) if not path.exists())


def list_drawing_versions() -> dict[str, str]:
    """The versions of what draws the figures. Raises MissingError where it is not installed."""
    try:
        return {name: version(name) for name in DRAWN_WITH}
    except ModuleNotFoundError as error:
        raise MissingError(
            f"the report's figures need {error.name}: pip install {' '.join(DRAWN_WITH)}; or use --no-figures"
        ) from error


def _report_from_dossier(folder: Path, verdict: VerdictRecord) -> Report:
    """The report on a dossier: a function of its raw files alone, so that `verify` renders the same."""
    found = overview_from_dossier(folder)
    return report_from_comparison(
        f"{verdict.model}: {verdict.policy.name}",
        found.comparison,
        found.measured,
        found.runs,
        folder,
        verdict=verdict,
        stages=stage_bars_from_dossier(folder),
        stage_files=list_build_files(folder),
        files=list_raw_files(found.runs, folder),
        created_utc=verdict.created_utc,
        **collect_report_documents(found.runs, folder),
    )


def write_reports(report: Report, folder: Path, *, figures: bool = True) -> list[Path]:
    """Writes the report in every form; returns the files."""
    texts = _render_reports(report, figures=figures)
    for name, text in texts.items():
        write_bytes(folder / name, text.encode())
    return [folder / name for name in texts]


def _render_reports(report: Report, *, figures: bool) -> dict[str, str]:
    """The report in every form, by file name. The same report gives the same bytes."""
    from optpipe.report.html import render_html
    from optpipe.report.junit import render_junit
    from optpipe.report.markdown import render_markdown

    texts = {HTML: render_html(report, with_figures=figures), MARKDOWN: render_markdown(report)}
    if report.verdict is not None:
        texts[JUNIT] = render_junit(report.verdict)
    return texts | {COMPARISON: json_from_record(report.comparison).decode()}


def verify_dossier(folder: Path, allowed_signers: Path | None = None) -> DossierCheck:
    """Verifies a dossier: its seal, its numbers, and that its reports are what the recomputed verdict gives."""
    checked = check_dossier(folder, allowed_signers)
    if checked.verdict is None or checked.problems:
        return checked
    try:
        problems, not_compared = _compare_reports(folder, checked.verdict)
    except list_read_errors() as error:
        problems, not_compared = [f"cannot be recomputed: {first_line(error)}"], []
    return replace(checked, problems=tuple(problems), not_compared=tuple(not_compared))


def _compare_reports(folder: Path, verdict: VerdictRecord) -> tuple[list[str], list[str]]:
    """The reports that differ from what the raw files give, and those that cannot be rendered again here."""
    request = read_request(folder)
    if request.optpipe != __version__:
        return [], [f"{', '.join(REPORTS)}: written by optpipe {request.optpipe}; this is {__version__}"]
    report = _report_from_dossier(folder, verdict)
    not_compared = _explain_no_drawing(request.drawn_with)
    texts = _render_reports(report, figures=bool(request.drawn_with) and not not_compared)
    computed, stored = json.loads(texts.pop(COMPARISON)), read_json(folder / COMPARISON)
    problems = find_disagreements(stored, computed, COMPARISON)
    for name, text in texts.items():
        if (name != HTML or not not_compared) and (folder / name).read_bytes() != text.encode():
            problems.append(f"{name}: differs from the report that the raw files give")
    return problems, not_compared


def _explain_no_drawing(drawn_with: Mapping[str, str]) -> list[str]:
    """Why `report.html` cannot be rendered again here with the same bytes; empty where it can."""
    try:
        here = list_drawing_versions() if drawn_with else {}
    except MissingError:
        return [f"{HTML}: rendering it again needs {', '.join(DRAWN_WITH)}"]
    other = [
        f"{name} {drawn_with[name]} (here: {here.get(name)})"
        for name in drawn_with
        if drawn_with[name] != here.get(name)
    ]
    return [f"{HTML}: its figures were drawn by {', '.join(other)}"] if other else []


def report_from_overview(found: Overview, folder: Path) -> Report:
    """The report on a comparison that will lie in `folder`."""
    files = list_raw_files(found.runs, folder)
    return report_from_comparison("Comparison", found.comparison, found.measured, found.runs, folder, files=files)
