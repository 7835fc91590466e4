"""The contract of a backend: build an artifact, find out whether it can run here, and run it.

A `Session` is one loaded artifact on one device. `run` maps host arrays of any shapes to host arrays; `bind` fixes shapes
and addresses once, which measuring, CUDA graphs, and zero-copy preprocessing need.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from optpipe.core.card import ModelCard, TensorSpec
from optpipe.core.entries import ArtifactInfo
from optpipe.core.entries import Device as Device
from optpipe.core.errors import BadInputError
from optpipe.core.events import Steps, as_steps
from optpipe.core.params import NAMES_OF_KINDS
from optpipe.core.precision import LayerType, Placement, Precision, QdqForm

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Capability:
    """Capabilities of a backend on this machine; `why_not` and `install` are set if it cannot build or run."""

    builds: bool
    runs: bool
    version: str | None = None
    why_not: str | None = None
    install: str | None = None


@dataclass(frozen=True, slots=True)
class Option:
    """One `--option BACKEND.NAME=VALUE`; values have the type of the default."""

    name: str
    default: Any
    help: str
    builds: bool = False
    """Whether it belongs to a build; otherwise it belongs to every session."""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """Everything a backend needs to build one artifact into an empty folder."""

    card: ModelCard
    precision: Precision
    graph: Path
    """ONNX file with the precision in it."""
    module: Callable[[], Any] | None
    """Loads the source `torch.nn.Module`; None for models without one."""
    device: Device
    options: Mapping[str, Any]
    directory: Path
    gpu_lock: Path | None = None
    """Given by `auto`, which measures the build against others, so that the backend need not. Work in other processes holds this file's
    lock while it times kernels."""
    probe: Sequence[Mapping[str, "np.ndarray"]] = ()
    """Inputs by name on which a backend compares what it makes of the graph with the graph; nothing is compared without them."""


@dataclass(frozen=True, slots=True)
class BuildResult:
    layers: tuple[LayerType, ...]
    """Read from the network that was built, not from the request."""
    file: str
    """The artifact's main file."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The artifact's default runtime options."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Facts that only this backend reads, to load the artifact and to decide whether it can run."""
    placement: Placement | None = None
    """The execution provider of each node, for runtimes with several."""
    remarks: tuple[str, ...] = ()
    """Findings of the build that the user must know."""
    more_files: tuple[str, ...] = ()
    """Files that the artifact loads in addition to its main file."""


Run = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""From arrays by name to arrays by name."""


class MarkedNetwork(ABC):
    """A network whose intermediate tensors can be read, and replaced by those of another network; all are FP32 on the host."""

    layers: dict[str, str]
    """The operator or module that computes each tensor, in the network's order."""
    sizes: dict[str, int]
    """Values of each tensor at the profile's `opt` shapes, if known."""
    ranges: dict[str, tuple[float, float]]
    """The least and the largest value of quantized tensors."""
    outputs: tuple[str, ...]
    hidden = ""
    """The operators that cannot be read, in words; empty if there are none."""
    open_apart: "Callable[[], tuple[MarkedNetwork, MarkedNetwork]] | None" = None
    """Makes the network as the compiler compiles any part of it, and in the same precision without the compiler; None without one."""

    @abstractmethod
    def cut(self, tensors: Iterable[str], given: Iterable[str] = ()) -> tuple[tuple[str, ...], Run]:
        """Computes `tensors` from the inputs and the nearest tensors of `given`: the names of those that it needs, and the function."""

    @abstractmethod
    def save(
        self, tensor: str, given: Iterable[str], values: Mapping[str, Any], folder: Path
    ) -> None:
        """Writes the graph of `cut`, its inputs out of `values`, and a program that compares it with its compiled form."""


Marked = tuple[MarkedNetwork, MarkedNetwork]


class Binding(Protocol):
    """Fixed buffers on the session's device: NumPy arrays on the CPU, torch CUDA tensors on a GPU."""

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Write into them in place."""

    @property
    def outputs(self) -> Mapping[str, Any]:
        """`launch` fills the same buffers each time."""

    def launch(self) -> None:
        """Runs one inference: enqueued on torch's current CUDA stream on a GPU, finished on return on the CPU."""


