"""The guard that every rewrite of a graph passes: its result computes what the graph before it computed.

A rewrite takes a graph and returns a graph. Both run in ONNX Runtime without optimizations on the same inputs. A
rewrite that changes nothing costs one comparison of bytes; the outputs of an accepted graph are kept for the next one.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.base import Run
from optpipe.backends.graph_names import iterate_graphs
from optpipe.backends.onnx_graph import expose_tensors
from optpipe.backends.onnx_quantized import HALF_TYPES, find_quantized_operators
from optpipe.backends.plain_session import PlainSession
from optpipe.backends.selections import selection_from_graph
from optpipe.core import onnx
from optpipe.core.errors import BadInputError, OptpipeError, escape, first_line
from optpipe.stats.selected_rows import EMPTY, Selection, align_rows

Feeds = Mapping[str, NDArray[Any]]
"""The inputs of one batch by name."""
Open = Callable[[Any], Run]
"""Makes of a graph the function that runs it."""
EXACT_RELATIVE = 1e-5
"""100 dB: what another order of the same FP32 sums stays below in all but ill-conditioned networks."""
HALF_RELATIVE = 2**-6
"""The same for outputs in FP16 and BF16, which have 10 and 7 bits: a few units in the last place."""
SMALLEST_NORM = float(np.finfo(np.float32).tiny)
ROUNDING_FACTOR = 10.0
"""A conversion may change an output by this many times what rounding the same nodes does."""
HALF_INSIDE_RELATIVE = 1e-3
"""60 dB: what another order of sums stays below if tensors inside the graph are FP16 or BF16."""
QUANTIZED_RELATIVE = 1e-2
"""40 dB: about one step of 8 bits in one of ten values."""
NUDGE_ULPS = 8
SUMS_FACTOR = 2.0
"""How much more than rounding an output may change. Rounding is measured: all weights and inputs are moved by up to
`NUDGE_ULPS` units in the last place, which matters where sums cancel and where values are quantized to 8 bits. ONNX Runtime's
fusions reached 1.3 times that in FP32, 1.1 in FP16, and 0.9 in INT8 (nine trained networks, `benchmarks/third_party_models.py`)."""
NUDGES = 2
STRUCTURE = {
    "Clip": (1, 2),
    "NonMaxSuppression": (3, 4),
    "OneHot": (2,),
    "Pad": (2,),
    "Pow": (1,),
    "Range": (0, 1, 2),
    "Resize": (1, 2),
    "Upsample": (1,),
}
"""The inputs of operators that decide sizes, exponents, or limits: no rounding moves them, and a network does not run, or
computes NaN, if it does."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two graphs differ first: an output or, if both have it under one name, a tensor inside."""

    tensor: str
    operator: str
    """The type of the operator that computes it; empty for an output whose operator is unknown."""
    relative: float
    """‖after - before‖ / ‖before‖; infinite for another shape, another type, or other places of NaN."""
    unknown: bool = False
    """Whether the graph after does not run; `tensor` is then the runtime's reason."""

    def __str__(self) -> str:
        if self.unknown:
            return f"it does not run: {escape(self.tensor)[:160]}"
        where = f"tensor '{escape(self.tensor)[:80]}'"
        where += f" of {self.operator}" if self.operator else ""
        if not np.isfinite(self.relative):
            return f"{where}: another shape, type or range"
        return f"{where}: SNR {-20 * np.log10(max(self.relative, EXACT_RELATIVE**2)):.1f} dB"


