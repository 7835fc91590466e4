"""TensorRT 11 and 10, and TensorRT-RTX, which share their Python API; and Torch-TensorRT, which makes TensorRT engines.

The network is strongly typed: each tensor keeps its type in the ONNX graph, so the types of the layers' inputs are the
precision. TensorRT-RTX builds ahead of time on a machine without a GPU.
Source: NVIDIA TensorRT 11 documentation, "Strongly Typed Networks" and "Working with Dynamic Shapes".
"""

import importlib
import importlib.util
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from optpipe.backends.base import (
    Backend,
    BuildRequest,
    BuildResult,
    Capability,
    Device,
    Marked,
    Option,
    Run,
    Serving,
    Session,
    merge_options,
)
from optpipe.backends.onnx_graph import load_onnx
from optpipe.backends.onnx_layers import count_graph_macs, describe_graph_weights, infer_graph_types
from optpipe.backends.onnx_marked import MarkedGraph
from optpipe.backends.onnxruntime_session import mark_as_written
from optpipe.backends.plain_session import mark_source
from optpipe.backends.sparsity import Sparsity, find_sparsity, list_sparse_kernels
from optpipe.backends.tensorrt_engine import (
    BUILDER_OPTIONS,
    TensorRTSession,
    create_config,
    create_logger,
    create_network,
    describe_in_key,
    find_profiles,
    list_builder_options,
    options_from_given,
    read_builder_options,
    require_supported,
    write_timing_cache,
)
from optpipe.backends.tensorrt_plugins import (
    copy_plugins,
    describe_plugins,
    list_plugins,
    load_plugins,
)
from optpipe.backends.torch_backend import CUDA_GRAPH
from optpipe.backends.torch_products import layers_from_program
from optpipe.backends.torch_program import TORCH_PRECISIONS, export_program
from optpipe.core import onnx
from optpipe.core.card import InputSpec
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError, MissingError, StageError
from optpipe.core.files import hash_file
from optpipe.core.precision import UNATTRIBUTED, LayerType, Precision
from optpipe.core.wording import Argument
from optpipe.workspace.environment import get_gpu_name, get_package_version, list_gpus
from optpipe.workspace.file_names import ONNX
from optpipe.workspace.files import write_bytes

ENGINE_FILE = "model.engine"
REPRODUCE = """import os

os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "{rtx}"
from polygraphy.backend.trt import EngineFromNetwork, NetworkFromOnnxPath, TrtRunner

with TrtRunner(EngineFromNetwork(NetworkFromOnnxPath(graph, strongly_typed=True))) as runner:
    (found,), version = runner.infer(inputs).values(), "{library}"
"""
"""The compiled graph of a `REPRODUCER`."""
_NOT_MARKED = ("profiles", "refit", "strip_plan", "version_compatible")
"""Builder options that change nothing that an engine computes; one with marked outputs is built without them."""
INSPECTOR_FILE = "inspector.json"
"""The output of TensorRT's engine inspector (NVIDIA TensorRT 11 documentation, "Engine Inspector"), which needs the GPU."""


