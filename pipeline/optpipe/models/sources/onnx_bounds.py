"""Bounds of an ONNX file, checked before anything that is recursive, or takes long, reads its graph."""

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from optpipe.backends.graph_names import iterate_graphs
from optpipe.backends.onnx_layers import copy_for_inference
from optpipe.backends.onnx_size_inputs import COMPUTES_SIZES, SIZE_INPUTS
from optpipe.core import LazyModule, np, onnx
from optpipe.core.errors import BadInputError, escape

reference = LazyModule("onnx.reference")

MOST_NODES = 30_000
"""Of a graph, with the nodes inside its nodes, and each call of a function counted as the nodes of that function.

An FP32 build of a chain of as many for ONNX Runtime took 39 s on two cores under a profiler; one of 100,000 took more than 120 s.
"""
MOST_GRAPHS = 2**11
"""Inner graphs of Ifs and Loops; runtimes resolve each of them again in each graph around it."""
DEEPEST_CALLS = 64
MOST_AXES = 64
LONGEST_LOOP = 10**5
"""The most rounds of a Loop, and of the Loops inside it together."""
MOST_ROUNDS, MOST_GROWN = 64, 2**28
"""Rounds of a Loop whose shapes are followed, and the elements to which a value of it may grow in them."""
MOST_ELEMENTS = 2**30
"""The largest tensor: 4 GiB in FP32, which no network needs for the few samples of a reference."""
MOST_RANGE = 2**22
"""Elements of a Range of constants, which shape inference computes one by one: 3 s and 600 MB. Positions are far fewer."""
MOST_TEXT_BYTES = 2**26
"""The limit of all constant texts together: a large vocabulary takes a few megabytes."""
MOST_SIZES = 10**4
"""Entries of a constant that may give sizes; others are weights."""
MOST_ENTRIES = 10**6
"""Of any other list in a file: inputs, constants, shapes, metadata, imports."""
_SMALLER_WAY_OUT = "export a smaller model, or a part of this one"
_FIELDS = {
    "FLOAT": "float_data",
    "INT32": "int32_data",
    "INT64": "int64_data",
    "DOUBLE": "double_data",
    "UINT64": "uint64_data",
    "UINT32": "uint64_data",
}
"""Where types are stored that are not in `raw_data`, one number each."""
_LESS_THAN_A_BYTE = re.compile("(INT|FLOAT)([24])")


def require_bounded_lists(model: Any, path: Path) -> None:
    """Raises BadInputError for a list longer than any model has; the lists are not read, so that this takes no time."""
    graph = model.graph
    if len(graph.node) > MOST_NODES:
        _refuse_nodes(len(graph.node), path)
    for part in (model, graph):
        for field, value in part.ListFields():
            if field.is_repeated and len(value) > MOST_ENTRIES:
                raise BadInputError(
                    f"{path}: its list '{field.name}' has {len(value)} entries; {MOST_ENTRIES} is the most\n{_SMALLER_WAY_OUT}"
                )


def _refuse_nodes(count: int, path: Path) -> None:
    raise BadInputError(
        f"{path}: its graph has {count} nodes, with functions inlined; {MOST_NODES} is the most\n"
        "split the model, or export loops over layers or steps as a Loop or Scan"
    )


def require_bounded_graph(model: Any, path: Path) -> None:
    """Raises BadInputError for more nodes, calls, or rounds than any model has, with the place and a way out."""
    calls = {(function.domain, function.name): function for function in model.functions}
    sizes: dict[tuple[str, str], int] = {}

    def count(scope: Any, depth: int) -> int:
        if depth > DEEPEST_CALLS:
            raise BadInputError(
                f"{path}: its functions call each other more than {DEEPEST_CALLS} deep, or without end\n"
                "inline them before the export"
            )
        total = 0
        for number, graph in enumerate(iterate_graphs(scope)):
            if number > MOST_GRAPHS:
                raise BadInputError(
                    f"{path}: more than {MOST_GRAPHS} graphs lie inside its Ifs and Loops\n{_SMALLER_WAY_OUT}"
                )
            total += len(graph.node)
            for node in graph.node:
                if (ends := max(len(node.input), len(node.output))) > MOST_NODES:
                    raise BadInputError(
                        f"{path}: a {escape(node.op_type)[:80]} reads or makes {ends} tensors; {MOST_NODES} is the most\n"
                        f"{_SMALLER_WAY_OUT}"
                    )
                key = node.domain, node.op_type
                if key in calls and key not in sizes:
                    sizes[key] = count(calls[key], depth + 1)
                total += sizes.get(key, 0)
        return total

    if (nodes := count(model.graph, 0)) > MOST_NODES:
        _refuse_nodes(nodes, path)
    if (rounds := max(_iterate_rounds(model.graph, {}, 1), default=0)) > LONGEST_LOOP:
        raise BadInputError(
            f"{path}: a Loop in it runs {rounds} times, with the Loops around it; {LONGEST_LOOP} is the most\n"
            "give it fewer rounds, or split the model before the Loop"
        )


