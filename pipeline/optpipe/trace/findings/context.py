"""What a rule looks at, and what it finds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from optpipe.trace.layers.roofline import Roofline
from optpipe.trace.layers.tensor_cores import TensorCores
from optpipe.trace.ranges import Stage
from optpipe.trace.timeline.analysis import Analysis


@dataclass(frozen=True, slots=True)
class FindingRow:
    """A row of the trace that a finding rests on: a kernel, copy, call, range or layer, or a gap and what follows it."""

    name: str
    total_ns: float
    count: int = 1
    start_ns: int | None = None
    """When a gap begins."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ProfileFinding:
    """Something that costs time, with the evidence and the next thing to try."""

    rule: str
    evidence: str
    gain_ns: int
    """An upper bound, over the measured part."""
    advice: str
    rows: tuple[FindingRow, ...] = ()
    gain_share: float = 0.0
    host_times: bool = False
    """Whether the evidence is times of the host, which a profiler's overhead distorts."""


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What is known of a stage beside its recording; the defaults are for a recording made by someone else."""

    stage: Stage | None = None
    backend: str | None = None
    """The runtime of an inference."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """That runtime's."""
    expects_gpu: bool = True
    """Without it, as for a stage of the CPU, missing GPU rows are not a defect of the trace."""
    unprofiled_iteration_ns: float | None = None
    """One iteration timed in the same process without a recording."""


@dataclass(frozen=True, slots=True)
class RuleContext:
    """What a rule may look at."""

    measured: Analysis
    facts: StageFacts
    tensor_cores: TensorCores | None
    roofline: Roofline | None
    undisturbed_ns: float | None
    """One iteration without the profiler, where it slowed the host too much for the times under it to be trusted."""
    idle_scale: float
    """What is left of the GPU's waiting without the profiler."""

    @property
    def iterations(self) -> int:
        """How many iterations were recorded, at least 1."""
        return max(self.measured.iterations.height, 1)

    @property
    def multiprocessors(self) -> int | None:
        """Of the trace's first GPU."""
        gpus = self.measured.trace.gpus
        return gpus[0].multiprocessors if gpus else None
