"""`build --precision int8 --recover`: which steps win accuracy back, each tried on samples that it did not see.

A step is kept if the SNR of held-out samples rises by more than its interval includes. The ranges of calibration are the first
step; layers left in floating point, by a budget's search, are the last, in `calibrated_graph`.
"""

import hashlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.base import Device
from optpipe.backends.onnx_graph import load_onnx, name_nodes
from optpipe.backends.onnx_products import read_attributes
from optpipe.backends.rewrites import RewriteGuard
from optpipe.core import onnx
from optpipe.core.card import ModelCard
from optpipe.core.entries import ModelInfo, RecoveredInfo, RecoveryStep
from optpipe.core.errors import BadInputError, StageError, escape, first_line
from optpipe.core.events import Listener
from optpipe.core.params import choices_from_text
from optpipe.core.precision import Budget, PrecisionCost
from optpipe.core.records import plain_from_record
from optpipe.core.wording import Argument
from optpipe.models.export.source_graph import make_probe
from optpipe.models.inputs.sample_set import SampleSet, draw_subset
from optpipe.models.inputs.task_data import fit_batch_size, iterate_input_batches
from optpipe.models.stored_card import read_stored_card
from optpipe.quantize.qdq import (
    CPU_FORMS,
    LEVELS,
    SEVEN_BIT_LEVELS,
    Target,
    quantize_graph,
    quantize_weights,
)
from optpipe.quantize.ranges import CalibrationTable, TensorRange, read_table, write_table
from optpipe.quantize.recovery.biases import MeanCounter, correct_biases
from optpipe.quantize.recovery.distillation import Batch, NotLearnedError, distill_graph
from optpipe.quantize.recovery.layers import BATCH, EditedGraph, find_output_axis, iterate_tensors
from optpipe.quantize.recovery.rounding import collect_moments, round_together
from optpipe.quantize.recovery.scaling import Divider, divide_channels, list_scaled_tensors
from optpipe.quantize.recovery.torch_operators import UnknownOperatorError
from optpipe.quantize.sensitivity import Fp32Reference
from optpipe.stats.means import compute_mean_interval
from optpipe.stats.paired import CONFIDENCE
from optpipe.workspace.entry import Entry
from optpipe.workspace.environment import get_package_version, list_gpus
from optpipe.workspace.file_names import CARD, ONNX, TOKENIZER
from optpipe.workspace.store import Store

REVISION = 2
TABLE = "calibration-table.json"
AUTO, NONE = "auto", "none"
LEARNING_SAMPLES = 64
"""Samples from which a step learns; the ranges are of all."""
JUDGE_SHARE = 4
"""One of so many samples is held out to judge, up to `MOST_JUDGES`."""
MOST_JUDGES = 256
FEWEST_JUDGES = 8
DISTILLED_BATCH = 32
MOST_LEARNED_BYTES = 1 << 30
MOST_RESULT_BYTES = 1 << 28
"""Of all layers on one batch; learning holds about ten times as much."""
MOST_INPUTS = 4608
"""Inputs of one output of a layer whose second moments are held in memory: 3 × 3 × 512."""


@dataclass(frozen=True, slots=True)
class Workbench:
    """What a step may use: the graph it changes, the table of its ranges, and samples to learn from."""

    model: Entry[ModelInfo]
    card: ModelCard
    table: CalibrationTable
    target: Target
    samples: SampleSet
    """A few of those that the ranges are of."""
    device: Device
    learn: SampleSet
    """All of them."""
    teacher: Entry[ModelInfo]
    """The model in FP32, with the same tensors as `model`: what no step has moved a weight of."""

    def quantize(self, graph: Any) -> Any:
        return quantize_graph(graph, self.table, self.target)[0]

    def list_layers(self, graph: Any) -> tuple[str, ...]:
        return quantize_graph(graph, self.table, self.target)[1].layers

    def iterate(self, graph: Any, tensors: Sequence[str]) -> Any:
        return iterate_tensors(self.model, self.card, graph, self.samples, tensors, self.device)


