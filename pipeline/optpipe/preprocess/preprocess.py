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
    require_fitting,
)
from optpipe.core.events import Listener
from optpipe.core.quiet import output_to
from optpipe.core.transform import Transform, step_name
from optpipe.core.verdict import Verdict
from optpipe.errors import BadInputError
from optpipe.export.exported import exportable, exported_model
from optpipe.export.model import Model
from optpipe.inputs.images import Images, readable_images, unreadable_text
from optpipe.inputs.samples import labelled_files
from optpipe.preprocess.artifact import PIPELINE, preprocessing_artifact
from optpipe.preprocess.dali.graph import require_translatable
from optpipe.preprocess.dali.pipeline import DaliPlan, require_dali
from optpipe.preprocess.parity.parity import (
    NEAR_MAX_LEVELS,
    NEAR_MEAN_LEVELS,
    Parity,
    parity,
)
from optpipe.preprocess.parity.side_by_side import save_side_by_side
from optpipe.preprocess.throughput.throughput import warm_page_cache, warn_of_others
from optpipe.preprocess.throughput.tuning import Search, Tuned, tuned
from optpipe.workspace.environment import cores, gpus
from optpipe.workspace.file_names import CARD, ONNX, PREPROCESSING, ROWS
from optpipe.workspace.manifest import command_line
from optpipe.workspace.runs import (
    OpenRun,
    Run,
    finish_run,
    whole_run,
    write_json,
    write_parquet,
)
from optpipe.workspace.shipped import shipped
from optpipe.workspace.store import Entry, Store

if TYPE_CHECKING:
    import numpy as np


MOST_SECONDS = 600.0
MOST_THREADS, MOST_BATCH = 1024, 65536
"""Beyond these DALI ends the process instead of raising."""


@dataclass(frozen=True, slots=True)
class Request:
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
        if not 0 < self.seconds <= MOST_SECONDS:
            raise BadInputError(f"--seconds {self.seconds:g}: give a number above 0, at most {MOST_SECONDS:g}")
        if self.limit is not None and self.limit < 1:
            raise BadInputError(f"--limit {self.limit}: give at least 1")
        if self.max_unreadable is not None and self.max_unreadable < 0:
            raise BadInputError(f"--max-unreadable {self.max_unreadable}: give 0 or more")


@dataclass(frozen=True, slots=True)
class Preprocessed:
    """What came of it."""

    card: ModelCard
    weights: Mapping[str, Any]
    transform: Transform
    images: Images
    artifact: Entry
    proof: Parity
    speed: Tuned | None
    run: Run
    record: Mapping[str, Any]

    @property
    def verdict(self) -> Verdict:
        """Of the parity proof; speed is reported, not judged."""
        return self.proof.judgement.verdict


def preprocess(model: Model, request: Request, store: Store, listener: Listener) -> Preprocessed:
    """Derives the DALI pipeline, proves it on images, and measures it against torch's DataLoader.

    Raises BadInputError for a model without image preprocessing, steps DALI cannot reproduce, and unusable images;
    MissingError without DALI.
    """
    require_dali()
    # unusable images are refused before the export, which may take minutes
    given = usable_images(request.images, request, listener) if request.images is not None else None
    model, stored = exportable(model, store, listener)
    with listener.step("export") as step:
        exported, cached = exported_model(model, store, listener, stored)
        if cached:
            step.cached()
    card = card_from_file(exported.file(CARD))
    transform = image_transform(card)
    images, labels = chosen_images(card, given, request, listener)
    speed, plan = None, request.plan
    if request.throughput:
        warm_page_cache(images.paths)
        search = Search(images.paths, transform, plan, cores(), request.seconds, listener, request.fixed)
        speed = tuned(search)
        for each in (speed.dataloader, speed.dali):
            warn_of_others(each.other_cpu_cores, each.implementation, listener)
        plan = speed.plan  # what is proven and stored is what was found fastest
    with listener.step("pipeline") as step:
        artifact, cached = preprocessing_artifact(card, transform, plan, exported.id, store, listener)
        if cached:
            step.cached()
    weights = dict(exported.info["weights"])
    with (
        model_outputs(exported.file(ONNX), card) as infer,
        TemporaryDirectory(prefix="optpipe-") as scratch,
        output_to(Path(scratch, "dali.log")),
    ):  # what its decoders print of odd files; which came out odd is in the proof
        proof = parity(
            images.paths,
            transform,
            plan,
            infer,
            listener,
            labels=labels,
            trained=bool(weights["trained"]),
            classifies=card.task is Task.CLASSIFICATION,
            threads=cores(),
        )
    _warn_of_differences(proof, listener)
    with whole_run(store.workspace, "preprocess") as run:
        return _kept(card, weights, transform, images, artifact, proof, speed, run)


