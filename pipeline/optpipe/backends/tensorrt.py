"""TensorRT 11 and 10, and TensorRT-RTX: one code for all, since they share their Python API.

The network is strongly typed: each tensor keeps the type that the ONNX graph gives it, so the types of the layers'
inputs are the precision. TensorRT-RTX builds ahead of time on a machine without a GPU.
Source: NVIDIA TensorRT 11 documentation, "Strongly Typed Networks" and "Working with Dynamic Shapes".
"""

import importlib
import importlib.util
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.backends.base import (
    BuildRequest,
    BuildResult,
    Capability,
    Device,
    merge_options,
)
from optpipe.backends.onnx_graph import count_node_macs, infer_graph_types, iterate_nodes
from optpipe.backends.tensorrt_session import OPTIONS as RUNTIME_OPTIONS
from optpipe.core.entries import ArtifactInfo
from optpipe.core.precision import LayerType, Precision
from optpipe.errors import BadInputError, MissingError, StageError
from optpipe.workspace.environment import get_gpu_name, get_package_version, list_gpus

if TYPE_CHECKING:
    from optpipe.backends.base import Session

ENGINE_FILE = "model.engine"
MAX_OPTIMIZATION_LEVEL = 5
"""Of `builder_optimization_level`."""
_TYPES = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16", "INT8": "int8", "FP8": "fp8", "FP4": "fp4", "INT4": "int4"}
_METADATA = "[ONNX Layer: "
_PRODUCT_LAYERS = ("CONVOLUTION", "DECONVOLUTION", "MATRIX_MULTIPLY")
_NO_ARITHMETIC = (
    "CAST",
    "CONCATENATION",
    "CONSTANT",
    "DEQUANTIZE",
    "GATHER",
    "IDENTITY",
    "QUANTIZE",
    "SHAPE",
    "SHUFFLE",
    "SLICE",
)


