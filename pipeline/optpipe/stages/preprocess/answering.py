"""Files to answers in one process: `python -m optpipe.stages.preprocess.answering FOLDER`.

DALI prepares the next batches while the artifact answers this one. On a GPU the pipeline's tensor is given to the
runtime where it lies (DLPack), ordered by the stream on which both work; the top answers come back through pinned memory.
Each part is first measured alone, in the same process, so that overlap can be judged.
"""

import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

from optpipe.backends.base import Session
from optpipe.backends.registry import BACKENDS
from optpipe.core.environment import cores
from optpipe.core.transform import Transform
from optpipe.inputs.images import batches
from optpipe.stages.preprocess.dali_pipeline import DaliPlan, bytes_pipeline, reading_pipeline
from optpipe.stages.preprocess.measured import timed
from optpipe.stages.preprocess.processes import QUEUES, answer_jobs
from optpipe.stages.preprocess.windows import images_per_s

IN_FLIGHT = 2
"""Batches whose answers may be outstanding while the next is launched."""
CHECKED = 32
"""So many answers of the timed run are compared with the reference's."""
TOP = 5
"""The best classes that come back from the GPU, as a server would send them."""
PART_S = 1.5
"""Each part alone is measured for so long, before and after the whole."""


def main(folder: str) -> None:
    """Answers the jobs in `folder`."""
    answer_jobs(Path(folder), answered)


def answered(job: Mapping[str, Any]) -> dict[str, Any]:
    """All measurements of one artifact with one plan."""
    transform, plan = Transform.from_dict(job["transform"]), DaliPlan(**job["plan"])
    paths = [Path(path) for path in job["paths"]]
    with _stream(job["device"]) as stream:
        session = BACKENDS[job["backend"]].load(Path(job["directory"]), job["info"], job["device"], job["options"])
        with session:
            consumer = _consumer(session, plan, transform, stream)
            parts = {
                "read": _rate(bytes_pipeline(paths, plan), plan, PART_S / 2),
                "decode": _rate(reading_pipeline(paths, transform, plan, decode_only=True), plan, PART_S),
            }
            before = _alone(consumer, paths, transform, plan)
            result = _overlapped(reading_pipeline(paths, transform, plan), consumer, plan, stream, job["seconds"])
            after = _alone(consumer, paths, transform, plan)
            # the better of two: a part that was disturbed once must not make the overlap look good
            parts |= {name: max(before[name], after[name]) for name in ("preprocess", "inference")}
            enqueue_share = min(before["enqueue_share"], after["enqueue_share"])
            answers = result.pop("answers")
            checked = _checked(answers, session, paths, transform, plan)
    said = {
        "handover": consumer.handover,
        "checked": checked,
        "environment": {name: os.environ.get(name) for name in QUEUES},
    }
    return {**result, "parts": parts, "enqueue_share": enqueue_share, **said}


class _OnHost:
    """Answers on the CPU: the runtime reads DALI's memory."""

    handover = "none: the runtime reads DALI's memory"

    def __init__(self, session: Session) -> None:
        self._session = session
        self._input, self._output = session.inputs[0], session.outputs[0].name

    def launch(self, tensor: Any) -> Any:
        array = np.asarray(tensor)
        return self._session.run({self._input.name: array.astype(self._input.dtype, copy=False)})[self._output]

    def finish(self, answer: Any) -> np.ndarray:
        best: np.ndarray = np.argmax(answer.reshape(len(answer), -1), axis=1)
        return best


class _OnDevice:
    """Answers on a GPU: enqueued on the stream, fetched when their event has passed."""

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
        binding = self._bound(pixels)
        binding.launch()
        scores = binding.outputs[self._output].reshape(len(pixels), -1)
        best = self._torch.topk(scores, min(TOP, scores.shape[1])).indices
        host = self._torch.empty(best.shape, dtype=best.dtype, pin_memory=True)
        host.copy_(best, non_blocking=True)
        event = self._torch.cuda.Event()
        event.record(self._stream)
        return event, host, pixels

    def _bound(self, pixels: Any) -> Any:
        if self._bind_in_place is None:
            self._fixed.inputs[self._input.name].copy_(pixels, non_blocking=True)
            return self._fixed
        address = pixels.data_ptr()
        if address not in self._bindings:
            outputs = {name: self._torch.empty_like(each) for name, each in self._fixed.outputs.items()}
            self._bindings[address] = self._bind_in_place({self._input.name: pixels}, outputs)
        return self._bindings[address]

    def finish(self, answer: Any) -> np.ndarray:
        event, host, _ = answer
        event.synchronize()
        first: np.ndarray = host[:, 0].numpy()
        return first


def _consumer(session: Session, plan: DaliPlan, transform: Transform, stream: Any) -> Any:
    if session.device == "cpu":
        return _OnHost(session)
    return _OnDevice(session, _shape(plan, transform), stream)


def _shape(plan: DaliPlan, transform: Transform) -> tuple[int, int, int, int]:
    """Of a batch of the model's input."""
    return plan.batch_size, transform.channels, *(transform.size or (0, 0))


@contextmanager
def _stream(device: str) -> Iterator[Any]:
    """On a GPU a stream of our own, which runtimes take as theirs when they load."""
    if device == "cpu":
        yield None
        return
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream


