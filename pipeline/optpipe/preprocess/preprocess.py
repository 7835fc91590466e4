"""`optpipe preprocess`: derives the pipeline, proves it, measures it, and stores the evidence."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import polars as pl

from optpipe.backends.onnxruntime_session import OnnxRuntimeSession
from optpipe.backends.selections import read_selection
from optpipe.core.card import ModelCard, Task, require_matching_input
from optpipe.core.entries import ModelInfo
from optpipe.core.errors import BadInputError, MissingError
from optpipe.core.events import Listener, run_step
from optpipe.core.process import redirect_output
from optpipe.core.records import json_from_record
from optpipe.core.transform import Transform, get_step_name
from optpipe.core.wording import Argument
from optpipe.evaluate.tasks.detection_heads import lacks_image_axis
from optpipe.models.artifacts.engine_files import hash_model
from optpipe.models.export.exported import (
    Model,
    export_model,
    prepare_model,
    read_card,
    require_finite_outputs,
)
from optpipe.models.inputs.image_set import ImageSet
from optpipe.models.inputs.task_data import drop_unknown_labels, find_label_indices, read_images
from optpipe.models.stored_card import read_stored_card
from optpipe.preprocess.dali_graph import require_translatable
from optpipe.preprocess.dali_pipeline import (
    PIPELINE,
    DaliPlan,
    PreprocessingInfo,
    build_preprocessing_artifact,
    require_dali,
)
from optpipe.preprocess.parity import (
    ComparedImage,
    TrainingTransform,
    compare_training_transform,
    prove_parity,
    save_side_by_side,
)
from optpipe.preprocess.proof import (
    AgainstRecord,
    ImagesRecord,
    ParityRecord,
    PipelineRecord,
    PredictionDecoder,
    PreprocessRecord,
    RefusedImage,
    open_prediction_decoder,
)
from optpipe.preprocess.throughput import (
    Throughput,
    ThroughputTuning,
    frame_from_throughputs,
    tune_preprocessing,
    warm_page_cache,
    warn_about_other_load,
)
from optpipe.workspace.entry import Entry
from optpipe.workspace.environment import count_cores, list_gpus
from optpipe.workspace.file_names import ONNX, PREPROCESSING, ROWS
from optpipe.workspace.files import write_bytes, write_parquet
from optpipe.workspace.places import find_shipped_folder
from optpipe.workspace.runs import OpenRun, finish_run, open_run
from optpipe.workspace.store import Store

MAX_SECONDS = 600.0
MAX_THREADS, MAX_BATCH_SIZE = 1024, 65536
"""Above these DALI ends the process instead of raising."""


@dataclass(frozen=True, slots=True)
class PreprocessRequest:
    images: Path | None = None
    limit: int | None = 1000
    plan: DaliPlan = field(default_factory=DaliPlan)
    fixed: frozenset[str] = frozenset()
    """Given fields of the plan; the others are tuned."""
    throughput: bool = True
    seconds: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= MAX_SECONDS:
            raise BadInputError(
                f"must be greater than 0 and at most {MAX_SECONDS:g}",
                argument=Argument("seconds", self.seconds, setting=True),
            )
        if self.limit is not None and self.limit < 1:
            raise BadInputError("must be at least 1", argument=Argument("limit", self.limit))


@dataclass(frozen=True, slots=True)
class _Subject:
    """An exported model with image preprocessing, and the images on which its pipeline is proven."""

    exported: Entry[ModelInfo]
    card: ModelCard
    transform: Transform
    samples: ImageSet
    unreadable: Sequence[tuple[Path, str]]
    """Images that the model's own loader cannot read either, with the reason."""
    labels: Sequence[int] | None
    decoder: PredictionDecoder | None

    @property
    def trained(self) -> bool:
        return self.exported.info.weights.trained

    @property
    def classifies(self) -> bool:
        return self.card.task is Task.CLASSIFICATION


