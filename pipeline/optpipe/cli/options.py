"""Options that several commands share, and the models and build plans made from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.core import plan as params
from optpipe.core.entries import Device, weights_from_text
from optpipe.core.errors import MissingError, require_existing
from optpipe.core.plan import DEFAULT_WORKSPACE as DEFAULT_WORKSPACE
from optpipe.core.plan import Param
from optpipe.core.precision import Precision, budget_from_text, precisions_from_text

if TYPE_CHECKING:
    from optpipe.build.build import BuildPlan
    from optpipe.models.export.exported import Model
    from optpipe.workspace.store import Store


PRECISION = Param(
    "Precisions; auto: the fastest build within --budget; in `bench`, the build that auto chose.",
    metavar=f"{'|'.join(Precision)}[,…]",
)
BACKEND = Param("auto, all, or names; `optpipe doctor` lists them.", metavar="NAME[,…]")
SAMPLE_SEED = Param("Seed for sampling.", minimum=0, setting=True)
COUNT = Param(
    "Number of samples to draw, stratified by label if available; default: all.", minimum=1
)
BECAUSE = Param("Reason; required unless the verdict is PASS without waivers.", metavar="TEXT")
DROP = Param("Maximum accuracy drop in percentage points, such as 1pt.", metavar="POINTS")

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A torchvision name, timm:NAME, hf:NAME, a path to .onnx, file.py:factory, or a model card.",
        show_default=False,
    ),
]
DossierArgument = Annotated[
    Path, typer.Argument(metavar="DOSSIER", help="Folder written by `optpipe signoff`.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print only a JSON document to stdout.")]
WorkspaceOption = Annotated[
    Path,
    typer.Option(
        "--workspace",
        envvar="OPTPIPE_WORKSPACE",
        metavar="DIR",
        help="Folder for artifacts and runs.",
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
            "Calibration data: images, texts, tensors (.npz), a set manifest, or a table.",
            metavar="PATH",
        ),
    ] = None
    truncate: Annotated[bool, params.TRUNCATE] = False


def require_device(device: Device | None) -> Device | None:
    """Raises MissingError for `cuda` if no NVIDIA GPU is found."""
    from optpipe.workspace.environment import list_gpus

    if device == "cuda" and not list_gpus():
        raise MissingError(
            "--device cuda: no NVIDIA GPU or driver found; omit --device to use what is available"
        )
    return device


def model_from_options(model: str, given: ModelOptions, store: "Store") -> "Model":
    """The model, not loaded yet, with the given weights and shapes. `model` may be the name of a stored one."""
    from optpipe.core.card import batch_range_from_text, shapes_from_text
    from optpipe.models.artifacts.lookup import find_stored_source
    from optpipe.models.export.exported import Model
    from optpipe.models.sources.resolve import source_from_text

    shapes = dict(map(shapes_from_text, given.shape))
    return Model(
        source_from_text(find_stored_source(model, store) or model, shapes),
        weights_from_text(given.weights),
        batch_range_from_text(given.batch) if given.batch is not None else None,
        shapes,
    )


def build_plan_from_options(
    targets: TargetOptions,
    ranges: CalibrationOptions,
    *,
    images: Path | None = None,
    budget: str | None = None,
) -> "BuildPlan":
    """The plan of every command that builds: FP16 without `--precision`; without `--backend` one that suits; `auto`: all candidates."""
    from optpipe.backends.registry import backends_from_text, parse_options
    from optpipe.build.build import BuildPlan

    require_existing(images, "--images")
    require_existing(ranges.calibration, "--calibration")
    target, backend = require_device(targets.device), targets.backend or "auto"
    choosing, named = targets.precision == "auto", backend not in ("auto", "all")
    precisions = () if choosing else precisions_from_text(targets.precision or "fp16")
    candidates = "all" if choosing and not named else backend
    backends, options = (
        backends_from_text(candidates, target, precisions),
        parse_options(targets.option),
    )
    return BuildPlan(
        precisions=precisions,
        backends=backends,
        named=named,
        automatic=backend == "auto" and not choosing,
        device=target,
        images=images,
        calibration=ranges.calibration,
        options=options,
        budget=None if budget is None else budget_from_text(budget, "--budget"),
        truncate=ranges.truncate,
    )