class RewriteGuard:
    """Accepts a rewrite if its graph gives the outputs of the graph before it, for those of `feeds` that it runs on.

    If it runs on none, nothing can be compared and a rewrite is accepted: `compute_reference` compares the last graph
    with the user's file on real inputs.

        >>> guard = RewriteGuard([{"x": x}])
        >>> graph, difference = guard.apply(given, simplify)
    """

    def __init__(self, feeds: Sequence[Feeds]) -> None:
        self._feeds = list(feeds)
        self._graph: Any = None
        self._outputs: list[dict[str, NDArray[Any]]] = []
        self._selection: tuple[Any, Selection] = (None, EMPTY)

    def run(self, graph: Any) -> list[dict[str, NDArray[Any]]]:
        """The outputs of `graph` for each of the feeds; feeds that it does not run on are dropped for good."""
        if self._graph is not graph:
            self._graph, self._outputs, runnable = graph, [], []
            try:
                with PlainSession(graph) as session:
                    for feeds in self._feeds:
                        with suppress(OptpipeError):
                            self._outputs.append(self._run(session, feeds))
                            runnable.append(feeds)
            except OptpipeError:  # refused by ONNX Runtime, as another runtime's operators are
                runnable = []
            self._feeds = runnable
        return self._outputs

    def apply(
        self, graph: Any, rewrite: Callable[[Any], Any], limit: float = EXACT_RELATIVE
    ) -> tuple[Any, Difference | None]:
        """The rewritten graph, or `graph` itself with the difference that `rewrite` made.

        `rewrite` may change its argument, which is a copy. Errors of `rewrite` are the caller's.
        """
        copy = onnx.ModelProto()
        copy.CopyFrom(graph)
        rewritten = rewrite(copy)
        if rewritten == graph:
            return graph, None
        difference = self.find_difference(graph, rewritten, limit)
        return (rewritten, None) if difference is None else (graph, difference)

    def measure(self, before: Any, after: Any, limit: float) -> Difference | None:
        """The first tensor beyond `limit` if an output is, else None; `before` stays the graph to compare with.

        With a limit of 0, the output that differs most.
        """
        expected = self.run(before)
        try:
            with PlainSession(after) as session:
                outputs = [self._run(session, feeds) for feeds in self._feeds]
        except OptpipeError as error:
            return Difference(first_line(error), "", np.inf, unknown=True)
        worst = find_worst(expected, self._align(before, outputs), limit)
        if worst is None or not limit:
            return worst
        return find_first_difference(before, after, self._feeds[0], limit) or worst

    def find_difference(
        self, before: Any, after: Any, limit: float = EXACT_RELATIVE, open_after: Open | None = None
    ) -> Difference | None:
        """The first tensor of `after` that differs from `before` by more than `limit` and more than rounding moves it.

        None if the outputs agree, or `before` does not run. With `open_after`, `after` runs as that opens it, such as
        with the optimizations of a runtime.
        """
        if not self.run(before):
            return None
        try:
            if open_after is None:
                with PlainSession(after) as session:
                    outputs = [self._run(session, feeds) for feeds in self._feeds]
            else:
                run = open_after(after)
                outputs = [dict(run(feeds)) for feeds in self._feeds]
        except OptpipeError as error:
            return Difference(first_line(error), "", np.inf, unknown=True)

        outputs = self._align(before, outputs)
        worst = find_worst(self._outputs, outputs, limit)
        if worst is None or self._is_rounding(before, outputs, limit):
            if open_after is None:
                self._graph, self._outputs = after, outputs
            return None
        return find_first_difference(before, after, self._feeds[0], limit) or worst

    @staticmethod
    def _run(session: PlainSession, feeds: Feeds) -> dict[str, NDArray[Any]]:
        names = {spec.name for spec in session.inputs}
        return session.run({name: value for name, value in feeds.items() if name in names})

    def _align(
        self, before: Any, outputs: list[dict[str, NDArray[Any]]]
    ) -> list[dict[str, NDArray[Any]]]:
        """`outputs` with the rows that the graph `before` selects in the order of its outputs."""
        if find_worst(self._outputs, outputs) is None:
            return outputs
        if self._selection[0] is not before:
            self._selection = before, selection_from_graph(before)
        return [
            align_rows(expected, other, self._selection[1], EXACT_RELATIVE)
            for expected, other in zip(self._outputs, outputs, strict=True)
        ]

    def _is_rounding(self, before: Any, after: Sequence[Feeds], limit: float) -> bool:
        """Whether each output that differs by more than `limit` moves as far in `before` itself by rounding."""
        beyond = {
            name: off
            for name, off in measure_outputs(self._outputs, after).items()
            if off > choose_limit(self._outputs[0].get(name, np.zeros(0)), limit)
        }
        if not all(map(np.isfinite, beyond.values())):
            return False
        moved = dict.fromkeys(beyond, 0.0)
        for seed in range(1, NUDGES + 1):
            feeds = [
                {name: nudge(value, seed) for name, value in feeds.items()} for feeds in self._feeds
            ]
            try:
                with PlainSession(nudge_weights(before, seed)) as session:
                    outputs = [self._run(session, nudged) for nudged in feeds]
            except OptpipeError:
                return False
            aligned = self._align(before, outputs)
            for name, off in measure_outputs(self._outputs, aligned).items():
                if name in moved and np.isfinite(off):
                    moved[name] = max(moved[name], off)
        return all(off <= SUMS_FACTOR * moved[name] for name, off in beyond.items())


def choose_graph_limit(model: Any) -> float:
    """The largest difference of another order of sums in a graph, by the types inside it."""
    if find_quantized_operators(model):
        return QUANTIZED_RELATIVE
    stored = {
        tensor.data_type for graph in iterate_graphs(model.graph) for tensor in graph.initializer
    }
    return EXACT_RELATIVE if stored.isdisjoint(HALF_TYPES.values()) else HALF_INSIDE_RELATIVE


def compare_values(before: NDArray[Any], after: NDArray[Any]) -> float:
    """‖after - before‖ / ‖before‖; infinite for another shape or type, or NaN and infinity at other places.

    Of integers and strings: the share that differs.
    """
    if before.shape != after.shape or before.dtype.kind != after.dtype.kind:
        return np.inf
    if before.size == 0 or before is after:
        return 0.0
    if before.dtype.kind not in "fcV":
        return float(np.mean(before != after))
    old, new = (values.astype(np.float64) for values in (before, after))
    finite = np.isfinite(old)
    if not np.array_equal(old[~finite], new[~finite], equal_nan=True):
        return np.inf
    if not np.isfinite(new[finite]).all():
        return np.inf
    norm = float(np.linalg.norm(old[finite]))
    off = float(np.linalg.norm(new[finite] - old[finite]))
    return off / max(norm, SMALLEST_NORM)


