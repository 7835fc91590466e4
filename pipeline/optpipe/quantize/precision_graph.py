"""Puts a precision into the ONNX graph: casts by ModelOpt's AutoCast, Q/DQ nodes from a calibration table, or the model's types.

FP16 within a budget leaves the layers that exceed it in FP32. TensorRT 11 takes the types of the graph; no builder flag changes them.
"""

import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.backends.base import Device
from optpipe.backends.graph_names import NameGiver, PlainNames, iterate_graphs
from optpipe.backends.onnx_graph import (
    expose_tensors,
    iterate_nodes,
    load_onnx,
    name_nodes,
    replace_nodes,
)
from optpipe.backends.onnx_layers import infer_graph_types
from optpipe.backends.onnx_products import GraphTypes
from optpipe.backends.rewrites import ROUNDING_FACTOR, RewriteGuard, require_same
from optpipe.core import np, onnx
from optpipe.core.card import InputSpec, ModelCard
from optpipe.core.entries import GraphInfo, ModelInfo, ReferenceInfo
from optpipe.core.errors import BadInputError, GateError, OptpipeError, StageError, escape
from optpipe.core.events import Listener
from optpipe.core.precision import BUDGETED, CALIBRATED, Budget, Precision, QdqForm
from optpipe.core.wording import Argument
from optpipe.models.export.exported import reference_from_file
from optpipe.models.export.opsets import needs_conversion, raise_opset, read_opset
from optpipe.models.export.source_graph import make_probe, require_raised_opset
from optpipe.models.inputs.rows import split_batches
from optpipe.models.inputs.sample_set import SampleSet
from optpipe.models.inputs.tensor_set import tensor_set_from_parts
from optpipe.models.sources.onnx_file import check_graph
from optpipe.models.stored_card import read_stored_card
from optpipe.quantize.given_pairs import place_given_pairs
from optpipe.quantize.modelopt import convert_by_modelopt
from optpipe.stats.paired import TOLERATED_RELATIVE_ERROR
from optpipe.workspace.entry import Entry
from optpipe.workspace.environment import get_package_version
from optpipe.workspace.file_names import MODELOPT_LOG, ONNX, REFERENCE
from optpipe.workspace.store import Store

if TYPE_CHECKING:
    from optpipe.models.inputs.rows import Arrays
    from optpipe.quantize.sensitivity import LoweredLayers, Lowering


def convert_to_precision(
    precision: Precision,
    device: Device,
    model: Entry[ModelInfo],
    reference: Entry[ReferenceInfo],
    calibration: Path | None,
    store: Store,
    listener: Listener,
    budget: Budget | None = None,
    half: bool = True,
    form: QdqForm | None = None,
    recover: Sequence[str] = (),
) -> tuple[Entry[ModelInfo] | Entry[GraphInfo], bool]:
    """The entry whose `model.onnx` has `precision`; FP32 and TF32 are the exported graph.

    INT8 and FP8 need the `form` of Q/DQ pairs that the backend wants. The other layers of an INT8 graph in TensorRT's form are
    FP16 if `half` is set; otherwise they are FP32.
    With a `budget`, FP16, INT8 and FP8 leave out the layers that exceed it. TF32 only allows the runtime other FP32 products,
    so it has no graph.
    """
    if (own := model.info.own_precision) is not None:
        if recover and precision is Precision.INT8:
            raise BadInputError(
                f"{model.info.name} comes in {own}, and its weights and ranges stay as they are; leave "
                + Argument("recover")
                + " out"
            )
        if budget is not None and precision in BUDGETED:
            raise BadInputError(
                f"{model.info.name} comes in {own}, so "
                + Argument("budget")
                + " has no layers to choose; leave it out"
            )
        return make_graph_as_given(Precision(own), precision, device, model, store, listener)
    if precision in (Precision.FP32, Precision.TF32):
        return model, True
    require_raised_opset(model.info.name, model.info.remarks, precision)
    if precision in CALIBRATED:
        from optpipe.quantize.calibrated_graph import make_calibrated_graph

        if form is None:
            raise ValueError(f"{precision} needs a form of Q/DQ pairs")
        return make_calibrated_graph(
            precision,
            form,
            model,
            calibration,
            store,
            listener,
            budget,
            reference.info.held_out,
            half,
            recover,
        )
    if budget is not None and precision in BUDGETED:
        return convert_within_budget(budget, model, reference, calibration, store, listener)
    return convert_to_half(precision, model, reference, store, listener)