class Change(NamedTuple):
    graph: Any
    places: int
    """How many it changed; 0 for none."""
    ranges: Mapping[str, TensorRange] | None = None
    """The ranges that it learned, by tensor."""
    said: str = ""
    """How far it went, or why it changed nothing."""


@dataclass(frozen=True, slots=True)
class Step:
    change: Callable[[Any, Workbench], Change]
    changed: str
    """What it changes, in words: `tensors with balanced channels`."""
    exact: bool
    """Whether the graph computes the same in FP32, so that it is compared, and its ranges are new."""


def balance_channels(kind: Divider) -> Callable[[Any, Workbench], Change]:
    def change(graph: Any, bench: Workbench) -> Change:
        layers = bench.list_layers(graph)
        axes = list_scaled_tensors(graph, kind, layers)
        peaks: dict[str, NDArray[Any]] = {}
        for values in bench.iterate(graph, [*axes]) if axes else ():
            for name, axis in axes.items():
                value = np.abs(values[name])
                peak = np.moveaxis(value, axis, -1).reshape(-1, value.shape[axis]).max(axis=0)
                peaks[name] = np.maximum(peaks.get(name, 0), peak)
        return Change(*divide_channels(graph, kind, layers, peaks))

    return change


def learn_rounding(graph: Any, bench: Workbench) -> Change:
    """`graph` with the weights of its quantized layers on their grids, where rounding to the nearest would put them elsewhere."""
    edited, moments = EditedGraph(graph), dict[str, NDArray[np.float64]]()
    layers = [
        (node, read_attributes(node), weight)
        for node in (edited.nodes[name] for name in bench.list_layers(graph))
        if (weight := edited.read_weight(node)) is not None
        and weight.size // weight.shape[find_output_axis(node)] <= MOST_INPUTS
    ]
    inputs = [node.input[0] for node, _, _ in layers]
    for values in bench.iterate(graph, inputs) if layers else ():
        for node, attributes, weight in layers:
            products = collect_moments(values[node.input[0]], node, attributes, weight)
            if products is not None:
                moments[node.name] = moments.get(node.name, 0) + products

    count = 0
    for node, _, _ in layers:
        if node.name in moments:
            weight = edited.read_weight(node)  # of layers that share one, as the first left it
            made = round_weight(weight, find_output_axis(node), moments[node.name], bench.target)
            if made is not None:
                edited.write(node, 1, made)
                count += 1
    return Change(edited.finish(), count)


def round_weight(
    values: Any, axis: int, moments: NDArray[np.float64], target: Target
) -> NDArray[np.float32] | None:
    """A weight on its grid; None if that gives the integers that rounding to the nearest gives, or another grid.

    `moments` is (groups, inputs, inputs) of the layer's data.
    """
    steps, scale = quantize_weights(values, axis, target)
    outputs = np.moveaxis(values, axis, 0).reshape(len(scale), -1).astype(np.float64)
    nearest = np.moveaxis(steps, axis, 0).reshape(len(scale), -1).astype(np.int32)
    groups = len(moments)
    if len(scale) % groups or outputs.shape[1] != moments.shape[1]:
        return None
    size, rounded = len(scale) // groups, nearest.copy()
    levels = SEVEN_BIT_LEVELS if target == "cpu-7bit" else LEVELS
    wide = scale.astype(np.float64)
    for group in range(groups):
        part = slice(group * size, (group + 1) * size)
        rounded[part] = round_together(
            outputs[part], nearest[part], wide[part], moments[group], levels
        )
    if np.array_equal(rounded, nearest):
        return None
    shape = np.moveaxis(values, axis, 0).shape
    made = np.moveaxis((rounded * wide[:, None]).astype(np.float32).reshape(shape), 0, axis)
    again, same_scale = quantize_weights(made, axis, target)
    kept = np.array_equal(np.moveaxis(again, axis, 0).reshape(rounded.shape), rounded)
    return (
        np.ascontiguousarray(made)
        if kept and np.allclose(same_scale, scale, rtol=1e-6, atol=0)
        else None
    )


