"""The sign-off before: what changed since then, in one line of the report."""

from collections.abc import Iterator

from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError
from optpipe.core.files import Files
from optpipe.core.quantity import format_quantity
from optpipe.core.records import record_from_files
from optpipe.core.verdict import (
    CriterionResult,
    PreviousFigure,
    PreviousSignoff,
    VerdictRecord,
)
from optpipe.report.document import Sentence
from optpipe.workspace.entry import Entry, get_utc_time
from optpipe.workspace.file_names import VERDICT
from optpipe.workspace.store import DOSSIERS, Store

MOST_SHOWN = 4
"""Figures in the line."""


def list_verdicts(store: Store) -> Iterator[tuple[str, VerdictRecord | str]]:
    """The dossiers in the workspace by name, each with its verdict as it states it, or the reason why it cannot be read."""
    for folder in sorted((store.workspace / DOSSIERS).glob("*/")):
        try:
            yield folder.name, record_from_files(Files(folder), VERDICT, VerdictRecord)
        except BadInputError as error:
            yield folder.name, error.message


def find_previous(entry: Entry[ArtifactInfo], store: Store) -> PreviousSignoff | None:
    """The newest sign-off of the same model, backend, and precision in the workspace; None if there is none."""
    wanted = entry.info.model, entry.info.backend, str(entry.info.precision)
    records = [
        record
        for _, record in list_verdicts(store)
        if isinstance(record, VerdictRecord)
        and record.created_utc <= get_utc_time()  # a clock may have been set back
        and (record.model, record.artifact.backend, record.artifact.precision) == wanted
    ]
    if not records:
        return None
    newest = max(records, key=lambda record: record.created_utc)
    figures = {
        criterion.name: PreviousFigure(criterion.observed, *criterion.ci)
        for criterion in newest.criteria
        if isinstance(criterion.observed, float) and criterion.ci is not None
    }
    return PreviousSignoff(newest.dossier_name, newest.verdict, newest.created_utc, figures)


def describe_since(previous: PreviousSignoff, record: VerdictRecord) -> Sentence:
    """`since the last sign-off  PASS on 2026-11-21: p99 latency 10.0 ms to 11.0 ms (+10.0%)`; a change is one beyond both intervals."""
    changes = [
        text
        for criterion in record.criteria
        if (before := previous.figures.get(criterion.name)) is not None
        and (text := _describe_change(criterion, before))
    ]
    rest = len(changes) - MOST_SHOWN
    shown = "; ".join(changes[:MOST_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")
    compared = sum(criterion.name in previous.figures for criterion in record.criteria)
    if not changes:
        shown = "no figure differs beyond its interval" if compared else "no figure is in both"
    text = f"{previous.verdict} on {previous.created_utc[:10]} ({previous.dossier_name}): {shown}"
    return Sentence(text, label="since the last sign-off")


def _describe_change(criterion: CriterionResult, before: PreviousFigure) -> str:
    """Empty if the intervals meet."""
    if criterion.unit is None or not isinstance(criterion.observed, float) or criterion.ci is None:
        return ""
    if criterion.ci[0] <= before.high and before.low <= criterion.ci[1]:
        return ""
    old, new = (
        format_quantity(value, criterion.unit) for value in (before.value, criterion.observed)
    )
    share = f" ({100 * (criterion.observed / before.value - 1):+.1f}%)" if before.value else ""
    return f"{criterion.name} {old} to {new}{share}"
