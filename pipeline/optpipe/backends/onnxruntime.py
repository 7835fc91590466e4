"""ONNX Runtime on the CPU and on NVIDIA GPUs.

The artifact is the graph as ONNX Runtime optimized it for one execution provider, and the provider's options.
Source of session and provider options: onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
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
    SpeedBounds,
    prefers_channels_last,
)
from optpipe.backends.graph_names import NameGiver
from optpipe.backends.onnx_graph import OnnxGraph, load_onnx, replace_nodes
from optpipe.backends.onnx_layers import layers_from_onnx
from optpipe.backends.onnx_marked import MarkedGraph
from optpipe.backends.onnxruntime_session import (
    FLOAT_DATA,
    LEVELS,
    PROVIDERS,
    QDQ_AS_WRITTEN,
    REPRODUCE,
    WEIGHT_PASS,
    OnnxRuntimeSession,
    Optimization,
    get_level,
    mark_as_written,
    optimize_graph,
    read_node_times,
)
from optpipe.backends.plain_session import mark_source
from optpipe.backends.rewrites import RewriteGuard, choose_graph_limit
from optpipe.core import np, onnx
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import StageError
from optpipe.core.precision import UNATTRIBUTED, LayerType, Precision
from optpipe.core.wording import Argument, Call
from optpipe.workspace.environment import get_gpu_name, get_package_version, list_gpus

GRAPH_FILE = "model.onnx"
OPTIONS: dict[Device, tuple[Option, ...]] = {
    "cpu": (
        Option("threads", 0, "threads of one operator; with 0, ONNX Runtime chooses their number and cores"),
        Option("spinning", True, "threads spin while they wait for work; without it they free their core"),
    ),
    "cuda": (
        Option("nhwc", True, "channels last inside the CUDA provider; by default, precision and model decide"),
        Option("cuda_graph", True, "captures an inference into a CUDA graph; stays off if a node has no CUDA kernel"),
        Option("cudnn_search", "EXHAUSTIVE", "how cuDNN chooses algorithms: EXHAUSTIVE, HEURISTIC, or DEFAULT"),
        Option("fuse_conv_bias", False, "fuses convolution and bias; compiles for seconds at the first run of a shape"),
    ),
}  # fmt: skip

TRITON_RELEASES = {
    "1.17": "24.04",
    "1.18": "24.05 to 24.08",
    "1.19": "24.09 to 24.11",
    "1.20": "24.12 to 25.02",
    "1.21": "25.03 and 25.04",
    "1.22": "25.05 to 25.07",
    "1.23": "25.08 to 26.01",
    "1.24": "26.02 to 26.06",
    "1.27": "26.07",
}
"""The Triton releases that carry each ONNX Runtime, the newest last (Triton, docs/introduction/compatibility.md)."""


TRITON_LEVELS: dict[Optimization, int] = {"all": 0, "extended": 1, "basic": -1, "disabled": 2}
"""`optimization.graph.level` in Triton's configuration of a model (README of its ONNX Runtime backend)."""


