"""Engines of TensorRT and TensorRT-RTX: options and configuration of the builder, and sessions on torch's CUDA memory and streams.

The options have the names and meanings of NVIDIA's `trtexec` and are checked before anything runs; one that a library lacks is
refused with the reason. Source: NVIDIA TensorRT 11 documentation, "Advanced Topics", and TensorRT-RTX 1.7, "CPU-Only AOT and
TensorRT-RTX Engines".
"""

from collections.abc import Mapping, Sequence
from math import log, prod
from pathlib import Path
from typing import Any, Self

from optpipe.backends.base import Binding, BuildRequest, Device, Option, merge_options
from optpipe.backends.tensorrt_plugins import describe_plugins, load_plugins, require_plugins
from optpipe.backends.torch_backend import CUDA_GRAPH
from optpipe.backends.torch_session import CudaGraphBinding
from optpipe.core import np, torch
from optpipe.core.card import InputSpec, Shape, TensorSpec, batch_ranges_from_text
from optpipe.core.errors import (
    BadInputError,
    MissingError,
    StageError,
    escape,
    read_as_user_file,
)
from optpipe.core.precision import Precision
from optpipe.core.wording import Call
from optpipe.workspace.environment import list_gpus
from optpipe.workspace.files import hold_lock, write_bytes

MAX_OPTIMIZATION_LEVEL = 5
HARDWARE_COMPATIBILITY = {
    "none": "NONE",
    "ampere+": "AMPERE_PLUS",
    "sameComputeCapability": "SAME_COMPUTE_CAPABILITY",
}
"""trtexec's names and the library's."""
BUILDER_OPTIONS = (
    Option(
        "workspace_bytes",
        0,
        "scratch memory for the builder's kernels, in bytes; 0 is the library's own limit",
        True,
    ),
    Option(
        "optimization_level",
        -1,
        "0 to 5: how long the builder searches; -1 is the library's own level",
        True,
    ),
    Option("profiles", "", "batch ranges of several optimization profiles: 1:1:1,1:32:64", True),
    Option(
        "hardware_compatibility",
        "none",
        "other GPUs that the engine runs on; costs speed",
        True,
        (*HARDWARE_COMPATIBILITY,),
    ),
    Option(
        "version_compatible",
        False,
        "the engine also loads in later versions of TensorRT; costs speed",
        True,
    ),
    Option("refit", False, "its weights can be replaced; needs a GPU to build", True),
    Option(
        "strip_plan",
        False,
        "the engine holds no weights: they come from the stored graph when it loads; needs a GPU to build",
        True,
    ),
    Option(
        "sparse_weights",
        False,
        "lets the builder use 2:4 sparse kernels where weights have that pattern",
        True,
    ),
    Option(
        "plugins",
        "",
        "plugin libraries (.so), comma-separated; they run code and are stored with the engine",
        True,
    ),
    Option(
        "timing_cache",
        "",
        "file with the builder's timings, shared by builds of one GPU model",
        True,
    ),
    Option(
        "compute_capabilities",
        "",
        "GPUs the engine is for, such as 8.6,8.9; by default Ampere and newer",
        True,
    ),
)
_DEFAULTS = {option.name: option.default for option in BUILDER_OPTIONS}
_ALWAYS_IN_KEY = ("workspace_bytes", "optimization_level")
_NOT_IN_KEY = ("timing_cache",)
"""A timing cache shortens a build; its path does not change the engine."""
_MAGIC_BYTES = 8
"""A timing cache begins with the library's magic number."""
_LACKING = {
    "tensorrt_rtx": {
        "hardware_compatibility": "one engine runs on every supported GPU; compute_capabilities narrows that",
        "timing_cache": "it times no kernels when it builds",
        "version_compatible": "it has no lean runtime; an engine loads in the version that built it",
    },
    "tensorrt": {
        "compute_capabilities": "an engine is for the GPU it is built on; hardware_compatibility widens that"
    },
}
"""Options that a library does not have, and why."""


