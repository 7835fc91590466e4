"""Options that several commands share, so that they read and behave the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

from optpipe.core.entries import Device

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
