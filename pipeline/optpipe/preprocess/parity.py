"""Compares both pipelines on the same images, in pixels and in the model's outputs."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from optpipe.core.errors import BadInputError, StageError, is_out_of_memory
from optpipe.core.events import Listener
from optpipe.core.transform import CenterCrop, Resize, Transform, get_step_name
from optpipe.models.inputs.image_set import ImageSet
from optpipe.models.inputs.images import decode_image, iterate_steps
from optpipe.preprocess.dali_pipeline import INPUT, DaliPlan, explain_dali_error, make_steps_pipeline
from optpipe.preprocess.proof import (
    ParityRecord,
    PredictionDecoder,
    RefusedImage,
    StepDifference,
    WorstImage,
    proof_from_rows,
    rows_from_outputs,
)
from optpipe.workspace.files import write_bytes

GAP = 8
VISIBLE = 128
"""Levels that the largest difference is stretched to."""


@dataclass(frozen=True, slots=True)
class ComparedImage:
    name: str
    reference: np.ndarray
    """The model's tensor, without batch axis."""
    got: np.ndarray
    mean_levels: float
    max_levels: float


class PixelDifferences:
    def __init__(self, transform: Transform, plan: DaliPlan) -> None:
        self.transform, self.plan = transform, plan
        names = ["decode", *(get_step_name(step) for step in transform.geometry), "normalize"]
        self.steps = [StepDifference(name, 0.0, 0.0, 0.0, 0) for name in names]
        self.refused: list[RefusedImage] = []
        """Images that Pillow reads and DALI does not."""


def add_image(total: StepDifference, levels: np.ndarray) -> StepDifference:
    """`total` with the absolute differences of one more image, in levels and of any shape."""
    images = total.images + 1
    mean, off_share = float(levels.mean()), float((levels > 0.5).mean())
    return StepDifference(
        total.step,
        total.mean_levels + (mean - total.mean_levels) / images,
        max(total.max_levels, float(levels.max(initial=0.0))),
        total.off_share + (off_share - total.off_share) / images,
        images,
    )


def compute_levels_per_unit(transform: Transform) -> float:
    """8-bit levels per unit of the packed tensor, averaged over the channels."""
    divisor = transform.rescale.divisor if transform.rescale else 1.0
    std = transform.normalize.std if transform.normalize else (1.0,)
    return divisor * sum(std) / len(std)


def compare_images(
    files: Sequence[tuple[str, Path]], pixels: PixelDifferences, threads: int = 2
) -> Iterator[list[ComparedImage]]:
    """Sends files, by name, through both pipelines, batch by batch, and adds to `pixels`; skips files that DALI cannot decode."""
    transform, plan = pixels.transform, pixels.plan
    pipeline = None
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(files), plan.batch_size):
            batch = [(name, path.read_bytes()) for name, path in files[start : start + plan.batch_size]]
            pipeline = pipeline or make_steps_pipeline(transform, plan)
            try:
                outputs = _run(pipeline, [data for _, data in batch])
            except RuntimeError as error:
                if is_out_of_memory(error):  # not the fault of an image
                    raise StageError(
                        f"DALI ran out of memory with {plan.batch_size} images per batch; "
                        f"try --batch-size {max(1, plan.batch_size // 2)}"
                    ) from error
                pipeline = None  # a pipeline that raised cannot continue
                outputs, batch = _run_one_by_one(batch, pixels)
            expected = list(pool.map(lambda data: _run_reference(data, transform), [data for _, data in batch]))
            yield [
                _compare(name, rows, steps, pixels)
                for (name, _), rows, steps in zip(batch, outputs, expected, strict=True)
            ]


def _run(pipeline: Any, arrays: Sequence[Any]) -> list[list[np.ndarray]]:
    """Runs one batch; returns each image's array at every output."""
    fed = [np.frombuffer(each, np.uint8) if isinstance(each, bytes) else np.ascontiguousarray(each) for each in arrays]
    pipeline.feed_input(INPUT, fed)
    outputs = [output.as_cpu() for output in pipeline.run()]
    return [[np.array(output[row]) for output in outputs] for row in range(len(arrays))]


def _run_one_by_one(
    batch: Sequence[tuple[str, bytes]], pixels: PixelDifferences
) -> tuple[list[list[np.ndarray]], list[tuple[str, bytes]]]:
    """Finds the files that DALI rejects, each of which fails a whole batch."""
    outputs, kept = [], []
    pipeline = None
    for name, data in batch:
        pipeline = pipeline or make_steps_pipeline(pixels.transform, replace(pixels.plan, batch_size=1))
        try:
            outputs += _run(pipeline, [data])
            kept.append((name, data))
        except RuntimeError as error:
            pipeline = None
            pixels.refused.append(RefusedImage(name, explain_dali_error(str(error))))
    return outputs, kept


def _run_reference(data: bytes, transform: Transform) -> list[np.ndarray]:
    """Pixels after decoding and after each geometric step, then the packed tensor."""
    first = decode_image(data, transform.decode)
    steps = list(iterate_steps(transform, first))
    return [first, *(value for step, value in steps if isinstance(step, Resize | CenterCrop)), steps[-1][1]]


