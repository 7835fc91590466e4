"""OpenVINO's part: convert, compile, run, and read back what was compiled."""

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import openvino as ov

from optpipe.backends.base import Binding, BuildRequest, Device, Marked, Run
from optpipe.backends.onnx_graph import load_onnx
from optpipe.backends.onnx_layers import layers_from_onnx
from optpipe.backends.onnx_marked import MarkedGraph
from optpipe.backends.plain_session import mark_source
from optpipe.core.card import TensorSpec
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError, StageError, first_line
from optpipe.core.precision import UNATTRIBUTED, LayerType, Precision

TYPES = {"f32": "fp32", "f16": "fp16", "bf16": "bf16", "i8": "int8", "u8": "int8", "f64": "fp64"}
"""optpipe's names of OpenVINO's types."""
HINTS = {Precision.FP16: "f16", Precision.BF16: "bf16"}
"""The type of floating-point layers; FP32 in all other builds."""
TIMED_RUNS = 5


@cache
def open_core() -> ov.Core:
    return ov.Core()


@cache
def list_capabilities() -> frozenset[str]:
    """The types that the CPU computes, by OpenVINO's names."""
    return frozenset(open_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))


@cache
def has_vnni() -> bool:
    """Whether the processor adds INT8 products in 32 bits (AVX-VNNI, AVX-512 VNNI, or AMX)."""
    with suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
        return not {"avx512_vnni", "avx_vnni", "amx_int8"}.isdisjoint(flags)
    return False


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Raises StageError with OpenVINO's reason on one line."""
    try:
        yield
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[-1].strip()[:240] if lines else first_line(error)
        raise StageError(f"OpenVINO could not {what}: {reason}") from error


def convert_graph(graph: Path, target: Path) -> None:
    """Writes the ONNX file `graph` as `target` and a file of weights beside it, in their own types."""
    with translate_errors("read the graph"):
        ov.save_model(open_core().read_model(graph), target, compress_to_fp16=False)


def compile_model(model: Any, precision: Precision, options: Mapping[str, Any], **more: str) -> Any:
    """`model` (a path, or bytes of ONNX) for the CPU, with the floating-point type of `precision`."""
    settings = {
        "INFERENCE_PRECISION_HINT": HINTS.get(precision, "f32"),
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": "YES" if options.get("pinning") else "NO",
        **({"INFERENCE_NUM_THREADS": str(options["threads"])} if options.get("threads") else {}),
        **more,
    }
    with translate_errors("compile the model"):
        return open_core().compile_model(open_core().read_model(model), "CPU", settings)


def read_layers(
    request: BuildRequest, path: Path, options: Mapping[str, Any]
) -> tuple[LayerType, ...]:
    """The layers of the graph, each with the type in which the compiled model computes it.

    A product that the compiled model does not name is unattributed; another layer that was fused into its neighbors is left out.
    """
    types = read_compiled_types(compile_model(path, request.precision, options))
    graph = load_onnx(request.graph)
    outputs = {node.name: tuple(node.output) for node in graph.graph.node}
    layers = []
    for layer in layers_from_onnx(graph, request.card.inputs):
        names = (layer.name, *outputs.get(layer.name, ()))
        kind = next((types[name] for name in names if name in types), None)
        if kind is not None or layer.macs != 0:
            layers.append(replace(layer, type=kind or UNATTRIBUTED))
    return tuple(layers)


def read_compiled_types(compiled: Any) -> dict[str, str]:
    """The type in which the compiled model computes each operator of the graph, by name."""
    types: dict[str, str] = {}
    for operator in compiled.get_runtime_model().get_ordered_ops():
        kind = read_fact(operator, "runtimePrecision")
        for name in read_original_names(operator):
            types.setdefault(name, TYPES.get(kind, kind))
    return types


