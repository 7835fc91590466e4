"""An ONNX Runtime session on host arrays, or bound to fixed buffers on the CPU or a GPU."""

import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

from optpipe.backends.base import Binding, Device, Run
from optpipe.backends.onnx_marked import MarkedGraph
from optpipe.backends.onnxruntime_calls import (
    NO_GRAPH,
    TensorCalls,
    bind_tensor,
    make_run_options,
)
from optpipe.core import LazyModule, np, torch
from optpipe.core.card import InputSpec, TensorSpec
from optpipe.core.errors import BadInputError, MissingError, StageError, first_line
from optpipe.core.precision import MAX_OTHERS, LayerType, PlacedNode, Placement
from optpipe.core.records import group_pairs
from optpipe.core.wording import Call

Optimization = Literal["all", "extended", "basic", "disabled"]
"""How much of a graph ONNX Runtime rewrites. `extended` fuses operators, and `all` changes layouts too."""
LEVELS: tuple[Optimization, ...] = ("all", "extended", "basic", "disabled")
ort, state = LazyModule("onnxruntime"), LazyModule("onnxruntime.capi.onnxruntime_pybind11_state")
BIAS_FUSION_PASS = "ConvAddFusion"
"""Puts the additions that `separate_biases` makes back into the convolutions."""
WEIGHT_PASS = "WeightBiasQuantization"
"""Quantizes floating-point layers between Q/DQ pairs: see `protect_convolutions`."""
PROVIDERS: dict[Device, str] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_ORT_TYPES = {
    "tensor(float)": "float32", "tensor(float16)": "float16", "tensor(bfloat16)": "bfloat16", "tensor(int64)": "int64",
    "tensor(int32)": "int32", "tensor(int8)": "int8", "tensor(uint8)": "uint8", "tensor(bool)": "bool",
}  # fmt: skip


_NODE_SUFFIX = "_kernel_time"
_NOT_IN_NUMPY = ("Numpy_type", "No corresponding Numpy type")
"""Parts of what ONNX Runtime raises, as a RuntimeError, for BF16, FP8, and types of less than a byte."""
_NEWER_OPSET = re.compile(
    r"Opset (\d+) is under development.*support for domain (\S+) is till opset (\d+)", re.DOTALL
)
"""ONNX Runtime's message about a graph of an opset that it does not know yet."""
QDQ_AS_WRITTEN = ("session.disable_quant_qdq", "1")
"""Leaves out ONNX Runtime's passes over Q/DQ pairs. They prepare integer kernels, which its CUDA provider does not have, and
do harm there: biases become INT32 with scale(input) * scale(weight), which is zero or subnormal if scales are FP16 (`digits`
fell from 99.5% to 9.6% on an H200); weights keep a DequantizeLinear, with which the NHWC layout is refused; and every
consumer of a dequantized tensor gets a copy of it. Source of the setting: onnxruntime_session_options_config_keys.h."""


EXACT_SUMS = ("session.x64quantprecision", "1")
"""Without VNNI, the default INT8 kernels of x64 saturate sums of two products in INT16: the segmenter of the shapes fell from 73.5%
to 63.4% mIoU. Processors with VNNI ignore the setting. Source: onnxruntime_session_options_config_keys.h."""


FLOAT_DATA = ("session.qdq_matmulnbits_accuracy_level", "1")
"""Products with dequantized weights (INT4 or INT8) stay in floating point. ONNX Runtime fuses them to MatMulNBits, whose default
level, 4, quantizes their data to INT8: a product of 128 terms fell from 327 to 45 dB. Source of the setting:
onnxruntime_session_options_config_keys.h."""