class TensorRT(Backend):
    """TensorRT for data-center GPUs, and the base of TensorRT-RTX."""

    name = "tensorrt"
    purpose = "engines for data-center GPUs"
    packages: tuple[str, ...] = ("tensorrt-cu13",)
    library = "tensorrt"
    """The Python module."""
    install = "`uv sync --extra tensorrt` (11) or `uv sync --no-dev --extra tensorrt10` in a checkout; it comes from NVIDIA's index"

    def describe_options(self, device: Device) -> tuple[Option, ...]:
        return (*list_builder_options(self.library), CUDA_GRAPH)

    def merge_options(
        self, given: Mapping[str, Any], device: Device
    ) -> dict[str, bool | int | str]:
        of_builder = {each.name for each in BUILDER_OPTIONS}
        own = {name: value for name, value in given.items() if name in of_builder}
        read_builder_options(own, self.library, self.name)
        return Backend.merge_options(self, given, device)

    def precisions(self, device: Device) -> frozenset[Precision]:
        return frozenset(Precision) - {Precision.FP8}

    def precisions_as_given(self, device: Device) -> frozenset[Precision]:
        return frozenset({Precision.FP8})

    def devices(self) -> tuple[Device, ...]:
        return ("cuda",)

    def probe_capability(self, device: Device) -> Capability:
        version = get_package_version(self.package)
        if version is None or importlib.util.find_spec(self.library) is None:
            return Capability(False, False, None, f"{self.library} is not installed", self.install)
        if device == "cpu":
            return Capability(False, False, version, f"{self.name} engines run on NVIDIA GPUs only")
        why_not = (
            self.find_gpu_refusal(list_gpus()[0].compute_capability)
            if list_gpus()
            else "no NVIDIA GPU on this machine"
        )
        return Capability(
            self.ahead_of_time or bool(list_gpus()), why_not is None, version, why_not
        )

    def find_gpu_refusal(self, compute_capability: str) -> str | None:
        return None

    def recipe(self, device: Device, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "library": self.library,
            "version": get_package_version(self.package),
            "gpu": self._tuned_for(),
            "options": describe_in_key(self._read_options(options)),
        }

    def _tuned_for(self) -> str | None:
        return None if self.ahead_of_time else get_gpu_name()

    def _read_options(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        options = options_from_given(given, self.library, self.name)
        narrowed = options["compute_capabilities"] or options["hardware_compatibility"] != "none"
        if narrowed and importlib.util.find_spec(self.library):
            require_supported(self._library(), options)
        return options

    def build(self, request: BuildRequest) -> BuildResult:
        trt, options = self._library(), self._read_options(request.options)
        sparsity = find_sparsity(load_onnx(request.graph))
        if options["sparse_weights"] and not sparsity.sparse:
            raise BadInputError(
                "option sparse_weights=true: no convolution or matrix product has 2:4 sparse weights\n"
                "prune the model to that pattern, or omit the option"
            )
        logger = create_logger(trt)
        builder = trt.Builder(logger)
        load_plugins(builder.get_plugin_registry(), list_plugins(options), self.library, logger)
        network = create_network(trt, builder)  # builder and network must outlive the parser
        parser = trt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(request.graph)):
            errors = [parser.get_error(index) for index in range(parser.num_errors)]
            reasons = _list_reasons(
                (each.node_operator(), each.node_name(), each.desc()) for each in errors
            )
            raise StageError(
                f"{self.name} does not support {request.card.name}: {'; '.join(reasons)}"
            )
        config = create_config(trt, builder, request, options)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise StageError(
                f"{self.name} failed to build an engine: {logger.first_error or 'no reason given'}"
            )
        (request.directory / ENGINE_FILE).write_bytes(plan)
        engine = trt.Runtime(logger).deserialize_cuda_engine(plan) if list_gpus() else None
        kernels = None
        if engine is not None:
            inspected = engine.create_engine_inspector().get_engine_information(
                trt.LayerInformationFormat.JSON
            )
            write_bytes(request.directory / INSPECTOR_FILE, inspected.encode())
            kernels = len(list_sparse_kernels(inspected))
        remarks = [_describe_sparsity(sparsity, options, kernels)]
        if options["timing_cache"]:
            remarks.append(write_timing_cache(config, Path(options["timing_cache"])))
        gpu = self._tuned_for() if options["hardware_compatibility"] == "none" else None
        layers = layers_from_network(trt, network, request)
        built_with = {**options, "plugins": describe_plugins(options)}
        if not options["plugins"]:
            built_with.pop("plugins")
        details: dict[str, Any] = {"gpu": gpu, "builder": built_with}
        if options["strip_plan"]:
            details["weights"] = {
                "graph": request.graph.parent.name,
                "sha256": hash_file(request.graph),
            }
        return BuildResult(
            layers,
            ENGINE_FILE,
            details=details,
            remarks=tuple(filter(None, remarks)),
            more_files=copy_plugins(options, request.directory),
        )

    def find_run_blocker(self, info: ArtifactInfo) -> str | None:
        why_not = self.probe_capability(info.device).why_not
        tuned_for = info.details.get("gpu")
        if why_not is None and tuned_for and get_gpu_name() != tuned_for:
            return f"built for {tuned_for}, this is {get_gpu_name()}"
        targets = str(info.details.get("builder", {}).get("compute_capabilities", ""))
        if (
            why_not is None
            and targets
            and list_gpus()[0].compute_capability not in targets.replace(" ", "").split(",")
        ):
            return f"built for compute capability {targets}, this is {list_gpus()[0].compute_capability}"
        return why_not

    def list_files(self, info: ArtifactInfo) -> tuple[str, ...]:
        return (ENGINE_FILE, *info.more_files)

    def load(self, directory: Path, info: ArtifactInfo, options: Mapping[str, Any]) -> Session:
        return TensorRTSession(
            self._library(),
            directory / ENGINE_FILE,
            options,
            plugins=[directory / name for name in info.more_files],
            weights=_find_stripped_weights(directory, info),
            lean_runtime=bool(info.details.get("builder", {}).get("version_compatible")),
        )

    def open_marked(self, info: ArtifactInfo, request: BuildRequest, source: Path) -> Marked:
        """Builds the engine's graph again with marked outputs, for the shapes of one sample."""
        options = {
            name: value for name, value in request.options.items() if name not in _NOT_MARKED
        }
        bare = replace(info, details={})
        inputs, written = request.card.inputs, load_onnx(request.graph)

        def open_graph(model: Any, feeds: Mapping[str, Any]) -> Run:
            shapes = [
                InputSpec(name, str(each.dtype), *[each.shape] * 3) for name, each in feeds.items()
            ]
            with TemporaryDirectory() as folder:
                directory, card = Path(folder), replace(request.card, inputs=tuple(shapes))
                typed = onnx.shape_inference.infer_shapes(
                    model
                )  # the parser needs the outputs' types
                write_bytes(directory / ONNX, typed.SerializeToString())
                self.build(
                    replace(
                        request,
                        card=card,
                        graph=directory / ONNX,
                        directory=directory,
                        options=options,
                    )
                )
                return self.load(directory, bare, {}).run

        again = REPRODUCE.format(rtx=int("rtx" in self.library), library=self.library)
        build = MarkedGraph(written, written, inputs, open_graph, again)
        build.open_apart = lambda: (build, mark_as_written(written, inputs, info.device))
        return mark_source(source, inputs), build

    def serving(self, info: ArtifactInfo, options: Mapping[str, Any], version: str) -> Serving:
        """Triton's own backend loads only the engine's file, for one version of the library.

        Raises BadInputError for an engine that needs more than its file.
        """
        _require_own_weights(info)
        if info.more_files:
            raise BadInputError(
                "the engine needs plugin libraries, which Triton loads for a whole server (--backend-config=tensorrt,plugins=FILE) "
                "and no model configuration can name\nbuild it without plugins"
            )
        count = len(find_profiles(info.details.get("builder", {})))
        return Serving(
            name_server_release(self.package, version),
            "tensorrt",
            "tensorrt_plan",
            profiles=tuple(map(str, range(count))) if count > 1 else (),
            cuda_graph=bool(options.get("cuda_graph")),
            not_carried=tuple(sorted({*options} - {"cuda_graph"})),
        )

    def _library(self) -> Any:
        try:
            return importlib.import_module(self.library)
        except ImportError as error:
            raise MissingError(
                f"{self.library} cannot be imported ({error}); {self.install}"
            ) from error


