"""Engines of TensorRT and TensorRT-RTX: options and configuration of the builder, and sessions on torch's CUDA memory and streams."""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from math import log, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from optpipe.backends.base import Binding, BuildRequest, Option, merge_options
from optpipe.backends.torch_program import CudaGraphBinding
from optpipe.core.card import InputSpec, Shape, TensorSpec, batch_ranges_from_text
from optpipe.core.errors import BadInputError, MissingError, StageError, escape, read_as_user_file
from optpipe.core.files import hash_file
from optpipe.core.precision import Precision
from optpipe.core.records import record_from_plain
from optpipe.workspace.environment import list_gpus
from optpipe.workspace.files import hold_lock

if TYPE_CHECKING:
    import numpy as np
    import torch

    from optpipe.backends.base import Device


# The builder options of TensorRT and TensorRT-RTX, checked before anything runs.
#
# Names and meanings follow NVIDIA's `trtexec`; an option that a library lacks is refused with the reason.
# Source: NVIDIA TensorRT 11 documentation, "Advanced Topics", and TensorRT-RTX 1.7, "CPU-Only AOT and TensorRT-RTX Engines".


MAX_OPTIMIZATION_LEVEL = 5
HARDWARE_COMPATIBILITY = {"none": "NONE", "ampere+": "AMPERE_PLUS", "sameComputeCapability": "SAME_COMPUTE_CAPABILITY"}
"""trtexec's names and the library's."""
_ALWAYS_IN_KEY = ("workspace_bytes", "optimization_level")
PLUGIN_PREFIX = "plugin-"
"""Prefix of the copies of plugin libraries in an artifact, which are loaded before its engine."""
_NOT_IN_KEY = ("timing_cache",)
"""A timing cache shortens a build; its path does not change the engine."""


def _describe(default: Any, text: str, *choices: str) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True, slots=True)
class BuilderOptions:
    workspace_bytes: int = _describe(
        0, "scratch memory for the builder's kernels, in bytes; 0 is the library's own limit"
    )
    optimization_level: int = _describe(-1, "0 to 5: how long the builder searches; -1 is the library's own level")
    profiles: str = _describe("", "batch ranges of several optimization profiles, as --batch takes them: 1:1:1,1:32:64")
    hardware_compatibility: str = _describe(
        "none", "other GPUs that the engine runs on; costs speed", *HARDWARE_COMPATIBILITY
    )
    version_compatible: bool = _describe(False, "the engine also loads in later versions of TensorRT")
    refit: bool = _describe(False, "its weights can be replaced; needs a GPU to build")
    strip_weights: bool = _describe(
        False, "the engine holds no weights; they come from the ONNX graph when it loads; needs a GPU to build"
    )
    sparse_weights: bool = _describe(
        False, "lets the builder use 2:4 sparse kernels where the weights have that pattern"
    )
    aux_streams: int = _describe(-1, "streams beside the main one for parallel branches; -1 leaves it to the library")
    tactic_sources: str = _describe("", "kernel sources to add or leave out, such as -EDGE_MASK_CONVOLUTIONS")
    plugins: str = _describe(
        "", "plugin libraries (.so), comma-separated; they run code and are copied into the artifact"
    )
    timing_cache: str = _describe("", "file with the builder's timings, shared by builds and hosts of one GPU model")
    compute_capabilities: str = _describe("", "GPUs the engine is for, such as 8.6,8.9; by default Ampere and newer")


_LACKING = {
    "tensorrt_rtx": {
        "hardware_compatibility": "one engine runs on every supported GPU; compute_capabilities narrows that",
        "version_compatible": "it has no lean runtime",
        "timing_cache": "it times no kernels when it builds; the option runtime_cache keeps its compiled kernels",
    },
    "tensorrt": {"compute_capabilities": "an engine is for the GPU it is built on; hardware_compatibility widens that"},
}
"""Options that a library does not have, and why."""


def list_builder_options(library: str) -> tuple[Option, ...]:
    return tuple(
        Option(each.name, each.default, each.metadata["help"], builds=True, choices=each.metadata["choices"])
        for each in fields(BuilderOptions)
        if each.name not in _LACKING[library]
    )


