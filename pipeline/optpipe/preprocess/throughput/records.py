"""Throughput measurements as records: what is asked of the process that measures, what it answers, and what is stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from optpipe.preprocess.dali.pipeline import DaliPlan
from optpipe.preprocess.throughput.windows import compute_images_per_s, compute_rate_interval

PREFETCH_FACTOR = 2
"""Batches each DataLoader worker keeps ready, torch's own default. More only delays the steady state: workers limit it."""
PATIENCE = 2.0
"""A slow or an unsteady configuration ends after this many times the wanted seconds."""

Implementation = Literal["dali", "dali-decode", "dataloader"]
"""`dali-decode` is decoding alone."""


@dataclass(frozen=True, slots=True)
class LoaderPlan:
    """How torch's DataLoader runs; for a GPU with pinned memory and the copy there."""

    workers: int
    batch_size: int
    device: Literal["cpu", "cuda"]
    prefetch_factor: int = PREFETCH_FACTOR


@dataclass(frozen=True, slots=True)
class ThroughputJob:
    """One configuration to measure: DALI by its `plan`, or a DataLoader by its `loader`."""

    implementation: Implementation
    paths: tuple[str, ...]
    transform: Mapping[str, Any]
    """As `Transform.to_dict` writes it."""
    seconds: float
    plan: DaliPlan | None = None
    loader: LoaderPlan | None = None
    patience: float = PATIENCE
    """How many times the seconds a slow or an unsteady one may take."""

    @property
    def batch_size(self) -> int:
        """Images per batch."""
        return self.plan.batch_size if self.plan else self.loader.batch_size if self.loader else 0


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """The batches of one measurement in its steady state."""

    reader_ns: tuple[int, ...]
    """Per batch, the time until its data were there."""
    batch_ns: tuple[int, ...]
    """Per batch, from the end of the one before to its own end."""
    group: int = 1
    """This many batches belong together: a round of the DataLoader's workers, which hand out theirs at once."""
    warm_up_batches: int = 0
    other_cpu_cores: float = 0.0
    """Cores that other processes kept busy meanwhile."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """A configuration as measured: the times of each repetition, or why there are none."""

    job: ThroughputJob
    repeats: tuple[BatchTimes, ...] = ()
    error: str | None = None

    @property
    def batch_ns(self) -> tuple[int, ...]:
        """Per batch of all repetitions."""
        return tuple(value for each in self.repeats for value in each.batch_ns)

    @property
    def images_per_s(self) -> float:
        """All images over all time; 0 where it failed."""
        return compute_images_per_s(self.batch_ns, self.job.batch_size) if self.repeats else 0.0

    @property
    def repeated_images_per_s(self) -> tuple[float, ...]:
        """The rate of each repetition."""
        return tuple(compute_images_per_s(each.batch_ns, self.job.batch_size) for each in self.repeats)

    @property
    def other_cpu_cores(self) -> float | None:
        """Cores that other processes kept busy, in the repetition in which these were most."""
        return max((each.other_cpu_cores for each in self.repeats), default=None)

    def compute_interval(self) -> tuple[float, float] | None:
        """95 % interval of the rate by consecutive windows, widened to what repetitions in other processes gave."""
        if not self.repeats:
            return None
        found = compute_rate_interval(self.batch_ns, self.repeats[0].group, self.job.batch_size)
        rates = self.repeated_images_per_s
        return (min(found[0], *rates), max(found[1], *rates)) if found else None

    def summarize(self) -> "ThroughputRecord":
        """What is stored and shown of it."""
        reader_ns = [value for each in self.repeats for value in each.reader_ns]
        count = len(reader_ns)
        return ThroughputRecord(
            self.job.implementation,
            self.job.plan,
            self.job.loader,
            images_per_s=self.images_per_s if count else None,
            ci=self.compute_interval(),
            reader_cost_ns=sum(reader_ns) / count if count else None,
            batch_cost_ns=sum(self.batch_ns) / count if count else None,
            batches=count,
            repeats_images_per_s=self.repeated_images_per_s,
            other_cpu_cores=self.other_cpu_cores,
            error=self.error,
        )


@dataclass(frozen=True, slots=True)
class ThroughputRecord:
    """One configuration's steady-state rate, or the error in its place."""

    implementation: Implementation
    plan: DaliPlan | None
    loader: LoaderPlan | None
    images_per_s: float | None
    ci: tuple[float, float] | None
    """95 % interval of the rate; None where too few batches were timed for one."""
    reader_cost_ns: float | None
    """Means per batch, named as training profilers do: until the data were there, and the whole batch."""
    batch_cost_ns: float | None
    batches: int
    repeats_images_per_s: tuple[float, ...]
    other_cpu_cores: float | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """The configurations that were tried, and the fastest of each kind measured anew, in turn."""

    tried: tuple[ThroughputRecord, ...]
    dataloader: ThroughputRecord
    dali: ThroughputRecord
    decode_only: ThroughputRecord
    speedup: float
    """DALI over DataLoader."""
    speedup_ci: tuple[float, float] | None
    share_of_decode_only: float
    """DALI over its decoding alone."""
    left_out: str | None
    """What was not tried, and why."""
