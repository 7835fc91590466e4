"""Compares both pipelines on the same images, in pixels and in the model's outputs, and a user's transform with the card's."""

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product, zip_longest
from operator import ne
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import polars as pl
from msgspec import structs
from PIL import Image

from optpipe.core.errors import BadInputError, StageError, is_out_of_memory
from optpipe.core.events import Listener
from optpipe.core.files import read_user_bytes
from optpipe.core.precision import Precision
from optpipe.core.transform import (
    CenterCrop,
    Decode,
    Normalize,
    Rescale,
    Resize,
    Transform,
    get_step_name,
)
from optpipe.core.verdict import Verdict
from optpipe.core.wording import Argument
from optpipe.evaluate.tasks.contract import TaskContract
from optpipe.models.inputs.image_set import ImageSet
from optpipe.models.inputs.images import (
    MAX_IMAGE_BYTES,
    apply_step,
    decode_image,
    iterate_steps,
    open_image,
)
from optpipe.models.sources.python_file import UserCode, describe_user_error
from optpipe.preprocess.dali_pipeline import (
    INPUT,
    DaliPlan,
    explain_dali_error,
    make_steps_pipeline,
)
from optpipe.preprocess.proof import (
    AgainstRecord,
    ImagesRecord,
    ParityRecord,
    PredictionDecoder,
    RefusedImage,
    StepDifference,
    WorstImage,
    proof_from_rows,
    rows_from_outputs,
)
from optpipe.stats.paired import TOLERATED_RELATIVE_ERROR
from optpipe.stats.selected_rows import EMPTY, Selection, align_rows
from optpipe.workspace.file_names import make_file_name
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


