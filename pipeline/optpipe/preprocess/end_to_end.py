"""`optpipe bench --from-images`: measures each artifact from a folder of images to predictions, and names its bottleneck."""

import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import polars as pl

from optpipe.backends.base import Session
from optpipe.backends.registry import (
    load_artifact,
    require_known_options,
    verify_for_loading,
    warn_of_unused_options,
)
from optpipe.core import torch
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError, ExitStatus
from optpipe.core.events import Listener
from optpipe.core.process import serve_jobs
from optpipe.core.records import json_from_record, read_record
from optpipe.core.transform import Transform
from optpipe.core.verdict import Verdict, combine_verdicts
from optpipe.core.wording import Argument, Call
from optpipe.models.artifacts.lookup import StoredArtifact
from optpipe.models.artifacts.model_names import format_model_argument
from optpipe.models.artifacts.profile_sizes import choose_batch_sizes
from optpipe.models.inputs.images import preprocess_batches
from optpipe.models.inputs.task_data import read_images
from optpipe.preprocess.dali_pipeline import (
    HARDWARE_QUEUES,
    DaliPlan,
    make_bytes_pipeline,
    make_reading_pipeline,
    require_dali,
    run_dali_jobs,
)
from optpipe.preprocess.preprocess import MAX_SECONDS, choose_dali_plan, require_image_transform
from optpipe.preprocess.proof import PreprocessRecord
from optpipe.preprocess.throughput import (
    LIMIT_S,
    PATIENCE,
    BatchTimes,
    compute_images_per_s,
    compute_rate_interval,
    is_host_loaded,
    time_batches,
    time_pipeline,
    warm_page_cache,
    warn_about_other_load,
)
from optpipe.stats.paired import find_best_classes
from optpipe.stats.percentiles import count_samples_needed, find_order_statistic
from optpipe.workspace.environment import count_cores
from optpipe.workspace.file_names import END_TO_END, PREPROCESSING
from optpipe.workspace.files import write_bytes, write_parquet
from optpipe.workspace.runs import OpenRun, finish_run, list_runs, open_run
from optpipe.workspace.store import Store


@dataclass(frozen=True, slots=True)
class EndToEndJob:
    workspace: Path
    artifact: str
    paths: tuple[Path, ...]
    transform: Transform
    plan: DaliPlan
    options: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True, slots=True)
class PartRates:
    read: float
    decode: float
    preprocess: float
    inference: float

    @property
    def slower(self) -> float:
        return min(self.preprocess, self.inference)


@dataclass(frozen=True, slots=True)
class EndToEndFigures:
    images_per_s: float
    ci: tuple[float, float] | None
    latency_p50_ns: float | None
    """None if there are too few batches for the percentile."""
    latency_p99_ns: float | None
    parts_images_per_s: PartRates
    of_slower_part: float
    """The overlapped rate over the rate of the slower part alone: at most 1, apart from noise."""
    cpu_share: float
    """Share of all cores, while both parts ran."""
    other_cpu_cores: float
    handover: str
    """Copies between DALI and the runtime."""
    environment: Mapping[str, str | None]
    """Variables of the process on a GPU, for the user's process."""
    bottleneck: str
    """The limit of the whole path: `I/O`, `CPU`, `copy`, `GPU` or `launch`."""
    reason: str
    checked: int
    """Predictions of the timed run that were compared with those of the reference preprocessing with the same artifact."""
    equal: int
    classes: int
    """Different classes in the reference's predictions."""

    @property
    def verdict(self) -> Verdict:
        """FAIL if the timed run predicts other classes; INCONCLUSIVE if all are one class."""
        if self.equal < REQUIRED_AGREEMENT * self.checked:
            return Verdict.FAIL
        return Verdict.PASS if self.classes > 1 else Verdict.INCONCLUSIVE


@dataclass(frozen=True, slots=True)
class EndToEndResult:
    artifact: str
    label: str
    plan: DaliPlan
    options: Mapping[str, Any]
    verdict: Verdict
    figures: EndToEndFigures | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EndToEndRecord:
    """`end-to-end.json`."""

    folder: str
    images: int
    results: tuple[EndToEndResult, ...]
    verdict: Verdict
    run_dir: str
    warnings: tuple[str, ...] = ()


NEAR = 1.15
"""A part is the bottleneck if its rate alone is within this factor of the whole's."""
BUSY = 0.9
"""Share of all cores in use from which the CPU is the bottleneck."""
ENQUEUE_BOUND = 0.8
"""Share of launching in inference from which the launches are the bottleneck (trtexec's rule)."""
REQUIRED_AGREEMENT = 0.9
"""Share of the checked predictions that must equal the reference's; precision may flip a few."""


