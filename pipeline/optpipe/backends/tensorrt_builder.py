"""From a graph and options to a builder's configuration: flags, profiles, plugins, and the timing cache's file."""

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optpipe.backends.base import BuildRequest
from optpipe.backends.tensorrt_options import (
    HARDWARE_COMPATIBILITY,
    PLUGIN_PREFIX,
    BuilderOptions,
    capabilities_from_text,
    list_plugins,
    list_profile_shapes,
    sources_from_text,
)
from optpipe.core.errors import BadInputError, StageError, escape, read_as_user_file
from optpipe.core.hashing import hash_file
from optpipe.core.precision import Precision

_MAGIC_BYTES = 8
"""A timing cache begins with the library's own mark."""
_LOADED: set[tuple[str, str]] = set()
"""Plugin libraries of this process, by runtime and hash: its registry is one, and refuses a second copy."""


def create_network(trt: Any, builder: Any) -> Any:
    """Strongly typed: asked for by flag in TensorRT 10, the only kind there is from 11 on."""
    return builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))


def create_logger(trt: Any) -> Any:
    """A logger that stays silent and keeps the first error for the message to the user."""

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
    # TensorRT strips what can be refitted with the same weights by itself; TensorRT-RTX wants to be told
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
    _set_tactic_sources(trt, config, options)
    _set_compute_capabilities(trt, config, options)
    if options.timing_cache:
        _read_timing_cache(trt, config, Path(options.timing_cache))
    for inputs in list_profile_shapes(options, request.card.inputs):
        profile = builder.create_optimization_profile()
        for each in inputs:
            profile.set_shape(each.name, each.min, each.opt, each.max)
        config.add_optimization_profile(profile)
    return config


def require_supported(trt: Any, options: BuilderOptions) -> None:
    """Raises BadInputError for a kernel source, a GPU or a compatibility that this version of the library does not know."""
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
        if name not in (known := _list_compute_capabilities(trt)):
            numbers = ", ".join(f"{int(value) / 10:.1f}" for value in sorted(known.values(), key=int))
            raise BadInputError(
                f"option compute_capabilities={options.compute_capabilities}: {trt.__name__} {trt.__version__} "
                f"does not build for {int(name[2:]) / 10:.1f}; choose from {numbers}"
            )


def _list_compute_capabilities(trt: Any) -> dict[str, Any]:
    return {name: value for name, value in trt.ComputeCapability.__members__.items() if name.startswith("SM")}


def _set_tactic_sources(trt: Any, config: Any, options: BuilderOptions) -> None:
    sources = config.get_tactic_sources()
    for name, added in sources_from_text(options.tactic_sources):
        bit = 1 << int(getattr(trt.TacticSource, name))
        sources = sources | bit if added else sources & ~bit
    if options.tactic_sources:
        config.set_tactic_sources(sources)


def _set_compute_capabilities(trt: Any, config: Any, options: BuilderOptions) -> None:
    wanted = capabilities_from_text(options.compute_capabilities)
    if wanted:
        config.num_compute_capabilities = len(wanted)
    for index, name in enumerate(wanted):
        config.set_compute_capability(_list_compute_capabilities(trt)[name], index)


def load_plugins(registry: Any, files: Iterable[Path], library: str, logger: Any) -> None:
    """Loads plugin libraries, once in a process: this runs their code. Raises BadInputError for one that is refused."""
    for file in files:
        known = (library, hash_file(file))
        if known in _LOADED:
            continue
        if registry.load_library(str(file)) is None:
            raise BadInputError(f"{library} cannot load {file} as a plugin library: {escape(logger.first_error)[:200]}")
        _LOADED.add(known)


def copy_plugins(options: BuilderOptions, directory: Path) -> list[Path]:
    """Copies the plugin libraries into the artifact, where their hashes are recorded and checked."""
    return [
        Path(shutil.copyfile(path, directory / f"{PLUGIN_PREFIX}{index}-{path.name}"))
        for index, path in enumerate(list_plugins(options))
    ]


def _read_timing_cache(trt: Any, config: Any, file: Path) -> None:
    with _lock_file(file):
        known = _read_cache_file(config, file)
    cache = config.create_timing_cache(known)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        raise BadInputError(
            f"option timing_cache={file}: {trt.__name__} {trt.__version__} does not take it on this GPU; give another file"
        )


def write_timing_cache(config: Any, file: Path) -> None:
    """Adds what this build timed to the file: other builds may have written to it meanwhile, and lose nothing.

    Where another GPU model or version took the file over meanwhile, it is left to it, as the build's log says.
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
    """Its bytes, empty where there is none; raises BadInputError for another kind of file, which is left as it is."""
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
    """One build at a time reads or writes the cache; the lock lies beside it, since the file itself is replaced."""
    with read_as_user_file(file, "a timing cache"), file.with_name(f".{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
