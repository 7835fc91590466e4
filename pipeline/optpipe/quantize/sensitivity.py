"""Which layers INT8 hurts, and the fewest that have to stay in floating point for a drop inside a budget.

Each layer is quantized alone and the model's output held against FP32: that ranks them. Of the ranking, a binary search
finds how many of the worst must be spared; it takes log2(layers) evaluations of the whole set instead of one per layer.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from optpipe.core.card import ModelCard, card_from_file
from optpipe.core.events import Listener
from optpipe.core.hashing import hash_value
from optpipe.errors import BadInputError
from optpipe.evaluate.evaluate import EVALUATION_BATCH, Predictions, predictions_from_scores
from optpipe.inputs.rows import to_rows
from optpipe.inputs.sample_set import SampleSet, draw_subset
from optpipe.inputs.task_data import find_label_indices, fit_batch_size, iterate_input_batches
from optpipe.quantize.calibrate import quantize_graph
from optpipe.quantize.table import CalibrationTable
from optpipe.stats.paired import compute_difference_interval
from optpipe.workspace.environment import get_package_version
from optpipe.workspace.file_names import CARD, ONNX
from optpipe.workspace.store import Entry, Store

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe.quantize.placement import Target

REVISION = 1
RANKING_IMAGES = 128
"""Images that the ranking is made on; the search uses the whole set."""
EXACT_DB = 200.0
"""Stands for an output equal to the bit."""


@dataclass(frozen=True, eq=False)
class Fp32Reference:
    """The FP32 graph's answers on some samples, which quantized graphs are held against."""

    model: Entry
    card: ModelCard
    samples: SampleSet
    reference: Predictions
    labels: "NDArray[np.int64] | None"

    def outcome(self, graph: Any) -> dict[str, Any]:
        """SNR of the first output, and the drop with its interval: of accuracy, or of agreement where labels are missing.

        The drop is None where the reference gives every image the same class: then neither would prove anything.
        """
        found = predictions_from_scores(_compute_scores(graph, self.model, self.card, self.samples))
        error = float(np.sum((found.scores.astype(np.float64) - self.reference.scores) ** 2))
        power = float(np.sum(self.reference.scores.astype(np.float64) ** 2))
        snr = EXACT_DB if error == 0 else 10 * math.log10(max(power, 1e-300) / error)
        record: dict[str, Any] = {"snr_db": min(round(snr, 2), EXACT_DB), "drop": None, "drop_ci": None}
        if np.unique(self.reference.top1).size > 1:
            truth = self.reference.top1 if self.labels is None else self.labels
            was, now = self.reference.top1 == truth, found.top1 == truth
            lost, won, n = int((was & ~now).sum()), int((now & ~was).sum()), len(truth)
            record |= {"drop": (lost - won) / n, "drop_ci": compute_difference_interval(lost, won, n).to_list()}
        return record


def run_fp32_reference(model: Entry, samples: SampleSet) -> Fp32Reference:
    """Runs the FP32 graph over `samples`."""
    import onnx

    card = card_from_file(model.file(CARD))
    reference = predictions_from_scores(_compute_scores(onnx.load(model.file(ONNX)), model, card, samples))
    return Fp32Reference(model, card, samples, reference, find_label_indices(samples, card, reference.scores.shape[1]))


def _compute_scores(graph: Any, model: Entry, card: ModelCard, samples: SampleSet) -> "NDArray[Any]":
    from optpipe.quantize.collect import open_model_session

    session = open_model_session(graph)
    name = card.outputs[0].name
    size = fit_batch_size(card, EVALUATION_BATCH)
    parts = [
        to_rows(session.run([name], batch)[0], card.outputs[0].batch, count)[:count]
        for batch, count in iterate_input_batches(model, card, samples, size)
    ]
    scores = np.concatenate(parts)
    return scores.reshape(len(scores), -1)


def compare_methods(
    model: Entry,
    tables: Mapping[str, CalibrationTable],
    samples: SampleSet,
    target: "Target",
    store: Store,
    listener: Listener,
) -> tuple[Entry, bool]:
    """The store entry `methods`: what the INT8 graph of every table does to the outputs on at most RANKED_ON images."""
    few = draw_subset(samples, RANKING_IMAGES)
    recipe = _recipe(model, few, target) | {
        "tables": {method: hash_value(table.to_json()) for method, table in tables.items()}
    }

    def make(_: object) -> Mapping[str, Any]:
        import onnx

        against, graph, outcomes = run_fp32_reference(model, few), onnx.load(model.file(ONNX)), {}
        with listener.step("compare methods", total=len(tables)) as step:
            for method, table in tables.items():
                outcomes[method] = against.outcome(quantize_graph(graph, table, target)[0])
                step.advance()
        best = max(outcomes, key=lambda method: outcomes[method]["snr_db"])
        return {"images": len(few.files), "outcomes": outcomes, "best": best}

    return store.produce("methods", recipe, make, parents=(model.id,), listener=listener)