def compute_figures(
    batches: BatchTimes,
    parts: PartRates,
    plan: DaliPlan,
    *,
    launch_share: float,
    cpu_share: float,
    handover: str,
    environment: Mapping[str, str | None],
    check: tuple[int, int, int],
) -> EndToEndFigures:
    """`launch_share` is the share of launching in the time of inference alone; `check` is that of `_check_predictions`."""
    checked, equal, classes = check
    images_per_s = compute_images_per_s(batches.batch_ns, plan.batch_size)
    bottleneck, reason = find_bottleneck(images_per_s, parts, plan, cpu_share, launch_share)
    return EndToEndFigures(
        images_per_s=images_per_s,
        ci=compute_rate_interval(batches.batch_ns, 1, plan.batch_size),
        latency_p50_ns=_compute_percentile(batches, 50.0),
        latency_p99_ns=_compute_percentile(batches, 99.0),
        parts_images_per_s=parts,
        of_slower_part=images_per_s / parts.slower,
        cpu_share=cpu_share,
        other_cpu_cores=batches.other_cpu_cores,
        handover=handover,
        environment=environment if plan.device == "gpu" else {},
        bottleneck=bottleneck,
        reason=reason,
        checked=checked,
        equal=equal,
        classes=classes,
    )


def find_bottleneck(
    images_per_s: float, parts: PartRates, plan: DaliPlan, cpu_share: float, launch_share: float
) -> tuple[str, str]:
    """The bottleneck and the reason, by the rates of the parts alone and the CPU's load."""
    on_gpu = plan.device == "gpu"
    load, is_busy = f"{cpu_share:.0%} of CPU capacity in use", cpu_share >= BUSY
    if parts.read <= NEAR * images_per_s:
        return "I/O", f"reading alone runs at {parts.read:,.0f} images/s"
    if parts.preprocess <= parts.inference:
        alone = f"preprocessing alone runs at {parts.preprocess:,.0f} images/s, decoding at {parts.decode:,.0f}"
        decodes = parts.decode <= NEAR * parts.preprocess
        if not on_gpu or is_busy or (plan.decode == "cpu" and decodes):
            return "CPU", f"{alone}; {load}"
        if plan.decode == "cpu":
            return "copy", f"{alone}; {load}"
        return (
            "GPU",
            f"{alone}: {'the decoder' if decodes else 'processing after decoding'} is the limit; {load}",
        )
    if not on_gpu and is_busy:
        return "CPU", f"{load}; inference alone runs at {parts.inference:,.0f} images/s"
    if on_gpu and launch_share >= ENQUEUE_BOUND:
        return "launch", f"kernel launches take {launch_share:.0%} of inference time"
    why = f"inference alone runs at {parts.inference:,.0f} images/s, preprocessing at {parts.preprocess:,.0f}"
    return "GPU" if on_gpu else "CPU", why


def _compute_percentile(batches: BatchTimes, percent: float) -> float | None:
    ordered = np.sort(np.asarray(batches.latency_ns, float))
    return (
        find_order_statistic(ordered, percent)
        if len(ordered) >= count_samples_needed(percent)
        else None
    )


MAX_FILES = 4096
"""Files for a steady state, spread over the whole folder."""
NOISE = 0.05
"""Tolerance of the whole's rate over that of its slower part."""
SLOW_CPU = 5
"""Factor of the time limit on a CPU, whose batches take seconds."""


def bench_end_to_end(
    artifacts: Sequence[StoredArtifact],
    images: Path,
    store: Store,
    listener: Listener,
    *,
    batch_size: int | None,
    seconds: float,
    options: Mapping[str, Mapping[str, Any]],
) -> EndToEndRecord:
    """Measures each artifact with the DALI configuration that `optpipe preprocess` found fastest here.

    Without `batch_size` it is the tuned plan's, within the artifact's profile; `options` are runtime options by backend.

    Raises BadInputError for models without image preprocessing and for unusable images, MissingError without DALI.
    """
    if not 0 < seconds <= MAX_SECONDS:
        raise BadInputError(
            f"must be greater than 0 and at most {MAX_SECONDS:g}",
            argument=Argument("min_time", seconds),
        )
    require_known_options(options)
    require_dali()
    measured = {artifact.entry.info.backend for artifact in artifacts}
    warn_of_unused_options(options, measured, "measured", listener)
    jobs = []
    for artifact in artifacts:
        plan = choose_plan(artifact, batch_size, store, listener)
        chosen = choose_options(artifact, options)
        transform = require_image_transform(artifact.card)
        jobs.append(
            EndToEndJob(store.workspace, artifact.entry.id, (), transform, plan, chosen, seconds)
        )
    samples, _ = read_images(images, MAX_FILES, 0, listener)
    warm_page_cache(samples.paths)
    with open_run(store.workspace, "end-to-end") as run:
        results = []
        for artifact, job in zip(artifacts, jobs, strict=True):
            verify_for_loading(artifact.entry, store)
            with listener.step(f"files to predictions, {artifact.label}"):
                results.append(_measure(artifact, replace(job, paths=samples.paths), run, listener))
        record = EndToEndRecord(
            folder=str(samples.root),
            images=len(samples.paths),
            results=tuple(results),
            verdict=combine_verdicts(result.verdict for result in results),
            run_dir=str(run.path),
        )
        write_bytes(run.path / END_TO_END, json_from_record(record))
        finish_run(run, parents=tuple(artifact.entry.id for artifact in artifacts))
    return record