def _choose_batch(bench: Workbench, graph: Any) -> int:
    """Up to `DISTILLED_BATCH` samples, whose layers' results stay inside `MOST_RESULT_BYTES`."""
    edited = EditedGraph(graph)
    results = [edited.nodes[name].output[0] for name in bench.list_layers(graph)]
    values = next(iter(bench.iterate(graph, results)))
    sample_bytes = sum(value.nbytes for value in values.values()) / BATCH
    room = MOST_RESULT_BYTES * (16 if bench.device == "cuda" else 1)
    return max(1, min(DISTILLED_BATCH, int(room / max(sample_bytes, 1))))


def correct_means(graph: Any, bench: Workbench) -> Change:
    def measure(graph: Any, axes: Mapping[str, int]) -> Mapping[str, NDArray[np.float64]]:
        counter = MeanCounter(axes)
        for values in bench.iterate(graph, [*axes]):
            counter.add(values)
        return counter.means()

    return Change(*correct_biases(graph, bench.list_layers(graph), bench.quantize, measure))


def distill(graph: Any, bench: Workbench) -> Change:
    """`graph` with weights, biases, and ranges learned from the FP32 network; unchanged if it cannot be learned here."""
    _, placed = quantize_graph(graph, bench.table, bench.target)
    if not placed.layers:
        return Change(graph, 0)
    teacher = name_nodes(load_onnx(bench.teacher.file(ONNX)))
    try:
        made = distill_graph(
            graph, teacher, placed, bench.table.ranges, _draw_batches(bench, graph), bench.device
        )
    except (UnknownOperatorError, NotLearnedError) as error:
        return Change(graph, 0, said=f"not run: {escape(first_line(error))[:100]}")
    return Change(made.graph, made.layers, made.ranges, f"{made.steps} steps")


def _draw_batches(bench: Workbench, graph: Any) -> list[Batch]:
    """The samples that are learned from in batches, as many as `MOST_LEARNED_BYTES` holds."""
    batches, held = list[Batch](), 0
    size = fit_batch_size(bench.card, _choose_batch(bench, graph))
    for batch, _ in iterate_input_batches(bench.model, bench.card, bench.learn, size):
        held += sum(array.nbytes for array in batch.values())
        if batches and held > MOST_LEARNED_BYTES:
            break
        batches.append(batch)
    return batches


STEPS: Mapping[str, Step] = {
    "equalize": Step(
        balance_channels("layer"), "tensors between layers with balanced channels", exact=True
    ),
    "smoothquant": Step(
        balance_channels("normalization"),
        "tensors behind normalizations with balanced channels",
        exact=True,
    ),
    "rounding": Step(learn_rounding, "weights rounded together", exact=False),
    "bias": Step(correct_means, "corrected biases", exact=False),
    "distill": Step(distill, "layers with learned weights and ranges", exact=False),
}
"""In the order in which they are tried: a correction of biases comes after the rounding whose shift it corrects."""


