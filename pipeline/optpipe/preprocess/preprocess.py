"""`optpipe preprocess`, as plain calls: derive, prove, measure, keep the evidence."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from optpipe.core.card import (
    ModelCard,
    Task,
    card_from_file,
    require_matching_input,
)
from optpipe.core.events import Listener
from optpipe.core.quiet import redirect_output
from optpipe.core.transform import Transform, get_step_name
from optpipe.core.verdict import Verdict
from optpipe.errors import BadInputError
from optpipe.export.exported import export_model, prepare_model
from optpipe.export.model import Model
from optpipe.inputs.images import ImageFolder, find_readable_images, format_unreadable
from optpipe.inputs.samples import read_labeled_files
from optpipe.preprocess.artifact import PIPELINE, build_preprocessing_artifact
from optpipe.preprocess.dali.graph import require_translatable
from optpipe.preprocess.dali.pipeline import DaliPlan, require_dali
from optpipe.preprocess.parity.parity import (
    NEAR_MAX_LEVELS,
    NEAR_MEAN_LEVELS,
    Parity,
    prove_parity,
)
from optpipe.preprocess.parity.side_by_side import save_side_by_side
from optpipe.preprocess.throughput.throughput import warm_page_cache, warn_about_other_load
from optpipe.preprocess.throughput.tuning import TunedPreprocessing, TuningSearch, tune_preprocessing
from optpipe.workspace.environment import count_cores, list_gpus
from optpipe.workspace.file_names import CARD, ONNX, PREPROCESSING, ROWS
from optpipe.workspace.manifest import get_command_line
from optpipe.workspace.runs import (
    OpenRun,
    Run,
    finish_run,
    open_run,
    write_json,
    write_parquet,
)
from optpipe.workspace.shipped import find_shipped_folder
from optpipe.workspace.store import Entry, Store

if TYPE_CHECKING:
    import numpy as np


MAX_SECONDS = 600.0
MAX_THREADS, MAX_BATCH_SIZE = 1024, 65536
"""Beyond these DALI ends the process instead of raising."""


@dataclass(frozen=True, slots=True)
class PreprocessRequest:
    """What was asked for; raises BadInputError for what cannot be meant."""

    images: Path | None = None
    limit: int | None = 1000
    max_unreadable: int | None = None
    plan: DaliPlan = field(default_factory=DaliPlan)
    fixed: frozenset[str] = frozenset()
    """Fields of the plan that were asked for; the others are tuned."""
    throughput: bool = True
    seconds: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= MAX_SECONDS:
            raise BadInputError(f"--seconds {self.seconds:g}: must be greater than 0 and at most {MAX_SECONDS:g}")
        if self.limit is not None and self.limit < 1:
            raise BadInputError(f"--limit {self.limit}: must be at least 1")
        if self.max_unreadable is not None and self.max_unreadable < 0:
            raise BadInputError(f"--max-unreadable {self.max_unreadable}: must be 0 or greater")


@dataclass(frozen=True, slots=True)
class PreprocessResult:
    """What came of it."""

    card: ModelCard
    weights: Mapping[str, Any]
    transform: Transform
    images: ImageFolder
    artifact: Entry
    proof: Parity
    speed: TunedPreprocessing | None
    run: Run
    record: Mapping[str, Any]

    @property
    def verdict(self) -> Verdict:
        """Of the parity proof; speed is reported, not judged."""
        return self.proof.judgment.verdict


def derive_preprocessing(
    model: Model, request: PreprocessRequest, store: Store, listener: Listener
) -> PreprocessResult:
    """Derives the DALI pipeline, proves it on images, and measures it against torch's DataLoader.

    Raises BadInputError for a model without image preprocessing, steps DALI cannot reproduce, and unusable images;
    MissingError without DALI.
    """
    require_dali()
    # unusable images are refused before the export, which may take minutes
    given = find_usable_images(request.images, request, listener) if request.images is not None else None
    model, stored = prepare_model(model, store, listener)
    with listener.step("export") as step:
        exported, cached = export_model(model, store, listener, stored)
        if cached:
            step.cached()
    card = card_from_file(exported.file(CARD))
    transform = require_image_transform(card)
    images, labels = choose_images(card, given, request, listener)
    speed, plan = None, request.plan
    if request.throughput:
        warm_page_cache(images.paths)
        search = TuningSearch(images.paths, transform, plan, count_cores(), request.seconds, listener, request.fixed)
        speed = tune_preprocessing(search)
        for each in (speed.dataloader, speed.dali):
            warn_about_other_load(each.other_cpu_cores, each.implementation, listener)
        plan = speed.plan  # what is proven and stored is what was found fastest
    with listener.step("pipeline") as step:
        artifact, cached = build_preprocessing_artifact(card, transform, plan, exported.id, store, listener)
        if cached:
            step.cached()
    weights = dict(exported.info["weights"])
    with (
        open_model_function(exported.file(ONNX), card) as infer,
        TemporaryDirectory(prefix="optpipe-") as scratch,
        redirect_output(Path(scratch, "dali.log")),
    ):  # what its decoders print of odd files; which came out odd is in the proof
        proof = prove_parity(
            images.paths,
            transform,
            plan,
            infer,
            listener,
            labels=labels,
            trained=bool(weights["trained"]),
            classifies=card.task is Task.CLASSIFICATION,
            threads=count_cores(),
        )
    _warn_about_differences(proof, listener)
    with open_run(store.workspace, "preprocess") as run:
        return _write_run(card, weights, transform, images, artifact, proof, speed, run)


def choose_dali_plan(decode: str, threads: int | None, batch_size: int | None, resize: str) -> DaliPlan:
    """The plan from option texts: `decode` is `auto`, `cpu` or `mixed`; `auto` is `mixed` where there is a GPU."""
    from optpipe.errors import MissingError

    on_gpu = decode == "mixed" or (decode == "auto" and bool(list_gpus()))
    if decode not in ("auto", "cpu", "mixed") or resize not in ("exact", "two-pass", "fused"):
        raise BadInputError(
            f"--decode {decode} --resize {resize}: choose --decode from auto, cpu, mixed and --resize from exact, two-pass, fused"
        )
    if on_gpu and not list_gpus():
        raise MissingError("--decode mixed: no NVIDIA GPU or driver found; use --decode cpu")
    for option, value, most in (("--threads", threads, MAX_THREADS), ("--batch-size", batch_size, MAX_BATCH_SIZE)):
        if value is not None and not 1 <= value <= most:
            raise BadInputError(f"{option} {value}: must be between 1 and {most}")
    default_batch = 256 if on_gpu else 32
    return DaliPlan(
        decode="mixed" if on_gpu else "cpu",
        device="gpu" if on_gpu else "cpu",
        threads=threads or min(8, count_cores()),
        batch_size=batch_size or default_batch,
        resize=resize,  # type: ignore[arg-type]
    )


def require_image_transform(card: ModelCard) -> Transform:
    """The card's transform, where it makes tensors of one size that DALI can make too; raises BadInputError."""
    if card.transform is None or len(card.inputs) != 1:
        raise BadInputError(
            f"the model card of {card.name} has no image preprocessing ([[preprocessing.steps]], see models/README.md)"
        )
    require_translatable(card.transform)
    if card.transform.size is None:
        steps = ", ".join(get_step_name(step) for step in card.transform.steps)
        raise BadInputError(
            f"{card.name}: its preprocessing ({steps}) produces images of different sizes, which cannot be batched"
        )
    require_matching_input(card)
    return card.transform


