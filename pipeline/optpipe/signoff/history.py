"""The whole history of a model: its runs, its sign-offs, and the changes of its figures."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from optpipe.core.events import Listener
from optpipe.core.history import History, HistoryRun
from optpipe.core.records import json_from_record
from optpipe.core.verdict import VerdictRecord
from optpipe.measure.history import choose_finding, list_history_runs, make_series
from optpipe.measure.history_document import frame_from_history, page_from_history
from optpipe.measure.past_runs import Past, read_past, read_time
from optpipe.report.html import render_html
from optpipe.report.markdown import render_page
from optpipe.signoff.previous import list_verdicts
from optpipe.signoff.reports import HTML, MARKDOWN, summarize_verdict, write_reports
from optpipe.stats.changes import RISK
from optpipe.workspace.files import write_parquet
from optpipe.workspace.store import Store


def collect_history(
    text: str,
    stores: Sequence[Store],
    listener: Listener,
    *,
    across: bool = False,
    since: str | None = None,
    length: int | None = None,
) -> History:
    """The history of the model `text` in the workspaces of `stores`, each counted once.

    Raises BadInputError if a folder is no workspace, or if nothing of the model was measured.
    """
    once = {store.workspace.resolve(): store for store in stores}
    with listener.step("read runs") as step:
        past = read_past(text, [*once.values()], since=since, length=length, advance=step.advance)
    with listener.step("look for changes"):
        series, notes = make_series(past, across=across)
    signoffs = [
        signoff for store in once.values() for signoff in _list_signoffs(store, past, since)
    ]
    finding, needed = choose_finding(series)
    runs = [*list_history_runs(past), *signoffs]
    return History(
        model=text,
        names=past.names,
        workspaces=tuple(str(store.workspace) for store in once.values()),
        runs=tuple(sorted(runs, key=_order)),
        series=tuple(series),
        finding=finding,
        risk=RISK,
        runs_needed=needed,
        since=since,
        left_out=past.left_out,
        warnings=(*past.warnings, *notes),
    )


def _order(run: HistoryRun) -> tuple[datetime, str]:
    """By time; a sign-off states its second, and comes after what was measured in it."""
    time = read_time(run.started_utc)
    return (time.replace(microsecond=999_999) if run.verdict else time), run.name


def _list_signoffs(store: Store, past: Past, since: str | None) -> Iterator[HistoryRun]:
    """The verdicts as their dossiers state them; `verify` recomputes one."""
    for name, record in list_verdicts(store):
        if isinstance(record, str):
            past.left_out[name] = record
            continue
        meant = record.model in past.names and record.artifact.id not in past.others
        if meant and (since is None or record.created_utc >= since):
            yield _describe_signoff(record, name, store.workspace)


def _describe_signoff(record: VerdictRecord, name: str, workspace: Path) -> HistoryRun:
    build = f"{record.artifact.backend} {record.artifact.precision}"
    return HistoryRun(
        name,
        "signoff",
        str(workspace),
        record.created_utc,
        record.model,
        (build,),
        f"{record.policy.name}: {summarize_verdict(record)}",
        record.verdict,
    )


def write_history(history: History, folder: Path) -> History:
    """Writes the reports in `folder`; returns the history with their paths."""
    frame, page = frame_from_history(history.series), page_from_history(history)
    texts = {
        HTML: render_html(page),
        MARKDOWN: render_page(page),
        "history.json": json_from_record(history).decode(),
        "history.csv": frame.write_csv(),
    }
    written = write_reports(texts, folder)
    write_parquet(folder / "history.parquet", frame)
    return replace(history, written=tuple(map(str, [*written, folder / "history.parquet"])))