class OnnxRuntime(Backend):
    name = "onnxruntime"
    purpose = "ONNX inference on CPU and GPU"
    packages = ("onnxruntime-gpu", "onnxruntime")

    def speed_bounds(self, device: Device) -> SpeedBounds:
        """FP16 has twice the rate of TF32 and half of the bytes, and Q/DQ graphs run in FP16; the rest is a margin.

        ResNet-50 in FP16 is 1.1 to 1.8 times as fast on an H200 (`reports/h200/README.md`), ViT-B/16 1.5 times.
        """
        return SpeedBounds(gain_over_tf32=2.5 if device == "cuda" else inf, fuses=True)

    def describe_options(self, device: Device) -> tuple[Option, ...]:
        return OPTIONS[device]

    def precisions(self, device: Device) -> frozenset[Precision]:
        """All except FP8 on a GPU. The CPU provider computes FP16 and BF16 in FP32, so the CPU has only FP32 and INT8."""
        return (
            frozenset(Precision) - {Precision.FP8}
            if device == "cuda"
            else frozenset((Precision.FP32, Precision.INT8))
        )

    def probe_capability(self, device: Device) -> Capability:
        version = get_package_version("onnxruntime-gpu") or get_package_version("onnxruntime")
        if version is None:
            return Capability(
                False, False, None, "onnxruntime is not installed", "`pip install onnxruntime-gpu`"
            )
        if device == "cuda" and not list_gpus():
            return Capability(False, False, version, "no NVIDIA GPU on this machine")
        return Capability(True, True, version)

    def recipe(self, device: Device, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "version": self.probe_capability("cpu").version,
            "provider": PROVIDERS[device],
            "gpu": get_gpu_name() if device == "cuda" else None,
            "options": self.merge_options(options, device),
            # a build switches off options that the user did not set and that the graph does not run with
            **({"insisted": sorted(options)} if options and device == "cuda" else {}),
            **({"qdq": "as written", "nhwc": "where it convolves"} if device == "cuda" else {}),
        }

    def build(self, request: BuildRequest) -> BuildResult:
        on_gpu = request.device == "cuda"
        options = self.merge_options(request.options, request.device)
        source, target = onnx.load(request.graph), request.directory / GRAPH_FILE
        if on_gpu and "nhwc" not in request.options:
            # NHWC gains nothing without convolutions; in BERT it added 43 copies to the host, which prevent a CUDA graph
            convolves = any(node.op_type.startswith("Conv") for node in source.graph.node)
            options["nhwc"] = convolves and prefers_channels_last(request.precision, request.device)
        model, optimization, changes = rewrite_graph(request, source, target, options)
        layers = layers_from_onnx(model, request.card.inputs, source)
        if (
            request.precision is Precision.TF32
        ):  # cuDNN and cuBLAS may then use TF32 for FP32 products
            layers = tuple(
                replace(layer, type="tf32") if layer.macs != 0 and layer.type == "fp32" else layer
                for layer in layers
            )
        loading = _Loading(on_gpu and may_use_tensor_cores(layers), optimization)
        switched_off = _find_options_to_disable(target, request, options, loading) if on_gpu else {}
        options |= dict.fromkeys(switched_off, False)
        in_int8 = any(layer.type == "int8" and layer.macs != 0 for layer in layers)
        if request.precision is Precision.INT8 and not on_gpu and not in_int8:
            raise StageError(
                "ONNX Runtime fused no INT8 kernels: the Q/DQ nodes would only be simulated in floating point",
                remedy="leave int8 out of "
                + Argument("precision")
                + ", or build it for another runtime ("
                + Argument("backend", "tensorrt-rtx")
                + ")",
            )
        remarks = tuple(f"{name} is off: {reason}" for name, reason in switched_off.items())
        with loading.open(target, request.device, options) as session:
            placement = session.find_placement(layers)
        return BuildResult(
            layers,
            GRAPH_FILE,
            options,
            asdict(loading),
            placement,
            remarks=(*changes, *remarks),
        )

    loading_runs_code = False  # a graph is data

    def list_files(self, info: ArtifactInfo) -> tuple[str, ...]:
        return (GRAPH_FILE,)

    def load(self, directory: Path, info: ArtifactInfo, options: Mapping[str, Any]) -> Session:
        merged = self.merge_options({**info.options, **options}, info.device)
        return _read_loading(info).open(directory / GRAPH_FILE, info.device, merged)

    def open_marked(self, info: ArtifactInfo, request: BuildRequest, source: Path) -> Marked:
        options = {**self.merge_options(info.options, info.device), "cuda_graph": False}

        def open_graph(model: Any, _: object) -> Run:
            serialized = model.SerializeToString()
            return _read_loading(info).open(serialized, info.device, options).run

        stored, written = (
            load_onnx(path) for path in (request.directory / GRAPH_FILE, request.graph)
        )
        inputs = request.card.inputs
        again = REPRODUCE.format(provider=PROVIDERS[info.device])

        def open_apart() -> tuple[MarkedGraph, MarkedGraph]:
            compiled = MarkedGraph(written, written, inputs, open_graph, again)
            return compiled, mark_as_written(written, inputs, info.device)

        build = MarkedGraph(stored, written, inputs, open_graph, again)
        build.open_apart = open_apart
        return mark_source(source, inputs), build

    def serving(self, info: ArtifactInfo, options: Mapping[str, Any], version: str) -> Serving:
        """Triton's own backend takes only the number of threads; a folder takes every option."""
        on_gpu = info.device == "cuda"
        provider = (
            {"use_tf32": "0", "prefer_nhwc": str(int(bool(options.get("nhwc"))))} if on_gpu else {}
        )
        spinning = {} if options.get("spinning", True) else {"session.intra_op.allow_spinning": "0"}
        optimization = _read_loading(info).optimization
        runtime = {
            "threads": int(options.get("threads", 0)),
            "provider": PROVIDERS[info.device],
            "provider_options": provider,
            "optimization": get_level(optimization).name,
            "session_config": {
                **dict([FLOAT_DATA, *([QDQ_AS_WRITTEN] if on_gpu else [])]),
                **spinning,
            },
        }
        threads = options.get("threads")
        return Serving(
            find_triton_releases(version),
            "onnxruntime",
            "onnxruntime_onnx",
            parameters={"intra_op_thread_count": str(threads)} if threads else {},
            not_carried=tuple(sorted({*options} - {"threads"})),
            graph_level=TRITON_LEVELS[optimization],
            loader=Path(__file__).with_name("onnxruntime_loader.py"),
            loader_settings=runtime,
        )

    def time_layers(
        self,
        directory: Path,
        info: ArtifactInfo,
        options: Mapping[str, Any],
        inputs: Mapping[str, "np.ndarray"],
        scratch: Path,
    ) -> Mapping[str, float] | None:
        """Times nodes on the CPU in a second session, because timing slows the session down."""
        if info.device != "cpu":
            return None
        merged = self.merge_options(options, info.device)
        graph, nodes = directory / GRAPH_FILE, scratch / "nodes"
        with _read_loading(info).open(graph, "cpu", merged, profile=nodes) as session:
            for _ in range(5):
                session.run(inputs)
            return read_node_times(session.end_profiling())


