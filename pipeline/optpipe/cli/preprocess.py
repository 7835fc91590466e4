"""`optpipe preprocess`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from optpipe.cli.groups import Outcome
from optpipe.cli.options import ModelArgument, ModelOptions, model_from_options
from optpipe.core import params
from optpipe.core.errors import BadInputError, require_existing
from optpipe.core.params import Param

if TYPE_CHECKING:
    from optpipe.report.progress import Terminal
    from optpipe.workspace.store import Store


def preprocess(
    model: ModelArgument,
    store: "Store",
    terminal: "Terminal",
    images: Annotated[
        Path | None,
        Param("Folder of images; subfolders named after labels enable accuracy.", metavar="DIR"),
    ] = None,
    limit: Annotated[int, Param("Maximum number of images.")] = 1000,
    decode: Annotated[
        Literal["auto", "cpu", "mixed"], Param("Decoder; mixed is nvJPEG on the GPU.", setting=True)
    ] = ("auto"),
    threads: Annotated[
        int | None,
        Param("DALI CPU threads; default: tuned, or up to 8 with --no-throughput.", setting=True),
    ] = None,
    batch_size: Annotated[
        int | None, Param("Images per batch; default: 256 on a GPU, 32 on a CPU.")
    ] = None,
    throughput: Annotated[
        bool, Param("Also compare the throughput of DALI and PyTorch's DataLoader.")
    ] = True,
    seconds: Annotated[
        float,
        Param("Measurement time for the best configurations; the search uses half.", setting=True),
    ] = 2.0,
    against: Annotated[
        str | None,
        Param(
            "Instead, compare with your training transform.",
            metavar="FILE.py:NAME",
            parse=params.text_from_text,
        ),
    ] = None,
    output: Annotated[
        Path | None, Param("Folder for the picture of --against.", metavar="DIR")
    ] = None,
    weights: Annotated[str, params.WEIGHTS] = "default",
) -> Outcome:
    """Derive a model's DALI pipeline, and prove its parity."""
    from optpipe.preprocess.document import document_from_against, document_from_preprocess
    from optpipe.preprocess.preprocess import (
        PreprocessRequest,
        choose_dali_plan,
        derive_preprocessing,
    )

    require_existing(images, "--images")
    fixed = {"decode": decode != "auto", "threads": threads is not None}
    request = PreprocessRequest(
        images=images,
        limit=limit,
        plan=choose_dali_plan(decode, threads, batch_size),
        fixed=frozenset(name for name, given in fixed.items() if given),
        throughput=throughput,
        seconds=seconds,
    )
    wanted = model_from_options(model, ModelOptions(weights), store, terminal)
    if against is not None:
        from optpipe.preprocess.preprocess import prove_training_transform

        compared = prove_training_transform(wanted, against, request, output, store, terminal)
        return Outcome(compared, document_from_against, compared.verdict.exit_status)
    if output is not None:
        raise BadInputError("--output requires --against")
    record = derive_preprocessing(wanted, request, store, terminal)
    return Outcome(record, document_from_preprocess, record.verdict.exit_status)
