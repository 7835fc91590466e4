"""Makes a finished dossier with its reports from what was measured."""

from itertools import chain, count
from pathlib import Path

from optpipe.backends.registry import BACKENDS, find_missing_release
from optpipe.core.errors import OptpipeError
from optpipe.core.events import Listener
from optpipe.core.files import Files
from optpipe.core.records import json_from_record
from optpipe.core.verdict import VerdictRecord
from optpipe.core.wording import Call
from optpipe.models.artifacts.changed_source import explain_changed_source
from optpipe.signoff.collect import SignoffRequest, collect_evidence, require_valid_request
from optpipe.signoff.dossier import finish_dossier, read_dossier
from optpipe.signoff.judge import judge_dossier
from optpipe.signoff.loosened import describe_loosened
from optpipe.signoff.reports import list_drawing_versions, render_dossier, write_reports
from optpipe.workspace.file_names import VERDICT
from optpipe.workspace.files import write_bytes
from optpipe.workspace.places import require_unused_path
from optpipe.workspace.seal import require_key, require_sizes
from optpipe.workspace.store import DOSSIERS, Store
from optpipe.workspace.timestamp import require_authority, stamp_folder


def require_possible(
    wanted: SignoffRequest,
    store: Store,
    output: Path | None,
    key: Path | None,
    authority: str | None = None,
) -> None:
    """Raises BadInputError, before anything is built or measured, if the sign-off could not be written."""
    require_valid_request(wanted, store)
    if output is not None:
        require_unused_path(output)
    if key is not None:
        require_key(key)
    if authority is not None:
        require_authority(authority)


def sign_off(
    wanted: SignoffRequest,
    store: Store,
    output: Path | None,
    key: Path | None,
    listener: Listener,
    *,
    figures: bool = True,
    authority: str | None = None,
) -> tuple[VerdictRecord, Path]:
    """Gathers the evidence, judges it, writes the reports, and seals the dossier; returns the verdict and its folder.

    An RFC 3161 `authority` (URL) that gives no token is a warning: the verdict and its dossier stay.
    """
    with store.scratch("dossier") as scratch:
        with listener.step("gather evidence"):
            collect_evidence(
                wanted, store, scratch, drawn_with=list_drawing_versions() if figures else {}
            )
        with listener.step("judge"):
            files = Files(scratch, kept={})
            require_sizes(files)
            dossier = read_dossier(files)
            if (changed := explain_changed_source(dossier.artifact, store)) is not None:
                listener.warn(changed)
            verdict, evidence = judge_dossier(dossier)
            write_bytes(scratch / VERDICT, json_from_record(verdict))
        if looser := describe_loosened(verdict.loosened):
            listener.warn(looser)
        package = BACKENDS[dossier.artifact.info.backend].package
        for version in {
            process.environment.get_fact(f"packages.{package}") for process in evidence.measured
        }:
            if missing := find_missing_release(dossier.artifact.info, version):
                listener.inform(missing)
        with listener.step("write the report"):
            write_reports(render_dossier(dossier, verdict, evidence, figures=figures), scratch)
        usual = (
            store.workspace / DOSSIERS / verdict.dossier_name
        )  # one build may be judged twice within a second
        numbered = chain([usual], (usual.with_name(f"{usual.name}-{n}") for n in count(2)))
        target = output or next(path for path in numbered if not path.exists())
        finish_dossier(scratch, target, key)
    if authority is not None:
        try:
            with listener.step("ask for a timestamp"):
                stamp_folder(target, authority)
        except OptpipeError as error:
            again = Call("signoff stamp", target, timestamp=authority)
            listener.warn(
                "the dossier has no timestamp: " + error.message + "\nlater: `" + again + "`"
            )
    return verdict, target