def steps_from_text(text: str | None) -> tuple[str, ...]:
    """Reads `--recover`: `auto` is all steps, `none` is none of them."""
    if text is None or text.strip() == NONE:
        return ()
    chosen = choices_from_text(text, [AUTO, NONE, *STEPS], "recover")
    return tuple(name for name in STEPS if AUTO in chosen or name in chosen)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What the Q/DQ pairs are put into: the model itself if no step helped."""

    source: Entry[ModelInfo]
    table: CalibrationTable
    steps: tuple[RecoveryStep, ...]
    parents: tuple[str, ...]


def recover_accuracy(
    model: Entry[ModelInfo],
    names: Sequence[str],
    samples: SampleSet,
    target: Target,
    budget: Budget | None,
    calibrate: Callable[[Entry[ModelInfo], SampleSet], CalibrationTable],
    store: Store,
    listener: Listener,
) -> Recovered:
    """Tries the steps `names` one after the other, and stops where the `budget` holds.

    `calibrate` gives the best table of an entry. Raises BadInputError for too few samples.
    """
    judge, learn = split_samples(samples)
    device: Device = "cuda" if target not in CPU_FORMS and list_gpus() else "cpu"
    recipe = {
        "revision": REVISION,
        "model": model.id,
        "steps": list(names),
        "set": samples.sha256,
        "labels": [file.label for file in samples.files],
        "target": target,
        "budget": None if budget is None else plain_from_record(budget),
        "provider": device,
        "tools": {name: get_package_version(name) for name in ("onnx", "onnxruntime-gpu")},
    }

    def make(directory: Path) -> RecoveredInfo:
        recovered = _try_steps(
            model, names, judge, learn, target, budget, calibrate, device, store, listener
        )
        _write_entry(directory, recovered.source, load_onnx(recovered.source.file(ONNX)))
        write_table(directory / TABLE, recovered.table)
        return _describe(model, recovered.steps)

    entry, _ = store.produce(RecoveredInfo, recipe, make, parents=(model.id,), listener=listener)
    table, helped = read_table(entry.file(TABLE)), any(step.kept for step in entry.info.steps[1:])
    source = as_model(entry) if helped else model
    return Recovered(source, table, entry.info.steps, (entry.id,))


def as_model(entry: Entry[RecoveredInfo]) -> Entry[ModelInfo]:
    """An altered graph where a model is expected, whose record it extends."""
    return cast("Entry[ModelInfo]", entry)


def split_samples(samples: SampleSet) -> tuple[SampleSet, SampleSet]:
    """The samples that judge, and those that the steps learn from. Raises BadInputError for too few."""
    count = min(MOST_JUDGES, len(samples.files) // JUDGE_SHARE)
    if count < FEWEST_JUDGES:
        raise BadInputError(
            Argument("recover")
            + f" holds out one calibration sample in {JUDGE_SHARE} to judge its steps, and {len(samples.files)} are too few",
            remedy=f"give {JUDGE_SHARE * FEWEST_JUDGES} or more with "
            + Argument("calibration")
            + ", or leave "
            + Argument("recover")
            + " out",
        )
    judge = draw_subset(samples, count)
    judging = {*judge.files}
    return judge, replace(
        samples, files=tuple(file for file in samples.files if file not in judging)
    )


class _Judge:
    """The SNR of quantized graphs on the held-out samples, against the model's own FP32 graph."""

    def __init__(self, model: Entry[ModelInfo], samples: SampleSet, device: Device) -> None:
        self._reference = Fp32Reference(model, samples, device=device)

    def measure(self, graph: Any) -> tuple[PrecisionCost, NDArray[np.float64]]:
        """The cost, and the SNR of each sample in dB."""
        cost = self._reference.measure_cost(graph)
        return cost, self._reference.each_db