class TensorRTRTX(TensorRT):
    """TensorRT-RTX for GeForce and workstation GPUs: compute capability 7.5, 8.x, and 12.x, not 9.0 or 10.x."""

    name = "tensorrt-rtx"
    purpose = "engines for RTX GPUs; building them needs no GPU"
    packages = ("tensorrt-rtx-cu13",)
    library = "tensorrt_rtx"
    install = "install it with `pip install tensorrt-rtx-cu13`"
    ahead_of_time = True

    def find_gpu_refusal(self, compute_capability: str) -> str | None:
        if compute_capability == "7.5" or int(compute_capability.split(".")[0]) in (8, 12):
            return None
        return f"TensorRT-RTX does not support compute capability {compute_capability} (only 7.5, 8.x, and 12.x)"

    def serving(self, info: ArtifactInfo, options: Mapping[str, Any], version: str) -> Serving:
        """Triton has no backend for it; optpipe's own session loads plugin libraries too."""
        _require_own_weights(info)
        return Serving()


def _require_own_weights(info: ArtifactInfo) -> None:
    if info.details.get("builder", {}).get("strip_plan"):
        raise BadInputError(
            "the engine holds no weights, and a deployment has no graph to take them from\nbuild it without strip_plan"
        )


def _find_stripped_weights(directory: Path, info: ArtifactInfo) -> Path | None:
    """The stored graph with a stripped engine's weights; None for other engines.

    Raises MissingError if it is gone, StageError if it is another one.
    """
    stated = info.details.get("weights")
    if stated is None:
        return None
    name = str(stated["graph"])
    graph = directory.parent / name / ONNX
    if Path(name).name != name or not graph.is_file():
        raise MissingError(
            "the engine holds no weights, and the graph that has them is not in the workspace\nbuild it again"
        )
    if hash_file(graph) != stated["sha256"]:
        raise StageError(
            f"{graph} has changed since the engine was built without its weights\nbuild it again"
        )
    return graph