def choose_limit(values: NDArray[Any], limit: float) -> float:
    """The largest difference of another order of sums, in the type of `values`; 0 for integers and strings."""
    if values.dtype.kind not in "fcV":
        return 0.0
    half = values.dtype.itemsize < 4
    return max(limit, HALF_RELATIVE) if half else limit


def measure_outputs(before: Sequence[Feeds], after: Sequence[Feeds]) -> dict[str, float]:
    """The largest difference of each output in any batch, as `compare_values`; infinite if one graph lacks it."""
    measured: dict[str, float] = {}
    for expected, got in zip(before, after, strict=True):
        for name in dict.fromkeys((*expected, *got)):
            both = name in expected and name in got
            off = compare_values(expected[name], got[name]) if both else np.inf
            measured[name] = max(off, measured.get(name, 0.0))
    return measured


def find_worst(
    before: Sequence[Feeds], after: Sequence[Feeds], limit: float = EXACT_RELATIVE
) -> Difference | None:
    """The output that differs most, if by more than `limit` in any batch; integers must be equal."""
    worst = None
    for expected, got in zip(before, after, strict=True):
        if list(expected) != list(got):
            missing = [*expected.keys() ^ got.keys()] or list(got)
            return Difference(missing[0], "", np.inf)
        for name, value in expected.items():
            off = compare_values(value, got[name])
            if off > choose_limit(value, limit) and (worst is None or off > worst.relative):
                worst = Difference(name, "", off)
    return worst


def find_first_difference(
    before: Any, after: Any, feeds: Feeds, limit: float = EXACT_RELATIVE
) -> Difference | None:
    """The first tensor, in the order of `after`, that both graphs have under one name and that differs by more than `limit`.

    None if the graphs do not run with their inner tensors as outputs, or share no tensor that differs.
    """
    ours = {name for node in before.graph.node for name in node.output if name}
    shared = [
        (name, node) for node in after.graph.node for name in node.output if name and name in ours
    ]
    names = [name for name, _ in shared]
    try:
        expected, got = (run_exposed(model, names, feeds) for model in (before, after))
    except OptpipeError:
        return None
    for name, node in shared:
        if name in expected and name in got:
            off = compare_values(expected[name], got[name])
            if off > choose_limit(expected[name], limit):
                return Difference(name, node.op_type, off)
    return None


def run_exposed(model: Any, names: Sequence[str], feeds: Feeds) -> dict[str, NDArray[Any]]:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    with PlainSession(expose_tensors(copy, names)) as session:
        inputs = {spec.name for spec in session.inputs}
        return session.run({name: value for name, value in feeds.items() if name in inputs})


def nudge(values: NDArray[Any], seed: int) -> NDArray[Any]:
    """Each FP32 number moved by up to `NUDGE_ULPS` units in the last place, each FP16 or BF16 number by one; other types stay.

    No number becomes infinite.
    """
    size = NUDGE_ULPS * 2.0**-23
    if values.dtype.kind != "f" and values.dtype.name != "bfloat16":
        return values
    if values.dtype.itemsize < 4:
        size = 2**-7 if values.dtype.name == "bfloat16" else 2**-10
    sign = np.random.default_rng(seed).integers(-1, 2, values.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        moved = np.asarray(values * (1 + sign * size)).astype(values.dtype)
    kept: NDArray[Any] = np.where(np.isfinite(moved), moved, values)
    return kept


def nudge_weights(model: Any, seed: int) -> Any:
    """A copy of `model` whose floating-point weights are moved by `nudge`; those of `STRUCTURE` stay."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    kinds = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, *HALF_TYPES.values())
    for graph in iterate_graphs(copy.graph):
        fixed = {
            node.input[at]
            for node in graph.node
            for at in STRUCTURE.get(node.op_type, ())
            if at < len(node.input)
        }
        for number, tensor in enumerate(graph.initializer):
            if tensor.data_type in kinds and tensor.name not in fixed:
                moved = nudge(onnx.numpy_helper.to_array(tensor), seed + NUDGES * number)
                tensor.CopyFrom(onnx.numpy_helper.from_array(moved, tensor.name))
    return copy


def require_same(
    guard: RewriteGuard, graph: Any, rewrite: Callable[[Any], Any], problem: str, way_out: str
) -> Any:
    """The graph of a `rewrite` without which nothing can be built.

    Raises BadInputError, two lines of `problem`, the first tensor that differs, and `way_out`, if it changes outputs.
    """
    rewritten, difference = guard.apply(graph, rewrite)
    if difference is not None:
        raise BadInputError(f"{problem}: {difference}\n{way_out}")
    return rewritten