def options_from_given(given: Mapping[str, Any], library: str, backend: str) -> BuilderOptions:
    """The record of the options in `given`, whose text is parsed.

    Raises:
        BadInputError: an option or value that the library does not take, or a plugin that is not a file.
        MissingError: `refit` or `strip_weights` without a GPU: such engines are compiled on one.
    """
    for name, reason in _LACKING[library].items():
        if name in given:
            raise BadInputError(f"{backend} has no option '{name}': {reason}")
    defaults = {each.name: each.default for each in fields(BuilderOptions)}
    known = {name: value for name, value in defaults.items() if name not in _LACKING[library]}
    chosen: dict[str, Any] = {**defaults, **merge_options(given, known, backend)}
    options = BuilderOptions(**chosen)
    if options.optimization_level > MAX_OPTIMIZATION_LEVEL:
        raise BadInputError(
            f"option optimization_level={options.optimization_level}: expected 0 to {MAX_OPTIMIZATION_LEVEL}"
        )
    if options.hardware_compatibility not in HARDWARE_COMPATIBILITY:
        raise BadInputError(
            f"option hardware_compatibility={options.hardware_compatibility}: "
            f"choose from {', '.join(HARDWARE_COMPATIBILITY)}"
        )
    find_profiles(options)
    if len(capabilities_from_text(options.compute_capabilities)) > 1 and (options.refit or options.strip_weights):
        raise BadInputError(
            f"option compute_capabilities={options.compute_capabilities}: {backend} takes at most one with refit or strip_weights"
        )
    sources_from_text(options.tactic_sources)
    for path in list_plugins(options):
        if not path.is_file():
            raise BadInputError(f"option plugins={options.plugins}: no such file: {path}")
    if options.timing_cache and not Path(options.timing_cache).parent.is_dir():
        raise BadInputError(f"option timing_cache={options.timing_cache}: its folder does not exist")
    if (options.refit or options.strip_weights) and not list_gpus():
        raise MissingError(
            f"{backend} compiles engines with refit or strip_weights on a GPU, and there is none here; omit the option"
        )
    return options


def options_from_details(details: Mapping[str, Any]) -> BuilderOptions:
    return record_from_plain(details.get("builder", {}), BuilderOptions, "the artifact's manifest")


def describe_in_key(options: BuilderOptions) -> dict[str, Any]:
    """The options that change the engine, for the artifact's key, with plugins by their hash.

    Options at their defaults are left out, so that a new option does not rename artifacts.
    """
    defaults = asdict(BuilderOptions())
    found = {
        name: value
        for name, value in asdict(options).items()
        if name in _ALWAYS_IN_KEY or (value != defaults[name] and name not in _NOT_IN_KEY)
    }
    if options.plugins:
        found["plugins"] = [f"{path.name} sha256 {hash_file(path)}" for path in list_plugins(options)]
    return found


def list_plugins(options: BuilderOptions) -> tuple[Path, ...]:
    return tuple(Path(part.strip()) for part in options.plugins.split(",") if part.strip())


def find_profiles(options: BuilderOptions) -> tuple[tuple[int, int, int], ...]:
    return batch_ranges_from_text(options.profiles) if options.profiles else ()


def list_profile_shapes(options: BuilderOptions, inputs: tuple[InputSpec, ...]) -> list[tuple[InputSpec, ...]]:
    """The inputs with the shapes of each optimization profile; raises BadInputError if one is outside the model's range."""
    profiles = []
    for low, usual, high in find_profiles(options):
        for each in inputs:
            own = each.batch_range
            if own is not None and not own[0] <= low <= high <= own[2]:
                raise BadInputError(
                    f"option profiles={options.profiles}: {low}:{usual}:{high} is outside the batch range of {each.name}, "
                    f"{own[0]} to {own[2]}"
                )
        profiles.append(tuple(each.with_batch(low, usual, high) for each in inputs))
    return profiles or [tuple(inputs)]


def capabilities_from_text(text: str) -> tuple[str, ...]:
    """Reads `8.6,12.0` as the library's names, `SM86` and `SM120`, without a check that the library has them."""
    names = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        major, _, minor = part.partition(".")
        if not (major.isdecimal() and minor.isdecimal()):
            raise BadInputError(f"option compute_capabilities={text}: expected numbers such as 8.6,8.9")
        names.append(f"SM{int(major)}{int(minor)}")
    return tuple(dict.fromkeys(names))


def sources_from_text(text: str) -> tuple[tuple[str, bool], ...]:
    """Reads `-EDGE_MASK_CONVOLUTIONS,+JIT_CONVOLUTIONS` as names and whether to add them."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if wrong := [part for part in parts if part[0] not in "+-" or len(part) == 1]:
        raise BadInputError(
            f"option tactic_sources={text}: '{wrong[0]}' needs a sign, such as -EDGE_MASK_CONVOLUTIONS to leave it out"
        )
    return tuple((part[1:], part[0] == "+") for part in parts)


_MAGIC_BYTES = 8
"""A timing cache begins with the library's magic number."""
_LOADED: set[tuple[str, str]] = set()
"""Plugin libraries in this process, by runtime and hash: the runtime's registry refuses a second copy."""


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


