"""What of a graph is known, or computed, in the host's memory: constants among the nodes, and shapes."""

from typing import Any

import numpy as np

from optpipe.backends.onnx_graph import OnnxGraph
from optpipe.backends.torch_int8.movements import READ_ON_HOST, WAY_OUT
from optpipe.core.errors import StageError


def hoist_constants(model: Any) -> Any:
    """`model` with what Constant nodes hold among its weights, in place."""
    import onnx

    left = []
    for node in model.graph.node:
        if node.op_type != "Constant":
            left.append(node)
            continue
        value = onnx.helper.get_attribute_value(node.attribute[0])
        if not isinstance(value, onnx.TensorProto):
            kind = np.float32 if "float" in node.attribute[0].name else np.int64
            value = onnx.numpy_helper.from_array(np.array(value, kind))
        value.name = node.output[0]
        model.graph.initializer.append(value)
    del model.graph.node[:]
    model.graph.node.extend(left)
    return model


def find_shape_tensors(graph: OnnxGraph) -> frozenset[str]:
    """What is computed in the host's memory: all that shapes depend on, and what follows from shapes alone.

    Raises StageError where a shape depends on the values of an input.
    """
    found: set[str] = set()
    nodes = graph.model.graph.node
    waiting = [name for node in nodes for at, name in enumerate(node.input) if at in READ_ON_HOST.get(node.op_type, ())]
    while waiting:
        tensor = waiting.pop()
        if not tensor or tensor in graph.weights or tensor in found:
            continue
        if (node := graph.producers.get(tensor)) is None:
            raise StageError(
                f"its INT8 does not take shapes that depend on values, here of input '{tensor}'; {WAY_OUT}"
            )
        found.add(tensor)
        if node.op_type != "Shape":
            waiting += node.input
    for node in nodes:
        read = READ_ON_HOST.get(node.op_type, ())
        data = [name for at, name in enumerate(node.input) if name and at not in read and name not in graph.weights]
        if node.op_type == "Shape" or (data and found.issuperset(data)):
            found.update(node.output)
    return frozenset(found)
