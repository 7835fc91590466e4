"""Images per second in steady state, of DALI and of torch's DataLoader, each in a process of its own: jobs, answers, records."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, hypot, log
from pathlib import Path
from typing import Any, Literal

from optpipe.core.events import Listener
from optpipe.core.transform import Transform
from optpipe.measure.validity import LIMITS
from optpipe.preprocess.dali.pipeline import DaliPlan
from optpipe.preprocess.dali.processes import run_dali_jobs
from optpipe.workspace.environment import count_cores

WINDOWS = 12
"""The most windows of consecutive batches that a measurement is cut into; their times give the interval."""
FEWEST_WINDOWS = 6
"""With fewer, Student's factor alone makes the interval several times as wide as the spread: it would say nothing."""
WIDEST = 0.5
"""Half the interval of the time per image, relative to it, from which nothing is said: the rate's end would double it."""


def compute_images_per_s(batch_ns: Sequence[int], batch_size: int) -> float:
    """All images over all time."""
    return batch_size * len(batch_ns) / (sum(batch_ns) / 1e9)


def compute_rate_interval(batch_ns: Sequence[int], group: int, batch_size: int) -> tuple[float, float] | None:
    """95 % interval of `compute_images_per_s` of the same batches, which it holds; None where it cannot be told.

    `group` batches belong together (a round of the DataLoader's workers): a window holds whole groups. All of them are
    in a window, so that the interval and the rate speak of the same time; windows differ by a group at most.
    """
    import numpy as np

    from optpipe.stats.means import compute_ratio_of_sums_interval

    groups = len(batch_ns) // group
    count = min(WINDOWS, groups)
    if count < FEWEST_WINDOWS:
        return None
    starts = np.arange(count) * groups // count * group
    images = np.diff(starts, append=len(batch_ns)) * float(batch_size)
    interval = compute_ratio_of_sums_interval(np.add.reduceat(np.asarray(batch_ns, float), starts), images)
    if interval is None or interval[1] - interval[0] >= WIDEST * (interval[1] + interval[0]):
        return None  # windows so unequal that nothing can be said
    rate = compute_images_per_s(batch_ns, batch_size)  # between the two but for rounding
    return min(1e9 / interval[1], rate), max(1e9 / interval[0], rate)


def compute_ratio_interval(
    one: float, one_interval: tuple[float, float], other: float, other_interval: tuple[float, float]
) -> tuple[float, float]:
    """95 % interval of `one` / `other`, measured independently: on a log scale, relative errors add as squares."""
    ratio = one / other
    below = hypot(log(one / one_interval[0]), log(other_interval[1] / other))
    above = hypot(log(one_interval[1] / one), log(other / other_interval[0]))
    return ratio * exp(-below), ratio * exp(above)


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
    cpu_cores: float = 0.0
    """Cores that this process kept busy, user and system."""


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
class ThroughputTuning:
    """The configurations that were tried, and the fastest of each kind measured again, in rounds."""

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
    seed: int = 0
    """Of the order in which the fastest were measured again."""


THROUGHPUT_WORKER = "optpipe.preprocess.throughput_worker"
LIMIT_S = 120.0
"""A configuration that takes longer than this beyond its measuring time has hung."""


def warm_page_cache(paths: Sequence[Path]) -> int:
    """Reads every file once, so that the disk is not what is measured; returns the bytes read."""
    return sum(len(path.read_bytes()) for path in paths)


def make_dali_job(
    paths: Sequence[Path], transform: Transform, plan: DaliPlan, seconds: float, *, decode_only: bool = False
) -> ThroughputJob:
    """The derived pipeline, or its decoding alone."""
    implementation: Implementation = "dali-decode" if decode_only else "dali"
    return ThroughputJob(implementation, tuple(map(str, paths)), transform.to_dict(), seconds, plan=plan)


def make_loader_job(paths: Sequence[Path], transform: Transform, loader: LoaderPlan, seconds: float) -> ThroughputJob:
    """torch's DataLoader on the reference preprocessing."""
    return ThroughputJob("dataloader", tuple(map(str, paths)), transform.to_dict(), seconds, loader=loader)


def measure_throughputs(jobs: Sequence[ThroughputJob]) -> Generator[Throughput]:
    """Measures the jobs one after the other, in one process as long as none fails."""
    limit_s = LIMIT_S + PATIENCE * max((job.seconds for job in jobs), default=0.0)
    for job, result in zip(jobs, run_dali_jobs(THROUGHPUT_WORKER, jobs, BatchTimes, limit_s), strict=True):
        yield Throughput(job, error=result) if isinstance(result, str) else Throughput(job, (result,))


def warn_about_other_load(cpu_cores: float | None, what: str, listener: Listener) -> None:
    """Says where other work took more of the processors than a VALID measurement of `optpipe bench` allows."""
    if cpu_cores is not None and cpu_cores > LIMITS["max_other_cpu_share"] * count_cores():
        listener.warn(
            f"{what}: other processes used {cpu_cores:.2f} of {count_cores()} cores during the measurement, so rates are too low and "
            "ratios uncertain; repeat on an idle machine"
        )