def _iterate_rounds(graph: Any, outer: Mapping[str, Any], around: int) -> Iterator[int]:
    """Yields the rounds of each Loop whose trip count a constant of its graph or of an outer one fixes, times `around`."""
    known = {**outer, **{tensor.name: tensor for tensor in graph.initializer}}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute:
            known |= dict.fromkeys(node.output, node.attribute[0].t)
        rounds = around
        if node.op_type == "Loop" and node.input:
            trip = known.get(node.input[0])
            if trip is not None and len(trip.dims) < 2:
                for value in onnx.numpy_helper.to_array(trip).reshape(-1)[:1]:
                    rounds = around * max(int(value), 1)
            yield rounds
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _iterate_rounds(attribute.g, known, rounds)


def require_bounded_growth(model: Any, path: Path) -> None:
    """Raises BadInputError for a Loop of the graph whose values grow from round to round to more than MOST_GROWN elements.

    Shapes are inferred round by round, at most MOST_ROUNDS times: what doubles shows itself in thirty. An open dimension is one.
    """
    inferred = _infer_sizes(model).graph
    values = {value.name: value for value in (*inferred.input, *inferred.value_info)}
    for tensor in inferred.initializer:
        values[tensor.name] = onnx.helper.make_tensor_value_info(
            tensor.name, tensor.data_type, list(tensor.dims)
        )
    for node in model.graph.node:
        bodies = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        if node.op_type == "Loop" and bodies:
            largest = _simulate_rounds(bodies[0], node.input[2:], values, model.opset_import)
            if largest > MOST_GROWN:
                name = escape(node.name or "".join(node.output[:1]))[:80]
                raise BadInputError(
                    f"{path}: the values of Loop '{name}' grow to more than {MOST_GROWN} elements within {MOST_ROUNDS} rounds\n"
                    f"{_SMALLER_WAY_OUT}"
                )


def _simulate_rounds(
    body: Any, given: Sequence[str], values: Mapping[str, Any], opsets: Any
) -> int:
    """The elements of the largest value that a Loop carries, as far as shape inference follows it."""
    largest, carried = 0, [values.get(name) for name in given]
    own = {name for node in body.node for name in node.output}
    own |= {value.name for value in (*body.input, *body.initializer)}
    outer = {name for node in body.node for name in node.input} - own
    for _ in range(MOST_ROUNDS):
        ends: list[Any] = [copy.deepcopy(value) for value in carried if value is not None]
        if len(ends) < len(carried):
            break
        for end, known in zip(ends, body.input[2:], strict=False):
            end.name = known.name
        free = [copy.deepcopy(values[name]) for name in outer if name in values]
        starts = [*body.input[:2], *ends, *free]
        round_ = onnx.helper.make_graph(
            body.node, "round", starts, body.output, list(body.initializer)
        )
        for output in round_.output:
            output.type.tensor_type.ClearField("shape")
        try:
            inferred = onnx.shape_inference.infer_shapes(
                onnx.helper.make_model(round_, opset_imports=opsets), data_prop=True
            )
        except Exception:  # noqa: BLE001  # what it cannot infer, it may also raise
            break
        before = carried
        carried = list(inferred.graph.output[1 : 1 + len(given)])
        shapes = [_list_sizes(value) for value in carried]
        largest = max([largest, *map(math.prod, shapes)])
        if largest > MOST_GROWN or shapes == [_list_sizes(value) for value in before]:
            break
    return largest


def _list_sizes(value: Any) -> list[int]:
    return [max(dim.dim_value, 1) for dim in value.type.tensor_type.shape.dim]


