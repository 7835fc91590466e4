"""Files to predictions in one process: `python -m optpipe.preprocess.end_to_end.end_to_end_worker FOLDER`.

DALI prepares the next batches while the artifact computes this one. On a GPU the pipeline's tensor is given to the
runtime where it lies (DLPack), ordered by the stream on which both work; the top classes come back through pinned memory.
Each part is measured alone, in the same process, so that overlap can be judged.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from optpipe.backends.base import Session
from optpipe.backends.registry import BACKENDS
from optpipe.core.entries import ArtifactInfo
from optpipe.core.transform import Transform
from optpipe.measure.worker.jobs import serve_jobs
from optpipe.models.inputs.images import preprocess_batches
from optpipe.preprocess.dali.pipeline import make_bytes_pipeline, make_reading_pipeline
from optpipe.preprocess.dali.processes import HARDWARE_QUEUES
from optpipe.preprocess.end_to_end.consumers import consumer_from_session, open_stream
from optpipe.preprocess.end_to_end.loops import Rate, measure_inference_rate, measure_pipeline_rate, run_overlapped
from optpipe.preprocess.end_to_end.records import EndToEndJob, EndToEndMeasurement, PartRates, PredictionCheck
from optpipe.workspace.environment import count_cores
from optpipe.workspace.store import Store

CHECKED_PREDICTIONS = 32
"""Predictions of the timed run that are compared with the reference's."""
PART_S = 1.5
"""Measuring time of each part alone, before and after the whole."""


def measure_job(job: EndToEndJob) -> EndToEndMeasurement:
    """All measurements of one artifact."""
    plan, transform, paths = job.plan, Transform.from_dict(job.transform), [Path(path) for path in job.paths]
    entry, part_s = Store(Path(job.workspace)).find(job.artifact, ArtifactInfo), min(PART_S, job.seconds)
    backend, device = BACKENDS[entry.info.backend], entry.info.device
    with open_stream(device) as stream, backend.load(entry.path, entry.info, job.options) as session:
        consumer = consumer_from_session(session, plan, transform, stream)

        def measure_alone() -> tuple[Rate, Rate]:
            pipeline = make_reading_pipeline(paths, transform, plan)
            return measure_pipeline_rate(pipeline, plan, part_s), measure_inference_rate(
                consumer, plan, transform, part_s
            )

        read = measure_pipeline_rate(make_bytes_pipeline(paths, plan), plan, part_s / 2)
        decoding = make_reading_pipeline(paths, transform, plan, decode_only=True)
        decode = measure_pipeline_rate(decoding, plan, part_s)
        before = measure_alone()
        whole = run_overlapped(make_reading_pipeline(paths, transform, plan), consumer, plan, stream, job.seconds)
        after = measure_alone()
        check = _check_predictions(whole.predictions, session, paths, transform, plan.batch_size)
    # the better of two: a part that was disturbed once must not make the overlap look good
    preprocess, inference = (max(pair, key=lambda rate: rate.images_per_s) for pair in zip(before, after, strict=True))
    return EndToEndMeasurement(
        whole.batches,
        PartRates(read.images_per_s, decode.images_per_s, preprocess.images_per_s, inference.images_per_s),
        launch_share=min(before[1].launch_share, after[1].launch_share),
        cpu_share=whole.rate.cpu_cores / count_cores(),
        other_cpu_cores=whole.rate.other_cpu_cores,
        handover=consumer.handover,
        environment={name: os.environ.get(name) for name in HARDWARE_QUEUES},
        check=check,
    )


def _check_predictions(
    predictions: Sequence[tuple[int, int]], session: Session, paths: Sequence[Path], transform: Transform, size: int
) -> PredictionCheck:
    """Compares predictions of the timed run with those of the reference preprocessing, through the same session."""
    latest = dict(predictions)
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