def _describe_sparsity(sparsity: Sparsity, options: Mapping[str, Any], kernels: int | None) -> str:
    """Says how a build uses 2:4 sparse weights; empty if the model has none."""
    found = sparsity.describe()
    if not found:
        return ""
    if not options["sparse_weights"]:
        return f"{found}; the option sparse_weights=true lets the builder use sparse kernels"
    if kernels is None:
        return f"{found}; which of them got sparse kernels is known on the GPU alone"
    return f"{found}; {kernels} layers have sparse kernels, by the engine inspector"


MOST_REASONS = 5


def _list_reasons(errors: Iterable[tuple[str, str, str]]) -> list[str]:
    """One line for each operator and reason of the parser's errors (operator, node, reason), with its first node."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for operator, node, reason in errors:
        known = nodes.setdefault((operator, _explain(reason)), [])
        if node not in known:
            known.append(node)
    operators: dict[str, str] = {}
    for (operator, reason), named in nodes.items():
        more = f" and {len(named) - 1} more" if len(named) > 1 else ""
        # the parser repeats an operator with the assertions of its callers
        operators.setdefault(operator, f"{operator} ({named[0]}{more}): " + reason)
    return [*operators.values()][:MOST_REASONS]


def _explain(reason: str) -> str:
    """The parser's reason; one of them is a flag of the C++ API."""
    other = Argument("backend", "onnxruntime")
    way = "quantize the model symmetrically, or build it with " + other
    asymmetric = "its zero point is not 0\n" + way
    return asymmetric if "shiftIsAllZeros" in reason else reason


def name_server_release(package: str, version: str) -> str:
    return f"an engine of {package} {version} loads only in a Triton release with the same version: see NVIDIA's support matrix"


TENSORRT = TensorRT()
TENSORRT_RTX = TensorRTRTX()


class TorchTensorRT(TensorRT):
    """Torch-TensorRT converts an exported torch program to a TensorRT engine, which then runs as any other.

    Its import needs a GPU: `torch-tensorrt-rtx` 2.14.0 (with TensorRT-RTX 1.6.1, torch 2.14.1, no driver) queries the device's
    compute capability and the current device. With torch.cuda's queries replaced, it converts a program and TensorRT-RTX builds
    the engine, but the converter deserializes it at once, which needs the driver. No machine of ours tests this class, unlike
    `tensorrt` (tests/fakes/tensorrt_api/README.md). Source: Torch-TensorRT documentation, "Exporting a serialized TensorRT
    engine" (`convert_exported_program_to_serialized_trt_engine`).
    """

    name = "torch-tensorrt"
    purpose = "TensorRT engines directly from PyTorch"
    packages = ("torch-tensorrt", "tensorrt-cu13", "torch")
    needs_module = True

    def describe_options(self, device: Device) -> tuple[Option, ...]:
        workspace, *others = TENSORRT.describe_options(device)
        return (workspace, *(each for each in others if not each.builds))

    def merge_options(
        self, given: Mapping[str, Any], device: Device
    ) -> dict[str, bool | int | str]:
        return Backend.merge_options(self, given, device)

    def precisions(self, device: Device) -> frozenset[Precision]:
        return TORCH_PRECISIONS

    def probe_capability(self, device: Device) -> Capability:
        version = get_package_version("torch-tensorrt")
        if version is None or importlib.util.find_spec("torch_tensorrt") is None:
            install = "`uv sync --no-dev --extra torch-tensorrt` in a checkout; TensorRT comes from NVIDIA's index"
            return Capability(False, False, None, "torch-tensorrt is not installed", install)
        if device == "cpu" or not list_gpus():
            return Capability(False, False, version, "no NVIDIA GPU on this machine")
        return Capability(True, True, version)

    def recipe(self, device: Device, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "torch_tensorrt": get_package_version("torch-tensorrt"),
            "torch": get_package_version("torch"),
            "gpu": get_gpu_name(),
            "options": merge_options(options, {"workspace_bytes": 0}, self.name),
        }

    def build(self, request: BuildRequest) -> BuildResult:
        """Converts with explicit types, so that the engine has the program's types."""
        import torch_tensorrt
        from torch_tensorrt.dynamo import CONVERTERS

        program = export_program(request)
        nodes = program.run_decompositions().graph.nodes
        targets = {node.target for node in nodes if hasattr(node.target, "overloadpacket")}
        if unknown := sorted(map(str, targets - CONVERTERS.keys())):
            raise StageError(
                f"{self.name} does not support {request.card.name}: {'; '.join(unknown[:5])}"
            )
        inputs = [
            torch_tensorrt.Input(min_shape=e.min, opt_shape=e.opt, max_shape=e.max, name=e.name)
            for e in request.card.inputs
        ]
        plan = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine(
            program,
            arg_inputs=inputs,
            use_explicit_typing=True,
            disable_tf32=request.precision is not Precision.TF32,
            workspace_size=merge_options(request.options, {"workspace_bytes": 0}, self.name)[
                "workspace_bytes"
            ],
            require_full_compilation=True,
        )
        (request.directory / ENGINE_FILE).write_bytes(plan)
        layers = layers_from_program(program, request.precision)
        return BuildResult(layers, ENGINE_FILE, details={"gpu": get_gpu_name()})

    def find_run_blocker(self, info: ArtifactInfo) -> str | None:
        return TENSORRT.find_run_blocker(info)

    def open_marked(self, info: ArtifactInfo, request: BuildRequest, source: Path) -> Marked:
        return Backend.open_marked(self, info, request, source)

    def serving(self, info: ArtifactInfo, options: Mapping[str, Any], version: str) -> Serving:
        return Serving(name_server_release(self.package, version))