def _alone(consumer: Any, paths: list[Path], transform: Transform, plan: DaliPlan) -> dict[str, float]:
    """The two parts that are to overlap, each by itself."""
    preprocess = _rate(reading_pipeline(paths, transform, plan), plan, PART_S)
    inference, enqueue_share = _inference(consumer, plan, transform, PART_S)
    return {"preprocess": preprocess, "inference": inference, "enqueue_share": enqueue_share}


def _rate(pipeline: Any, plan: DaliPlan, seconds: float) -> float:
    """Images per second of a pipeline alone, in steady state."""

    def batch() -> int:
        pipeline.run()
        return perf_counter_ns()

    found = timed(batch, seconds, prefetched=plan.prefetch + 1, patience=1.0)
    return images_per_s(found["batch_ns"], plan.batch_size)


def _inference(consumer: Any, plan: DaliPlan, transform: Transform, seconds: float) -> tuple[float, float]:
    """Images per second of the artifact alone, and the share of the time that its launches take."""
    values = np.random.default_rng(0).standard_normal(_shape(plan, transform))
    tensor: Any = values.astype(transform.pack.dtype)
    if isinstance(consumer, _OnDevice):
        import torch

        tensor = torch.from_numpy(tensor).cuda()
    pending: deque[Any] = deque()
    launch_ns = 0

    def batch() -> int:
        nonlocal launch_ns
        started = perf_counter_ns()
        pending.append(consumer.launch(tensor))
        now = perf_counter_ns()
        launch_ns += now - started
        while len(pending) > IN_FLIGHT:
            consumer.finish(pending.popleft())
        return now

    def settled() -> None:
        nonlocal launch_ns
        launch_ns = 0

    found = timed(batch, seconds, prefetched=IN_FLIGHT + 1, patience=1.0, settled=settled)
    return images_per_s(found["batch_ns"], plan.batch_size), launch_ns / sum(found["batch_ns"])


def _overlapped(pipeline: Any, consumer: Any, plan: DaliPlan, stream: Any, seconds: float) -> dict[str, Any]:
    """The whole path with preprocessing and inference at the same time; one entry per batch in every list."""
    scheduled: deque[int] = deque()
    pending: deque[Any] = deque()
    rows: dict[str, list[int]] = {name: [] for name in ("wait_ns", "launch_ns", "answer_ns", "latency_ns", "batch_ns")}
    answers: list[tuple[int, int]] = []

    def schedule() -> None:
        scheduled.append(perf_counter_ns())
        pipeline.schedule_run()

    def take() -> None:
        begun, index, answer, outputs = pending.popleft()
        best = consumer.finish(answer)
        rows["latency_ns"].append(perf_counter_ns() - begun)
        answers.extend(zip(index, best.tolist(), strict=True))
        del outputs  # its memory goes back to DALI only now, when the answer is there

    def batch() -> int:
        started = perf_counter_ns()
        outputs = pipeline.share_outputs(cuda_stream=stream) if stream is not None else pipeline.share_outputs()
        ready = perf_counter_ns()
        index = np.asarray(outputs[1].as_cpu().as_tensor()).ravel().tolist()
        pending.append((scheduled.popleft(), index, consumer.launch(outputs[0].as_tensor()), outputs))
        launched = perf_counter_ns()
        pipeline.release_outputs()
        schedule()
        while len(pending) > (IN_FLIGHT if stream is not None else 0):
            take()
        rows["wait_ns"].append(ready - started)
        rows["launch_ns"].append(launched - ready)
        rows["answer_ns"].append(perf_counter_ns() - launched)
        return ready

    def settled() -> None:
        answers.clear()
        for values in rows.values():
            values.clear()

    for _ in range(plan.prefetch):
        schedule()
    used = os.times()
    found = timed(batch, seconds, prefetched=plan.prefetch + IN_FLIGHT + 1, settled=settled)
    after = os.times()
    busy_s = after.user + after.system - used.user - used.system
    elapsed_s = after.elapsed - used.elapsed
    while pending:
        take()
    count = len(found["batch_ns"])
    kept = {name: values[:count] for name, values in rows.items() if name != "batch_ns"}
    return {**kept, "batch_ns": found["batch_ns"], "cpu_share": busy_s / elapsed_s / cores(), "answers": answers}


def _checked(
    answers: list[tuple[int, int]], session: Session, paths: list[Path], transform: Transform, plan: DaliPlan
) -> dict[str, int]:
    """Holds answers of the timed run against the reference preprocessing through the same session."""
    latest = dict(answers)
    chosen = sorted(latest)[:: max(1, len(latest) // CHECKED)][:CHECKED]
    name, spec = session.outputs[0].name, session.inputs[0]
    rows = [paths[index] for index in chosen]
    padded = rows + rows[-1:] * (-len(rows) % plan.batch_size)
    found: list[int] = []
    for batch in batches(padded, transform, plan.batch_size, threads=cores()):
        scores = session.run({spec.name: batch.astype(spec.dtype)})[name]
        found += np.argmax(scores.reshape(len(scores), -1), axis=1).tolist()
    equal = sum(latest[index] == best for index, best in zip(chosen, found[: len(chosen)], strict=True))
    return {"answers": len(chosen), "equal": equal, "classes": len(set(found[: len(chosen)]))}


if __name__ == "__main__":
    main(*sys.argv[1:])
