"""The profiled process: `python -m optpipe.profile.profiled_worker JOB.json` runs one stage with its ranges marked.

It warms up outside the measured range, times the same iterations without a recording, opens `measure_load`, and
writes what it found out, or its own error, to the job's result file: the parent then never has to guess from nsys.
"""

import faulthandler
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from optpipe.core.events import ProgressStep, SilentListener
from optpipe.errors import OptpipeError, StageError
from optpipe.profile.layers_worker import LayerRecorder, record_layers
from optpipe.trace.ranges import (
    CAPTURE_RANGE,
    ITERATION_RANGE,
    LAYERS_RANGE,
    MEASURED_RANGE,
)
from optpipe.trace.recording.annotate import mark_range

WARM_UP_S = 0.3
"""Clocks, caches and thread pools settle by time, not by count."""
SETTLING = 3
"""Iterations between the beginning of a recording and the first that counts."""
STAGE_RANGES = {
    "export": "optpipe.export",
    "graph": "optpipe.quantize",
    "build": "optpipe.build",
    "verify": "optpipe.verify",
}
"""The first word of a build step's name to the range that marks it; `compute_reference` and others keep their own name."""


def main(job_file: str) -> None:
    """Runs the job and leaves its result file; the exit status is the error's where there is one."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    log = Path(job["log"]).open("w", encoding="utf-8")  # noqa: SIM115
    faulthandler.enable(log)
    result = Path(job["result"])
    try:
        with _record_with_torch(job):
            found = STAGE_RUNNERS[job["stage"]](job)
        result.write_text(json.dumps(found), encoding="utf-8")
    except OptpipeError as error:
        result.write_text(json.dumps({"error": str(error), "exit_status": int(error.exit_status)}), encoding="utf-8")
        sys.exit(int(error.exit_status))
    except Exception:
        import traceback

        traceback.print_exc(file=log)
        log.flush()
        raise


@contextmanager
def _record_with_torch(job: Mapping[str, Any]) -> Iterator[None]:
    """With `--tracer torch` this process records itself; the measured range is cut out afterwards."""
    target = job.get("torch_trace")
    if not target:
        yield
        return
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=False, acc_events=False) as profiler:
        yield
    profiler.export_chrome_trace(target)


class _MarkingListener(SilentListener):
    """Hears of a build's steps and marks each as a range."""

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[ProgressStep]:
        """A range for the step, named after its stage, with the step's own name inside."""
        with (
            mark_range(STAGE_RANGES.get(name.split()[0], f"optpipe.{name.split()[0]}")),
            mark_range(name),
            super().step(name, total) as step,
        ):
            yield step


def _run_build(job: Mapping[str, Any]) -> dict[str, Any]:
    """Export, precision and build from the beginning, in a scratch store that nothing is answered from."""
    import onnx  # noqa: F401
    import torch  # noqa: F401

    from optpipe.backends.registry import BACKENDS
    from optpipe.build.build import BuildPlan, build_model
    from optpipe.core.precision import precisions_from_text
    from optpipe.core.tensors import batch_range_from_text, shapes_from_text
    from optpipe.core.weights import weights_from_text
    from optpipe.export.model import Model
    from optpipe.sources.resolve import source_from_text
    from optpipe.workspace.store import Store

    shapes = dict(shapes_from_text(each) for each in job["shapes"])
    model = Model(
        source_from_text(job["model"], shapes),
        weights_from_text(job["weights"], job["seed"]),
        batch_range_from_text(job["batch"]) if job["batch"] else None,
        shapes,
    )
    plan = BuildPlan(
        precisions=precisions_from_text(job["precision"]),
        backends=tuple(BACKENDS[name] for name in job["backends"]),
        named=False,
        device=job["device"],
        calibration=Path(job["calibration"]) if job["calibration"] else None,
        options=job["options"],
    )
    listener = _MarkingListener()
    with mark_range(CAPTURE_RANGE), mark_range(MEASURED_RANGE):
        result = build_model(model, plan, Store(Path(job["scratch"])), listener)
    if not result.artifacts:
        why = "; ".join(each.reason for each in (*result.failed, *result.skipped))
        raise StageError(f"no artifact was built: {why}")
    return {"warnings": listener.warnings, "steps": {each.name: each.seconds for each in result.stages}}


