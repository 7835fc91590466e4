"""Puts a precision into the ONNX graph: casts by ModelOpt's AutoCast, Q/DQ nodes from a calibration table.

TensorRT 11 takes the types as they stand in the graph; no builder flag changes them.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.backends.base import Device
from optpipe.backends.onnx_graph import HALF_TYPES, drop_unknown_sizes, iterate_graphs, list_read_names
from optpipe.core.card import card_from_file
from optpipe.core.entries import CalibrationInfo, GraphInfo, ModelInfo, ReferenceInfo
from optpipe.core.errors import BadInputError
from optpipe.core.events import Listener
from optpipe.core.precision import CALIBRATED, REQUIRED_SHARE, Budget, MixedPrecision, Precision
from optpipe.core.process import redirect_output
from optpipe.models.inputs.sample_set import draw_subset
from optpipe.quantize.calibrate import (
    calibrate_model,
    load_calibration_data,
    name_table_file,
    quantize_graph,
    tables_from_entry,
)
from optpipe.quantize.half import convert_to_half, convert_within_budget
from optpipe.quantize.ranges import METHODS, CalibrationTable, is_table, read_table, write_table
from optpipe.quantize.sensitivity import (
    LayerCost,
    SelectionInfo,
    compare_methods,
    count_layer_macs,
    describe_mixed,
    lower_by_table,
    rank_layers,
    require_lowered,
    select_kept_layers,
)
from optpipe.workspace.entry import Entry
from optpipe.workspace.environment import get_package_version, list_gpus
from optpipe.workspace.file_names import CARD, MODELOPT_LOG, ONNX
from optpipe.workspace.store import Store

if TYPE_CHECKING:
    from optpipe.quantize.placement import Placement, Target

BUDGETED = (Precision.FP16, Precision.INT8, Precision.FP8)
"""What a budget can keep layers out of."""


def convert_to_precision(
    precision: Precision,
    device: Device,
    model: Entry[ModelInfo],
    reference: Entry[ReferenceInfo],
    calibration: Path | None,
    store: Store,
    listener: Listener,
    budget: Budget | None = None,
) -> tuple[Entry[ModelInfo] | Entry[GraphInfo], bool]:
    """The entry whose `model.onnx` has `precision` in it; FP32 and TF32 are the exported graph itself.

    In an INT8 graph for a GPU the rest is FP16; for the CPU, which has no FP16 kernels, it is FP32. With a `budget`, FP16,
    INT8 and FP8 leave out the layers that exceed it.

    TF32 differs from FP32 only in what the runtime may do with FP32 products, so it has no graph of its own.
    """
    if (own := model.info.own_precision) is not None:
        if budget is not None and precision in BUDGETED:
            raise BadInputError(f"{model.info.name} comes in {own}, so --budget has no layers to choose; leave it out")
        return make_graph_as_given(Precision(own), precision, choose_target(precision, device), model, store, listener)
    if precision in (Precision.FP32, Precision.TF32):
        return model, True
    if precision in CALIBRATED:
        return make_calibrated_graph(
            precision, model, device, calibration, store, listener, budget, reference.info.held_out
        )
    if budget is not None and precision in BUDGETED:
        return convert_within_budget(budget, model, reference, calibration, store, listener)
    return convert_to_half(precision, model, reference, store, listener)


# Models that come in a precision of their own: quantized already, or with weights in FP16 or BF16.
#
# They are built as they are in that precision. Half-precision weights are widened for FP32; nothing is quantized twice.


AS_GIVEN_REVISION = 1


def make_graph_as_given(
    own: Precision, precision: Precision, target: "Target", model: Entry[ModelInfo], store: Store, listener: Listener
) -> tuple[Entry[ModelInfo] | Entry[GraphInfo], bool]:
    """The entry for `precision` of a model that comes in `own`. Raises BadInputError where there is no way from one to the other."""
    name = model.info.name
    if own is Precision.INT8 and precision in (Precision.FP16, Precision.BF16, Precision.FP8):
        raise BadInputError(
            f"{name} is quantized already and cannot be turned into {precision}\n"
            "--precision int8 builds it as it is; give the model it was quantized from for other precisions"
        )
    if own is Precision.INT8 and precision is Precision.INT8 and target == "tensorrt":
        return _make_changed_graph(Precision.INT8, "folded-biases", _fold_biases, model, store, listener)
    if own is Precision.INT8 or own is precision:
        return model, True
    if precision in (Precision.FP32, Precision.TF32):
        return _make_changed_graph(Precision.FP32, "widened", _widen, model, store, listener)
    raise BadInputError(f"{name} has {own} weights; give the model in fp32, which {precision} is made from")


def _make_changed_graph(
    precision: Precision, how: str, change: Any, model: Entry[ModelInfo], store: Store, listener: Listener
) -> tuple[Entry[GraphInfo], bool]:
    recipe = {
        "revision": AS_GIVEN_REVISION,
        "model": model.id,
        "change": how,
        "tools": {"onnx": get_package_version("onnx")},
    }

    def make(directory: Path) -> GraphInfo:
        import onnx

        graph = onnx.load(model.file(ONNX))
        change(graph)
        onnx.checker.check_model(graph, full_check=True)
        onnx.save(graph, directory / ONNX)
        return GraphInfo(precision, tool=how)

    return store.produce(GraphInfo, recipe, make, parents=(model.id,), listener=listener)


def _fold_biases(model: Any) -> None:
    """Replaces constants behind a DequantizeLinear of INT32, as biases are, by their values, in place.

    TensorRT takes no INT32 there; its documentation asks for biases in floating point.
    """
    from onnx import TensorProto, numpy_helper

    graph = model.graph
    constants = {each.name: each for each in graph.initializer}
    kept, folded = [], []
    for node in graph.node:
        held = [constants.get(name) for name in node.input] if node.op_type == "DequantizeLinear" else []
        if not held or held[0] is None or held[1] is None or held[0].data_type != TensorProto.INT32:
            kept.append(node)
            continue
        steps, scale = (numpy_helper.to_array(each) for each in held[:2])
        folded.append(numpy_helper.from_array((steps.astype("float64") * scale).astype(scale.dtype), node.output[0]))
    del graph.node[:]
    graph.node.extend(kept)
    read = {each.name for each in graph.output}.union(*map(list_read_names, kept))
    used = [each for each in graph.initializer if each.name in read]
    del graph.initializer[:]
    graph.initializer.extend([*used, *folded])


def _widen(model: Any) -> None:
    """Turns half-precision weights and arithmetic into FP32, in place; inputs and outputs keep their types."""
    from onnx import TensorProto, helper

    narrow, graph = set(HALF_TYPES.values()), model.graph
    outer = {each.name: each.type.tensor_type.elem_type for each in (*graph.input, *graph.output)}
    for each in iterate_graphs(graph):
        for index, tensor in enumerate(each.initializer):
            if tensor.data_type in narrow:
                each.initializer[index].CopyFrom(_widen_tensor(tensor))
        for value in each.value_info:
            if value.type.tensor_type.elem_type in narrow:
                value.type.tensor_type.elem_type = TensorProto.FLOAT
        for value in (*each.input, *each.output) if each is not graph else ():
            if value.type.tensor_type.elem_type in narrow:
                value.type.tensor_type.elem_type = TensorProto.FLOAT
        for attribute in (attribute for node in each.node for attribute in node.attribute):
            if attribute.HasField("t") and attribute.t.data_type in narrow:
                attribute.t.CopyFrom(_widen_tensor(attribute.t))
            if attribute.name in ("to", "dtype") and attribute.i in narrow:
                attribute.i = TensorProto.FLOAT
    casts = []
    for values, suffix in ((graph.input, "fp32"), (graph.output, "wide")):
        for value in values:
            if outer[value.name] in narrow:
                inner = f"{value.name}_{suffix}"
                _rename(graph, value.name, inner)
                pair = ([value.name], [inner]) if suffix == "fp32" else ([inner], [value.name])
                to = TensorProto.FLOAT if suffix == "fp32" else outer[value.name]
                casts.append((suffix, helper.make_node("Cast", *pair, name=f"{inner}_cast", to=to)))
    nodes = [node for side, node in casts if side == "fp32"] + list(graph.node) + [n for s, n in casts if s == "wide"]
    del graph.node[:]
    graph.node.extend(nodes)


def _widen_tensor(tensor: Any) -> Any:
    from onnx import numpy_helper

    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype("float32"), tensor.name)


def _rename(graph: Any, before: str, after: str) -> None:
    """What nodes, also of inner graphs, read or write as `before` becomes `after`."""
    for each in iterate_graphs(graph):
        for node in each.node:
            for names in (node.input, node.output):
                for index, name in enumerate(names):
                    if name == before:
                        names[index] = after


REVISION = 4
TABLE = "calibration-table.json"
METHOD_CHOICE_IMAGES = 32
"""Images on which a build chooses the method: the one whose graph keeps the outputs nearest to FP32's."""