def create_config(trt: Any, builder: Any, request: BuildRequest, options: BuilderOptions) -> Any:
    """The builder's configuration; raises StageError for a flag that this version of the library does not take."""
    config = builder.create_builder_config()
    # TensorRT strips what can be refitted with the same weights by itself; TensorRT-RTX needs a flag
    flags = {
        "TF32": request.precision is Precision.TF32,
        "VERSION_COMPATIBLE": options.version_compatible,
        "REFIT": options.refit or (options.strip_weights and trt.__name__ == "tensorrt_rtx"),
        "STRIP_PLAN": options.strip_weights,
        "SPARSE_WEIGHTS": options.sparse_weights,
    }
    for name, wanted in flags.items():
        flag = getattr(trt.BuilderFlag, name)
        (config.set_flag if wanted else config.clear_flag)(flag)
        if config.get_flag(flag) != wanted:
            raise StageError(f"{trt.__name__} {trt.__version__} does not take the builder flag {name} here")
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if options.workspace_bytes:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    if options.optimization_level >= 0:
        config.builder_optimization_level = options.optimization_level
    if options.aux_streams >= 0:
        config.max_aux_streams = options.aux_streams
    if options.hardware_compatibility != "none":
        level = HARDWARE_COMPATIBILITY[options.hardware_compatibility]
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, level)
    if options.tactic_sources:
        sources = config.get_tactic_sources()
        for name, added in sources_from_text(options.tactic_sources):
            bit = 1 << int(getattr(trt.TacticSource, name))
            sources = sources | bit if added else sources & ~bit
        config.set_tactic_sources(sources)
    if wanted := capabilities_from_text(options.compute_capabilities):
        config.num_compute_capabilities = len(wanted)
        for index, name in enumerate(wanted):
            config.set_compute_capability(getattr(trt.ComputeCapability, name), index)
    if options.timing_cache:
        file = Path(options.timing_cache)
        with _lock_file(file):
            known = _read_cache_file(config, file)
        cache = config.create_timing_cache(known)
        if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
            raise BadInputError(
                f"option timing_cache={file}: {trt.__name__} {trt.__version__} does not take it on this GPU; give another file"
            )
    for inputs in list_profile_shapes(options, request.card.inputs):
        profile = builder.create_optimization_profile()
        for each in inputs:
            profile.set_shape(each.name, each.min, each.opt, each.max)
        config.add_optimization_profile(profile)
    return config


def require_supported(trt: Any, options: BuilderOptions) -> None:
    """Raises BadInputError for a kernel source, GPU, or compatibility that this version of the library does not have."""
    level = HARDWARE_COMPATIBILITY[options.hardware_compatibility]
    if level not in trt.HardwareCompatibilityLevel.__members__:
        raise BadInputError(
            f"option hardware_compatibility={options.hardware_compatibility}: "
            f"{trt.__name__} {trt.__version__} does not have it"
        )
    sources = trt.TacticSource.__members__
    for name, _ in sources_from_text(options.tactic_sources):
        if name not in sources:
            raise BadInputError(
                f"option tactic_sources={options.tactic_sources}: {trt.__name__} {trt.__version__} has no source {name}; "
                f"choose from {', '.join(sorted(sources))}"
            )
    for name in capabilities_from_text(options.compute_capabilities):
        known = {key: value for key, value in trt.ComputeCapability.__members__.items() if key.startswith("SM")}
        if name not in known:
            numbers = ", ".join(f"{int(value) / 10:.1f}" for value in sorted(known.values(), key=int))
            raise BadInputError(
                f"option compute_capabilities={options.compute_capabilities}: {trt.__name__} {trt.__version__} "
                f"does not build for {int(name[2:]) / 10:.1f}; choose from {numbers}"
            )


def load_plugins(registry: Any, files: Iterable[Path], library: str, logger: Any) -> None:
    """Loads plugin libraries once per process, which runs their code. Raises BadInputError if one is refused."""
    for file in files:
        known = (library, hash_file(file))
        if known in _LOADED:
            continue
        if registry.load_library(str(file)) is None:
            raise BadInputError(f"{library} cannot load {file} as a plugin library: {escape(logger.first_error)[:200]}")
        _LOADED.add(known)


