"""FP16 and BF16 graphs by ModelOpt's AutoCast, and FP16 within a budget: the layers that exceed it stay in FP32."""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.backends.onnx_graph import (
    GraphTypes,
    drop_unknown_sizes,
    infer_graph_types,
    iterate_graphs,
    iterate_nodes,
    name_nodes,
)
from optpipe.core.card import InputSpec, card_from_file
from optpipe.core.entries import GraphInfo, ModelInfo, ReferenceInfo
from optpipe.core.errors import GateError, OptpipeError, StageError, escape, first_line
from optpipe.core.events import Listener
from optpipe.core.precision import Budget, Precision
from optpipe.core.process import redirect_output
from optpipe.models.export.exported import reference_from_file
from optpipe.workspace.entry import Entry
from optpipe.workspace.environment import get_package_version
from optpipe.workspace.file_names import CARD, MODELOPT_LOG, ONNX, REFERENCE
from optpipe.workspace.store import Store

if TYPE_CHECKING:
    from optpipe.models.inputs.sample_set import SampleSet
    from optpipe.quantize.sensitivity import LoweredLayers, Lowering

REVISION = 2
FP16_HEADROOM = 65504 / 8
"""Layers whose values come within three bits of FP16's largest number on the reference inputs stay in FP32."""
BF16_OPSET = 22
"""The first opset whose Conv takes BF16."""
SOURCE = "source.onnx"
FP16_RANKING_IMAGES = 16
"""Few, since a graph has several times more nodes than layers for INT8."""


def convert_to_half(
    precision: Precision, model: Entry[ModelInfo], reference: Entry[ReferenceInfo], store: Store, listener: Listener
) -> tuple[Entry[GraphInfo], bool]:
    """The store entry `graph` in FP16 or BF16; nodes whose values leave FP16's range on the reference inputs stay in FP32."""
    recipe = _describe_recipe(precision, model, reference)

    def make(directory: Path) -> GraphInfo:
        _convert(precision, model, reference, directory, ())
        return GraphInfo(precision, tool="modelopt.onnx.autocast")

    return store.produce(GraphInfo, recipe, make, parents=(model.id, reference.id), listener=listener)


def convert_within_budget(
    budget: Budget,
    model: Entry[ModelInfo],
    reference: Entry[ReferenceInfo],
    data: Path | None,
    store: Store,
    listener: Listener,
) -> tuple[Entry[GraphInfo], bool]:
    """The store entry `graph` in FP16 with the fewest layers in FP32 that keep its cost within `budget`.

    The cost is measured on `data`, the card's calibration set, or the reference inputs. Raises GateError if ModelOpt converts a
    layer that the search kept.
    """
    from optpipe.quantize.sensitivity import describe_mixed, rank_layers, require_lowered, select_kept_layers

    base, _ = convert_to_half(Precision.FP16, model, reference, store, listener)
    samples = _choose_samples(model, reference, data, budget, listener)
    lowering = lower_to_half(model, base)
    selection, _ = select_kept_layers(model, lowering, samples, budget, store, listener)
    require_lowered(selection.info, Precision.FP16)
    recipe = {**_describe_recipe(Precision.FP16, model, reference), "selection": selection.id}

    def make(directory: Path) -> GraphInfo:
        import onnx

        kept = selection.info.keep
        reasons = _convert(Precision.FP16, model, reference, directory, kept)
        half = find_half_nodes(onnx.load(directory / ONNX), card_from_file(model.file(CARD)).inputs)
        if wrong := sorted(half & frozenset(kept)):
            raise GateError(f"ModelOpt converts {escape(wrong[0])} to fp16 although the budget keeps it in fp32")
        ranking = rank_layers(model, lowering, samples, store, listener)[0].info.layers if kept else ()
        mixed = describe_mixed(model, selection.info, ranking, half, reasons)
        return GraphInfo(Precision.FP16, tool="modelopt.onnx.autocast", mixed=mixed)

    parents = (model.id, reference.id, base.id, selection.id)
    return store.produce(GraphInfo, recipe, make, parents=parents, listener=listener)


def lower_to_half(model: Entry[ModelInfo], base: Entry[GraphInfo]) -> "Lowering":
    """FP16 by rounding, in the nodes that are FP16 in the converted graph `base`."""
    from optpipe.quantize.sensitivity import Lowering

    def load() -> "LoweredLayers":
        import onnx

        inputs = card_from_file(model.file(CARD)).inputs
        graph = name_nodes(onnx.load(model.file(ONNX)))
        half, known = find_half_nodes(onnx.load(base.file(ONNX)), inputs), infer_graph_types(graph, inputs)
        layers = tuple(node.name for node in graph.graph.node if node.name in half)
        return layers, lambda names: round_nodes(graph, names, known)

    return Lowering(Precision.FP16, {"graph": base.id}, load, FP16_RANKING_IMAGES)


def _choose_samples(
    model: Entry[ModelInfo], reference: Entry[ReferenceInfo], data: Path | None, budget: Budget, listener: Listener
) -> "SampleSet":
    from optpipe.models.inputs.tensor_set import tensor_set_from_parts
    from optpipe.quantize.calibrate import load_calibration_data

    card = card_from_file(model.file(CARD))
    if data is not None or "calibration" in card.data:
        return load_calibration_data(model, data, None, 0, listener, reference.info.held_out)[0]
    found = reference_from_file(reference.file(REFERENCE))
    labels = (
        None if found.labels is None else [card.labels[each] if card.labels else str(each) for each in found.labels]
    )
    samples = tensor_set_from_parts("reference", [found.inputs], labels or ())
    if budget.unit == "points" and 100 / len(samples.files) > budget.limit:
        listener.warn(
            f"the budget of {budget} is checked on {len(samples.files)} samples, where one prediction is {100 / len(samples.files):.2g}"
            " points; --calibration gives more"
        )
    return samples


