"""Images per second in steady state, of DALI and of torch's DataLoader, each in a process of its own."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optpipe.core.events import Listener
from optpipe.core.transform import Transform
from optpipe.errors import StageError
from optpipe.measuring.validity import LIMITS
from optpipe.preprocess.dali.pipeline import DaliPlan
from optpipe.preprocess.throughput.processes import run_jobs
from optpipe.preprocess.throughput.windows import compute_images_per_s, compute_rate_interval
from optpipe.workspace.environment import count_cores

THROUGHPUT_WORKER = "optpipe.preprocess.throughput.throughput_worker"
PREFETCH_FACTOR = 2
"""Batches each DataLoader worker keeps ready, torch's own default. More only delays the steady state: workers limit it."""
LIMIT_S = 120.0
"""A configuration that takes longer than this beyond its measuring time has hung."""
PATIENCE = 2.0
"""A slow or an unsteady configuration ends after this many times the wanted seconds."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """One configuration's steady-state rate, or why there is none."""

    implementation: str
    """`dali`, `dataloader`, or `dali-decode` for decoding alone."""
    settings: Mapping[str, Any]
    batch_size: int
    reader_ns: tuple[int, ...] = ()
    """Per batch, the time until its data were there."""
    batch_ns: tuple[int, ...] = ()
    """Per batch, from the end of the one before to its own end."""
    error: str | None = None
    other_cpu_cores: float | None = None
    """Cores that other processes kept busy meanwhile."""

    group: int = 1
    """So many batches belong together: a round of the DataLoader's workers, which hand out theirs at once."""
    repeats: tuple[int, ...] = ()
    """Batches of each repetition, in order, where several were put together."""

    @property
    def images_per_s(self) -> float:
        """All images over all time; 0 where it failed."""
        return compute_images_per_s(self.batch_ns, self.batch_size) if self.batch_ns else 0.0

    @property
    def repeated_images_per_s(self) -> tuple[float, ...]:
        """The rate of each repetition."""
        rates, start = [], 0
        for count in self.repeats:
            rates.append(compute_images_per_s(self.batch_ns[start : start + count], self.batch_size))
            start += count
        return tuple(rates)

    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the rate by consecutive windows, widened to what repetitions in other processes gave."""
        found = compute_rate_interval(self.batch_ns, self.group, self.batch_size) if self.batch_ns else None
        if found is None:
            return None
        return min(*found, *self.repeated_images_per_s), max(*found, *self.repeated_images_per_s)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; costs are means per batch, as training profilers name them."""
        interval = self.interval()
        count = max(len(self.batch_ns), 1)
        return {
            "implementation": self.implementation,
            "device": self.settings.get("decode", self.settings.get("device")),
            "threads": self.settings.get("threads", self.settings.get("workers")),
            "settings": dict(self.settings),
            "batch_size": self.batch_size,
            "images_per_s": self.images_per_s if self.batch_ns else None,
            "ci": list(interval) if interval else None,
            "reader_cost_s": sum(self.reader_ns) / count / 1e9 if self.batch_ns else None,
            "batch_cost_s": sum(self.batch_ns) / count / 1e9 if self.batch_ns else None,
            "batches": len(self.batch_ns),
            "repeats_images_per_s": list(self.repeated_images_per_s),
            "other_cpu_cores": self.other_cpu_cores,
            "error": self.error,
        }


def warm_page_cache(paths: Sequence[Path]) -> int:
    """Reads every file once, so that the disk is not what is measured; returns the bytes read."""
    return sum(len(path.read_bytes()) for path in paths)


@dataclass(frozen=True, slots=True)
class ThroughputJob:
    """One measurement to be made, and what becomes of it."""

    implementation: str
    settings: Mapping[str, Any]
    batch_size: int
    seconds: float
    details: Mapping[str, Any]
    patience: float = PATIENCE
    """How many times the seconds a slow or an unsteady one may take."""

    def measured(self, result: Mapping[str, Any] | str) -> Throughput:
        """The row that a process's result, or the reason of its failure, makes."""
        if isinstance(result, str):
            return Throughput(self.implementation, self.settings, self.batch_size, error=result)
        reader_ns, batch_ns = tuple(result["reader_ns"]), tuple(result["batch_ns"])
        return Throughput(
            self.implementation,
            self.settings,
            self.batch_size,
            reader_ns,
            batch_ns,
            other_cpu_cores=result["other_cpu_cores"],
            group=result["group"],
        )


def make_dali_job(transform: Transform, plan: DaliPlan, seconds: float, *, decode_only: bool = False) -> ThroughputJob:
    """The derived pipeline, or its decoding alone."""
    details = {"kind": "dali", "transform": transform.to_dict(), "plan": plan.to_dict(), "decode_only": decode_only}
    settings = {name: value for name, value in plan.to_dict().items() if name != "batch_size"}
    return ThroughputJob("dali-decode" if decode_only else "dali", settings, plan.batch_size, seconds, details)


def make_dataloader_job(
    transform: Transform, workers: int, batch_size: int, device: str, seconds: float
) -> ThroughputJob:
    """torch's DataLoader on the reference preprocessing; on a GPU with pinned memory and the copy there."""
    settings = {
        "workers": workers,
        "device": device,
        "batch_size": batch_size,
        "prefetch_factor": PREFETCH_FACTOR,
        "pin_memory": device == "cuda",
    }
    details = {"kind": "dataloader", "transform": transform.to_dict(), **settings}
    return ThroughputJob("dataloader", settings, batch_size, seconds, details)


def measure_throughputs(paths: Sequence[Path], jobs: Sequence[ThroughputJob]) -> Generator[Throughput]:
    """Measures the jobs one after the other, in one process as long as none fails."""
    names = [str(path) for path in paths]
    requests = [{**job.details, "paths": names, "seconds": job.seconds, "patience": job.patience} for job in jobs]
    limit_s = LIMIT_S + PATIENCE * max(job.seconds for job in jobs)
    for job, result in zip(jobs, run_jobs(THROUGHPUT_WORKER, requests, limit_s), strict=True):
        yield job.measured(result)


def warn_about_other_load(cpu_cores: float | None, what: str, listener: Listener) -> None:
    """Says where other work took more of the processors than a VALID measurement of `optpipe bench` allows."""
    if cpu_cores is not None and cpu_cores > LIMITS["max_other_cpu_share"] * count_cores():
        listener.warn(
            f"{what}: other processes used {cpu_cores:.2f} of {count_cores()} cores during the measurement, so rates are too low and "
            "ratios uncertain; repeat on an idle machine"
        )


def require_rate(measured: Throughput, what: str) -> Throughput:
    """Raises StageError where nothing could be measured."""
    if measured.error:
        raise StageError(f"{what} could not be measured: {measured.error}\nuse --no-throughput to verify parity only")
    return measured