def copy_plugins(options: BuilderOptions, directory: Path) -> list[Path]:
    return [
        Path(shutil.copyfile(path, directory / f"{PLUGIN_PREFIX}{index}-{path.name}"))
        for index, path in enumerate(list_plugins(options))
    ]


def write_timing_cache(config: Any, file: Path) -> None:
    """Merges this build's timings into the file, to which other builds may have written in the meantime.

    If the file is now of another GPU model or version, it stays unchanged, and the build's log reports it.
    """
    with _lock_file(file):
        cache = config.get_timing_cache()
        known = _read_cache_file(config, file)
        if known and not cache.combine(config.create_timing_cache(known), False):
            print(f"timing cache {file} is of another GPU or version by now, and is left as it is")
            return
        part = file.with_name(f".{file.name}.{os.getpid()}")
        part.write_bytes(cache.serialize())
        part.replace(file)


def _read_cache_file(config: Any, file: Path) -> bytes:
    """The file's bytes, empty if it does not exist; raises BadInputError for another kind of file."""
    if not file.exists():
        return b""
    with read_as_user_file(file, "a timing cache"):
        known = file.read_bytes()
    mark = bytes(config.create_timing_cache(b"").serialize())[:_MAGIC_BYTES]
    if not known.startswith(mark):
        raise BadInputError(f"option timing_cache={file}: not a timing cache; give another file")
    return known


@contextmanager
def _lock_file(file: Path) -> Iterator[None]:
    """Locks the cache through another file, since the cache file is replaced."""
    with read_as_user_file(file, "a timing cache"), hold_lock(file.with_name(f".{file.name}.lock")):
        yield


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
_CUDA_GRAPH = Option("cuda_graph", True, "captures an inference into a CUDA graph")
_RUNTIME_CACHE = Option(
    "runtime_cache",
    "",
    "file with the kernels that TensorRT-RTX compiled when it loaded engines; loads faster next time",
)


def list_session_options(library: str) -> tuple[Option, ...]:
    """The session options of `tensorrt` or `tensorrt_rtx`; only the latter compiles kernels when it loads."""
    return (_CUDA_GRAPH, _RUNTIME_CACHE) if library == "tensorrt_rtx" else (_CUDA_GRAPH,)