def choose_exit_status(record: EndToEndRecord) -> ExitStatus:
    """A failed measurement precedes a wrong prediction, which precedes an inconclusive one."""
    failed = any(result.error is not None for result in record.results)
    return ExitStatus.STAGE_FAILED if failed else record.verdict.exit_status


def choose_options(
    artifact: StoredArtifact, given: Mapping[str, Mapping[str, Any]]
) -> dict[str, bool | int | str]:
    """The artifact's runtime options with those given. Waiting threads do not spin by default.

    On a CPU, DALI and the runtime share all cores, and spinning threads hold cores that DALI could use. Raises BadInputError.
    """
    options = artifact.resolve_effective_options(given)
    if "spinning" in options and "spinning" not in artifact.given(given):
        options["spinning"] = False
    return options


def choose_plan(
    artifact: StoredArtifact, batch_size: int | None, store: Store, listener: Listener
) -> DaliPlan:
    """The newest tuned plan for this model and device with a batch size of the artifact's profile, or default settings."""
    on_gpu = artifact.entry.info.device == "cuda"
    plan = find_tuned_plan(artifact.card.name, store, gpu=on_gpu)
    if plan is None:
        plan = choose_dali_plan("mixed" if on_gpu else "cpu")
        model = format_model_argument(artifact.card.name, artifact.card.source)
        advice = "; run `" + Call("preprocess", model) + "` first for best performance"
        listener.warn(f"DALI is not tuned for {artifact.card.name} on this machine" + advice)
    wanted = batch_size or min(plan.batch_size, artifact.card.batch_range[2])
    return replace(plan, batch_size=choose_batch_sizes(artifact, [wanted])[0])


def find_tuned_plan(model: str, store: Store, *, gpu: bool) -> DaliPlan | None:
    """The fastest plan of the newest `optpipe preprocess` of `model` on this kind of device that did not FAIL, or None."""
    for run in reversed(list_runs(store.workspace, "preprocess")):
        if run.info.model != model:
            continue
        record = read_record(run.path / PREPROCESSING, PreprocessRecord)
        plan = record.throughput.dali.plan if record.throughput else None
        if (
            plan is not None
            and record.verdict is not Verdict.FAIL
            and (plan.device == "gpu") == gpu
        ):
            return plan
    return None


def describe_end_to_end_validity(figures: EndToEndFigures) -> str:
    """`VALID`, or `INVALID (loaded-host)`: known as soon as the process ends."""
    codes = []
    if is_host_loaded(figures.other_cpu_cores):
        codes.append("loaded-host")
    if figures.of_slower_part > 1 + NOISE:
        codes.append("stages disturbed when measured alone")
    return f"INVALID ({', '.join(codes)})" if codes else "VALID"


def _measure(
    artifact: StoredArtifact, job: EndToEndJob, run: OpenRun, listener: Listener
) -> EndToEndResult:
    """Measures in a new process; the raw times of batches go into the run, a failure into the result."""
    limit_s = LIMIT_S * (SLOW_CPU if job.plan.device == "cpu" else 1) + PATIENCE * job.seconds
    measured = next(run_dali_jobs(__name__, [job], tuple[BatchTimes, EndToEndFigures], limit_s))
    result = EndToEndResult(artifact.entry.id, artifact.label, job.plan, job.options, Verdict.FAIL)
    if isinstance(measured, str):
        listener.inform(f"{artifact.label}: INVALID (failed)")
        return replace(result, error=measured)
    batches, figures = measured
    listener.inform(f"{artifact.label}: {describe_end_to_end_validity(figures)}")
    raw = pl.DataFrame({"batch_ns": batches.batch_ns, "latency_ns": batches.latency_ns})
    write_parquet(run.path / f"{artifact.entry.id}.parquet", raw)
    warn_about_other_load(figures.other_cpu_cores, artifact.label, listener)
    if figures.of_slower_part > 1 + NOISE:
        problem = (
            f"{artifact.label}: {figures.of_slower_part:.2f} times as fast as its slower stage"
        )
        listener.warn(
            f"{problem}: the stages were disturbed when measured alone; repeat on an idle machine"
        )
    return replace(result, verdict=figures.verdict, figures=figures)