class Session(Protocol):
    """A loaded artifact; a context manager that frees its memory."""

    @property
    def device(self) -> Device: ...

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    def run(self, inputs: Mapping[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
        """Host arrays in, host arrays out; synchronous."""

    def bind(self, inputs: Mapping[str, "np.ndarray"]) -> Binding:
        """Allocates buffers of these shapes on the device and copies `inputs` in."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


@runtime_checkable
class RunsOnDevice(Protocol):
    """A session on a GPU that takes tensors where they lie; a backend need not have it."""

    def run_on(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """CUDA tensors in, CUDA tensors out, enqueued on torch's current stream: no copy to the host, no wait for the GPU.

        The outputs are new at each call. The inputs must not change before the work on that stream is done.
        """


@runtime_checkable
class PreparesCalls(Protocol):
    """A session that calls the same tensors again and again at the cost of its runtime alone; a backend need not have it."""

    def prepare(self, inputs: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        """A call of these tensors, which are read where they lie, as `run_on` does; each call may overwrite the outputs of the one
        before. The inputs are contiguous, on the session's device, and live as long as the call."""


OWN_SESSION = "Triton has no backend for this runtime: it is served by the Python backend, which needs optpipe on the server"


@dataclass(frozen=True, slots=True)
class Serving:
    """How servers run an artifact; by default optpipe's own session does, in Triton's Python backend."""

    requirement: str = OWN_SESSION
    """The Triton releases that can load it."""
    triton_backend: str = "python"
    platform: str = ""
    by_position: bool = False
    """Whether tensors are addressed as `INPUT__0`, … and not by name."""
    profiles: tuple[str, ...] = ()
    """The optimization profiles to use; unless they are named, Triton uses only the first."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Parameters of Triton's model configuration."""
    cuda_graph: bool = False
    """Whether Triton captures CUDA graphs."""
    graph_level: int = 0
    """Triton's number for the graph optimizations of ONNX Runtime; 0 for all of them."""
    not_carried: tuple[str, ...] = ()
    """Runtime options and properties that the server ignores."""
    loader: Path | None = None
    """A program that loads the artifact without optpipe, for `deploy --to folder`."""
    loader_settings: Mapping[str, Any] = field(default_factory=dict)
    """The runtime's settings in the program's `loader.json`."""

    @property
    def own_session(self) -> bool:
        """Whether optpipe is needed on the server."""
        return self.triton_backend == "python"


@dataclass(frozen=True, slots=True)
class SpeedBounds:
    """Bounds of a backend's speed that hold before anything is built, so that `auto` builds less."""

    compiled_by: str = ""
    """A backend whose code is this one's, compiled, and never slower; empty if there is none."""
    gain_over_tf32: float = inf
    """The most times that any of its builds is as fast as the one in TF32, which is built within seconds."""
    gain_over_eager: float = inf
    """The most times that any of its FP32 builds is taken to be as fast as torch without a compiler."""
    fuses: bool = False
    """Whether it fuses elementwise operators into matrix kernels more than other backends do."""


class Backend(ABC):
    """One runtime. A new one is a subclass and an entry point of the group `optpipe.backends`; nothing else uses its name."""

    name: str
    purpose: str
    """One line for `optpipe doctor`."""
    packages: tuple[str, ...]
    """The distributions whose versions decide how artifacts behave, the runtime's first. Manifests and dossiers record them."""
    ahead_of_time: bool = False
    """Whether it builds engines on a machine that cannot run them."""
    needs_module: bool = False
    """Whether it starts from the torch module instead of ONNX."""

    @property
    def package(self) -> str:
        """The runtime's distribution."""
        return self.packages[0]

    def devices(self) -> tuple[Device, ...]:
        """The devices of its artifacts, the preferred one first."""
        return ("cuda", "cpu")

    @abstractmethod
    def precisions(self, device: Device) -> frozenset[Precision]:
        """The precisions it has kernels for on `device`."""

    def precisions_as_given(self, device: Device) -> frozenset[Precision]:
        """More precisions, for models that come in them: their graph is built as it is."""
        return frozenset()

    @abstractmethod
    def probe_capability(self, device: Device) -> Capability: ...

    def speed_bounds(self, device: Device) -> SpeedBounds:
        """The bounds by which `auto` rules out builds on `device`; none by default."""
        return SpeedBounds()

    def qdq_form(self, precision: Precision, device: Device) -> QdqForm:
        """The Q/DQ pairs that it wants in a graph of `precision`, INT8 or FP8."""
        if precision is Precision.FP8:
            return "fp8"
        return "tensorrt" if device == "cuda" else "cpu"

    def find_obstacle(
        self,
        device: Device,
        precision: Precision | None = None,
        *,
        anywhere: bool = False,
        runs: bool = False,
    ) -> str | None:
        """Why no artifact for `device`, of `precision` if given, can be built here; None if one can.

        With `anywhere`, why no machine can build it; with `runs`, also why it could not run here.
        """
        if device not in self.devices():
            return f"does not support {device}"
        capability = None if anywhere else self.probe_capability(device)
        if capability is not None and not (capability.builds and (capability.runs or not runs)):
            return f"{capability.why_not}" + (
                f"; {capability.install}" if capability.install else ""
            )
        if precision is not None and precision not in (known := self.precisions(device)):
            return f"has no {precision} kernels on {device}, only {', '.join(offered for offered in Precision if offered in known)}"
        return None

    def choose_device(self, wanted: Device | None) -> Device:
        """`wanted` if the backend has it; otherwise the first device that this machine can build for."""
        if wanted is not None and wanted in self.devices():
            return wanted
        able = [device for device in self.devices() if self.probe_capability(device).builds]
        return able[0] if able else self.devices()[0]

    @abstractmethod
    def describe_options(self, device: Device) -> tuple[Option, ...]:
        """The options of a build and of a session."""

    def runtime_options(self, device: Device) -> dict[str, bool | int | str]:
        return {
            option.name: option.default
            for option in self.describe_options(device)
            if not option.builds
        }

    def merge_options(
        self, given: Mapping[str, Any], device: Device
    ) -> dict[str, bool | int | str]:
        """All options on `device`, with their defaults overridden by `given`; raises `BadInputError` as `merge_options`."""
        return merge_options(
            given,
            {option.name: option.default for option in self.describe_options(device)},
            self.name,
        )

    @abstractmethod
    def recipe(self, device: Device, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of an artifact's key beyond graph, shapes, and precision: versions, the GPU it is tuned for, options."""

    @abstractmethod
    def build(self, request: BuildRequest) -> BuildResult:
        """Builds into `request.directory`; raises `StageError` if the runtime refuses."""

    def build_in_steps(self, request: BuildRequest) -> Steps[BuildResult]:
        """`build` with a pause after work has been given to other processes, and one when they have ended."""
        return as_steps(self.build, request)

    def find_run_blocker(self, info: ArtifactInfo) -> str | None:
        """Why an artifact cannot run here; None if it can."""
        return self.probe_capability(info.device).why_not

    loading_runs_code: bool = True
    """Whether whoever made an artifact decides what runs when it is loaded, as in an engine or a compiled package."""

    def list_files(self, info: ArtifactInfo) -> tuple[str, ...]:
        """The files that `load` opens, the main one first; a backend with fixed names returns those, whatever `info` says."""
        return (info.file, *info.more_files)

    @abstractmethod
    def load(self, directory: Path, info: ArtifactInfo, options: Mapping[str, Any]) -> Session:
        """Loads an artifact after `registry.verify_for_loading`: deserializing may run code."""

    def open_marked(self, info: ArtifactInfo, request: BuildRequest, source: Path) -> Marked:
        """The FP32 source, whose ONNX graph is `source`, and the artifact in `request.directory`, with the same names of tensors."""
        raise BadInputError(
            f"the tensors inside an engine of {self.name} cannot be read", argument="layers"
        )

    def serving(self, info: ArtifactInfo, options: Mapping[str, Any], version: str) -> Serving:
        """How an artifact is served with the runtime `options`; `version` is the version of `packages[0]` in the evidence."""
        return Serving()

    def list_static_batches(self, info: ArtifactInfo) -> tuple[int, ...]:
        """The batch sizes with dedicated code, which is verified too."""
        return ()

    def time_layers(
        self,
        directory: Path,
        info: ArtifactInfo,
        options: Mapping[str, Any],
        inputs: Mapping[str, "np.ndarray"],
        scratch: Path,
    ) -> Mapping[str, float] | None:
        """The median time in ns of each node of an artifact on `inputs`, arrays on the host; None if it cannot be measured.

        `scratch` is a folder for files.
        """
        return None


def prefers_channels_last(precision: Precision, device: Device) -> bool:
    """Whether channels last is the faster layout of images: always except for FP32 without TF32 on a GPU.

    ResNet-50 in FP32 on an H200: torch takes 20.0 ms with channels first at batch 64, 23.5 ms with channels last; ONNX
    Runtime processes 3,797 images/s with channels first at batch 256, 3,220 with channels last.
    """
    return precision is not Precision.FP32 or device != "cuda"


def merge_options(
    given: Mapping[str, Any], known: Mapping[str, Any], backend: str
) -> dict[str, bool | int | str]:
    """`known` defaults overridden by `given`; raises `BadInputError` for an option the backend does not have."""
    if unknown := sorted(set(given) - set(known)):
        raise BadInputError(
            f"{backend} has no option '{unknown[0]}'; available options: {', '.join(sorted(known)) or 'none'}"
        )
    return {**known, **{key: _parse_like(value, known[key], key) for key, value in given.items()}}


def _parse_like(value: Any, default: Any, key: str) -> Any:
    """Text from the command line as the type of the option's default."""
    if not isinstance(value, str) or isinstance(default, str):
        return value
    try:
        if isinstance(default, bool):
            return {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}[
                value.lower()
            ]
        parsed = type(default)(value)
    except (KeyError, ValueError) as error:
        kind = NAMES_OF_KINDS.get(type(default), type(default).__name__)
        raise BadInputError(
            f"option {key}={value}: expected {kind}, such as {str(default).lower()}"
        ) from error
    if isinstance(parsed, int | float) and parsed < min(default, 0):
        raise BadInputError(f"option {key}={value}: expected at least {min(default, 0)}")
    largest = 2**63 - 1 if key.endswith("bytes") else 2**31 - 1  # of the runtimes' own integers
    if isinstance(parsed, int) and parsed > largest:
        raise BadInputError(f"option {key}={value}: expected at most {largest}")
    return parsed