# Models that come in INT8, FP8, FP16 or BF16.
#
# They are built as they are, in that precision alone; INT8 and FP8 models also in FP32, which computes the same numbers.


AS_GIVEN_REVISION = 2


def make_graph_as_given(
    own: Precision,
    precision: Precision,
    device: Device,
    model: Entry[ModelInfo],
    store: Store,
    listener: Listener,
) -> tuple[Entry[ModelInfo] | Entry[GraphInfo], bool]:
    """The entry for `precision` of a model that comes in `own`. Raises BadInputError if it cannot be converted."""
    name = model.info.name
    if own in CALIBRATED and precision not in (own, Precision.FP32, Precision.TF32):
        raise BadInputError(
            f"{name} is quantized to {own} already and cannot be turned into {precision}",
            remedy=Argument("precision", own)
            + " builds it as it is; give the model it was quantized from for other precisions",
        )
    if own is precision is Precision.INT8:
        return _place_as_given(model, device, store, listener)
    if own in CALIBRATED or own is precision:
        return model, True
    raise BadInputError(
        f"{name} has {own} weights and is built in {own} alone; give the model in fp32 for {precision}"
    )


def _place_as_given(
    model: Entry[ModelInfo], device: Device, store: Store, listener: Listener
) -> tuple[Entry[GraphInfo], bool]:
    """The store entry `graph` of a model that comes in INT8: its own ranges, with the pairs where `device` has kernels for them.

    On a GPU, the INT32 constants of DequantizeLinear nodes, such as biases, are their values: TensorRT accepts no INT32 there;
    its documentation requires biases in floating point.
    """
    tools = {"onnx": get_package_version("onnx")}
    recipe = {
        "revision": AS_GIVEN_REVISION,
        "model": model.id,
        "change": "pairs",
        "device": device,
        "tools": tools,
    }

    def make(directory: Path) -> GraphInfo:
        given, card = onnx.load(model.file(ONNX)), read_stored_card(model)
        feeds = make_probe(card, given)
        graph, kept, remarks = place_given_pairs(
            name_nodes(given), feeds, model.info.name, cpu=device == "cpu"
        )
        if device == "cuda":
            graph = require_same(
                RewriteGuard(feeds),
                graph,
                fold_constants,
                f"{model.info.name} cannot be built in int8: folding its INT32 constants changes its outputs",
                "build it for the CPU ("
                + Argument("device", "cpu")
                + "), or export it with biases in float32",
            )
        onnx.checker.check_model(graph, full_check=True)
        onnx.save(graph, directory / ONNX)
        return GraphInfo(Precision.INT8, tool="optpipe", ranges=str(kept), remarks=remarks)

    return store.produce(GraphInfo, recipe, make, parents=(model.id,), listener=listener)


def fold_constants(model: Any) -> Any:
    """`model` with the values of the INT32 constants that DequantizeLinear nodes read, in place; returns it."""
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    kept, folded = [], []
    for node in graph.node:
        held = (
            [constants.get(name) for name in node.input]
            if node.op_type == "DequantizeLinear"
            else []
        )
        if (
            not held
            or held[0] is None
            or held[1] is None
            or held[0].data_type != onnx.TensorProto.INT32
        ):
            kept.append(node)
            continue
        steps, scale = (onnx.numpy_helper.to_array(tensor) for tensor in held[:2])
        folded.append(
            onnx.numpy_helper.from_array(
                (steps.astype("float64") * scale).astype(scale.dtype), node.output[0]
            )
        )
    replace_nodes(graph, kept, folded)
    return model


