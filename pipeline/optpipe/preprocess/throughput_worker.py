"""Throughput measurements in a separate process: `python -m optpipe.preprocess.throughput_worker FOLDER`.

Only the steady state of DALI or the DataLoader counts. Nothing pauses between warm-up and measurement, so no queue fills
up unobserved. The DataLoader's workers run in step: a round of batches arrives at once, and then none until a worker has
made its next. So only whole rounds count; half a round more made a rate 1.5 times too high.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from multiprocessing import active_children
from pathlib import Path
from time import perf_counter_ns, process_time_ns
from typing import Any

from optpipe.core.process import serve_jobs
from optpipe.core.transform import Transform
from optpipe.measure.process import read_busy_ticks, read_process_ticks
from optpipe.measure.trials import time_calls
from optpipe.models.inputs.images import preprocess_file
from optpipe.preprocess.dali_pipeline import DaliPlan, make_reading_pipeline
from optpipe.preprocess.throughput import PATIENCE, WINDOWS, BatchTimes, ThroughputJob, compute_rate_interval

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
    decode_only = job.implementation == "dali-decode"
    pipeline = make_reading_pipeline(job.paths, job.transform, job.plan, decode_only=decode_only)
    return time_pipeline(pipeline, job.plan, job.seconds, job.patience)


def time_pipeline(pipeline: Any, plan: DaliPlan, seconds: float, patience: float) -> BatchTimes:
    def batch() -> int:
        pipeline.run()  # synchronous with this batch, while the next ones are being made
        return perf_counter_ns()

    return time_batches(batch, seconds, prefetched=plan.prefetch + 1, patience=patience)


def _measure_dataloader(job: ThroughputJob) -> BatchTimes:
    import torch
    from torch.utils.data import DataLoader

    assert job.loader is not None
    torch.set_num_threads(1)
    workers, on_gpu = job.loader.workers, job.loader.device == "cuda"
    files = _Files(job.paths, job.transform)
    loader = DataLoader(
        files,
        batch_size=job.loader.batch_size,
        sampler=cycle(range(len(files))),
        num_workers=workers,
        pin_memory=on_gpu,
        prefetch_factor=job.loader.prefetch_factor if workers else None,
        multiprocessing_context="fork" if workers else None,
    )
    batches: Iterator[Any] = iter(loader)

    def batch() -> int:
        pixels = next(batches)
        read_ns = perf_counter_ns()
        if on_gpu:
            pixels.cuda(non_blocking=True)
            torch.cuda.current_stream().synchronize()
        return read_ns

    prefetched = workers * job.loader.prefetch_factor + 1
    return time_batches(batch, job.seconds, prefetched, group=max(1, workers), patience=job.patience)


class _Files:
    def __init__(self, paths: Sequence[Path], transform: Transform) -> None:
        self.paths, self.transform = paths, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.from_numpy(preprocess_file(self.paths[index], self.transform))


def time_batches(
    batch: Callable[[], int],
    seconds: float,
    prefetched: int,
    *,
    group: int = 1,
    patience: float = PATIENCE,
) -> BatchTimes:
    """Runs `batch`, which returns the time of its data's arrival, until the rate is known; counts whole groups of batches.

    A slow or unsteady one ends after `patience` times the seconds.
    """
    compute_rate_interval([1] * WINDOWS, 1, 1)  # imports its libraries, which the measurement must not include
    calls, done, started = time_calls(batch), 0, perf_counter_ns()
    for done, (_, _, ended) in enumerate(calls, 1):
        if done >= 2 * prefetched and not done % group and ended - started >= WARM_UP_S * 1e9:
            break
    reader_ns: list[int] = []
    batch_ns: list[int] = []
    others, own_ns = _read_others_ticks(), process_time_ns()
    started = last = perf_counter_ns()
    for _, read, ended in calls:
        reader_ns.append(read - last)
        batch_ns.append(ended - last)
        last = ended
        if not len(batch_ns) % group and has_enough_batches(batch_ns, group, (last - started) / 1e9, seconds, patience):
            break
    other_ticks = max(0, _read_others_ticks() - others)
    other_cpu_cores = other_ticks / os.sysconf("SC_CLK_TCK") / ((last - started) / 1e9)
    cpu_cores = (process_time_ns() - own_ns) / sum(batch_ns)
    return BatchTimes(tuple(reader_ns), tuple(batch_ns), group, done, other_cpu_cores, cpu_cores)


def _read_others_ticks() -> int:
    """Processor time, on the CPUs of this process, of everything but this process and the DataLoader's workers."""
    own = (os.getpid(), *(each.pid for each in active_children() if each.pid))
    return read_busy_ticks(os.sched_getaffinity(0)) - sum(map(read_process_ticks, own))


def has_enough_batches(
    batch_ns: list[int], group: int, elapsed_s: float, seconds: float, patience: float = PATIENCE
) -> bool:
    """Whether whole groups of batches determine the rate: long enough, often enough, and steadily."""
    if elapsed_s >= patience * seconds:
        return len(batch_ns) >= max(group, MIN_BATCHES_AT_TIMEOUT)
    rounds = len(batch_ns) // group
    if elapsed_s < seconds or rounds < MIN_ROUNDS or len(batch_ns) < MIN_BATCHES:
        return False
    if rounds % LOOK_EVERY:
        return False
    found = compute_rate_interval(batch_ns, group, 1)
    return found is not None and found[1] - found[0] <= STEADY * (found[0] + found[1])


if __name__ == "__main__":
    serve_jobs(Path(sys.argv[1]), ThroughputJob, measure_job)
