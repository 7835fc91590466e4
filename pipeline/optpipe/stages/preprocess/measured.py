"""One throughput measurement, run as a process of its own: `python -m optpipe.stages.preprocess.measured JOB RESULT`.

A fresh process per configuration keeps one's threads, forks and GPU memory away from the next. The job and the result
are JSON files; the result holds one entry per batch, in order, after the warm-up.
"""

import json
import sys
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from optpipe.core.transform import Transform
from optpipe.inputs.images import preprocessed
from optpipe.stages.preprocess.dali_pipeline import DaliPlan, reading_pipeline

WARM_UP_S = 1.0
"""Beside the batches that were prefetched before the clock ran."""
MIN_BATCHES = 24
PATIENCE = 3.0
"""A slow configuration ends after this many times the wanted seconds, with fewer batches."""
FEWEST = 4


def main(job_file: str, result_file: str) -> None:
    """Runs the job and writes the result when it is complete."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    measure = {"dali": _dali, "dataloader": _dataloader}[job["kind"]]
    Path(result_file).write_text(json.dumps(measure(job)), encoding="utf-8")


def _dali(job: dict[str, Any]) -> dict[str, Any]:
    plan = DaliPlan(**job["plan"])
    transform = Transform.from_dict(job["transform"])
    paths = [Path(path) for path in job["paths"]]
    pipeline = reading_pipeline(paths, transform, plan, decode_only=job["decode_only"])

    def batch() -> int:
        pipeline.run()  # synchronous with this batch, while the next ones are being made
        return perf_counter_ns()

    return timed(batch, job["seconds"], prefetched=plan.prefetch + 1)


def _dataloader(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    workers, on_gpu = job["workers"], job["device"] == "cuda"
    files = _Files(job["paths"], job["transform"])
    loader = DataLoader(
        files,
        batch_size=job["batch_size"],
        sampler=cycle(range(len(files))),
        num_workers=workers,
        pin_memory=on_gpu,
        prefetch_factor=job["prefetch_factor"] if workers else None,
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

    return timed(batch, job["seconds"], prefetched=workers * job["prefetch_factor"] + 1)


class _Files:
    """A map-style dataset: the reference preprocessing of one file."""

    def __init__(self, paths: list[str], transform: dict[str, Any]) -> None:
        self.paths = paths
        self.transform = Transform.from_dict(transform)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.from_numpy(preprocessed(Path(self.paths[index]), self.transform))


def timed(
    batch: Callable[[], int], seconds: float, prefetched: int, settled: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Runs `batch` until both the time and the count suffice; it returns when its data were there.

    `settled` is called once, between the warm-up and the measurement.
    """
    started = perf_counter_ns()
    done = 0
    while done < prefetched or perf_counter_ns() - started < WARM_UP_S * 1e9:
        batch()
        done += 1
    if settled is not None:
        settled()
    reader_ns: list[int] = []
    batch_ns: list[int] = []
    started = last = perf_counter_ns()
    while not _enough(len(batch_ns), (last - started) / 1e9, seconds):
        read = batch()
        now = perf_counter_ns()
        reader_ns.append(read - last)
        batch_ns.append(now - last)
        last = now
    return {"reader_ns": reader_ns, "batch_ns": batch_ns, "warm_up_batches": done}


def _enough(batches: int, elapsed_s: float, seconds: float) -> bool:
    if elapsed_s >= PATIENCE * seconds:
        return batches >= FEWEST
    return batches >= MIN_BATCHES and elapsed_s >= seconds


if __name__ == "__main__":
    main(*sys.argv[1:])
