"""`optpipe verify` and `optpipe signoff approve|attest|recheck`: what is done with a dossier."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.groups import Outcome
from optpipe.cli.options import DEFAULT_WORKSPACE
from optpipe.core.measurement import ROUNDS

if TYPE_CHECKING:
    from optpipe.signoff.verify import VerifiedDossier

DossierArgument = Annotated[Path, typer.Argument(metavar="DOSSIER", help="Folder written by `optpipe signoff`.")]


def verify(
    dossier: DossierArgument,
    allowed_signers: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Require a signature by one of these signers (ssh-keygen format)."),
    ] = None,
    attestations: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also check these attestations; needs --public-key.")
    ] = None,
    public_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Public key in PEM.")] = None,
) -> Outcome:
    """Recompute every number and the verdict of a dossier, offline.

    Exit status: 2 if any byte changed, 1 if a number does not match the raw files, otherwise that of the verdict.
    """
    from optpipe.cli.terminal import Terminal
    from optpipe.core.errors import ExitStatus
    from optpipe.core.verdict import VerificationRecord
    from optpipe.signoff.document import document_from_verification
    from optpipe.signoff.verify import verify_dossier

    with Terminal() as terminal, terminal.step("verify"):
        checked = verify_dossier(dossier, allowed_signers)
        if attestations is not None or public_key is not None:
            checked = _check_attestations(checked, attestations, public_key)
    signature = "signed by an allowed key" if allowed_signers else "signed" if checked.signed else "not signed"
    if public_key is not None:
        signature = f"attested with {public_key}" + (f", {signature}" if checked.signed else "")
    found, sizes = checked.verdict if checked.intact else None, checked.list_sizes()
    record = VerificationRecord(
        dossier=str(dossier),
        intact=found is not None,
        as_sealed=checked.as_sealed,
        problems=checked.problems,
        unbacked=checked.unbacked,
        not_compared=checked.not_compared,
        verdict=found.verdict if found else None,
        recomputed=found,
        signature=signature,
        files=len(sizes),
        size_bytes=sum(sizes),
    )
    status = ExitStatus.FAIL if checked.verdict and checked.as_sealed else ExitStatus.BAD_INPUT
    return Outcome(record, lambda: document_from_verification(record), found.verdict.exit_status if found else status)


def _check_attestations(
    checked: "VerifiedDossier", attestations: Path | None, public_key: Path | None
) -> "VerifiedDossier":
    """The check with what is wrong with the attestations; a signature that is not right is a changed byte."""
    from dataclasses import replace

    from optpipe.core.errors import BadInputError
    from optpipe.deploy.attest import find_attestation_problems
    from optpipe.workspace.seal import SUMS

    if attestations is None or public_key is None:
        raise BadInputError("--attestations DIR and --public-key FILE belong together")
    found = tuple(find_attestation_problems(attestations, checked.files.hash(SUMS), checked.verdict, public_key))
    return replace(checked, problems=(*checked.problems, *found), as_sealed=checked.as_sealed and not found)


def approve(
    dossier: DossierArgument,
    because: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Reason; required unless the verdict is PASS without waivers.")
    ] = None,
    workspace: Path = DEFAULT_WORKSPACE,
) -> Outcome:
    """Set a verified dossier as the baseline for later sign-offs."""
    from optpipe.cli.terminal import Terminal
    from optpipe.signoff.verify import require_pass, verify_dossier
    from optpipe.workspace.baselines import store_baseline

    with Terminal() as terminal, terminal.step("verify"):
        checked = verify_dossier(dossier)
    _, found, _ = checked.require_intact()
    require_pass(dossier, found, because, "set it as baseline")
    target = store_baseline(checked.files, workspace, because)
    document = {"model": found.model, "baseline": str(target), "verdict": found.verdict, "because": because}
    return Outcome(document, lambda: f"{dossier} is now the baseline for {found.model} ({target})")


def attest(
    dossier: DossierArgument,
    key: Annotated[Path, typer.Option(metavar="FILE", help="Private key in PEM, without a passphrase.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the attestations.")],
    workspace: Path = DEFAULT_WORKSPACE,
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


def recheck(
    dossier: DossierArgument,
    python: Annotated[
        Path | None,
        typer.Option(metavar="ENV", help="Environment to compare with this one; default: this one with the dossier."),
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="Rounds, 8 or more; up to three times as many if noise hides a 4 % difference.")
    ] = ROUNDS,
    min_time: Annotated[float, typer.Option(min=0.05, help="Seconds to measure in each process.")] = 0.5,
    max_slowdown: Annotated[str, typer.Option(help="Slow-down that must be excluded for a PASS.")] = "5 %",
    workspace: Path = DEFAULT_WORKSPACE,
) -> Outcome:
    """Measure a signed-off build again after an upgrade."""
    from dataclasses import replace

    from optpipe.cli.terminal import Terminal
    from optpipe.core.quantity import share_from_text
    from optpipe.deploy.document import document_from_recheck
    from optpipe.deploy.recheck import RecheckPlan
    from optpipe.deploy.recheck import recheck as run_recheck
    from optpipe.deploy.signed_build import open_signed_build
    from optpipe.workspace.store import Store

    plan = RecheckPlan(python, rounds, min_time, share_from_text(max_slowdown, "--max-slowdown"))
    store = Store(workspace)
    with Terminal() as terminal:
        with terminal.step("verify the dossier"):
            build = open_signed_build(dossier, store, because="to measure it again")
        found = run_recheck(build, plan, store, terminal)
        record = replace(found, warnings=tuple(terminal.warnings))
    return Outcome(record, lambda: document_from_recheck(record), record.verdict.exit_status)
