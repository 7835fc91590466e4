"""The backends by name, in the order in which `--backend auto` prefers them; plug-ins come last."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from optpipe.backends.base import Backend, Device, Session, merge_options
from optpipe.backends.inductor import Inductor
from optpipe.backends.onnxruntime import OnnxRuntime
from optpipe.backends.tensorrt import TENSORRT, TENSORRT_RTX
from optpipe.backends.torch_eager import TorchEager
from optpipe.backends.torch_tensorrt import TorchTensorRT
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError, MissingError, OptpipeError, StageError, first_line
from optpipe.core.events import Listener
from optpipe.core.params import choices_from_text
from optpipe.core.plugins import FAILURES, Registry, load_plugins
from optpipe.core.precision import Precision
from optpipe.core.wording import Argument, Call
from optpipe.workspace.entry import Entry
from optpipe.workspace.store import Store


def read_backend_plugin(name: str, plugin: Any) -> Backend:
    """An instance of the class, or the instance, that a plug-in registers."""
    backend = plugin() if isinstance(plugin, type) else plugin
    if not isinstance(backend, Backend):
        raise TypeError(f"expected a subclass of {Backend.__module__}.Backend")
    if backend.name != name:
        raise ValueError(f"the backend's name is '{backend.name}'")
    if not backend.packages:
        raise ValueError("the backend names no packages")
    return backend


_OWN = (TENSORRT, TENSORRT_RTX, TorchTensorRT(), OnnxRuntime(), Inductor(), TorchEager())

BACKENDS: Registry[Backend] = Registry("backend", {backend.name: backend for backend in _OWN})

BACKENDS.update(load_plugins("optpipe.backends", tuple(BACKENDS), read_backend_plugin))


@contextmanager
def name_failing_backend(backend: Backend) -> Iterator[None]:
    """Raises StageError that names `backend` for an unforeseen error in the block, in which it answers a question.

    A plug-in may have bugs: they end a command in two lines, and do not look like errors of optpipe.
    """
    try:
        yield
    except OptpipeError:
        raise
    except Exception as error:
        package = f" of the distribution {backend.packages[0]}" if backend.packages else ""
        raise StageError(
            f"backend {backend.name}{package} failed: {type(error).__name__}: {first_line(error)}",
            remedy="leave it out with "
            + Argument("backend", "NAME")
            + ", or report the error to its authors",
        ) from error


def list_precisions(backend: Backend, device: Device | None) -> frozenset[Precision]:
    """The precisions of `backend` on `device`, or on the best one. Raises StageError if it fails to answer."""
    with name_failing_backend(backend):
        return backend.precisions(backend.choose_device(device))


def backends_from_text(
    text: str, device: Device | None, precisions: Collection[Precision] = ()
) -> tuple[Backend, ...]:
    """Reads `--backend`: names, `all`, or `auto`.

    `auto` is the best backend that can run here and every backend that builds here ahead of time; for FP8 also those that have it.
    """
    named = {word.strip().lower() for word in text.split(",")} - BACKENDS.keys()
    if failure := next((failure for failure in FAILURES if failure.name in named), None):
        raise MissingError(str(failure))
    words = choices_from_text(text, ["auto", "all", *BACKENDS], "backend")
    if "all" in words:
        return tuple(BACKENDS.values())
    ahead: list[Backend] = []
    runnable: list[Backend] = []
    for backend in BACKENDS.values() if "auto" in words else ():
        with name_failing_backend(backend):
            capabilities = [
                backend.probe_capability(own) for own in backend.devices() if device in (None, own)
            ]
        if not runnable and any(
            capability.runs and capability.builds for capability in capabilities
        ):
            runnable = [backend]
        elif backend.ahead_of_time and any(capability.builds for capability in capabilities):
            ahead.append(backend)
    automatic = (*ahead, *runnable)
    if automatic and Precision.FP8 in precisions:
        automatic += tuple(
            backend
            for backend in BACKENDS.values()
            if Precision.FP8 in list_precisions(backend, "cuda")
        )
    return tuple(dict.fromkeys((*automatic, *(BACKENDS[word] for word in words if word != "auto"))))


def list_fusing_backends(device: Device) -> tuple[str, ...]:
    """The backends that fuse elementwise operators into matrix kernels on `device`, sorted by name."""
    return tuple(
        sorted(name for name, backend in BACKENDS.items() if backend.speed_bounds(device).fuses)
    )


def list_runtime_packages(backend: str | None = None) -> tuple[str, ...]:
    """The distributions that decide outputs and latency: the runtime of `backend`, or all packages of all backends.

    Records name their own packages; this serves those of earlier versions, which do not. Empty for a backend that is not here.
    """
    if backend is not None:
        return BACKENDS[backend].packages[:1] if backend in BACKENDS else ()
    return tuple(sorted({name for known in BACKENDS.values() for name in known.packages}))


def resolve_effective_options(
    info: ArtifactInfo, given: Mapping[str, Any]
) -> dict[str, bool | int | str]:
    """An artifact's runtime options, overridden by `given`, whose text is parsed.

    Raises BadInputError for an option that its backend does not have or that only a build takes.
    """
    name, backend = info.backend, BACKENDS[info.backend]
    known = backend.runtime_options(info.device)
    built = {option.name for option in backend.describe_options(info.device) if option.builds}
    for key, value in given.items():
        if key in built:
            raise BadInputError(
                f"'{key}' is a build option of {name}: "
                + Call("build", option={name: {key: value}})
            )
    own = {key: value for key, value in info.options.items() if key in known}
    return merge_options({**own, **given}, known, name)


def find_missing_release(info: ArtifactInfo, version: str) -> str | None:
    """Why no Triton release can serve an artifact with `version` of its runtime's package; None if one can, or if that is not known."""
    try:
        needed = BACKENDS[info.backend].serving(info, {}, version).requirement
    except BadInputError:  # `deploy` says what no server can load
        return None
    return "to serve this build: " + needed if needed.startswith("no Triton release") else None


