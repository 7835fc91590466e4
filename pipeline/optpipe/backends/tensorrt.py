"""TensorRT 11 and 10, and TensorRT-RTX, which share their Python API.

The network is strongly typed: each tensor keeps its type in the ONNX graph, so the types of the layers' inputs are the
precision. TensorRT-RTX builds ahead of time on a machine without a GPU.
Source: NVIDIA TensorRT 11 documentation, "Strongly Typed Networks" and "Working with Dynamic Shapes".
"""

import importlib
import importlib.util
from collections.abc import Mapping
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
)
from optpipe.backends.onnx_graph import load_onnx
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
from optpipe.backends.tensorrt_layers import layers_from_network
from optpipe.backends.tensorrt_plugins import (
    copy_plugins,
    describe_plugins,
    list_plugins,
    load_plugins,
)
from optpipe.backends.tensorrt_refusals import list_parser_reasons
from optpipe.backends.torch_backend import CUDA_GRAPH
from optpipe.core import onnx
from optpipe.core.card import InputSpec
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError, MissingError, StageError
from optpipe.core.files import hash_file
from optpipe.core.precision import Precision
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
        of_builder = {option.name for option in BUILDER_OPTIONS}
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
        model = load_onnx(request.graph)
        sparsity = find_sparsity(model)
        if options["sparse_weights"] and not sparsity.sparse:
            raise BadInputError(
                "option sparse_weights=true: no convolution or matrix product has 2:4 sparse weights\n"
                "prune the model to that pattern, or omit the option"
            )
        logger = create_logger(trt)
        builder = trt.Builder(logger)
        load_plugins(builder.get_plugin_registry(), list_plugins(options), self.library, logger)
        network = create_network(trt, builder)  # builder and network must outlive the parser
        self._parse(trt.OnnxParser(network, logger), request)

        config = create_config(trt, builder, request, options)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise StageError(
                f"{self.name} failed to build an engine: {logger.first_error or 'no reason given'}"
            )
        (request.directory / ENGINE_FILE).write_bytes(plan)

        kernels = _inspect_engine(trt, logger, plan, request.directory)
        remarks = [_describe_sparsity(sparsity, options, kernels)]
        if options["timing_cache"]:
            remarks.append(write_timing_cache(config, Path(options["timing_cache"])))
        return BuildResult(
            layers_from_network(trt, network, model, request),
            ENGINE_FILE,
            details=self._describe_build(request, options),
            remarks=tuple(filter(None, remarks)),
            more_files=copy_plugins(options, request.directory),
        )

    def _parse(self, parser: Any, request: BuildRequest) -> None:
        """Raises StageError with the operators that the parser refuses."""
        if parser.parse_from_file(str(request.graph)):
            return
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        reasons = list_parser_reasons(
            (error.node_operator(), error.node_name(), error.desc()) for error in errors
        )
        raise StageError(f"{self.name} does not support {request.card.name}: {'; '.join(reasons)}")

    def _describe_build(self, request: BuildRequest, options: Mapping[str, Any]) -> dict[str, Any]:
        """What decides where the engine runs, and what it needs besides its file."""
        built_with = {**options, "plugins": describe_plugins(options)}
        if not options["plugins"]:
            built_with.pop("plugins")
        gpu = self._tuned_for() if options["hardware_compatibility"] == "none" else None
        details: dict[str, Any] = {"gpu": gpu, "builder": built_with}
        if options["strip_plan"]:
            details["weights"] = {
                "graph": request.graph.parent.name,
                "sha256": hash_file(request.graph),
            }
        return details

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
                InputSpec(name, str(array.dtype), *[array.shape] * 3)
                for name, array in feeds.items()
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


def _inspect_engine(trt: Any, logger: Any, plan: Any, directory: Path) -> int | None:
    """Writes what the engine inspector says; the number of sparse kernels, or None without a GPU, which it needs."""
    if not list_gpus():
        return None
    engine = trt.Runtime(logger).deserialize_cuda_engine(plan)
    if engine is None:
        return None
    inspected = engine.create_engine_inspector().get_engine_information(
        trt.LayerInformationFormat.JSON
    )
    write_bytes(directory / INSPECTOR_FILE, inspected.encode())
    return len(list_sparse_kernels(inspected))


def _describe_sparsity(sparsity: Sparsity, options: Mapping[str, Any], kernels: int | None) -> str:
    """Says how a build uses 2:4 sparse weights; empty if the model has none."""
    described = sparsity.describe()
    if not described:
        return ""
    if not options["sparse_weights"]:
        return f"{described}; the option sparse_weights=true lets the builder use sparse kernels"
    if kernels is None:
        return f"{described}; which of them got sparse kernels is known on the GPU alone"
    return f"{described}; {kernels} layers have sparse kernels, by the engine inspector"


def name_server_release(package: str, version: str) -> str:
    return f"an engine of {package} {version} loads only in a Triton release with the same version: see NVIDIA's support matrix"


TENSORRT = TensorRT()
TENSORRT_RTX = TensorRTRTX()
