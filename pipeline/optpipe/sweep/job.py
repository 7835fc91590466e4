"""The requests and results of a sweep."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

import msgspec

from optpipe.core import params
from optpipe.core.bench_defaults import MAX_CV, PROCESSES
from optpipe.core.entries import Device, Environment
from optpipe.core.files import hash_value
from optpipe.core.load import LoadSpec, Mode, Scenario
from optpipe.core.measurement_group import MeasurementGroup
from optpipe.core.params import Param, choices_from_text
from optpipe.core.records import plain_from_record

KEY_LENGTH = 16
CPU = "cpu"
"""The kind of a slot without a GPU; a cluster may have several, such as `cpu-epyc`."""


class JobState(StrEnum):
    """Sorted from the most to the least informative."""

    DONE = "done"
    INVALID = "invalid"
    """Measured, but no process is VALID."""
    FAILED = "failed"
    """Crashed, out of memory or time, or a failed build."""
    IMPOSSIBLE = "impossible"
    """No retry helps: no such GPU, kernel, or batch size."""


@dataclass(frozen=True, slots=True)
class Recipe:
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
    files: Mapping[str, str] = field(default_factory=dict)
    """Hashes of `model` (with its weights) and `calibration`. Without `model` the content is unknown here."""
    truncate: bool = False
    """Whether calibration texts longer than the model's input are cut."""

    @property
    def label(self) -> str:
        """`resnet50 onnxruntime fp16 (cuda)`."""
        return f"{self.model} {self.backend} {self.precision} ({self.device})"


@dataclass(frozen=True, slots=True)
class Cell:
    recipe: Recipe
    load: LoadSpec
    kind: str
    """The GPU as NVML names it, or `cpu`."""
    options: tuple[str, ...] = ()
    processes: int = 1
    max_cv: float = 0.025

    @property
    def label(self) -> str:
        """`resnet50 onnxruntime fp16 (cuda), batch 8, single-stream, compute`."""
        options = f" {' '.join(self.options)}" if self.options else ""
        return f"{self.recipe.label}{options}, {self.load}"

    @property
    def key(self) -> str:
        """Identifies the cell. A model or calibration set of known content counts by its content, not its name."""
        asked = plain_from_record(self)
        del asked["load"]["images"]  # not asked: the measurement records it
        for name, file in (
            ("model", "model"),
            ("weights", "model"),
            ("calibration", "calibration"),
        ):
            if file in self.recipe.files:
                del asked["recipe"][name]
        return hash_value(asked)[:KEY_LENGTH]


START_S = 5.0
"""Estimated seconds until a process measures (imports, hashes, loading)."""
LOAD_S = 3.0
"""Estimated seconds per load, without warm-up and measurement, if no earlier job tells."""


@dataclass(frozen=True, slots=True)
class Task:
    """One process: it builds `recipe`, or measures `cells`, which differ in their loads alone, one after the other."""

    recipe: Recipe
    kind: str
    cells: tuple[Cell, ...] = ()
    load_s: float = LOAD_S
    workspace: str = ""
    artifact: str | None = None
    """To measure; for a build, an artifact of the same model."""
    cpus: tuple[int, ...] = ()
    attempts: tuple[str, ...] = ()
    side_by_side: int = 1

    @property
    def timing(self) -> bool:
        return bool(self.cells)

    @property
    def expected_s(self) -> float:
        return START_S + self.load_s * len(self.cells)

    @property
    def recipe_key(self) -> str:
        """Tasks with equal keys share one build."""
        return hash_value(plain_from_record(self.recipe))[:KEY_LENGTH]


@dataclass(frozen=True, slots=True)
class CellOutcome:
    state: JobState
    reason: str = ""
    artifact: str | None = None
    run: str | None = None
    group: MeasurementGroup | None = None
    bad_input: bool = False
    """Whether it is impossible on every machine: the request or the model is wrong."""


def compute_job_key(cell: Cell, fingerprint: str) -> str:
    return hash_value({"cell": cell.key, "environment": fingerprint})[:KEY_LENGTH]


