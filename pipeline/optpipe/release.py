"""From evidence to a dossier with its reports, and back: what signoff, verify and run compose of stages and reporters."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optpipe.core.events import Listener
from optpipe.core.report import Report
from optpipe.core.runs import load_run, write_json
from optpipe.core.sealed import sign
from optpipe.core.store import Store
from optpipe.core.verdict import Verdict
from optpipe.stages.dossier import Checked, Wanted, checked_dossier, collected, finished, verdict_document
from optpipe.stages.judge import VERDICT, Signoff, json_file, judged
from optpipe.stages.overview import Overview, overview, stage_bars
from optpipe.stages.report_data import raw_files, report_of
from optpipe.stages.task_evidence import documents

HTML, MARKDOWN, JUNIT, COMPARISON = "report.html", "report.md", "junit.xml", "comparison.json"


@dataclass(frozen=True, slots=True)
class Signed:
    """A finished dossier."""

    folder: Path
    document: Mapping[str, Any]
    report: Report
    verdict: Verdict


def signed_off(
    wanted: Wanted, store: Store, output: Path | None, key: Path | None, listener: Listener, *, figures: bool = True
) -> Signed:
    """Gathers, judges, writes the reports, seals and moves the dossier to its place in one step."""
    (store.workspace / "tmp").mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="dossier-", dir=store.workspace / "tmp"))
    try:
        with listener.step("gather evidence"):
            collected(wanted, store, scratch)
        with listener.step("judge"):
            signoff = judged(scratch)
            document = verdict_document(signoff)
            write_json(scratch / VERDICT, document)
        with listener.step("write the report"):
            report = _dossier_report(signoff, document, store)
            write_reports(report, scratch, figures=figures)
        target = output or store.workspace / "dossiers" / str(document["dossier_name"])
        finished(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if key is not None:
        sign(target, key)
    return Signed(target, document, report, signoff.verdict)


def _dossier_report(signoff: Signoff, document: Mapping[str, Any], store: Store) -> Report:
    folder, model = signoff.folder, signoff.evidence.build.model
    runs = [load_run(path) for path in sorted((folder / "runs").glob("*/"))]
    found = _compared(signoff, store)
    title = f"{model}: {signoff.policy.name}"
    return report_of(
        title,
        found.comparison,
        signoff.evidence.measured,
        runs,
        folder,
        verdict=document,
        stages=stage_bars(store, model),
        files=raw_files(runs, folder),
        created_utc=document["created_utc"],
        **documents(runs, folder),
    )


def _compared(signoff: Signoff, store: Store) -> Overview:
    """The comparison of all builds of the model; of nothing where nothing was measured."""
    from optpipe.core.comparison import Comparison, Goal
    from optpipe.errors import BadInputError

    try:
        return overview(store, model=signoff.evidence.build.model)
    except BadInputError as error:
        reason = str(error).splitlines()[0]
        nothing = Comparison((), dict.fromkeys(Goal), dict.fromkeys(Goal, reason), environment=signoff.environment)
        return Overview(nothing, (), ())


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
    return replace(checked, problems=tuple(_untrue_reports(folder, json_file(folder / VERDICT))))


def _untrue_reports(folder: Path, document: Mapping[str, Any]) -> list[str]:
    """Where the reports say something else than `document`, whose figures follow from the raw files."""
    from optpipe.reporters.html import MARKS
    from optpipe.reporters.junit import junit_report

    def text(name: str) -> str:
        path = folder / name
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    verdict = str(document["verdict"])
    problems = []
    if text(JUNIT) != junit_report(document):
        problems.append(f"{JUNIT}: does not say what verdict.json says")
    if f"{verdict}: " not in text(MARKDOWN).split("\n", 1)[0]:
        problems.append(f"{MARKDOWN}: does not say {verdict}")
    if f"<title>{verdict}: " not in text(HTML) or f"{MARKS[verdict]}</span> {verdict}</p>" not in text(HTML):
        problems.append(f"{HTML}: does not say {verdict}")
    return problems


def comparison_report(found: Overview, title: str, folder: Path) -> Report:
    """The report on a comparison that will lie in `folder`."""
    files = raw_files(found.runs, folder)
    return report_of(title, found.comparison, found.measured, found.runs, folder, files=files)
