"""Measures the cost of lowering each layer alone, by comparing the model's outputs with FP32's.

A `Lowering` is INT8 or FP8 by a calibration table, or FP16 by rounding.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.base import Device
from optpipe.backends.onnx_graph import load_onnx, name_nodes
from optpipe.backends.onnx_layers import infer_graph_types
from optpipe.backends.onnx_products import count_node_macs
from optpipe.backends.selections import read_selection
from optpipe.core.card import ModelCard, Task
from optpipe.core.entries import ModelInfo
from optpipe.core.errors import BadInputError, GateError
from optpipe.core.events import UNWATCHED, Listener, ProgressStep
from optpipe.core.files import hash_value
from optpipe.core.precision import (
    EXACT_DB,
    Budget,
    KeptLayer,
    MixedPrecision,
    Precision,
    PrecisionCost,
    make_cost_order,
)
from optpipe.core.records import plain_from_record
from optpipe.core.wording import Argument
from optpipe.evaluate.evaluate import Predictions, align_predictions, predict_samples
from optpipe.evaluate.tasks import TASKS
from optpipe.models.inputs.image_set import NothingJudgedError
from optpipe.models.inputs.sample_set import SampleSet, draw_subset
from optpipe.models.stored_card import read_stored_card
from optpipe.quantize.qdq import CPU_FORMS, Integers, Target, quantize_graph
from optpipe.quantize.ranges import CalibrationTable, open_model_session
from optpipe.stats.paired import CONFIDENCE, compute_output_error, compute_row_errors
from optpipe.workspace.entry import Entry
from optpipe.workspace.environment import get_package_version, list_gpus
from optpipe.workspace.file_names import ONNX
from optpipe.workspace.store import Store


class Fp32Reference:
    """The FP32 graph's predictions on `samples`. Raises BadInputError if its outputs do not fit the task."""

    def __init__(
        self,
        model: Entry[ModelInfo],
        samples: SampleSet,
        step: ProgressStep = UNWATCHED,
        device: Device = "cpu",
    ) -> None:
        self.model, self.samples, self.card, self.device = (
            model,
            samples,
            read_stored_card(model),
            device,
        )
        task = TASKS.get(
            self.card.task, TASKS[Task.CLASSIFICATION]
        )  # without a task the largest output counts
        if self.card.task in TASKS:
            task.require_model(self.card)
        self.task, self.usual_db = task, 0.0
        self.each_db: NDArray[np.float64] = np.zeros(0)
        self.selection = read_selection(model.file(ONNX))
        self.reference = self._predict(load_onnx(model.file(ONNX)), step)
        self.truths: Sequence[Any] | None = None
        with suppress(NothingJudgedError):  # possible in a few samples that were drawn from many
            self.truths = task.read_truths(
                samples, self.card, task.count_classes(self.card) or self.reference.classes
            )

    @property
    def metric(self) -> str:
        """The score that drops, such as `top1`."""
        return "agreement" if self.truths is None else self.task.score

    def measure_cost(self, graph: Any, step: ProgressStep = UNWATCHED) -> PrecisionCost:
        """Also sets `each_db`, the SNR of each sample of the first output, and `usual_db`, their mean."""
        predictions = self._predict(graph, step)
        pairs = self._pair_outputs(predictions)
        snr, self.each_db = None, np.zeros(0)
        if all(expected.size and expected.shape == value.shape for expected, value in pairs):
            errors, rows = (
                [compute_output_error("", *pair).snr_db for pair in pairs],
                compute_row_errors(*pairs[0]),
            )
            snr = min(EXACT_DB if error is None else error for error in errors)
            snr = max(min(round(snr, 2), EXACT_DB), -EXACT_DB)
            with np.errstate(
                divide="ignore", invalid="ignore"
            ):  # FP32's own rounding has about 150 dB
                each_db = np.clip(
                    10 * np.log10(rows["reference_square"] / rows["difference_square"]), -150, 150
                )
            self.each_db = np.nan_to_num(each_db).astype(np.float64)
            self.usual_db = float(self.each_db.mean())
        source = self.reference.values
        truths = self.task.take_as_truths(source) if self.truths is None else self.truths
        cost = (
            self.task.measure_drop(truths, source, predictions.values)
            if self.card.task in TASKS or self.truths
            else None
        )
        return (
            PrecisionCost(snr)
            if cost is None
            else PrecisionCost(snr, cost.value, cost.interval(CONFIDENCE))
        )

    def _predict(self, graph: Any, step: ProgressStep) -> Predictions:
        """The predictions, with the rows of all outputs after the first, and of selected ones."""
        names = [spec.name for spec in self.card.outputs]
        session = open_model_session(graph, self.device)

        def run(batch: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
            return dict(zip(names, session.run(names, batch), strict=True))

        keep = {*names[1:], *self.selection.outputs}
        return predict_samples(self.model, self.card, self.samples, self.task, run, step, keep)

    def _pair_outputs(self, predictions: Predictions) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """FP32's first output and that of `predictions`, (samples, values), then the other floating-point outputs of all samples.

        Rows that the graph selects are sets.
        """
        first = self.card.outputs[0].name
        pairs = [(self.reference.outputs, predictions.outputs)]
        aligned = align_predictions(self.reference, predictions, self.selection)
        for name, value in aligned[0][0].items() if aligned else ():
            if value.dtype.kind != "f":
                continue
            expected, actual = (
                np.concatenate(
                    [_flatten(part[side][name], by_sample=name == first) for part in aligned],
                    axis=0 if name == first else 1,
                )
                for side in (0, 1)
            )
            if name == first:
                pairs[0] = expected, actual
            else:
                pairs.append((expected, actual))
        return pairs


def _flatten(rows: NDArray[Any], *, by_sample: bool) -> NDArray[Any]:
    return rows.reshape(len(rows) if by_sample else 1, -1)


REVISION = 5
RANKING_IMAGES = 128
"""Images of the ranking; the search uses the whole set."""


@dataclass(frozen=True, slots=True)
class MethodsInfo:
    KIND: ClassVar[str] = "methods"

    images: int
    costs: Mapping[str, PrecisionCost]
    best: str


@dataclass(frozen=True, slots=True)
class LayerCost:
    layer: str
    cost: PrecisionCost
    macs: int


@dataclass(frozen=True, slots=True)
class SensitivityInfo:
    """Every layer lowered alone, the costliest first."""

    KIND: ClassVar[str] = "sensitivity"

    images: int
    layers: tuple[LayerCost, ...]
    total_macs: int


LoweredLayers = tuple[tuple[str, ...], Callable[[Collection[str]], Any]]
"""Names of layers in the graph's order, and the function that makes the graph with only some of them in the lower precision."""


@dataclass(frozen=True, slots=True)
class Lowering:
    precision: Precision
    recipe: Mapping[str, Any]
    """The properties that identify it in the store."""
    load: Callable[[], LoweredLayers]
    images: int = RANKING_IMAGES


def lower_by_table(model: Entry[ModelInfo], table: CalibrationTable, target: Target) -> Lowering:
    """INT8, or FP8 for the target `fp8`, by a table without its kept layers."""
    table = replace(table, keep=())

    def load() -> LoweredLayers:
        graph = load_onnx(model.file(ONNX))
        integers: Integers = {}
        layers = quantize_graph(graph, table, target, integers)[1].layers

        def lower(chosen: Collection[str]) -> Any:
            kept = tuple(layer for layer in layers if layer not in chosen)
            return quantize_graph(graph, replace(table, keep=kept), target, integers)[0]

        return layers, lower

    precision = Precision.FP8 if target == "fp8" else Precision.INT8
    return Lowering(precision, {"target": target, "table": table.sha256}, load)


def compare_methods(
    model: Entry[ModelInfo],
    tables: Mapping[str, CalibrationTable],
    samples: SampleSet,
    target: Target,
    store: Store,
    listener: Listener,
    altered: Entry[ModelInfo] | None = None,
) -> tuple[Entry[MethodsInfo], bool]:
    """The store entry `methods`: the cost of every table's graph, against FP32 of `model`.

    The tables may be of its `altered` graph. The best has the highest SNR of all samples plus mean SNR of each.
    """
    device: Device = "cuda" if target not in CPU_FORMS and list_gpus() else "cpu"
    hashes = {method: table.sha256 for method, table in tables.items()}
    recipe = describe_recipe(model, samples) | {
        "target": target,
        "tables": hashes,
        "provider": device,
    }

    def make(_: object) -> MethodsInfo:
        graph, costs, usual = load_onnx((altered or model).file(ONNX)), {}, {}
        integers: Integers = {}
        with listener.step("compare methods", total=(1 + len(tables)) * len(samples.files)) as step:
            against = Fp32Reference(model, samples, step, device)
            for method, table in tables.items():
                costs[method] = against.measure_cost(
                    quantize_graph(graph, table, target, integers)[0], step
                )
                usual[method] = against.usual_db
        order, known = (
            make_cost_order(costs.values()),
            all(cost.snr_db is not None for cost in costs.values()),
        )
        best = max(costs, key=lambda method: order(costs[method]) + known * usual[method])
        return MethodsInfo(len(samples.files), costs, best=best)

    return store.produce(MethodsInfo, recipe, make, parents=(model.id,), listener=listener)


def rank_layers(
    model: Entry[ModelInfo],
    lowering: Lowering,
    samples: SampleSet,
    store: Store,
    listener: Listener,
) -> tuple[Entry[SensitivityInfo], bool]:
    """The store entry `sensitivity`: every layer lowered alone, the costliest first, with its MACs."""
    few = draw_subset(samples, lowering.images)
    recipe = describe_recipe(model, few) | dict(lowering.recipe)

    def make(_: object) -> SensitivityInfo:
        layers, lower = lowering.load()
        title = f"{lowering.precision} in {len(layers)} layers one by one"
        with listener.step(title, total=(1 + len(layers)) * len(few.files)) as step:
            against = Fp32Reference(model, few, step)
            macs = count_layer_macs(load_onnx(model.file(ONNX)), against.card)
            rows = [
                LayerCost(layer, against.measure_cost(lower((layer,)), step), macs.get(layer, 0))
                for layer in layers
            ]
        order = make_cost_order(row.cost for row in rows)
        rows.sort(key=lambda row: order(row.cost))
        return SensitivityInfo(len(few.files), tuple(rows), sum(macs.values()))

    return store.produce(SensitivityInfo, recipe, make, parents=(model.id,), listener=listener)


def count_layer_macs(graph: Any, card: ModelCard) -> dict[str, int]:
    """MACs of every layer that has a known number of them, at the profile's `opt` shapes."""
    name_nodes(graph)
    known = infer_graph_types(graph, card.inputs)
    macs_of = {node.name: count_node_macs(node, known) for node in graph.graph.node}
    return {name: macs for name, macs in macs_of.items() if macs}


def describe_recipe(model: Entry[ModelInfo], samples: SampleSet) -> dict[str, Any]:
    """The store recipe of every figure here, without the lowering."""
    return {
        "revision": REVISION,
        "model": model.id,
        "set": samples.sha256,
        "labels": hash_value([file.label for file in samples.files]),
        "onnxruntime": get_package_version("onnxruntime-gpu"),
    }


# The fewest layers that must stay out of a lower precision for its cost to be within a budget.
#
# A binary search over the ranking finds how many of the costliest must be kept: log2(layers) evaluations of the whole set
# instead of one per layer. The ranking is only made if the precision in all layers exceeds the budget.


@dataclass(frozen=True, slots=True)
class KeptTrial:
    """The graph with the `kept` costliest layers left as they are."""

    kept: int
    macs_share: float
    """Share of the MACs in the lower precision."""
    cost: PrecisionCost


@dataclass(frozen=True, slots=True)
class SelectionInfo:
    """The layers to keep out of a precision for a budget, and the trials of the search."""

    KIND: ClassVar[str] = "selection"

    budget: Budget
    images: int
    metric: str
    keep: tuple[str, ...]
    layers: int
    tried: tuple[KeptTrial, ...]

    @property
    def cost(self) -> PrecisionCost | None:
        """Cost of the chosen layers; None if all are kept, which is FP32."""
        return next((step.cost for step in self.tried if step.kept == len(self.keep)), None)


def select_kept_layers(
    model: Entry[ModelInfo],
    lowering: Lowering,
    samples: SampleSet,
    budget: Budget,
    store: Store,
    listener: Listener,
) -> tuple[Entry[SelectionInfo], bool]:
    """The store entry `selection`: the fewest of the costliest layers of `rank_layers` to keep so that the cost is within `budget`.

    Raises BadInputError if the budget cannot be measured: points of a model without a task or with one prediction for every
    sample, or the SNR of outputs without a common size.
    """
    recipe = (
        describe_recipe(model, samples)
        | dict(lowering.recipe)
        | {"budget": plain_from_record(budget)}
    )

    def make(_: object) -> SelectionInfo:
        (layers, lower), order = lowering.load(), list[str]()
        tried: dict[int, KeptTrial] = {}
        trials = math.ceil(math.log2(len(layers) + 1)) + 1
        title = f"search for the fewest layers to keep out of {lowering.precision}"
        with listener.step(title, total=(1 + trials) * len(samples.files)) as step:
            against = Fp32Reference(model, samples, step)
            macs = count_layer_macs(load_onnx(model.file(ONNX)), against.card)
            for kept in _search_kept_counts(len(layers), tried, budget):
                if kept and not order:
                    ranked, _ = rank_layers(model, lowering, samples, store, listener)
                    order += (row.layer for row in ranked.info.layers)
                low = frozenset(layers) - frozenset(order[:kept])
                share = sum(macs.get(layer, 0) for layer in low) / max(sum(macs.values()), 1)
                tried[kept] = KeptTrial(kept, share, against.measure_cost(lower(low), step))
        chosen = min(
            (kept for kept, trial in tried.items() if budget.allows(trial.cost)),
            default=len(layers),
        )
        return SelectionInfo(
            budget=budget,
            images=len(samples.files),
            metric="snr" if budget.unit == "dB" else against.metric,
            keep=tuple(order[:chosen]) if chosen < len(layers) else layers,
            layers=len(layers),
            tried=tuple(tried[kept] for kept in sorted(tried)),
        )

    return store.produce(SelectionInfo, recipe, make, parents=(model.id,), listener=listener)


def _search_kept_counts(
    count: int, tried: Mapping[int, KeptTrial], budget: Budget
) -> Iterator[int]:
    """How many layers to keep next: none first, then by bisection; keeping all is FP32 and needs no trial."""
    yield 0
    if budget.unit == "points" and tried[0].cost.drop is None:
        raise BadInputError(
            "no drop can be measured: the model predicts the same class for every sample, or its task is not evaluated"
        )
    if budget.unit == "dB" and tried[0].cost.snr_db is None:
        raise BadInputError(
            "the outputs differ in size from those in FP32, so they have no SNR; give points"
        )
    if budget.allows(tried[0].cost):
        return
    fails, holds = 0, count
    while holds - fails > 1:
        middle = (fails + holds) // 2
        yield middle
        if budget.allows(tried[middle].cost):
            holds = middle
        else:
            fails = middle


def require_lowered(selection: SelectionInfo, precision: Precision) -> None:
    """Raises GateError, with a looser budget, if the budget keeps every layer out of `precision`."""
    if not selection.keep or len(selection.keep) < selection.layers:
        return
    budget, points = selection.budget, selection.budget.unit == "points"
    message = (
        Argument("budget", f"{budget.limit:g}{budget.unit}") + f" leaves no layer in {precision}"
    )
    usable = [
        step
        for step in selection.tried
        if step.cost.finite and (points or (step.cost.snr_db or 0.0) >= 0.1)
    ]
    if not usable:
        raise GateError(
            message
            + f": none gives usable outputs; leave {precision} out of "
            + Argument("precision")
        )
    cost, count = usable[0].cost, selection.layers - usable[0].kept
    share = f"{count} of {selection.layers}" if usable[0].kept else f"all {count}"
    worst = (
        math.ceil(1e4 * (cost.drop or 0.0)) / 100
        if points
        else math.floor(10 * (cost.snr_db or 0.0)) / 10
    )
    told = f"costs {worst:g} points" if points else f"has an SNR of {worst:g} dB"
    raise GateError(
        message + f": in {share} layers it {told}",
        remedy="give a looser budget, such as " + Argument("budget", f"{worst:g}{budget.unit}"),
    )


def describe_mixed(
    model: Entry[ModelInfo],
    selection: SelectionInfo,
    ranking: Sequence[LayerCost],
    lowered: Collection[str],
    reasons: Mapping[str, str],
) -> MixedPrecision:
    """The kept layers of a graph within a budget: those of `selection`, those with another reason, and all others with MACs that are
    not `lowered`.
    """
    graph = name_nodes(load_onnx(model.file(ONNX)))
    macs = count_layer_macs(graph, read_stored_card(model))
    ops = {node.name: node.op_type for node in graph.graph.node}
    alone = {row.layer: row.cost for row in ranking}
    told = {}
    for name in selection.keep:
        snr = alone[name].snr_db
        told[name] = (
            "alone changes the size of outputs"
            if snr is None
            else f"alone lowers the SNR to {snr:.1f} dB"
        )
        if not alone[name].finite:
            told[name] = "alone turns outputs into NaN or Inf"
    told |= {name: reason for name, reason in reasons.items() if name in ops and name not in told}
    told |= {
        name: "cannot be converted" for name in macs if name not in lowered and name not in told
    }
    kept = tuple(
        KeptLayer(name, ops[name], macs.get(name, 0), reason) for name, reason in told.items()
    )
    cost = selection.cost or PrecisionCost(EXACT_DB)
    return MixedPrecision(
        selection.budget, selection.metric, selection.images, cost, kept, sum(macs.values())
    )