def list_builder_options(library: str) -> tuple[Option, ...]:
    return tuple(option for option in BUILDER_OPTIONS if option.name not in _LACKING[library])


def options_from_given(given: Mapping[str, Any], library: str, backend: str) -> Mapping[str, Any]:
    """All builder options as `read_builder_options` reads them, on a machine that can build with them.

    Raises MissingError for weights that can be replaced without a GPU, where the builder gives no engine (seen with TensorRT-RTX 1.7).
    """
    if CUDA_GRAPH.name in given:
        value = given[CUDA_GRAPH.name]
        raise BadInputError(
            f"'{CUDA_GRAPH.name}' is an option of {backend} when an engine runs: "
            + Call("bench", option={backend: {CUDA_GRAPH.name: value}})
        )
    options = read_builder_options(given, library, backend)
    if (replaced := _list_replaced(options)) and not list_gpus():
        raise MissingError(
            f"{backend} compiles engines with {replaced[0]} on a GPU, and there is none here\nomit the option"
        )
    return options


def read_builder_options(given: Mapping[str, Any], library: str, backend: str) -> Mapping[str, Any]:
    """All builder options, with their defaults overridden by `given`, whose text is parsed.

    Raises BadInputError for an option or value that the library does not take, and for a plugin that is no file.
    """
    for name, reason in _LACKING[library].items():
        if name in given:
            raise BadInputError(f"{backend} has no option '{name}': {reason}")
    known = {option.name: option.default for option in list_builder_options(library)}
    options: Mapping[str, Any] = {**_DEFAULTS, **merge_options(given, known, backend)}
    level, compatibility = options["optimization_level"], options["hardware_compatibility"]
    if level > MAX_OPTIMIZATION_LEVEL:
        raise BadInputError(
            f"option optimization_level={level}: expected 0 to {MAX_OPTIMIZATION_LEVEL}"
        )
    if compatibility not in HARDWARE_COMPATIBILITY:
        raise BadInputError(
            f"option hardware_compatibility={compatibility}: choose from {', '.join(HARDWARE_COMPATIBILITY)}"
        )
    find_profiles(options)
    replaced = _list_replaced(options)
    if len(capabilities_from_text(options["compute_capabilities"])) > 1 and replaced:
        raise BadInputError(
            f"option compute_capabilities={options['compute_capabilities']}: {backend} takes at most one with {replaced[0]}"
        )
    require_plugins(options)
    if options["timing_cache"] and not Path(options["timing_cache"]).parent.is_dir():
        raise BadInputError(
            f"option timing_cache={options['timing_cache']}: its folder does not exist"
        )
    return options


def _list_replaced(options: Mapping[str, Any]) -> list[str]:
    """The options that let the weights of an engine be replaced."""
    return [name for name in ("refit", "strip_plan") if options[name]]


def describe_in_key(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options that change the engine, for the artifact's key.

    Options at their defaults are left out, so that a new option does not rename artifacts.
    """
    key = {
        name: value
        for name, value in options.items()
        if name in _ALWAYS_IN_KEY or (value != _DEFAULTS[name] and name not in _NOT_IN_KEY)
    }
    return key | ({"plugins": describe_plugins(options)} if options["plugins"] else {})


def find_profiles(options: Mapping[str, Any]) -> tuple[tuple[int, int, int], ...]:
    return batch_ranges_from_text(options["profiles"]) if options.get("profiles") else ()


def list_profile_shapes(
    options: Mapping[str, Any], inputs: tuple[InputSpec, ...]
) -> list[tuple[InputSpec, ...]]:
    """The inputs with the shapes of each optimization profile; raises BadInputError if one is outside the model's range."""
    profiles = []
    for low, usual, high in find_profiles(options):
        for spec in inputs:
            own = spec.batch_range
            if own is not None and not own[0] <= low <= high <= own[2]:
                raise BadInputError(
                    f"option profiles={options['profiles']}: {low}:{usual}:{high} is outside the batch range of {spec.name}, "
                    f"{own[0]} to {own[2]}"
                )
        profiles.append(tuple(spec.with_batch(low, usual, high) for spec in inputs))
    return profiles or [tuple(inputs)]


def capabilities_from_text(text: str) -> tuple[str, ...]:
    """Reads `8.6,12.0` as the library's names, `SM86` and `SM120`, without a check that the library has them."""
    names = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        major, _, minor = part.partition(".")
        if not (major.isdecimal() and minor.isdecimal()):
            raise BadInputError(
                f"option compute_capabilities={text}: expected numbers such as 8.6,8.9"
            )
        names.append(f"SM{int(major)}{int(minor)}")
    return tuple(dict.fromkeys(names))


def create_network(trt: Any, builder: Any) -> Any:
    """A strongly typed network: TensorRT 10 needs the flag, TensorRT 11 has no others."""
    return builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))


