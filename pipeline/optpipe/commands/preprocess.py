"""`optpipe preprocess`."""

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


def preprocess(
    model: ModelArgument,
    images: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Real images; sub-folders named like labels give accuracy.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Use at most so many images.")] = 1000,
    max_unreadable: Annotated[
        int | None, typer.Option(help="Fail when more images than this cannot be read; default: name and leave out.")
    ] = None,
    decode: Annotated[str, typer.Option(help="auto, cpu, or mixed (nvJPEG on the GPU).")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="DALI's CPU threads; default: tuned, or with --no-throughput up to 8.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images per batch; default 32, with a GPU 256.")] = None,
    resize: Annotated[
        str, typer.Option(help="exact (the model's arithmetic), two-pass, or fused (DALI's own, fastest on a CPU).")
    ] = "exact",
    throughput: Annotated[bool, typer.Option(help="Measure DALI against torch's DataLoader too.")] = True,
    seconds: Annotated[float, typer.Option(help="Measuring time per winner; half of it in the search.")] = 2.0,
    weights: Annotated[str, typer.Option(help="default, random, or a .safetensors/.pt file.")] = "default",
    seed: Annotated[int, typer.Option(help="Seed of random weights.")] = 0,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Derive the model's DALI pipeline, prove parity, measure both."""
    from optpipe.commands.parsing import model_from_options
    from optpipe.commands.terminal import Terminal
    from optpipe.preprocess.preprocess import Request, automatic_plan
    from optpipe.preprocess.preprocess import preprocess as run_preprocess
    from optpipe.reporters.terminal_preprocess import preprocess_table
    from optpipe.workspace.store import Store

    request = Request(
        images=images,
        limit=limit,
        max_unreadable=max_unreadable,
        plan=automatic_plan(decode, threads, batch_size, resize),
        fixed=frozenset(
            name for name, given in (("decode", decode != "auto"), ("threads", threads is not None)) if given
        ),
        throughput=throughput,
        seconds=seconds,
    )
    wanted = model_from_options(model, weights, seed, None, [])
    with Terminal() as terminal:
        result = run_preprocess(wanted, request, Store(workspace), terminal)
    record = {**result.record, "warnings": terminal.warnings}
    return Outcome(record, lambda: preprocess_table(record), result.verdict.exit_status)
