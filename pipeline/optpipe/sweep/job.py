"""What a sweep asks for, and what came of it.

Format history
    1  first version.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from optpipe.core.entries import Device
from optpipe.core.environment import Environment
from optpipe.core.hashing import hash_value
from optpipe.core.measurement import LoadSpec
from optpipe.core.measurement_group import MeasurementGroup
from optpipe.core.records import plain_from_record

JOB_SCHEMA = "optpipe.job"
JOB_SCHEMA_VERSION = 1
KEY_LENGTH = 16
CPU = "cpu"
"""The kind of a slot without a GPU; a cluster may have several, such as `cpu-epyc`."""


class JobState(StrEnum):
    """What came of a job, from the most telling to the least."""

    DONE = "done"
    INVALID = "invalid"
    """Measured, and no process is VALID."""
    FAILED = "failed"
    """It crashed, ran out of memory or time, or its build failed."""
    IMPOSSIBLE = "impossible"
    """No try can help here: no such GPU, kernel, or batch size."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is built."""

    model: str
    precision: str
    backend: str
    device: Device
    profile: str | None = None
    """Batch range `MIN:OPT:MAX`."""
    weights: str = "default"
    seed: int = 0
    calibration: str | None = None
    options: tuple[str, ...] = ()
    """Build options, `BACKEND.KEY=VALUE`."""
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the local files that it names, by path."""
    truncate: bool = False
    """Whether calibration texts that are longer than the model's input are cut."""

    @property
    def label(self) -> str:
        """`resnet50 onnxruntime fp16 (cuda)`."""
        return f"{self.model} {self.backend} {self.precision} ({self.device})"


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the matrix: a recipe under a load on a kind of GPU."""

    recipe: Recipe
    load: LoadSpec
    kind: str
    """The GPU as NVML names it, or `cpu`."""
    options: tuple[str, ...] = ()
    """Runtime options, `BACKEND.KEY=VALUE`."""
    processes: int = 1
    max_cv: float = 0.025

    @property
    def label(self) -> str:
        """`resnet50 onnxruntime fp16 (cuda), batch 8, single-stream, compute`."""
        options = f" {' '.join(self.options)}" if self.options else ""
        return f"{self.recipe.label}{options}, {self.load}"

    @property
    def key(self) -> str:
        """The hash of all that is asked."""
        asked = plain_from_record(self)
        del asked["load"]["images"]  # not asked: the measurement records it
        if self.load.length is None:  # the key of cells that were measured before there were lengths
            del asked["load"]["length"]
        if not self.recipe.truncate:
            del asked["recipe"]["truncate"]
        if not self.recipe.files:  # named by content where there are files, else by name
            return hash_value(asked)[:KEY_LENGTH]
        recipe = asked["recipe"]
        recipe["files"] = sorted(self.recipe.files.values())
        return hash_value(asked)[:KEY_LENGTH]


def compute_job_key(cell: Cell, fingerprint: str) -> str:
    """The key of a cell in one environment."""
    return hash_value({"cell": cell.key, "environment": fingerprint})[:KEY_LENGTH]


def compute_fingerprint(environment: Environment, power_limit_w: float | None, mig: bool | None) -> str:
    """The hash of what decides a figure beside the cell: the one GPU with driver, power limit and MIG state, CPU, versions."""
    gpus = [[gpu.name, gpu.compute_capability, gpu.memory_bytes, gpu.driver] for gpu in environment.gpus]
    facts = {
        "gpus": gpus,
        "power_limit_w": power_limit_w,
        "mig": mig,
        "cpu": environment.cpu,
        "cpu_count": environment.cpu_count,
        "python": environment.python,
        "platform": environment.platform,
        "packages": dict(environment.packages),
    }
    return hash_value(facts)[:KEY_LENGTH]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job ran. Hosts are named by a hash: a record that travels names neither machine nor user."""

    host: str
    slot: str
    """The GPU's UUID, or `cpu`."""
    cpus: tuple[int, ...]
    side_by_side: int
    """Slots of the host that timed at the same time, at most."""
    clock_ahead_s: float = 0.0
    """How far the host's clock was ahead of that of the sweep's driver, at least; negative: behind; 0: they agreed."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What came of one job: the content of `jobs/KEY/HASH.json`."""

    key: str
    cell: Cell
    state: JobState
    reason: str
    """Why it is not DONE, or what was left out."""
    environment: Environment
    fingerprint: str
    place: Place | None = None
    artifact: str | None = None
    run: str | None = None
    """The bench run with the raw samples."""
    group: MeasurementGroup | None = None
    """The figures of that run's processes."""
    seconds: float = 0.0
    started_utc: str = ""
    attempts: tuple[str, ...] = ()
    """Why earlier tries of this sweep gave nothing."""
    schema: str = JOB_SCHEMA
    schema_version: int = JOB_SCHEMA_VERSION

    @property
    def sample(self) -> str:
        """What its rates count: `image` or `sample`; of what was not measured, as far as the cell says."""
        return (self.group or self.cell).load.sample

    @property
    def finished(self) -> bool:
        """Whether another try would tell nothing new: measured, or impossible in this environment."""
        return self.state in (JobState.DONE, JobState.IMPOSSIBLE)
