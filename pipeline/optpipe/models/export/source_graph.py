"""From the graph that the user gave, or that torch's exporter wrote, to the graph that is built.

Each step is a rewrite that a `RewriteGuard` compares with the graph before it. A step that changes an output is left out,
and a remark says so.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from optpipe.backends.onnx_graph import (
    find_unread_inputs,
    list_read_names,
    name_nodes,
    replace_nodes,
)
from optpipe.backends.onnx_mends import separate_int8_constants, state_zero_points
from optpipe.backends.onnx_pairs import fold_constant_quantizers
from optpipe.backends.rewrites import RewriteGuard
from optpipe.core import LazyModule, onnx
from optpipe.core.card import ModelCard
from optpipe.core.errors import BadInputError, StageError, escape
from optpipe.models.export.opsets import needs_conversion, raise_opset, read_opset
from optpipe.models.export.sequences import has_split_sequences, split_without_sequences
from optpipe.models.inputs.rows import split_batches
from optpipe.models.inputs.samples import bound_noise, make_noise_rows, make_synthetic_tensor
from optpipe.models.sources.onnx_file import check_graph, name_dimensions
from optpipe.models.sources.onnx_forms import has_odd_form, state_usual_form

onnxslim = LazyModule("onnxslim")
OLDEST_IR = 4
"""Older versions require weights in the list of inputs, which the simplifier omits."""
NEWEST_IR = 13
"""The newest that ONNX Runtime 1.31 reads; onnx 1.23 writes 14, and no operator here needs it."""
PROBE_ROWS = 2
COMMON_OPSET = 19
"""The opset of the graphs made from a user's file, and the first whose Q/DQ nodes take FP16 scales: what converts types converts
no versions then."""
OPSET_REMARK = "raising the opset"


@dataclass(frozen=True, slots=True)
class PreparedGraph:
    graph: Any
    simplified: bool
    remarks: tuple[str, ...]
    """What was left out, in words for the user."""


def prepare_graph(given: Any, card: ModelCard, *, own_file: bool) -> PreparedGraph:
    """The graph to build from `given`: with the card's inputs, without functions, simplified, with a name for every node.

    With `own_file`, it is a user's, whose dimensions are named and whose missing ranks are stated.
    """
    guard = RewriteGuard(make_probe(card, given))
    remarks: list[str] = []
    graph, simplified = given, True

    def take(what: str, rewrite: Callable[[Any], Any]) -> bool:
        nonlocal graph
        graph, difference = guard.apply(graph, rewrite)
        if difference is not None:
            remarks.append(f"{what} would change the outputs ({difference}), so it is left out")
        return difference is None

    if own_file:
        if has_odd_form(given):
            take("stating the usual form of its nodes and weights", state_usual_form)
            given = graph
        remarks += _describe_unread(given, card)
        take("naming the dimensions", lambda model: state_shapes(model, card, guard.run(given)))
        if given.functions:
            take("inlining its functions", inline_functions)
        if needs_conversion(graph, COMMON_OPSET):
            with suppress(
                StageError
            ):  # of an operator without conversion: precisions that need one refuse it
                what = f"{OPSET_REMARK} from {read_opset(graph)} to {COMMON_OPSET}"
                take(what, lambda model: raise_opset(model, COMMON_OPSET))
    if has_split_sequences(graph):
        take("taking sequences of tensors apart", split_without_sequences)
    take("copying constants that layers share", _normalize)
    if is_large(graph):
        simplified = False
        remarks.append(
            "the graph is not simplified with onnxslim, whose time grows with the square of the number of nodes, inputs, and outputs"
        )
    else:
        try:
            simplified = take("simplifying the graph with onnxslim", simplify)
        except Exception:  # noqa: BLE001 - whatever a simplifier trips over, the graph before it is used; the entry records it
            simplified = False
    take("folding the quantizers of constants", fold_constant_quantizers)
    return PreparedGraph(graph, simplified, tuple(remarks))


MOST_SIMPLIFIED_NODES = 6_000
MOST_SIMPLIFIED_ENDS = 1_000
"""Inputs and outputs. On two cores, onnxslim took 15 s for 4,000 equal nodes and 41 s for 4,000 inputs."""


def is_large(model: Any) -> bool:
    """Whether simplifying a graph could take longer than building it."""
    graph = model.graph
    ends = len(graph.input) + len(graph.output)
    return len(graph.node) > MOST_SIMPLIFIED_NODES or ends > MOST_SIMPLIFIED_ENDS


def make_probe(card: ModelCard, graph: Any) -> list[dict[str, NDArray[Any]]]:
    """Batches of noise for the guard: a few samples of the usual shape, and one batch of the smallest."""
    card = replace(card, inputs=bound_noise(card.inputs, graph))
    rows = make_noise_rows(card, max(PROBE_ROWS, card.batch_range[0]), graph)
    feeds = [batch for batch, _ in split_batches(card, rows)][:PROBE_ROWS]
    smallest = {
        spec.name: make_synthetic_tensor(spec.min, spec.dtype, seed, spec.below)
        for seed, spec in enumerate(card.inputs)
    }
    if any(value.shape != feeds[0][name].shape for name, value in smallest.items()):
        feeds.append(smallest)
    return feeds


def _describe_unread(given: Any, card: ModelCard) -> list[str]:
    taken = {spec.name for spec in card.inputs}
    unread = find_unread_inputs(given)
    return [
        f"no output depends on input '{escape(value.name)[:80]}', so it is left out"
        for value in given.graph.input
        if value.name in unread and value.name not in taken
    ]


def state_shapes(model: Any, card: ModelCard, outputs: Sequence[dict[str, NDArray[Any]]]) -> Any:
    """`model` with a rank for each of the card's inputs and each output, a name for each open size, and no unread input."""
    taken = {spec.name: spec for spec in card.inputs}
    unread = find_unread_inputs(model) - taken.keys()
    if unread:
        _drop_inputs(model.graph, unread)
    for value in model.graph.input:
        tensor = value.type.tensor_type
        if value.name in taken and not tensor.HasField("shape"):
            _state_rank(tensor, len(taken[value.name].opt))
    for value in model.graph.output:
        tensor = value.type.tensor_type
        if outputs and not tensor.HasField("shape"):
            _state_rank(tensor, outputs[0][value.name].ndim)
    name_dimensions(model, card.inputs)
    return model