@dataclass(frozen=True, slots=True)
class _Loading:
    """How each process loads the graph of an artifact, as its `details` say."""

    tensor_cores: bool = False
    optimization: Optimization = "all"

    def open(
        self,
        graph: Path | bytes,
        device: Device,
        options: Mapping[str, Any],
        profile: Path | None = None,
    ) -> OnnxRuntimeSession:
        return OnnxRuntimeSession(
            graph,
            device,
            options,
            tensor_cores=self.tensor_cores,
            profile=profile,
            optimization=self.optimization,
        )


def _read_loading(info: ArtifactInfo) -> _Loading:
    """A build that does not name its optimizations is loaded with all of them."""
    return _Loading(bool(info.details.get("tensor_cores")), info.details.get("optimization", "all"))


def rewrite_graph(
    request: BuildRequest, source: Any, target: Path, options: Mapping[str, Any]
) -> tuple[Any, Optimization, tuple[str, ...]]:
    """Writes the graph that is loaded to `target`; returns it, the optimizations to load it with, and what was left out.

    `source` is the graph of the request. Each rewrite is compared with the graph before it on the request's probe.

    Raises StageError for a graph whose outputs change even without optimizations, and for a layer in FP32 that cannot be
    kept from being quantized.
    """
    guard, limit = RewriteGuard(request.probe), choose_graph_limit(source)
    optimization, remarks = _optimize(request, source, target, options, guard, limit)
    model = onnx.load(target)
    on_gpu = request.device == "cuda"

    def rewrite(graph: Any) -> Any:
        change = separate_biases if on_gpu else protect_convolutions
        change(graph)
        return graph

    rewritten, difference = guard.apply(model, rewrite, limit)
    if rewritten is not model:
        onnx.save(rewritten, target)
    if difference is not None and on_gpu:
        remarks.append(
            f"additions in place of biases would change the outputs ({difference}), so they are left out"
        )
    elif difference is not None:
        raise StageError(
            f"FusedConv in place of convolutions that stay in FP32 changes the outputs: {difference}",
            remedy="quantize all layers (without "
            + Argument("budget")
            + "), or leave int8 out of "
            + Argument("precision"),
        )
    return rewritten, optimization, tuple(remarks)


