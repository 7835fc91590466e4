"""Steady-state images per second of DALI and of torch's DataLoader, each in a new process."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from math import inf
from multiprocessing import active_children
from pathlib import Path
from secrets import randbits
from time import perf_counter_ns, process_time_ns
from typing import Any, Literal

import numpy as np
import polars as pl

from optpipe.core import torch
from optpipe.core.errors import StageError
from optpipe.core.events import Listener
from optpipe.core.files import read_user_bytes
from optpipe.core.process import serve_jobs
from optpipe.core.transform import Transform
from optpipe.core.wording import Argument
from optpipe.measure.process import read_busy_ticks, read_process_ticks
from optpipe.measure.trials import time_calls
from optpipe.measure.validity import LIMITS
from optpipe.models.inputs.images import MAX_IMAGE_BYTES, preprocess_file
from optpipe.preprocess.dali_pipeline import DaliPlan, make_reading_pipeline, run_dali_jobs
from optpipe.stats.means import compute_ratio_of_sums_interval
from optpipe.stats.ratio import SMALLEST_ROUNDS, alternate, ratio_from_rounds
from optpipe.workspace.environment import count_cores

WINDOWS = 12
"""The most windows of consecutive batches in a measurement; their times give the interval."""
FEWEST_WINDOWS = 6
"""With fewer windows, Student's factor alone makes the interval several times as wide as the spread."""
WIDEST = 0.5
"""Limit of half the interval of the time per image, relative to it: the rate's upper end would be the double."""


def compute_images_per_s(batch_ns: Sequence[int], batch_size: int) -> float:
    return batch_size * len(batch_ns) / (sum(batch_ns) / 1e9)


def compute_rate_interval(
    batch_ns: Sequence[int], group: int, batch_size: int
) -> tuple[float, float] | None:
    """95% interval of `compute_images_per_s` of the same batches, which it contains; None if it is unknown.

    `group` batches belong together (a round of the DataLoader's workers): a window has whole groups. The windows cover all
    groups, so that interval and rate refer to the same time; their sizes differ by at most one group.
    """
    groups = len(batch_ns) // group
    count = min(WINDOWS, groups)
    if count < FEWEST_WINDOWS:
        return None
    starts = np.arange(count) * groups // count * group
    images = np.diff(starts, append=len(batch_ns)) * float(batch_size)
    interval = compute_ratio_of_sums_interval(
        np.add.reduceat(np.asarray(batch_ns, float), starts), images
    )
    if interval is None or interval[1] - interval[0] >= WIDEST * (interval[1] + interval[0]):
        return None  # windows are too unequal for an interval
    rate = compute_images_per_s(batch_ns, batch_size)  # between the two apart from rounding
    return min(1e9 / interval[1], rate), max(1e9 / interval[0], rate)


PREFETCH_FACTOR = 2
"""Batches that each DataLoader worker keeps ready, torch's default. More only delays the steady state: workers limit it."""
PATIENCE = 2.0
"""A slow or unsteady configuration ends after this many times the given seconds."""


@dataclass(frozen=True, slots=True)
class LoaderPlan:
    """A configuration of torch's DataLoader; for a GPU with pinned memory and the copy to the GPU."""

    workers: int
    batch_size: int
    device: Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class ThroughputJob:
    """DALI by its `plan`, or a DataLoader by its `loader`."""

    paths: tuple[Path, ...]
    transform: Transform
    seconds: float
    plan: DaliPlan | None = None
    loader: LoaderPlan | None = None
    patience: float = PATIENCE
    """The factor of `seconds` that a slow or unsteady configuration may take."""

    @property
    def implementation(self) -> Literal["dali", "dataloader"]:
        return "dali" if self.plan else "dataloader"

    @property
    def label(self) -> str:
        if self.plan is not None:
            load = f" hw {self.plan.hw_decoder_load:g}" if self.plan.decode == "mixed" else ""
            return f"dali {self.plan.decode}{load}, {self.plan.threads} threads"
        return f"dataloader, {self.loader.workers if self.loader else 0} workers"

    @property
    def batch_size(self) -> int:
        return self.plan.batch_size if self.plan else self.loader.batch_size if self.loader else 0


