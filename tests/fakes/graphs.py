"""ONNX models in a few words."""

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper


def node_of(operator, given, made, attributes=()):
    """A node named after its first output; `given` and `made` are lists of names, or names with spaces between."""
    given, made = (each.split() if isinstance(each, str) else each for each in (given, made))
    return helper.make_node(operator, given, made, **{"name": made[0], **dict(attributes)})


def value_of(name, described):
    """A tensor of the graph; described by its shape (float32) or by (type, shape)."""
    kind, shape = described if isinstance(described, tuple) else ("FLOAT", described)
    return helper.make_tensor_value_info(name, getattr(TensorProto, kind), shape)


def onnx_model(nodes, inputs, outputs, *, opset=17, path=None, **constants) -> onnx.ModelProto:
    """A model of nodes (`NodeProto` or `node_of`'s arguments), of values by name (see `value_of`) and of constants.

    `opset` is a version, or a version by domain. With `path`, the model is saved there too.
    """
    made = [each if isinstance(each, NodeProto) else node_of(*each) for each in nodes]
    values = [[value_of(*each) for each in described.items()] for described in (inputs, outputs)]
    weights = [
        numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
    ]
    opsets = [
        helper.make_opsetid(*each)
        for each in (opset if isinstance(opset, dict) else {"": opset}).items()
    ]
    model = helper.make_model(
        helper.make_graph(made, "g", *values, weights), opset_imports=opsets, ir_version=9
    )
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, path)
    return model
