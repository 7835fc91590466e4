"""The profiled process: `python -m optpipe.trace.profiled_worker JOB.json` runs one stage with its ranges marked.

It warms up outside the measured range, times the same iterations without a recording, opens the measured range, and writes
its results, or its error, to the job's result file.
"""

import faulthandler
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from optpipe.backends.registry import BACKENDS
from optpipe.core.card import card_from_file
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import OptpipeError, StageError
from optpipe.core.events import ProgressStep, SilentListener
from optpipe.core.records import json_from_record, read_record
from optpipe.measure.trials import time_calls
from optpipe.trace.graph import ClockAnchor
from optpipe.trace.nsys import CAPTURE_RANGE, ITERATION_RANGE, LAYERS_RANGE, MEASURED_RANGE, Stage, mark_range
from optpipe.trace.record import (
    INPUTS,
    JOB,
    LOG,
    RESULT,
    BuildJob,
    InferenceJob,
    PreprocessJob,
    WorkerJob,
    WorkerResult,
)
from optpipe.trace.roofline import measure_cpu_peaks, measure_gpu_peaks
from optpipe.workspace.file_names import CARD
from optpipe.workspace.store import Store

_WARM_UP_S = 0.3
"""Clocks, caches, and thread pools settle by time, not by count."""
_SETTLING = 3
"""Iterations between the start of a recording and the first that counts."""
_CPU_THREADS = 2


def main(job_file: str) -> None:
    """Runs the job, writes its result file, and exits with the status of its error."""
    job = read_record(Path(job_file), WorkerJob)
    log = (job.scratch / LOG).open("w", encoding="utf-8")
    faulthandler.enable(log)
    try:
        result = run_job(job)
    except OptpipeError as error:
        result = WorkerResult(error=str(error), exit_status=int(error.exit_status))
    except Exception:
        import traceback

        traceback.print_exc(file=log)
        log.flush()
        raise
    (job.scratch / RESULT).write_bytes(json_from_record(result))
    sys.exit(result.exit_status)


def run_job(job: WorkerJob) -> WorkerResult:
    if job.build is not None:
        return _run_build(job.build, job.scratch / "store")
    if job.preprocess is not None:
        return WorkerResult(_measure(_make_preprocess_iteration(job.preprocess), job))
    if job.inference is not None:
        return _run_inference(job.inference, job)
    raise StageError(f"{job.scratch / JOB} names no work")


class _MarkingListener(SilentListener):
    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[ProgressStep]:
        """Opens a range for the step's stage, and one for its name inside."""
        word = name.split()[0]  # the graph of a precision belongs to stage `quantize`
        stage = f"optpipe.{Stage.QUANTIZE if word == 'graph' else word}"
        with mark_range(stage), mark_range(name), super().step(name, total) as step:
            yield step


def _run_build(job: BuildJob, workspace: Path) -> WorkerResult:
    """Exports, quantizes, and builds in a new store, so that nothing is cached."""
    import onnx  # noqa: F401
    import torch  # noqa: F401

    from optpipe.build.build import BuildPlan, build_model
    from optpipe.models.export.model import Model
    from optpipe.models.sources.resolve import source_from_text

    model = Model(source_from_text(job.model, job.shapes), job.weights, job.batch, job.shapes)
    plan = BuildPlan(
        precisions=job.precisions,
        backends=tuple(BACKENDS[name] for name in job.backends),
        named=False,
        device=job.device,
        calibration=job.calibration,
        options=job.options,
        truncate=job.truncate,
    )
    with mark_range(CAPTURE_RANGE), mark_range(MEASURED_RANGE):
        result = build_model(model, plan, Store(workspace), _MarkingListener())
    if not result.artifacts:
        why = "; ".join(each.reason for each in (*result.failed, *result.skipped))
        raise StageError(f"no artifact was built: {why}")
    return WorkerResult()


