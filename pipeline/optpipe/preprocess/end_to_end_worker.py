"""Files to predictions in one process: `python -m optpipe.preprocess.end_to_end_worker FOLDER`.

DALI prepares the next batches while the artifact computes this one. On a GPU the runtime reads the pipeline's tensor
in place (DLPack), ordered by the stream of both; the top classes come back through pinned memory. Each part is also
measured alone, in the same process, to judge the overlap.
"""

import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np

from optpipe.backends.base import Session
from optpipe.backends.registry import BACKENDS
from optpipe.core.entries import ArtifactInfo
from optpipe.core.process import serve_jobs
from optpipe.core.transform import Transform
from optpipe.models.inputs.images import preprocess_batches
from optpipe.preprocess.dali_pipeline import HARDWARE_QUEUES, DaliPlan, make_bytes_pipeline, make_reading_pipeline
from optpipe.preprocess.end_to_end import (
    EndToEndFigures,
    EndToEndJob,
    OverlappedBatches,
    PartRates,
    PredictionCheck,
    compute_figures,
)
from optpipe.preprocess.throughput import BatchTimes, compute_images_per_s
from optpipe.preprocess.throughput_worker import time_batches, time_pipeline
from optpipe.workspace.environment import count_cores
from optpipe.workspace.store import Store

IN_FLIGHT = 2
"""Batches whose predictions may be outstanding on a GPU while the next is launched."""
TOP_K = 5
"""Best classes that come back from the GPU, as from a server."""


class Consumer(Protocol):
    handover: str
    in_flight: int

    def launch(self, tensor: Any) -> Any:
        """Starts the inference of a batch, whose memory must stay until `finish`."""

    def finish(self, launched: Any) -> np.ndarray:
        """Waits for `launch`. Returns the best class of each image, `(images,)`."""


class HostConsumer:
    """Computes on the CPU, in this thread, while DALI's threads prepare the next batches."""

    handover = "none: the runtime reads DALI's memory"
    in_flight = 0

    def __init__(self, session: Session) -> None:
        self._session = session
        self._input, self._output = session.inputs[0], session.outputs[0].name

    def launch(self, tensor: Any) -> np.ndarray:
        inputs = {self._input.name: np.asarray(tensor).astype(self._input.dtype, copy=False)}
        return self._session.run(inputs)[self._output]

    def finish(self, launched: np.ndarray) -> np.ndarray:
        best: np.ndarray = np.argmax(launched.reshape(len(launched), -1), axis=1)
        return best


class DeviceConsumer:
    in_flight = IN_FLIGHT

    def __init__(self, session: Session, shape: tuple[int, ...], stream: Any) -> None:
        import torch

        self._torch, self._stream = torch, stream
        self._input, self._output = session.inputs[0], session.outputs[0].name
        self._dtype = getattr(torch, self._input.dtype)
        self._fixed = session.bind({self._input.name: np.zeros(shape, self._input.dtype)})
        self._bind_in_place = getattr(session, "bind_in_place", None)
        self._bindings: dict[int, Any] = {}
        self.handover = "none: DLPack" if self._bind_in_place else "copy on the device"

    def launch(self, tensor: Any) -> Any:
        pixels = self._torch.from_dlpack(tensor)
        if pixels.dtype != self._dtype:
            pixels = pixels.to(self._dtype)
        binding = self._bind(pixels)
        binding.launch()
        scores = binding.outputs[self._output].reshape(len(pixels), -1)
        best = self._torch.topk(scores, min(TOP_K, scores.shape[1])).indices
        host = self._torch.empty(best.shape, dtype=best.dtype, pin_memory=True)
        host.copy_(best, non_blocking=True)
        event = self._torch.cuda.Event()
        event.record(self._stream)
        return event, host, pixels

    def _bind(self, pixels: Any) -> Any:
        if self._bind_in_place is None:
            self._fixed.inputs[self._input.name].copy_(pixels, non_blocking=True)
            return self._fixed
        address = pixels.data_ptr()
        if address not in self._bindings:
            outputs = {name: self._torch.empty_like(each) for name, each in self._fixed.outputs.items()}
            self._bindings[address] = self._bind_in_place({self._input.name: pixels}, outputs)
        return self._bindings[address]

    def finish(self, launched: Any) -> np.ndarray:
        event, host, _ = launched
        event.synchronize()
        first: np.ndarray = host[:, 0].numpy()
        return first


@contextmanager
def open_stream(device: str) -> Iterator[Any]:
    """On a GPU a new stream, which runtimes use if they are loaded in the block; None on the CPU."""
    if device == "cpu":
        yield None
        return
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream


def measure_pipeline(pipeline: Any, plan: DaliPlan, seconds: float) -> float:
    return compute_images_per_s(time_pipeline(pipeline, plan, seconds, 1.0).batch_ns, plan.batch_size)


