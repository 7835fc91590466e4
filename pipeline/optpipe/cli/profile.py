"""`optpipe profile`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.groups import Outcome
from optpipe.cli.options import (
    CalibrationOptions,
    ModelOptions,
    TargetOptions,
    build_plan_from_options,
    model_from_options,
)
from optpipe.core import params
from optpipe.core.errors import BadInputError, ExitStatus
from optpipe.core.params import Param, list_words
from optpipe.trace.nsys import ProfilePlan
from optpipe.workspace.places import require_writable_file

if TYPE_CHECKING:
    from optpipe.report.progress import Terminal
    from optpipe.workspace.store import Store


def profile(
    store: "Store",
    terminal: "Terminal",
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL | -- COMMAND ...]",
            help="As for `optpipe build`, or your own program after `--`; omit with --trace.",
            show_default=False,
        ),
    ] = None,
    program: tuple[str, ...] | None = None,
    trace: Annotated[
        Path | None,
        Param(
            "Analyze an existing recording: .nsys-rep, its .sqlite export, or a profile folder.",
            metavar="FILE",
        ),
    ] = None,
    range: Annotated[
        str | None,
        Param(
            "Analyze only work launched in this NVTX range; all: everything.",
            metavar="NAME",
            parse=params.text_from_text,
        ),
    ] = None,
    against: Annotated[
        str | None,
        Param(
            "Compare with this profile run or recording, by stage and kernel.",
            metavar="RUN",
            parse=params.text_from_text,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        Param("Also write the timeline for Perfetto (ui.perfetto.dev).", metavar="FILE.json"),
    ] = None,
    duration: Annotated[
        float | None,
        Param(
            "Seconds after which your own program, such as a server, is stopped.",
            metavar="SECONDS",
            minimum=1,
        ),
    ] = None,
    workers: Annotated[
        tuple[int, ...] | None,
        Param(
            "Also run your own program with these numbers of DataLoader workers (torch), and name "
            "the fewest that end its wait for data.",
            metavar="NUMBERS",
            parse=params.workers_from_text,
        ),
    ] = None,
    targets: TargetOptions = TargetOptions(),
    shapes: ModelOptions = ModelOptions(),
    ranges: CalibrationOptions = CalibrationOptions(),
    capture: ProfilePlan = ProfilePlan(),
) -> Outcome:
    """Profile each stage of a model, or your own program, with nsys, and find the bottleneck."""
    from optpipe.trace.compared_profiles import find_profile_run
    from optpipe.trace.document import document_from_profile, document_from_stages
    from optpipe.trace.named_model import ProfileRequest, profile_named_model
    from optpipe.trace.profile_recording import profile_recording

    if sum(given is not None for given in (model, trace, program)) != 1:
        raise BadInputError(
            "specify exactly one of MODEL (record), -- COMMAND (record a program), and --trace FILE (analyze)"
        )
    given = [word for record in (targets, shapes, ranges, capture) for word in list_words(record)]
    if trace is not None and given:
        raise BadInputError(
            f"{' '.join(given)}: valid only with MODEL; existing recordings accept --range, --against, --output, and --json"
        )
    if duration is not None and program is None:
        raise BadInputError("--duration: valid only with -- COMMAND")
    if workers is not None and program is None:
        raise BadInputError("--workers: valid only with -- COMMAND")
    if output is not None:
        require_writable_file(output, "output")
    other = None if against is None else find_profile_run(against, store)
    if trace is not None:
        profile = profile_recording(trace, range, terminal, other, output)
        return Outcome(profile, document_from_profile)
    if program is not None:
        own = [word for record in (targets, shapes, ranges) for word in list_words(record)]
        return _profile_program(
            program, own, range, capture, duration, other, output, workers, store, terminal
        )
    assert model is not None
    if range is not None:
        raise BadInputError("--range: valid only with --trace and -- COMMAND")
    request = ProfileRequest(
        text=model,
        model=model_from_options(model, shapes, store),
        builds=build_plan_from_options(targets, ranges, images=capture.images),
        precision=targets.precision,
        backend=targets.backend,
        capture=capture,
    )
    stages = profile_named_model(request, store, terminal, against=other, output=output)
    return Outcome(
        stages, document_from_stages, ExitStatus.STAGE_FAILED if stages.failed else ExitStatus.DONE
    )


def _profile_program(
    program: tuple[str, ...],
    given: list[str],
    range_name: str | None,
    capture: ProfilePlan,
    duration_s: float | None,
    against: Path | None,
    output: Path | None,
    workers: tuple[int, ...] | None,
    store: "Store",
    terminal: "Terminal",
) -> Outcome:
    from optpipe.trace.document import document_from_stages
    from optpipe.trace.profile_program import profile_program
    from optpipe.trace.program import has_ended_well

    if not program:
        raise BadInputError("no program after --: optpipe profile -- python train.py")
    usual = ProfilePlan(record=capture.record, kernels=capture.kernels, keep_raw=capture.keep_raw)
    if given or capture != usual:
        words = " ".join([*given, *list_words(replace(capture, record=None, kernels=0))])
        raise BadInputError(f"{words}: valid only with MODEL")
    stages = profile_program(
        program, capture, range_name, duration_s, store, terminal, against, output, workers or ()
    )
    ended_well = stages.program is not None and has_ended_well(stages.program, duration_s)
    return Outcome(
        stages, document_from_stages, ExitStatus.DONE if ended_well else ExitStatus.STAGE_FAILED
    )
