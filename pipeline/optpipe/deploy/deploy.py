"""From a dossier to a deployment that was checked, and proven on a server if there is one."""

from dataclasses import replace
from pathlib import Path

from optpipe.core.errors import BadInputError, OptpipeError
from optpipe.core.events import Listener
from optpipe.core.wording import Argument
from optpipe.deploy.check import check_deployment
from optpipe.deploy.early import refuse_early
from optpipe.deploy.kserve import InferenceService
from optpipe.deploy.proof import prove_deployment
from optpipe.deploy.records import DeployResult, Form
from optpipe.deploy.repository import write_deployment
from optpipe.deploy.server import ServerProgram, find_server
from optpipe.deploy.signed_build import open_signed_build, require_preprocessing
from optpipe.deploy.triton_config import require_tritonclient
from optpipe.deploy.tune import tune_deployment
from optpipe.models.artifacts.changed_source import explain_changed_source
from optpipe.workspace.files import delete_tree
from optpipe.workspace.places import require_unused_path
from optpipe.workspace.store import Store


def require_server(to: Form, server: str | None) -> ServerProgram:
    """The Triton server that a proof needs. Raises BadInputError for a deployment to a folder, MissingError without a server."""
    if to == "folder":
        raise BadInputError(
            Argument("prove")
            + " and "
            + Argument("tune")
            + " need a server: use "
            + Argument("to", "triton")
        )
    require_tritonclient()
    return find_server(server)


def make_service(
    to: Form, storage_uri: str | None, image: str | None, *, tune: bool
) -> InferenceService | None:
    """The service of `--to kserve`; None for other forms. Raises BadInputError for arguments that do not belong together."""
    if to != "kserve":
        if storage_uri is not None or image is not None:
            given = Argument("image" if storage_uri is None else "storage_uri")
            raise BadInputError(given + " needs " + Argument("to", "kserve"))
        return None
    service = InferenceService(storage_uri, image)
    if tune:
        raise BadInputError(NO_TUNING, argument=Argument("to", "kserve"))
    return service


NO_TUNING = (
    "its resources are those of one instance, so "
    + Argument("tune")
    + " cannot change them; tune a deployment "
    + Argument("to", "triton")
)


def deploy_dossier(
    dossier: Path,
    output: Path,
    to: Form,
    store: Store,
    listener: Listener,
    *,
    because: str | None = None,
    ensemble: bool = True,
    storage_uri: str | None = None,
    image: str | None = None,
    program: ServerProgram | None = None,
    tune: bool = False,
    seconds: float = 4.0,
) -> DeployResult:
    """Writes the build of a verified dossier to `output`, and checks it; with `program`, a server, it is proven, or tuned and proven.

    Without `ensemble` the engine is deployed alone. `storage_uri` and `image` are those of KServe's service. Raises what verification,
    writing, and the proof raise; nothing stays then.
    """
    service = make_service(to, storage_uri, image, tune=tune)
    require_unused_path(output)
    refuse_early(dossier, store, because, to)
    with listener.step("verify the dossier"):
        build = open_signed_build(dossier, store, because)
    if (changed := explain_changed_source(build.artifact, store)) is not None:
        listener.warn(changed)
    if ensemble:
        require_preprocessing(build, served=to != "folder")
    else:
        build = replace(build, preprocessing=None)
    with listener.step(f"write the {to} deployment"):
        write_deployment(build, output, store, to, service)
    try:
        return check_folder(output, store, listener, program=program, tune=tune, seconds=seconds)
    except (OptpipeError, KeyboardInterrupt):  # an unproven deployment must not stay
        delete_tree(output)
        raise


def check_folder(
    folder: Path,
    store: Store,
    listener: Listener,
    *,
    program: ServerProgram | None = None,
    tune: bool = False,
    seconds: float = 4.0,
) -> DeployResult:
    """Compares a deployment with this machine; with `program`, a server, it is tuned if asked, and proven."""
    with listener.step("check"):
        checked = check_deployment(folder)
    if program is None:
        return DeployResult(str(folder), checked.record, checked.differences, None)
    if checked.serving is None:
        raise BadInputError(f"{folder} is a deployment to a folder; a server needs one to triton")
    if tune and checked.record.target == "kserve":
        raise BadInputError(f"{folder}: {NO_TUNING}")
    if tune:
        tune_deployment(checked, program, seconds, store, listener)
        checked = check_deployment(folder)
    proof = prove_deployment(checked, program, store, listener)
    return DeployResult(str(folder), checked.record, checked.differences, proof)