@dataclass(frozen=True, slots=True)
class BatchTimes:
    batch_ns: tuple[int, ...]
    """Per batch, from the end of the one before to its own end."""
    group: int = 1
    """Batches that belong together: a round of the DataLoader's workers, which deliver at once."""
    warm_up_batches: int = 0
    other_cpu_cores: float = 0.0
    """Cores that other processes used meanwhile."""
    cpu_cores: float = 0.0
    """Cores that this process used, user and system."""
    latency_ns: tuple[int, ...] = ()
    """Per batch of the whole path, from scheduling it until its predictions are there."""


@dataclass(frozen=True, slots=True)
class Throughput:
    job: ThroughputJob
    repeats: tuple[BatchTimes, ...] = ()
    error: str | None = None

    @property
    def batch_ns(self) -> tuple[int, ...]:
        return tuple(value for times in self.repeats for value in times.batch_ns)

    @property
    def images_per_s(self) -> float:
        """All images over all time; 0 after an error."""
        return compute_images_per_s(self.batch_ns, self.job.batch_size) if self.repeats else 0.0

    @property
    def repeated_images_per_s(self) -> tuple[float, ...]:
        return tuple(
            compute_images_per_s(times.batch_ns, self.job.batch_size) for times in self.repeats
        )

    @property
    def other_cpu_cores(self) -> float | None:
        """Cores that other processes used, in the repetition with the most."""
        return max((times.other_cpu_cores for times in self.repeats), default=None)

    def compute_interval(self) -> tuple[float, float] | None:
        """Interval of the rate by consecutive windows, widened to the rates of repetitions in other processes.

        It is at 95% for windows of one process only: processes scatter more than so few of them show.
        """
        if not self.repeats:
            return None
        interval = compute_rate_interval(self.batch_ns, self.repeats[0].group, self.job.batch_size)
        rates = self.repeated_images_per_s
        return (min(interval[0], *rates), max(interval[1], *rates)) if interval else None

    def summarize(self) -> "ThroughputRecord":
        return ThroughputRecord(
            self.job.implementation,
            self.job.plan,
            self.job.loader,
            images_per_s=self.images_per_s or None,
            ci=self.compute_interval(),
            batches=len(self.batch_ns),
            repeats_images_per_s=self.repeated_images_per_s,
            other_cpu_cores=self.other_cpu_cores,
            error=self.error,
        )


@dataclass(frozen=True, slots=True)
class ThroughputRecord:
    implementation: str
    plan: DaliPlan | None
    loader: LoaderPlan | None
    images_per_s: float | None
    ci: tuple[float, float] | None
    """95% interval of the rate; None for too few batches."""
    batches: int
    repeats_images_per_s: tuple[float, ...]
    other_cpu_cores: float | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ThroughputTuning:
    """All configurations that were tried, and the fastest of each kind measured again, in rounds."""

    tried: tuple[ThroughputRecord, ...]
    dataloader: ThroughputRecord
    dali: ThroughputRecord
    speedup: float
    speedup_ci: tuple[float, float] | None
    seed: int = 0
    """Seed of the order in which the fastest were measured again."""


LIMIT_S = 120.0
"""Seconds beyond its measuring time after which a configuration has hung."""


def warm_page_cache(paths: Sequence[Path]) -> None:
    """Reads every file once, so that the disk is not measured."""
    for path in paths:
        read_user_bytes(path, MAX_IMAGE_BYTES)


def make_job(
    paths: Sequence[Path], transform: Transform, setting: DaliPlan | LoaderPlan, seconds: float
) -> ThroughputJob:
    if isinstance(setting, LoaderPlan):
        return ThroughputJob(tuple(paths), transform, seconds, loader=setting)
    return ThroughputJob(tuple(paths), transform, seconds, plan=setting)


def measure_throughputs(jobs: Sequence[ThroughputJob]) -> Iterator[Throughput]:
    """Measures the jobs one after the other, in one process until one fails."""
    limit_s = LIMIT_S + PATIENCE * max((job.seconds for job in jobs), default=0.0)
    for job, result in zip(jobs, run_dali_jobs(__name__, jobs, BatchTimes, limit_s), strict=True):
        yield (
            Throughput(job, error=result) if isinstance(result, str) else Throughput(job, (result,))
        )