def create_logger(trt: Any) -> Any:

    class Quiet(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.first_error = ""

        def log(self, severity: Any, message: str) -> None:
            errors = (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR)
            if severity in errors and not self.first_error:  # what follows is its consequences
                self.first_error = message

    return Quiet()


def create_config(trt: Any, builder: Any, request: BuildRequest, options: Mapping[str, Any]) -> Any:
    """The builder's configuration.

    Raises BadInputError for a timing cache that the library does not take, StageError for a flag that it does not set as requested.
    """
    config = builder.create_builder_config()
    flags = {
        "TF32": request.precision is Precision.TF32,
        "VERSION_COMPATIBLE": options["version_compatible"],
        # TensorRT strips what can be refitted with the same weights by itself, TensorRT-RTX with a flag
        "REFIT": options["refit"] or (options["strip_plan"] and trt.__name__ == "tensorrt_rtx"),
        "STRIP_PLAN": options["strip_plan"],
        "SPARSE_WEIGHTS": options["sparse_weights"],
    }
    for name, wanted in flags.items():
        flag = getattr(trt.BuilderFlag, name)
        (config.set_flag if wanted else config.clear_flag)(flag)
        if config.get_flag(flag) != wanted:
            raise StageError(
                f"{trt.__name__} {trt.__version__} does not take the builder flag {name} here"
            )
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if options["workspace_bytes"]:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options["workspace_bytes"])
    if options["optimization_level"] >= 0:
        config.builder_optimization_level = options["optimization_level"]
    if options["hardware_compatibility"] != "none":
        level = HARDWARE_COMPATIBILITY[options["hardware_compatibility"]]
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, level)
    if wanted := capabilities_from_text(options["compute_capabilities"]):
        config.num_compute_capabilities = len(wanted)
        for index, name in enumerate(wanted):
            config.set_compute_capability(getattr(trt.ComputeCapability, name), index)
    if options["timing_cache"]:
        file = Path(options["timing_cache"])
        with read_as_user_file(file, "a timing cache"):
            known = file.read_bytes() if file.exists() else b""
        mark = bytes(config.create_timing_cache(b"").serialize())[:_MAGIC_BYTES]
        cache = config.create_timing_cache(known) if known.startswith(mark) or not known else None
        if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
            raise BadInputError(
                f"option timing_cache={file}: {trt.__name__} {trt.__version__} does not take it on this GPU; give another file"
            )
    for inputs in list_profile_shapes(options, request.card.inputs):
        profile = builder.create_optimization_profile()
        for spec in inputs:
            profile.set_shape(spec.name, spec.min, spec.opt, spec.max)
        config.add_optimization_profile(profile)
    return config


def write_timing_cache(config: Any, file: Path) -> str:
    """Adds a build's timings to the file, to which other builds may have written in the meantime.

    Returns what a user must know: a file that is of another GPU or version by now is left as it is.
    """
    with hold_lock(file.with_name(f".{file.name}.lock")):
        cache = config.get_timing_cache()
        known = file.read_bytes() if file.exists() else b""
        if known and not cache.combine(config.create_timing_cache(known), False):
            return f"the timing cache {file.name} is of another GPU or version by now, and was left as it is"
        write_bytes(file, bytes(cache.serialize()))
    return ""


