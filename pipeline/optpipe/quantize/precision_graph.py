"""Puts a precision into the ONNX graph: casts by ModelOpt's AutoCast, Q/DQ nodes from a calibration table, or the model's types.

TensorRT 11 takes the types of the graph; no builder flag changes them.
"""

from pathlib import Path
from typing import Any

from optpipe.backends.base import Device
from optpipe.backends.onnx_graph import HALF_TYPES, iterate_graphs, list_read_names
from optpipe.core.entries import GraphInfo, ModelInfo, ReferenceInfo
from optpipe.core.errors import BadInputError
from optpipe.core.events import Listener
from optpipe.core.precision import BUDGETED, CALIBRATED, Budget, Precision
from optpipe.quantize.half import convert_to_half, convert_within_budget
from optpipe.workspace.entry import Entry
from optpipe.workspace.environment import get_package_version
from optpipe.workspace.file_names import ONNX
from optpipe.workspace.store import Store


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
    """The entry whose `model.onnx` has `precision`; FP32 and TF32 are the exported graph.

    In an INT8 graph for a GPU the rest is FP16; for the CPU, which has no FP16 kernels, it is FP32. With a `budget`, FP16,
    INT8 and FP8 leave out the layers that exceed it. TF32 only allows the runtime other FP32 products, so it has no graph.
    """
    if (own := model.info.own_precision) is not None:
        if budget is not None and precision in BUDGETED:
            raise BadInputError(f"{model.info.name} comes in {own}, so --budget has no layers to choose; leave it out")
        return make_graph_as_given(Precision(own), precision, device, model, store, listener)
    if precision in (Precision.FP32, Precision.TF32):
        return model, True
    if precision in CALIBRATED:
        from optpipe.quantize.calibrated_graph import make_calibrated_graph

        return make_calibrated_graph(
            precision, model, device, calibration, store, listener, budget, reference.info.held_out
        )
    if budget is not None and precision in BUDGETED:
        return convert_within_budget(budget, model, reference, calibration, store, listener)
    return convert_to_half(precision, model, reference, store, listener)


# Models that come in INT8, FP16 or BF16.
#
# They are built as they are in that precision. Half-precision weights are widened for FP32; nothing is quantized twice.


AS_GIVEN_REVISION = 1


def make_graph_as_given(
    own: Precision, precision: Precision, device: Device, model: Entry[ModelInfo], store: Store, listener: Listener
) -> tuple[Entry[ModelInfo] | Entry[GraphInfo], bool]:
    """The entry for `precision` of a model that comes in `own`. Raises BadInputError if it cannot be converted."""
    name = model.info.name
    if own is Precision.INT8 and precision in (Precision.FP16, Precision.BF16, Precision.FP8):
        raise BadInputError(
            f"{name} is quantized already and cannot be turned into {precision}\n"
            "--precision int8 builds it as it is; give the model it was quantized from for other precisions"
        )
    if own is Precision.INT8 and precision is Precision.INT8 and device == "cuda":
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
    """Replaces the INT32 constants of DequantizeLinear nodes, such as biases, by their values, in place.

    TensorRT accepts no INT32 there; its documentation requires biases in floating point.
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
    """Renames `before` in the inputs and outputs of all nodes, also in inner graphs."""
    for each in iterate_graphs(graph):
        for node in each.node:
            for names in (node.input, node.output):
                for index, name in enumerate(names):
                    if name == before:
                        names[index] = after