REVISION = 5
FP16_HEADROOM = 65504 / 8
"""Layers whose values come within three bits of FP16's largest number on the reference inputs stay in FP32."""
GUARDED_BATCHES = 1
"""Batches of the reference on which a converted graph is compared with its source."""
FP16_OPSET = 13
"""The first opset that ModelOpt leaves as it is."""
BF16_OPSET = 22
"""The first opset whose Conv takes BF16."""
SOURCE = "source.onnx"
WIDE = "values out of range"
CONTROL_FLOW = ("If", "Loop", "Scan")
"""Nodes with graphs inside, which stay in FP32 where ModelOpt cannot convert them."""
INNER = "ModelOpt cannot convert the graph inside it"
RANGE_SAMPLES = 8
REDUCTIONS = ("ReduceMax", "ReduceMin", "ReduceSum")
"""ONNX Runtime's largest and smallest value leave out NaN; only the sum shows it."""
FP16_RANKING_IMAGES = 16
"""Few, since a graph has several times more nodes than layers for INT8."""


def convert_to_half(
    precision: Precision,
    model: Entry[ModelInfo],
    reference: Entry[ReferenceInfo],
    store: Store,
    listener: Listener,
) -> tuple[Entry[GraphInfo], bool]:
    """The store entry `graph` in FP16 or BF16; nodes whose values leave FP16's range on the reference inputs stay in FP32."""
    recipe = _describe_recipe(precision, model, reference)

    def make(directory: Path) -> GraphInfo:
        _convert(precision, model, reference, directory, ())
        return GraphInfo(precision, tool="modelopt.onnx.autocast")

    return store.produce(
        GraphInfo, recipe, make, parents=(model.id, reference.id), listener=listener
    )


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
    from optpipe.quantize.sensitivity import (
        describe_mixed,
        rank_layers,
        require_lowered,
        select_kept_layers,
    )

    base, _ = convert_to_half(Precision.FP16, model, reference, store, listener)
    samples = _choose_samples(model, reference, data, budget, listener)
    lowering = lower_to_half(model, base)
    selection, _ = select_kept_layers(model, lowering, samples, budget, store, listener)
    require_lowered(selection.info, Precision.FP16)
    recipe = {**_describe_recipe(Precision.FP16, model, reference), "selection": selection.id}

    def make(directory: Path) -> GraphInfo:
        kept = selection.info.keep
        reasons = _convert(Precision.FP16, model, reference, directory, kept)
        half = find_half_nodes(load_onnx(directory / ONNX), read_stored_card(model).inputs)
        if wrong := sorted(half & frozenset(kept)):
            raise GateError(
                f"ModelOpt converts {escape(wrong[0])} to fp16 although the budget keeps it in fp32"
            )
        ranking = (
            rank_layers(model, lowering, samples, store, listener)[0].info.layers if kept else ()
        )
        mixed = describe_mixed(model, selection.info, ranking, half, reasons)
        return GraphInfo(Precision.FP16, tool="modelopt.onnx.autocast", mixed=mixed)

    parents = (model.id, reference.id, base.id, selection.id)
    return store.produce(GraphInfo, recipe, make, parents=parents, listener=listener)


def lower_to_half(model: Entry[ModelInfo], base: Entry[GraphInfo]) -> "Lowering":
    """FP16 by rounding, in the nodes that are FP16 in the converted graph `base`."""
    from optpipe.quantize.sensitivity import Lowering

    def load() -> "LoweredLayers":
        inputs = read_stored_card(model).inputs
        graph = name_nodes(load_onnx(model.file(ONNX)))
        half, known = (
            find_half_nodes(load_onnx(base.file(ONNX)), inputs),
            infer_graph_types(graph, inputs),
        )
        layers = tuple(node.name for node in graph.graph.node if node.name in half)
        return layers, lambda names: round_nodes(graph, names, known)

    return Lowering(Precision.FP16, {"graph": base.id}, load, FP16_RANKING_IMAGES)