def rank_layers(
    model: Entry, table: CalibrationTable, samples: SampleSet, target: "Target", store: Store, listener: Listener
) -> tuple[Entry, bool]:
    """The store entry `sensitivity`: every INT8 layer quantized alone, the costliest first, with its multiply-adds."""
    few = draw_subset(samples, RANKING_IMAGES)
    recipe = _recipe(model, few, target) | {"table": hash_value(replace(table, keep=()).to_json())}

    def make(_: object) -> Mapping[str, Any]:
        import onnx

        graph = onnx.load(model.file(ONNX))
        against = run_fp32_reference(model, few)
        macs = count_layer_macs(graph, against.card)
        layers = quantize_graph(graph, replace(table, keep=()), target)[1].layers
        rows = []
        with listener.step(f"quantize {len(layers)} layers one by one", total=len(layers)) as step:
            for layer in layers:
                alone = replace(table, keep=tuple(other for other in macs if other != layer))
                rows.append({"layer": layer, **against.outcome(quantize_graph(graph, alone, target)[0])})
                rows[-1]["macs"] = macs[layer]
                step.advance()
        rows.sort(key=lambda row: row["snr_db"])
        return {"images": len(few.files), "layers": rows, "total_macs": sum(macs.values())}

    return store.produce("sensitivity", recipe, make, parents=(model.id,), listener=listener)


def select_float_layers(
    model: Entry,
    table: CalibrationTable,
    ranking: Sequence[Mapping[str, Any]],
    samples: SampleSet,
    budget: float,
    target: "Target",
    store: Store,
    listener: Listener,
) -> tuple[Entry, bool]:
    """The store entry `selection`: the fewest of the ranking's first layers to keep so that the drop is within `budget`.

    Raises BadInputError where no drop can be measured: the model gives every image the same class.
    """
    recipe = _recipe(model, samples, target) | {
        "table": hash_value(replace(table, keep=()).to_json()),
        "ranking": [row["layer"] for row in ranking],
        "budget": budget,
    }

    def make(_: object) -> Mapping[str, Any]:
        import onnx

        graph, against = onnx.load(model.file(ONNX)), run_fp32_reference(model, samples)
        macs = count_layer_macs(graph, against.card)
        order = [str(row["layer"]) for row in ranking]
        tried: dict[int, dict[str, Any]] = {}

        def outcome(kept: int) -> dict[str, Any]:
            keep = frozenset(order[:kept])
            made, placed = quantize_graph(graph, replace(table, keep=tuple(order[:kept])), target)
            share = sum(macs[layer] for layer in placed.layers if layer not in keep) / max(sum(macs.values()), 1)
            return {"kept": kept, "int8_macs_share": share, **against.outcome(made)}

        steps = math.ceil(math.log2(len(order) + 1)) + 1
        with listener.step("search for the fewest layers to keep in floating point", total=steps) as step:
            for kept in _search_kept_counts(len(order), tried, budget):
                tried[kept] = outcome(kept)
                step.advance()
        chosen = min((k for k, found in tried.items() if found["drop"] <= budget), default=len(order))
        return {
            "budget": budget,
            "images": len(samples.files),
            "metric": "agreement" if against.labels is None else "top1",
            "keep": order[:chosen],
            "layers": len(order),
            "tried": [tried[kept] for kept in sorted(tried)],
        }

    return store.produce("selection", recipe, make, parents=(model.id,), listener=listener)


def _search_kept_counts(count: int, tried: Mapping[int, Mapping[str, Any]], budget: float) -> Iterator[int]:
    """How many layers to keep next: none first, then by halving; keeping all is FP32 and needs no trial."""
    yield 0
    if tried[0]["drop"] is None:
        raise BadInputError(
            "the model predicts the same class for every calibration image, so no accuracy drop can be measured"
        )
    if tried[0]["drop"] <= budget:
        return
    fails, holds = 0, count
    while holds - fails > 1:
        middle = (fails + holds) // 2
        yield middle
        if tried[middle]["drop"] <= budget:
            holds = middle
        else:
            fails = middle


def count_layer_macs(graph: Any, card: ModelCard) -> dict[str, int]:
    """Multiply-adds of every layer that has some, at the profile's `opt` shapes."""
    from optpipe.backends.onnx_graph import count_node_macs, infer_graph_types, name_nodes

    name_nodes(graph)
    known = infer_graph_types(graph, card.inputs)
    found = {node.name: count_node_macs(node, known) for node in graph.graph.node}
    return {name: macs for name, macs in found.items() if macs}


def _recipe(model: Entry, samples: SampleSet, target: "Target") -> dict[str, Any]:
    return {
        "revision": REVISION,
        "model": model.id,
        "set": samples.sha256,
        "target": target,
        "onnxruntime": get_package_version("onnxruntime-gpu"),
    }
