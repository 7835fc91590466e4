"""What a worker is told, how to start, one session and then points to measure, and what it says of each: as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.core.measurement import LoadSpec, OutputCheck

if TYPE_CHECKING:
    from optpipe.backends.base import Session


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What a worker does before it knows what to load: it can stand by while another one measures."""

    affinity: tuple[int, ...] | None = None
    """The processors it may use, set before any library counts them."""
    imports: tuple[str, ...] = ()
    """Modules to import, in this order."""


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """How to load the artifact, and which inputs to rotate through."""

    loader: str
    """`module:function`; called with `arguments`, returns a backends.base.Session."""
    arguments: Mapping[str, Any]
    inputs: Mapping[str, str]
    """Input name → .npy file of a pool of single inputs, first axis the number of them."""
    reference: Mapping[str, str] = field(default_factory=dict)
    """Output name → .npy file of what each input of the pool must give; empty where there is no reference."""
    input_axes: Mapping[str, int | None] = field(default_factory=dict)
    """Input name → its batch axis, None for one value per call; the first axis where nothing is said."""
    output_axes: Mapping[str, int | None] = field(default_factory=dict)
    """Output name → its batch axis."""
    reference_name: str = ""
    tolerance: float = 1e-2
    """Largest relative L2 error against the reference."""
    device: str = "cpu"
    streams: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    id: str
    spool: str
    """File that the samples go to."""
    load: LoadSpec
    arrivals_seed: int = 0
    """Server: of the arrivals."""


@dataclass(frozen=True, slots=True)
class CacheProbe:
    """Times of inputs seen before and of new ones, asked in turn."""

    known_ns: tuple[int, ...] = ()
    new_ns: tuple[int, ...] = ()
    stale: bool = False
    """Whether the output for a new input was not what the session itself gives."""


@dataclass(frozen=True, slots=True)
class PointReport:
    """What the worker says of a point beside its samples."""

    steady: bool
    queries_needed: int
    stopped: bool
    host_peak_bytes: int
    rotated: int
    rotated_bytes: int
    output_check: OutputCheck
    cache_probe: CacheProbe


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """What a worker says, one line each: `standing-by`, `ready`, `measuring`, `done`, `failed`, `out-of-memory`; `ended` is its
    silence."""

    kind: str
    pid: int = 0
    gpu_uuid: str | None = None
    """The name by which NVML and CUDA both know the GPU, whose numbers differ."""
    report: PointReport | None = None
    modules: tuple[str, ...] = ()
    """Of `done`: every module that it has imported by now, in order; what the next of its kind imports while it stands by."""
    status: int = 0
    message: str = ""


def session_from_loader(loader: str, arguments: Mapping[str, Any]) -> "Session":
    module, _, function = loader.partition(":")
    session: Session = getattr(import_module(module), function)(**arguments)
    return session


def session_from_store(workspace: str, entry: str, options: Mapping[str, Any]) -> "Session":
    """An artifact of the store, after every byte was checked against its manifest: deserializing runs code."""
    from optpipe.backends.registry import BACKENDS
    from optpipe.core.entries import ArtifactInfo
    from optpipe.workspace.store import Store

    store = Store(Path(workspace))
    found = store.verify_entry(store.find(entry, ArtifactInfo))
    return BACKENDS[found.info.backend].load(found.path, found.info, options)