def create_inference_session(
    graph: Path | bytes,
    device: Device,
    options: Any,
    provider: Mapping[str, str],
    *,
    quantize_floats: bool = False,
) -> Any:
    """An `onnxruntime.InferenceSession` of a file or of a serialized graph; `provider` holds the CUDA provider's options.

    With `quantize_floats`, ONNX Runtime quantizes floating-point layers between Q/DQ pairs on the CPU.

    Raises StageError if ONNX Runtime refuses the graph, MissingError if its CUDA provider does not start.
    """
    ort.set_default_logger_severity(
        4
    )  # real errors are raised; cuDNN logs attempts at fusion as errors
    options.log_severity_level = 4
    options.add_session_config_entry(*RECORD_ASSIGNMENT)
    options.add_session_config_entry(*FLOAT_DATA)
    if device == "cuda":
        ort.preload_dlls()  # cuDNN and CUDA from the packages that came with torch
        options.add_session_config_entry(*QDQ_AS_WRITTEN)
        providers: list[Any] = [(PROVIDERS["cuda"], dict(provider)), PROVIDERS["cpu"]]
    else:
        options.add_session_config_entry(*EXACT_SUMS)
        providers = [PROVIDERS["cpu"]]
    try:
        left_out = (
            [BIAS_FUSION_PASS] if device == "cuda" and provider.get("fuse_conv_bias") != "1" else []
        )
        left_out += [] if device == "cuda" or quantize_floats else [WEIGHT_PASS]
        source = str(graph) if isinstance(graph, Path) else graph
        session = ort.InferenceSession(
            source, options, providers=providers, disabled_optimizers=left_out
        )
    except (
        state.Fail,
        state.InvalidGraph,
        state.NotImplemented,
        state.InvalidArgument,
        state.RuntimeException,
    ) as error:
        name = graph.name if isinstance(graph, Path) else "the graph"
        raise _explain_refusal(error, name, device) from error
    if device == "cuda" and session.get_providers()[0] != PROVIDERS["cuda"]:
        raise MissingError(
            "ONNX Runtime's CUDA provider did not start and would silently use the CPU; run `"
            + Call("doctor")
            + "` for the cause"
        )
    return session


def _explain_refusal(error: Exception, name: str, device: Device) -> StageError:
    """Why ONNX Runtime does not open a graph, and the way out if it is known."""
    if newer := _NEWER_OPSET.search(str(error)):
        version, domain, newest = newer.groups()
        problem = f"{name} is opset {version} of {domain}"
        return StageError(
            f"{problem}; ONNX Runtime {ort.__version__} runs up to opset {newest}\n"
            f"export the model at opset {newest} or earlier"
        )
    way_out = ""
    if isinstance(error, state.NotImplemented):  # as for BF16 on the CPU
        way_out = f"\nit has no kernel on {device} for this operator with these types; export the model in float32"
    return StageError(f"ONNX Runtime rejected {name}: {_reason(error)}{way_out}")


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rpartition(" : ")[2].rpartition("&) ")[2][:240]


def get_level(optimization: Optimization) -> Any:
    """The runtime's own value."""
    levels = ort.GraphOptimizationLevel
    return {
        "all": levels.ORT_ENABLE_ALL,
        "extended": levels.ORT_ENABLE_EXTENDED,
        "basic": levels.ORT_ENABLE_BASIC,
        "disabled": levels.ORT_DISABLE_ALL,
    }[optimization]


