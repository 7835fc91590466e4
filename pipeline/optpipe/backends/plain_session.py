"""The reference runner: a graph as it is written, in ONNX Runtime on the CPU without any optimization of the graph.

A user's file, and every graph that is compared with it, runs here and nowhere else, so that a fusion of the runtime
cannot agree with a rewrite that made the same mistake.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from optpipe.backends.onnx_graph import MarkedGraph, find_unread_inputs, load_onnx
from optpipe.backends.onnxruntime_session import (
    create_inference_session,
    ort,
    specs_from_session,
    translate_runtime_errors,
)
from optpipe.core import np
from optpipe.core.card import InputSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PlainSession:
    """Runs a graph, given as a file, as bytes or as a `ModelProto`, operator by operator.

    Buffers are not reused, because a file may give two sizes that differ the same name. Inputs that no operator reads
    need no value.

    Raises StageError if ONNX Runtime refuses the graph, and BadInputError if it refuses inputs.

        >>> with PlainSession(Path("net.onnx")) as session:
        ...     session.run({"x": np.zeros((1, 3), np.float32)})["y"]
    """

    def __init__(self, graph: Path | bytes | Any) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_mem_reuse = False

        self._graph = graph
        source = graph if isinstance(graph, Path | bytes) else graph.SerializeToString()
        self._session = create_inference_session(source, "cpu", options, {})
        self.inputs, self.outputs = specs_from_session(self._session)
        self._unread: dict[str, NDArray[Any]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        del self._session

    def run(self, inputs: "Mapping[str, NDArray[Any]]") -> "dict[str, NDArray[Any]]":
        """The outputs by name."""
        given = dict(inputs)
        if any(each.name not in given for each in self.inputs):
            given = self._fill_unread() | given
        with translate_runtime_errors():
            values = self._session.run(None, given)
        return {spec.name: value for spec, value in zip(self.outputs, values, strict=True)}

    def _fill_unread(self) -> "dict[str, NDArray[Any]]":
        """Zeros for each input that no operator reads: ONNX Runtime requires a value all the same."""
        if self._unread is None:
            model = self._graph
            if isinstance(model, Path):
                model = load_onnx(model, weights=False)
            elif isinstance(model, bytes):
                from onnx import load_from_string

                model = load_from_string(model)
            names = find_unread_inputs(model)
            self._unread = {}
            for each in self.inputs:
                dtype = str if each.dtype == "tensor(string)" else each.dtype
                if each.name in names and not str(dtype).startswith("tensor("):
                    shape = [size if isinstance(size, int) else 1 for size in each.shape]
                    self._unread[each.name] = np.zeros(shape, dtype)
        return self._unread


def mark_source(path: Path, inputs: Iterable[InputSpec]) -> MarkedGraph:
    """The tensors of the source's graph, for comparison with those of a build."""
    model = load_onnx(path)
    return MarkedGraph(model, model, inputs, lambda marked, _: PlainSession(marked).run)