def choose_target(precision: Precision, device: str) -> "Target":
    """Which placement a device's runtimes fuse."""
    if precision is Precision.FP8:
        return "fp8"
    return "tensorrt" if device == "cuda" else "cpu"


def choose_calibration_device() -> str:
    """Where the passes over calibration data run: on a GPU if there is one."""
    return "cuda" if list_gpus() else "cpu"


def make_calibrated_graph(
    precision: Precision,
    model: Entry[ModelInfo],
    device: str,
    calibration: Path | None,
    store: Store,
    listener: Listener,
    budget: Budget | None = None,
    held_out: Collection[str] = (),
) -> tuple[Entry[GraphInfo], bool]:
    """The store entry `graph` with INT8 or FP8 in it, for `device`; around INT8 the rest is FP16 on a GPU and FP32 on the CPU.

    `calibration` is a folder of images, an image-set manifest, or a calibration table; by default the card's own set,
    without the samples whose hash is in `held_out`. With a `budget`, the fewest layers that exceed it stay in floating point; raises
    BadInputError for one with a table, and where FP8 has too few linear layers.
    """
    target = choose_target(precision, device)
    if target == "fp8":
        _require_linear_layers(model)
    if calibration is not None and is_table(calibration):
        if budget is not None:
            raise BadInputError(
                f"--budget needs calibration data to search on, and {calibration} is a finished calibration table"
            )
        return graph_from_table(model, read_table(calibration), target, (), store, listener)
    data = load_calibration_data(model, calibration, None, 0, listener, held_out)
    entry, _ = calibrate_model(model, data, tuple(METHODS), (target,), choose_calibration_device(), store, listener)
    tables = tables_from_entry(entry)
    compared, _ = compare_methods(
        model, tables, draw_subset(data.samples, METHOD_CHOICE_IMAGES), target, store, listener
    )
    best = tables[compared.info.best]
    if budget is None:
        return graph_from_table(model, best, target, (entry.id, compared.id), store, listener)
    lowering = lower_by_table(model, best, target)

    def rank() -> tuple[LayerCost, ...]:
        return rank_layers(model, lowering, data.samples, store, listener)[0].info.layers

    chosen, _ = select_kept_layers(model, lowering, rank, data.samples, budget, store, listener)
    require_lowered(chosen.info, precision)
    ranking = rank() if chosen.info.keep else ()
    best, parents = replace(best, keep=chosen.info.keep), (entry.id, compared.id, chosen.id)
    return graph_from_table(model, best, target, parents, store, listener, (chosen, ranking))


