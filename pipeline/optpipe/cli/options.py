"""Options that several commands share, so that they read and behave the same everywhere."""

from pathlib import Path
from typing import Annotated, Any

import typer

from optpipe.core.entries import Device
from optpipe.core.plan import DEFAULT_WORKSPACE as DEFAULT_WORKSPACE
from optpipe.core.plan import complete_choice
from optpipe.core.precision import Precision

PRECISION_METAVAR = f"{'|'.join(Precision)}[,…]"


def complete_precision(incomplete: str) -> list[str]:
    return complete_choice(incomplete, list(Precision))


def complete_backend(incomplete: str) -> list[str]:
    from optpipe.backends.registry import BACKENDS

    return complete_choice(incomplete, ["auto", "all", *BACKENDS])


def define_precision_option(what: str) -> Any:
    """`--precision`, a list; `what` the command does with them, as its help says it."""
    return typer.Option(metavar=PRECISION_METAVAR, autocompletion=complete_precision, help=what)


def define_backend_option(what: str) -> Any:
    """`--backend`, a list likewise."""
    return typer.Option(metavar="NAME[,…]", autocompletion=complete_backend, help=what)


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
    Path, typer.Option("--workspace", envvar="OPTPIPE_WORKSPACE", metavar="DIR", help="Folder for artifacts and runs.")
]
BatchOption = Annotated[
    str | None, typer.Option(metavar="MIN:OPT:MAX", help="Batch range of the optimization profile, or one fixed size.")
]
ShapeOption = Annotated[list[str] | None, typer.Option(metavar="NAME=MIN:OPT:MAX", help="As for `optpipe build`.")]
WeightsOption = Annotated[str, typer.Option(help="default, random (random:SEED), or a .safetensors/.pt file.")]
SampleSeedOption = Annotated[int, typer.Option(min=0, help="Seed for sampling.")]
WaiveOption = Annotated[
    list[str] | None, typer.Option(metavar="CRITERION", help="Waive a criterion; requires --because.")
]
BecauseOption = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="Reason for the waiver: once for all, or once per --waive.")
]
DossierOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the dossier.")]
JunitOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the verdict as JUnit XML.")]
SignOption = Annotated[Path | None, typer.Option(metavar="KEY", help="Sign the dossier with this SSH key.")]
DeviceOption = Annotated[Device | None, typer.Option(help="Default: the best available for each backend.")]
LengthOption = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Sequence lengths: 128, or a list 32,128,512. Default: that of the texts the build was verified on.",
    ),
]
TruncateOption = Annotated[
    bool,
    typer.Option("--truncate", help="Cut texts that exceed the model's maximum input length; else they are refused."),
]