def compute_fingerprint(
    environment: Environment, power_limit_w: float | None, mig: bool | None
) -> str:
    """The hash of everything besides the cell that affects a figure: one GPU, driver, power limit, MIG state, CPU, versions."""
    facts = {
        "gpus": [
            [gpu.name, gpu.compute_capability, gpu.memory_bytes, gpu.driver]
            for gpu in environment.gpus
        ],
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
class Result:
    outcomes: tuple[CellOutcome, ...]
    """One for each cell, or one for a build."""
    fingerprint: str
    environment: Environment = field(default_factory=Environment)
    host: str = ""
    """A hash, so that a shared record names neither machine nor user; empty if the task did not run."""
    slot: str = ""
    side_by_side: int = 1
    seconds: float = 0.0
    started_utc: str = ""
    lost: bool = False
    """The process or its node ended without an outcome; a retry may succeed."""


def fail_task(task: Task, why: str, fingerprint: str, *, lost: bool = False) -> Result:
    return Result(repeat_outcome(task, CellOutcome(JobState.FAILED, why)), fingerprint, lost=lost)


def repeat_outcome(task: Task, outcome: CellOutcome) -> tuple[CellOutcome, ...]:
    return (outcome,) * max(1, len(task.cells))


@dataclass(frozen=True, slots=True)
class JobRecord:
    KIND: ClassVar[str] = "job"

    key: str
    cell: Cell
    state: JobState
    reason: str
    fingerprint: str
    environment: Environment = field(default_factory=Environment)
    host: str = ""
    slot: str = ""
    side_by_side: int = 1
    """Slots of its kind on the host, which may measure at the same time."""
    artifact: str | None = None
    run: str | None = None
    group: MeasurementGroup | None = None
    seconds: float = 0.0
    started_utc: str = ""
    attempts: tuple[str, ...] = ()
    bad_input: bool = False

    @property
    def sample(self) -> str:
        return (self.group or self.cell).load.sample

    @property
    def finished(self) -> bool:
        """Whether a retry in this environment is useless."""
        return self.state in (JobState.DONE, JobState.IMPOSSIBLE)


class Matrix(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A sweep's matrix in TOML: every combination of the lists is a cell."""

    models: tuple[str, ...] = ()
    precisions: Annotated[tuple[str, ...], params.PRECISIONS] = ("fp16",)
    backends: Annotated[tuple[str, ...], params.BACKENDS] = ("auto",)
    batches: Annotated[
        tuple[int, ...],
        Param("Batch sizes, such as 1,8,32 or 1:256.", flag="batch", parse=params.sizes_from_text),
    ] = (1,)
    lengths: Annotated[
        tuple[int, ...],
        Param(
            "Sequence lengths, such as 32,128,512.",
            flag="length",
            metavar="TOKENS",
            parse=params.sizes_from_text,
        ),
    ] = ()
    """Default: the length of the texts that verified each build."""
    scenarios: Annotated[
        tuple[Scenario, ...],
        Param(
            "MLPerf scenarios, comma-separated.",
            flag="scenario",
            parse=lambda text, flag: tuple(
                map(Scenario, choices_from_text(text, list(Scenario), flag))
            ),
        ),
    ] = (Scenario.SINGLE_STREAM,)
    rates: Annotated[
        tuple[float, ...],
        Param(
            "Mean queries per second (server), comma-separated.",
            flag="rate",
            parse=params.numbers_from_text,
        ),
    ] = ()
    options: tuple[tuple[str, ...], ...] = ((),)
    gpus: Annotated[tuple[str, ...], params.GPU] = ()
    """NVML's names, or `cpu`; default: the kinds found here."""
    mode: Annotated[Mode, replace(params.MODE, setting=True)] = Mode.COMPUTE
    streams: Annotated[int, replace(params.STREAMS, setting=True)] = 1
    profile: Annotated[str | None, params.PROFILE] = None
    weights: Annotated[str, replace(params.WEIGHTS, setting=True)] = "default"
    seed: Annotated[int, params.WEIGHTS_SEED] = 0
    calibration: Annotated[str | None, params.CALIBRATION] = None
    truncate: Annotated[bool, replace(params.TRUNCATE, setting=True)] = False
    build_options: Annotated[tuple[str, ...], params.BUILD_OPTION] = ()
    processes: Annotated[int, params.PROCESSES] = PROCESSES
    max_cv: Annotated[float, params.MAX_CV] = MAX_CV
    percentile: Annotated[float, replace(params.PERCENTILE, setting=True)] = 99.0
    min_seconds: Annotated[float, params.MIN_TIME] = 1.0
    max_seconds: Annotated[float, params.MAX_TIME] = 60.0
    warm_up_seconds: Annotated[float, params.WARM_UP] = 0.5
    max_warm_up_seconds: Annotated[float, params.MAX_WARM_UP] = 20.0


@dataclass(frozen=True, slots=True)
class SweepOptions:
    dry_run: Annotated[bool, Param("Only show the jobs and the estimated time.")] = False
    again: Annotated[bool, Param("Measure again what is stored.")] = False
    shard: Annotated[
        str | None, Param("Only part I of N (Slurm, Kubernetes, ssh).", metavar="I/N")
    ] = None
    loads_per_process: Annotated[
        int, Param("Loads of one artifact measured by one process.", minimum=1, setting=True)
    ] = 1
    slots: Annotated[
        int | None,
        Param("Use at most this many GPUs (or parts of the CPU).", minimum=1, setting=True),
    ] = None
    cpu_slots: Annotated[
        int, Param("Equal parts of the processors, timed side by side.", minimum=1, setting=True)
    ] = 1
    task_s: Annotated[
        float, Param("Time limit of a process in seconds.", flag="job-timeout", setting=True)
    ] = 1800.0
    lock_s: Annotated[
        float, Param("Seconds to wait for a GPU in use.", flag="lock-timeout", setting=True)
    ] = 600.0
    retries: Annotated[
        int, Param("Further tries of a job that crashed.", minimum=0, setting=True)
    ] = 1
    on: Annotated[
        Literal["ray"] | None, Param("Run on the Ray cluster of this machine or RAY_ADDRESS.")
    ] = None
    node: Annotated[
        tuple[str, ...],
        Param(
            "Only nodes of the cluster with this label (or LABEL!=VALUE).", metavar="LABEL=VALUE"
        ),
    ] = ()
    store: Annotated[
        str | None,
        Param(
            "On Ray a workspace under one path on all nodes (default: Ray's object store); otherwise an object store "
            "that gets the results, such as s3://BUCKET/FOLDER.",
            metavar="DIR|URL",
            parse=params.text_from_text,
        ),
    ] = None
    pending_s: Annotated[
        float,
        Param(
            "Seconds that a cluster may take to place a job.", flag="pending-timeout", setting=True
        ),
    ] = 300.0
    node_labels: Annotated[bool, Param("Print this node's labels for `ray start`.")] = False