def _drop_inputs(graph: Any, names: Collection[str]) -> None:
    """Removes inputs that no output depends on, and the nodes that read them, in place."""
    dead, nodes = set(names), []
    for node in graph.node:
        if dead & list_read_names(node):
            dead.update(node.output)
        else:
            nodes.append(node)
    kept = [value for value in graph.input if value.name not in names]
    if len(nodes) < len(graph.node):
        replace_nodes(graph, nodes)
    del graph.input[:]
    graph.input.extend(kept)


def _state_rank(tensor: Any, rank: int) -> None:
    tensor.shape.CopyFrom(
        onnx.TensorShapeProto(dim=[onnx.TensorShapeProto.Dimension() for _ in range(rank)])
    )


def inline_functions(model: Any) -> Any:
    """`model` with the nodes of its local functions in place of their calls: type converters know no functions."""
    from onnx import inliner

    return inliner.inline_local_functions(model, convert_version=True)


def simplify(model: Any) -> Any:
    """`model` with constants folded and without dead nodes. Raises what onnxslim and the checker raise."""
    inputs = [value.name for value in model.graph.input]
    slim = _normalize(onnxslim.slim(model))
    missing = set(inputs) - {value.name for value in slim.graph.input}
    if missing:
        raise ValueError(f"onnxslim drops input {min(missing)}")
    check_graph(slim)
    return slim


def _normalize(model: Any) -> Any:
    """`model` with a name for every node, INT8 constants of single layers with their zero points, and a version that the runtimes read."""
    name_nodes(model)
    state_zero_points(model)
    separate_int8_constants(model)
    model.ir_version = min(max(model.ir_version, OLDEST_IR), NEWEST_IR)
    return model


def require_raised_opset(name: str, remarks: Sequence[str], precision: str) -> None:
    """Raises BadInputError if a precision needs the graph at `COMMON_OPSET`, and its operators mean something else there."""
    for remark in remarks:
        if remark.startswith(OPSET_REMARK):
            problem = f"{name} cannot be built in {precision}: {remark.removesuffix(', so it is left out')}"
            raise BadInputError(
                f"{problem}\nexport the model at opset {COMMON_OPSET}, or build it in fp32"
            )