def _choose_samples(
    model: Entry[ModelInfo],
    reference: Entry[ReferenceInfo],
    data: Path | None,
    budget: Budget,
    listener: Listener,
) -> SampleSet:
    from optpipe.quantize.calibrated_graph import load_calibration_data

    card = read_stored_card(model)
    if data is not None or "calibration" in card.data:
        return load_calibration_data(model, data, None, 0, listener, reference.info.held_out)[0]
    tensors = reference_from_file(reference.file(REFERENCE))
    labels = (
        None
        if tensors.labels is None
        else [card.labels[label] if card.labels else str(label) for label in tensors.labels]
    )
    samples = tensor_set_from_parts("reference", [tensors.inputs], labels or ())
    if budget.unit == "points" and 100 / len(samples.files) > budget.limit:
        listener.warn(
            f"the budget of {budget} is checked on {len(samples.files)} samples, where one prediction is {100 / len(samples.files):.2g}"
            " points; give more with " + Argument("calibration")
        )
    return samples


def _describe_recipe(
    precision: Precision, model: Entry[ModelInfo], reference: Entry[ReferenceInfo]
) -> dict[str, Any]:
    return {
        "revision": REVISION,
        "model": model.id,
        "precision": str(precision),
        "tools": {
            name: get_package_version(name)
            for name in ("nvidia-modelopt", "onnx", "onnxruntime-gpu")
        },
        "ranges": reference.id,
    }


def _convert(
    precision: Precision,
    model: Entry[ModelInfo],
    reference: Entry[ReferenceInfo],
    directory: Path,
    kept: Sequence[str],
) -> dict[str, str]:
    """Writes the converted graph into `directory`. Returns why ModelOpt left nodes in FP32, by node."""
    card = read_stored_card(model)
    rows = reference_from_file(reference.file(REFERENCE)).inputs
    return write_half_graph(precision, onnx.load(model.file(ONNX)), card, rows, directory, kept)


def write_half_graph(
    precision: Precision,
    graph: Any,
    card: ModelCard,
    rows: "Arrays",
    directory: Path,
    kept: Sequence[str] = (),
) -> dict[str, str]:
    """Writes `graph` in FP16 or BF16 into `directory`; `kept` names nodes that stay in FP32.

    On `rows`, (samples, ...) by input, nodes are found whose values leave FP16's range, and the
    result is compared with its source. Returns why ModelOpt left nodes in FP32, by node.

    Raises StageError if ModelOpt fails, or if the result differs by more than rounding explains;
    BadInputError if the opset cannot be raised.
    """
    directory = directory.resolve()
    guard = RewriteGuard([batch for batch, _ in split_batches(card, rows)][:GUARDED_BATCHES])
    least = BF16_OPSET if precision is Precision.BF16 else FP16_OPSET
    source = name_nodes(graph)
    _require_standard(source, card, precision)
    if needs_conversion(source, least):
        source = require_same(
            guard,
            source,
            lambda given: raise_opset(given, least),
            f"{card.name} cannot be converted from opset {read_opset(source)} to {least}",
            f"export the model at opset {least}, or build it in fp32",
        )
    wide = _find_wide_tensors(source, card, rows)

    def convert_except(nodes: Collection[str]) -> Any:
        """The converted graph, after it was compared; `nodes` stay in FP32."""

        def convert() -> Any:
            from modelopt.onnx.autocast import (
                convert_to_mixed_precision,
            )  # its log takes the present streams
            from modelopt.onnx.autocast.logging_config import logger
            from modelopt.onnx.autocast.nodeclassifier import NodeRuleBase

            onnx.save(plain.model, directory / SOURCE)
            hidden = {plain.hide("v", name) for name in wide}

            class OutOfRange(NodeRuleBase):
                def _check_inner(self, node: Any) -> bool:
                    return not hidden.isdisjoint((*node.input, *node.output))

                def _log_skipped(self, node: Any, **_: Any) -> None:
                    logger.info(f"Skipping node {node.name}: {WIDE}")

            converted = convert_to_mixed_precision(
                str(directory / SOURCE),
                low_precision_type=str(precision),
                nodes_to_exclude=[f"{plain.hide('n', name)}$" for name in nodes],
                keep_io_types=True,
                data_max=math.inf,
                custom_rule=OutOfRange(),
            )
            (directory / SOURCE).unlink()
            return converted

        plain = PlainNames(source)
        half = convert_by_modelopt(plain, card.name, precision, directory, convert)
        require_rounding(source, half, precision, guard, card)
        return half, plain

    reasons: dict[str, str] = {}
    try:
        half, plain = convert_except(kept)
    except StageError as error:
        inner = [node.name for node in source.graph.node if node.op_type in CONTROL_FLOW]
        if not set(inner) - set(kept):
            raise
        try:
            half, plain = convert_except({*kept, *inner})
        except StageError:
            raise error from None
        reasons = dict.fromkeys(set(inner) - set(kept), INNER)
    onnx.save(half, directory / ONNX)
    logged, log = {}, (directory / MODELOPT_LOG).read_text(encoding="utf-8", errors="replace")
    shown = plain.list_nodes()
    for hidden_name, why in re.findall(r"Skipping node (.+?): (.*)", log):
        name = shown.get(hidden_name, hidden_name)
        if name not in kept and name not in reasons:
            range_of = "weights" if "initializer" in why else "values" if why == WIDE else None
            logged[name] = (
                f"its {range_of} come near the end of FP16's range"
                if range_of
                else "by a rule of ModelOpt"
            )
    return logged | reasons