def require_complete_data(tensors: Iterator[Any], path: Path) -> None:
    """Raises BadInputError for a tensor whose dimensions declare other data than the file has.

    `tensors` are those of the file, with their external data loaded.
    """
    for tensor in tensors:
        kind = onnx.TensorProto.DataType.Name(tensor.data_type)
        count, present = math.prod(tensor.dims), None
        if tensor.HasField("raw_data"):
            bits = 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
            small = _LESS_THAN_A_BYTE.search(kind)
            bits = int(small.group(2)) if small and small.group(2) + "E" not in kind else bits
            wanted, present, unit = -(-count * bits // 8), len(tensor.raw_data), "bytes"
        elif kind in _FIELDS:
            wanted, present, unit = count, len(getattr(tensor, _FIELDS[kind])), "numbers"
        if present is not None and present != wanted:
            shown = "x".join(map(str, tensor.dims)) or "scalar"
            name = escape(tensor.name)[:80]
            raise BadInputError(
                f"{path}: tensor '{name}' ({kind.lower()} {shown}) declares {wanted} {unit}, and the file has {present}\n"
                "it may be truncated, or a weight file may belong to another export; export the model again"
            )


def iterate_tensors(graph: Any) -> Iterator[Any]:
    """Initializers and tensors in attributes, of a graph and of its inner graphs."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for inner in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                yield from iterate_tensors(inner)


def iterate_declared_tensors(model: Any) -> Iterator[tuple[str, int, list[int]]]:
    """Name, data type, and known dimensions of the inputs, outputs, described tensors, and initializers."""
    graph = model.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        tensor = value.type.tensor_type
        yield (
            value.name,
            tensor.elem_type,
            [dim.dim_value for dim in tensor.shape.dim if dim.HasField("dim_value")],
        )
    for tensor in graph.initializer:
        yield tensor.name, tensor.data_type, list(tensor.dims)


def count_item_bytes(dtype: int) -> int:
    return (
        1
        if dtype == onnx.TensorProto.STRING
        else int(onnx.helper.tensor_dtype_to_np_dtype(dtype).itemsize)
    )


def require_bounded_tensors(model: Any, path: Path, memory_bytes: int) -> None:
    """Raises BadInputError for a tensor of more elements than any model has, or that `memory_bytes` cannot hold.

    Sizes are inferred, also those that constants, or the shapes of tensors, give to Expand, Tile, Range, Pad, Resize, and others
    like them. An open dimension counts as one.
    """
    require_bounded_growth(model, path)
    inferred = _infer_sizes(model)
    if computed := _compute_sizes(inferred):
        _require_made_sizes(model, path, computed)
        inferred = _infer_sizes(model, computed)
    for name, dtype, sizes in iterate_declared_tensors(inferred):
        count = math.prod(max(size, 1) for size in sizes)
        if dtype and count * count_item_bytes(dtype) > memory_bytes:
            limit = "exceeds this machine's memory"
        elif count > MOST_ELEMENTS:
            limit = f"has {count} elements; {MOST_ELEMENTS} are the most"
        else:
            continue
        node = next((node for node in model.graph.node if name in node.output), None)
        maker = "" if node is None else f", which {escape(node.op_type)[:80]} makes,"
        shown = "x".join(map(str, sizes))
        raise BadInputError(
            f"{path}: tensor '{escape(name)[:80]}' alone, {shown}{maker or ','} {limit}\n{_SMALLER_WAY_OUT}"
        )


def require_bounded_sizes(model: Any, path: Path) -> None:
    """Raises BadInputError for a node whose constants make more elements than any tensor has, and for texts of many megabytes.

    Comes before shape inference, which computes a Range of constants.
    """
    texts_bytes = sum(
        len(text)
        for tensor in iterate_tensors(model.graph)
        if tensor.data_type == onnx.TensorProto.STRING
        for text in tensor.string_data
    )
    if texts_bytes > MOST_TEXT_BYTES:
        raise BadInputError(
            f"{path}: its constant strings take {texts_bytes} bytes; {MOST_TEXT_BYTES} are the most\n"
            "read the strings outside of the model"
        )
    _require_made_sizes(model, path, {})


def _require_made_sizes(model: Any, path: Path, computed: Mapping[str, Any]) -> None:
    for node, count in _iterate_made_sizes(model, computed):
        is_inferred = node.op_type == "Range" and not computed.keys() & {*node.input}
        most = MOST_RANGE if is_inferred else MOST_ELEMENTS
        if count > most:
            raise BadInputError(
                f"{path}: {escape(node.op_type)[:80]} '{escape(node.name or ''.join(node.output[:1]))[:80]}' makes {count} "
                f"elements; {most} are the most\n{_SMALLER_WAY_OUT}"
            )


def _infer_sizes(model: Any, computed: Mapping[str, Any] | None = None) -> Any:
    """`model` with the sizes that ONNX's shape inference knows; as it is if that fails. `computed` tensors are constants."""
    with suppress(Exception):  # what it cannot infer, it may also raise
        light = copy_for_inference(model)
        if computed:
            graph = light.graph
            kept = [
                node
                for node in graph.node
                if not computed.keys() >= {*node.output} - {""}
                # inference computes a Range of constants one by one
                and not (node.op_type == "Range" and computed.keys() & {*node.input})
            ]
            graph.initializer.extend(
                computed[name] for node in graph.node for name in node.output if name in computed
            )
            del graph.node[:]
            graph.node.extend(kept)
        for propagates in (True, False):
            with suppress(Exception):
                return onnx.shape_inference.infer_shapes(light, data_prop=propagates)
    return model


def _compute_sizes(model: Any) -> dict[str, Any]:
    """What the graphs of `model` compute from the shapes of their tensors alone, by name; an open dimension is 1.

    Shape inference follows some of these operators. Of more than MOST_SIZES, the rest is unknown.
    """
    opsets = {opset.domain: opset.version for opset in model.opset_import}
    shapes = _list_shapes(model)
    constants: dict[str, Any] = {}
    computed: dict[str, Any] = {}
    for graph in iterate_graphs(model.graph):
        constants |= {
            tensor.name: tensor
            for tensor in graph.initializer
            if math.prod(tensor.dims) <= MOST_SIZES
        }
        for node in graph.node:
            if (value := _read_constant(node)) is not None:
                constants |= dict.fromkeys(node.output, value)
            elif len(computed) < MOST_SIZES:
                computed |= _compute_size(node, constants, computed, shapes, opsets)
    return computed


def _list_shapes(model: Any) -> dict[str, list[int]]:
    """The shape of each tensor of known rank; an open dimension is 1."""
    graph, shapes = model.graph, {tensor.name: [*tensor.dims] for tensor in model.graph.initializer}
    for value in (*graph.input, *graph.output, *graph.value_info):
        tensor = value.type.tensor_type
        if tensor.HasField("shape"):
            shapes.setdefault(value.name, [max(dim.dim_value, 1) for dim in tensor.shape.dim])
    return shapes


def _compute_size(
    node: Any,
    constants: Mapping[str, Any],
    computed: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    opsets: Mapping[str, int],
) -> dict[str, Any]:
    """The result of a node that computes a size, by ONNX's own definition; nothing for any other."""
    read = [name for name in node.input if name]
    if node.op_type in ("Shape", "Size") and read and read[0] in shapes:
        # no tensor of this shape is made: an array of one number that is repeated takes no memory
        feeds = {read[0]: np.broadcast_to(np.float32(0), shapes[read[0]])}
    elif node.op_type in _COMPUTED_HERE and any(name in computed for name in read):
        if any(name not in computed and name not in constants for name in read):
            return {}
        held = {name: computed[name] if name in computed else constants[name] for name in read}
        feeds = {name: onnx.numpy_helper.to_array(value) for name, value in held.items()}
        broadcast = math.prod(max(array.size, 1) for array in feeds.values())
        if node.op_type != "Concat" and broadcast > MOST_SIZES:
            return {}
    else:
        return {}
    ends = [
        [onnx.helper.make_empty_tensor_value_info(name) for name in dict.fromkeys(names)]
        for names in (read, filter(None, node.output))
    ]
    with suppress(Exception):  # what it cannot compute is not known
        graph = onnx.helper.make_graph([node], "sizes", *ends)
        evaluator = reference.ReferenceEvaluator(graph, opsets=dict(opsets))
        results = map(np.asarray, evaluator.run(None, feeds))
        return {
            end.name: onnx.numpy_helper.from_array(value, end.name)
            for end, value in zip(ends[1], results, strict=True)
            if value.size <= MOST_SIZES
        }
    return {}


def _iterate_made_sizes(model: Any, computed: Mapping[str, Any]) -> Iterator[tuple[Any, int]]:
    """Each node whose constants make a number of elements that shape inference does not know, of all graphs.

    The `computed` tensors are constants too.
    """
    for graph in iterate_graphs(model.graph):
        known = {**computed} | {
            tensor.name: tensor
            for tensor in graph.initializer
            if math.prod(tensor.dims) <= MOST_SIZES
        }
        for node in graph.node:
            if (value := _read_constant(node)) is not None:
                known |= dict.fromkeys(node.output, value)
            if node.op_type in ("Identity", "Cast") and node.input[:1] and node.input[0] in known:
                known |= dict.fromkeys(node.output, known[node.input[0]])
            if node.op_type == "Range" and all(name in known for name in node.input):
                yield node, _count_range([known[name] for name in node.input])
            if node.op_type == "Pad" and len(node.input) > 1 and node.input[1] in known:
                yield node, _count_padded(known[node.input[1]])
            for index in _SIZES_AT.get(node.op_type, ()):
                tensor = known.get(node.input[index]) if index < len(node.input) else None
                if tensor is not None and tensor.data_type in _WHOLE_NUMBERS:
                    values = onnx.numpy_helper.to_array(tensor).reshape(-1)
                    yield node, math.prod(max(int(value), 1) for value in values)
            for attribute in node.attribute:
                if (node.op_type, attribute.name) in _SIZES_OF:
                    yield node, math.prod(max(size, 1) for size in [attribute.i, *attribute.ints])


def _read_constant(node: Any) -> Any:
    """The tensor of a Constant in any of its forms that are numbers; None for another node."""
    if node.op_type != "Constant" or not node.attribute:
        return None
    given = node.attribute[0]
    if given.HasField("t"):
        return given.t
    whole = given.name in ("value_int", "value_ints")
    if not whole and given.name not in ("value_float", "value_floats"):
        return None
    single = given.name in ("value_int", "value_float")
    values = [given.i if whole else given.f] if single else [*given.ints, *given.floats]
    kind = onnx.TensorProto.INT64 if whole else onnx.TensorProto.FLOAT
    return onnx.helper.make_tensor("", kind, [] if single else [len(values)], values)


def _count_range(ends: Sequence[Any]) -> int:
    """Elements of a Range from its start, limit, and delta; 0 if they are no finite scalars."""
    values = [
        float(onnx.numpy_helper.to_array(tensor).reshape(-1)[0])
        for tensor in ends
        if tensor.dims in ([], [1])
    ]
    if len(values) != 3 or not all(map(math.isfinite, values)) or not values[2]:
        return 0
    start, limit, delta = values
    count = (limit - start) / delta
    return math.ceil(count) if math.isfinite(count) and count > 0 else 0


def _count_padded(pads: Any) -> int:
    """The fewest elements of what a Pad makes: each axis has one element before it."""
    begins, ends = np.split(onnx.numpy_helper.to_array(pads).reshape(-1), 2)
    return math.prod(
        max(1 + int(low) + int(high), 1) for low, high in zip(begins, ends, strict=True)
    )


_COMPUTED_HERE = COMPUTES_SIZES - {"Expand"}
_WHOLE_NUMBERS = (6, 7)
"""Data types INT32 and INT64 of sizes."""
_COUNTED_OTHERWISE = {"AffineGrid", "Loop", "Pad", "Range", "Reshape", "TopK"}
"""Their sizes are rounds, bounds, or a part of what they make, which shape inference or a function of its own counts."""
_SIZES_AT: Mapping[str, tuple[int, ...]] = {
    operator: places
    for operator, places in SIZE_INPUTS.items()
    if operator not in _COUNTED_OTHERWISE
} | {"STFT": (3,)}  # the step between its frames is no size
"""By operator, the inputs whose values are sizes of what it makes."""
_SIZES_OF = frozenset(
    {
        ("ConvTranspose", "output_shape"),
        ("MaxRoiPool", "pooled_shape"),
        ("Multinomial", "sample_size"),
        ("RandomNormal", "shape"),
        ("RandomUniform", "shape"),
        ("RoiAlign", "output_height"),
        ("RoiAlign", "output_width"),
    }
)
"""Operators with the attributes that are sizes of what they make."""