def _open_on_cpu(loading: _Loading, options: Mapping[str, Any], graph: Any) -> Run:
    return loading.open(graph.SerializeToString(), "cpu", options).run


def _optimize(
    request: BuildRequest,
    source: Any,
    target: Path,
    options: Mapping[str, Any],
    guard: RewriteGuard,
    limit: float,
) -> tuple[Optimization, list[str]]:
    """Writes the graph with the most optimizations that keep the outputs; returns their level, and what was left out.

    On the CPU the session that will be loaded is compared. On a GPU, whose kernels add up in another order, the fused
    graph is, as the CPU computes it; one that the CPU has no kernels for is left to the verification.
    """
    on_gpu = request.device == "cuda"
    tries = [(level, False) for level in LEVELS]
    if not on_gpu and needs_weight_pass(source):
        tries.insert(0, ("all", True))
    remarks: list[str] = []
    for level, quantize_floats in tries:
        optimize_graph(
            request.graph,
            target,
            request.device,
            quantize_floats=quantize_floats,
            optimization=level,
        )
        loaded = None if on_gpu else partial(_open_on_cpu, _Loading(optimization=level), options)
        difference = guard.find_difference(source, onnx.load(target), limit, loaded)
        if difference is None or (on_gpu and difference.unknown):
            return level, remarks
        what = f"pass {WEIGHT_PASS}" if quantize_floats else f"graph optimizations ({level})"
        remarks.append(
            f"ONNX Runtime's {what} would change the outputs ({difference}), so they are left out"
        )
    raise StageError(
        f"ONNX Runtime computes other outputs with tensors that share memory: {difference}",
        remedy="build it for another runtime, such as " + Argument("backend", "inductor"),
    )


def find_triton_releases(version: str) -> str:
    """The Triton releases with ONNX Runtime `version`, or the newest known release if none has it."""
    for series, releases in TRITON_RELEASES.items():
        if version.startswith(f"{series}."):
            return f"Triton {releases} has ONNX Runtime {series}"
    series, newest = next(reversed(TRITON_RELEASES.items()))
    return (
        f"no Triton release up to {newest} has ONNX Runtime {version} ({newest} has {series}): use a later one, "
        "or measure the build with the release's version: `"
        + Call("signoff recheck", "DOSSIER", python="ENV")
        + "`"
    )


def may_use_tensor_cores(layers: Sequence[LayerType]) -> bool:
    """Whether `use_tf32` may be on: only if no product is FP32, which the provider would round to TF32.

    Without the option, the provider also drops cuDNN's Tensor Core plans for FP16 and BF16 convolutions if cuDNN has another
    plan (onnxruntime/core/providers/cuda/nn/conv.cc, the deselected numeric note TENSOR_CORE). ResNet-50's first convolution
    then takes 767 instead of 120 us at batch 64 on an H200.
    """
    return all(layer.type not in ("fp32", UNATTRIBUTED) for layer in layers if layer.macs != 0)


def _find_options_to_disable(
    graph: Path, request: BuildRequest, options: Mapping[str, Any], loading: "_Loading"
) -> dict[str, str]:
    """Options that the user did not set and that this graph does not run with, each with ONNX Runtime's reason.

    Quantized graphs may have nodes without a CUDA kernel, which cannot be captured or converted to NHWC.
    """
    inputs = {spec.name: np.ones(spec.opt, spec.dtype) for spec in request.card.inputs}
    refused: dict[str, str] = {}
    for name, others_off in (("nhwc", {"cuda_graph": False}), ("cuda_graph", {})):
        tried = {**options, **others_off, **dict.fromkeys(refused, False)}
        if not tried[name] or name in request.options:
            continue
        try:
            loading.open(graph, "cuda", tried).run(inputs)
        except StageError as error:
            refused[name] = str(error)
    return refused