def _describe_recipe(precision: Precision, model: Entry[ModelInfo], reference: Entry[ReferenceInfo]) -> dict[str, Any]:
    tools = {name: get_package_version(name) for name in ("nvidia-modelopt", "onnx", "onnxruntime-gpu")}
    return {
        "revision": REVISION,
        "model": model.id,
        "precision": str(precision),
        "tools": tools,
        "ranges": reference.id,
    }


def _convert(
    precision: Precision, model: Entry[ModelInfo], reference: Entry[ReferenceInfo], directory: Path, kept: Sequence[str]
) -> dict[str, str]:
    """Writes the converted graph into `directory`. Returns why ModelOpt left nodes in FP32, by node."""
    import onnx
    from modelopt.onnx.autocast import convert_to_mixed_precision
    from polygraphy.json import save_json

    from optpipe.models.inputs.rows import split_batches

    directory = directory.resolve()
    samples, card = directory / "samples.json", card_from_file(model.file(CARD))
    rows = reference_from_file(reference.file(REFERENCE)).inputs
    save_json([batch for batch, _ in split_batches(card, rows)], str(samples))
    source = name_nodes(onnx.load(model.file(ONNX)))
    own = next(each.version for each in source.opset_import if each.domain in ("", "ai.onnx"))
    if precision is Precision.BF16 and own < BF16_OPSET:
        source = onnx.version_converter.convert_version(source, BF16_OPSET)
    onnx.save(source, directory / SOURCE)
    with redirect_output(directory / MODELOPT_LOG), _convert_in(card.name, precision, directory):
        graph = convert_to_mixed_precision(
            str(directory / SOURCE),
            low_precision_type=str(precision),
            nodes_to_exclude=[f"{re.escape(name)}$" for name in kept],
            keep_io_types=True,
            data_max=FP16_HEADROOM,
            calibration_data=str(samples),
        )
    samples.unlink()
    (directory / SOURCE).unlink()
    onnx.save(drop_unknown_sizes(graph), directory / ONNX)
    found, log = {}, (directory / MODELOPT_LOG).read_text(encoding="utf-8", errors="replace")
    for name, why in re.findall(r"Skipping node (.+?): (.*)", log):
        if name not in kept:
            range_of = "weights" if "initializer" in why else "values" if "reference IO" in why else None
            found[name] = f"its {range_of} come near the end of FP16's range" if range_of else "by a rule of ModelOpt"
    return found


@contextmanager
def _convert_in(name: str, precision: Precision, directory: Path) -> Iterator[None]:
    """Runs in `directory`, where ModelOpt leaves files. ModelOpt's errors become a StageError with its last message."""
    try:
        with chdir(directory):
            yield
    except OptpipeError:
        raise
    except Exception as error:
        said = re.findall(r"ERROR[\s:-]+(.+)", (directory / MODELOPT_LOG).read_text(encoding="utf-8", errors="replace"))
        reason = escape(said[-1]) if said else f"{type(error).__name__}: {first_line(error)}"
        raise StageError(
            f"ModelOpt cannot convert {name} to {precision}: {reason[:240]}\n"
            f"leave {precision} out of --precision, or give an ONNX file that is in {precision} already"
        ) from error
    finally:
        for left in (*directory.glob("*.data"), *directory.glob("sym_shape_infer*")):
            left.unlink()


# FP16 in chosen nodes of an FP32 graph, for any runtime: their data and results are rounded to FP16.
#
# Products add up in FP32, as on Tensor Cores. ONNX Runtime's CPU provider cannot do this: it has few FP16 kernels,
# computes in FP32 without them, and drops the casts between such nodes, so that nothing would ever overflow.


def round_nodes(model: Any, names: Collection[str], known: GraphTypes) -> Any:
    """A copy of `model` (FP32) whose nodes in `names` read and write values rounded to FP16.

    `known` holds the types of its tensors.
    """
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for number, graph in enumerate(iterate_graphs(copy.graph)):
        _round_graph(graph, frozenset(names), known, f"_half{number}")
    return copy


def _round_graph(graph: Any, names: Collection[str], known: GraphTypes, suffix: str) -> None:
    nodes: list[Any] = []
    rounded: dict[str, str] = {}
    for node in graph.node:
        if node.name not in names:
            nodes.append(node)
            continue
        for position, name in enumerate(node.input):
            if known.types.get(name) != "fp32":
                continue
            if name not in rounded:
                rounded[name] = f"{name}{suffix}"
                nodes += _make_casts(name, rounded[name])
            node.input[position] = rounded[name]
        nodes.append(node)
        for position, name in enumerate(node.output):
            if name and known.types.get(name) == "fp32":
                node.output[position] = f"{name}{suffix}_exact"
                nodes += _make_casts(node.output[position], name)
                rounded[name] = name
    del graph.node[:]
    graph.node.extend(nodes)


def _make_casts(source: str, target: str) -> list[Any]:
    from onnx import TensorProto, helper

    half = f"{target}_in_half"
    return [
        helper.make_node("Cast", [source], [half], name=f"{half}_cast", to=TensorProto.FLOAT16),
        helper.make_node("Cast", [half], [target], name=f"{target}_back_cast", to=TensorProto.FLOAT),
    ]


def find_half_nodes(converted: Any, inputs: Sequence[InputSpec]) -> frozenset[str]:
    """The nodes of a converted graph, except casts, that read or write FP16."""
    known = infer_graph_types(converted, inputs)
    return frozenset(
        node.name
        for node in iterate_nodes(converted.graph)
        if node.op_type != "Cast" and any(known.types.get(name) == "fp16" for name in (*node.input, *node.output))
    )
