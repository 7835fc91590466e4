"""`optpipe attest`: a verdict as signed in-toto statements and a bill of materials."""

from pathlib import Path
from typing import Annotated

import typer

from optpipe.cli.options import DEFAULT_WORKSPACE, JsonOption, WorkspaceOption
from optpipe.cli.outcome import Outcome


def attest(
    dossier: Annotated[Path, typer.Argument(metavar="DOSSIER", help="Folder written by `optpipe signoff`.")],
    key: Annotated[Path, typer.Option(metavar="FILE", help="Private key in PEM, without a passphrase.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the attestations.")],
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Write signed attestations on a dossier.

    `optpipe verify DOSSIER --attestations DIR --public-key FILE` checks them.
    """
    from optpipe.cli.terminal import Terminal
    from optpipe.deploy.attest import attest_dossier
    from optpipe.workspace.store import Store

    with Terminal() as terminal, terminal.step("attest"):
        found = attest_dossier(dossier, key, output, Store(workspace))
    text = f"{found.result}  {', '.join(found.files)} in {found.folder}, signed by key {found.key[:12]}"
    return Outcome(found, lambda: text)