def _compare(
    name: str, got: Sequence[np.ndarray], expected: Sequence[np.ndarray], pixels: PixelDifferences
) -> ComparedImage:
    last = len(expected) - 1
    difference = None
    for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        difference = _compute_difference(ours, theirs) * (
            compute_levels_per_unit(pixels.transform) if index == last else 1.0
        )
        pixels.steps[index] = add_image(pixels.steps[index], difference)
    assert difference is not None
    return ComparedImage(name, expected[last], got[last], float(difference.mean()), float(difference.max(initial=0.0)))


def _compute_difference(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    if got.shape != expected.shape:  # an incorrect side counts as the largest difference
        return np.full(1, 255.0)
    return np.abs(got.astype(np.float32) - expected.astype(np.float32))


def save_side_by_side(path: Path, compared: ComparedImage, transform: Transform) -> WorstImage:
    """Writes reference | DALI | difference as PNG. Raises StageError."""
    from PIL import Image

    reference, got = (_levels_from_tensor(each, transform) for each in (compared.reference, compared.got))
    difference = np.abs(reference - got)
    factor = max(1.0, VISIBLE / max(float(difference.max()), 1e-6)) if difference.max() > 0.01 else 1.0
    panels = [reference, got, difference * factor]
    gap = np.full((reference.shape[0], GAP, 3), 255.0)
    row = np.concatenate([panels[0], gap, panels[1], gap, panels[2]], axis=1)
    png = io.BytesIO()
    Image.fromarray(np.clip(row + 0.5, 0, 255).astype(np.uint8)).save(png, "PNG")
    write_bytes(path, png.getvalue())
    return WorstImage(compared.name, compared.mean_levels, compared.max_levels, path.name, factor)


def _levels_from_tensor(tensor: np.ndarray, transform: Transform) -> np.ndarray:
    """A packed tensor in 8-bit levels, (height, width, 3)."""
    pixels = np.moveaxis(tensor, 0, -1) if transform.pack.order == "CHW" else tensor
    values = pixels.astype(np.float64)
    if transform.normalize:
        values = values * np.asarray(transform.normalize.std) + np.asarray(transform.normalize.mean)
    if transform.rescale:
        values = (values - transform.rescale.offset) * transform.rescale.divisor
    return values if values.shape[2] == 3 else np.repeat(values, 3, axis=2)


WORST = 3
NEAR_MEAN_LEVELS, NEAR_MAX_LEVELS = 0.5, 8.0
"""A file whose result stays within these is the same image; above them it is another."""


def prove_parity(
    samples: ImageSet,
    transform: Transform,
    plan: DaliPlan,
    infer: Callable[[np.ndarray], Mapping[str, np.ndarray]],
    listener: Listener,
    *,
    labels: Sequence[int] | None = None,
    trained: bool,
    classifies: bool,
    threads: int = 2,
    decoder: PredictionDecoder | None = None,
) -> tuple[ParityRecord, pl.DataFrame, Sequence[ComparedImage]]:
    """Compares on `samples`; `infer` maps a batch of inputs to the model's outputs, the first of which is compared.

    `labels` are the samples' classes; `decoder` compares the predictions of a detector or segmenter. Raises BadInputError if DALI
    decodes none of the images.

    Returns the record, one row per image as `proof` describes, and the worst images.
    """
    files = [(each.path, path) for each, path in zip(samples.files, samples.paths, strict=True)]
    truth = dict(zip((name for name, _ in files), labels, strict=True)) if labels is not None else {}
    pixels = PixelDifferences(transform, plan)
    worst: list[ComparedImage] = []
    parts: list[pl.DataFrame] = []
    decoded: tuple[list[Any], list[Any]] = ([], [])
    with listener.step("parity", total=len(files)) as step:
        for batch in compare_images(files, pixels, threads):
            if batch:
                both = infer(np.stack([getattr(each, side) for side in ("reference", "got") for each in batch]))
                halves = slice(len(batch)), slice(len(batch), None)
                outputs = [{name: value[half] for name, value in both.items()} for half in halves]
                first = (next(iter(each.values())) for each in outputs)
                columns = {
                    "image": [each.name for each in batch],
                    "mean_levels": [each.mean_levels for each in batch],
                    "max_levels": [each.max_levels for each in batch],
                    "class": [truth.get(each.name) for each in batch],
                }
                measured = pl.DataFrame(columns, schema_overrides={"class": pl.Int64})
                parts.append(measured.hstack(rows_from_outputs(*first, classifies=classifies)))
                for known, found in zip(decoded, outputs, strict=True):
                    known += decoder.decode(found, [each.name for each in batch]) if decoder else []
            worst = sorted([*worst, *batch], key=lambda each: -each.mean_levels)[:WORST]
            step.advance(len(batch))
    if not parts:
        raise BadInputError(f"DALI could not decode any of the {len(files)} images: {pixels.refused[0].reason}")
    rows = pl.concat(parts)
    if decoder:
        rows = decoder.add_columns(rows, *decoded)
    record = ParityRecord(
        proof_from_rows(
            rows,
            trained=trained,
            classifies=classifies,
            refused=len(pixels.refused),
            task=decoder.task if decoder else None,
        ),
        images=rows.height,
        steps=tuple(pixels.steps),
        far=sum(not _is_near(*each) for each in zip(rows["mean_levels"], rows["max_levels"], strict=True)),
        refused=tuple(pixels.refused),
    )
    return record, rows, worst


def _is_near(mean_levels: float, max_levels: float) -> bool:
    return mean_levels <= NEAR_MEAN_LEVELS and max_levels <= NEAR_MAX_LEVELS