def derive_preprocessing(
    model: Model, request: PreprocessRequest, store: Store, listener: Listener
) -> PreprocessRecord:
    """Derives the DALI pipeline, proves it on images, and measures it against torch's DataLoader.

    Raises BadInputError for a model without image preprocessing, steps that DALI cannot reproduce, and unusable images;
    MissingError without DALI.
    """
    require_dali()
    store.require_writable()
    subject = _prepare_subject(model, request, store, listener)

    speed: ThroughputTuning | None = None
    times: tuple[Throughput, ...] = ()
    plan = request.plan
    if request.throughput:
        speed, times = _tune_throughput(subject, request, listener)
        plan = speed.dali.plan or plan  # the fastest plan is proven and stored

    artifact = run_step(
        "pipeline",
        listener,
        build_preprocessing_artifact,
        subject.card,
        subject.transform,
        plan,
        subject.exported.id,
        store,
        listener,
    )
    parity, rows, most_different = _prove_subject(subject, plan, listener)

    with open_run(store.workspace, "preprocess") as run:
        write_parquet(run.path / ROWS, rows)
        if times:
            write_parquet(run.path / "throughput.parquet", frame_from_throughputs(times))
        worst = tuple(
            save_side_by_side(run.path / f"worst-{rank}.png", image, subject.transform)
            for rank, image in enumerate(most_different, 1)
        )
        record = _make_record(subject, artifact, plan, replace(parity, worst=worst), speed, run)
        write_bytes(run.path / PREPROCESSING, json_from_record(record))
        finish_run(
            run,
            parents=(artifact.id, subject.exported.id),
            model=subject.card.name,
            trained=subject.trained,
        )

    # The stored record names no folder of this machine; the shown one does.
    return replace(
        record,
        run_dir=str(run.path),
        pipeline=replace(record.pipeline, path=str(artifact.file(PIPELINE))),
        images=replace(record.images, folder=str(subject.samples.root)),
    )


def _prepare_subject(
    model: Model, request: PreprocessRequest, store: Store, listener: Listener
) -> _Subject:
    # the export may take minutes: reject unusable images first
    given = (
        None if request.images is None else read_images(request.images, request.limit, 0, listener)
    )
    model, stored = prepare_model(model, store, listener)
    exported = run_step("export", listener, export_model, model, store, listener, stored)
    card = read_stored_card(exported)
    transform = require_image_transform(card)

    samples, unreadable = given or read_images(choose_images(card), request.limit, 0, listener)
    labels = read_labels(samples, card, listener)
    trained = exported.info.weights.trained
    decoder = open_prediction_decoder(card, samples, listener) if trained else None
    return _Subject(exported, card, transform, samples, unreadable, labels, decoder)


def _tune_throughput(
    subject: _Subject, request: PreprocessRequest, listener: Listener
) -> tuple[ThroughputTuning, tuple[Throughput, ...]]:
    """As `tune_preprocessing`, from files that lie in memory; warns if other processes disturbed the winners."""
    paths = subject.samples.paths
    warm_page_cache(paths)
    speed, times = tune_preprocessing(
        paths,
        subject.transform,
        request.plan,
        count_cores(),
        request.seconds,
        listener,
        request.fixed,
    )
    for throughput in (speed.dataloader, speed.dali):
        warn_about_other_load(throughput.other_cpu_cores, throughput.implementation, listener)
    return speed, times


def _prove_subject(
    subject: _Subject, plan: DaliPlan, listener: Listener
) -> tuple[ParityRecord, pl.DataFrame, Sequence[ComparedImage]]:
    """As `prove_parity`, on the outputs of the exported model."""
    graph, card, decoder = subject.exported.file(ONNX), subject.card, subject.decoder
    boxes = decoder is not None and lacks_image_axis(card)
    with (
        open_model_function(graph, card, every=decoder is not None, boxes=boxes) as infer,
        TemporaryDirectory(prefix="optpipe-") as scratch,
        redirect_output(Path(scratch, "dali.log")),
    ):  # DALI's decoders print messages about odd files
        return prove_parity(
            subject.samples,
            subject.transform,
            plan,
            infer,
            listener,
            labels=subject.labels,
            trained=subject.trained,
            classifies=subject.classifies,
            threads=count_cores(),
            decoder=decoder,
            selection=read_selection(graph),
        )


def _make_record(
    subject: _Subject,
    artifact: Entry[PreprocessingInfo],
    plan: DaliPlan,
    parity: ParityRecord,
    speed: ThroughputTuning | None,
    run: OpenRun,
) -> PreprocessRecord:
    pipeline, samples = artifact.file(PIPELINE), subject.samples
    steps = tuple(subject.transform.to_dict()["steps"])
    skipped = tuple(RefusedImage(path.name, reason) for path, reason in subject.unreadable)
    return PreprocessRecord(
        model=subject.card.name,
        classifies=subject.classifies,
        trained=subject.trained,
        pipeline=PipelineRecord(artifact.id, pipeline.name, artifact.sha256(PIPELINE), plan, steps),
        images=ImagesRecord(samples.name, len(samples.files), skipped),
        parity=parity,
        throughput=speed,
        verdict=parity.proof.verdict,
        run_dir=run.name,
        task=subject.card.task,
        model_sha256=hash_model(subject.exported.manifest),
    )


