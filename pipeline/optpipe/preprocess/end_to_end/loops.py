"""The loops that are measured: a pipeline alone, an artifact alone, and both at once."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter_ns, process_time_ns
from typing import Any

import numpy as np

from optpipe.core.transform import Transform
from optpipe.preprocess.dali.pipeline import DaliPlan
from optpipe.preprocess.end_to_end.consumers import Consumer, DeviceConsumer, get_batch_shape
from optpipe.preprocess.end_to_end.records import OverlappedBatches
from optpipe.preprocess.throughput.records import PATIENCE
from optpipe.preprocess.throughput.throughput_worker import time_batches
from optpipe.preprocess.throughput.windows import compute_images_per_s


@dataclass(frozen=True, slots=True)
class Rate:
    """What a loop does in its steady state."""

    images_per_s: float
    cpu_cores: float
    """Cores that this process kept busy, user and system."""
    launch_share: float = 0.0
    """Share of the time that launching takes."""
    other_cpu_cores: float = 0.0
    """Cores that other processes kept busy meanwhile."""


@dataclass(frozen=True, slots=True)
class OverlappedRun:
    """Preprocessing and inference at the same time."""

    rate: Rate
    batches: OverlappedBatches
    predictions: tuple[tuple[int, int], ...]
    """Index of the file and its best class."""


def measure_pipeline_rate(pipeline: Any, plan: DaliPlan, seconds: float) -> Rate:
    """A pipeline alone."""

    def batch() -> int:
        pipeline.run()
        return perf_counter_ns()

    return _run_steady(batch, plan, seconds, plan.prefetch + 1)[0]


def measure_inference_rate(consumer: Consumer, plan: DaliPlan, transform: Transform, seconds: float) -> Rate:
    """An artifact alone, on one batch that lies where DALI would leave it."""
    values = np.random.default_rng(0).standard_normal(get_batch_shape(plan, transform))
    tensor: Any = values.astype(transform.pack.dtype)
    if isinstance(consumer, DeviceConsumer):
        import torch

        tensor = torch.from_numpy(tensor).cuda()
    pending: deque[Any] = deque()
    launch_ns: list[int] = []

    def batch() -> int:
        started = perf_counter_ns()
        pending.append(consumer.launch(tensor))
        now = perf_counter_ns()
        launch_ns.append(now - started)
        while len(pending) > consumer.in_flight:
            consumer.finish(pending.popleft())
        return now

    rate, batch_ns = _run_steady(batch, plan, seconds, consumer.in_flight + 1, settled=launch_ns.clear)
    while pending:
        consumer.finish(pending.popleft())
    return replace(rate, launch_share=sum(launch_ns) / sum(batch_ns))


def run_overlapped(pipeline: Any, consumer: Consumer, plan: DaliPlan, stream: Any, seconds: float) -> OverlappedRun:
    """The whole path: while the consumer computes, DALI makes the next batches."""
    scheduled: deque[int] = deque()
    pending: deque[Any] = deque()
    rows: dict[str, list[int]] = {name: [] for name in ("wait_ns", "launch_ns", "output_ns", "latency_ns")}
    predictions: list[tuple[int, int]] = []

    def schedule() -> None:
        scheduled.append(perf_counter_ns())
        pipeline.schedule_run()

    def take() -> None:
        begun, index, launched, outputs = pending.popleft()
        best = consumer.finish(launched)
        rows["latency_ns"].append(perf_counter_ns() - begun)
        predictions.extend(zip(index, best.tolist(), strict=True))
        del outputs  # its memory goes back to DALI only now, when the predictions are there

    def batch() -> int:
        started = perf_counter_ns()
        outputs = pipeline.share_outputs(cuda_stream=stream) if stream is not None else pipeline.share_outputs()
        ready = perf_counter_ns()
        index = np.asarray(outputs[1].as_cpu().as_tensor()).ravel().tolist()
        pending.append((scheduled.popleft(), index, consumer.launch(outputs[0].as_tensor()), outputs))
        launched = perf_counter_ns()
        pipeline.release_outputs()
        schedule()
        while len(pending) > consumer.in_flight:
            take()
        rows["wait_ns"].append(ready - started)
        rows["launch_ns"].append(launched - ready)
        rows["output_ns"].append(perf_counter_ns() - launched)
        return ready

    def settled() -> None:
        predictions.clear()
        for values in rows.values():
            values.clear()

    for _ in range(plan.prefetch):
        schedule()
    queue = plan.prefetch + consumer.in_flight + 1
    rate, batch_ns = _run_steady(batch, plan, seconds, queue, settled=settled, patience=PATIENCE)
    while pending:
        take()
    kept = {name: tuple(values[: len(batch_ns)]) for name, values in rows.items()}
    return OverlappedRun(rate, OverlappedBatches(batch_ns, **kept), tuple(predictions))


def _run_steady(
    batch: Callable[[], int],
    plan: DaliPlan,
    seconds: float,
    prefetched: int,
    *,
    settled: Callable[[], None] | None = None,
    patience: float = 1.0,
) -> tuple[Rate, tuple[int, ...]]:
    """Runs `batch` until its rate is known; also the time of each batch."""
    begun_ns = 0

    def begin() -> None:
        nonlocal begun_ns
        if settled is not None:
            settled()
        begun_ns = process_time_ns()

    found = time_batches(batch, seconds, prefetched=prefetched, patience=patience, settled=begin)
    rate = Rate(
        compute_images_per_s(found.batch_ns, plan.batch_size),
        cpu_cores=(process_time_ns() - begun_ns) / sum(found.batch_ns),
        other_cpu_cores=found.other_cpu_cores,
    )
    return rate, found.batch_ns
