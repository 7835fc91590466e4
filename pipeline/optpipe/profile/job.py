"""What the profiled process is told, and what it answers: the records of `job.json` and `result.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optpipe.backends.base import Device
from optpipe.backends.torch_costs import ProgramCosts
from optpipe.core.precision import Precision
from optpipe.core.tensors import Shape
from optpipe.core.weights import WeightsRequest
from optpipe.preprocess.dali.pipeline import DaliPlan
from optpipe.trace.layers.ort_nodes import ClockAnchor, NodeRun
from optpipe.trace.layers.peaks import Peaks


@dataclass(frozen=True, slots=True)
class BuildJob:
    """Export, precision and build from the beginning, in a store of their own that nothing is answered from."""

    model: str
    """MODEL as it was typed."""
    weights: WeightsRequest
    batch: tuple[int, int, int] | None
    shapes: Mapping[str, tuple[Shape, Shape, Shape]]
    precisions: tuple[Precision, ...]
    backends: tuple[str, ...]
    device: Device
    calibration: Path | None
    options: Mapping[str, Mapping[str, Any]]
    """By backend."""
    truncate: bool = False


@dataclass(frozen=True, slots=True)
class InferenceJob:
    """One artifact at one batch size."""

    workspace: Path
    artifact: str
    backend: str
    device: Device
    options: Mapping[str, Any]
    batch_size: int
    length: int | None = None
    """Tokens of every sequence; None for the texts as they are, padded."""
    in_full: bool = True
    """Also find the device's peaks, and what the layers launch and cost."""


@dataclass(frozen=True, slots=True)
class PreprocessJob:
    """Batches of images for the model whose entry is `model`."""

    workspace: Path
    model: str
    images: tuple[Path, ...]
    batch_size: int
    plan: DaliPlan | None
    """None for the CPU reference."""


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """One profiled process; exactly one of the three kinds of work is given."""

    scratch: Path
    """Where its files lie and go."""
    name: str = "job"
    """What its own files are called."""
    warm_up: int = 0
    iterations: int = 0
    records_itself: bool = False
    """With torch.profiler, into `torch.json`."""
    build: BuildJob | None = None
    inference: InferenceJob | None = None
    preprocess: PreprocessJob | None = None

    @property
    def file(self) -> Path:
        """The job itself."""
        return self.scratch / f"{self.name}.json"

    @property
    def result(self) -> Path:
        """Where the process leaves its `WorkerResult`."""
        return self.scratch / f"{self.name}-result.json"

    @property
    def log(self) -> Path:
        """Where the process says why it crashed; there as soon as it runs."""
        return self.scratch / f"{self.name}-worker.log"

    @property
    def inputs(self) -> Path:
        """The inputs of an inference: an .npz with a batch of each."""
        return self.scratch / "inputs.npz"

    @property
    def torch_trace(self) -> Path:
        """What torch.profiler recorded."""
        return self.scratch / "torch.json"


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """What a profiled process found out beside its recording, or its error."""

    unprofiled_iteration_ns: float | None = None
    """The median iteration before the recording began."""
    peaks: Peaks | None = None
    program: ProgramCosts | None = None
    """Of torch: what the layers cost, whose ranges are in the recording."""
    layer_ns: Mapping[str, float] | None = None
    """Of ONNX Runtime on the CPU: the median time of each node."""
    node_runs: tuple[NodeRun, ...] = ()
    """Of ONNX Runtime on a GPU: when each node ran, and what ties its clock to the recording's."""
    anchors: tuple[ClockAnchor, ...] = ()
    error: str | None = None
    exit_status: int = 0
