"""Messages between parent and worker, as JSON: how to start, a session, points to measure, and reports."""

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
    """Work of a worker before it has a session, while another one measures."""

    affinity: tuple[int, ...] | None = None
    """The processors it may use, set before any library counts them."""
    imports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionPlan:
    loader: str
    """`module:function`; called with `arguments`, returns a backends.base.Session."""
    arguments: Mapping[str, Any]
    inputs: Mapping[str, str]
    """Input name → .npy file of a pool of inputs (inputs, ...)."""
    reference: Mapping[str, str] = field(default_factory=dict)
    """Output name → .npy file of the expected output of each input in the pool; empty without a reference."""
    input_axes: Mapping[str, int | None] = field(default_factory=dict)
    """Input name → batch axis, None for one value per call; default 0."""
    output_axes: Mapping[str, int | None] = field(default_factory=dict)
    reference_name: str = ""
    tolerance: float = 1e-2
    """Maximum relative L2 error against the reference."""
    device: str = "cpu"
    streams: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    id: str
    spool: str
    load: LoadSpec
    arrivals_seed: int = 0
    """Server: seed of the arrivals."""


@dataclass(frozen=True, slots=True)
class CacheProbe:
    known_ns: tuple[int, ...] = ()
    new_ns: tuple[int, ...] = ()
    stale: bool = False
    """Whether the output for a new input differed from the session's untimed output."""


@dataclass(frozen=True, slots=True)
class PointReport:
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
    """Events of a worker, one per line: `standing-by`, `ready`, `measuring`, `done`, `failed`, `out-of-memory`; `ended`
    if it closed its output."""

    kind: str
    pid: int = 0
    gpu_uuid: str | None = None
    """NVML and CUDA number GPUs differently, but share this name."""
    report: PointReport | None = None
    modules: tuple[str, ...] = ()
    """With `done`: all imported modules in order, which the next worker of its kind imports while standing by."""
    status: int = 0
    message: str = ""


def session_from_loader(loader: str, arguments: Mapping[str, Any]) -> "Session":
    module, _, function = loader.partition(":")
    session: Session = getattr(import_module(module), function)(**arguments)
    return session


def session_from_store(workspace: str, entry: str, options: Mapping[str, Any]) -> "Session":
    """Loads an artifact of the store after checking every byte against its manifest, since deserializing runs code."""
    from optpipe.backends.registry import BACKENDS
    from optpipe.core.entries import ArtifactInfo
    from optpipe.workspace.store import Store

    store = Store(Path(workspace))
    found = store.verify_entry(store.find(entry, ArtifactInfo))
    return BACKENDS[found.info.backend].load(found.path, found.info, options)
