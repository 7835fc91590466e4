"""Calls ModelOpt's converters so that no name, output, or error of a model is lost in them.

ModelOpt makes names by suffix, takes names as regular expressions, drops outputs that no node computes, gives every size that
it could not infer the same name, leaves files in the current folder, and raises errors of many kinds.
"""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from optpipe.backends.graph_names import (
    NameGiver,
    PlainNames,
    iterate_graphs,
    rename_some_values,
)
from optpipe.backends.onnx_graph import iterate_nodes
from optpipe.backends.onnx_mends import drop_unknown_sizes
from optpipe.core import np, onnx
from optpipe.core.errors import OptpipeError, StageError, escape, first_line
from optpipe.core.precision import Precision
from optpipe.core.process import redirect_output
from optpipe.core.wording import Argument
from optpipe.workspace.file_names import MODELOPT_LOG


def convert_by_modelopt(
    plain: PlainNames,
    name: str,
    precision: Precision,
    directory: Path,
    convert: Callable[[], Any],
) -> Any:
    """The graph that `convert` makes of `plain.model`, with the names and outputs of its source.

    `convert` runs in `directory`, where ModelOpt's log is. Raises StageError, of two lines, for whatever ModelOpt raises.
    """
    directory = directory.resolve()
    aside = _set_outputs_aside(plain.model)
    _drop_shapeless_values(plain.model)
    state_constant_types(plain.model)
    log = directory / MODELOPT_LOG
    with redirect_output(log), translate_errors(name, precision, directory, plain), _hold_nodes():
        converted = convert()
        _put_outputs_back(converted, aside)
    return plain.restore(drop_unknown_sizes(converted))


@contextmanager
def _hold_nodes() -> Iterator[None]:
    """Keeps the nodes of inner graphs in memory while ModelOpt converts them.

    ModelOpt 0.47 knows them by `id(node)`. Protobuf makes a new object each time that a node is read, unless one is alive,
    so that its lookups fail or not by chance: "KeyError: 139940583213872".
    """
    from modelopt.onnx.autocast.precisionconverter import PrecisionConverter

    name = "_convert_subgraph_precision"
    original = getattr(PrecisionConverter, name, None)
    if original is None:
        yield
        return

    def convert(self: Any, graph: Any, *more: Any, **named: Any) -> Any:
        held = list(graph.node)
        result = original(self, graph, *more, **named)
        held.clear()
        return result

    setattr(PrecisionConverter, name, convert)
    try:
        yield
    finally:
        setattr(PrecisionConverter, name, original)


def round_rest_to_half(model: Any, name: str, directory: Path) -> Any:
    """`model`, an INT8 graph, with FP16 around its Q/DQ pairs; ModelOpt keeps the operators that need FP32."""

    plain = PlainNames(model)

    def convert() -> Any:
        from modelopt.onnx.autocast import convert_to_f16

        return convert_to_f16(plain.model, keep_io_types=True)

    return convert_by_modelopt(plain, name, Precision.INT8, directory, convert)


class _Aside(NamedTuple):
    """An output that no node computes: a constant, or an input that is passed through."""

    position: int
    output: Any
    constant: Any | None


def _set_outputs_aside(model: Any) -> list[_Aside]:
    """Takes the outputs that no node computes from a graph, in place. Nodes read constants among them by another name."""
    graph = model.graph
    computed = {name for node in graph.node for name in node.output}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    aside = []
    for position, output in enumerate(graph.output):
        if output.name in computed:
            continue
        constant = None
        if output.name in constants:
            constant = onnx.TensorProto()
            constant.CopyFrom(constants[output.name])
        own = onnx.ValueInfoProto()
        own.CopyFrom(output)
        aside.append(_Aside(position, own, constant))
    for entry in reversed(aside):
        del graph.output[entry.position]
    names = NameGiver(model)
    renamed = {
        entry.output.name: names.give(f"{entry.output.name}_inside")
        for entry in aside
        if entry.constant is not None
    }
    rename_some_values(graph, renamed)
    return aside


def _put_outputs_back(model: Any, aside: list[_Aside]) -> None:
    outputs = list(model.graph.output)
    for entry in aside:
        outputs.insert(entry.position, entry.output)
        if entry.constant is not None:
            model.graph.initializer.append(entry.constant)
    del model.graph.output[:]
    model.graph.output.extend(outputs)


def _drop_shapeless_values(model: Any) -> None:
    """Takes notes on types that lack a shape from a graph, in place: ModelOpt's checker refuses them.

    onnx's version converter makes such notes for operators whose shapes it cannot infer.
    """
    for graph in iterate_graphs(model.graph):
        kept = [value for value in graph.value_info if value.type.tensor_type.HasField("shape")]
        if len(kept) < len(graph.value_info):
            del graph.value_info[:]
            graph.value_info.extend(kept)


def state_constant_types(model: Any) -> None:
    """Gives each Constant and ConstantOfShape its value as a tensor, in place.

    ONNX also has lists and single numbers, and a default of zero in FP32; where shapes cannot be inferred, ModelOpt reads the
    type of such a node from a tensor alone.
    """
    for node in iterate_nodes(model.graph):
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "ConstantOfShape" and not node.attribute:
            zero = onnx.numpy_helper.from_array(np.zeros(1, np.float32))
            node.attribute.append(onnx.helper.make_attribute("value", zero))
        elif node.op_type == "Constant" and node.attribute[0].name in _CONSTANT_TYPES:
            (given,) = node.attribute
            dtype = _CONSTANT_TYPES[given.name]
            value = np.array(onnx.helper.get_attribute_value(given), dtype)
            del node.attribute[:]
            stated = onnx.numpy_helper.from_array(value)
            node.attribute.append(onnx.helper.make_attribute("value", stated))


_CONSTANT_TYPES = {
    "value_float": "float32",
    "value_floats": "float32",
    "value_int": "int64",
    "value_ints": "int64",
}
"""Attributes of Constant besides `value`, and the types that they mean; strings stay."""


def _name_reason(error: Exception) -> str:
    """An error's type and first line; for one that says nothing, as an assertion or a key, the line that raised it."""
    kind = type(error).__name__
    if str(error).strip() and not isinstance(error, LookupError):
        return f"{kind}: {first_line(error)}"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].name}: {frames[-1].line}" if frames else ""
    return f"{kind}{where}"


@contextmanager
def translate_errors(
    name: str, precision: Precision, directory: Path, plain: PlainNames
) -> Iterator[None]:
    """Runs in `directory`, where ModelOpt leaves files. Its errors become a StageError with its last message."""
    try:
        with chdir(directory):
            yield
    except OptpipeError:
        raise
    except Exception as error:
        log = (directory / MODELOPT_LOG).read_text(encoding="utf-8", errors="replace")
        said = re.findall(r"ERROR[\s:-]+(.+)", log)
        reason = escape(plain.restore_text(said[-1] if said else _name_reason(error)))
        raise StageError(
            f"ModelOpt cannot convert {name} to {precision}: {reason[:240]}",
            remedy=f"leave {precision} out of "
            + Argument("precision")
            + f", or give an ONNX file that is in {precision} already",
        ) from error
    finally:
        for left in (*directory.glob("*.data"), *directory.glob("sym_shape_infer*")):
            left.unlink()
