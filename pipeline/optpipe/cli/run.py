"""`optpipe run`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

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
    SeedOption,
    SignOption,
    TruncateOption,
    WaiveOption,
    WeightsOption,
    define_backend_option,
    define_precision_option,
)


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
    seed: SeedOption = 0,
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
    from optpipe.cli.ci import require_step_summary, write_ci_files
    from optpipe.cli.parsing import build_plan_from_options, model_from_options
    from optpipe.cli.release_options import policy_from_file, waivers_from_options
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
            model_from_options(model, weights, seed, batch, [], Store(workspace)), plan, Store(workspace), terminal
        )
    signed = walked.signed
    write_ci_files(signed, junit)
    return Outcome(
        document_from_pipeline(walked, terminal.warnings),
        lambda: document_from_pipeline_run(walked.steps, signed.verdict, signed.folder),
        signed.verdict.verdict.exit_status,
    )
