"""`optpipe calibrate`, from the plan to the tables."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from optpipe.backends.onnx_lint import lint_graph
from optpipe.core.entries import LintFinding, ModelInfo, SkippedLayer, WeightsRecord
from optpipe.core.events import Listener
from optpipe.core.files import hash_file
from optpipe.core.precision import Budget, PrecisionCost
from optpipe.evaluate.tasks.registry import require_fitting_task
from optpipe.models.export.exported import export_model, prepare_model, read_card, read_tokenizer
from optpipe.models.export.model import Model
from optpipe.models.inputs.tensor_set import save_batches
from optpipe.quantize.calibrate import (
    TARGETS,
    calibrate_model,
    load_calibration_data,
    name_table_file,
    quantize_graph,
    resolve_data,
    tables_from_entry,
)
from optpipe.quantize.calibrated_graph import choose_calibration_device
from optpipe.quantize.placement import Target
from optpipe.quantize.ranges import METHODS, write_table
from optpipe.quantize.sensitivity import (
    MethodsInfo,
    SelectionInfo,
    SensitivityInfo,
    compare_methods,
    lower_by_table,
    rank_layers,
    select_kept_layers,
)
from optpipe.workspace.entry import Entry
from optpipe.workspace.file_names import CALIBRATION_SET, ONNX
from optpipe.workspace.places import require_writable_folder
from optpipe.workspace.store import Store


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    source: Path | None
    """A folder of images, a file of JSON lines, or a set's manifest; None for the card's set."""
    count: int | None
    seed: int
    methods: tuple[str, ...]
    target: Target = "tensorrt"
    """The Q/DQ placement in which methods and layers are compared; the tables serve all targets."""
    sensitivity: bool = False
    budget: Budget | None = None
    output: Path | None = None
    truncate: bool = False


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    name: str
    kind: str
    """The plural name of its samples."""
    count: int
    seed: int
    sha256: str
    path: str
    unreadable: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MethodResult:
    method: str
    path: str
    sha256: str
    cost: PrecisionCost


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    model: str
    model_id: str
    weights: WeightsRecord
    set: CalibrationSet
    target: Target
    tables: tuple[MethodResult, ...]
    best: str
    compared_on_images: int
    skipped: tuple[SkippedLayer, ...]
    lint: tuple[LintFinding, ...]
    sensitivity: SensitivityInfo | None = None
    selection: SelectionInfo | None = None
    table: str | None = None
    warnings: tuple[str, ...] = ()


def run_calibration(model: Model, plan: CalibrationPlan, store: Store, listener: Listener) -> CalibrationResult:
    import onnx

    if plan.output is not None:
        require_writable_folder(plan.output, "--output")
    store.require_writable()
    model, stored = prepare_model(model, store, listener)
    require_fitting_task(model, stored)
    source = _find_source(model, stored, plan, store)
    exported, _ = export_model(model, store, listener, stored)
    samples, unreadable = load_calibration_data(exported, source, plan.count, plan.seed, listener)
    entry, _ = calibrate_model(exported, samples, plan.methods, TARGETS, choose_calibration_device(), store, listener)
    tables = tables_from_entry(entry)
    compared, _ = compare_methods(exported, tables, samples, plan.target, store, listener)
    _warn_of_drop(compared.info, listener)
    best = tables[compared.info.best]
    names = [CALIBRATION_SET, *(name_table_file(method) for method in plan.methods)]
    if plan.output is None:
        files = {name: store.verify_entry(entry).file(name) for name in names}
    else:
        plan.output.mkdir(parents=True, exist_ok=True)
        files = {name: Path(shutil.copyfile(entry.file(name), plan.output / name)) for name in names}
    sensitivity = selection = path = None
    if plan.sensitivity or plan.budget is not None:
        lowering = lower_by_table(exported, best, plan.target)
        sensitivity = rank_layers(exported, lowering, samples, store, listener)[0].info
        if plan.budget is not None:
            chosen, _ = select_kept_layers(exported, lowering, samples, plan.budget, store, listener)
            selection, best = chosen.info, replace(best, keep=chosen.info.keep)
            folder = plan.output or store.workspace / "tables" / f"{best.model}-{chosen.id}"
            path = folder / f"table-{best.method}-spared.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_table(path, best)
    graph, placed = quantize_graph(onnx.load(exported.file(ONNX)), best, plan.target)
    own, bad = entry.info.set, tuple(str(path) for path, _ in unreadable)
    path_of_set = str(files[CALIBRATION_SET])
    return CalibrationResult(
        model=exported.info.name,
        model_id=exported.id,
        weights=exported.info.weights,
        set=CalibrationSet(own.name, samples.kind, own.count, own.seed, own.sha256, path_of_set, bad),
        target=plan.target,
        tables=tuple(
            MethodResult(method, str(file), hash_file(file), compared.info.costs[method])
            for method in plan.methods
            for file in (files[name_table_file(method)],)
        ),
        best=compared.info.best,
        compared_on_images=compared.info.images,
        skipped=placed.skipped,
        lint=lint_graph(graph) if plan.target == "tensorrt" else (),
        sensitivity=sensitivity,
        selection=selection,
        table=str(path) if path else None,
    )


def _warn_of_drop(compared: MethodsInfo, listener: Listener) -> None:
    cost = compared.costs[compared.best]
    if cost.drop is None or cost.drop_ci is None or cost.drop_ci[0] <= 0:
        return
    others = "" if set(compared.costs) == set(METHODS) else "compare the methods with --method all, or "
    listener.warn(
        f"INT8 by {compared.best} costs accuracy: {100 * cost.drop:.2f} points, 95% interval [{100 * cost.drop_ci[0]:.2f},"
        f" {100 * cost.drop_ci[1]:.2f}]; {others}keep layers in floating point with --accuracy-budget"
    )


def _find_source(model: Model, stored: Entry[ModelInfo] | None, plan: CalibrationPlan, store: Store) -> Path | None:
    """The given data or those of the model's file; None for the card's data."""
    card = read_card(model, stored)
    if plan.source is not None:
        tokenizer = read_tokenizer(model, stored)
        return resolve_data(plan.source, card, tokenizer, store, "calibrate --data", truncate=plan.truncate)
    own = None if "calibration" in card.data else model.load().calibration
    return None if own is None else save_batches(own(), store.workspace / "calibration")