def frame_from_throughputs(measured: Sequence[Throughput]) -> pl.DataFrame:
    """Raw times of every batch; `row` counts the configurations that were tried, then the two measured again."""
    rows = [
        (row, throughput.job.implementation, batch)
        for row, throughput in enumerate(measured)
        for batch in throughput.batch_ns
    ]
    return pl.DataFrame(rows, ("row", "implementation", "batch_ns"), orient="row")


def is_host_loaded(other_cpu_cores: float) -> bool:
    """Whether other processes used more of the CPU than a VALID measurement of `optpipe bench` allows."""
    return other_cpu_cores > LIMITS["max_other_cpu_share"] * count_cores()


def warn_about_other_load(cpu_cores: float | None, what: str, listener: Listener) -> None:
    """Warns if `is_host_loaded`."""
    if cpu_cores is not None and is_host_loaded(cpu_cores):
        problem = (
            f"other processes used {cpu_cores:.2f} of {count_cores()} cores during the measurement"
        )
        listener.warn(
            f"{what}: {problem}, so rates are too low and ratios uncertain; repeat on an idle machine"
        )


LOADER_BATCH = 64
"""Larger batches make the DataLoader no faster and its rounds longer: each worker makes whole batches."""
LOADS = (1.0, 0.9)
"""Shares of the hardware JPEG decoder to try; with less the SMs are the limit (0.65: 10% slower, 0: a third)."""
ROUNDS = SMALLEST_ROUNDS
"""Rounds in which the fastest of each kind are measured again; their scatter over processes gives the interval of the speedup."""
QUICK = 0.5
"""Measuring time of the search as a share of that of the winners."""
QuickJobs = Callable[[Sequence[DaliPlan | LoaderPlan]], list[ThroughputJob]]