def find_usable_images(folder: Path, request: PreprocessRequest, listener: Listener) -> ImageFolder:
    """The readable pictures of a folder; says what is left out. Raises BadInputError where that is too much."""
    found = find_readable_images(folder, request.limit, request.max_unreadable, threads=count_cores())
    if found.unreadable:
        listener.warn(
            f"{len(found.unreadable)} of {len(found.paths) + len(found.unreadable)} images cannot be read and are skipped:"
            f" {format_unreadable(found.unreadable)}"
        )
    if found.left_out:
        listener.warn(f"{found.left_out} images exceed --limit {request.limit} and are not used")
    return found


def choose_images(
    card: ModelCard, given: ImageFolder | None, request: PreprocessRequest, listener: Listener
) -> tuple[ImageFolder, Sequence[int] | None]:
    """The pictures and their labels: those given, else the card's validation images, else the photographs that ship.

    Labels are the names of a folder's sub-folders where all of them are labels of the card.
    """
    truth: Mapping[Path, str] = {}
    if given is not None:
        found = given
    elif "validation" in card.data:
        pairs = list(read_labeled_files(Path(card.data["validation"])))
        truth = dict(pairs)
        folder = Path(os.path.commonpath([path.parent for path, _ in pairs]))
        found = find_usable_images(folder, request, listener)
    else:
        found = find_usable_images(find_shipped_folder("calibration") / "samples", request, listener)
    labels = [truth.get(path, path.parent.name) for path in found.paths]
    missing = sorted(set(labels) - set(card.labels))
    if not missing:
        return found, [card.labels.index(label) for label in labels]
    if card.labels and any(path.parent != found.folder for path in found.paths):
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        listener.warn(
            f"accuracy not computed: subfolders must be named after labels of {card.name}; not labels: {names}"
        )
    return found, None


