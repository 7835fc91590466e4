"""The contract of a backend: build an artifact, say whether it can run here, and run it.

A `Session` is one loaded artifact on one device. `run` takes and gives host arrays and works for any shapes; `bind`
fixes shapes and addresses once, which is what measuring, CUDA graphs and zero-copy preprocessing need.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from optpipe.core.card import ModelCard, TensorSpec
from optpipe.core.entries import ArtifactInfo
from optpipe.core.entries import Device as Device
from optpipe.core.errors import BadInputError
from optpipe.core.precision import LayerType, Placement, Precision

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Capability:
    """What a backend can do on this machine; `why_not` and `install` are set where it cannot."""

    builds: bool
    runs: bool
    version: str | None = None
    why_not: str | None = None
    install: str | None = None


@dataclass(frozen=True, slots=True)
class Option:
    """One `--option BACKEND.NAME=VALUE`; its type is that of the default."""

    name: str
    default: Any
    help: str
    builds: bool = False
    """Whether only a build takes it; else every session does."""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """Everything a backend needs to build one artifact into an empty folder."""

    card: ModelCard
    precision: Precision
    graph: Path
    """ONNX with the precision in it."""
    module: Callable[[], Any] | None
    """Loads the source `torch.nn.Module`, for backends that start from it; None for models that have none."""
    device: Device
    options: Mapping[str, Any]
    directory: Path


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What a finished build says of itself."""

    layers: tuple[LayerType, ...]
    """Read from the network that was built, not from the request."""
    file: str
    """The artifact's main file."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The runtime options that it has where no others are given."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What only this backend reads, to load the artifact and to tell where it can run."""
    placement: Placement | None = None
    """Where the runtime puts the nodes, for one that may leave some to another execution provider."""
    remarks: tuple[str, ...] = ()
    """What it found while it built that its user must know."""
    more_files: tuple[str, ...] = ()
    """What the artifact loads beside its main file."""


class Binding(Protocol):
    """Fixed buffers on the session's device."""

    @property
    def inputs(self) -> Mapping[str, Any]:
        """NumPy arrays on the CPU, torch CUDA tensors on a GPU; write into them in place."""

    @property
    def outputs(self) -> Mapping[str, Any]:
        """Filled by `launch`; the same buffers each time."""

    def launch(self) -> None:
        """Runs one inference: enqueued on torch's current CUDA stream on a GPU, finished on return on the CPU."""


class Session(Protocol):
    """A loaded artifact; a context manager that gives its memory back."""

    @property
    def device(self) -> Device:
        """Where it runs."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Its inputs in order."""

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Its outputs in order."""

    def run(self, inputs: Mapping[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
        """Host arrays in, host arrays out; synchronous."""

    def bind(self, inputs: Mapping[str, "np.ndarray"]) -> Binding:
        """Allocates buffers of these shapes on the device and copies `inputs` in."""

    def __enter__(self) -> Self:
        """Nothing more to load."""

    def __exit__(self, *error: object) -> None:
        """Frees what it holds."""


OWN_SESSION = (
    "Triton has no backend for this runtime: it is served by the Python backend, which needs optpipe on the server"
)


@dataclass(frozen=True, slots=True)
class Serving:
    """How servers run an artifact; by default optpipe's own session does, behind Triton's Python backend."""

    requirement: str = OWN_SESSION
    """Which Triton releases can load it."""
    triton_backend: str = "python"
    platform: str = ""
    by_position: bool = False
    """Whether its tensors are addressed as `INPUT__0`, … and not by name."""
    profiles: tuple[str, ...] = ()
    """The optimization profiles to use; without their names Triton uses the first alone."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Of the model's configuration."""
    cuda_graph: bool = False
    """Whether Triton captures CUDA graphs."""
    not_carried: tuple[str, ...] = ()
    """Runtime options and properties that the server does not take over."""
    loader: Path | None = None
    """A program that loads an artifact without optpipe, for `deploy --to folder`."""
    loader_settings: Mapping[str, Any] = field(default_factory=dict)
    """What the program reads of the runtime in `loader.json`."""

    @property
    def own_session(self) -> bool:
        """Whether optpipe is needed on the server."""
        return self.triton_backend == "python"


