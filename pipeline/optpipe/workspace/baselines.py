"""Approved dossiers: the baselines of their models."""

import json
from pathlib import Path

from optpipe.core.errors import BadInputError
from optpipe.core.files import Files
from optpipe.core.plan import for_workspace
from optpipe.workspace.entry import get_utc_time
from optpipe.workspace.file_names import REQUEST
from optpipe.workspace.files import list_files, write_bytes, write_json
from optpipe.workspace.seal import SUMS, find_seal_problems
from optpipe.workspace.store import Store

BASELINES = "baselines"


def find_approved_baseline(workspace: Path, model: str) -> Files | None:
    """Raises BadInputError if the approved dossier is damaged; None if `model` has none."""
    folder = workspace / BASELINES / Path(model).name
    if not folder.is_dir():
        return None
    files = Files(folder, kept={})
    problems = find_seal_problems(files) if files.has(SUMS) else [f"{SUMS}: missing"]
    if problems:
        command = for_workspace("optpipe signoff approve DOSSIER")
        raise BadInputError(f"the approved baseline {folder} is damaged: {problems[0]}\nrestore it with `{command}`")
    return files


def store_baseline(files: Files, workspace: Path, because: str | None = None) -> Path:
    """Stores a verified dossier as the next baseline of its model; returns its folder.

    `because` is the reason for approving anything but a plain PASS; it is stored next to the dossier.
    """
    target = workspace / BASELINES / Path(str(json.loads(files.read(REQUEST))["model"])).name
    with Store(workspace).scratch("baseline") as scratch:
        for name in list_files(files.folder):
            write_bytes(scratch / "new" / name, files.read(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            target.rename(scratch / "old")
        (scratch / "new").rename(target)
    write_json(
        target.parent / f"{target.name}.json",
        {"approved_utc": get_utc_time(), "because": because, "dossier": files.folder.name},
    )
    return target
