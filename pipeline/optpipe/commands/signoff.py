"""`optpipe signoff`, `optpipe verify` and `optpipe approve`."""

from pathlib import Path
from typing import Annotated

import typer

from optpipe.commands.options import DEFAULT_WORKSPACE, JsonOption, WorkspaceOption
from optpipe.commands.outcome import Outcome

DossierArgument = Annotated[Path, typer.Argument(metavar="DOSSIER", help="The folder that signoff made.")]


def signoff(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As for `optpipe build`.", show_default=False)
    ] = None,
    policy: Annotated[Path | None, typer.Option(metavar="FILE", help="What the build must prove.")] = None,
    artifact: Annotated[str | None, typer.Option(metavar="ID", help="Judge exactly this build.")] = None,
    waive: Annotated[
        list[str] | None, typer.Option(metavar="CRITERION", help="Set a criterion aside; needs --because.")
    ] = None,
    because: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Why: once for all, or once per --waive.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the dossier goes.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the verdict as JUnit XML too.")] = None,
    sign: Annotated[Path | None, typer.Option(metavar="KEY", help="Sign the dossier with this SSH key.")] = None,
    measure: Annotated[bool, typer.Option(help="Measure what the policy asks for and no run shows yet.")] = True,
    max_cv: Annotated[str, typer.Option(help="For what is measured: as for `optpipe bench`.")] = "2.5 %",
    figures: Annotated[bool, typer.Option(help="Draw the report's figures.")] = True,
    init: Annotated[bool, typer.Option(help="Write a commented policy and its JSON Schema, and stop.")] = False,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Judge a build by a policy, in a dossier anyone can recompute."""
    if init:
        return _init(policy or Path("policy.toml"))
    from optpipe.commands.ci import write_step_summary
    from optpipe.commands.parsing import model_from_options, share_from_text
    from optpipe.commands.release_options import policy_from_file, waivers_from_options
    from optpipe.commands.terminal import Terminal
    from optpipe.errors import BadInputError
    from optpipe.reporters.junit import junit_report
    from optpipe.reporters.markdown import markdown_report
    from optpipe.reporters.terminal_signoff import verdict_table
    from optpipe.signoff.collect import Wanted
    from optpipe.signoff.missing import measured_missing
    from optpipe.signoff.release import require_possible, signed_off
    from optpipe.signoff.steps import Pace
    from optpipe.workspace.store import Store

    if model is None or policy is None:
        raise BadInputError(
            "signoff needs MODEL and --policy FILE; optpipe signoff --init writes a policy to start from"
        )
    wanted = Wanted(model, policy_from_file(policy), artifact, waivers_from_options(waive or [], because or []))
    pace, store = Pace(max_cv=share_from_text(max_cv, "--max-cv")), Store(workspace)
    require_possible(wanted, output, sign, junit)
    with Terminal() as terminal:
        if measure:
            measured_missing(wanted, lambda: model_from_options(model, "default", 0, None, []), pace, store, terminal)
        signed = signed_off(wanted, store, output, sign, terminal, figures=figures)
    if junit is not None:
        junit.write_text(junit_report(signed.document), encoding="utf-8")
    write_step_summary(markdown_report(signed.report))
    document = {**signed.document, "dossier": str(signed.folder), "warnings": terminal.warnings}
    return Outcome(document, lambda: verdict_table(document, str(signed.folder)), signed.verdict.exit_status)


def _init(policy: Path) -> Outcome:
    import json as json_module

    from optpipe.errors import BadInputError
    from optpipe.signoff.policy_schema import policy_schema, policy_template

    if policy.exists():
        raise BadInputError(f"{policy} exists; choose another name with --policy")
    schema = policy.with_name("policy.schema.json")
    policy.parent.mkdir(parents=True, exist_ok=True)
    policy.write_text(policy_template(), encoding="utf-8")
    schema.write_text(json_module.dumps(policy_schema(), indent=1) + "\n", encoding="utf-8")
    text = f"wrote {policy} and {schema}; edit the limits, then: optpipe signoff MODEL --policy {policy}"
    return Outcome({"policy": str(policy), "schema": str(schema)}, lambda: text)


def verify(
    dossier: DossierArgument,
    allowed_signers: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Demand a signature by one of these (ssh-keygen's format).")
    ] = None,
    json: JsonOption = False,
) -> Outcome:
    """Recompute every number and the verdict of a dossier, offline.

    Exit status 2 if a byte was changed, 1 if a figure does not follow from the raw files, else the verdict's.
    """
    from optpipe.commands.terminal import Terminal
    from optpipe.errors import ExitStatus
    from optpipe.reporters.terminal_signoff import verification_text
    from optpipe.signoff.dossier import verdict_document
    from optpipe.signoff.release import verified

    with Terminal() as terminal, terminal.step("verify"):
        checked = verified(dossier, allowed_signers)
    signature = "signed by an allowed key" if allowed_signers else "signed" if checked.signed else "not signed"
    found = checked.signoff if checked.intact else None
    document = {
        "dossier": str(dossier),
        "intact": found is not None,
        "as_sealed": checked.as_sealed,
        "problems": list(checked.problems),
        "verdict": str(found.verdict) if found else None,
        "recomputed": verdict_document(found) if found else None,
        "signature": signature,
        "files": checked.files,
        "size_bytes": checked.size_bytes,
    }
    status = ExitStatus.FAIL if checked.signoff else ExitStatus.BAD_INPUT
    if found:
        status = found.verdict.exit_status
    return Outcome(document, lambda: verification_text(document), status)


def approve(
    dossier: DossierArgument,
    because: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Needed to approve anything but a PASS without waivers.")
    ] = None,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Make a verified dossier the baseline of later sign-offs."""
    from optpipe.commands.terminal import Terminal
    from optpipe.core.verdict import Verdict
    from optpipe.errors import BadInputError, GateError
    from optpipe.signoff.release import verified
    from optpipe.workspace.baselines import approve as store_baseline

    with Terminal() as terminal, terminal.step("verify"):
        checked = verified(dossier)
    if checked.problems or checked.signoff is None:
        raise BadInputError(f"{dossier} is not intact ({checked.problems[0]}); optpipe verify lists everything")
    found = checked.signoff
    if because is None and (found.verdict is not Verdict.PASS or found.waived):
        state = f"{len(found.waived)} criteria waived" if found.verdict is Verdict.PASS else str(found.verdict)
        raise GateError(f"{dossier} is no plain PASS ({state}); to make it the baseline all the same: --because TEXT")
    model = found.evidence.build.model
    target = store_baseline(dossier, workspace, because)
    document = {"model": model, "baseline": str(target), "verdict": str(found.verdict), "because": because}
    return Outcome(document, lambda: f"{dossier} is the baseline of {model} now ({target})")