@dataclass(frozen=True, slots=True)
class TensorRT:
    """One of the two libraries."""

    name: str
    library: str
    """The Python module: `tensorrt` or `tensorrt_rtx`."""
    package: str
    install: str
    ahead_of_time: bool
    """Whether it builds without a GPU."""
    purpose: str
    needs_module: bool = False

    def runtime_options(self, device: Device) -> dict[str, Any]:  # noqa: ARG002
        """A session takes other options than a builder."""
        return dict(RUNTIME_OPTIONS)

    def precisions(self, device: Device) -> frozenset[Precision]:  # noqa: ARG002
        """All of them."""
        return frozenset(Precision)

    def devices(self) -> tuple[Device, ...]:
        """NVIDIA GPUs alone."""
        return ("cuda",)

    def probe_capability(self, device: Device) -> Capability:
        """Whether the library is there, and a GPU that it takes."""
        version = get_package_version(self.package)
        if version is None or importlib.util.find_spec(self.library) is None:
            return Capability(False, False, None, f"{self.library} is not installed", self.install)
        if device == "cpu":
            return Capability(False, False, version, f"{self.name} engines run on NVIDIA GPUs only")
        why_not = (
            self._find_gpu_refusal(list_gpus()[0].compute_capability)
            if list_gpus()
            else "no NVIDIA GPU on this machine"
        )
        return Capability(self.ahead_of_time or bool(list_gpus()), why_not is None, version, why_not)

    def _find_gpu_refusal(self, compute_capability: str) -> str | None:
        """TensorRT-RTX runs on GeForce and workstation GPUs: compute capability 7.5, 8.x and 12.x, not 9.0 or 10.x."""
        major = int(compute_capability.split(".")[0])
        if self.library == "tensorrt_rtx" and not (compute_capability == "7.5" or major in (8, 12)):
            return f"TensorRT-RTX does not support compute capability {compute_capability} (only 7.5, 8.x, and 12.x)"
        return None

    def recipe(self, device: Device, options: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """The library's version, the GPU an engine is tuned for (none when built ahead of time), and the options."""
        return {
            "library": self.library,
            "version": get_package_version(self.package),
            "gpu": self._tuned_for(),
            "options": self._checked(options),
        }

    def _tuned_for(self) -> str | None:
        return None if self.ahead_of_time else get_gpu_name()

    def _checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        options = merge_options(given, self._options(), self.name)
        if options["optimization_level"] > MAX_OPTIMIZATION_LEVEL:
            raise BadInputError(
                f"option optimization_level={options['optimization_level']}: expected 0 to {MAX_OPTIMIZATION_LEVEL}"
            )
        return options

    def _options(self) -> dict[str, Any]:
        common = {"workspace_bytes": 0, "optimization_level": -1}
        return common if self.ahead_of_time else {**common, "timing_cache": ""}

    def find_unsupported(self, request: BuildRequest) -> tuple[str, ...]:
        """The operators that the ONNX parser refuses, with the parser's own reason."""
        trt = self._library()
        logger = _create_logger(trt)
        builder = trt.Builder(logger)
        network = _create_network(trt, builder)  # builder and network have to outlive the parser
        parser = trt.OnnxParser(network, logger)
        if parser.parse_from_file(str(request.graph)):
            return ()
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        return tuple(dict.fromkeys(f"{each.node_operator()} ({each.node_name()}): {each.desc()}" for each in errors))

    def build(self, request: BuildRequest) -> BuildResult:
        """Parses, sets the profile, builds, and reads the types out of the network that was built."""
        trt = self._library()
        logger = _create_logger(trt)
        builder = trt.Builder(logger)
        network = _create_network(trt, builder)
        parser = trt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(request.graph)):
            raise StageError(f"{self.name} cannot parse {request.graph.name}: {parser.get_error(0).desc()}")
        config = self._config(trt, builder, request)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise StageError(f"{self.name} failed to build an engine: {logger.last_error or 'no reason given'}")
        (request.directory / ENGINE_FILE).write_bytes(plan)
        if timing_cache := str(request.options.get("timing_cache", "")):
            Path(timing_cache).write_bytes(config.get_timing_cache().serialize())
        layers = layers_from_network(trt, network, request)
        return BuildResult(layers, ENGINE_FILE, details={"gpu": self._tuned_for()})

    def _config(self, trt: Any, builder: Any, request: BuildRequest) -> Any:
        options = self._checked(request.options)
        config = builder.create_builder_config()
        if request.precision is Precision.TF32:
            config.set_flag(trt.BuilderFlag.TF32)
        else:
            config.clear_flag(trt.BuilderFlag.TF32)
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if options["workspace_bytes"]:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options["workspace_bytes"])
        if options["optimization_level"] >= 0:
            config.builder_optimization_level = options["optimization_level"]
        if options.get("timing_cache"):
            file = Path(options["timing_cache"])
            known = file.read_bytes() if file.is_file() else b""
            config.set_timing_cache(config.create_timing_cache(known), ignore_mismatch=False)
        profile = builder.create_optimization_profile()
        for each in request.card.inputs:
            profile.set_shape(each.name, each.min, each.opt, each.max)
        config.add_optimization_profile(profile)
        return config

    def find_run_blocker(self, info: ArtifactInfo) -> str | None:
        """Engines need a GPU of the kind they were built for."""
        why_not = self.probe_capability(info.device).why_not
        tuned_for = info.details.get("gpu")
        if why_not is None and tuned_for and get_gpu_name() != tuned_for:
            return f"built for {tuned_for}, this is {get_gpu_name()}"
        return why_not

    def load(self, directory: Path, info: ArtifactInfo, options: Mapping[str, Any]) -> "Session":  # noqa: ARG002
        """Deserializes an engine; raises `StageError` where the runtime refuses it."""
        from optpipe.backends.tensorrt_session import TensorRTSession

        return TensorRTSession(self._library(), directory / ENGINE_FILE, options)

    def _library(self) -> Any:
        try:
            return importlib.import_module(self.library)
        except ImportError as error:
            raise MissingError(f"{self.library} cannot be imported ({error}); {self.install}") from error