def _run_inference(work: InferenceJob, job: WorkerJob) -> WorkerResult:
    """Each iteration launches once and waits for the outputs."""
    store = Store(work.workspace)
    entry = store.verify_entry(store.find(work.artifact, ArtifactInfo))
    inputs = dict(np.load(job.scratch / INPUTS))
    on_gpu = work.device == "cuda"
    stream: AbstractContextManager[Any] = nullcontext()
    if on_gpu:  # ONNX Runtime uses the stream that is current when it loads
        import torch

        stream = torch.cuda.stream(torch.cuda.Stream())
    with stream, BACKENDS[work.backend].load(entry.path, entry.info, work.options) as session:
        binding = session.bind(inputs)
        synchronize = _make_synchronizer(on_gpu=on_gpu)

        def iteration() -> None:
            binding.launch()
            synchronize()

        anchors: list[ClockAnchor] = []
        with BACKENDS[work.backend].layer_times(
            entry.path, entry.info, work.options, binding.inputs, inputs, mark_range, job.scratch
        ) as layers:
            unprofiled_ns = _measure(iteration, job, layers.iteration, anchors)
        threads = int(work.options.get("threads", 0)) or None
        first = anchors[0].before_ns if anchors else 0
        return WorkerResult(
            unprofiled_ns,
            measure_gpu_peaks() if on_gpu else measure_cpu_peaks(threads),
            layers.program,
            layers.layer_ns,
            tuple(run for run in layers.node_runs if run.start_ns >= first),
            tuple(anchors) if layers.node_runs else (),
        )


def _make_preprocess_iteration(job: PreprocessJob) -> Callable[[], None]:
    """Runs a batch of a DALI pipeline that reads and decodes the images, or of the CPU reference without DALI."""
    import torch

    transform = card_from_file(Store(job.workspace).find(job.model).file(CARD)).transform
    assert transform is not None
    if job.plan is None:
        from optpipe.models.inputs.images import preprocess_batches

        first = job.images[: job.batch_size]

        def decode() -> None:
            next(preprocess_batches(first, transform, job.batch_size, threads=_CPU_THREADS))

        return decode
    from optpipe.preprocess.dali_pipeline import make_reading_pipeline

    pipeline = make_reading_pipeline(job.images, transform, job.plan)
    synchronize = _make_synchronizer(on_gpu=torch.cuda.is_available() and job.plan.device == "gpu")

    def iteration() -> None:
        pipeline.run()
        synchronize()

    return iteration


def run_anchored(iteration: Callable[[], None]) -> ClockAnchor:
    """Runs one iteration in its range and reads the system clock on both sides of both its ends."""
    before_ns = time.time_ns()
    with mark_range(ITERATION_RANGE):
        entered_ns = time.time_ns()
        iteration()
        leaving_ns = time.time_ns()
    return ClockAnchor(before_ns, entered_ns, leaving_ns, time.time_ns())


def _measure(
    iteration: Callable[[], None],
    job: WorkerJob,
    by_layers: Callable[[], None] | None = None,
    anchors: list[ClockAnchor] | None = None,
) -> float:
    """Warms up, times, records, and last records `by_layers`; returns the median of the timed iterations in ns."""
    deadline = time.perf_counter() + _WARM_UP_S
    warmed = 0
    while warmed < job.warm_up or time.perf_counter() < deadline:
        iteration()
        warmed += 1
    times = [end - begun for begun, _, end in islice(time_calls(iteration), job.iterations)]
    with mark_range(CAPTURE_RANGE):
        for _ in range(_SETTLING):
            iteration()
        with mark_range(MEASURED_RANGE):
            for _ in times:
                with mark_range(ITERATION_RANGE):
                    iteration()
        if by_layers is not None and anchors is not None:
            with mark_range(LAYERS_RANGE):
                anchors += [run_anchored(by_layers) for _ in range(_SETTLING)]
    return statistics.median(times)


def _make_synchronizer(*, on_gpu: bool) -> Callable[[], None]:
    if not on_gpu:
        return lambda: None
    import torch

    return lambda: torch.cuda.current_stream().synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
