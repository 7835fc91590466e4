"""`optpipe deploy`: from a dossier to a server, and its proof."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from optpipe.cli.groups import Outcome

if TYPE_CHECKING:
    from optpipe.cli.terminal import Terminal
    from optpipe.deploy.check import CheckedDeployment
    from optpipe.deploy.records import ProofRecord
    from optpipe.deploy.server import ServerProgram
    from optpipe.workspace.store import Store

Target = Literal["triton", "kserve", "folder"]


def deploy(
    store: "Store",
    terminal: "Terminal",
    dossier: Annotated[
        Path | None, typer.Argument(metavar="DOSSIER", help="Folder written by `optpipe signoff`.")
    ] = None,
    to: Annotated[Target, typer.Option(help="What is written.")] = "triton",
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write the deployment.")] = None,
    because: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Reason; required unless the verdict is PASS without waivers.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Check a deployment, and compare its passport with this machine.")
    ] = None,
    ensemble: Annotated[
        bool, typer.Option(help="Serve encoded images; --no-ensemble deploys the engine alone.")
    ] = True,
    batching: Annotated[
        bool, typer.Option(help="Let the server join requests; --no-batching: each is a batch of its own.")
    ] = True,
    prove: Annotated[bool, typer.Option("--prove", help="Serve it and compare the served outputs.")] = False,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="tritonserver, or an environment with nvidia-pytriton; default: on PATH.",
            envvar="OPTPIPE_TRITON",
        ),
    ] = None,
    storage_uri: Annotated[
        str | None, typer.Option(metavar="URI", help="With --to kserve: where models/ will be uploaded.")
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="With --to kserve: Triton's image; default: the one of KServe's runtime.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0, max=600, help="Time to measure the server's cost at each load; 0: not measured.")
    ] = 4.0,
) -> Outcome:
    """Deploy a signed-off build, and prove it on a server.

    With --check DIR: exit status 2 if a file or setting is not as written, 3 if this machine is not the one of the evidence.
    """
    from optpipe.core.errors import BadInputError, ExitStatus, OptpipeError
    from optpipe.deploy.document import document_from_deployment
    from optpipe.deploy.records import DeployResult

    if (check is None) == (dossier is None):
        raise BadInputError("deploy requires either DOSSIER with --output DIR, or --check DIR")
    program = _find_program(server, to) if prove else None
    if dossier is not None:
        _write(
            dossier, to, output, because, store, terminal,
            ensemble=ensemble, batching=batching, storage_uri=storage_uri, image=image,
        )  # fmt: skip
    folder = check or output
    assert folder is not None
    try:
        checked, proof = _check(folder, program, seconds, store, terminal)
    except (OptpipeError, KeyboardInterrupt):
        if dossier is not None:  # what was to be proven and is not, is not deployed
            shutil.rmtree(folder)
        raise
    result = DeployResult(str(folder), checked.record, checked.differences, proof)
    status = ExitStatus.MISSING if check is not None and checked.differences else ExitStatus.DONE
    return Outcome(result, document_from_deployment, status)


def _find_program(server: str | None, to: Target) -> "ServerProgram":
    from optpipe.core.errors import BadInputError
    from optpipe.deploy.server import find_server
    from optpipe.deploy.triton_config import require_tritonclient

    if to == "folder":
        raise BadInputError("--prove needs a server: use --to triton or --to kserve")
    require_tritonclient()
    return find_server(server)


def _write(
    dossier: Path,
    to: Target,
    output: Path | None,
    because: str | None,
    store: "Store",
    terminal: "Terminal",
    *,
    ensemble: bool,
    batching: bool,
    storage_uri: str | None,
    image: str | None,
) -> None:
    from dataclasses import replace

    from optpipe.core.errors import BadInputError
    from optpipe.deploy.kserve import require_service
    from optpipe.deploy.repository import write_folder, write_repository
    from optpipe.deploy.signed_build import open_signed_build, require_preprocessing
    from optpipe.deploy.triton_config import require_tritonclient
    from optpipe.workspace.places import require_unused_path

    if output is None:
        raise BadInputError("deploy DOSSIER requires --output DIR")
    require_unused_path(output)
    if to != "kserve" and (storage_uri or image):
        raise BadInputError(f"{'--storage-uri' if storage_uri else '--image'} needs --to kserve")
    if to == "kserve":
        require_service(storage_uri, image)
    if to != "folder":
        require_tritonclient()
    with terminal.step("verify the dossier"):
        build = open_signed_build(dossier, store, because)
    if ensemble:
        require_preprocessing(build, served=to != "folder")
    else:
        build = replace(build, preprocessing=None)
    with terminal.step(f"write the {to} deployment"):
        if to == "folder":
            write_folder(build, output, store)
        else:
            write_repository(build, output, store, batching=batching, storage_uri=storage_uri, image=image)


def _check(
    folder: Path, program: "ServerProgram | None", seconds: float, store: "Store", terminal: "Terminal"
) -> "tuple[CheckedDeployment, ProofRecord | None]":
    """What is in `folder`, and what a server made of it."""
    from optpipe.core.errors import BadInputError
    from optpipe.deploy.check import check_deployment
    from optpipe.deploy.proof import prove_deployment

    with terminal.step("check"):
        checked = check_deployment(folder)
    if program is None:
        return checked, None
    if checked.record.target == "folder":
        raise BadInputError(f"{folder} is a deployment to a folder; --prove needs one to triton or kserve")
    return checked, prove_deployment(checked, program, seconds, store, terminal)
