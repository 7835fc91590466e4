"""`optpipe signoff MODEL`: judge a build by a policy."""

from pathlib import Path
from typing import Annotated

import typer

from optpipe.cli.groups import Outcome
from optpipe.cli.options import (
    DEFAULT_WORKSPACE,
    BecauseOption,
    DossierOption,
    JunitOption,
    SignOption,
    WaiveOption,
)


def signoff(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As for `optpipe build`.", show_default=False)
    ] = None,
    policy: Annotated[Path | None, typer.Option(metavar="FILE", help="Release policy.")] = None,
    artifact: Annotated[str | None, typer.Option(metavar="ID", help="Artifact to judge.")] = None,
    waive: WaiveOption = None,
    because: BecauseOption = None,
    output: DossierOption = None,
    junit: JunitOption = None,
    sign: SignOption = None,
    measure: Annotated[
        bool, typer.Option(help="Run measurements that the policy requires and that are missing.")
    ] = True,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Judge only bench runs since this date or time (UTC); default: all."),
    ] = None,
    max_cv: Annotated[str, typer.Option(help="Maximum coefficient of variation, as for `optpipe bench`.")] = "2.5 %",
    figures: Annotated[bool, typer.Option(help="Include figures in the report.")] = True,
    init: Annotated[bool, typer.Option(help="Write a policy template and its JSON Schema, then exit.")] = False,
    workspace: Path = DEFAULT_WORKSPACE,
) -> Outcome:
    """Judge a build against a policy and write a dossier."""
    if init:
        return _write_policy_template(policy or Path("policy.toml"), output)
    from optpipe.cli.ci import require_step_summary, write_ci_files
    from optpipe.cli.parsing import model_from_options
    from optpipe.cli.release_options import policy_from_file, waivers_from_options
    from optpipe.cli.terminal import Terminal
    from optpipe.core.errors import BadInputError
    from optpipe.core.quantity import share_from_text
    from optpipe.signoff.collect import SignoffRequest
    from optpipe.signoff.document import document_from_verdict
    from optpipe.signoff.dossier import since_from_text
    from optpipe.signoff.release import document_from_signed, require_possible, sign_off
    from optpipe.signoff.steps import MeasurementBudget, measure_missing_evidence
    from optpipe.workspace.store import Store

    if model is None or policy is None:
        raise BadInputError(
            "signoff requires MODEL and --policy FILE; run optpipe signoff --init for a policy template"
        )
    wanted = SignoffRequest(
        model,
        policy_from_file(policy),
        artifact,
        waivers_from_options(waive or [], because or []),
        None if since is None else since_from_text(since),
    )
    pace, store = MeasurementBudget(max_cv=share_from_text(max_cv, "--max-cv")), Store(workspace)
    require_step_summary()
    require_possible(wanted, store, output, sign, junit)
    with Terminal() as terminal:
        if measure:
            measure_missing_evidence(
                wanted, lambda: model_from_options(model, "default", 0, None, [], store), pace, store, terminal
            )
        signed = sign_off(wanted, store, output, sign, terminal, figures=figures)
    write_ci_files(signed, junit)
    document = document_from_signed(signed, terminal.warnings)
    return Outcome(
        document, lambda: document_from_verdict(signed.verdict, signed.folder), signed.verdict.verdict.exit_status
    )


def _write_policy_template(policy: Path, output: Path | None) -> Outcome:
    import json as json_module
    from shlex import quote

    from optpipe.core.errors import BadInputError
    from optpipe.signoff.policy import make_policy_schema, read_policy_template
    from optpipe.workspace.places import require_writable_file

    if output is not None:
        raise BadInputError(
            f"--output is for the dossier; signoff --init --policy {quote(str(output))} writes the template there"
        )
    if policy.exists():
        raise BadInputError(f"{policy} already exists; choose another name with --policy")
    require_writable_file(policy, "--policy")
    schema = policy.with_name("policy.schema.json")
    policy.parent.mkdir(parents=True, exist_ok=True)
    policy.write_text(read_policy_template(), encoding="utf-8")
    schema.write_text(json_module.dumps(make_policy_schema(), indent=1) + "\n", encoding="utf-8")
    then = f"optpipe signoff MODEL --policy {quote(str(policy))}"
    text = f"wrote {policy} and {schema}; edit the limits, then run {then}"
    return Outcome({"policy": str(policy), "schema": str(schema)}, lambda: text)