# Biases of FP16 and BF16 convolutions become separate additions, which ONNX Runtime's CUDA provider computes faster.
#
# The provider adds a convolution's bias by cudnnAddTensor, a pass over the whole activation at about a quarter of the memory's
# bandwidth. With the option `fuse_conv_bias` the provider requests one cuDNN kernel that convolves and adds, after ONNX Runtime
# has put the additions back into the convolutions. ResNet-50 in FP16 in a CUDA graph on an H200, ONNX Runtime 1.31, in ms:
#
#     batch size                                        1      64     256
#     bias of the convolution                        0.65    5.64    21.9
#     separate addition                              0.62    4.22    15.9
#     `fuse_conv_bias`, the first convolution too    0.64    4.06    15.2    (the first convolution: 837 us of the 4.06, 120 without)


FUSED_CHANNEL_MULTIPLE = 8
"""cuDNN's kernels with an addition require FP16 input channels per group in multiples of this to use Tensor Cores. A first
convolution of three channels, or a depthwise one, has faster kernels without the addition."""


def separate_biases(model: Any) -> int:
    graph, names, nodes = OnnxGraph(model), NameGiver(model), []
    biases: dict[tuple[str, int], Any] = {}
    half = onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16
    for node in model.graph.node:
        nodes.append(node)
        if node.op_type != "Conv" or len(node.input) < 3:
            continue
        weight, bias = (graph.weights.get(name) for name in node.input[1:3])
        if weight is None or bias is None or bias.data_type not in half:
            continue
        rank = len(weight.dims)
        if (bias.name, rank) not in biases:
            values = onnx.numpy_helper.to_array(bias).reshape(1, -1, *[1] * (rank - 2))
            name = names.give(f"{bias.name}_over_{rank}d")
            biases[bias.name, rank] = onnx.numpy_helper.from_array(values, name)
        output = node.output[0]
        del node.input[2]
        node.output[0] = names.give(f"{output}_without_bias")
        terms = [node.output[0], biases[bias.name, rank].name]
        if weight.dims[1] % FUSED_CHANNEL_MULTIPLE:
            terms.reverse()  # ConvAddFusion looks for the constant as the second input, so this one stays an addition
        addition = names.give(f"{node.name or output}_bias")
        nodes.append(onnx.helper.make_node("Add", terms, [output], name=addition))
    count = len(nodes) - len(model.graph.node)
    replace_nodes(model.graph, nodes, biases.values())
    return count


# ONNX Runtime has a pass that quantizes floating-point layers of a Q/DQ graph on the CPU.
#
# It takes convolutions and linear layers with FP32 weights between DequantizeLinear and QuantizeLinear for unfinished, and
# quantizes their weights with one scale for all channels (onnxruntime, pull request 22969). In optpipe's graphs these are the
# layers that `--budget` or a calibration table keeps out of INT8.


def needs_weight_pass(model: Any) -> bool:
    """Whether a layer with INT8 weights has an FP32 bias, as other tools write it: only the pass makes an INT8 kernel of it."""
    graph = OnnxGraph(model)
    return any(
        len(node.input) > 2
        and node.input[2] in graph.weights
        and (producer := graph.producers.get(node.input[1])) is not None
        and producer.op_type == "DequantizeLinear"
        for node in model.graph.node
        if node.op_type in ("Conv", "ConvTranspose", "Gemm")
    )


def protect_convolutions(model: Any) -> int:
    """Turns FP32 convolutions between Q/DQ pairs into FusedConv without an activation, in place; returns their number.

    It is the same kernel, and the pass ignores it wherever the graph is loaded, also by a server.
    """
    graph, convolutions = OnnxGraph(model), []
    for node in model.graph.node:
        producer, weight = graph.producers.get(node.input[0] if node.input else ""), None
        if (
            node.op_type == "Conv"
            and producer is not None
            and producer.op_type == "DequantizeLinear"
        ):
            weight = graph.weights.get(node.input[1])
        if weight is not None and weight.data_type == onnx.TensorProto.FLOAT:
            convolutions.append(node)
    for node in convolutions:
        node.op_type, node.domain = "FusedConv", "com.microsoft"
    if convolutions and not any(opset.domain == "com.microsoft" for opset in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return len(convolutions)
