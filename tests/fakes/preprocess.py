"""A preprocess run's record, as made-up figures."""

from optpipe.core.entries import OutputError
from optpipe.core.transform import Decode, Pack, Transform
from optpipe.core.verdict import Verdict
from optpipe.preprocess.dali_pipeline import DaliPlan
from optpipe.preprocess.proof import (
    Accuracy,
    ImagesRecord,
    ParityRecord,
    PipelineRecord,
    PreprocessRecord,
    Proof,
    RefusedImage,
    StepDifference,
    WorstImage,
    agreement_from_counts,
)
from optpipe.preprocess.throughput import (
    BatchTimes,
    LoaderPlan,
    Throughput,
    ThroughputJob,
    record_from_throughputs,
)

CPU = DaliPlan()
TRANSFORM = Transform((Decode(), Pack(dtype="uint8")))


def preprocess_record(plan=CPU, *, proof=None, images=800, trained=True, tuned=True):
    """Of `digits`: 800 images that agree, one refused by nobody."""
    proof = proof or Proof(
        Verdict.PASS,
        "800 of 800 top-1 predictions agree, 95 % interval 99.52% to 100.00%",
        None,
        OutputError("output", 0.02, 0.001, 0.0016, 55.9, 0.99999, finite=True),
        agreement_from_counts(800, 800),
        Accuracy(0.995, 0.995),
    )
    parity = ParityRecord(
        proof,
        images,
        (
            StepDifference("decode", 0.0, 0.0, 0.0, images),
            StepDifference("resize", 0.0094, 9.0, 0.0048, images),
        ),
        far=0,
        refused=(),
        worst=(WorstImage("7/12.png", 0.31, 4.0, "worst-1.png", 32.0),),
    )
    return PreprocessRecord(
        model="digits",
        classifies=True,
        trained=trained,
        pipeline=PipelineRecord(
            "ab12", "/store/1/model.dali", "0123456789abcdef", plan, ({"step": "decode"},)
        ),
        images=ImagesRecord("/images", images, (RefusedImage("/images/bad.png", "truncated"),)),
        parity=parity,
        throughput=tuned_preprocessing(plan) if tuned else None,
        verdict=proof.verdict,
        run_dir="/runs/preprocess-1",
    )


def throughput(job, *batch_ms, error=None):
    """Of a job: for each repetition, 24 batches that took this long."""
    times = ([round(ms * 1e6) + at % 3 - 1 for at in range(24)] for ms in batch_ms)
    return Throughput(job, tuple(BatchTimes(tuple(each)) for each in times), error)


def tuned_preprocessing(plan):
    """A DataLoader with four workers that wins over none, and DALI at twice its rate."""
    loaders = [
        ThroughputJob((), TRANSFORM, 1.0, loader=LoaderPlan(count, 32, "cpu")) for count in (4, 0)
    ]
    dali = ThroughputJob((), TRANSFORM, 1.0, plan=plan)
    tried = (
        throughput(loaders[0], 20),
        throughput(loaders[1], error="out of memory"),
        throughput(dali, 10),
    )
    return record_from_throughputs(
        tried, throughput(loaders[0], 20, 22, 20, 22), throughput(dali, 10, 11, 10.001, 11.001)
    )