def _try_steps(
    model: Entry[ModelInfo],
    names: Sequence[str],
    judging: SampleSet,
    learn: SampleSet,
    target: Target,
    budget: Budget | None,
    calibrate: Callable[[Entry[ModelInfo], SampleSet], CalibrationTable],
    device: Device,
    store: Store,
    listener: Listener,
) -> Recovered:
    started, judge = time.monotonic(), _Judge(model, judging, device)
    source, table, teacher = model, calibrate(model, learn), model
    cost, each_db = judge.measure(quantize_graph(load_onnx(model.file(ONNX)), table, target)[0])
    steps = [_describe_ranges(table, cost, time.monotonic() - started)]
    confidence = 1 - (1 - CONFIDENCE) / max(len(names), 1)
    for name in names:
        if budget is not None and budget.allows(cost):
            break
        started, step = time.monotonic(), STEPS[name]
        with listener.step(f"recover: {name}"):
            few = draw_subset(learn, LEARNING_SAMPLES)
            bench = Workbench(
                source, read_stored_card(source), table, target, few, device, learn, teacher
            )
            before = name_nodes(load_onnx(source.file(ONNX)))
            change = step.change(before, bench)
            if not change.places:
                seconds, said = time.monotonic() - started, change.said or "nothing to change"
                steps.append(RecoveryStep(name, said, cost.snr_db, seconds=seconds))
                continue
            if step.exact:
                _require_same(source, before, change.graph, name)
            altered = _store_altered(source, change.graph, name, table, few, store, listener)
            new = (
                calibrate(altered, learn)
                if step.exact
                else replace(
                    table,
                    graph_sha256=altered.sha256(ONNX),
                    ranges={**table.ranges, **(change.ranges or {})},
                )
            )
            altered_cost, rows = judge.measure(
                quantize_graph(load_onnx(altered.file(ONNX)), new, target)[0]
            )
            gain, interval = compare_samples(each_db, rows, confidence)
            helps = interval is not None and interval[0] > 0 and altered_cost.finite
            seconds = time.monotonic() - started
            steps.append(
                RecoveryStep(
                    name,
                    f"{change.places} {step.changed}" + (f", {change.said}" if change.said else ""),
                    altered_cost.snr_db,
                    gain,
                    interval,
                    altered_cost.drop,
                    altered_cost.drop_ci,
                    seconds,
                    helps,
                )
            )
            if helps:
                source, table, cost, each_db = altered, new, altered_cost, rows
                teacher = altered if step.exact else teacher
    return Recovered(source, table, tuple(steps), ())


def _describe_ranges(table: CalibrationTable, cost: PrecisionCost, seconds: float) -> RecoveryStep:
    return RecoveryStep(
        "ranges",
        f"by {table.method}",
        cost.snr_db,
        None,
        None,
        cost.drop,
        cost.drop_ci,
        seconds,
        True,
    )


def compare_samples(
    before: NDArray[np.float64], after: NDArray[np.float64], confidence: float
) -> tuple[float | None, tuple[float, float] | None]:
    """The mean rise of the samples' SNR in dB, and its interval by Student's t; None if they cannot be compared."""
    if before.size != after.size or not before.size:
        return None, None
    rise = after - before
    return float(rise.mean()), compute_mean_interval(rise.tolist(), confidence)


def _require_same(source: Entry[ModelInfo], before: Any, after: Any, name: str) -> None:
    """Raises StageError if a step that only moves factors changes what the graph computes in FP32."""
    guard = RewriteGuard(make_probe(read_stored_card(source), before))
    if (difference := guard.find_difference(before, after)) is not None:
        raise StageError(
            f"{name} changes what {source.info.name} computes in FP32: {difference}",
            remedy="leave it out of "
            + Argument("recover")
            + ", and report the model: this is a fault of optpipe",
        )


def _store_altered(
    source: Entry[ModelInfo],
    graph: Any,
    name: str,
    table: CalibrationTable,
    samples: SampleSet,
    store: Store,
    listener: Listener,
) -> Entry[ModelInfo]:
    recipe = {
        "revision": REVISION,
        "model": source.id,
        "step": name,
        "table": table.sha256,
        "set": samples.sha256,
        "graph": hashlib.sha256(graph.SerializeToString(deterministic=True)).hexdigest(),
    }

    def make(directory: Path) -> RecoveredInfo:
        _write_entry(directory, source, graph)
        return _describe(source, ())

    entry, _ = store.produce(RecoveredInfo, recipe, make, parents=(source.id,), listener=listener)
    return as_model(entry)


def _write_entry(directory: Path, source: Entry[ModelInfo], graph: Any) -> None:
    onnx.save(graph, directory / ONNX)
    for file in (CARD, TOKENIZER):
        if source.file(file).is_file():
            shutil.copyfile(source.file(file), directory / file)


def _describe(source: Entry[ModelInfo], steps: tuple[RecoveryStep, ...]) -> RecoveredInfo:
    own = source.info
    return RecoveredInfo(
        name=own.name,
        source=own.source,
        weights=own.weights,
        simplified=own.simplified,
        own_precision=None,
        card=own.card,
        steps=steps,
    )