def _run_inference(job: Mapping[str, Any]) -> dict[str, Any]:
    """One artifact at one batch size: every iteration launches once and waits for the answer."""
    import numpy as np

    from optpipe.backends.registry import BACKENDS
    from optpipe.workspace.store import Store

    store = Store(Path(job["workspace"]))
    entry = store.verify_entry(store.find(job["artifact"]))
    inputs = dict(np.load(job["inputs"]))
    on_gpu = job["device"] == "cuda"
    with (
        _open_stream(on_gpu=on_gpu),
        BACKENDS[job["backend"]].load(entry.path, entry.info, job["device"], job["options"]) as session,
    ):
        binding = session.bind(inputs)
        synchronize = _make_synchronizer(on_gpu=on_gpu)

        def iteration() -> None:
            binding.launch()
            synchronize()

        with record_layers(entry, binding.inputs, inputs, job) as layers:
            timed = _measure(iteration, job, layers)
        peaks = _measure_peaks(job) if job.get("peaks") else None
    return {**timed, "peaks": peaks, **layers.found}


def _run_preprocess(job: Mapping[str, Any]) -> dict[str, Any]:
    """Batches of a DALI pipeline that reads and decodes the images, or of the CPU reference where DALI is missing."""
    import torch

    from optpipe.core.transform import Transform

    transform = Transform.from_dict(job["transform"])
    paths = [Path(path) for path in job["images"]]
    if job["implementation"] == "dali":
        from optpipe.preprocess.dali.pipeline import DaliPlan, make_reading_pipeline

        plan = DaliPlan(**job["plan"])
        pipeline = make_reading_pipeline(paths, transform, plan)
        synchronize = _make_synchronizer(on_gpu=torch.cuda.is_available() and plan.device == "gpu")

        def iteration() -> None:
            pipeline.run()
            synchronize()
    else:
        from optpipe.inputs.images import preprocess_batches

        size = int(job["batch_size"])

        def iteration() -> None:
            next(iter(preprocess_batches(paths[:size], transform, size, threads=int(job["threads"]))))

    return _measure(iteration, job)


def _measure(
    iteration: Callable[[], None], job: Mapping[str, Any], layers: LayerRecorder | None = None
) -> dict[str, Any]:
    """Warm-up, the same without a recording for comparison, then the recorded iterations, and last the layers' own."""
    deadline = time.perf_counter() + WARM_UP_S
    warmed = 0
    while warmed < int(job["warm_up"]) or time.perf_counter() < deadline:
        iteration()
        warmed += 1
    times = []
    for _ in range(int(job["iterations"])):
        started = time.perf_counter_ns()
        iteration()
        times.append(time.perf_counter_ns() - started)
    with mark_range(CAPTURE_RANGE):
        for _ in range(SETTLING):
            iteration()
        with mark_range(MEASURED_RANGE):
            for _ in times:
                with mark_range(ITERATION_RANGE):
                    iteration()
        if layers is not None and layers.iteration is not None:
            with mark_range(LAYERS_RANGE):
                for _ in range(SETTLING):
                    layers.run_marked()
    return {"unprofiled_iteration_ns": statistics.median(times), "iterations": len(times), "warm_up": warmed}


def _open_stream(*, on_gpu: bool) -> AbstractContextManager[Any]:
    """A stream of its own on a GPU: ONNX Runtime keeps the one that is current when it loads."""
    from contextlib import nullcontext

    if not on_gpu:
        return nullcontext()
    import torch

    stream: AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.Stream())
    return stream


def _make_synchronizer(*, on_gpu: bool) -> Callable[[], None]:
    if not on_gpu:
        return lambda: None
    import torch

    return lambda: torch.cuda.current_stream().synchronize()


def _measure_peaks(job: Mapping[str, Any]) -> dict[str, Any]:
    from dataclasses import asdict

    from optpipe.trace.layers.peaks import measure_cpu_peaks, measure_gpu_peaks

    if job["device"] == "cuda":
        return asdict(measure_gpu_peaks())
    return asdict(measure_cpu_peaks(int(job["options"].get("threads", 0)) or None))


STAGE_RUNNERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "build": _run_build,
    "inference": _run_inference,
    "preprocess": _run_preprocess,
}

if __name__ == "__main__":
    main(sys.argv[1])
