"""From evidence to a dossier with its reports, and back: what signoff, verify and run compose of stages and reporters."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optpipe.compare.overview import Overview
from optpipe.compare.report_data import raw_files, report_of
from optpipe.core.comparison import Comparison
from optpipe.core.disagreements import disagreements, unreadable
from optpipe.core.events import Listener
from optpipe.core.verdict import Verdict
from optpipe.errors import BadInputError, first_line
from optpipe.reporters.report import Report
from optpipe.signoff.collect import Wanted, collected, require_askable
from optpipe.signoff.dossier import (
    Checked,
    checked_dossier,
    finished,
    require_free,
    verdict_document,
)
from optpipe.signoff.dossier_overview import (
    build_files,
    manifests_in,
    overview_of_dossier,
    stage_bars,
)
from optpipe.signoff.judge import Signoff, judged
from optpipe.signoff.report_documents import documents
from optpipe.workspace.file_names import VERDICT
from optpipe.workspace.runs import json_file, write_json
from optpipe.workspace.seal import require_key
from optpipe.workspace.store import Store

HTML, MARKDOWN, JUNIT, COMPARISON = "report.html", "report.md", "junit.xml", "comparison.json"
LATER_ROW_KEYS = ("build", "held_against", "label", "rate_per_s", "setting", "settings", "streams")
"""What `comparison.json` says of a row since labels name the settings; older dossiers have none of it."""


@dataclass(frozen=True, slots=True)
class Signed:
    """A finished dossier."""

    folder: Path
    document: Mapping[str, Any]
    report: Report
    verdict: Verdict


def require_possible(wanted: Wanted, output: Path | None, key: Path | None, junit: Path | None) -> None:
    """Raises BadInputError where the sign-off could only fail at its end: said before anything is built or measured."""
    require_askable(wanted)
    if output is not None:
        require_free(output)
    if key is not None:
        require_key(key)
    for path in (output, junit):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if junit is not None and junit.is_dir():
        raise BadInputError(f"--junit {junit} is a folder; give a file")


def signed_off(
    wanted: Wanted, store: Store, output: Path | None, key: Path | None, listener: Listener, *, figures: bool = True
) -> Signed:
    """Gathers, judges, writes the reports, seals and moves the dossier to its place in one step."""
    with store.scratch("dossier") as scratch:
        with listener.step("gather evidence"):
            collected(wanted, store, scratch)
        with listener.step("judge"):
            signoff = judged(scratch)
            document = verdict_document(signoff)
            write_json(scratch / VERDICT, document)
        with listener.step("write the report"):
            report = _dossier_report(signoff, document)
            write_reports(report, scratch, figures=figures)
        target = output or store.workspace / "dossiers" / str(document["dossier_name"])
        finished(scratch, target, key)
    return Signed(target, document, report, signoff.verdict)


def _dossier_report(signoff: Signoff, document: Mapping[str, Any]) -> Report:
    folder, model = signoff.folder, signoff.evidence.build.model
    found = overview_of_dossier(folder)
    return report_of(
        f"{model}: {signoff.policy.name}",
        found.comparison,
        found.measured,
        found.runs,
        folder,
        verdict=document,
        stages=stage_bars(manifests_in(folder)),
        stage_files=build_files(folder),
        files=raw_files(found.runs, folder),
        created_utc=document["created_utc"],
        **documents(found.runs, folder),
    )


def write_reports(report: Report, folder: Path, *, figures: bool = True) -> list[Path]:
    """Writes the report in every form; returns the files."""
    from optpipe.reporters.html import html_report
    from optpipe.reporters.junit import junit_report
    from optpipe.reporters.markdown import markdown_report

    texts = {HTML: html_report(report, with_figures=figures), MARKDOWN: markdown_report(report)}
    if report.verdict is not None:
        texts[JUNIT] = junit_report(report.verdict)
    texts[COMPARISON] = json.dumps(report.comparison.as_json(), indent=1, allow_nan=False) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def verified(folder: Path, allowed_signers: Path | None = None) -> Checked:
    """Verifies a dossier: its seal, its numbers, and that its reports say what the recomputed verdict says."""
    from dataclasses import replace

    checked = checked_dossier(folder, allowed_signers)
    if checked.signoff is None or checked.problems:
        return checked
    try:
        problems = _untrue_forms(folder)
    except unreadable() as error:
        problems = [f"cannot be recomputed: {first_line(error)}"]
    return replace(checked, problems=tuple(problems))


def _untrue_forms(folder: Path) -> list[str]:
    """Where comparison and reports say something else than the raw files."""
    document = json_file(folder / VERDICT)
    comparison = overview_of_dossier(folder).comparison
    stored, computed = json_file(folder / COMPARISON), json.loads(json.dumps(comparison.as_json()))
    if any("label" not in row for row in stored["rows"]):
        stored, computed = _as_first_written(stored), _as_first_written(computed)
    return [
        *_untrue_reports(folder, document),
        *disagreements(stored, computed, COMPARISON),
        *_untrue_tables(folder, document, comparison),
    ]


def _as_first_written(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """`comparison` without what the first dossiers do not say of a row, and without the names that this gave to rows."""
    rows = [{name: value for name, value in row.items() if name not in LATER_ROW_KEYS} for row in comparison["rows"]]
    best = {goal: row and _unnamed(row) for goal, row in comparison["best"].items()}
    return {**comparison, "rows": rows, "best": best, "unmatched": list(map(_unnamed, comparison["unmatched"]))}


def _unnamed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "label"}


def _untrue_reports(folder: Path, document: Mapping[str, Any]) -> list[str]:
    """Where the reports say another verdict than `document`, whose figures follow from the raw files."""
    from optpipe.reporters.html import MARKS
    from optpipe.reporters.junit import junit_report

    verdict = str(document["verdict"])
    problems = []
    if _text(folder / JUNIT) != junit_report(document):
        problems.append(f"{JUNIT}: does not say what verdict.json says")
    if f"{verdict}: " not in _text(folder / MARKDOWN).split("\n", 1)[0]:
        problems.append(f"{MARKDOWN}: does not say {verdict}")
    page = _text(folder / HTML)
    if f"<title>{verdict}: " not in page or f"{MARKS[verdict]}</span> {verdict}</p>" not in page:
        problems.append(f"{HTML}: does not say {verdict}")
    return problems


def _untrue_tables(folder: Path, document: Mapping[str, Any], comparison: Comparison) -> list[str]:
    """Where the tables of the reports lack a row that says what `document` and `comparison` say."""
    from optpipe.reporters.html import rows_of_page
    from optpipe.reporters.markdown import figure_text
    from optpipe.reporters.records import observed_text

    wanted = [(one["name"], one["verdict"], observed_text(one), str(one["limit"])) for one in document["criteria"]]
    wanted += [
        (row.configuration, row.scenario, figure_text(row.latency_ms.get("p50"), "{:.3g}"),
         figure_text(row.throughput_images_per_s, "{:,.0f}"))
        for row in comparison.rows
    ]  # fmt: skip
    lines = [line.replace("\\|", "|").replace("&lt;", "<") for line in _text(folder / MARKDOWN).splitlines()]
    said = {HTML: rows_of_page(_text(folder / HTML)), MARKDOWN: [line for line in lines if line.startswith("|")]}
    return [
        f"{name}: no row says {', '.join(texts)}"
        for name, rows in said.items()
        for texts in wanted
        if not any(all(text in row for text in texts) for row in rows)
    ]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def comparison_report(found: Overview, title: str, folder: Path) -> Report:
    """The report on a comparison that will lie in `folder`."""
    files = raw_files(found.runs, folder)
    return report_of(title, found.comparison, found.measured, found.runs, folder, files=files)