class TensorRTSession:
    device: "Device" = "cuda"

    def __init__(
        self,
        trt: Any,
        engine: Path,
        options: Mapping[str, Any],
        *,
        weights: Path | None = None,
        lean_runtime: bool = False,
    ) -> None:
        """Loads the plugin libraries in the engine's folder, then the engine.

        `weights` is the ONNX graph with the weights of an engine without weights. With `lean_runtime` the engine is
        version-compatible: it contains a runtime, whose code is run.
        """
        known = {each.name: each.default for each in list_session_options(trt.__name__)}
        self._options = merge_options(options, known, trt.__name__)
        cache = Path(str(self._options.get("runtime_cache", "")))
        if not cache.parent.is_dir():
            raise BadInputError(f"option runtime_cache={cache}: its folder does not exist")
        self._logger = create_logger(trt)
        self._runtime = trt.Runtime(self._logger)
        load_plugins(
            self._runtime.get_plugin_registry(),
            sorted(engine.parent.glob(f"{PLUGIN_PREFIX}*")),
            trt.__name__,
            self._logger,
        )
        if lean_runtime:
            self._runtime.engine_host_code_allowed = True
        self._engine = self._runtime.deserialize_cuda_engine(engine.read_bytes())
        if self._engine is None:
            raise StageError(
                f"{trt.__name__} {trt.__version__} cannot load {engine.name}: {escape(self._logger.first_error)[:200]}\n"
                "an engine loads only with the version and on the GPU it was built for; otherwise build it again"
            )
        if weights is not None:
            if not weights.is_file():
                raise MissingError(f"the engine holds no weights, and their graph {weights} is gone; build it again")
            refitter = trt.Refitter(self._engine, self._logger)
            refit = trt.OnnxParserRefitter(refitter, self._logger)
            if not refit.refit_from_file(str(weights)) or not refitter.refit_cuda_engine():
                missing = refitter.get_missing_weights()[:5]
                raise StageError(f"{trt.__name__} cannot refit the engine from {weights}: {missing}")
        self._context = self._create_context()
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        inputs = [name for name in names if self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self.inputs = tuple(self._spec(name) for name in inputs)
        self.outputs = tuple(self._spec(name) for name in names if name not in inputs)

    def _create_context(self) -> Any:
        if not self._options.get("runtime_cache"):
            return self._engine.create_execution_context()
        file = Path(str(self._options["runtime_cache"]))
        config = self._engine.create_runtime_config()
        self._cache = config.create_runtime_cache()
        if file.is_file() and not self._cache.deserialize(file.read_bytes()):
            raise BadInputError(f"option runtime_cache={file}: not a runtime cache of this version; give another file")
        config.set_runtime_cache(self._cache)
        return self._engine.create_execution_context(config)

    def _spec(self, name: str) -> TensorSpec:
        shape = tuple(
            int(size) if size >= 0 else f"dim{axis}" for axis, size in enumerate(self._engine.get_tensor_shape(name))
        )
        return TensorSpec(name, _DTYPES[str(self._engine.get_tensor_dtype(name)).rpartition(".")[2]], shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._options.get("runtime_cache"):
            file = Path(str(self._options["runtime_cache"]))
            part = file.with_name(f".{file.name}.{os.getpid()}")
            part.write_bytes(self._cache.serialize())
            part.replace(file)
        del self._context, self._engine, self._runtime

    def run(self, inputs: Mapping[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
        import torch

        binding = self._bind_buffers(inputs)
        binding.launch()
        torch.cuda.current_stream().synchronize()
        return {name: tensor.cpu().numpy() for name, tensor in binding.outputs.items()}

    def bind(self, inputs: Mapping[str, "np.ndarray"]) -> Binding:
        binding = self._bind_buffers(inputs)
        return CudaGraphBinding(binding) if self._options["cuda_graph"] else binding

    def _bind_buffers(self, inputs: Mapping[str, "np.ndarray"]) -> "_EngineBinding":
        import torch

        on_device = {name: torch.from_numpy(array).cuda() for name, array in inputs.items()}
        self._select_profile({name: tuple(array.shape) for name, array in inputs.items()})
        for name, tensor in on_device.items():
            if not self._context.set_input_shape(name, tuple(tensor.shape)):
                raise BadInputError(f"{name} {tuple(tensor.shape)} is outside the engine's optimization profile")
        if self._context.infer_shapes():
            raise StageError("the engine's output shapes depend on its inputs' values; it can be built but not bound")
        outputs = {
            each.name: torch.empty(
                tuple(self._context.get_tensor_shape(each.name)), dtype=getattr(torch, each.dtype), device="cuda"
            )
            for each in self.outputs
        }
        return _EngineBinding(self._context, on_device, outputs)

    def _select_profile(self, shapes: Mapping[str, Shape]) -> None:
        import torch

        count = self._engine.num_optimization_profiles
        if count < 2:
            return
        profiles = [
            {name: tuple(map(tuple, self._engine.get_tensor_profile_shape(name, index))) for name in shapes}
            for index in range(count)
        ]
        chosen = choose_profile(profiles, shapes)
        if chosen is None:
            raise BadInputError(f"shapes {dict(shapes)} are outside all {count} of the engine's optimization profiles")
        stream = torch.cuda.current_stream()
        if not self._context.set_optimization_profile_async(chosen, stream.cuda_stream):
            raise StageError(f"optimization profile {chosen} cannot be selected; see the CUDA error above")
        stream.synchronize()


def choose_profile(profiles: Sequence[Mapping[str, tuple[Shape, ...]]], shapes: Mapping[str, Shape]) -> int | None:
    """The index of the profile (min, opt, and max shape by input) that contains `shapes` and has the nearest opt size, or None."""

    def holds(profile: Mapping[str, tuple[Shape, ...]]) -> bool:
        return all(
            low <= size <= high
            for name, shape in shapes.items()
            for low, size, high in zip(profile[name][0], shape, profile[name][2], strict=True)
        )

    def measure_distance(index: int) -> float:
        return sum(abs(log(prod(profiles[index][name][1]) / prod(shape))) for name, shape in shapes.items())

    return min((index for index, each in enumerate(profiles) if holds(each)), key=measure_distance, default=None)


class _EngineBinding:
    def __init__(self, context: Any, inputs: "dict[str, torch.Tensor]", outputs: "dict[str, torch.Tensor]") -> None:
        self.inputs, self.outputs = inputs, outputs
        self._context = context
        for name, tensor in {**inputs, **outputs}.items():
            context.set_tensor_address(name, tensor.data_ptr())

    def launch(self) -> None:
        import torch

        if not self._context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise StageError("the engine could not be enqueued; see the CUDA error above")