def prove_training_transform(
    model: Model,
    text: str,
    request: PreprocessRequest,
    folder: Path | None,
    store: Store,
    listener: Listener,
) -> AgainstRecord:
    """Compares the card's transform and its DALI pipeline with a user's. Raises as `derive_preprocessing`."""
    require_dali()
    training = TrainingTransform(text)
    model, stored = prepare_model(model, store, listener)
    card = read_card(model, stored)
    transform = require_image_transform(card)
    samples, _ = read_images(request.images or choose_images(card), request.limit, 0, listener)
    where = folder or store.workspace / "against"
    return compare_training_transform(
        training, card.name, samples, transform, request.plan, where, listener
    )


def choose_dali_plan(
    decoder: Literal["auto", "cpu", "mixed"],
    threads: int | None = None,
    batch_size: int | None = None,
) -> DaliPlan:
    """The plan to start from; `auto` decodes with nvJPEG if there is a GPU. Raises BadInputError, MissingError."""
    gpus = list_gpus()
    if decoder == "mixed" and not gpus:
        raise MissingError(
            "no NVIDIA GPU or driver found; use " + Argument("decode", "cpu", setting=True),
            argument=Argument("decode", "mixed", setting=True),
        )
    on_gpu = decoder != "cpu" and bool(gpus)
    for argument, value, most in (
        (Argument("threads", threads, setting=True), threads, MAX_THREADS),
        (Argument("batch_size", batch_size), batch_size, MAX_BATCH_SIZE),
    ):
        if value is not None and not 1 <= value <= most:
            raise BadInputError(f"must be between 1 and {most}", argument=argument)
    return DaliPlan(
        decode="mixed" if on_gpu else "cpu",
        device="gpu" if on_gpu else "cpu",
        threads=threads or min(8, count_cores()),
        batch_size=batch_size or (256 if on_gpu else 32),
    )


def require_image_transform(card: ModelCard) -> Transform:
    """The card's transform if it makes tensors of one size that DALI can make too. Raises BadInputError."""
    if card.transform is None or len(card.inputs) != 1:
        problem = f"the model card of {card.name} has no image preprocessing"
        raise BadInputError(f"{problem} ([[preprocessing.steps]], see models/README.md)")
    require_translatable(card.transform)
    if card.transform.size is None:
        steps = ", ".join(get_step_name(step) for step in card.transform.steps)
        problem = f"its preprocessing ({steps}) produces images of different sizes, which cannot be batched"
        raise BadInputError(f"{card.name}: {problem}")
    require_matching_input(card)
    return card.transform


@contextmanager
def open_model_function(
    graph: Path, card: ModelCard, *, every: bool, boxes: bool
) -> Iterator[Callable[[np.ndarray], Mapping[str, np.ndarray]]]:
    """The exported model on ONNX Runtime's CPU provider in FP32, as it is written: no optimization can hide a difference.

    Yields a function from a batch to `every` output, (images, ...) each, or to the first alone. `boxes` of one image have no
    image axis: those of all images are padded with zeros to the same number of rows. It raises BadInputError for outputs that are
    not finite.
    """
    spec = card.inputs[0]
    smallest, largest = spec.min[0], spec.max[0]
    with OnnxRuntimeSession(graph, "cpu", {}, optimization="disabled") as session:
        names = [output.name for output in session.outputs][: None if every else 1]

        def infer(batch: np.ndarray) -> Mapping[str, np.ndarray]:
            outputs: dict[str, list[np.ndarray]] = {name: [] for name in names}
            for start in range(0, len(batch), largest):
                part = batch[start : start + largest]
                short = max(0, smallest - len(part))
                padded = (
                    np.concatenate([part, np.repeat(part[-1:], short, axis=0)]) if short else part
                )
                results = session.run({spec.name: padded.astype(spec.dtype)})
                for name, parts in outputs.items():
                    parts.append(results[name] if boxes else results[name][: len(part)])
            if boxes:
                for parts in outputs.values():
                    rows = max(map(len, parts))
                    parts[:] = [
                        np.pad(part, [(0, rows - len(part)), *[(0, 0)] * (part.ndim - 1)])[None]
                        for part in parts
                    ]
            whole = {name: np.concatenate(parts) for name, parts in outputs.items()}
            require_finite_outputs(card.name, whole)
            return whole

        yield infer


def choose_images(card: ModelCard) -> Path:
    """The card's validation images, or the photographs of the package."""
    own = card.data.get("validation")
    return Path(own) if own else find_shipped_folder("calibration") / "samples"


def read_labels(samples: ImageSet, card: ModelCard, listener: Listener) -> Sequence[int] | None:
    """A classifier's class for each image; None without labels, and, with a warning, if some are not classes of the card."""
    classes = card.outputs[0].classes if card.outputs else None
    if card.task is not Task.CLASSIFICATION or classes is None:
        return None
    indices = find_label_indices(drop_unknown_labels(samples, card, listener), card, classes)
    return None if indices is None else indices.tolist()
