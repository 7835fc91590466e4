"""The proof: the same pictures through both pipelines and through the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from optpipe.core.events import Listener
from optpipe.core.quiet import output_to
from optpipe.core.transform import Transform
from optpipe.errors import BadInputError
from optpipe.inputs.images import decoded
from optpipe.inputs.odd import odd_files
from optpipe.stages.preprocess.dali_pipeline import DaliPlan
from optpipe.stages.preprocess.judge import Agreement, Judgement, agreement, judged
from optpipe.stages.preprocess.pixels import Compared, Pixels, compared, measure_alone
from optpipe.stats.agreement import OutputError, output_error, top1_accuracy

if TYPE_CHECKING:
    import numpy as np

WORST = 3
"""So many pictures are kept to be looked at."""
NEAR_MEAN_LEVELS, NEAR_MAX_LEVELS = 0.5, 8.0
"""An odd file whose result stays within these came through; above them it is another picture."""


@dataclass(frozen=True, slots=True)
class OddFile:
    """What became of one of the odd files."""

    name: str
    outcome: str
    """`equal` (to a level), `near`, `different`, `refused by both`, or `refused by DALI`."""
    mean_levels: float | None
    max_levels: float | None


@dataclass(frozen=True, slots=True)
class Parity:
    """The whole proof."""

    pixels: Pixels
    images: tuple[tuple[str, float, float], ...]
    """Name, mean and largest difference of every picture, in levels."""
    worst: tuple[Compared, ...]
    outputs: OutputError
    top1: Agreement | None
    accuracy: tuple[float, float] | None
    """Of the reference and of DALI, where labels are known."""
    judgement: Judgement
    odd: tuple[OddFile, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "verdict": str(self.judgement.verdict),
            "reason": self.judgement.reason,
            "remedy": self.judgement.remedy,
            "images": len(self.images),
            "steps": [
                {"step": after.step, **after.to_dict(), "alone": alone.to_dict()}
                for after, alone in zip(self.pixels.together, self.pixels.alone, strict=True)
            ],
            "largest_step": self.pixels.largest(),
            "output": self.outputs.to_dict(),
            "top1_agreement": self.top1.to_dict() if self.top1 else None,
            "accuracy": dict(zip(("reference", "dali"), self.accuracy, strict=True)) if self.accuracy else None,
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
                for each in self.odd
            ],
        }


def parity(
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

    files = [(str(path), path.read_bytes()) for path in paths]
    by_name = dict(zip((name for name, _ in files), labels, strict=True)) if labels is not None else {}
    pixels = Pixels(transform, plan)
    seen: list[tuple[str, float, float]] = []
    worst: list[Compared] = []
    expected, found = [], []
    with listener.step("parity", total=len(files)) as step:
        for batch in compared(files, pixels, threads):
            if batch:
                expected.append(infer(np.stack([each.reference for each in batch])))
                found.append(infer(np.stack([each.got for each in batch])))
            seen += [(each.name, each.mean_levels, each.max_levels) for each in batch]
            worst = sorted([*worst, *batch], key=lambda each: -each.mean_levels)[:WORST]
            step.advance(len(batch))
    if not seen:
        msg = f"DALI cannot decode any of the {len(files)} images: {pixels.refused[0][1]}"
        raise BadInputError(msg)
    kept = {name for name, _, _ in seen}
    measure_alone([pair for pair in files if pair[0] in kept], pixels)
    reference, got = np.concatenate(expected), np.concatenate(found)
    error = output_error("output", reference, got)
    top1 = agreement(reference, got) if classifies else None
    accuracy = None
    if by_name and classifies:
        truth = np.asarray([by_name[name] for name, _, _ in seen])
        accuracy = (top1_accuracy(truth, reference), top1_accuracy(truth, got))
    judgement = judged(
        top1, error.snr_db, finite=error.finite, trained=trained, classifies=classifies, refused=len(pixels.refused)
    )
    return Parity(pixels, tuple(seen), tuple(worst), error, top1, accuracy, judgement, odd_parity(transform, plan))


def odd_parity(transform: Transform, plan: DaliPlan) -> tuple[OddFile, ...]:
    """What becomes of files that break pipelines. A truncated one must be refused by both."""
    results = []
    for name, data in odd_files():
        pixels = Pixels(transform, plan)
        try:
            decoded(data, transform.decode)
        except BadInputError:
            results.append(OddFile(name, _both_refuse(data, transform, plan), None, None))
            continue
        found = [each for batch in compared([(name, data)], pixels, 1) for each in batch]
        if not found:
            results.append(OddFile(name, "refused by DALI", None, None))
            continue
        mean, largest = found[0].mean_levels, found[0].max_levels
        near = mean <= NEAR_MEAN_LEVELS and largest <= NEAR_MAX_LEVELS
        outcome = "equal" if largest <= 1.01 else "near" if near else "different"
        results.append(OddFile(name, outcome, mean, largest))
    return tuple(results)


def _both_refuse(data: bytes, transform: Transform, plan: DaliPlan) -> str:
    import numpy as np

    from optpipe.stages.preprocess.dali_pipeline import INPUT, dali_from_transform

    pipeline = dali_from_transform(transform, plan, prefetch=1)
    pipeline.feed_input(INPUT, [np.frombuffer(data, np.uint8)])
    with TemporaryDirectory(prefix="optpipe-") as folder, output_to(Path(folder, "dali.log")):
        try:
            pipeline.run()
        except RuntimeError:
            return "refused by both"
    return "refused by Pillow, decoded by DALI"
