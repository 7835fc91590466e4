"""Calibrates a model: a sample set with provenance, one pass over it, and one table per method."""

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optpipe.core.card import ModelCard, card_from_file
from optpipe.core.entries import CalibrationInfo, ModelInfo, SampleSetSummary
from optpipe.core.errors import BadInputError
from optpipe.core.events import Listener, SilentListener
from optpipe.core.plan import for_workspace
from optpipe.core.precision import Precision
from optpipe.models.inputs.image_set import image_set_from_path
from optpipe.models.inputs.sample_set import FEW_SAMPLES, SampleSet, Unusable, refuse_other_model, refuse_overlap
from optpipe.models.inputs.task_data import (
    drop_unknown_labels,
    fit_batch_size,
    iterate_input_batches,
    load_sample_set,
    resolve_texts,
)
from optpipe.models.inputs.tensor_set import FORMS, check_rows, holds_tensors, read_tensor_set, save_batches
from optpipe.models.sources.python_file import read_calibration
from optpipe.quantize.ranges import CalibrationTable, TensorRange, compute_range, is_table, read_table, write_table
from optpipe.workspace.entry import Entry
from optpipe.workspace.environment import get_package_version
from optpipe.workspace.file_names import CALIBRATION_SET, CARD, ONNX
from optpipe.workspace.store import Store

if TYPE_CHECKING:
    from optpipe.backends.base import Device
    from optpipe.quantize.placement import Placement, Target

REVISION = 3
TARGETS: tuple["Target", ...] = ("tensorrt", "cpu")


def load_calibration_data(
    model: Entry[ModelInfo],
    source: Path | None,
    count: int | None,
    seed: int,
    listener: Listener,
    held_out: Collection[str] = (),
) -> tuple[SampleSet, tuple[Unusable, ...]]:
    """The samples of `source`, or of the model's card, without those whose hash is in `held_out`; and the unreadable ones.

    Raises BadInputError if there is no set, it was drawn for another model, or it has validation samples.
    """
    card = card_from_file(model.file(CARD))
    own = card.data.get("calibration")
    if source is None:
        require_calibration(card)
    found, unreadable = load_sample_set(model, card, source or Path(str(own)), count, seed, listener)
    _require_own(found, card)
    found = replace(found, files=tuple(each for each in found.files if each.sha256 not in held_out))
    if len(found.files) < FEW_SAMPLES:
        listener.warn(f"only {len(found.files)} calibration {found.kind}; use {FEW_SAMPLES} or more for stable ranges")
    return drop_unknown_labels(found, card, listener), unreadable


def _require_own(found: SampleSet, card: ModelCard) -> None:
    """Raises BadInputError for a set that was drawn for another model, or has samples of the card's validation set."""
    refuse_other_model(found, card.name, card.preprocessing_sha256)
    if "validation" in card.data and Path(card.data["validation"]).exists():
        refuse_overlap(found, image_set_from_path(Path(card.data["validation"]))[0])


def resolve_data(
    source: Path, card: ModelCard, tokenizer: str | None, store: Store, option: str, *, truncate: bool = False
) -> Path:
    """`source` of `option`, the folder of a Python file's CALIBRATION batches, or the manifest of truncated texts.

    `tokenizer` is the content of a text model's. Raises BadInputError, before any computation, for inputs that the model rejects.
    """
    if source.suffix.lower() == ".py":
        batches = read_calibration(source, tuple(each.name for each in card.inputs))
        for index, each in enumerate(batches):
            check_rows(f"{source}, batch {index}", each, card.inputs)
        source = save_batches(batches, store.workspace / "calibration") if batches else source
    if holds_tensors(source):
        for rows in read_tensor_set(source, card.inputs).parts:
            for name, values in rows.items():
                if values.dtype.kind == "f" and not np.isfinite(values).all():
                    raise BadInputError(f"{source}: input '{name}' contains NaN or Inf; give finite values")
    elif card.transform is None and card.tokenization is None and not is_table(source):
        raise BadInputError(
            f"{source} holds no inputs of {card.name} ({', '.join(each.name for each in card.inputs)})\n"
            f"give {FORMS}; or a Python file that defines CALIBRATION"
        )
    if is_table(source):
        return source
    if card.transform is not None and not holds_tensors(source) and option != "--data":
        _require_own(load_sample_set(None, card, source, None, 0, SilentListener())[0], card)
    return resolve_texts(source, card, tokenizer, store.workspace / "calibration", truncate=truncate)


def require_calibration(card: ModelCard, precision: Precision = Precision.INT8) -> None:
    """Raises BadInputError if a model's card names no calibration data."""
    if "calibration" in card.data:
        return
    what = "a JSON Lines file" if card.tokenization else "a folder of images" if card.transform else FORMS
    raise BadInputError(
        f"{precision.upper()} needs real inputs to calibrate {card.name} on: give {what}\n"
        f"with build --calibration or calibrate --data, or leave {precision} out of --precision"
    )