@dataclass(frozen=True, slots=True)
class NodeCost:
    """What the nodes of one name compute and move."""

    name: str
    op: str
    type: str
    macs: int
    bytes: int
    channels: tuple[int, int] | None = None
    """Input and output channels of a matrix product, per group of a convolution."""


@dataclass(frozen=True, slots=True)
class ProgramCosts:
    """What a program computes and moves in one call."""

    nodes: tuple[NodeCost, ...]
    edge_bytes: int
    """What its inputs, weights and outputs hold."""


@dataclass(frozen=True, slots=True)
class NodeRun:
    """One run of one node on the host, on the system clock."""

    name: str
    op: str
    start_ns: int
    end_ns: int


Mark = Callable[[str], AbstractContextManager[Any]]
"""Marks what runs inside of it as a range of a recording, called by this name."""


@dataclass(slots=True)
class LayerTimes:
    """How to run an iteration by layers while it is recorded, and what came of it, whole when the block ends."""

    iteration: Callable[[], None] | None = None
    """Runs once, with a range for each layer or noting its nodes; None where nothing is to be recorded by layers."""
    program: ProgramCosts | None = None
    """What the layers cost whose ranges `iteration` marks."""
    layer_ns: Mapping[str, float] | None = None
    """The median time of each node, where no recording shows them."""
    node_runs: tuple[NodeRun, ...] = ()
    """When each node ran, where the runtime notes it by a clock that the recording does not have."""


FUSING = "torch,inductor,onnxruntime"
"""The backends that fuse more than others."""