TENSORRT = TensorRT(
    name="tensorrt",
    library="tensorrt",
    package="tensorrt-cu13",
    install="`uv sync --extra tensorrt` (11) or `uv sync --no-dev --extra tensorrt10` in a checkout; it comes from NVIDIA's index",
    ahead_of_time=False,
    purpose="engines for data-center GPUs",
)
TENSORRT_RTX = TensorRT(
    name="tensorrt-rtx",
    library="tensorrt_rtx",
    package="tensorrt-rtx-cu13",
    install="install it with `pip install tensorrt-rtx-cu13`",
    ahead_of_time=True,
    purpose="engines for RTX GPUs, which can be built without one",
)


def layers_from_network(trt: Any, network: Any, request: BuildRequest) -> tuple[LayerType, ...]:
    """The layers of a strongly typed network by the type of their data input.

    The multiply-adds come from the ONNX node that a layer was made of; several layers of one node, as the two products of
    an LSTM, share them. The parser goes node by node: a layer without a name belongs to the node of the layer before it.
    A product whose node is not known is `unattributed`: its share is not proven.
    """
    import onnx

    model = onnx.load(request.graph)
    known = infer_graph_types(model, request.card.inputs)
    macs = {node.name: count_node_macs(node, known) for node in iterate_nodes(model.graph)}
    owners = _find_owners(network)
    products = Counter(
        owners[index]
        for index in range(network.num_layers)
        if str(network.get_layer(index).type).rpartition(".")[2] in _PRODUCT_LAYERS
    )
    tf32 = request.precision is Precision.TF32
    dequantized = _find_outputs(network, trt.LayerType.DEQUANTIZE)
    layers = []
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        op = str(layer.type).rpartition(".")[2]
        data = layer.get_input(0)
        if data is None or op in _NO_ARITHMETIC:
            continue
        kind = _TYPES.get(str(data.dtype).rpartition(".")[2], str(data.dtype).rpartition(".")[2].lower())
        amount = 0
        if op in _PRODUCT_LAYERS:
            kind = "int8" if data.name in dequantized else "tf32" if kind == "fp32" and tf32 else kind
            amount = macs.get(owners[index], 0) // products[owners[index]]
            if owners[index] not in macs:
                kind, amount = "unattributed", max(1, _count_known_macs(layer))
        elif kind not in _TYPES.values():
            continue
        layers.append(LayerType(layer.name, op, kind, amount))
    return tuple(layers)


def _find_owners(network: Any) -> list[str]:
    """For each layer the name of the ONNX node that it was made of: the parser writes it as `[ONNX Layer: NAME | ...]`."""
    found, owner = [], ""
    for index in range(network.num_layers):
        metadata = str(network.get_layer(index).metadata or "")
        if metadata.startswith(_METADATA):
            owner = metadata.removeprefix(_METADATA).removesuffix("]").split(" | ")[0]
        found.append(owner)
    return found


def _count_known_macs(layer: Any) -> int:
    """The multiply-adds of a matrix product as far as its sizes are known."""
    sizes = [*layer.get_output(0).shape, layer.get_input(0).shape[-1]]
    return prod(size for size in sizes if size > 0)


def _find_outputs(network: Any, kind: Any) -> frozenset[str]:
    layers = (network.get_layer(index) for index in range(network.num_layers))
    return frozenset(layer.get_output(0).name for layer in layers if layer.type == kind)


def _create_network(trt: Any, builder: Any) -> Any:
    """Strongly typed: asked for by flag in TensorRT 10, the only kind there is from 11 on."""
    return builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))


def _create_logger(trt: Any) -> Any:
    """A logger that stays silent and keeps the last error for the message to the user."""

    class Quiet(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last_error = ""

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.last_error = message

    return Quiet()
