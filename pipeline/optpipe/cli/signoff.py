"""`optpipe signoff MODEL` and `optpipe run`: judge a build by a policy."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.groups import Outcome
from optpipe.cli.options import (
    DEFAULT_WORKSPACE,
    BatchOption,
    BecauseOption,
    DeviceOption,
    DossierOption,
    JunitOption,
    ModelArgument,
    SignOption,
    TruncateOption,
    WaiveOption,
    WeightsOption,
    define_backend_option,
    define_precision_option,
)
from optpipe.core.errors import BadInputError

if TYPE_CHECKING:
    from optpipe.signoff.policy import Policy
    from optpipe.signoff.release import SignedDossier


def policy_from_file(path: Path) -> "Policy":
    """Reads `--policy`."""
    from optpipe.signoff.policy import policy_from_toml

    try:
        source = path.read_bytes()
    except OSError as error:
        raise BadInputError(
            f"cannot read policy {path}: {error.strerror}; run optpipe signoff --init for a template"
        ) from error
    return policy_from_toml(source, str(path))


def waivers_from_options(names: Sequence[str], reasons: Sequence[str]) -> dict[str, str]:
    """Reads `--waive` with `--because`: one reason for all, or one each."""
    if not names and not reasons:
        return {}
    if not names:
        raise BadInputError("--because requires --waive CRITERION")
    given = list(reasons) * len(names) if len(reasons) == 1 else list(reasons)
    if len(given) != len(names) or not all(reason.strip() and reason.isprintable() for reason in given):
        raise BadInputError("--waive requires a one-line --because TEXT, once for all or once per --waive")
    return dict(zip(names, given, strict=True))


STEP_SUMMARY = "GITHUB_STEP_SUMMARY"


def require_step_summary() -> None:
    """Raises BadInputError where the step summary could not be written."""
    from optpipe.workspace.places import require_writable_file

    if path := os.environ.get(STEP_SUMMARY):
        require_writable_file(Path(path), STEP_SUMMARY)


def write_ci_files(signed: "SignedDossier", junit: Path | None) -> None:
    """The verdict as JUnit XML where that is asked for, and the report as step summary."""
    from optpipe.signoff.reports import JUNIT, MARKDOWN

    if junit is not None:
        junit.parent.mkdir(parents=True, exist_ok=True)
        junit.write_text(signed.reports[JUNIT], encoding="utf-8")
    write_step_summary(signed.reports[MARKDOWN])


def write_step_summary(markdown: str) -> None:
    """Appends `markdown` to GitHub's step summary; does nothing elsewhere."""
    path = os.environ.get(STEP_SUMMARY)
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(markdown + "\n")


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
    from optpipe.cli.parsing import model_from_options
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
                wanted, lambda: model_from_options(model, "default", None, [], store), pace, store, terminal
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


def run(
    model: ModelArgument,
    policy: Annotated[Path, typer.Option(metavar="FILE", help="Release policy.", show_default=False)],
    precision: Annotated[
        str | None, define_precision_option("As for `optpipe build`; default: the policy's, plus fp32.")
    ] = None,
    backend: Annotated[
        str | None, define_backend_option("As for `optpipe build`; default: the policy's, or auto.")
    ] = None,
    device: DeviceOption = None,
    batch: BatchOption = None,
    weights: WeightsOption = "default",
    calibration: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Images, texts or tensors to calibrate INT8 on.")
    ] = None,
    option: Annotated[list[str] | None, typer.Option(metavar="BACKEND.KEY=VALUE", help="Backend option.")] = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Labeled images or texts to evaluate on.")] = None,
    truncate: TruncateOption = False,
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="Images to verify preprocessing on.")] = None,
    min_time: Annotated[
        float, typer.Option(metavar="SECONDS", help="Minimum measurement time per load and process.")
    ] = 0.6,
    max_cv: Annotated[str, typer.Option(help="Maximum coefficient of variation of a VALID measurement.")] = "2.5 %",
    preprocess: Annotated[bool, typer.Option(help="Derive and verify the DALI pipeline.")] = True,
    profile: Annotated[bool, typer.Option(help="Profile the judged build with nsys.")] = True,
    waive: WaiveOption = None,
    because: BecauseOption = None,
    output: DossierOption = None,
    junit: JunitOption = None,
    sign: SignOption = None,
    workspace: Path = DEFAULT_WORKSPACE,
) -> Outcome:
    """Run the pipeline from model to verdict, resumable.

    Builds, evaluates, preprocesses, benchmarks, profiles and signs off as the policy requires.
    """
    from optpipe.cli.parsing import build_plan_from_options, model_from_options
    from optpipe.cli.terminal import Terminal
    from optpipe.core.quantity import share_from_text
    from optpipe.signoff.collect import SignoffRequest
    from optpipe.signoff.document import document_from_pipeline_run
    from optpipe.signoff.release import require_possible
    from optpipe.signoff.run import PipelinePlan, document_from_pipeline, run_pipeline
    from optpipe.signoff.steps import MeasurementBudget
    from optpipe.workspace.store import Store

    rules = policy_from_file(policy)
    wanted = SignoffRequest(model, rules, None, waivers_from_options(waive or [], because or []))
    backend_text = backend or rules.build.backend or "auto"
    judged = rules.build.precision
    precision_text = precision or (f"fp32,{judged}" if judged not in (None, "fp32") else judged or "fp32")
    build = build_plan_from_options(
        precision_text, backend_text, device, option or [], images=images, calibration=calibration, batch=batch
    )
    plan = PipelinePlan(
        wanted=wanted,
        build=replace(build, truncate=truncate),
        data=data, images=images, pace=MeasurementBudget(min_time, max_cv=share_from_text(max_cv, "--max-cv")),
        preprocess=preprocess, profile=profile, output=output, key=sign,
    )  # fmt: skip
    require_step_summary()
    require_possible(wanted, Store(workspace), output, sign, junit)
    with Terminal() as terminal:
        walked = run_pipeline(
            model_from_options(model, weights, batch, [], Store(workspace)), plan, Store(workspace), terminal
        )
    signed = walked.signed
    write_ci_files(signed, junit)
    return Outcome(
        document_from_pipeline(walked, terminal.warnings),
        lambda: document_from_pipeline_run(walked.steps, signed.verdict, signed.folder),
        signed.verdict.verdict.exit_status,
    )