def require_supported(trt: Any, options: Mapping[str, Any]) -> None:
    """Raises BadInputError for a GPU or compatibility that this version of the library does not have."""
    level = HARDWARE_COMPATIBILITY[options["hardware_compatibility"]]
    if level not in trt.HardwareCompatibilityLevel.__members__:
        raise BadInputError(
            f"option hardware_compatibility={options['hardware_compatibility']}: "
            f"{trt.__name__} {trt.__version__} does not have it"
        )
    for name in capabilities_from_text(options["compute_capabilities"]):
        known = {
            key: value
            for key, value in trt.ComputeCapability.__members__.items()
            if key.startswith("SM")
        }
        if name not in known:
            numbers = ", ".join(
                f"{int(value) / 10:.1f}" for value in sorted(known.values(), key=int)
            )
            raise BadInputError(
                f"option compute_capabilities={options['compute_capabilities']}: {trt.__name__} {trt.__version__} "
                f"does not build for {int(name[2:]) / 10:.1f}; choose from {numbers}"
            )


_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "UINT8": "uint8",
    "BOOL": "bool",
}


class TensorRTSession:
    device: Device = "cuda"

    def __init__(
        self,
        trt: Any,
        engine: Path,
        options: Mapping[str, Any],
        *,
        plugins: Sequence[Path] = (),
        weights: Path | None = None,
        lean_runtime: bool = False,
    ) -> None:
        """Loads plugin libraries, then the engine.

        `weights` is the ONNX graph with the weights of a stripped engine. With `lean_runtime` the engine is version-compatible:
        it brings a runtime, whose code runs.
        """
        self._options = merge_options(options, {CUDA_GRAPH.name: CUDA_GRAPH.default}, trt.__name__)
        self._logger = create_logger(trt)
        self._runtime = trt.Runtime(self._logger)
        if plugins:
            registry = self._runtime.get_plugin_registry()
            load_plugins(registry, plugins, trt.__name__, self._logger)
        if lean_runtime:
            self._runtime.engine_host_code_allowed = True
        self._engine = self._runtime.deserialize_cuda_engine(engine.read_bytes())
        if self._engine is None:
            raise StageError(
                f"{trt.__name__} {trt.__version__} cannot load {engine.name}: {escape(self._logger.first_error)[:200]}\n"
                "an engine loads only with the version and on the GPU it was built for; otherwise build it again"
            )
        if weights is not None:
            self._refit(trt, weights)
        self._context = self._engine.create_execution_context()
        self._profile: int | None = None
        """The profile that was selected last."""
        self._done: Any = None
        """The event after the last call on tensors, on the stream with the handle `_last_stream`."""
        self._last_stream = 0
        names = [
            self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)
        ]
        inputs = [
            name for name in names if self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        ]
        self.inputs = tuple(self._spec(name) for name in inputs)
        self.outputs = tuple(self._spec(name) for name in names if name not in inputs)

    def _refit(self, trt: Any, weights: Path) -> None:
        """Gives a stripped engine the weights of its graph. Raises StageError if any is missing."""
        refitter = trt.Refitter(self._engine, self._logger)
        parser = trt.OnnxParserRefitter(refitter, self._logger)
        if (
            not parser.refit_from_file(str(weights))
            or refitter.get_missing_weights()
            or not refitter.refit_cuda_engine()
        ):
            reason = escape(self._logger.first_error)[:200] or "some weights are missing"
            raise StageError(
                f"{trt.__name__} {trt.__version__} cannot give the engine its weights: {reason}"
            )

    def _spec(self, name: str) -> TensorSpec:
        shape = tuple(
            int(size) if size >= 0 else f"dim{axis}"
            for axis, size in enumerate(self._engine.get_tensor_shape(name))
        )
        return TensorSpec(
            name, _DTYPES[str(self._engine.get_tensor_dtype(name)).rpartition(".")[2]], shape
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        del self._context, self._engine, self._runtime

    def run(self, inputs: Mapping[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
        binding = self._bind_buffers(inputs)
        binding.launch()
        torch.cuda.current_stream().synchronize()
        return {name: tensor.cpu().numpy() for name, tensor in binding.outputs.items()}

    def bind(self, inputs: Mapping[str, "np.ndarray"]) -> Binding:
        binding = self._bind_buffers(inputs)
        return CudaGraphBinding(binding) if self._options["cuda_graph"] else binding

    def _bind_buffers(self, inputs: Mapping[str, "np.ndarray"]) -> "_EngineBinding":
        return self._bind_tensors(
            {name: torch.from_numpy(array).cuda() for name, array in inputs.items()}
        )

    def run_on(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Calls on several streams are ordered by an event, since they share the context's memory."""
        here = torch.cuda.current_stream()
        if self._done is None:
            self._done = torch.cuda.Event()
        elif here.cuda_stream != self._last_stream:
            here.wait_event(self._done)
        binding = self._bind_tensors({name: tensor.contiguous() for name, tensor in inputs.items()})
        binding.launch()
        self._done.record(here)
        self._last_stream = here.cuda_stream
        # the allocator must not reuse them before the work is done
        for tensor in binding.inputs.values():
            tensor.record_stream(here)
        return binding.outputs

    def _bind_tensors(self, on_device: "dict[str, torch.Tensor]") -> "_EngineBinding":
        self._select_profile({name: tuple(tensor.shape) for name, tensor in on_device.items()})
        for name, tensor in on_device.items():
            if not self._context.set_input_shape(name, tuple(tensor.shape)):
                raise BadInputError(
                    f"{name} {tuple(tensor.shape)} is outside the engine's optimization profile"
                )
        if self._context.infer_shapes():
            raise StageError(
                "the engine's output shapes depend on its inputs' values; it can be built but not bound"
            )
        outputs = {
            spec.name: torch.empty(
                tuple(self._context.get_tensor_shape(spec.name)),
                dtype=getattr(torch, spec.dtype),
                device="cuda",
            )
            for spec in self.outputs
        }
        return _EngineBinding(self._context, on_device, outputs)

    def _select_profile(self, shapes: Mapping[str, Shape]) -> None:
        count = self._engine.num_optimization_profiles
        if count < 2:
            return
        profiles = [
            {
                name: tuple(map(tuple, self._engine.get_tensor_profile_shape(name, index)))
                for name in shapes
            }
            for index in range(count)
        ]
        chosen = choose_profile(profiles, shapes)
        if chosen is None:
            raise BadInputError(
                f"shapes {dict(shapes)} are outside all {count} of the engine's optimization profiles"
            )
        if chosen == self._profile:
            return
        stream = torch.cuda.current_stream()
        if not self._context.set_optimization_profile_async(chosen, stream.cuda_stream):
            raise StageError(
                f"optimization profile {chosen} cannot be selected; see the CUDA error above"
            )
        stream.synchronize()
        self._profile = chosen


def choose_profile(
    profiles: Sequence[Mapping[str, tuple[Shape, ...]]], shapes: Mapping[str, Shape]
) -> int | None:
    """The index of the profile (min, opt, and max shape by input) that contains `shapes` and has the nearest opt size, or None."""

    def holds(profile: Mapping[str, tuple[Shape, ...]]) -> bool:
        return all(
            low <= size <= high
            for name, shape in shapes.items()
            for low, size, high in zip(profile[name][0], shape, profile[name][2], strict=True)
        )

    def measure_distance(index: int) -> float:
        return sum(
            abs(log(prod(profiles[index][name][1]) / prod(shape))) for name, shape in shapes.items()
        )

    return min(
        (index for index, profile in enumerate(profiles) if holds(profile)),
        key=measure_distance,
        default=None,
    )


class _EngineBinding:
    def __init__(
        self, context: Any, inputs: "dict[str, torch.Tensor]", outputs: "dict[str, torch.Tensor]"
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self._context = context
        for name, tensor in {**inputs, **outputs}.items():
            context.set_tensor_address(name, tensor.data_ptr())

    def launch(self) -> None:
        if not self._context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise StageError("the engine could not be enqueued; see the CUDA error above")