def _require_standard(graph: Any, card: ModelCard, precision: Precision) -> None:
    """Raises BadInputError for operators of other domains, whose types ModelOpt asks TensorRT for."""
    for node in iterate_nodes(graph.graph):
        if node.domain not in ("", "ai.onnx"):
            operator = escape(f"{node.domain}.{node.op_type}")[:80]
            raise BadInputError(
                f"{card.name} cannot be converted to {precision}: {operator} is not an operator of ONNX",
                remedy=f"export the model with standard operators, or leave {precision} out of "
                + Argument("precision"),
            )


def require_rounding(
    source: Any, converted: Any, precision: Precision, guard: RewriteGuard, card: ModelCard
) -> None:
    """Raises StageError if a converted graph differs from its source by more than rounding to the type explains.

    Most graphs are within a fixed limit. Beyond it, the source with the same nodes rounded says what rounding alone does.
    ONNX Runtime's CPU provider computes the converted graph in FP32 between casts; a graph that it cannot run is not compared,
    but must be valid ONNX.
    """
    limit = TOLERATED_RELATIVE_ERROR[precision]
    expected = guard.run(source)
    if not expected:
        return
    difference = guard.measure(source, converted, limit)
    if difference is None:
        return
    other = f", or give an ONNX file that is in {precision} already"
    way_out = f"leave {precision} out of " + Argument("precision") + other
    if difference.unknown:
        _require_valid(converted, f"ModelOpt converts {card.name} to {precision} wrongly", way_out)
        return
    if precision is Precision.FP16 and np.isfinite(difference.relative):
        known = infer_graph_types(source, card.inputs)
        half = find_half_nodes(converted, card.inputs)
        rounded = guard.measure(source, round_nodes(source, half, known), 0.0)
        if rounded is not None and difference.relative <= ROUNDING_FACTOR * rounded.relative:
            return
    raise StageError(
        f"the conversion of {card.name} to {precision} changes more than rounding does: {difference}",
        remedy=way_out,
    )


def _require_valid(graph: Any, problem: str, way_out: str) -> None:
    """Raises StageError for a graph whose types or shapes contradict each other."""
    try:
        check_graph(graph)
    except OptpipeError:  # valid, and no kernel of ONNX Runtime runs it
        return
    except Exception as error:
        said = escape(" ".join(str(error).split()).replace("[ShapeInferenceError] ", ""))[:240]
        raise StageError(f"{problem}: {said}", remedy=way_out) from error


