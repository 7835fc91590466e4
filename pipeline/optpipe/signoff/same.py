"""Finds the dossier that was made of the same evidence, so that judging it again gives the same one."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from optpipe import __version__
from optpipe.core.entries import VerificationInfo
from optpipe.core.files import hash_file, hash_value
from optpipe.models.artifacts.engine_files import hash_engine
from optpipe.signoff.collect import (
    SignoffRequest,
    find_baseline,
    find_judged_artifact,
    is_run_about,
)
from optpipe.signoff.evidence import JUDGED_RUNS
from optpipe.workspace.files import write_json
from optpipe.workspace.runs import list_runs
from optpipe.workspace.seal import SUMS
from optpipe.workspace.store import NOTES, Store


def describe_evidence(wanted: SignoffRequest, store: Store) -> Mapping[str, Any]:
    """Everything that decides a verdict, besides the time."""
    judged = find_judged_artifact(wanted, store)
    baseline, _ = find_baseline(judged, store)
    return {
        "optpipe": __version__,
        "artifact": [judged.id, hash_engine(judged)],
        "policy": wanted.policy.sha256,
        "waivers": dict(wanted.waivers),
        "settings": [wanted.since, wanted.max_cv],
        "runs": sorted(
            run.name
            for run in list_runs(store.workspace)
            if run.kind in JUDGED_RUNS and is_run_about(run, judged)
        ),
        "verifications": sorted(
            verification.id
            for verification in store.list_entries(VerificationInfo)
            if judged.id in verification.manifest.parents
        ),
        "baseline": None if baseline is None else baseline.hash(SUMS),
    }


def _place_note(wanted: SignoffRequest, store: Store) -> Path:
    return (
        store.workspace
        / NOTES
        / f"dossier-{hash_value(describe_evidence(wanted, store))[:12]}.json"
    )


def find_same_dossier(wanted: SignoffRequest, store: Store) -> Path | None:
    """The unchanged dossier of the same evidence; None if there is none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        note = json.loads(_place_note(wanted, store).read_text(encoding="utf-8"))
        folder, home = Path(note["dossier"]), store.workspace.absolute()
        if folder.is_relative_to(home):  # as the workspace is named now
            folder = store.workspace / folder.relative_to(home)
        if hash_file(folder / SUMS) == note["sums"]:
            return folder
    return None


def remember_dossier(wanted: SignoffRequest, store: Store, folder: Path) -> None:
    sums = hash_file(folder / SUMS)
    write_json(_place_note(wanted, store), {"dossier": str(folder.absolute()), "sums": sums})