def measure_inference(consumer: Consumer, plan: DaliPlan, transform: Transform, seconds: float) -> tuple[float, float]:
    """Images/s of an artifact alone on one batch in DALI's place, and the share of launching in its time."""
    values = np.random.default_rng(0).standard_normal((plan.batch_size, *transform.shape))
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

    found = time_batches(batch, seconds, consumer.in_flight + 1, patience=1.0)
    while pending:
        consumer.finish(pending.popleft())
    launching = sum(launch_ns[found.warm_up_batches :]) / sum(found.batch_ns)
    return compute_images_per_s(found.batch_ns, plan.batch_size), launching


def run_overlapped(
    pipeline: Any, consumer: Consumer, plan: DaliPlan, stream: Any, seconds: float
) -> tuple[BatchTimes, OverlappedBatches, dict[int, int]]:
    """The whole path: DALI makes the next batches while the consumer computes. The last result is the best class by file index."""
    scheduled: deque[int] = deque()
    pending: deque[Any] = deque()
    rows: dict[str, list[int]] = {name: [] for name in ("wait_ns", "launch_ns", "output_ns")}
    taken: list[tuple[int, dict[int, int]]] = []

    def schedule() -> None:
        scheduled.append(perf_counter_ns())
        pipeline.schedule_run()

    def take() -> None:
        begun, index, launched, outputs = pending.popleft()
        best = consumer.finish(launched)
        taken.append((perf_counter_ns() - begun, dict(zip(index, best.tolist(), strict=True))))
        del outputs  # DALI may reuse its memory only now, after the predictions

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

    for _ in range(plan.prefetch):
        schedule()
    found = time_batches(batch, seconds, plan.prefetch + consumer.in_flight + 1)
    while pending:
        take()
    first, count = found.warm_up_batches, len(found.batch_ns)
    timed = taken[first - consumer.in_flight :]
    batches = OverlappedBatches(
        found.batch_ns,
        tuple(latency for latency, _ in timed[:count]),
        **{name: tuple(values[first:]) for name, values in rows.items()},
    )
    return found, batches, {index: best for _, predicted in timed for index, best in predicted.items()}


CHECKED_PREDICTIONS = 32
"""Predictions of the timed run that are compared with the reference's."""
PART_S = 1.5
"""Seconds of each part alone, before and after the whole."""


def measure_job(job: EndToEndJob) -> tuple[OverlappedBatches, EndToEndFigures]:
    plan, transform, paths = job.plan, job.transform, job.paths
    entry, part_s = Store(job.workspace).find(job.artifact, ArtifactInfo), min(PART_S, job.seconds)
    backend, device = BACKENDS[entry.info.backend], entry.info.device
    with open_stream(device) as stream, backend.load(entry.path, entry.info, job.options) as session:
        consumer: Consumer = HostConsumer(session)
        if session.device != "cpu":
            consumer = DeviceConsumer(session, (plan.batch_size, *transform.shape), stream)

        def measure_alone() -> tuple[float, tuple[float, float]]:
            pipeline = make_reading_pipeline(paths, transform, plan)
            return measure_pipeline(pipeline, plan, part_s), measure_inference(consumer, plan, transform, part_s)

        read = measure_pipeline(make_bytes_pipeline(paths, plan), plan, part_s / 2)
        decode = measure_pipeline(make_reading_pipeline(paths, transform, plan, decode_only=True), plan, part_s)
        before = measure_alone()
        pipeline = make_reading_pipeline(paths, transform, plan)
        times, batches, predictions = run_overlapped(pipeline, consumer, plan, stream, job.seconds)
        after = measure_alone()
        check = _check_predictions(predictions, session, paths, transform, plan.batch_size)
    # the better of two: a disturbed part must not make the overlap look good
    preprocess, inference = max(before[0], after[0]), max(before[1][0], after[1][0])
    figures = compute_figures(
        batches,
        PartRates(read, decode, preprocess, inference),
        plan,
        launch_share=min(before[1][1], after[1][1]),
        cpu_share=times.cpu_cores / count_cores(),
        other_cpu_cores=times.other_cpu_cores,
        handover=consumer.handover,
        environment={name: os.environ.get(name) for name in HARDWARE_QUEUES},
        check=check,
    )
    return batches, figures


def _check_predictions(
    latest: Mapping[int, int], session: Session, paths: Sequence[Path], transform: Transform, size: int
) -> PredictionCheck:
    chosen = sorted(latest)[:: max(1, len(latest) // CHECKED_PREDICTIONS)][:CHECKED_PREDICTIONS]
    name, spec = session.outputs[0].name, session.inputs[0]
    rows = [paths[index] for index in chosen]
    padded = rows + rows[-1:] * (-len(rows) % size)
    found: list[int] = []
    for batch in preprocess_batches(padded, transform, size, threads=count_cores()):
        scores = session.run({spec.name: batch.astype(spec.dtype)})[name]
        found += np.argmax(scores.reshape(len(scores), -1), axis=1).tolist()
    expected = found[: len(chosen)]
    equal = sum(latest[index] == best for index, best in zip(chosen, expected, strict=True))
    return PredictionCheck(len(chosen), equal, len(set(expected)))


if __name__ == "__main__":
    serve_jobs(Path(sys.argv[1]), EndToEndJob, measure_job)