def calibrate_model(
    model: Entry[ModelInfo],
    samples: SampleSet,
    methods: tuple[str, ...],
    targets: tuple["Target", ...],
    device: str,
    store: Store,
    listener: Listener,
) -> tuple[Entry[CalibrationInfo], bool]:
    """The store entry `calibration`: `set.json` and a table for each of `methods`; complete or absent."""
    card = card_from_file(model.file(CARD))
    about = SampleSetSummary(samples.name, samples.sha256, len(samples.files), samples.seed)
    recipe = {
        "revision": REVISION,
        "model": model.id,
        "set": samples.sha256,
        "transform": card.preprocessing_sha256,
        "methods": list(methods),
        "targets": list(targets),
        "provider": device,
        "onnxruntime": get_package_version("onnxruntime-gpu"),
    }

    def make(directory: Path) -> CalibrationInfo:
        ranges = _compute_ranges(model, card, samples, methods, targets, device, listener)
        for method, found in ranges.items():
            table = CalibrationTable(
                method=method,
                model=card.name,
                graph_sha256=model.sha256(ONNX),
                set=about,
                transform_sha256=card.preprocessing_sha256,
                ranges=found,
            )
            write_table(directory / name_table_file(method), table)
        drawn_for = {"model": card.name, "transform_sha256": card.preprocessing_sha256}
        manifest = {**samples.to_dict(directory), **drawn_for}
        (directory / CALIBRATION_SET).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        return CalibrationInfo(card.name, about, methods, len(ranges[methods[0]]))

    return store.produce(CalibrationInfo, recipe, make, parents=(model.id,), listener=listener)


def name_table_file(method: str) -> str:
    return f"table-{method}.json"


def tables_from_entry(entry: Entry[CalibrationInfo]) -> dict[str, CalibrationTable]:
    return {method: read_table(entry.file(name_table_file(method))) for method in entry.info.methods}


def _compute_ranges(
    model: Entry[ModelInfo],
    card: ModelCard,
    samples: SampleSet,
    methods: tuple[str, ...],
    targets: tuple["Target", ...],
    device: str,
    listener: Listener,
) -> dict[str, dict[str, TensorRange]]:
    import onnx

    from optpipe.quantize.collect import Collector, choose_batch_size
    from optpipe.quantize.placement import place_qdq

    if model.info.own_precision is Precision.INT8:
        raise BadInputError(
            f"{card.name} is quantized already; `optpipe build` with --precision int8 builds it as it is"
        )
    graph = onnx.load(model.file(ONNX))
    placed = [place_qdq(graph, target) for target in targets]
    wanted = {name for each in placed for name in each.tensors}
    if not wanted:
        why = "; ".join(sorted({each.reason for each in placed[0].skipped})[:3])
        raise BadInputError(
            f"{card.name} has no layer that benefits from INT8 or FP8{f' ({why})' if why else ''}\n"
            "build it in fp32 or fp16"
        )
    order = [each.name for each in graph.graph.input] + [name for node in graph.graph.node for name in node.output]
    tensors = tuple(name for name in order if name in wanted)
    first, _ = next(iterate_input_batches(model, card, samples, 1))
    where: Device = "cuda" if device == "cuda" else "cpu"
    size = fit_batch_size(card, choose_batch_size(model.file(ONNX), tensors, first, where))
    collector = Collector(model.file(ONNX), tensors, set(methods) != {"max"}, where)
    with listener.step(f"calibrate on {len(samples.files)} {samples.kind}", total=len(samples.files)) as step:
        for batch, count in iterate_input_batches(model, card, samples, size, by_length=True):
            collector.add(batch)
            step.advance(count)
    statistics, found = collector.statistics(), dict[str, dict[str, TensorRange]]()
    with listener.step(f"ranges of {len(tensors)} tensors", total=len(tensors) * len(methods)) as step:
        for method in methods:
            found[method] = {}
            for name, each in statistics.items():
                found[method][name] = TensorRange(compute_range(each, method), each.low, each.high)
                step.advance()
    return found


def quantize_graph(model: Any, table: CalibrationTable, target: "Target") -> tuple[Any, "Placement"]:
    """`model` (FP32) with the table's Q/DQ pairs; everything else, and the layers in `keep`, stay FP32.

    Raises BadInputError if the table keeps an unknown layer or lacks a range.
    """
    from optpipe.backends.onnx_graph import name_nodes
    from optpipe.quantize.placement import place_qdq
    from optpipe.quantize.qdq import qdq_from_onnx

    keep = frozenset(table.keep)
    if unknown := sorted(keep - {node.name for node in name_nodes(model).graph.node}):
        raise BadInputError(
            f"the calibration table keeps layer '{unknown[0]}' in floating point, but {table.model} has no such layer;"
            f" `{for_workspace(f'optpipe calibrate {table.model} --sensitivity')}` lists its layers"
        )
    unseen = {name for name, each in table.ranges.items() if each.low == each.high == 0}
    placed = place_qdq(model, target, keep.__contains__, unseen)
    return qdq_from_onnx(model, placed, table.ranges), placed