@contextmanager
def open_model_function(graph: Path, card: ModelCard) -> Iterator[Callable[["np.ndarray"], "np.ndarray"]]:
    """The exported model on ONNX Runtime's CPU provider in FP32; a function from a batch to the first output."""
    import numpy as np

    from optpipe.backends.onnxruntime_session import OnnxRuntimeSession

    spec = card.inputs[0]
    smallest, largest = spec.min[0], spec.max[0]
    with OnnxRuntimeSession(graph, "cpu", {}) as session:

        def infer(batch: "np.ndarray") -> "np.ndarray":
            outputs = []
            for start in range(0, len(batch), largest):
                part = batch[start : start + largest]
                short = max(0, smallest - len(part))
                padded = np.concatenate([part, np.repeat(part[-1:], short, axis=0)]) if short else part
                found = session.run({spec.name: padded.astype(spec.dtype)})
                outputs.append(found[session.outputs[0].name][: len(part)])
            return np.concatenate(outputs).astype(np.float32)

        yield infer


def _warn_about_differences(proof: Parity, listener: Listener) -> None:
    """Names what a verdict over all images hides: single pictures that come through as others."""
    if far := proof.count_far():
        most = proof.worst[0]
        listener.warn(
            f"{far} of {proof.rows.height} images differ visibly (mean over {NEAR_MEAN_LEVELS:g} or max over"
            f" {NEAR_MAX_LEVELS:g} levels); worst: {most.name} (mean {most.mean_levels:.1f}, max {most.max_levels:.0f})"
        )
    bad = [each for each in proof.edge_cases if each.outcome not in ("equal", "near", "refused by both")]
    if bad:
        listener.warn(
            f"edge-case files that do not match: {', '.join(f'{each.name} ({each.outcome})' for each in bad)}"
        )


def _write_run(
    card: ModelCard,
    weights: Mapping[str, Any],
    transform: Transform,
    images: ImageFolder,
    artifact: Entry,
    proof: Parity,
    speed: TunedPreprocessing | None,
    run: OpenRun,
) -> PreprocessResult:
    """Writes the run folder: the record, per-image differences, raw batch times, and the worst pictures."""
    import shlex

    import polars as pl

    write_parquet(run.path / ROWS, proof.rows)
    pictures = []
    for rank, each in enumerate(proof.worst, 1):
        name = f"worst-{rank}.png"
        factor = save_side_by_side(run.path / name, each, transform)
        pictures.append({"path": name, "image": each.name, "difference_times": factor})
    if speed is not None:
        rows = [
            {"row": row, "implementation": each.implementation, "reader_ns": reader, "batch_ns": batch}
            for row, each in enumerate(speed.rows)
            for reader, batch in zip(each.reader_ns, each.batch_ns, strict=True)
        ]
        write_parquet(run.path / "throughput.parquet", pl.DataFrame(rows))
    record = {
        "model": card.name,
        "classifies": card.task is Task.CLASSIFICATION,
        "weights": dict(weights),
        "pipeline": {
            "id": artifact.id,
            "steps": transform.to_dict()["steps"],
            "path": str(artifact.file(PIPELINE)),
            "sha256": artifact.sha256(PIPELINE),
            "plan": proof.pixels.plan.to_dict(),
        },
        "images": {
            "folder": str(images.folder),
            "count": len(images.paths),
            "unreadable": [{"path": str(each.path), "reason": each.reason} for each in images.unreadable],
            "left_out": images.left_out,
            "page_cache": "warm",
        },
        "parity": {**proof.to_dict(), "pictures": pictures},
        "throughput": [row.to_dict() for row in speed.rows] if speed else [],
        "speedup": speed.speedup[0] if speed else None,
        "tuned": speed.to_dict() if speed else None,
        "verdict": str(proof.judgment.verdict),
        "run_dir": str(run.path),
    }
    write_json(run.path / PREPROCESSING, record)
    finished = finish_run(
        run, command=shlex.split(get_command_line()), parents=(artifact.id,), details={"model": card.name}
    )
    return PreprocessResult(card, weights, transform, images, artifact, proof, speed, finished, record)
