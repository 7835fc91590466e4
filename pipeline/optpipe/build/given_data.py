"""The data that a plan of builds gives: found and checked against the model before the export."""

from dataclasses import replace
from pathlib import Path

from optpipe.backends.registry import list_precisions
from optpipe.build.plan import BuildPlan
from optpipe.core.card import ModelCard
from optpipe.core.entries import ModelInfo
from optpipe.core.errors import BadInputError, ExitStatus
from optpipe.core.events import Listener
from optpipe.core.precision import CALIBRATED, Budget
from optpipe.core.wording import Argument
from optpipe.evaluate.tasks import TASKS
from optpipe.models.artifacts.decisions import Omission
from optpipe.models.export.exported import Model, read_card, read_tokenizer
from optpipe.models.inputs.samples import choose_samples
from optpipe.models.inputs.tensor_files import holds_tensors
from optpipe.models.inputs.tensor_set import read_tensor_set
from optpipe.models.sources.onnx_file import OnnxFileSource
from optpipe.quantize.calibrated_graph import require_calibration, resolve_data
from optpipe.quantize.ranges import is_table
from optpipe.workspace.entry import Entry
from optpipe.workspace.store import Store


def add_example(model: Model, plan: BuildPlan) -> Model:
    """`model`, an ONNX file's with the given data, whose shapes suggest those of its open dimensions."""
    if not isinstance(model.source, OnnxFileSource):
        return model
    return replace(model, source=replace(model.source, example=plan.images or plan.calibration))


def add_data(
    model: Model,
    plan: BuildPlan,
    stored: Entry[ModelInfo] | None,
    store: Store,
    listener: Listener,
) -> tuple[BuildPlan, list[Omission]]:
    """`plan` with its data checked, and the precisions that it leaves out for lack of calibration data.

    Raises BadInputError for unreadable data, before the export, and if nothing is left to build.
    """
    plan = _add_images(model, plan, stored, store)
    try:
        return add_calibration(model, plan, stored, store, listener), []
    except BadInputError as error:
        others = tuple(precision for precision in plan.precisions if precision not in CALIBRATED)
        if plan.calibration is not None or plan.budget is not None or not others:
            raise
        names = ", ".join(backend.name for backend in plan.backends)
        omitted = [
            Omission(names, kind, error.message, ExitStatus.BAD_INPUT)
            for kind in plan.precisions
            if kind in CALIBRATED
        ]
        return replace(plan, precisions=others), omitted


def _add_images(
    model: Model, plan: BuildPlan, stored: Entry[ModelInfo] | None, store: Store
) -> BuildPlan:
    """`plan` with the samples that outputs are verified on, if they are given."""
    if plan.images is None:
        return plan
    card, tokenizer = read_card(model, stored), read_tokenizer(model, stored)
    images = resolve_data(
        plan.images, card, tokenizer, store, calibrates=False, truncate=plan.truncate
    )
    if card.tokenization is None:
        choose_samples(card, images)
    return replace(plan, images=images)


def find_calibration_samples(plan: BuildPlan) -> Path | None:
    """The calibration data if they are samples, not a table of ranges."""
    return None if plan.calibration is None or is_table(plan.calibration) else plan.calibration


def add_calibration(
    model: Model, plan: BuildPlan, stored: Entry[ModelInfo] | None, store: Store, listener: Listener
) -> BuildPlan:
    """`plan` with its calibration data checked against the model's inputs.

    Raises BadInputError before the export if INT8 or FP8 has no calibration data, or a budget is in points and the model's task is
    not evaluated.
    """
    if plan.budget is not None:
        _require_measurable(plan.budget, plan.calibration, read_card(model, stored))
    known = {kind for backend in plan.backends for kind in list_precisions(backend, plan.device)}
    wanted = [kind for kind in CALIBRATED if kind in plan.precisions and kind in known]
    if plan.calibration is None and not wanted:
        return plan
    card = read_card(model, stored)
    if plan.calibration is not None:
        if not wanted and plan.budget is None and plan.gpu_lock is None:
            effect = (
                "has no effect"
                if is_table(plan.calibration)
                else "gives only the inputs that outputs are verified on"
            )
            listener.warn(
                Argument("calibration")
                + f" {effect}: {' and '.join(CALIBRATED)} need it, and neither is built"
            )
        tokenizer = read_tokenizer(model, stored)
        source = resolve_data(
            plan.calibration, card, tokenizer, store, calibrates=True, truncate=plan.truncate
        )
        return replace(plan, calibration=source)
    if (
        "calibration" in card.data
        or (stored and stored.info.own_precision)
        or model.find_quantization()
    ):
        return plan
    require_calibration(card, wanted[0])
    return plan


def _require_measurable(budget: Budget, data: Path | None, card: ModelCard) -> None:
    given = (
        read_tensor_set(data, card.inputs).files if data is not None and holds_tensors(data) else ()
    )
    labeled = any(file.label is not None for file in given)
    if budget.unit == "points" and card.task not in TASKS and not labeled:
        raise BadInputError(
            f"{card.name} cannot be evaluated (task: {card.task}), so no drop can be measured",
            remedy="give a minimum SNR of the outputs instead, such as "
            + Argument("budget", "30dB"),
        )