def compare_images(
    files: Sequence[tuple[str, Path]], pixels: PixelDifferences, threads: int = 2
) -> Iterator[list[ComparedImage]]:
    """Sends files, by name, through both pipelines, batch by batch, and adds to `pixels`; skips files that DALI cannot decode."""
    transform, plan = pixels.transform, pixels.plan
    pipeline = None
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(files), plan.batch_size):
            batch = [
                (name, read_user_bytes(path, MAX_IMAGE_BYTES))
                for name, path in files[start : start + plan.batch_size]
            ]
            pipeline = pipeline or make_steps_pipeline(transform, plan)
            try:
                outputs = _run(pipeline, [data for _, data in batch])
            except RuntimeError as error:
                if is_out_of_memory(error):  # not the fault of an image
                    problem = f"DALI ran out of memory with {plan.batch_size} images per batch"
                    raise StageError(
                        f"{problem}; try " + Argument("batch_size", max(1, plan.batch_size // 2))
                    ) from error
                pipeline = None  # a pipeline that raised cannot continue
                outputs, batch = _run_one_by_one(batch, pixels)
            expected = list(
                pool.map(lambda data: _run_reference(data, transform), [data for _, data in batch])
            )
            compared = []
            for (name, _), got, wanted in zip(batch, outputs, expected, strict=True):
                both = zip(got[:-1], wanted[:-1], strict=True)
                last = [_levels_from_tensor(tensor, transform) for tensor in (got[-1], wanted[-1])]
                differences = [_compute_difference(*pair) for pair in (*both, last)]
                pixels.steps = [
                    add_image(*pair) for pair in zip(pixels.steps, differences, strict=True)
                ]
                mean, most = float(differences[-1].mean()), float(differences[-1].max())
                compared.append(ComparedImage(name, wanted[-1], got[-1], mean, most))
            yield compared


def _run(pipeline: Any, arrays: Sequence[Any]) -> list[list[np.ndarray]]:
    """Runs one batch; returns each image's array at every output."""
    fed = [
        np.frombuffer(array, np.uint8) if isinstance(array, bytes) else np.ascontiguousarray(array)
        for array in arrays
    ]
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
        pipeline = pipeline or make_steps_pipeline(
            pixels.transform, replace(pixels.plan, batch_size=1)
        )
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
    return [
        first,
        *(value for step, value in steps if isinstance(step, Resize | CenterCrop)),
        steps[-1][1],
    ]


def _compute_difference(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """In levels. Those of 8 bits stay that: as floating-point numbers, three copies of a large picture took 2 GiB."""
    if got.shape != expected.shape:  # an incorrect side counts as the largest difference
        return np.full(1, 255.0)
    if got.dtype == expected.dtype == np.uint8:
        return np.asarray(np.maximum(got, expected) - np.minimum(got, expected))
    return np.abs(got.astype(np.float32) - expected.astype(np.float32))


def save_side_by_side(
    path: Path, compared: ComparedImage, transform: Transform, file: Path | None = None
) -> WorstImage:
    """Writes the image of `file`, if given | reference | result | difference as PNG. Raises StageError."""
    reference, got = (
        _levels_from_tensor(tensor, transform) for tensor in (compared.reference, compared.got)
    )
    height, width = reference.shape[:2]
    got = got if got.shape == reference.shape else _scale_levels(got, height, width)
    difference = np.abs(reference - got)
    factor = (
        max(1.0, VISIBLE / max(float(difference.max()), 1e-6)) if difference.max() > 0.01 else 1.0
    )
    panels = [reference, got, difference * factor]
    if file is not None:
        image = decode_image(file, Decode())
        panels.insert(
            0, _scale_levels(image, height, max(1, image.shape[1] * height // image.shape[0]))
        )
    gap = np.full((height, GAP, 3), 255.0)
    row = np.concatenate([part for panel in panels for part in (panel, gap)][:-1], axis=1)
    png = io.BytesIO()
    Image.fromarray(np.clip(row + 0.5, 0, 255).astype(np.uint8)).save(png, "PNG")
    write_bytes(path, png.getvalue())
    return WorstImage(compared.name, compared.mean_levels, compared.max_levels, path.name, factor)


def _scale_levels(levels: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.asarray(
        Image.fromarray(np.clip(levels + 0.5, 0, 255).astype(np.uint8)).resize((width, height)),
        float,
    )


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
    selection: Selection = EMPTY,
) -> tuple[ParityRecord, pl.DataFrame, Sequence[ComparedImage]]:
    """Compares on `samples`; `infer` maps a batch of inputs to the model's outputs, the first of which is compared.

    `labels` are the samples' classes; `decoder` compares the predictions of a detector or segmenter. Rows of a `selection` are
    compared as sets. Raises BadInputError if DALI decodes none of the images. Returns the record, one row per image as `proof`
    describes, and the worst images.
    """
    files = [(file.path, path) for file, path in zip(samples.files, samples.paths, strict=True)]
    truth = (
        dict(zip((name for name, _ in files), labels, strict=True)) if labels is not None else {}
    )
    pixels = PixelDifferences(transform, plan)
    worst: list[ComparedImage] = []
    parts: list[pl.DataFrame] = []
    decoded: tuple[list[Any], list[Any]] = ([], [])
    with listener.step("parity", total=len(files)) as step:
        for batch in compare_images(files, pixels, threads):
            if batch:
                outputs = _infer_both(batch, infer)
                parts.append(
                    _rows_from_batch(batch, outputs, truth, selection, classifies=classifies)
                )
                names = [image.name for image in batch]
                for known, side in zip(decoded, outputs, strict=True):
                    known += decoder.decode(side, names) if decoder else []
            worst = sorted([*worst, *batch], key=lambda image: -image.mean_levels)[:WORST]
            step.advance(len(batch))
    if not parts:
        raise BadInputError(
            f"DALI could not decode any of the {len(files)} images: {pixels.refused[0].reason}"
        )
    rows = pl.concat(parts)
    if decoder:
        rows = decoder.add_columns(rows, *decoded)
    task = decoder.task if decoder else None
    record = _record_from_rows(rows, pixels, task, trained=trained, classifies=classifies)
    if record.far:  # a verdict over all images hides single ones
        _warn_of_far_images(record, worst[0], listener)
    return record, rows, worst


def _infer_both(
    batch: Sequence[ComparedImage], infer: Callable[[np.ndarray], Mapping[str, np.ndarray]]
) -> list[dict[str, np.ndarray]]:
    """The model's outputs (images, ...) by name, of the reference's tensors and of DALI's."""
    tensors = [getattr(image, side) for side in ("reference", "got") for image in batch]
    both = infer(np.stack(tensors))
    halves = slice(len(batch)), slice(len(batch), None)
    return [{name: output[half] for name, output in both.items()} for half in halves]


def _rows_from_batch(
    batch: Sequence[ComparedImage],
    outputs: Sequence[Mapping[str, np.ndarray]],
    truth: Mapping[str, int],
    selection: Selection,
    *,
    classifies: bool,
) -> pl.DataFrame:
    """One row per image: its differences in pixels, its class if known, and the errors of the model's first output."""
    reference, got = outputs
    aligned = align_rows(reference, got, selection, TOLERATED_RELATIVE_ERROR[Precision.FP32])
    first = (next(iter(named.values())) for named in (reference, aligned))
    columns = {
        "image": [image.name for image in batch],
        "mean_levels": [image.mean_levels for image in batch],
        "max_levels": [image.max_levels for image in batch],
        "class": [truth.get(image.name) for image in batch],
    }
    pixels = pl.DataFrame(columns, schema_overrides={"class": pl.Int64})
    return pixels.hstack(rows_from_outputs(*first, classifies=classifies))


def _record_from_rows(
    rows: pl.DataFrame,
    pixels: PixelDifferences,
    task: TaskContract | None,
    *,
    trained: bool,
    classifies: bool,
) -> ParityRecord:
    refused = tuple(pixels.refused)
    proof = proof_from_rows(
        rows, trained=trained, classifies=classifies, refused=len(refused), task=task
    )
    differences = zip(rows["mean_levels"], rows["max_levels"], strict=True)
    far = sum(not is_near(*levels) for levels in differences)
    return ParityRecord(
        proof, images=rows.height, steps=tuple(pixels.steps), far=far, refused=refused
    )


def _warn_of_far_images(record: ParityRecord, worst: ComparedImage, listener: Listener) -> None:
    limits = f"mean over {NEAR_MEAN_LEVELS:g} or max over {NEAR_MAX_LEVELS:g} levels"
    farthest = f"{worst.name} (mean {worst.mean_levels:.1f}, max {worst.max_levels:.0f})"
    listener.warn(
        f"{record.far} of {record.images} images differ visibly ({limits}); worst: {farthest}"
    )


def is_near(mean_levels: float, max_levels: float) -> bool:
    return mean_levels <= NEAR_MEAN_LEVELS and max_levels <= NEAR_MAX_LEVELS


TOLERANCE_LEVELS, FIRST_CALLS = 1.0, 8
"""Equal transforms differ by no more, since kernels round differently; calls on the first image, which find random augmentation."""
_GIVEN: Mapping[str, Callable[[Any, Image.Image], Any]] = {
    "a Pillow image": lambda call, image: call(image),
    "an HWC uint8 RGB array": lambda call, image: call(np.array(image)),
    "image=, an HWC uint8 RGB array": lambda call, image: call(
        image=np.array(image)
    ),  # albumentations
    "a Pillow image, after a call without arguments": lambda call, image: call()(image),
}


class TrainingTransform:
    """The callable NAME of FILE.py, called as the first of `_GIVEN` that does not raise. Raises BadInputError."""

    def __init__(self, text: str) -> None:
        file, _, name = text.rpartition(":")
        if not (file.endswith(".py") and Path(file).is_file()):
            raise BadInputError(
                "no such Python file; give FILE.py:NAME", argument=Argument("against", text)
            )
        self.text, self.given, self._code = text, "", UserCode(Path(file))
        with self._code.running():
            defined = vars(self._code.import_definitions())
            self._call: Any = defined.get(name)
        if not callable(self._call):
            known = [
                key for key, value in defined.items() if callable(value) and not key.startswith("_")
            ]
            raise BadInputError(
                f"{file} has no transform '{name}'; it defines {', '.join(known) or 'none'}"
            )

    def apply(self, path: Path) -> np.ndarray:
        """(height, width, channels) in float32, from an RGB image as torchvision's folder datasets load it."""
        calls, errors, results = 2 if self.given else FIRST_CALLS, list[str](), list[Any]()
        with open_image(path) as opened, self._code.running():
            for given in [self.given] if self.given else _GIVEN:
                try:
                    results = [
                        _GIVEN[given](self._call, opened.convert("RGB")) for _ in range(calls)
                    ]
                    self.given = given
                    break
                except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's
                    errors.append(
                        f"given {given}, it raised {describe_user_error(error)}".splitlines()[0]
                    )
        if not results:
            raise BadInputError(
                "\n".join([f"{self.text} on {path.name}: {errors[0]}", *errors[1:2]])
            )
        first, *others = map(self._read, results)
        if not all(np.array_equal(first, other) for other in others):
            reason = f"{self.text} is not deterministic: calls on {path.name} differ"
            raise BadInputError(
                f"{reason}\ngive the transform of validation, without random augmentation"
            )
        return first

    def _read(self, result: Any) -> np.ndarray:
        output = (
            result.get("image", result.get("pixel_values"))
            if isinstance(result, Mapping)
            else result
        )
        values = np.asarray(output.detach().cpu().float() if hasattr(output, "detach") else output)
        values = values[0] if values.ndim == 4 and len(values) == 1 else values
        if (
            values.ndim != 3
            or not {1, 3} & {values.shape[0], values.shape[2]}
            or not np.isfinite(values).all()
        ):
            got = f"{type(output).__name__} of shape {list(values.shape)}"
            raise BadInputError(
                f"{self.text} returned a {got}, not finite values in 1 or 3 channels (CHW or HWC)"
            )
        return (np.moveaxis(values, 0, -1) if values.shape[0] in (1, 3) else values).astype(
            np.float32
        )


Geometry = tuple[tuple[Decode | Resize | CenterCrop, ...], Any, Any]
"""The steps up to 8-bit levels, and what no card states: how sides round, and by how many pixels a crop starts earlier."""
Tried = Sequence[tuple[Path, np.ndarray]]
_IDENTITY = (Rescale(1.0), Normalize((0.0,), (1.0,)))
_decode_once = lru_cache(32)(decode_image)


def _list_changes(geometry: Geometry, size: tuple[int, int]) -> Iterator[Geometry]:
    """Geometries with one property changed; `size` is that of the user's results."""
    steps, rounding, shift = geometry
    for at, step in enumerate(steps):
        fields = {
            field.name: get_args(field.type)
            for field in structs.fields(step)
            if get_origin(field.type) is Literal
        }
        fields |= {name: (False, True) for name in ("exif", "antialias") if hasattr(step, name)}
        now = [getattr(step, name) for name in fields]
        for values in sorted(
            product(*fields.values()), key=lambda choice: sum(map(ne, choice, now))
        ):
            with suppress(BadInputError):
                changed = structs.replace(step, **dict(zip(fields, values, strict=True)))
                yield (*steps[:at], changed, *steps[at + 1 :]), rounding, shift
    yield from ((steps, other, shift) for other in (math.ceil, round))
    yield from ((steps, rounding, moved) for moved in product((-1, 0, 1), repeat=2))
    yield tuple(step for step in steps if not isinstance(step, CenterCrop)), rounding, shift
    own = structs.replace(
        next((step for step in steps if isinstance(step, Resize)), Resize((1,))), max_size=None
    )
    long = structs.replace(own, size=(max(size),), fit="long")
    yield (steps[0], structs.replace(own, size=size, fit="exact")), rounding, shift
    for fill in (0, 114, 128, 255):
        yield (steps[0], long, CenterCrop(*size, fill=fill)), rounding, shift
    for side in range(min(size), min(size) * 4 // 3 + 1):
        yield (
            (steps[0], structs.replace(own, size=(side,), fit="short"), CenterCrop(*size)),
            rounding,
            shift,
        )


def _make_levels(path: Path, geometry: Geometry, channels: int) -> np.ndarray:
    (decode, *steps), rounding, shift = geometry
    value: np.ndarray = _decode_once(path, decode)
    for step in steps:
        if isinstance(step, Resize) and rounding and step.fit != "exact":
            base = (min if step.fit == "short" else max)(value.shape[:2])
            sides = tuple(max(1, rounding(side * step.size[0] / base)) for side in value.shape[:2])
            value = apply_step(structs.replace(step, size=sides, fit="exact", max_size=None), value)
        else:
            value = apply_step(
                step, np.roll(value, shift, (0, 1)) if isinstance(step, CenterCrop) else value
            )
    return value if value.shape[2] == channels else np.repeat(value[:, :, :1], channels, axis=2)


def _fit_values(geometry: Geometry, tried: Tried) -> tuple[StepDifference, Any, Any]:
    """How far results are from a linear function of the levels; its slope and offset, None if the shapes differ."""
    unlike = StepDifference("card, changed", 255.0, 255.0, 1.0, len(tried)), None, None
    try:
        pairs = [(_make_levels(path, geometry, got.shape[2]), got) for path, got in tried]
    except (ValueError, NotImplementedError):  # torch does not have every filter
        return unlike
    if any(levels.shape != got.shape for levels, got in pairs):
        return unlike
    flat = (
        [array.reshape(-1, array.shape[2]) for array in side] for side in zip(*pairs, strict=True)
    )
    x, y = (np.concatenate(arrays).astype(np.float64) for arrays in flat)
    covariance = ((x - x.mean(0)) * (y - y.mean(0))).mean(0)
    slope = np.maximum(covariance / np.maximum(x.var(0), 1e-6), 1e-6)
    off = np.abs(y - y.mean(0) - slope * (x - x.mean(0))) / slope
    mean, most, share = float(off.mean()), float(off.max()), float((off > 0.5).mean())
    return (
        StepDifference("card, changed", mean, most, share, len(tried)),
        slope,
        y.mean(0) - slope * x.mean(0),
    )


def _name_values(slope: Any, offset: Any, own: tuple[Any, Any]) -> tuple[Rescale, Normalize]:
    """The steps that map a level to `slope` · level + `offset`: the card's or none, or else estimates."""
    for rescale in (own[0], structs.replace(own[0], divisor=1.0 if slope.max() > 0.2 else 255.0)):
        std = 1 / (slope * rescale.divisor)
        mean = rescale.offset - offset * std
        for known in (own[1], _IDENTITY[1]):
            if np.allclose(mean, known.mean, 0, 0.5 / rescale.divisor) and np.allclose(
                std, known.std, 0.005
            ):
                return rescale, known
    return rescale, Normalize(
        *(tuple(round(float(value), 4) for value in some) for some in (mean, std))
    )


def _describe_change(new: Any, old: Any) -> str:
    names = [
        field
        for field in (new or old).__struct_fields__
        if getattr(new, field, None) != getattr(old, field, None)
    ]
    words = (
        f"{field} {getattr(new, field)} instead of {getattr(old, field, 'none')}"
        for field in names
        if new
    )
    return "none" if new in (None, *_IDENTITY) else ", ".join(words)


def explain_difference(transform: Transform, tried: Tried) -> tuple[dict[str, str], StepDifference]:
    """The changes, by step, that bring the card's transform nearest to a user's results, and the difference that is left.

    Both are compared up to a linear function of the levels, which then gives rescale and normalize.
    """
    before = (transform.decode, *transform.geometry)
    geometry: Geometry = (before, None, (0, 0))
    best = _fit_values(geometry, tried)
    alone = [_fit_values(geometry, [sample])[0] for sample in tried]
    if best[0].max_levels > TOLERANCE_LEVELS >= max(difference.max_levels for difference in alone):
        return {"normalize": "by the values of each image alone"}, alone[0]
    while best[0].max_levels > TOLERANCE_LEVELS:
        size, worst = tried[0][1].shape[:2], best[0].mean_levels
        nearest = min(
            _list_changes(geometry, size),
            key=lambda changed: _fit_values(changed, tried)[0].mean_levels,
        )
        if (error := _fit_values(nearest, tried))[0].mean_levels > 0.9 * worst:
            break
        geometry, best = nearest, error
    if best[1] is None:
        return {get_step_name(before[-1]): f"shape {tried[0][1].shape}"}, best[0]
    own = (transform.rescale or _IDENTITY[0], transform.normalize or _IDENTITY[1])
    pairs: Any = [
        *zip_longest(geometry[0], before),
        *zip(_name_values(*best[1:], own), own, strict=True),
    ]
    changes = {
        get_step_name(new or old): _describe_change(new, old) for new, old in pairs if new != old
    }
    if geometry[1]:
        changes = {
            "resize": f"sides round {'up' if geometry[1] is math.ceil else 'to the nearest'}, not down",
            **changes,
        }
    if geometry[2] != (0, 0):
        changes = {**changes, "center_crop": f"starts {geometry[2]} pixels earlier"}
    return changes, best[0]


def compare_training_transform(
    training: TrainingTransform,
    model: str,
    samples: ImageSet,
    transform: Transform,
    plan: DaliPlan,
    folder: Path,
    listener: Listener,
) -> AgainstRecord:
    """Compares the card's transform and its DALI pipeline with a user's, and writes a picture to `folder`."""
    paths = dict(zip((file.path for file in samples.files), samples.paths, strict=True))
    transform = Transform((*transform.steps[:-1], structs.replace(transform.pack, order="HWC")))
    pixels = PixelDifferences(transform, plan)
    kept, card, dali = _compare_results(training, paths, pixels, listener)
    for refused in pixels.refused:
        listener.warn(
            f"{refused.image} is left out, because DALI cannot decode it: {refused.reason}"
        )
    if not kept:
        raise BadInputError(f"DALI could not decode any of the {len(paths)} images")

    verdict, step, differences = Verdict.PASS, None, [card, dali]
    most = f"{TOLERANCE_LEVELS:g} of 255 levels"
    reason = f"{training.text} equals the card's transform: no value differs by more than {most}"
    if round(card.max_levels, 2) > TOLERANCE_LEVELS:
        tried = [(paths[image.name], image.got) for image in kept]
        with listener.step("explain"):
            changes, left = explain_difference(transform, tried)
        verdict, step, differences = Verdict.FAIL, next(iter(changes), None), [card, dali, left]
        reason = f"{training.text} differs from the card's transform{_describe_changes(changes, card, left)}"

    worst = save_side_by_side(
        folder / f"{make_file_name(model)}.png", kept[0], transform, paths[kept[0].name]
    )
    return AgainstRecord(
        model=model,
        transform=training.text,
        given=training.given,
        images=ImagesRecord(str(samples.root), len(paths)),
        verdict=verdict,
        reason=reason,
        step=step,
        tolerance_levels=TOLERANCE_LEVELS,
        differences=tuple(differences),
        worst=replace(worst, file=str(folder / worst.file)),
    )


def _compare_results(
    training: TrainingTransform,
    paths: Mapping[str, Path],
    pixels: PixelDifferences,
    listener: Listener,
) -> tuple[list[ComparedImage], StepDifference, StepDifference]:
    """The most different three images and the least different one, with the user's result as `got`; the card's difference, and DALI's."""
    kept: list[ComparedImage] = []
    card, dali = (StepDifference(name, 0.0, 0.0, 0.0, 0) for name in ("card", "DALI"))
    with listener.step("compare", total=len(paths)) as step:
        for batch in compare_images(list(paths.items()), pixels):
            for image in batch:
                got = training.apply(paths[image.name])
                *both, wanted = (
                    _levels_from_tensor(tensor, pixels.transform)
                    for tensor in (image.reference, image.got, got)
                )
                levels, ours = (_compute_difference(tensor, wanted) for tensor in both)
                card, dali = add_image(card, levels), add_image(dali, ours)
                mean, most = float(levels.mean()), float(levels.max())
                kept.append(replace(image, got=got, mean_levels=mean, max_levels=most))
            kept.sort(key=lambda image: -image.mean_levels)
            kept[3:] = kept[3:][-1:]
            step.advance(len(batch))
    return kept, card, dali


def _describe_changes(
    changes: Mapping[str, str], card: StepDifference, left: StepDifference
) -> str:
    """The changes of the card, by step, that leave the difference `left`, and whether they explain that of the `card`."""
    explained = (
        is_near(left.mean_levels, left.max_levels) and left.mean_levels <= card.mean_levels / 4
    )
    unknown = "" if explained else ", and no change of the card explains it; the nearest is"
    return f"{unknown} in " + "; in ".join(f"{step}: {change}" for step, change in changes.items())
