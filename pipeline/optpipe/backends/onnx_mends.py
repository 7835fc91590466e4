"""Rewrites of ONNX graphs, in place, around faults of the tools that made them or that read them."""

from typing import Any

from optpipe.backends.graph_names import NameGiver, iterate_graphs, rename_some_values
from optpipe.core import np, onnx


def drop_unknown_sizes(model: Any) -> Any:
    """Removes the name `unk`, which ModelOpt gives each size that it could not infer, in place.

    In ONNX, sizes with the same name are equal, and ONNX Runtime lets such tensors share memory.
    """
    for graph in iterate_graphs(model.graph):
        del graph.value_info[:]  # every runtime infers these itself
        for value in (*graph.input, *graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param == "unk":
                    dim.Clear()
    return model


def rename_inner_twins(model: Any) -> None:
    """Renames tensors of inner graphs that have the name of a tensor in an outer graph, in place.

    onnx's version converter makes such names: it numbers the tensors that it adds from one in each graph.
    """
    seen: set[str] = set()
    names = NameGiver(model)
    for graph in iterate_graphs(model.graph):
        twins = {name for node in graph.node for name in node.output if name and name in seen}
        if twins:
            renamed = {name: names.give(f"{name}_inside") for name in sorted(twins)}
            rename_some_values(graph, renamed)
        seen |= {name for node in graph.node for name in node.output}


def separate_int8_constants(model: Any) -> None:
    """Copies INT8 weights and zero points that several nodes read, in place, so that each node reads its own.

    onnxslim merges equal ones, and layers may share weights. On a CPU without VNNI, ONNX Runtime 1.31 converts signed weights and
    their zero points to unsigned for each layer (see `EXACT_SUMS`), and refuses one that it has converted before.
    """
    stored = {
        tensor.name: tensor
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.INT8
    }
    if not stored:
        return
    names = NameGiver(model)
    nodes, seen, own = list(model.graph.node), set[str](), []
    weights = {
        node.output[0]: node
        for node in nodes
        if node.op_type == "DequantizeLinear" and node.input[0] in stored
    }
    for node in nodes:
        for at, name in enumerate(node.input):
            if name in weights and name in seen:
                own.append(onnx.NodeProto())
                own[-1].CopyFrom(weights[name])
                own[-1].name = own[-1].output[0] = node.input[at] = names.give(name)
            seen.add(name)
        own.append(node)
    del model.graph.node[:]
    model.graph.node.extend(own)
    read: set[str] = set()
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            if name in read and (len(stored[name].dims) < 2 or node.op_type == "DequantizeLinear"):
                copy = model.graph.initializer.add()
                copy.CopyFrom(stored[name])
                copy.name = node.input[at] = names.give(name)
            elif name in stored:
                read.add(name)


def state_zero_points(model: Any) -> None:
    """Gives each DequantizeLinear of INT8 constants its zero point of 0, in place, in the shape of its scales.

    On a CPU without VNNI, ONNX Runtime 1.31 converts such constants to unsigned (see `EXACT_SUMS`) and adds the zero point
    itself, as a single number, which it then refuses beside scales by channel or by block.
    """
    names = NameGiver(model)
    for graph in iterate_graphs(model.graph):
        stored = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type != "DequantizeLinear" or (len(node.input) > 2 and node.input[2]):
                continue
            weight, scale = (stored.get(name) for name in node.input[:2])
            if weight is None or scale is None or weight.data_type != onnx.TensorProto.INT8:
                continue
            zeros = np.zeros(tuple(scale.dims), np.int8)
            name = names.give(f"{scale.name}_zero_point")
            graph.initializer.append(onnx.numpy_helper.from_array(zeros, name))
            node.input[:] = [*node.input[:2], name]