IN_FLIGHT = 2
"""Batches whose predictions may be outstanding on a GPU while the next is launched."""
TOP_K = 5
"""Best classes that come back from the GPU, as from a server."""


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
        return find_best_classes(launched)


class DeviceConsumer:
    in_flight = IN_FLIGHT

    def __init__(self, session: Session, shape: tuple[int, ...], stream: Any) -> None:
        self._stream = stream
        self._input, self._output = session.inputs[0], session.outputs[0].name
        self._dtype = getattr(torch, self._input.dtype)
        self._fixed = session.bind({self._input.name: np.zeros(shape, self._input.dtype)})
        self._bind_in_place = getattr(session, "bind_in_place", None)
        self._bindings: dict[int, Any] = {}
        self.handover = "none: DLPack" if self._bind_in_place else "copy on the device"

    def launch(self, tensor: Any) -> Any:
        pixels = torch.from_dlpack(tensor)
        if pixels.dtype != self._dtype:
            pixels = pixels.to(self._dtype)
        binding = self._bind(pixels)
        binding.launch()
        scores = binding.outputs[self._output].reshape(len(pixels), -1)
        best = torch.topk(scores, min(TOP_K, scores.shape[1])).indices
        host = torch.empty(best.shape, dtype=best.dtype, pin_memory=True)
        host.copy_(best, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self._stream)
        return event, host, pixels

    def _bind(self, pixels: Any) -> Any:
        if self._bind_in_place is None:
            self._fixed.inputs[self._input.name].copy_(pixels, non_blocking=True)
            return self._fixed
        address = pixels.data_ptr()
        if address not in self._bindings:
            outputs = {
                name: torch.empty_like(output) for name, output in self._fixed.outputs.items()
            }
            self._bindings[address] = self._bind_in_place({self._input.name: pixels}, outputs)
        return self._bindings[address]

    def finish(self, launched: Any) -> np.ndarray:
        event, host, _ = launched
        event.synchronize()
        return np.asarray(host[:, 0].numpy())


Consumer = HostConsumer | DeviceConsumer
"""`launch` starts the inference of a batch, whose memory must stay until `finish`, which returns the best class of each image."""


@contextmanager
def open_stream(device: str) -> Iterator[Any]:
    """On a GPU a new stream, which runtimes use if they are loaded in the block; None on the CPU."""
    if device == "cpu":
        yield None
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream


def measure_pipeline(pipeline: Any, plan: DaliPlan, seconds: float) -> float:
    return compute_images_per_s(
        time_pipeline(pipeline, plan, seconds, 1.0).batch_ns, plan.batch_size
    )


def measure_inference(
    consumer: Consumer, plan: DaliPlan, transform: Transform, seconds: float
) -> tuple[float, float]:
    """Images/s of an artifact alone on one batch in DALI's place, and the share of launching in its time."""
    values = np.random.default_rng(0).standard_normal((plan.batch_size, *transform.shape))
    tensor: Any = values.astype(transform.pack.dtype)
    if isinstance(consumer, DeviceConsumer):
        tensor = torch.from_numpy(tensor).cuda()
    pending: deque[Any] = deque()
    launch_ns: list[int] = []

    def batch() -> None:
        started = perf_counter_ns()
        pending.append(consumer.launch(tensor))
        launch_ns.append(perf_counter_ns() - started)
        while len(pending) > consumer.in_flight:
            consumer.finish(pending.popleft())

    times = time_batches(batch, seconds, consumer.in_flight + 1, patience=1.0)
    while pending:
        consumer.finish(pending.popleft())
    launching = sum(launch_ns[times.warm_up_batches :]) / sum(times.batch_ns)
    return compute_images_per_s(times.batch_ns, plan.batch_size), launching