def _require_linear_layers(model: Entry[ModelInfo]) -> None:
    """Before anything is calibrated: with fewer the precision could not be proven."""
    import onnx

    from optpipe.quantize.placement import place_qdq

    graph = onnx.load(model.file(ONNX))
    macs, placed = count_layer_macs(graph, card_from_file(model.file(CARD))), place_qdq(graph, "fp8")
    share = sum(macs.get(name, 0) for name in placed.layers) / max(sum(macs.values()), 1)
    if share < REQUIRED_SHARE:
        largest = max(placed.skipped, key=lambda each: macs.get(each.layer, 0), default=None)
        why = f" ({largest.layer}: {largest.reason})" if largest else ""
        raise BadInputError(
            f"FP8 fits {share:.1%} of the MACs of {model.info.name}, {REQUIRED_SHARE:.0%} required{why}\n"
            "build it in fp16 or int8"
        )


def graph_from_table(
    model: Entry[ModelInfo],
    table: CalibrationTable,
    target: "Target",
    parents: tuple[str, ...],
    store: Store,
    listener: Listener,
    chosen: tuple[Entry[SelectionInfo], Sequence[LayerCost]] | None = None,
) -> tuple[Entry[GraphInfo], bool]:
    """The store entry `graph` that `table` makes of `model`; `chosen` is what a budget made it keep, and the ranking.

    Raises BadInputError where the table is another model's, or was made with other preprocessing.
    """
    if table.model != model.info.name:
        raise BadInputError(f"the calibration table is for model {table.model}, not {model.info.name}")
    own = card_from_file(model.file(CARD)).preprocessing_sha256
    if own is not None and table.transform_sha256 is not None and table.transform_sha256 != own:
        raise BadInputError(
            f"the calibration table was made for different preprocessing than {model.info.name}'s; "
            "pass the calibration data themselves"
        )
    if table.graph_sha256 != model.sha256(ONNX):
        listener.warn("the calibration table is from a different export of this model; matching tensors by name")
    precision = Precision.FP8 if target == "fp8" else Precision.INT8
    recipe = {
        "revision": REVISION,
        "model": model.id,
        "precision": str(precision),
        "target": target,
        "table": table.sha256,
        "tools": {name: get_package_version(name) for name in ("nvidia-modelopt", "onnx")},
        **({"selection": chosen[0].id} if chosen else {}),
    }

    def make(directory: Path) -> GraphInfo:
        import onnx

        from optpipe.backends.onnx_lint import lint_graph

        graph, placed = quantize_graph(onnx.load(model.file(ONNX)), table, target)
        findings = lint_graph(graph) if target == "tensorrt" else ()
        onnx.save(_convert_to_half(graph, directory) if target == "tensorrt" else graph, directory / ONNX)
        write_table(directory / TABLE, table)
        return GraphInfo(
            precision,
            target=target,
            method=table.method,
            set=table.set,
            int8_layers=placed.layers,
            kept=placed.skipped,
            lint=findings,
            mixed=_describe_kept(model, placed, *chosen) if chosen else None,
        )

    return store.produce(GraphInfo, recipe, make, parents=(model.id, *parents), listener=listener)


