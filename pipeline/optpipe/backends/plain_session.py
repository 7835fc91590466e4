"""The reference runner: a graph as it is written, in ONNX Runtime on the CPU without any optimization of the graph.

A user's file, and every graph that is compared with it, runs here and nowhere else, so that a fusion of the runtime
cannot agree with a rewrite that made the same mistake.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from optpipe.backends.bounded_run import bound_run
from optpipe.backends.onnx_graph import find_unread_inputs, load_onnx
from optpipe.backends.onnx_marked import MarkedGraph
from optpipe.backends.onnxruntime_session import (
    create_inference_session,
    ort,
    specs_from_session,
    translate_runtime_errors,
)
from optpipe.core import np, onnx
from optpipe.core.card import InputSpec, TensorSpec
from optpipe.core.errors import BadInputError, StageError, escape

if TYPE_CHECKING:
    from numpy.typing import NDArray


_NEWER_FORMAT = re.compile(r"Unsupported model IR version: \d+, max supported IR version: (\d+)")
"""ONNX Runtime's message about a file that a newer onnx package wrote."""


class PlainSession:
    """Runs a graph, given as a file, as bytes or as a `ModelProto`, operator by operator.

    Buffers are not reused, because a file may give two sizes that differ the same name. Inputs that no operator reads
    need no value.

    Raises StageError if ONNX Runtime refuses the graph, and BadInputError if it refuses inputs, or if a run takes longer than
    `bounded_run.LONGEST_RUN_S` or leaves too little memory.

        >>> with PlainSession(Path("net.onnx")) as session:
        ...     session.run({"x": np.zeros((1, 3), np.float32)})["y"]
    """

    def __init__(self, graph: Path | bytes | Any) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_mem_reuse = False

        self._graph = graph
        source = graph if isinstance(graph, Path | bytes) else graph.SerializeToString()
        try:
            self._session = create_inference_session(source, "cpu", options, {})
        except StageError as error:
            if (newest := _NEWER_FORMAT.search(str(error))) is None:
                raise
            source = _state_format(graph, int(newest.group(1)))
            self._session = create_inference_session(source, "cpu", options, {})
        self.inputs, self.outputs = specs_from_session(self._session)
        self._unread: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        del self._session

    def run(self, inputs: "Mapping[str, NDArray[Any]]") -> "dict[str, NDArray[Any]]":
        """The outputs by name. Raises BadInputError if an input that the graph reads is missing."""
        given = dict(inputs)
        if any(spec.name not in given for spec in self.inputs):
            given = self._fill_unread() | given
        missing = [spec.name for spec in self.inputs if spec.name not in given]
        if missing:
            known = ", ".join(escape(name) for name in inputs) or "none"
            raise BadInputError(
                f"the graph reads its input '{escape(missing[0])}', which is not described (described: {known})\n"
                "name the inputs in the model card as the file does"
            )
        with bound_run(self._read_graph) as options, translate_runtime_errors():
            values = self._session.run(None, given, options)
        return {spec.name: value for spec, value in zip(self.outputs, values, strict=True)}

    def _read_graph(self) -> Any:
        """The model, perhaps without its weights."""
        if isinstance(self._graph, Path):
            return load_onnx(self._graph, weights=False)
        if isinstance(self._graph, bytes):
            from onnx import load_from_string

            return load_from_string(self._graph)
        return self._graph

    def _fill_unread(self) -> dict[str, Any]:
        """Zeros for each input that no output depends on: ONNX Runtime requires a value all the same."""
        if self._unread is None:
            model = self._read_graph()
            names = find_unread_inputs(model)
            self._unread = {}
            for spec in self.inputs:
                if spec.name in names:
                    self._unread[spec.name] = _make_zeros(spec)
        return self._unread


def _state_format(graph: Path | bytes | Any, version: int) -> bytes:
    """`graph` with the IR version `version`: the form of the file, which no operator's meaning depends on."""
    copy = onnx.ModelProto()
    if isinstance(graph, Path):
        copy = load_onnx(graph)
    elif isinstance(graph, bytes):
        copy.ParseFromString(graph)
    else:
        copy.CopyFrom(graph)
    copy.ir_version = version
    serialized: bytes = copy.SerializeToString()
    return serialized


def _make_zeros(spec: TensorSpec) -> Any:
    """Zeros of any type that a graph's input may have, also of those that NumPy lacks."""
    if spec.dtype.startswith("seq("):
        return []
    if spec.dtype.startswith("optional("):
        return None
    shape = [size if isinstance(size, int) else 1 for size in spec.shape]
    if spec.dtype == "tensor(string)":
        return np.zeros(shape, str)
    name = {"float32": "float"}.get(spec.dtype, spec.dtype)
    name = name.removeprefix("tensor(").removesuffix(")")
    kind = onnx.TensorProto.DataType.Value(name.upper())
    return ort.OrtValue.ortvalue_from_shape_and_type(shape, kind)


def mark_source(path: Path, inputs: Iterable[InputSpec]) -> MarkedGraph:
    """The tensors of the source's graph, for comparison with those of a build."""
    model = load_onnx(path)
    return MarkedGraph(model, model, inputs, lambda marked, _: PlainSession(marked).run)