def parse_options(texts: Iterable[str]) -> dict[str, dict[str, str]]:
    """Reads texts such as `BACKEND.KEY=VALUE` as options by backend. Raises BadInputError for anything else, and for two values."""
    options: dict[str, dict[str, str]] = {}
    for text in texts:
        name, _, value = text.partition("=")
        backend, _, key = name.partition(".")
        if not key or not value or backend not in BACKENDS:
            raise BadInputError(
                f"expected BACKEND.KEY=VALUE, where BACKEND is one of {', '.join(BACKENDS)}",
                argument=Argument("option", text),
            )
        given = options.setdefault(backend, {})
        if given.setdefault(key, value) != value:
            raise BadInputError(
                f"{backend}.{key} is given twice, first as {given[key]}",
                argument=Argument("option", text),
            )
    return options


def require_known_options(options: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises BadInputError for an option that its backend has on no device, and for a value that it does not take.

    A backend that a command does not use is asked nothing else about its options, so that a misspelled one would be lost.
    """
    for name, given in options.items():
        if (backend := BACKENDS.get(name)) is None:
            raise BadInputError(
                f"{name} is not a backend; choose from {', '.join(BACKENDS)}",
                argument=Argument("option", name),
            )
        with name_failing_backend(backend):
            known = {
                device: {option.name for option in backend.describe_options(device)}
                for device in backend.devices()
            }
        fitting = [device for device, names in known.items() if given.keys() <= names]
        refused: list[BadInputError] = []
        for device in fitting or known:
            try:
                with name_failing_backend(backend):
                    backend.merge_options(given, device)
            except BadInputError as error:
                refused.append(error)
            else:
                break
        else:
            raise refused[0]


def warn_of_unused_options(
    options: Mapping[str, Iterable[str]], used: Collection[str], happens: str, listener: Listener
) -> None:
    """Warns of `options`, keys by backend, of one that is not `used`; `happens` is what does not happen: `built`, `measured`."""
    for name in sorted(options.keys() - {*used}):
        for key in sorted(options[name]):
            problem = f" has no effect: {name} is not {happens}"
            listener.warn(Argument("option", f"{name}.{key}") + problem)


def require_own_files(entry: Entry[ArtifactInfo]) -> Backend:
    """The artifact's backend. Raises StageError if it would open other files than the manifest names, or unhashed ones.

    Size, hash and verdict are those of the files that the manifest names, so these must be the ones that run.
    """
    info = entry.info
    backend = BACKENDS.get(info.backend)
    if backend is None:
        raise StageError(
            f"store entry {entry.name} is of backend {info.backend!r}, which is not installed; available: {', '.join(BACKENDS)}"
        )
    opened, named = backend.list_files(info), (info.file, *info.more_files)
    if opened[0] != info.file or set(opened) != set(named):
        raise StageError(
            f"store entry {entry.name} is damaged: its manifest names {', '.join(named)}, "
            f"and {info.backend} loads {', '.join(opened)}\nbuild it again"
        )
    if unhashed := [name for name in opened if name not in entry.manifest.files]:
        raise StageError(
            f"store entry {entry.name} is damaged: its manifest has no hash of {unhashed[0]}\nbuild it again"
        )
    return backend


def verify_for_loading(entry: Entry[ArtifactInfo], store: Store) -> Entry[ArtifactInfo]:
    """Checks every byte of an artifact before a backend loads it; returns `entry`.

    Raises StageError if a file is missing or changed, or if loading runs code and the artifact was neither built nor
    approved in this workspace.
    """
    return store.verify_entry(entry, runs_code=require_own_files(entry).loading_runs_code)


def load_artifact(
    entry: Entry[ArtifactInfo], store: Store, options: Mapping[str, Any] | None = None
) -> Session:
    """Loads an artifact of `store` after `verify_for_loading`; what runs is what was verified, or StageError is raised."""
    return load_verified(entry, options or {}, lambda: verify_for_loading(entry, store))


def load_verified(
    entry: Entry[ArtifactInfo], options: Mapping[str, Any], verify: Callable[[], object]
) -> Session:
    """Calls `verify`, then loads the artifact.

    Raises StageError if its files were written or replaced between, also if they are as before by now: a backend opens them by
    name, and may have loaded others.
    """
    before = _stamp_files(entry)
    verify()
    session = BACKENDS[entry.info.backend].load(entry.path, entry.info, options)
    if _stamp_files(entry) != before:
        with session:
            raise StageError(
                f"files of {entry.path} changed while they were loaded; run the command again"
            )
    return session


def _stamp_files(entry: Entry[ArtifactInfo]) -> list[tuple[int, ...]]:
    """The inode of each file and the time of its last change, which no process can restore.

    Those of the folder show whether another folder had its name.
    """
    stamps: list[tuple[int, ...]] = []
    for name in (".", entry.info.file, *entry.info.more_files):
        with suppress(OSError):
            state = entry.file(name).stat()
            stamps.append((state.st_dev, state.st_ino, state.st_size, state.st_ctime_ns))
    return stamps