def _describe_kept(
    model: Entry[ModelInfo], placed: "Placement", selection: Entry[SelectionInfo], ranking: Sequence[LayerCost]
) -> MixedPrecision:
    others = {each.layer: each.reason for each in placed.skipped}
    return describe_mixed(model, selection.info, ranking, placed.layers, others)


def find_tables(precision: Precision, model: Entry[ModelInfo], store: Store) -> list[Path]:
    """The calibration tables that graphs in `precision` of `model` in the store were made from, the newest last.

    Of a graph within a budget it is its calibration's, where no layer is kept yet.
    """
    calibrations = {each.id: each for each in store.list_entries(CalibrationInfo)}
    found: list[Path] = []
    for each in store.list_entries(GraphInfo):
        if model.id not in each.manifest.parents or each.info.precision is not precision or each.info.method is None:
            continue
        if each.info.mixed is None:
            found.append(store.verify_entry(each, TABLE).file(TABLE))
        elif (calibration := calibrations.get(each.manifest.parents[1])) is not None:
            name = name_table_file(each.info.method)
            found.append(store.verify_entry(calibration, name).file(name))
    return found


def _convert_to_half(graph: Any, directory: Path) -> Any:
    """FP16 around the Q/DQ pairs, inputs and outputs in FP32, by ModelOpt, which knows which operators must not follow."""
    with redirect_output(directory / MODELOPT_LOG):
        from modelopt.onnx.autocast import convert_to_f16

        return drop_unknown_sizes(convert_to_f16(graph, keep_io_types=True))