def tune_preprocessing(
    paths: Sequence[Path],
    transform: Transform,
    plan: DaliPlan,
    cores: int,
    seconds: float,
    listener: Listener,
    fixed: frozenset[str] = frozenset(),
) -> tuple[ThroughputTuning, tuple[Throughput, ...]]:
    """Tries the DataLoader by workers, then the decoder, its shares, and threads; not the fields of `plan` in `fixed`.

    The winners are measured for `seconds`; the search takes QUICK of it and does not wait for a steady configuration.

    Also returns the raw times of all configurations in that order, then those of the DataLoader and DALI, measured again. A failure
    (such as out of memory) is a row with its reason. Raises StageError if nothing of a kind worked.
    """

    def make_quick_jobs(settings: Sequence[DaliPlan | LoaderPlan]) -> list[ThroughputJob]:
        return [
            replace(make_job(paths, transform, setting, seconds * QUICK), patience=1.0)
            for setting in settings
        ]

    few = (0, 1) if cores <= 4 else ()  # 0 workers: this process
    counts = sorted({*few, cores // 2 or 1, cores * 3 // 4 or 1, cores}, reverse=True)
    device: Literal["cpu", "cuda"] = "cuda" if plan.device == "gpu" else "cpu"
    settings = [
        LoaderPlan(workers, min(plan.batch_size, LOADER_BATCH), device) for workers in counts
    ]
    loaders = _measure_all(make_quick_jobs(settings), "DataLoader by workers", listener)
    pipelines = _try_pipelines(plan, cores, make_quick_jobs, listener, fixed)
    plan = max(pipelines, key=lambda plan: pipelines[plan].images_per_s)
    loader = max(loaders, key=lambda row: row.images_per_s)
    again = {
        "loader": replace(loader.job, seconds=seconds, patience=PATIENCE),
        "dali": make_job(paths, transform, plan, seconds),
    }
    seed = randbits(32)
    # in rounds, so that drift of the machine affects both equally
    measure = {name: partial(_measure_all, [job], name, listener) for name, job in again.items()}
    rounds = alternate(measure, ROUNDS, seed)
    tried = (*loaders, *pipelines.values())
    dataloader, dali = (
        merge_repeats([rows[0] for rows in rounds[name]]) for name in ("loader", "dali")
    )
    return record_from_throughputs(tried, dataloader, dali, seed), (*tried, dataloader, dali)


def _measure_all(jobs: Sequence[ThroughputJob], name: str, listener: Listener) -> list[Throughput]:
    rows = []
    with listener.step(name, total=len(jobs)) as step:
        for row in measure_throughputs(jobs):
            rows.append(row)
            step.advance()
            listener.inform(f"{row.job.label}: {describe_throughput_validity(row)}")
    return rows


def describe_throughput_validity(row: Throughput) -> str:
    """`VALID`, or `INVALID (loaded-host)`: known as soon as a configuration was measured.

    The two winners go on nevertheless: they take turns, so that other work slows both of them.
    """
    if row.error is not None:
        return "INVALID (failed)"
    return "INVALID (loaded-host)" if is_host_loaded(row.other_cpu_cores or 0.0) else "VALID"


def _try_pipelines(
    plan: DaliPlan, cores: int, make_jobs: QuickJobs, listener: Listener, fixed: frozenset[str]
) -> dict[DaliPlan, Throughput]:
    """DALI: first the decoder, on a GPU with its share; then the threads of the best."""
    tried: dict[DaliPlan, Throughput] = {}
    kept = {field: getattr(plan, field) for field in fixed}

    def measure(plans: Iterable[DaliPlan], name: str) -> DaliPlan:
        new = [
            plan
            for plan in dict.fromkeys(replace(plan, **kept) for plan in plans)
            if plan not in tried
        ]
        tried.update(zip(new, _measure_all(make_jobs(new), name, listener), strict=True))
        return max(tried, key=lambda plan: tried[plan].images_per_s)

    on_cpu = replace(plan, decode="cpu", threads=cores)
    if plan.device == "cpu":
        measure([on_cpu], "DALI by decoder")
        measure(
            [replace(on_cpu, threads=count) for count in sorted({1, max(1, cores // 2)})],
            "DALI by threads",
        )
        return tried
    mixed = replace(plan, decode="mixed", threads=min(8, cores))
    loads = [replace(mixed, hw_decoder_load=load) for load in LOADS]
    best = measure([*loads, on_cpu], "DALI by decoder")
    counts = sorted({max(1, best.threads // 2), min(cores, best.threads * 2)})
    queued = replace(best, prefetch=best.prefetch + 2)  # a longer queue, for a host that stutters
    measure([*(replace(best, threads=count) for count in counts), queued], "DALI by threads")
    return tried


def record_from_throughputs(
    tried: Sequence[Throughput], dataloader: Throughput, dali: Throughput, seed: int = 0
) -> ThroughputTuning:
    """`dataloader` and `dali` hold one repetition for each round; without all rounds of both the speedup has no interval."""
    sides = dataloader.summarize(), dali.summarize()
    speedup, interval = compute_speedup(*sides)
    return ThroughputTuning(
        tuple(throughput.summarize() for throughput in tried), *sides, speedup, interval, seed=seed
    )


def compute_speedup(
    dataloader: ThroughputRecord, dali: ThroughputRecord
) -> tuple[float, tuple[float, float] | None]:
    """DALI's rate over the DataLoader's, and its 95% interval over rounds if both have all of them; both rates are above 0."""
    ours, theirs = dali.repeats_images_per_s, dataloader.repeats_images_per_s
    if len(ours) == len(theirs) >= SMALLEST_ROUNDS:
        ratio = ratio_from_rounds(theirs, ours)
        return ratio.value, ratio.ci if ratio.is_known else None
    return (dali.images_per_s or 0.0) / (dataloader.images_per_s or inf), None


def merge_repeats(repeats: Sequence[Throughput]) -> Throughput:
    """All successful repetitions as one measurement. Raises StageError if all failed."""
    times = tuple(times for repeat in repeats for times in repeat.repeats)
    if not times:
        problem = f"{repeats[0].job.implementation} could not be measured: {repeats[0].error}"
        raise StageError(
            problem, remedy="use " + Argument("throughput", False) + " to verify parity only"
        )
    return Throughput(repeats[0].job, times)


WARM_UP_S = 0.5
"""Minimum besides twice the batches that were prefetched before the clock ran."""
MIN_ROUNDS = 6
MIN_BATCHES = 24
MIN_BATCHES_AT_TIMEOUT = 4
STEADY = 0.02
"""Half the interval's width, relative to the rate, that ends a measurement."""
LOOK_EVERY = 4
"""Rounds between two checks of the interval."""


def measure_job(job: ThroughputJob) -> BatchTimes:
    if job.plan is None:
        return _measure_dataloader(job)
    return time_pipeline(
        make_reading_pipeline(job.paths, job.transform, job.plan),
        job.plan,
        job.seconds,
        job.patience,
    )


def time_pipeline(pipeline: Any, plan: DaliPlan, seconds: float, patience: float) -> BatchTimes:
    # `run` is synchronous with its batch, while the next ones are being made
    return time_batches(pipeline.run, seconds, prefetched=plan.prefetch + 1, patience=patience)


def _measure_dataloader(job: ThroughputJob) -> BatchTimes:
    assert job.loader is not None
    torch.set_num_threads(1)
    workers, on_gpu = job.loader.workers, job.loader.device == "cuda"
    loader = torch.utils.data.DataLoader(
        _Files(job.paths, job.transform),
        batch_size=job.loader.batch_size,
        sampler=cycle(range(len(job.paths))),
        num_workers=workers,
        pin_memory=on_gpu,
        prefetch_factor=PREFETCH_FACTOR if workers else None,
        multiprocessing_context="fork" if workers else None,
    )
    batches: Iterator[Any] = iter(loader)

    def batch() -> None:
        pixels = next(batches)
        if on_gpu:
            pixels.cuda(non_blocking=True)
            torch.cuda.current_stream().synchronize()

    prefetched = workers * PREFETCH_FACTOR + 1
    return time_batches(
        batch, job.seconds, prefetched, group=max(1, workers), patience=job.patience
    )


class _Files:
    def __init__(self, paths: Sequence[Path], transform: Transform) -> None:
        self.paths, self.transform = paths, transform

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(preprocess_file(self.paths[index], self.transform))


def time_batches(
    batch: Callable[[], object],
    seconds: float,
    prefetched: int,
    *,
    group: int = 1,
    patience: float = PATIENCE,
) -> BatchTimes:
    """Runs `batch` until the rate is known; counts whole groups of batches.

    A slow or unsteady one ends after `patience` times the seconds.
    """
    compute_rate_interval(
        [1] * WINDOWS, 1, 1
    )  # imports its libraries, which the measurement must not include
    calls, done, started = time_calls(batch), 0, perf_counter_ns()
    for done, (_, _, ended) in enumerate(calls, 1):
        if done >= 2 * prefetched and not done % group and ended - started >= WARM_UP_S * 1e9:
            break
    batch_ns: list[int] = []
    others, own_ns = _read_others_ticks(), process_time_ns()
    started = last = perf_counter_ns()
    for _, _, ended in calls:
        batch_ns.append(ended - last)
        last = ended
        if not len(batch_ns) % group and has_enough_batches(
            batch_ns, group, (last - started) / 1e9, seconds, patience
        ):
            break
    other_ticks = max(0, _read_others_ticks() - others)
    other_cpu_cores = other_ticks / os.sysconf("SC_CLK_TCK") / ((last - started) / 1e9)
    cpu_cores = (process_time_ns() - own_ns) / sum(batch_ns)
    return BatchTimes(tuple(batch_ns), group, done, other_cpu_cores, cpu_cores)


def _read_others_ticks() -> int:
    """Processor time, on the CPUs of this process, of everything but this process and the DataLoader's workers."""
    own = (os.getpid(), *(process.pid for process in active_children() if process.pid))
    return read_busy_ticks(os.sched_getaffinity(0)) - sum(map(read_process_ticks, own))


def has_enough_batches(
    batch_ns: list[int], group: int, elapsed_s: float, seconds: float, patience: float = PATIENCE
) -> bool:
    """Whether whole groups of batches determine the rate: long enough, often enough, and steadily."""
    if elapsed_s >= patience * seconds:
        return len(batch_ns) >= max(group, MIN_BATCHES_AT_TIMEOUT)
    rounds = len(batch_ns) // group
    if (
        elapsed_s < seconds
        or rounds < MIN_ROUNDS
        or len(batch_ns) < MIN_BATCHES
        or rounds % LOOK_EVERY
    ):
        return False
    interval = compute_rate_interval(batch_ns, group, 1)
    if interval is None:
        return False
    low, high = interval
    return high - low <= STEADY * (low + high)


if __name__ == "__main__":
    serve_jobs(Path(sys.argv[1]), ThroughputJob, measure_job)
