"""`optpipe run`."""

from pathlib import Path
from typing import Annotated

import typer

from optpipe.commands.options import (
    DEFAULT_WORKSPACE,
    JsonOption,
    ModelArgument,
    WorkspaceOption,
)
from optpipe.commands.outcome import Outcome


def run(
    model: ModelArgument,
    policy: Annotated[Path, typer.Option(metavar="FILE", help="What the build must prove.", show_default=False)],
    precision: Annotated[
        str | None, typer.Option(help="As for `optpipe build`; default: the policy's, and fp32 beside it.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="As for `optpipe build`; default: the policy's, or auto.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default each backend's best here.")] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="MIN:OPT:MAX", help="Batch sizes of the profile, or one fixed size.")
    ] = None,
    weights: Annotated[str, typer.Option(help="default, random, or a .safetensors/.pt file.")] = "default",
    seed: Annotated[int, typer.Option(help="Seed of random weights.")] = 0,
    calibration: Annotated[Path | None, typer.Option(metavar="DIR", help="Real images to calibrate INT8 on.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="BACKEND.KEY=VALUE", help="An option of one backend.")
    ] = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Labelled images to evaluate on.")] = None,
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="Images to prove preprocessing on.")] = None,
    min_time: Annotated[float, typer.Option(metavar="SECONDS", help="Measure each load for at least so long.")] = 3.0,
    max_cv: Annotated[str, typer.Option(help="Largest coefficient of variation of a VALID measurement.")] = "2.5 %",
    preprocess: Annotated[bool, typer.Option(help="Derive and prove the DALI pipeline.")] = True,
    profile: Annotated[bool, typer.Option(help="Profile the judged build under nsys.")] = True,
    waive: Annotated[
        list[str] | None, typer.Option(metavar="CRITERION", help="Set a criterion aside; needs --because.")
    ] = None,
    because: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Why.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the dossier goes.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the verdict as JUnit XML too.")] = None,
    sign: Annotated[Path | None, typer.Option(metavar="KEY", help="Sign the dossier with this SSH key.")] = None,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Walk from model to verdict, going on where it was interrupted.

    Build, evaluate, preprocess, bench, profile, sign off, each with what the policy asks for.
    """
    from optpipe.commands.ci import write_step_summary
    from optpipe.commands.parsing import build_plan_from_options, model_from_options, share_from_text
    from optpipe.commands.release_options import policy_from_file, waivers_from_options
    from optpipe.commands.terminal import Terminal
    from optpipe.reporters.junit import junit_report
    from optpipe.reporters.markdown import markdown_report
    from optpipe.reporters.terminal_signoff import walk_text
    from optpipe.run import WalkPlan, walk, walk_record
    from optpipe.signoff.collect import Wanted
    from optpipe.signoff.release import require_possible
    from optpipe.signoff.steps import Pace
    from optpipe.workspace.store import Store

    rules = policy_from_file(policy)
    wanted = Wanted(model, rules, None, waivers_from_options(waive or [], because or []))
    backend_text = backend or rules.build.get("backend", "auto")
    judged = rules.build.get("precision")
    precision_text = precision or (f"fp32,{judged}" if judged not in (None, "fp32") else judged or "fp32")
    plan = WalkPlan(
        wanted=wanted,
        build=build_plan_from_options(
            precision_text, backend_text, device, option or [], images=images, calibration=calibration
        ),
        asked={
            "model": model, "precision": precision_text, "backend": backend_text, "batch": batch, "shapes": [],
            "weights": weights, "seed": seed, "calibration": str(calibration) if calibration else None,
        },
        data=data, images=images, pace=Pace(min_time, max(30.0, min_time), share_from_text(max_cv, "--max-cv")),
        preprocess=preprocess, profile=profile, output=output, key=sign,
    )  # fmt: skip
    require_possible(wanted, output, sign, junit)
    with Terminal() as terminal:
        walked = walk(model_from_options(model, weights, seed, batch, []), plan, Store(workspace), terminal)
    if junit is not None:
        junit.write_text(junit_report(walked.signed.document), encoding="utf-8")
    write_step_summary(markdown_report(walked.signed.report))
    document = walk_record(walked, terminal.warnings)
    return Outcome(document, lambda: walk_text(document), walked.signed.verdict.exit_status)