def optimize_graph(
    graph: Path,
    target: Path,
    device: Device,
    *,
    quantize_floats: bool = False,
    optimization: Optimization = "all",
) -> None:
    """Writes the graph as the provider fuses it. Layouts depend on the processor, so loading changes them, not this.

    See `create_inference_session` for `quantize_floats`.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = get_level(
        "extended" if optimization == "all" else optimization
    )
    options.optimized_model_filepath = str(target)
    create_inference_session(graph, device, options, {}, quantize_floats=quantize_floats)


@contextmanager
def translate_runtime_errors() -> Iterator[None]:
    """Raises `BadInputError` if ONNX Runtime rejects the inputs, `StageError` if it fails on the graph."""
    try:
        yield
    except state.InvalidArgument as error:
        raise BadInputError(f"ONNX Runtime rejected these inputs: {_reason(error)}") from error
    except (state.Fail, state.RuntimeException, state.NotImplemented) as error:
        raise StageError(f"ONNX Runtime could not run the graph: {_reason(error)}") from error
    except RuntimeError as error:
        if not any(words in str(error) for words in _NOT_IN_NUMPY):
            raise
        raise StageError(
            f"an input or output has a type that NumPy lacks: {first_line(error)[:160]}\n"
            "cast it to float32 inside the model"
        ) from error


class OnnxRuntimeSession:
    def __init__(
        self,
        graph: Path | bytes,
        device: Device,
        options: Mapping[str, Any],
        *,
        tensor_cores: bool = False,
        profile: Path | None = None,
        optimization: Optimization = "all",
    ) -> None:
        """Loads the graph, which is optimized once more for this processor.

        `tensor_cores` lets CUDA use Tensor Cores, also for FP32 products, as TF32. With `profile`, the prefix of a file, ONNX
        Runtime records when it runs each node: see `end_profiling`. Raises StageError if `cuda_graph` is on and a node has no
        CUDA kernel.
        """
        self.device = device
        self._graphs = 0
        self._stream = _get_stream_handle() if device == "cuda" else 0
        self._own_stream = device == "cuda" and self._stream == 0
        self._cuda_graph = bool(options.get("cuda_graph", False))
        settings = ort.SessionOptions()
        settings.graph_optimization_level = get_level(optimization)
        settings.intra_op_num_threads = int(options.get("threads", 0))
        if not options.get("spinning", True):
            settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if profile is not None:
            settings.enable_profiling = True
            settings.profile_file_prefix = str(profile)
        provider = {}
        if device == "cuda":
            provider = {
                "user_compute_stream": str(_get_stream_handle()),
                "use_tf32": str(
                    int(tensor_cores)
                ),  # of every type: see onnxruntime.may_use_tensor_cores
                "prefer_nhwc": str(int(options["nhwc"])),
                "enable_cuda_graph": str(int(options["cuda_graph"])),
                "cudnn_conv_algo_search": str(options["cudnn_search"]),
                "cudnn_conv_use_max_workspace": "1",
                "fuse_conv_bias": str(int(options["fuse_conv_bias"])),
            }
        self._session = create_inference_session(graph, device, settings, provider)
        self.inputs, self.outputs = specs_from_session(self._session)
        self._output_names = [output.name for output in self.outputs]
        self._without_graph = None
        if self._cuda_graph:
            self._without_graph = make_run_options(NO_GRAPH)
        self._calls: TensorCalls | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._calls = None
        del self._session

    def run(self, inputs: Mapping[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
        """Runs without a CUDA graph, so shapes may change from call to call."""
        try:
            values = self._session.run(None, inputs, self._without_graph)
        except Exception:
            with translate_runtime_errors():
                raise
        return dict(zip(self._output_names, values, strict=True))

    def run_on(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Orders its stream after torch's current one, and that one after it, on the GPU: see `TensorCalls`.

        A session that was loaded on torch's default stream has a stream that only ONNX Runtime knows, and waits.
        """
        try:
            return self._get_calls().run(inputs)
        except Exception:
            with translate_runtime_errors():
                raise

    def prepare(self, inputs: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        """As `run_on`, with one binding for all calls."""
        call = self._get_calls().prepare(inputs)

        def translated() -> dict[str, Any]:
            try:
                return call()
            except Exception:
                with translate_runtime_errors():
                    raise

        return translated

    def _get_calls(self) -> TensorCalls:
        if self._calls is None:
            self._calls = TensorCalls(
                self._session, self.inputs, self.outputs, self._stream, cuda_graph=self._cuda_graph
            )
        return self._calls

    def find_placement(self, layers: Iterable[LayerType]) -> Placement:
        return placement_from_session(self._session, PROVIDERS[self.device], layers)

    def end_profiling(self) -> Path:
        return Path(self._session.end_profiling())

    def bind(self, inputs: Mapping[str, "np.ndarray"]) -> Binding:
        """Buffers for these shapes; with `cuda_graph`, each binding has its own graph."""
        outputs = self.run(inputs)
        if self.device == "cpu":
            given = {
                name: array.copy(order="C") for name, array in inputs.items()
            }  # a binding needs contiguous arrays
            return OnnxRuntimeBinding(
                self._session, given, {name: value.copy() for name, value in outputs.items()}
            )
        self._graphs += 1
        filled = {name: torch.from_numpy(array).cuda() for name, array in inputs.items()}
        empty = {
            name: torch.empty_like(torch.from_numpy(array), device="cuda")
            for name, array in outputs.items()
        }
        return self.bind_in_place(filled, empty, self._graphs if self._cuda_graph else NO_GRAPH)

    def bind_in_place(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], graph_id: int = NO_GRAPH
    ) -> Binding:
        """Binds CUDA tensors. A session with a separate stream waits: nothing else orders a launch before torch's next kernel."""
        options = make_run_options(graph_id, waits=self._own_stream)
        return OnnxRuntimeBinding(self._session, inputs, outputs, options)


REPRODUCE = f"""options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
session = ort.InferenceSession(graph, options, ["{{provider}}"], disabled_optimizers=["{WEIGHT_PASS}"])
found, version = session.run(None, inputs)[0], f"ONNX Runtime {{{{ort.__version__}}}}"
"""
"""The compiled graph of a `REPRODUCER`, on an execution provider."""


