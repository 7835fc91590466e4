"""Refusals of a deployment that are known before its dossier is verified, which takes a minute.

What is read here is not verified and proves nothing: it can only end the command early, with the error that the same words would
give after the verification.
"""

from pathlib import Path

from optpipe.backends.registry import BACKENDS
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError, OptpipeError
from optpipe.core.files import Files
from optpipe.core.records import read_versioned, record_from_files
from optpipe.core.verdict import VerdictRecord
from optpipe.core.wording import Argument, for_workspace
from optpipe.deploy.records import Form
from optpipe.signoff.dossier import DossierRequest
from optpipe.signoff.verify import require_pass
from optpipe.workspace.entry import MANIFEST, Entry, entry_from_files
from optpipe.workspace.file_names import BUILDS, REQUEST, VERDICT
from optpipe.workspace.store import Store


def refuse_early(folder: Path, store: Store, because: str | None, target: Form) -> None:
    """Raises what the deployment of a dossier would end with: no PASS, no artifact in the workspace, no loader for a folder."""
    files = Files(folder)
    if not (files.has(REQUEST) and files.has(VERDICT)):
        return  # the verification says what is missing
    try:
        verdict = record_from_files(files, VERDICT, VerdictRecord)
        artifact = read_versioned(files, REQUEST, DossierRequest).artifact
    except OptpipeError:
        return  # the verification says which byte has changed
    require_pass(folder, verdict, because, "deploy it")
    name = f"{ArtifactInfo.KIND}-{artifact}"
    below = files.below(f"{BUILDS}/{name}")
    if not below.has(MANIFEST):
        return
    entry: Entry[ArtifactInfo] = entry_from_files(below, ArtifactInfo)
    require_loader(entry.info, target)
    if not (store.root / name).is_dir():
        command = for_workspace(entry.manifest.command)
        raise BadInputError(
            f"artifact {artifact} of the dossier is not in {store.workspace}; pass "
            + Argument("workspace", "DIR")
            + f", or build it again: `{command}`"
        )


def require_loader(info: ArtifactInfo, target: Form) -> None:
    """Raises BadInputError for a folder without a program that loads the artifact."""
    serving = BACKENDS[info.backend].serving(info, info.options, "")
    if target == "folder" and serving.loader is None:
        raise BadInputError(
            Argument("to", "folder")
            + f" has no loader for artifacts of {info.backend}; use "
            + Argument("to", "triton")
        )