def _find_wide_tensors(model: Any, card: ModelCard, rows: "Arrays") -> frozenset[str]:
    """Tensors whose values on `rows` leave FP16's range but for three bits. ModelOpt would keep all of them in memory."""
    from onnx.helper import make_node

    from optpipe.quantize.ranges import open_model_session

    known, (low, usual, _) = infer_graph_types(model, card.inputs), card.batch_range
    made = (
        *(spec.name for spec in card.inputs),
        *(name for node in model.graph.node for name in node.output),
    )
    names = [name for name in made if known.types.get(name) == "fp32"]
    if not names:  # a session asked for no output computes all of the model's
        return frozenset()
    reduced, wide = type(model)(), set[str]()
    reduced.CopyFrom(model)
    pairs = [(name, operator) for name in names for operator in REDUCTIONS]
    fresh = NameGiver(model)
    nodes = [
        make_node(operator, [name], [fresh.give(f"{name}_{operator}")], keepdims=0)
        for name, operator in pairs
    ]
    reduced.graph.node.extend(
        reversed(nodes)
    )  # ONNX Runtime computes the last result first, with all that it needs
    outputs = [node.output[0] for node in nodes]
    session = open_model_session(expose_tensors(reduced, outputs))
    for batch, _ in split_batches(card, rows, max(low, min(usual, RANGE_SAMPLES))):
        extremes = map(float, session.run(outputs, batch))
        for name, largest, smallest, total in zip(names, extremes, extremes, extremes, strict=True):
            if not (max(largest, -smallest) <= FP16_HEADROOM and math.isfinite(total)):
                wide.add(name)
    return frozenset(wide)


# FP16 in chosen nodes of an FP32 graph, for any runtime: their data and results are rounded to FP16.
#
# Products add up in FP32, as on Tensor Cores. ONNX Runtime's CPU provider cannot do this: it has few FP16 kernels,
# computes in FP32 without them, and drops the casts between such nodes, so that nothing would ever overflow.


def round_nodes(model: Any, names: Collection[str], known: GraphTypes) -> Any:
    """A copy of `model` (FP32) whose nodes in `names` read and write values rounded to FP16.

    `known` holds the types of its tensors.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    fresh = NameGiver(model)
    for graph in iterate_graphs(copy.graph):
        _round_graph(graph, frozenset(names), known, fresh)
    return copy


def _round_graph(graph: Any, names: Collection[str], known: GraphTypes, fresh: NameGiver) -> None:
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
                rounded[name] = fresh.give(f"{name}_half")
                nodes += _make_casts(name, rounded[name], fresh)
            node.input[position] = rounded[name]
        nodes.append(node)
        for position, name in enumerate(node.output):
            if name and known.types.get(name) == "fp32":
                node.output[position] = fresh.give(f"{name}_exact")
                nodes += _make_casts(node.output[position], name, fresh)
                rounded[name] = name
    del graph.node[:]
    graph.node.extend(nodes)


def _make_casts(source: str, target: str, fresh: NameGiver) -> list[Any]:
    half = fresh.give(f"{target}_in_half")
    return [
        onnx.helper.make_node(
            "Cast", [source], [half], name=fresh.give(f"{half}_cast"), to=onnx.TensorProto.FLOAT16
        ),
        onnx.helper.make_node(
            "Cast",
            [half],
            [target],
            name=fresh.give(f"{target}_back_cast"),
            to=onnx.TensorProto.FLOAT,
        ),
    ]


def find_half_nodes(converted: Any, inputs: Sequence[InputSpec]) -> frozenset[str]:
    """The nodes of a converted graph, except casts, that read or write FP16."""
    known = infer_graph_types(converted, inputs)
    return frozenset(
        node.name
        for node in iterate_nodes(converted.graph)
        if node.op_type != "Cast"
        and any(known.types.get(name) == "fp16" for name in (*node.input, *node.output))
    )
