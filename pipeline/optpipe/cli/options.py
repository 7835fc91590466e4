"""Options that several commands share, and the models and build plans made from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.groups import path_from_text
from optpipe.core import params
from optpipe.core.entries import Device, weights_from_text
from optpipe.core.errors import BadInputError
from optpipe.core.params import Param
from optpipe.core.precision import Precision
from optpipe.core.wording import Argument

if TYPE_CHECKING:
    from optpipe.build.plan import BuildPlan
    from optpipe.models.export.exported import Model
    from optpipe.report.progress import Terminal
    from optpipe.workspace.store import Store


PRECISION = Param(
    "Precisions; auto: the fastest build within the budget of `build`; in `bench`, the build that auto chose.",
    metavar=f"{'|'.join(Precision)}[,…]",
)
BACKEND = Param("auto, all, or names; `optpipe doctor` lists them.", metavar="NAME[,…]")
SAMPLE_SEED = Param("Seed for sampling.", minimum=0, setting=True)
COUNT = Param(
    "Number of samples to draw, stratified by label if available; default: all.", minimum=1
)
BECAUSE = Param(
    "Reason; required unless the verdict is PASS without waivers.",
    metavar="TEXT",
    parse=params.text_from_text,
)
DROP = Param("Maximum accuracy drop in percentage points, such as 1pt.", metavar="POINTS")


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A torchvision name, timm:NAME, hf:NAME, a path to .onnx or .pt2, file.py:factory, a model card, or an ID in the store.",
        show_default=False,
    ),
]
DossierArgument = Annotated[
    Path,
    typer.Argument(
        metavar="DOSSIER", help="Folder written by `optpipe signoff`.", parser=path_from_text
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print only a JSON document to stdout.")]
WorkspaceOption = Annotated[
    Path,
    typer.Option(
        "--workspace",
        envvar="OPTPIPE_WORKSPACE",
        metavar="DIR",
        help="Folder for artifacts and runs.",
        parser=path_from_text,
    ),
]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    weights: Annotated[str, params.WEIGHTS] = "default"
    batch: Annotated[
        str | None,
        Param("Batch range of the optimization profile, or one fixed size.", metavar="MIN:OPT:MAX"),
    ] = None
    shape: Annotated[
        tuple[str, ...],
        Param(
            "Shape range of one input, such as images=1x3x224x224:8x3x224x224.",
            metavar="NAME=MIN:OPT:MAX",
        ),
    ] = ()


@dataclass(frozen=True, slots=True)
class TargetOptions:
    precision: Annotated[str | None, PRECISION] = None
    backend: Annotated[str | None, BACKEND] = None
    device: Annotated[Device | None, Param("Default: the best available.")] = None
    option: Annotated[
        tuple[str, ...],
        Param(
            "Backend option, such as onnxruntime.threads=2; `optpipe doctor --options` lists them.",
            metavar="BACKEND.KEY=VALUE",
        ),
    ] = ()


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    calibration: Annotated[
        Path | None,
        Param(
            "Calibration data: images, texts, tensors (.npz, .npy, Polygraphy's JSON, a .py with CALIBRATION), a set manifest, or a table.",
            metavar="PATH",
        ),
    ] = None
    truncate: Annotated[bool, params.TRUNCATE] = False


def model_from_options(
    model: str, given: ModelOptions, store: "Store", terminal: "Terminal | None" = None
) -> "Model":
    """The model, not loaded yet, with the given weights and shapes. `model` may be the name or ID of a stored one.

    On the `terminal` an ID warns of a source that has changed since; without it, the command needs the source itself.
    """
    from optpipe.core.card import batch_range_from_text, shapes_from_text
    from optpipe.models.artifacts.changed_source import explain_changed_model
    from optpipe.models.artifacts.named import model_from_text

    shapes = dict(map(shapes_from_text, given.shape))
    if len(shapes) < len(given.shape):
        raise BadInputError("each input may be given once", argument=Argument("shape"))
    weights = weights_from_text(given.weights)
    batch = batch_range_from_text(given.batch) if given.batch is not None else None
    source = model_from_text(model, store, weights=weights, batch=batch, shapes=shapes)
    if terminal is None or source.exported is None:
        return source
    if (why := explain_changed_model(source.exported, model)) is not None:
        terminal.warn(why)
    return source


def build_plan_from_options(
    targets: TargetOptions,
    ranges: CalibrationOptions,
    *,
    images: Path | None = None,
    budget: str | None = None,
    min_snr: str | None = None,
    require_share: str | None = None,
    steps: str | None = None,
    recover: str | None = None,
) -> "BuildPlan":
    """The plan of every command that builds."""
    from optpipe.backends.registry import parse_options
    from optpipe.build.plan import plan_builds

    return plan_builds(
        precision=targets.precision,
        backend=targets.backend,
        device=targets.device,
        calibration=ranges.calibration,
        images=images,
        options=parse_options(targets.option),
        budget=budget,
        minimum_snr=min_snr,
        require_share=require_share,
        steps=steps,
        recover=recover,
        truncate=ranges.truncate,
    )
