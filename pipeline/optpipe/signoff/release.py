"""From evidence to a finished dossier with its reports."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from optpipe.core.errors import BadInputError
from optpipe.core.events import Listener
from optpipe.core.files import Files
from optpipe.core.records import json_from_record, plain_from_record
from optpipe.core.verdict import VerdictRecord
from optpipe.signoff.collect import SignoffRequest, collect_evidence, require_valid_request
from optpipe.signoff.dossier import finish_dossier, read_dossier
from optpipe.signoff.judge import judge_dossier
from optpipe.signoff.reports import list_drawing_versions, render_dossier, write_reports
from optpipe.signoff.verify import describe_looser_rules
from optpipe.workspace.file_names import VERDICT
from optpipe.workspace.files import write_bytes
from optpipe.workspace.places import require_unused_path, require_writable_file
from optpipe.workspace.seal import require_key
from optpipe.workspace.store import Store


@dataclass(frozen=True, slots=True)
class SignedDossier:
    """A finished dossier."""

    folder: Path
    verdict: VerdictRecord
    reports: Mapping[str, str]
    """The text of each report, by file name."""


def document_from_signed(signed: SignedDossier, warnings: list[str]) -> Mapping[str, object]:
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
            dossier = read_dossier(Files(scratch, kept={}))
            verdict = judge_dossier(dossier).record
            write_bytes(scratch / VERDICT, json_from_record(verdict))
        if looser := describe_looser_rules(dossier):
            listener.warn(looser)
        with listener.step("write the report"):
            reports = render_dossier(dossier, verdict, figures=figures)
            write_reports(reports, scratch)
        target = output or _choose_unused_path(store.workspace / "dossiers" / verdict.dossier_name)
        finish_dossier(scratch, target, key)
    return SignedDossier(target, verdict, reports)


def _choose_unused_path(preferred: Path) -> Path:
    """`preferred`, or with -2, -3, ... behind it: a name ends in its second, and one build may be judged twice in it."""
    numbered = (preferred.with_name(f"{preferred.name}-{n}") for n in count(2))
    return next(path for path in chain([preferred], numbered) if not path.exists())
