"""From evidence to a dossier with its reports, and back: what signoff, verify and run compose of stages and reporters."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optpipe.compare.overview import Overview
from optpipe.compare.report_data import list_raw_files, report_from_comparison
from optpipe.core.comparison import Comparison
from optpipe.core.disagreements import find_disagreements, list_read_errors
from optpipe.core.events import Listener
from optpipe.core.verdict import Verdict
from optpipe.errors import BadInputError, first_line
from optpipe.reporters.report import Report
from optpipe.signoff.collect import SignoffRequest, collect_evidence, require_valid_request
from optpipe.signoff.dossier import (
    DossierCheck,
    check_dossier,
    document_from_signoff,
    finish_dossier,
    require_unused_path,
)
from optpipe.signoff.dossier_overview import (
    list_build_files,
    overview_from_dossier,
    read_manifests,
    stage_bars_from_manifests,
)
from optpipe.signoff.judge import Signoff, judge_dossier
from optpipe.signoff.report_documents import collect_report_documents
from optpipe.workspace.file_names import VERDICT
from optpipe.workspace.runs import read_json, write_json
from optpipe.workspace.seal import require_key
from optpipe.workspace.store import Store

HTML, MARKDOWN, JUNIT, COMPARISON = "report.html", "report.md", "junit.xml", "comparison.json"
LATER_ROW_KEYS = ("build", "held_against", "label", "rate_per_s", "setting", "settings", "streams")
"""What `comparison.json` says of a row since labels name the settings; older dossiers have none of it."""


@dataclass(frozen=True, slots=True)
class SignedDossier:
    """A finished dossier."""

    folder: Path
    document: Mapping[str, Any]
    report: Report
    verdict: Verdict


def require_possible(wanted: SignoffRequest, output: Path | None, key: Path | None, junit: Path | None) -> None:
    """Raises BadInputError where the sign-off could only fail at its end: said before anything is built or measured."""
    require_valid_request(wanted)
    if output is not None:
        require_unused_path(output)
    if key is not None:
        require_key(key)
    for path in (output, junit):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if junit is not None and junit.is_dir():
        raise BadInputError(f"--junit {junit} is a folder; specify a file")


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
            collect_evidence(wanted, store, scratch)
        with listener.step("judge"):
            signoff = judge_dossier(scratch)
            document = document_from_signoff(signoff)
            write_json(scratch / VERDICT, document)
        with listener.step("write the report"):
            report = _report_from_signoff(signoff, document)
            write_reports(report, scratch, figures=figures)
        target = output or store.workspace / "dossiers" / str(document["dossier_name"])
        finish_dossier(scratch, target, key)
    return SignedDossier(target, document, report, signoff.verdict)


def _report_from_signoff(signoff: Signoff, document: Mapping[str, Any]) -> Report:
    folder, model = signoff.folder, signoff.evidence.build.model
    found = overview_from_dossier(folder)
    return report_from_comparison(
        f"{model}: {signoff.policy.name}",
        found.comparison,
        found.measured,
        found.runs,
        folder,
        verdict=document,
        stages=stage_bars_from_manifests(read_manifests(folder)),
        stage_files=list_build_files(folder),
        files=list_raw_files(found.runs, folder),
        created_utc=document["created_utc"],
        **collect_report_documents(found.runs, folder),
    )


def write_reports(report: Report, folder: Path, *, figures: bool = True) -> list[Path]:
    """Writes the report in every form; returns the files."""
    from optpipe.reporters.html import render_html
    from optpipe.reporters.junit import render_junit
    from optpipe.reporters.markdown import render_markdown

    texts = {HTML: render_html(report, with_figures=figures), MARKDOWN: render_markdown(report)}
    if report.verdict is not None:
        texts[JUNIT] = render_junit(report.verdict)
    texts[COMPARISON] = json.dumps(report.comparison.as_json(), indent=1, allow_nan=False) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def verify_dossier(folder: Path, allowed_signers: Path | None = None) -> DossierCheck:
    """Verifies a dossier: its seal, its numbers, and that its reports say what the recomputed verdict says."""
    from dataclasses import replace

    checked = check_dossier(folder, allowed_signers)
    if checked.signoff is None or checked.problems:
        return checked
    try:
        problems = _find_untrue_forms(folder)
    except list_read_errors() as error:
        problems = [f"cannot be recomputed: {first_line(error)}"]
    return replace(checked, problems=tuple(problems))


def _find_untrue_forms(folder: Path) -> list[str]:
    """Where comparison and reports say something else than the raw files."""
    document = read_json(folder / VERDICT)
    comparison = overview_from_dossier(folder).comparison
    stored, computed = read_json(folder / COMPARISON), json.loads(json.dumps(comparison.as_json()))
    if any("label" not in row for row in stored["rows"]):
        stored, computed = _convert_to_first_form(stored), _convert_to_first_form(computed)
    return [
        *_find_untrue_reports(folder, document),
        *find_disagreements(stored, computed, COMPARISON),
        *_find_untrue_tables(folder, document, comparison),
    ]


def _convert_to_first_form(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """`comparison` without what the first dossiers do not say of a row, and without the names that this gave to rows."""
    rows = [{name: value for name, value in row.items() if name not in LATER_ROW_KEYS} for row in comparison["rows"]]
    best = {goal: row and _drop_label(row) for goal, row in comparison["best"].items()}
    return {**comparison, "rows": rows, "best": best, "unmatched": list(map(_drop_label, comparison["unmatched"]))}


def _drop_label(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "label"}


def _find_untrue_reports(folder: Path, document: Mapping[str, Any]) -> list[str]:
    """Where the reports say another verdict than `document`, whose figures follow from the raw files."""
    from optpipe.reporters.html import MARKS
    from optpipe.reporters.junit import render_junit

    verdict = str(document["verdict"])
    problems = []
    if _read_text(folder / JUNIT) != render_junit(document):
        problems.append(f"{JUNIT}: does not match verdict.json")
    if f"{verdict}: " not in _read_text(folder / MARKDOWN).split("\n", 1)[0]:
        problems.append(f"{MARKDOWN}: does not show {verdict}")
    page = _read_text(folder / HTML)
    if f"<title>{verdict}: " not in page or f"{MARKS[verdict]}</span> {verdict}</p>" not in page:
        problems.append(f"{HTML}: does not show {verdict}")
    return problems


def _find_untrue_tables(folder: Path, document: Mapping[str, Any], comparison: Comparison) -> list[str]:
    """Where the tables of the reports lack a row that says what `document` and `comparison` say."""
    from optpipe.reporters.html import rows_from_page
    from optpipe.reporters.markdown import format_figure
    from optpipe.reporters.records import format_observed

    wanted = [(one["name"], one["verdict"], format_observed(one), str(one["limit"])) for one in document["criteria"]]
    wanted += [
        (row.configuration, row.scenario, format_figure(row.latency_ms.get("p50"), "{:.3g}"),
         format_figure(row.throughput_images_per_s, "{:,.0f}"))
        for row in comparison.rows
    ]  # fmt: skip
    lines = [line.replace("\\|", "|").replace("&lt;", "<") for line in _read_text(folder / MARKDOWN).splitlines()]
    said = {HTML: rows_from_page(_read_text(folder / HTML)), MARKDOWN: [line for line in lines if line.startswith("|")]}
    return [
        f"{name}: no row shows {', '.join(texts)}"
        for name, rows in said.items()
        for texts in wanted
        if not any(all(text in row for text in texts) for row in rows)
    ]


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def report_from_overview(found: Overview, title: str, folder: Path) -> Report:
    """The report on a comparison that will lie in `folder`."""
    files = list_raw_files(found.runs, folder)
    return report_from_comparison(title, found.comparison, found.measured, found.runs, folder, files=files)
