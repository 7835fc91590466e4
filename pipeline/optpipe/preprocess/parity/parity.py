"""The proof: the same pictures through both pipelines and through the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.core.events import Listener
from optpipe.core.transform import Transform
from optpipe.errors import BadInputError
from optpipe.inputs.images import decode_image
from optpipe.inputs.odd import make_edge_case_files
from optpipe.preprocess.dali.pipeline import DaliPlan
from optpipe.preprocess.parity.judge import Agreement, Judgment
from optpipe.preprocess.parity.pixels import (
    ComparedImage,
    PixelDifferences,
    compare_images,
    measure_steps_alone,
)
from optpipe.preprocess.parity.proof import Proof, proof_from_rows, rows_from_outputs
from optpipe.stats.agreement import OutputError

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

WORST = 3
"""So many pictures are kept to be looked at."""
NEAR_MEAN_LEVELS, NEAR_MAX_LEVELS = 0.5, 8.0
"""A file whose result stays within these came through; above them it is another picture."""


@dataclass(frozen=True, slots=True)
class EdgeCaseFile:
    """What became of one of the odd files."""

    name: str
    outcome: str
    """`equal` (to a level), `near`, `different`, `refused by both`, or `refused by DALI`."""
    mean_levels: float | None
    max_levels: float | None


@dataclass(frozen=True, slots=True)
class Parity:
    """The whole proof."""

    pixels: PixelDifferences
    rows: "pl.DataFrame"
    """One row per picture, as `proof` describes; the figures below follow from them."""
    worst: tuple[ComparedImage, ...]
    proof: Proof
    edge_cases: tuple[EdgeCaseFile, ...] = field(default=())

    @property
    def outputs(self) -> OutputError:
        """How far the model's outputs are apart."""
        return self.proof.outputs

    @property
    def top1(self) -> Agreement | None:
        """Equal answers of a classifier whose answers vary."""
        return self.proof.top1

    @property
    def accuracy(self) -> tuple[float, float] | None:
        """Of the reference and of DALI, where labels are known."""
        return self.proof.accuracy

    @property
    def judgment(self) -> Judgment:
        """The verdict with its reason."""
        return self.proof.judgment

    def count_far(self) -> int:
        """How many pictures did not come through, by the measure that odd files have."""
        rows = zip(self.rows["mean_levels"], self.rows["max_levels"], strict=True)
        return sum(not _is_near(mean, largest) for mean, largest in rows)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            **self.proof.to_dict(),
            "images": self.rows.height,
            "steps": [
                {"step": after.step, **after.to_dict(), "alone": alone.to_dict()}
                for after, alone in zip(self.pixels.together, self.pixels.alone, strict=True)
            ],
            "far": self.count_far(),
            "largest_step": self.pixels.find_largest_step(),
            "refused": [{"image": name, "reason": reason} for name, reason in self.pixels.refused],
            "worst": [
                {"image": each.name, "mean_levels": each.mean_levels, "max_levels": each.max_levels}
                for each in self.worst
            ],
            "odd_files": [
                {
                    "file": each.name,
                    "outcome": each.outcome,
                    "mean_levels": each.mean_levels,
                    "max_levels": each.max_levels,
                }
                for each in self.edge_cases
            ],
        }


def prove_parity(
    paths: Sequence[Path],
    transform: Transform,
    plan: DaliPlan,
    infer: Callable[["np.ndarray"], "np.ndarray"],
    listener: Listener,
    *,
    labels: Sequence[int] | None = None,
    trained: bool,
    classifies: bool,
    threads: int = 2,
) -> Parity:
    """Compares on `paths`; `infer` maps a batch of the model's input to its first output. `labels` go with `paths`."""
    import numpy as np
    import polars as pl

    files = [(str(path), path) for path in paths]
    truth = dict(zip((name for name, _ in files), labels, strict=True)) if labels is not None else {}
    pixels = PixelDifferences(transform, plan)
    worst: list[ComparedImage] = []
    parts: list[pl.DataFrame] = []
    with listener.step("parity", total=len(files)) as step:
        for batch in compare_images(files, pixels, threads):
            if batch:
                outputs = (infer(np.stack([getattr(each, side) for each in batch])) for side in ("reference", "got"))
                parts.append(_rows_from_batch(batch, truth).hstack(rows_from_outputs(*outputs, classifies=classifies)))
            worst = sorted([*worst, *batch], key=lambda each: -each.mean_levels)[:WORST]
            step.advance(len(batch))
    if not parts:
        raise BadInputError(f"DALI could not decode any of the {len(files)} images: {pixels.refused[0][1]}")
    rows = pl.concat(parts)
    kept = set(rows["image"])
    measure_steps_alone([pair for pair in files if pair[0] in kept], pixels)
    proof = proof_from_rows(rows, trained=trained, classifies=classifies, refused=len(pixels.refused))
    return Parity(pixels, rows, tuple(worst), proof, check_edge_cases(transform, plan))


def _rows_from_batch(batch: Sequence[ComparedImage], truth: Mapping[str, int]) -> "pl.DataFrame":
    import polars as pl

    columns = {
        "image": [each.name for each in batch],
        "mean_levels": [each.mean_levels for each in batch],
        "max_levels": [each.max_levels for each in batch],
        "class": [truth.get(each.name) for each in batch],
    }
    return pl.DataFrame(columns, schema_overrides={"class": pl.Int64})


def check_edge_cases(transform: Transform, plan: DaliPlan) -> tuple[EdgeCaseFile, ...]:
    """What becomes of files that break pipelines. A truncated one must be refused by both."""
    every = dict(make_edge_case_files())
    readable = {name: data for name, data in every.items() if _is_readable(data, transform)}
    pixels = PixelDifferences(transform, replace(plan, batch_size=len(readable)))
    found = {each.name: each for batch in compare_images(list(readable.items()), pixels) for each in batch}
    results = []
    for name, data in every.items():
        if name in found:
            results.append(_edge_case_from_compared(found[name]))
        else:
            outcome = "refused by DALI" if name in readable else _check_both_refuse(data, transform, plan)
            results.append(EdgeCaseFile(name, outcome, None, None))
    return tuple(results)


def _is_readable(data: bytes, transform: Transform) -> bool:
    try:
        decode_image(data, transform.decode)
    except BadInputError:
        return False
    return True


def _is_near(mean_levels: float, max_levels: float) -> bool:
    return mean_levels <= NEAR_MEAN_LEVELS and max_levels <= NEAR_MAX_LEVELS


def _edge_case_from_compared(found: ComparedImage) -> EdgeCaseFile:
    mean, largest = found.mean_levels, found.max_levels
    outcome = "equal" if largest <= 1.01 else "near" if _is_near(mean, largest) else "different"
    return EdgeCaseFile(found.name, outcome, mean, largest)


def _check_both_refuse(data: bytes, transform: Transform, plan: DaliPlan) -> str:
    import numpy as np

    from optpipe.preprocess.dali.pipeline import INPUT, dali_from_transform

    pipeline = dali_from_transform(transform, plan, prefetch=1)
    pipeline.feed_input(INPUT, [np.frombuffer(data, np.uint8)])
    try:
        pipeline.run()
    except RuntimeError:
        return "refused by both"
    return "refused by Pillow, decoded by DALI"
