"""Images per second in steady state, of DALI and of torch's DataLoader, each in a process of its own."""

from collections.abc import Generator, Sequence
from pathlib import Path

from optpipe.core.events import Listener
from optpipe.core.transform import Transform
from optpipe.measure.validity import LIMITS
from optpipe.preprocess.dali.pipeline import DaliPlan
from optpipe.preprocess.dali.processes import run_dali_jobs
from optpipe.preprocess.throughput.records import (
    PATIENCE,
    BatchTimes,
    Implementation,
    LoaderPlan,
    Throughput,
    ThroughputJob,
)
from optpipe.workspace.environment import count_cores

THROUGHPUT_WORKER = "optpipe.preprocess.throughput.throughput_worker"
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
