"""From the raw times of one artifact to its figures: rate, latency, what limits it, and whether its predictions hold."""

from optpipe.core.verdict import Verdict
from optpipe.preprocess.dali.pipeline import DaliPlan
from optpipe.preprocess.end_to_end.records import (
    EndToEndBottleneck,
    EndToEndFigures,
    EndToEndMeasurement,
    OverlappedBatches,
    PredictionCheck,
    Timeline,
)
from optpipe.preprocess.throughput.windows import compute_images_per_s, compute_rate_interval

NEAR = 1.15
"""A part whose own rate is within this factor of the whole's is what the whole waits for."""
BUSY = 0.9
"""Share of all cores in use from which the CPU counts as the limit."""
ENQUEUE_BOUND = 0.8
"""Launching takes this share of inference from which the launches are the limit (trtexec's rule)."""
REQUIRED_AGREEMENT = 0.9
"""The timed run's predictions must equal the reference's for this share of those checked; precision may flip a few."""


def compute_figures(measured: EndToEndMeasurement, plan: DaliPlan) -> EndToEndFigures:
    """The figures of one measurement."""
    batches = measured.batches
    images_per_s = compute_images_per_s(batches.batch_ns, plan.batch_size)
    return EndToEndFigures(
        images_per_s=images_per_s,
        ci=compute_rate_interval(batches.batch_ns, 1, plan.batch_size),
        latency_p50_ns=_compute_percentile(batches, 50.0),
        latency_p99_ns=_compute_percentile(batches, 99.0),
        parts_images_per_s=measured.parts,
        of_slower_part=images_per_s / measured.parts.slower,
        timeline=_compute_timeline(batches),
        cpu_share=measured.cpu_share,
        other_cpu_cores=measured.other_cpu_cores,
        handover=measured.handover,
        environment=measured.environment if plan.device == "gpu" else {},
        bottleneck=find_bottleneck(images_per_s, measured, plan),
        check=measured.check,
    )


def judge_predictions(check: PredictionCheck) -> Verdict:
    """FAIL where the timed run predicts other classes; INCONCLUSIVE where all are one class."""
    if check.equal < REQUIRED_AGREEMENT * check.predictions:
        return Verdict.FAIL
    return Verdict.PASS if check.classes > 1 else Verdict.INCONCLUSIVE


def _compute_percentile(batches: OverlappedBatches, percent: float) -> float | None:
    import numpy as np

    from optpipe.stats.percentiles import count_samples_needed, find_order_statistic

    ordered = np.sort(np.asarray(batches.latency_ns, float))
    return find_order_statistic(ordered, percent) if len(ordered) >= count_samples_needed(percent) else None


def _compute_timeline(batches: OverlappedBatches) -> Timeline:
    total = sum(batches.batch_ns)
    wait, launch, output = (sum(each) / total for each in (batches.wait_ns, batches.launch_ns, batches.output_ns))
    return Timeline(wait, launch, output, max(0.0, 1 - wait - launch - output))


def find_bottleneck(images_per_s: float, measured: EndToEndMeasurement, plan: DaliPlan) -> EndToEndBottleneck:
    """What limits the whole, by the rates of its parts alone and the CPU's load."""
    parts, on_gpu = measured.parts, plan.device == "gpu"
    load = f"{measured.cpu_share:.0%} of CPU capacity in use"
    if parts.read <= NEAR * images_per_s:
        return EndToEndBottleneck("I/O", f"reading alone runs at {parts.read:,.0f} images/s")
    if parts.preprocess <= parts.inference:
        return _find_preprocessing_bottleneck(measured, plan, load)
    if not on_gpu and measured.cpu_share >= BUSY:
        return EndToEndBottleneck("CPU", f"{load}; inference alone runs at {parts.inference:,.0f} images/s")
    if on_gpu and measured.launch_share >= ENQUEUE_BOUND:
        return EndToEndBottleneck("launch", f"kernel launches take {measured.launch_share:.0%} of inference time")
    return EndToEndBottleneck(
        "GPU" if on_gpu else "CPU",
        f"inference alone runs at {parts.inference:,.0f} images/s, preprocessing at {parts.preprocess:,.0f}",
    )


def _find_preprocessing_bottleneck(measured: EndToEndMeasurement, plan: DaliPlan, load: str) -> EndToEndBottleneck:
    parts = measured.parts
    alone = f"preprocessing alone runs at {parts.preprocess:,.0f} images/s, decoding at {parts.decode:,.0f}"
    decodes = parts.decode <= NEAR * parts.preprocess
    if plan.device == "cpu" or measured.cpu_share >= BUSY:
        return EndToEndBottleneck("CPU", f"{alone}; {load}")
    if plan.decode == "cpu":
        return EndToEndBottleneck("CPU" if decodes else "copy", f"{alone}; {load}")
    limit = "the decoder" if decodes else "processing after decoding"
    return EndToEndBottleneck("GPU", f"{alone}: {limit} is the limit; {load}")