class Backend(ABC):
    """One runtime. A new one is a subclass and an entry of the registry; nothing else knows its name."""

    name: str
    """As `--backend` takes it."""
    purpose: str
    """What it is good for, as `optpipe doctor` says it."""
    package: str
    """The distribution whose version decides how its artifacts behave."""
    ahead_of_time: bool = False
    """Whether it builds engines on a machine that cannot run them."""
    needs_module: bool = False
    """Whether it starts from the torch module instead of ONNX."""

    @abstractmethod
    def devices(self) -> tuple[Device, ...]:
        """The devices its artifacts are for, the preferred one first."""

    @abstractmethod
    def precisions(self, device: Device) -> frozenset[Precision]:
        """The precisions it has kernels for on `device`."""

    @abstractmethod
    def probe_capability(self, device: Device) -> Capability:
        """What it can do here, on `device`."""

    def find_obstacle(
        self, device: Device, precision: Precision | None = None, *, anywhere: bool = False, runs: bool = False
    ) -> str | None:
        """Why no artifact for `device`, of `precision` if given, can be built here; None where one can.

        With `anywhere` why no machine can build it; with `runs` also why it could not run here.
        """
        if device not in self.devices():
            return f"does not support {device}"
        found = None if anywhere else self.probe_capability(device)
        if found is not None and not (found.builds and (found.runs or not runs)):
            return f"{found.why_not}" + (f"; {found.install}" if found.install else "")
        if precision is not None and precision not in (known := self.precisions(device)):
            return (
                f"has no {precision} kernels on {device}, only {', '.join(each for each in Precision if each in known)}"
            )
        return None

    def choose_device(self, wanted: Device | None) -> Device:
        """The device an artifact is built for: the one asked for, else the first that can be built for here."""
        if wanted is not None and wanted in self.devices():
            return wanted
        able = [device for device in self.devices() if self.probe_capability(device).builds]
        return able[0] if able else self.devices()[0]

    @abstractmethod
    def describe_options(self, device: Device) -> tuple[Option, ...]:
        """All of its options, those of a build and those of a session, as `optpipe doctor --options` lists them."""

    def runtime_options(self, device: Device) -> dict[str, bool | int | str]:
        """What a session takes, with the defaults; what only a build takes is not among them."""
        return {each.name: each.default for each in self.describe_options(device) if not each.builds}

    @abstractmethod
    def recipe(self, device: Device, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """What decides an artifact beside graph, shapes and precision: versions, the GPU it is tuned for, options."""

    def find_unsupported(self, request: BuildRequest) -> tuple[str, ...]:  # noqa: ARG002
        """What in the graph it cannot take, named; empty where the build can start."""
        return ()

    @abstractmethod
    def build(self, request: BuildRequest) -> BuildResult:
        """Builds into `request.directory`; raises `StageError` where the runtime refuses."""

    def find_run_blocker(self, info: ArtifactInfo) -> str | None:
        """Why an artifact cannot run here; None where it can."""
        return self.probe_capability(info.device).why_not

    @abstractmethod
    def load(self, directory: Path, info: ArtifactInfo, options: Mapping[str, Any]) -> Session:
        """Loads an artifact whose hash was verified before: deserializing runs code."""

    def serving(self, info: ArtifactInfo, options: Mapping[str, Any], version: str) -> Serving:  # noqa: ARG002
        """How an artifact is served with the runtime `options`; `version` is that of `package` in the evidence.

        Raises BadInputError for an artifact that needs more than its files.
        """
        return Serving()

    def describe_details(self, details: Mapping[str, Any]) -> Iterable[str]:  # noqa: ARG002
        """What a user may want to know of an artifact's `details`, a line each."""
        return ()

    def list_static_batches(self, info: ArtifactInfo) -> tuple[int, ...]:  # noqa: ARG002
        """The batch sizes that have code of their own, which is verified too."""
        return ()

    def advise_fusion(self, options: Mapping[str, Any]) -> str:  # noqa: ARG002
        """How elementwise work gets into the kernels beside it."""
        return f"another runtime may fuse elementwise work into the matrix kernels: optpipe build --backend {FUSING}, then optpipe bench"

    def layer_times(
        self,
        directory: Path,  # noqa: ARG002
        info: ArtifactInfo,  # noqa: ARG002
        options: Mapping[str, Any],  # noqa: ARG002
        bound: Mapping[str, Any],  # noqa: ARG002
        inputs: Mapping[str, "np.ndarray"],  # noqa: ARG002
        mark: Mark,  # noqa: ARG002
        scratch: Path,  # noqa: ARG002
    ) -> AbstractContextManager[LayerTimes]:
        """How `profile` finds the times of an artifact's layers; by default it does not.

        `bound` and `inputs` are the inputs by name, where a session reads them and on the host. `scratch` is a folder for files.
        """
        return nullcontext(LayerTimes())


def prefers_channels_last(precision: Precision, device: Device) -> bool:
    """The faster layout of images: channels last, but for FP32 on a GPU, where cuDNN's fast kernels without TF32 want channels first.

    ResNet-50 without TF32 on an H200: torch 20.0 ms channels first at batch 64, 23.5 channels last; ONNX Runtime 3,797 images/s
    channels first at batch 256, 3,220 channels last.
    """
    return precision is not Precision.FP32 or device != "cuda"


def describe_options(
    defaults: Mapping[str, Any], texts: Mapping[str, str], built: Container[str] = ()
) -> tuple[Option, ...]:
    """Options with their texts; those in `built` are only a build's."""
    return tuple(Option(name, value, texts[name], builds=name in built) for name, value in defaults.items())


def merge_options(given: Mapping[str, Any], known: Mapping[str, Any], backend: str) -> dict[str, bool | int | str]:
    """`known` defaults overridden by `given`; raises `BadInputError` for an option the backend does not have."""
    if unknown := sorted(set(given) - set(known)):
        raise BadInputError(
            f"{backend} has no option '{unknown[0]}'; available options: {', '.join(sorted(known)) or 'none'}"
        )
    return {**known, **{key: _parse_like(value, known[key], key) for key, value in given.items()}}


def _parse_like(value: Any, default: Any, key: str) -> Any:
    """Text from the command line, read as the type that the option's default has."""
    if not isinstance(value, str) or isinstance(default, str):
        return value
    try:
        if isinstance(default, bool):
            return {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}[value.lower()]
        found = type(default)(value)
    except (KeyError, ValueError) as error:
        kind = {bool: "true or false", int: "a whole number", float: "a number"}.get(
            type(default), type(default).__name__
        )
        raise BadInputError(f"option {key}={value}: expected {kind}, such as {str(default).lower()}") from error
    if isinstance(found, int | float) and found < min(default, 0):
        raise BadInputError(f"option {key}={value}: expected at least {min(default, 0)}")
    return found
