"""Calibrates a model: an image set with provenance, one pass over it, and one table per method."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.core.card import ModelCard, card_from_file
from optpipe.core.events import Listener
from optpipe.errors import BadInputError
from optpipe.inputs.image_set import image_set
from optpipe.inputs.images import Unreadable
from optpipe.inputs.sample_set import (
    FEW,
    SampleSet,
    refuse_other_model,
    refuse_overlap,
)
from optpipe.inputs.task_data import (
    fitting_batch,
    input_batches,
    require_task_data,
    sample_set,
    with_known_labels,
)
from optpipe.quantize.table import CalibrationTable, TensorRange, table_from_file
from optpipe.workspace.environment import package_version
from optpipe.workspace.file_names import CARD, ONNX, SET
from optpipe.workspace.store import Entry, Store

if TYPE_CHECKING:
    from optpipe.quantize.placement import Placement, Target

REVISION = 1
TARGETS: tuple["Target", ...] = ("tensorrt", "cpu")


@dataclass(frozen=True, slots=True)
class CalibrationData:
    """The images or texts a model is calibrated on, and those left out."""

    samples: SampleSet
    unreadable: tuple[Unreadable, ...] = ()


def calibration_data(
    model: Entry, source: Path | None, count: int | None, seed: int, listener: Listener
) -> CalibrationData:
    """The set named by `source`, or by the model's card. Never random data, never validation data.

    Raises BadInputError where there is none, where it was drawn for another model, or where it holds validation samples.
    """
    card = card_from_file(model.file(CARD))
    require_task_data(card)
    own = card.data.get("calibration")
    if source is None and own is None:
        what = "a file of JSON lines" if card.tokenization else "a folder of images"
        raise BadInputError(
            f"INT8 needs real inputs to calibrate {card.name} on: give {what} with calibrate --data or build --calibration"
        )
    found, unreadable = sample_set(model, card, source or Path(str(own)), count, seed, listener)
    refuse_other_model(found, card.name, card.preprocessing_sha256)
    if "validation" in card.data and Path(card.data["validation"]).exists():
        refuse_overlap(found, image_set(Path(card.data["validation"]))[0])
    if len(found.files) < FEW:
        listener.warn(f"{len(found.files)} calibration {found.kind}; {FEW} or more give steadier ranges")
    return CalibrationData(with_known_labels(found, card, listener), unreadable)


def calibrated(
    model: Entry,
    data: CalibrationData,
    methods: tuple[str, ...],
    targets: tuple["Target", ...],
    device: str,
    store: Store,
    listener: Listener,
) -> tuple[Entry, bool]:
    """The store entry `calibration`: `set.json` and a table for each of `methods`; whole or absent."""
    card = card_from_file(model.file(CARD))
    samples = data.samples
    recipe = {
        "revision": REVISION,
        "model": model.id,
        "set": samples.sha256,
        "transform": card.preprocessing_sha256,
        "methods": list(methods),
        "targets": list(targets),
        "provider": device,
        "onnxruntime": package_version("onnxruntime-gpu"),
    }

    def make(directory: Path) -> Mapping[str, Any]:
        tables = _tables(model, card, samples, methods, targets, device, listener)
        for table in tables:
            (directory / table_file(table.method)).write_text(table.to_json(), encoding="utf-8")
        drawn_for = {"model": card.name, "transform_sha256": card.preprocessing_sha256}
        manifest = {**samples.to_dict(directory), **drawn_for}
        (directory / SET).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        return {
            "model": card.name,
            "set": _set_record(samples),
            "methods": list(methods),
            "tensors": len(tables[0].ranges),
        }

    return store.produce("calibration", recipe, make, parents=(model.id,), listener=listener)


def table_file(method: str) -> str:
    """The name of a method's table in a calibration entry."""
    return f"table-{method}.json"


def tables_of(entry: Entry) -> dict[str, CalibrationTable]:
    """The tables of a calibration entry by method."""
    return {method: table_from_file(entry.file(table_file(method))) for method in entry.info["methods"]}


def _set_record(samples: SampleSet) -> dict[str, Any]:
    return {"name": samples.name, "sha256": samples.sha256, "count": len(samples.files), "seed": samples.seed}


def _tables(
    model: Entry,
    card: ModelCard,
    samples: SampleSet,
    methods: tuple[str, ...],
    targets: tuple["Target", ...],
    device: str,
    listener: Listener,
) -> list[CalibrationTable]:
    import onnx

    from optpipe.quantize.collect import Collector, batch_size, bytes_per_sample
    from optpipe.quantize.methods import needs_histogram, ranges
    from optpipe.quantize.placement import placement

    graph = onnx.load(model.file(ONNX))
    wanted = {name for target in targets for name in placement(graph, target).tensors}
    if not wanted:
        raise BadInputError(f"{card.name} has no layer that INT8 would pay for; build it in fp16")
    order = [each.name for each in graph.graph.input] + [name for node in graph.graph.node for name in node.output]
    tensors = tuple(name for name in order if name in wanted)
    first = next(input_batches(model, card, samples, 1))
    size = fitting_batch(card, batch_size(bytes_per_sample(model.file(ONNX), tensors, first), device))
    collector = Collector(model.file(ONNX), tensors, needs_histogram(methods), "cuda" if device == "cuda" else "cpu")
    with listener.step(f"calibrate on {len(samples.files)} {samples.kind}", total=len(samples.files)) as step:
        for batch in input_batches(model, card, samples, size, by_length=True):
            collector.add(batch)
            step.advance(len(next(iter(batch.values()))))
    statistics = collector.statistics()
    return [
        CalibrationTable(
            method=method,
            model=card.name,
            graph_sha256=model.sha256(ONNX),
            image_set=_set_record(samples),
            transform_sha256=card.preprocessing_sha256,
            ranges={
                name: TensorRange(amax, statistics[name].low, statistics[name].high)
                for name, amax in ranges(statistics, method).items()
            },
        )
        for method in methods
    ]


def quantized_graph(model: Any, table: CalibrationTable, target: "Target") -> tuple[Any, "Placement"]:
    """`model` (FP32) with the table's Q/DQ pairs, its layers in `keep` left alone; the rest still FP32.

    Raises BadInputError where the table keeps a layer or lacks a range that the graph has not or needs.
    """
    from optpipe.backends.onnx_graph import named
    from optpipe.quantize.placement import placement
    from optpipe.quantize.qdq import Range, qdq_from_onnx

    keep = frozenset(table.keep)
    if unknown := sorted(keep - {node.name for node in named(model).graph.node}):
        raise BadInputError(
            f"the calibration table keeps '{unknown[0]}' in floating point, and {table.model}'s graph has no such layer;"
            f" `optpipe calibrate {table.model} --sensitivity` lists its layers"
        )
    placed = placement(model, target, keep.__contains__)
    ranges = {name: Range(each.amax, each.low >= 0) for name, each in table.ranges.items()}
    return qdq_from_onnx(model, placed, ranges), placed