def mark_as_written(graph: Any, inputs: Iterable[InputSpec], device: Device) -> MarkedGraph:
    """`graph` in the same precision without optimizations."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL

    def open_graph(model: Any, _: object) -> Run:
        session = create_inference_session(
            model.SerializeToString(), device, options, {"use_tf32": "0"}
        )
        names = [output.name for output in session.get_outputs()]
        return lambda feeds: dict(zip(names, session.run(None, dict(feeds)), strict=True))

    return MarkedGraph(graph, graph, inputs, open_graph)


def read_node_times(profile: Path) -> dict[str, float]:
    """The median time in ns of each node in an ONNX Runtime profile. Raises StageError for another file."""
    try:
        times = group_pairs(
            (
                str(event["name"]).removesuffix(_NODE_SUFFIX),
                1_000 * int(event["dur"]),
            )  # whole microseconds
            for event in json.loads(profile.read_text(encoding="utf-8"))
            if event.get("cat") == "Node" and str(event.get("name", "")).endswith(_NODE_SUFFIX)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StageError(
            f"{profile.name}: not an ONNX Runtime profile ({type(error).__name__}: {str(error)[:120]})"
        ) from error
    return {name: float(statistics.median(values)) for name, values in times.items()}


def _get_stream_handle() -> int:
    """The handle of torch's current CUDA stream. For 0, the default stream, ONNX Runtime creates a separate stream."""
    return int(torch.cuda.current_stream().cuda_stream)


def specs_from_session(session: Any) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The inputs and the outputs of an `onnxruntime.InferenceSession`."""
    inputs, outputs = session.get_inputs(), session.get_outputs()
    return tuple(map(_make_spec, inputs)), tuple(map(_make_spec, outputs))


def _make_spec(value: Any) -> TensorSpec:
    shape = tuple(
        size if isinstance(size, int) else str(size or f"dim{axis}")
        for axis, size in enumerate(value.shape)
    )
    return TensorSpec(value.name, _ORT_TYPES.get(value.type, value.type), shape)


class OnnxRuntimeBinding:
    """NumPy arrays, or CUDA tensors, bound without a copy; the outputs have the shapes of the session's."""

    def __init__(
        self,
        session: Any,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        options: Any | None = None,
    ) -> None:
        self.inputs, self.outputs = dict(inputs), dict(outputs)
        self._session, self._options, self._io = session, options, session.io_binding()
        for bind, values in (
            (self._io.bind_input, self.inputs),
            (self._io.bind_output, self.outputs),
        ):
            for name, value in values.items():
                if isinstance(value, np.ndarray):
                    bind(name, "cpu", 0, value.dtype, value.shape, value.ctypes.data)
                else:
                    bind_tensor(bind, name, value)

    def launch(self) -> None:
        """Enqueues CUDA tensors on the stream that was torch's current stream when the session was loaded."""
        self._session.run_with_iobinding(self._io, self._options)


RECORD_ASSIGNMENT = ("session.record_ep_graph_assignment_info", "1")
"""The session setting for `get_provider_graph_assignment_info`: a provider silently leaves nodes without a kernel to the CPU.

Source: onnxruntime_session_options_config_keys.h."""


def placement_from_session(session: Any, provider: str, layers: Iterable[LayerType]) -> Placement:
    """The nodes that do not run on `provider`, with their share of the MACs of `layers`, which are matched by name.

    `session` is an `onnxruntime.InferenceSession` that was made with `RECORD_ASSIGNMENT`. Nodes of unknown cost come first.
    """
    macs = {layer.name: layer.macs for layer in layers}
    total = sum(count or 0 for count in macs.values())
    assigned = [
        (part.ep_name, node)
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    ]
    nodes = [
        PlacedNode(
            node.name,
            node.op_type,
            owner,
            (macs.get(node.name) or 0) / total if total else 1 / len(assigned),
        )
        for owner, node in assigned
    ]
    elsewhere = sorted(
        (node for node in nodes if node.provider != provider),
        key=lambda node: (macs.get(node.name, 0) is not None, -node.share),
    )
    share, unit = sum(node.share for node in elsewhere), "MACs" if total else "nodes"
    return Placement(
        provider, len(nodes), len(elsewhere), share, tuple(elsewhere[:MAX_OTHERS]), unit
    )
