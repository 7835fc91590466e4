"""A calibration from the command to the tables beside it."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.backends.onnx_lint import lint_graph
from optpipe.core.card import card_from_file
from optpipe.core.events import Listener
from optpipe.core.hashing import hash_file
from optpipe.errors import BadInputError
from optpipe.export.exported import export_model, prepare_model
from optpipe.export.model import Model
from optpipe.inputs.sample_set import SampleSet
from optpipe.inputs.tensor_set import save_batches
from optpipe.quantize.calibrate import (
    TARGETS,
    calibrate_model,
    load_calibration_data,
    name_table_file,
    quantize_graph,
    tables_from_entry,
)
from optpipe.quantize.int8 import choose_calibration_device
from optpipe.quantize.sensitivity import compare_methods, rank_layers, select_float_layers
from optpipe.quantize.table import CalibrationTable
from optpipe.workspace.file_names import CALIBRATION_SET, CARD, ONNX
from optpipe.workspace.store import Entry, Store

if TYPE_CHECKING:
    from optpipe.quantize.placement import Target


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """What to calibrate on, by which methods, and what to find out beside it."""

    source: Path | None
    """A folder of images, a file of JSON lines, or a set's manifest; None for the card's own."""
    count: int | None
    seed: int
    methods: tuple[str, ...]
    target: "Target" = "tensorrt"
    """Whose Q/DQ placement the methods and layers are judged in; the tables serve all targets."""
    sensitivity: bool = False
    budget: float | None = None
    output: Path | None = None


def run_calibration(model: Model, plan: CalibrationPlan, store: Store, listener: Listener) -> dict[str, Any]:
    """Draws the set, makes the tables, compares them, ranks and spares layers where asked; the JSON document."""
    if plan.output is not None:
        _make_output_folder(plan.output)
    model, stored = prepare_model(model, store, listener)
    exported, _ = export_model(model, store, listener, stored)
    card, source = card_from_file(exported.file(CARD)), plan.source
    if source is None and "calibration" not in card.data and (given := model.load().calibration) is not None:
        source = save_batches(given(), store.workspace / "calibration")
    data = load_calibration_data(exported, source, plan.count, plan.seed, listener)
    entry, _ = calibrate_model(exported, data, plan.methods, TARGETS, choose_calibration_device(), store, listener)
    tables = tables_from_entry(entry)
    compared, _ = compare_methods(exported, tables, data.samples, plan.target, store, listener)
    best = tables[compared.info["best"]]
    files = _write_tables(entry, plan, store)
    record: dict[str, Any] = {
        "model": card.name,
        "model_id": exported.id,
        "weights": dict(exported.info["weights"]),
        "set": {
            **entry.info["set"],
            "kind": data.samples.kind,
            "path": str(files[CALIBRATION_SET]),
            "unreadable": [str(e.path) for e in data.unreadable],
        },
        "target": plan.target,
        "tables": [
            {
                "method": method,
                "path": str(files[name_table_file(method)]),
                "sha256": hash_file(files[name_table_file(method)]),
                **compared.info["outcomes"][method],
            }
            for method in plan.methods
        ],
        "best": best.method,
        "compared_on_images": compared.info["images"],
        "sensitivity": [],
        "selection": None,
    }
    if plan.sensitivity or plan.budget is not None:
        record |= _rank_layers(exported, best, data.samples, plan, store, listener)
        best = replace(best, keep=tuple(record["selection"]["keep"])) if record["selection"] else best
    graph, placed = quantize_graph(_load_graph(exported), best, plan.target)
    record["skipped"] = [{"layer": each.layer, "reason": each.reason} for each in placed.skipped]
    record["lint"] = [each.to_dict() for each in lint_graph(graph)] if plan.target == "tensorrt" else []
    return record


def _make_output_folder(output: Path) -> None:
    """The folder for the results, before anything is computed. Raises BadInputError where it cannot be had."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        writable = os.access(output, os.W_OK)
    except OSError as error:
        raise BadInputError(f"cannot create --output {output}: {error.strerror}") from error
    if not writable:
        raise BadInputError(f"--output {output} is not writable")


def _load_graph(exported: Entry) -> Any:
    import onnx

    return onnx.load(exported.file(ONNX))


def _write_tables(entry: Entry, plan: CalibrationPlan, store: Store) -> dict[str, Path]:
    """The set's manifest and the tables: in the store, and copied to `--output` where it is given."""
    names = [CALIBRATION_SET, *(name_table_file(method) for method in plan.methods)]
    if plan.output is None:
        return {name: store.verify_entry(entry).file(name) for name in names}
    return {name: Path(shutil.copyfile(entry.file(name), plan.output / name)) for name in names}


def _rank_layers(
    exported: Entry,
    table: CalibrationTable,
    samples: SampleSet,
    plan: CalibrationPlan,
    store: Store,
    listener: Listener,
) -> Mapping[str, Any]:
    ranked, _ = rank_layers(exported, table, samples, plan.target, store, listener)
    rows = ranked.info["layers"]
    found: dict[str, Any] = {"sensitivity": rows, "ranked_on_images": ranked.info["images"]}
    if plan.budget is not None:
        chosen, _ = select_float_layers(exported, table, rows, samples, plan.budget, plan.target, store, listener)
        name = f"table-{table.method}-spared.json"
        path = (plan.output or store.workspace / "tables" / f"{table.model}-{chosen.id}") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(replace(table, keep=tuple(chosen.info["keep"])).to_json(), encoding="utf-8")
        found["selection"] = {**chosen.info, "table": str(path), "sha256": hash_file(path)}
    return found
