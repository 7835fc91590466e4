"""`optpipe preprocess`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from optpipe.cli.groups import Outcome
from optpipe.cli.options import (
    DEFAULT_WORKSPACE,
    ModelArgument,
    SeedOption,
    WeightsOption,
)


def preprocess(
    model: ModelArgument,
    images: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of images; subfolders named after labels enable accuracy."),
    ] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of images.")] = 1000,
    max_unreadable: Annotated[
        int | None, typer.Option(help="Maximum number of unreadable images; default: skip them with a warning.")
    ] = None,
    decode: Annotated[
        Literal["auto", "cpu", "mixed"], typer.Option(help="Decoder; mixed is nvJPEG on the GPU.")
    ] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="DALI CPU threads; default: tuned, or up to 8 with --no-throughput.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Images per batch; default: 256 on a GPU, 32 on a CPU.")
    ] = None,
    resize: Annotated[
        Literal["exact", "two-pass", "fused"],
        typer.Option(help="exact matches the model's resize; fused is DALI's own, fastest on a CPU."),
    ] = "exact",
    throughput: Annotated[
        bool, typer.Option(help="Also compare the throughput of DALI and PyTorch's DataLoader.")
    ] = True,
    seconds: Annotated[
        float, typer.Option(help="Measurement time for the best configurations; the search uses half.")
    ] = 2.0,
    weights: WeightsOption = "default",
    seed: SeedOption = 0,
    workspace: Path = DEFAULT_WORKSPACE,
) -> Outcome:
    """Derive the model's DALI pipeline, prove parity, measure."""
    from dataclasses import replace

    from optpipe.cli.parsing import model_from_options
    from optpipe.cli.terminal import Terminal
    from optpipe.core.errors import require_existing
    from optpipe.preprocess.document import document_from_preprocess
    from optpipe.preprocess.preprocess import PreprocessRequest, choose_dali_plan, derive_preprocessing
    from optpipe.workspace.store import Store

    require_existing(images, "--images")
    fixed = {"decode": decode != "auto", "threads": threads is not None}
    request = PreprocessRequest(
        images=images,
        limit=limit,
        max_unreadable=max_unreadable,
        plan=choose_dali_plan(decode, threads, batch_size, resize),
        fixed=frozenset(name for name, given in fixed.items() if given),
        throughput=throughput,
        seconds=seconds,
    )
    wanted = model_from_options(model, weights, seed, None, [], Store(workspace))
    with Terminal() as terminal:
        derived = derive_preprocessing(wanted, request, Store(workspace), terminal)
    record = replace(derived, warnings=tuple(terminal.warnings))
    return Outcome(record, lambda: document_from_preprocess(record), record.verdict.exit_status)
