"""The proof: the same images through both pipelines and through the model."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.core.errors import BadInputError
from optpipe.core.events import Listener
from optpipe.core.transform import Transform
from optpipe.models.inputs.images import decode_image
from optpipe.models.inputs.synthetic import make_edge_case_files
from optpipe.preprocess.dali.pipeline import INPUT, DaliPlan, dali_from_transform
from optpipe.preprocess.parity.pixels import ComparedImage, PixelDifferences, compare_images, measure_steps_alone
from optpipe.preprocess.parity.proof import PredictionDecoder, proof_from_rows, rows_from_outputs
from optpipe.preprocess.parity.records import EdgeCaseFile, Outcome, ParityRecord

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

WORST = 3
"""Images that are kept to be looked at."""
NEAR_MEAN_LEVELS, NEAR_MAX_LEVELS = 0.5, 8.0
"""A file whose result stays within these came through; above them it is another image."""


@dataclass(frozen=True, slots=True)
class Parity:
    """The whole proof, and what it was made from."""

    record: ParityRecord
    rows: "pl.DataFrame"
    """One row per image, as `proof` describes; the figures follow from them."""
    worst: tuple[ComparedImage, ...]


def prove_parity(
    paths: Sequence[Path],
    transform: Transform,
    plan: DaliPlan,
    infer: Callable[["np.ndarray"], "Mapping[str, np.ndarray]"],
    listener: Listener,
    *,
    labels: Sequence[int] | None = None,
    trained: bool,
    classifies: bool,
    threads: int = 2,
    decoder: PredictionDecoder | None = None,
) -> Parity:
    """Compares on `paths`; `infer` maps a batch of the model's input to its outputs, the first of which is compared.

    `labels` go with `paths`; predictions of a detector or segmenter are compared where their `decoder` is given.

    Raises BadInputError where DALI decodes none of the images.
    """
    import numpy as np
    import polars as pl

    common = os.path.commonpath([path.parent for path in paths])  # rows leave this machine, its folders do not
    files = [(path.relative_to(common).as_posix(), path) for path in paths]
    truth = dict(zip((name for name, _ in files), labels, strict=True)) if labels is not None else {}
    pixels = PixelDifferences(transform, plan)
    worst: list[ComparedImage] = []
    parts: list[pl.DataFrame] = []
    by_name = dict(files)
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
                    known += decoder.decode(found, [by_name[each.name] for each in batch]) if decoder else []
            worst = sorted([*worst, *batch], key=lambda each: -each.mean_levels)[:WORST]
            step.advance(len(batch))
    if not parts:
        raise BadInputError(f"DALI could not decode any of the {len(files)} images: {pixels.refused[0].reason}")
    rows = pl.concat(parts)
    if decoder:
        rows = decoder.add_columns(rows, [by_name[name] for name in rows["image"]], *decoded)
    kept = set(rows["image"])
    measure_steps_alone([pair for pair in files if pair[0] in kept], pixels)
    record = ParityRecord(
        proof_from_rows(
            rows,
            trained=trained,
            classifies=classifies,
            refused=len(pixels.refused),
            task=decoder.task if decoder else None,
        ),
        images=rows.height,
        steps=pixels.list_steps(),
        largest_step=pixels.find_largest_step(),
        far=sum(not _is_near(*each) for each in zip(rows["mean_levels"], rows["max_levels"], strict=True)),
        refused=tuple(pixels.refused),
        edge_cases=check_edge_cases(transform, plan),
    )
    return Parity(record, rows, tuple(worst))


def check_edge_cases(transform: Transform, plan: DaliPlan) -> tuple[EdgeCaseFile, ...]:
    """What becomes of files that break pipelines. A truncated one must be refused by both."""
    every = dict(make_edge_case_files())
    readable = {name: data for name, data in every.items() if _is_readable(data, transform)}
    pixels = PixelDifferences(transform, replace(plan, batch_size=len(readable)))
    found = {each.name: each for batch in compare_images(list(readable.items()), pixels) for each in batch}
    results: list[EdgeCaseFile] = []
    for name, data in every.items():
        if name in found:
            mean, largest = found[name].mean_levels, found[name].max_levels
            near: Outcome = "near" if _is_near(mean, largest) else "different"
            results.append(EdgeCaseFile(name, "equal" if largest <= 1.01 else near, mean, largest))
        else:
            outcome = "refused by DALI" if name in readable else _outcome_from_refused(data, transform, plan)
            results.append(EdgeCaseFile(name, outcome))
    return tuple(results)


def _is_readable(data: bytes, transform: Transform) -> bool:
    try:
        decode_image(data, transform.decode)
    except BadInputError:
        return False
    return True


def _is_near(mean_levels: float, max_levels: float) -> bool:
    return mean_levels <= NEAR_MEAN_LEVELS and max_levels <= NEAR_MAX_LEVELS


def _outcome_from_refused(data: bytes, transform: Transform, plan: DaliPlan) -> Outcome:
    """Of a file that Pillow refuses."""
    import numpy as np

    pipeline = dali_from_transform(transform, plan, prefetch=1)
    pipeline.feed_input(INPUT, [np.frombuffer(data, np.uint8)])
    try:
        pipeline.run()
    except RuntimeError:
        return "refused by both"
    return "refused by Pillow, decoded by DALI"
