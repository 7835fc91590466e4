"""Options that several commands share, so that they read and behave the same everywhere."""

from pathlib import Path
from typing import Annotated, Any

import typer

from optpipe.core.choices import complete_choice, describe_choices
from optpipe.core.entries import Device
from optpipe.core.precision import Precision


def _complete_precision(incomplete: str) -> list[str]:
    return complete_choice(incomplete, list(Precision))


def _complete_backend(incomplete: str) -> list[str]:
    from optpipe.backends.registry import BACKENDS

    return complete_choice(incomplete, ["auto", "all", *BACKENDS])


def define_precision_option(what: str) -> Any:
    """`--precision`, a list; `what` the command does with them, as its help says it."""
    return typer.Option(metavar=describe_choices(list(Precision)), autocompletion=_complete_precision, help=what)


def define_backend_option(what: str) -> Any:
    """`--backend`, a list likewise."""
    return typer.Option(metavar="NAME[,…]", autocompletion=_complete_backend, help=what)


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A torchvision name, timm:NAME, hf:NAME, a path to .onnx, file.py:factory, or a model card.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print only a JSON document to stdout.")]
WorkspaceOption = Annotated[
    Path,
    typer.Option("--workspace", envvar="OPTPIPE_WORKSPACE", metavar="DIR", help="Folder for artifacts and runs."),
]
DeviceOption = Annotated[Device | None, typer.Option(help="Default: the best available for each backend.")]
DEFAULT_WORKSPACE = Path(".optpipe")
