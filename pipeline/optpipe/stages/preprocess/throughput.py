"""Images per second in steady state, of DALI and of torch's DataLoader, each in a process of its own."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optpipe.core.transform import Transform
from optpipe.errors import StageError
from optpipe.stages.preprocess.dali_pipeline import DaliPlan

WINDOWS = 12
"""The measurement is cut into this many equal windows; their rates give the interval."""
PREFETCH_FACTOR = 4
"""Batches each DataLoader worker keeps ready; the default of 2 lets a slow batch stall the reader."""
LIMIT_S = 300.0
"""A configuration that takes longer than this beyond its measuring time has hung."""


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

    @property
    def images_per_s(self) -> float:
        """All images over all time; 0 where it failed."""
        return self.batch_size * len(self.batch_ns) / (sum(self.batch_ns) / 1e9) if self.batch_ns else 0.0

    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the rate by the means of consecutive windows."""
        import numpy as np

        from optpipe.stats.stability import mean_interval

        count = min(WINDOWS, len(self.batch_ns))
        if count < 3:
            return None
        size = len(self.batch_ns) // count
        windows = np.asarray(self.batch_ns[: size * count], float).reshape(count, size).sum(axis=1)
        return mean_interval(self.batch_size * size / (windows / 1e9))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; costs are means per batch, as training profilers name them."""
        interval = self.interval() if self.batch_ns else None
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
            "error": self.error,
        }


def warm_page_cache(paths: Sequence[Path]) -> int:
    """Reads every file once, so that the disk is not what is measured; returns the bytes read."""
    return sum(len(path.read_bytes()) for path in paths)


def dali_throughput(
    paths: Sequence[Path], transform: Transform, plan: DaliPlan, seconds: float, *, decode_only: bool = False
) -> Throughput:
    """Measures the derived pipeline, or its decoding alone."""
    job = {
        "kind": "dali",
        "paths": [str(path) for path in paths],
        "transform": transform.to_dict(),
        "plan": plan.to_dict(),
        "seconds": seconds,
        "decode_only": decode_only,
    }
    settings = {name: value for name, value in plan.to_dict().items() if name != "batch_size"}
    return _measured(job, "dali-decode" if decode_only else "dali", settings, plan.batch_size, seconds)


def dataloader_throughput(
    paths: Sequence[Path], transform: Transform, workers: int, batch_size: int, device: str, seconds: float
) -> Throughput:
    """Measures torch's DataLoader on the reference preprocessing; on a GPU with pinned memory and the copy there."""
    settings = {
        "workers": workers,
        "device": device,
        "prefetch_factor": PREFETCH_FACTOR,
        "pin_memory": device == "cuda",
    }
    job = {
        "kind": "dataloader",
        "paths": [str(path) for path in paths],
        "transform": transform.to_dict(),
        "batch_size": batch_size,
        "seconds": seconds,
        **settings,
    }
    return _measured(job, "dataloader", settings, batch_size, seconds)


def _measured(
    job: Mapping[str, Any], implementation: str, settings: Mapping[str, Any], batch_size: int, seconds: float
) -> Throughput:
    with tempfile.TemporaryDirectory(prefix="optpipe-") as folder:
        job_file, result_file = Path(folder, "job.json"), Path(folder, "result.json")
        job_file.write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", "optpipe.stages.preprocess.measured", str(job_file), str(result_file)]
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=LIMIT_S + 3 * seconds, check=False
            )
            failure = None if process.returncode == 0 else failure_reason(process.stderr, process.returncode)
        except subprocess.TimeoutExpired:
            failure = f"no result after {LIMIT_S + 3 * seconds:.0f} s"
        if failure is not None:
            return Throughput(implementation, settings, batch_size, error=failure)
        result = json.loads(result_file.read_text(encoding="utf-8"))
    return Throughput(implementation, settings, batch_size, tuple(result["reader_ns"]), tuple(result["batch_ns"]))


def out_of_memory(text: str) -> bool:
    """Whether a message of torch, CUDA, DALI or C++ says that memory ran out."""
    lowered = text.lower()
    return any(sign in lowered for sign in ("out of memory", "cudaerrormemoryallocation", "bad_alloc", "badalloc"))


def failure_reason(stderr: str, status: int) -> str:
    """The line of a failed process that says most, in one line."""
    if out_of_memory(stderr):
        return "out of memory; a smaller batch (--batch-size) or fewer threads need less"
    if status < 0:
        return f"ended by signal {-status}" + (" (out of host memory?)" if status == -9 else "")
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line]
    return (named or lines or [f"exit status {status}"])[-1][:300]


def require_rate(measured: Throughput, what: str) -> Throughput:
    """Raises StageError where nothing could be measured."""
    if measured.error:
        msg = f"{what} could not be measured: {measured.error}"
        raise StageError(msg)
    return measured