def automatic_plan(decode: str, threads: int | None, batch_size: int | None, resize: str) -> DaliPlan:
    """The plan from option texts: `decode` is `auto`, `cpu` or `mixed`; `auto` is `mixed` where there is a GPU."""
    from optpipe.errors import MissingError

    on_gpu = decode == "mixed" or (decode == "auto" and bool(gpus()))
    if decode not in ("auto", "cpu", "mixed") or resize not in ("exact", "two-pass", "fused"):
        raise BadInputError(
            f"--decode {decode} --resize {resize}: give auto, cpu or mixed, and exact, two-pass or fused"
        )
    if on_gpu and not gpus():
        raise MissingError("--decode mixed: no NVIDIA GPU or no driver on this machine; --decode cpu works without")
    for option, value, most in (("--threads", threads, MOST_THREADS), ("--batch-size", batch_size, MOST_BATCH)):
        if value is not None and not 1 <= value <= most:
            raise BadInputError(f"{option} {value}: give a number from 1 to {most}")
    default_batch = 256 if on_gpu else 32
    return DaliPlan(
        decode="mixed" if on_gpu else "cpu",
        device="gpu" if on_gpu else "cpu",
        threads=threads or min(8, cores()),
        batch_size=batch_size or default_batch,
        resize=resize,  # type: ignore[arg-type]
    )


def image_transform(card: ModelCard) -> Transform:
    """The card's transform, where it makes tensors of one size that DALI can make too; raises BadInputError."""
    if card.transform is None or len(card.inputs) != 1:
        raise BadInputError(
            f"{card.name} has no image preprocessing on its card ([[preprocessing.steps]], see models/README.md)"
        )
    require_translatable(card.transform)
    if card.transform.size is None:
        steps = ", ".join(step_name(step) for step in card.transform.steps)
        raise BadInputError(
            f"{card.name}: its preprocessing ({steps}) leaves pictures of different sizes, which cannot share a batch"
        )
    require_fitting(card)
    return card.transform


def usable_images(folder: Path, request: Request, listener: Listener) -> Images:
    """The readable pictures of a folder; says what is left out. Raises BadInputError where that is too much."""
    found = readable_images(folder, request.limit, request.max_unreadable, threads=cores())
    if found.unreadable:
        listener.warn(
            f"{len(found.unreadable)} of {len(found.paths) + len(found.unreadable)} images cannot be read and are left out:"
            f" {unreadable_text(found.unreadable)}"
        )
    if found.left_out:
        listener.warn(f"{found.left_out} images beyond --limit {request.limit} are not used")
    return found


def chosen_images(
    card: ModelCard, given: Images | None, request: Request, listener: Listener
) -> tuple[Images, Sequence[int] | None]:
    """The pictures and their labels: those given, else the card's validation images, else the photographs that ship.

    Labels are the names of a folder's sub-folders where all of them are labels of the card.
    """
    truth: Mapping[Path, str] = {}
    if given is not None:
        found = given
    elif "validation" in card.data:
        pairs = list(labelled_files(Path(card.data["validation"])))
        truth = dict(pairs)
        folder = Path(os.path.commonpath([path.parent for path, _ in pairs]))
        found = usable_images(folder, request, listener)
    else:
        found = usable_images(shipped("calibration") / "samples", request, listener)
    labels = [truth.get(path, path.parent.name) for path in found.paths]
    missing = sorted(set(labels) - set(card.labels))
    if not missing:
        return found, [card.labels.index(label) for label in labels]
    if card.labels and any(path.parent != found.folder for path in found.paths):
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        listener.warn(f"no accuracy, which needs sub-folders named like labels of {card.name}: {names} is none")
    return found, None


@contextmanager
def model_outputs(graph: Path, card: ModelCard) -> Iterator[Callable[["np.ndarray"], "np.ndarray"]]:
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


def _warn_of_differences(proof: Parity, listener: Listener) -> None:
    """Names what a verdict over all images hides: single pictures that come through as others."""
    if far := proof.far():
        most = proof.worst[0]
        listener.warn(
            f"{far} of {proof.rows.height} images come through as other pictures (mean over {NEAR_MEAN_LEVELS:g} or max over"
            f" {NEAR_MAX_LEVELS:g} levels), {most.name} most: mean {most.mean_levels:.1f}, max {most.max_levels:.0f}"
        )
    bad = [each for each in proof.odd if each.outcome not in ("equal", "near", "refused by both")]
    if bad:
        listener.warn(
            f"odd files that do not come through alike: {', '.join(f'{each.name} ({each.outcome})' for each in bad)}"
        )


def _kept(
    card: ModelCard,
    weights: Mapping[str, Any],
    transform: Transform,
    images: Images,
    artifact: Entry,
    proof: Parity,
    speed: Tuned | None,
    run: OpenRun,
) -> Preprocessed:
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
        "verdict": str(proof.judgement.verdict),
        "run_dir": str(run.path),
    }
    write_json(run.path / PREPROCESSING, record)
    finished = finish_run(
        run, command=shlex.split(command_line()), parents=(artifact.id,), details={"model": card.name}
    )
    return Preprocessed(card, weights, transform, images, artifact, proof, speed, finished, record)
