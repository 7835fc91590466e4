"""Files to answers in one process: `python -m optpipe.end_to_end.end_to_end_worker FOLDER`.

DALI prepares the next batches while the artifact answers this one. On a GPU the pipeline's tensor is given to the
runtime where it lies (DLPack), ordered by the stream on which both work; the top answers come back through pinned memory.
On a CPU the cores are divided between the two. Each part is measured alone, in the same process, so that overlap can be
judged.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from optpipe.backends.base import Session
from optpipe.backends.onnxruntime import CPU_OPTIONS
from optpipe.backends.registry import BACKENDS, resolve_effective_options
from optpipe.core.transform import Transform
from optpipe.end_to_end.consumers import HostConsumer, consumer_from_session, open_stream
from optpipe.end_to_end.dividing import find_core_split
from optpipe.end_to_end.loops import (
    OverlappedRun,
    measure_inference_rate,
    measure_pipeline_rate,
    run_overlapped,
)
from optpipe.inputs.images import preprocess_batches
from optpipe.preprocess.dali.pipeline import DaliPlan, make_bytes_pipeline, make_reading_pipeline
from optpipe.preprocess.throughput.processes import QUEUES, serve_jobs
from optpipe.workspace.environment import count_cores

CHECKED_OUTPUTS = 32
"""So many answers of the timed run are compared with the reference's."""
PART_S = 1.5
"""Each part alone is measured for so long, before and after the whole."""


def main(folder: str) -> None:
    """Answers the jobs in `folder`."""
    serve_jobs(Path(folder), measure_job)


@dataclass(frozen=True, slots=True)
class _Job:
    """One artifact with one plan."""

    asked: Mapping[str, Any]
    transform: Transform
    plan: DaliPlan
    paths: list[Path]
    part_s: float

    def load(self, options: Mapping[str, Any]) -> Session:
        """The artifact with the options that were asked for, and `options` over them."""
        asked = self.asked
        merged = {**asked["options"], **options}
        return BACKENDS[asked["backend"]].load(Path(asked["directory"]), asked["info"], asked["device"], merged)


def measure_job(asked: Mapping[str, Any]) -> dict[str, Any]:
    """All measurements of one artifact with one plan."""
    transform, plan = Transform.from_dict(asked["transform"]), DaliPlan(**asked["plan"])
    job = _Job(asked, transform, plan, [Path(path) for path in asked["paths"]], min(PART_S, asked["seconds"]))
    divides = asked["backend"] == "onnxruntime" and asked["device"] == "cpu"
    found, whole = _measure_on_shared_cores(job) if divides else _measure_as_requested(job)
    return {
        **whole.rows,
        "cpu_share": whole.rate.cpu_s * whole.rate.images_per_s / count_cores(),
        "other_cpu_cores": whole.rate.other_cpu_cores,
        "environment": {name: os.environ.get(name) for name in QUEUES},
        **found,
    }


def _measure_sources(job: _Job) -> dict[str, float]:
    """Images per second of what comes before the parts: reading alone, and decoding."""
    read = make_bytes_pipeline(job.paths, job.plan)
    decode = make_reading_pipeline(job.paths, job.transform, job.plan, decode_only=True)
    return {
        "read": measure_pipeline_rate(read, job.plan, job.part_s / 2).images_per_s,
        "decode": measure_pipeline_rate(decode, job.plan, job.part_s).images_per_s,
    }


def _measure_on_shared_cores(job: _Job) -> tuple[dict[str, Any], OverlappedRun]:
    """DALI and ONNX Runtime on a CPU."""
    given = job.asked["options"]
    own = resolve_effective_options(job.asked["info"], given)
    fixed = {name: value for name, value in own.items() if name in given or value != CPU_OPTIONS[name]}
    found = find_core_split(job.load, job.paths, job.transform, job.plan, fixed, job.asked["seconds"], job.part_s)
    slower = min(found.preprocess, found.inference)
    with job.load({}) as session:
        checked = _check_outputs(found.whole, session, job)
    said = {
        "parts": {**_measure_sources(job), "preprocess": found.preprocess, "inference": found.inference},
        "sharing": found.sharing.to_dict(found.whole.rate.images_per_s, slower),
        "enqueue_share": 1.0,
        "handover": HostConsumer.handover,
        "checked": checked,
    }
    return said, found.whole


def _measure_as_requested(job: _Job) -> tuple[dict[str, Any], OverlappedRun]:
    """With one session, of which DALI fills the input."""
    plan = job.plan
    with open_stream(job.asked["device"]) as stream, job.load({}) as session:
        consumer = consumer_from_session(session, plan, job.transform, stream)

        def alone() -> tuple[float, float, float]:
            preprocess = measure_pipeline_rate(make_reading_pipeline(job.paths, job.transform, plan), plan, job.part_s)
            inference = measure_inference_rate(consumer, plan, job.transform, job.part_s)
            return preprocess.images_per_s, inference.images_per_s, inference.launch_share

        sources = _measure_sources(job)
        before = alone()
        pipeline = make_reading_pipeline(job.paths, job.transform, plan)
        whole = run_overlapped(pipeline, consumer, plan, stream, job.asked["seconds"])
        after = alone()
        checked = _check_outputs(whole, session, job)
    said = {
        # the better of two: a part that was disturbed once must not make the overlap look good
        "parts": {**sources, "preprocess": max(before[0], after[0]), "inference": max(before[1], after[1])},
        "sharing": None,
        "enqueue_share": min(before[2], after[2]),
        "handover": consumer.handover,
        "checked": checked,
    }
    return said, whole


def _check_outputs(whole: OverlappedRun, session: Session, job: _Job) -> dict[str, int]:
    """Holds answers of the timed run against the reference preprocessing through a session of the artifact."""
    latest = dict(whole.predictions)
    chosen = sorted(latest)[:: max(1, len(latest) // CHECKED_OUTPUTS)][:CHECKED_OUTPUTS]
    name, spec = session.outputs[0].name, session.inputs[0]
    rows = [job.paths[index] for index in chosen]
    size = job.plan.batch_size
    padded = rows + rows[-1:] * (-len(rows) % size)
    found: list[int] = []
    for batch in preprocess_batches(padded, job.transform, size, threads=count_cores()):
        scores = session.run({spec.name: batch.astype(spec.dtype)})[name]
        found += np.argmax(scores.reshape(len(scores), -1), axis=1).tolist()
    equal = sum(latest[index] == best for index, best in zip(chosen, found[: len(chosen)], strict=True))
    return {"answers": len(chosen), "equal": equal, "classes": len(set(found[: len(chosen)]))}


if __name__ == "__main__":
    main(*sys.argv[1:])
