"""`optpipe deploy`: from a dossier to a server, and its proof."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from optpipe.cli.groups import Outcome
from optpipe.core.errors import BadInputError
from optpipe.core.plan import Param

if TYPE_CHECKING:
    from optpipe.cli.terminal import Terminal
    from optpipe.workspace.store import Store


@dataclass(frozen=True, slots=True)
class DeployOptions:
    to: Annotated[Literal["triton", "kserve", "folder"], Param("What is written.")] = "triton"
    output: Annotated[Path | None, Param("Where to write the deployment.", metavar="DIR")] = None
    because: Annotated[
        str | None, Param("Reason; required unless the verdict is PASS without waivers.", metavar="TEXT")
    ] = None
    check: Annotated[
        Path | None, Param("Check a deployment, and compare its passport with this machine.", metavar="DIR")
    ] = None
    ensemble: Annotated[bool, Param("Serve encoded images; --no-ensemble deploys the engine alone.")] = True
    batching: Annotated[bool, Param("Let the server join requests; --no-batching: run each request separately.")] = True
    prove: Annotated[bool, Param("Serve it and compare the served outputs.")] = False
    server: Annotated[
        str | None,
        Param(
            "tritonserver, or an environment with nvidia-pytriton; default: on PATH.",
            metavar="PATH",
            envvar="OPTPIPE_TRITON",
        ),
    ] = None
    storage_uri: Annotated[str | None, Param("With --to kserve: where models/ will be uploaded.", metavar="URI")] = None
    image: Annotated[str | None, Param("With --to kserve: Triton's image; default: the one of KServe's runtime.")] = (
        None
    )
    seconds: Annotated[
        float, Param("Time to measure the server's cost at each load; 0: not measured.", minimum=0, maximum=600)
    ] = 4.0


def deploy(
    store: "Store",
    terminal: "Terminal",
    dossier: Annotated[
        Path | None, typer.Argument(metavar="DOSSIER", help="Folder written by `optpipe signoff`.")
    ] = None,
    how: DeployOptions = DeployOptions(),
) -> Outcome:
    """Deploy a signed-off build, and prove it on a server.

    With --check DIR: exit status 2 if a file or setting is not as written, 3 if this machine is not the one of the evidence.
    """
    from optpipe.core.errors import ExitStatus, OptpipeError
    from optpipe.deploy.check import check_deployment
    from optpipe.deploy.document import document_from_deployment
    from optpipe.deploy.proof import prove_deployment
    from optpipe.deploy.records import DeployResult
    from optpipe.deploy.server import find_server
    from optpipe.deploy.triton_config import require_tritonclient

    if (how.check is None) == (dossier is None):
        raise BadInputError("deploy requires either DOSSIER with --output DIR, or --check DIR")
    program = None
    if how.prove:
        if how.to == "folder":
            raise BadInputError("--prove needs a server: use --to triton or --to kserve")
        require_tritonclient()
        program = find_server(how.server)
    if dossier is not None:
        _write(dossier, how, store, terminal)
    folder, proof = how.check or how.output, None
    assert folder is not None
    try:
        with terminal.step("check"):
            checked = check_deployment(folder)
        if program is not None and checked.serving is None:
            raise BadInputError(f"{folder} is a deployment to a folder; --prove needs one to triton or kserve")
        if program is not None:
            proof = prove_deployment(checked, program, how.seconds, store, terminal)
    except (OptpipeError, KeyboardInterrupt):
        if dossier is not None:  # an unproven deployment must not stay
            shutil.rmtree(folder)
        raise
    result = DeployResult(str(folder), checked.record, checked.differences, proof)
    status = ExitStatus.MISSING if how.check is not None and checked.differences else ExitStatus.DONE
    return Outcome(result, document_from_deployment, status)


def _write(dossier: Path, how: DeployOptions, store: "Store", terminal: "Terminal") -> None:
    from optpipe.deploy.kserve import require_service
    from optpipe.deploy.repository import write_deployment
    from optpipe.deploy.signed_build import open_signed_build, require_preprocessing
    from optpipe.deploy.triton_config import require_tritonclient
    from optpipe.workspace.places import require_unused_path

    output, uri, image = how.output, how.storage_uri, how.image
    if output is None:
        raise BadInputError("deploy DOSSIER requires --output DIR")
    require_unused_path(output)
    if how.to != "kserve" and (uri or image):
        raise BadInputError(f"{'--storage-uri' if uri else '--image'} needs --to kserve")
    if how.to == "kserve":
        require_service(uri, image)
    if how.to != "folder":
        require_tritonclient()
    with terminal.step("verify the dossier"):
        build = open_signed_build(dossier, store, how.because)
    if how.ensemble:
        require_preprocessing(build, served=how.to != "folder")
    else:
        build = replace(build, preprocessing=None)
    with terminal.step(f"write the {how.to} deployment"):
        write_deployment(build, output, store, how.to, batching=how.batching, storage_uri=uri, image=image)