def read_original_names(operator: Any) -> list[str]:
    """The operators of the graph that one operator of the compiled model computes."""
    if read_fact(operator, "layerType") in ("Const", "Input", "Output", "Reorder"):
        return []
    names = read_fact(operator, "originalLayersNames").split(",")
    return [name.strip() for name in names if name.strip()]


def read_fact(operator: Any, key: str) -> str:
    """A property of an operator of the compiled model; empty if it has none."""
    facts = operator.get_rt_info()
    return str(facts[key].value) if key in facts else ""


class OpenVinoSession:
    """A compiled model. `run` takes any shapes of its profile, `bind` fixes them."""

    device: Device = "cpu"

    def __init__(
        self,
        model: Path | bytes,
        precision: Precision,
        options: Mapping[str, Any],
        *,
        profile: bool = False,
    ) -> None:
        more = {"PERF_COUNT": "YES"} if profile else {}
        self._compiled = compile_model(model, precision, options, **more)
        self.inputs = tuple(describe_port(port) for port in self._compiled.inputs)
        self.outputs = tuple(describe_port(port) for port in self._compiled.outputs)
        self._request = self._compiled.create_infer_request()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        del self._request, self._compiled

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Raises BadInputError for inputs that the model does not take."""
        try:
            values = self._request.infer(dict(inputs), share_inputs=False)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise BadInputError(f"OpenVINO rejected these inputs: {first_line(error)}") from error
        return {
            spec.name: np.array(values[at], order="C", copy=True)
            for at, spec in enumerate(self.outputs)
        }

    def bind(self, inputs: Mapping[str, np.ndarray]) -> Binding:
        """Buffers of these shapes, which OpenVINO reads and writes without a copy."""
        filled = {name: array.copy(order="C") for name, array in inputs.items()}
        return OpenVinoBinding(self._compiled, filled, self.run(inputs))

    def time_nodes(self, inputs: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The median time in ns of each node, by the name of the first layer of the graph that it computes."""
        operators = self._compiled.get_runtime_model().get_ordered_ops()
        names = {
            operator.get_friendly_name(): next(iter(read_original_names(operator)), "")
            for operator in operators
        }
        times: dict[str, list[float]] = {}
        for _ in range(TIMED_RUNS):
            self.run(inputs)
            for node in self._request.profiling_info:
                if name := names.get(node.node_name):
                    ns = node.real_time.total_seconds() * 1e9
                    times.setdefault(name.removesuffix("/WithoutBiases"), []).append(ns)
        return {name: statistics.median(each) for name, each in times.items()}


class OpenVinoBinding:
    """One request whose tensors share memory with NumPy arrays."""

    def __init__(
        self, compiled: Any, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
    ) -> None:
        self.inputs, self.outputs = dict(inputs), dict(outputs)
        self._request = compiled.create_infer_request()
        for name, array in (*self.inputs.items(), *self.outputs.items()):
            self._request.set_tensor(name, ov.Tensor(array, shared_memory=True))

    def launch(self) -> None:
        """Runs one inference; finished on return."""
        self._request.start_async()
        self._request.wait()


def describe_port(port: Any) -> TensorSpec:
    """Name, type, and shape of an input or output; open dimensions have names."""
    shape = tuple(
        f"dim{axis}" if size.is_dynamic else size.get_length()
        for axis, size in enumerate(port.get_partial_shape())
    )
    return TensorSpec(port.get_any_name(), np.dtype(port.get_element_type().to_dtype()).name, shape)


def open_marked_graphs(info: ArtifactInfo, request: BuildRequest, source: Path) -> Marked:
    """The FP32 source as ONNX Runtime runs it, and the build's graph as OpenVINO compiles it."""
    written = load_onnx(request.graph)

    def open_graph(model: Any, _: object) -> Run:
        return OpenVinoSession(model.SerializeToString(), info.precision, info.options).run

    inputs = request.card.inputs
    return mark_source(source, inputs), MarkedGraph(written, written, inputs, open_graph)