def run_overlapped(
    pipeline: Any, consumer: Consumer, plan: DaliPlan, stream: Any, seconds: float
) -> tuple[BatchTimes, dict[int, int]]:
    """The whole path: DALI makes the next batches while the consumer computes. The second result is the best class by file index."""
    scheduled: deque[int] = deque()
    pending: deque[Any] = deque()
    taken: list[tuple[int, dict[int, int]]] = []

    def schedule() -> None:
        scheduled.append(perf_counter_ns())
        pipeline.schedule_run()

    def take() -> None:
        begun, index, launched, outputs = pending.popleft()
        best = consumer.finish(launched)
        taken.append((perf_counter_ns() - begun, dict(zip(index, best.tolist(), strict=True))))
        del outputs  # DALI may reuse its memory only now, after the predictions

    def batch() -> None:
        outputs = (
            pipeline.share_outputs(cuda_stream=stream)
            if stream is not None
            else pipeline.share_outputs()
        )
        index = np.asarray(outputs[1].as_cpu().as_tensor()).ravel().tolist()
        pending.append(
            (scheduled.popleft(), index, consumer.launch(outputs[0].as_tensor()), outputs)
        )
        pipeline.release_outputs()
        schedule()
        while len(pending) > consumer.in_flight:
            take()

    for _ in range(plan.prefetch):
        schedule()
    times = time_batches(batch, seconds, plan.prefetch + consumer.in_flight + 1)
    while pending:
        take()
    timed = taken[times.warm_up_batches - consumer.in_flight :]
    latency_ns = tuple(latency for latency, _ in timed[: len(times.batch_ns)])
    predictions = {index: best for _, predicted in timed for index, best in predicted.items()}
    return replace(times, latency_ns=latency_ns), predictions


CHECKED_PREDICTIONS = 32
"""Predictions of the timed run that are compared with the reference's."""
PART_S = 1.5
"""Seconds of each part alone, before and after the whole."""


def measure_job(job: EndToEndJob) -> tuple[BatchTimes, EndToEndFigures]:
    plan, transform, paths = job.plan, job.transform, job.paths
    store, part_s = Store(job.workspace), min(PART_S, job.seconds)
    entry = store.find(job.artifact, ArtifactInfo)
    device = entry.info.device
    with (
        open_stream(device) as stream,
        load_artifact(entry, store, job.options) as session,
    ):
        consumer: Consumer = HostConsumer(session)
        if session.device != "cpu":
            consumer = DeviceConsumer(session, (plan.batch_size, *transform.shape), stream)

        def measure_alone() -> tuple[float, tuple[float, float]]:
            pipeline = make_reading_pipeline(paths, transform, plan)
            return measure_pipeline(pipeline, plan, part_s), measure_inference(
                consumer, plan, transform, part_s
            )

        read = measure_pipeline(make_bytes_pipeline(paths, plan), plan, part_s / 2)
        decode = measure_pipeline(
            make_reading_pipeline(paths, transform, plan, decode_only=True), plan, part_s
        )
        before = measure_alone()
        pipeline = make_reading_pipeline(paths, transform, plan)
        batches, predictions = run_overlapped(pipeline, consumer, plan, stream, job.seconds)
        after = measure_alone()
        check = _check_predictions(predictions, session, paths, transform, plan.batch_size)
    # the better of two: a disturbed part must not make the overlap look good
    preprocess, inference = max(before[0], after[0]), max(before[1][0], after[1][0])
    figures = compute_figures(
        batches,
        PartRates(read, decode, preprocess, inference),
        plan,
        launch_share=min(before[1][1], after[1][1]),
        cpu_share=batches.cpu_cores / count_cores(),
        handover=consumer.handover,
        environment={name: os.environ.get(name) for name in HARDWARE_QUEUES},
        check=check,
    )
    return batches, figures


def _check_predictions(
    latest: Mapping[int, int],
    session: Session,
    paths: Sequence[Path],
    transform: Transform,
    size: int,
) -> tuple[int, int, int]:
    """How many of the `latest` predictions were compared with the reference's, how many are equal, and of how many classes those are."""
    chosen = sorted(latest)[:: max(1, len(latest) // CHECKED_PREDICTIONS)][:CHECKED_PREDICTIONS]
    name, spec = session.outputs[0].name, session.inputs[0]
    rows = [paths[index] for index in chosen]
    padded = rows + rows[-1:] * (-len(rows) % size)
    classes: list[int] = []
    for batch in preprocess_batches(padded, transform, size, threads=count_cores()):
        classes += find_best_classes(
            session.run({spec.name: batch.astype(spec.dtype)})[name]
        ).tolist()
    expected = classes[: len(chosen)]
    equal = sum(latest[index] == best for index, best in zip(chosen, expected, strict=True))
    return len(chosen), equal, len(set(expected))


if __name__ == "__main__":
    serve_jobs(Path(sys.argv[1]), EndToEndJob, measure_job)