_TYPES = {
    "FLOAT": "fp32",
    "HALF": "fp16",
    "BF16": "bf16",
    "INT8": "int8",
    "FP8": "fp8",
    "FP4": "fp4",
    "INT4": "int4",
}
_METADATA = "[ONNX Layer: "
PRODUCT_LAYERS = (
    "ATTENTION_INPUT",
    "CONVOLUTION",
    "DECONVOLUTION",
    "EINSUM",
    "MATRIX_MULTIPLY",
    "MOE",
    "PLUGIN",
    "PLUGIN_V2",
    "PLUGIN_V3",
)
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


def layers_from_network(trt: Any, network: Any, request: BuildRequest) -> tuple[LayerType, ...]:
    """The layers of a strongly typed network with the type of their data input.

    The MACs are those of the ONNX node of a layer; several products of one node, as in an LSTM, share them. The parser writes the
    node as `[ONNX Layer: NAME | ...]` and proceeds node by node, so a layer without a name belongs to the previous layer's node.
    A product of an unknown node is unattributed and of unknown cost: no share is proven with it.
    """
    model = load_onnx(request.graph)
    known = infer_graph_types(model, request.card.inputs)
    macs = count_graph_macs(model, known)
    stored = describe_graph_weights(model)
    parsed = [network.get_layer(index) for index in range(network.num_layers)]
    owners = [""]
    for layer in parsed:
        metadata = str(layer.metadata or "")
        named = metadata.startswith(_METADATA)
        owners.append(
            metadata.removeprefix(_METADATA).removesuffix("]").split(" | ")[0]
            if named
            else owners[-1]
        )
    owned = list(zip(parsed, owners[1:], strict=True))
    products = Counter(
        owner for layer, owner in owned if get_enum_name(layer.type) in PRODUCT_LAYERS
    )
    tf32 = request.precision is Precision.TF32
    dequantized = {
        layer.get_output(0).name: _TYPES.get(get_enum_name(layer.get_input(0).dtype), "int8")
        for layer in parsed
        if layer.type == trt.LayerType.DEQUANTIZE
    }
    layers = []
    for layer, owner in owned:
        op = get_enum_name(layer.type)
        data = layer.get_input(0)
        if data is None or op in _NO_ARITHMETIC:
            continue
        theirs = get_enum_name(data.dtype)
        kind = _TYPES.get(theirs, theirs.lower())
        amount: int | None = 0
        if op in PRODUCT_LAYERS:
            kind = dequantized.get(data.name, "tf32" if kind == "fp32" and tf32 else kind)
            amount = macs.get(owner)
            if amount is not None:
                amount //= products[owner]
            elif owner not in macs or op.startswith("PLUGIN"):
                kind = UNATTRIBUTED
        elif kind not in _TYPES.values():
            continue
        form = stored.get(owner, "") if op in PRODUCT_LAYERS else ""
        layers.append(LayerType(layer.name, op, kind, amount, form))
    return tuple(layers)


def get_enum_name(value: Any) -> str:
    """`CONVOLUTION` for `LayerType.CONVOLUTION`."""
    return str(value).rpartition(".")[2]
