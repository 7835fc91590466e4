"""Whether the model's predictions stay the same: PASS, FAIL, or not enough evidence."""

from dataclasses import dataclass
from math import floor
from typing import TYPE_CHECKING

from optpipe.core.verdict import Verdict
from optpipe.preprocess.parity.records import Agreement, PredictionAgreement, TaskScore
from optpipe.stats.paired import compute_share_interval

if TYPE_CHECKING:
    import numpy as np

REQUIRED_AGREEMENT = 0.995
"""Share of equal top-1 predictions that a replacement of preprocessing must keep."""
MAXIMUM_SCORE_CHANGE = 0.005
"""How far a task's score may move, in either direction: as far as accuracy can at REQUIRED_AGREEMENT."""
FEWEST_IMAGES = 100
"""With fewer, the bootstrap has seen too little: of images that are all alike it says that all images are."""
SNR_FLOOR_DB = 50.0
"""Error of the outputs where predictions prove nothing: 0.3 % of their norm.

ResNet-50 with random weights: 90 dB with exact arithmetic, 67 dB with DALI's own resize, 30 dB without antialiasing.
"""


@dataclass(frozen=True, slots=True)
class Judgment:
    """The verdict with its reason, and what to do about it."""

    verdict: Verdict
    reason: str
    remedy: str | None = None


def compute_agreement(reference: "np.ndarray", got: "np.ndarray") -> Agreement | None:
    """Top-1 agreement of two `(images,)` arrays of classes; None where the reference has one class for every image."""
    import numpy as np

    if np.unique(reference).size < 2:
        return None
    return agreement_from_counts(int(np.count_nonzero(reference == got)), len(reference))


def agreement_from_counts(equal: int, images: int) -> Agreement:
    """`equal` out of `images`, with the interval of the share."""
    interval = compute_share_interval(equal, images)
    return Agreement(equal, images, equal / images, (interval.low, interval.high))


def compute_images_needed(share: float = 1.0) -> int | None:
    """How many images with this share of equal predictions lift the interval's lower end to REQUIRED_AGREEMENT; None where none do.

    The few that differ are spread evenly over the images.
    """
    if share <= REQUIRED_AGREEMENT:
        return None
    low, high = 0, 1
    while compute_share_interval(floor(share * high), high).low < REQUIRED_AGREEMENT:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        enough = compute_share_interval(floor(share * middle), middle).low >= REQUIRED_AGREEMENT
        low, high = (low, middle) if enough else (middle, high)
    return high


def judge_parity(
    found: Agreement | None,
    snr_db: float | None,
    *,
    finite: bool,
    trained: bool,
    classifies: bool,
    refused: int,
    blind: bool = False,
    score: TaskScore | None = None,
    predicted: PredictionAgreement | None = None,
) -> Judgment:
    """The verdict on a derived pipeline; `snr_db` is None where the outputs are equal to the bit.

    `classifies` is true of every model whose predictions are compared; `score` and `predicted` are a detector's or segmenter's.
    `blind` is a model whose outputs are equal to the bit for different images, as one whose last layer is zero does.
    """
    if refused:
        return Judgment(
            Verdict.FAIL,
            f"DALI cannot decode {refused} image(s) that the model's own loader can read",
            "convert or remove them",
        )
    if not finite:
        return Judgment(Verdict.FAIL, "the model's outputs contain NaN or Inf")
    snr = "bit-identical" if snr_db is None else f"SNR {snr_db:.1f} dB"
    if trained and found is not None:
        return _judge_by_agreement(found)
    if trained and predicted is not None:
        return _judge_predictions(score, predicted)
    if snr_db is not None and snr_db < SNR_FLOOR_DB:
        return Judgment(Verdict.FAIL, f"outputs differ: {snr}, below the minimum of {SNR_FLOOR_DB:.0f} dB")
    if blind:
        return Judgment(
            Verdict.INCONCLUSIVE,
            "the model's outputs are the same for every image, so agreement proves nothing",
            "use trained weights (--weights)",
        )
    if not classifies:
        return Judgment(
            Verdict.PASS, f"not a classifier, so judged by output error: {snr}, minimum {SNR_FLOOR_DB:.0f} dB"
        )
    if trained:
        return Judgment(
            Verdict.INCONCLUSIVE,
            f"the model predicts the same class for every image ({snr}), so agreement proves nothing",
            "use images of several classes (--images)",
        )
    return Judgment(
        Verdict.PASS, f"weights are random, so judged by output error: {snr}, minimum {SNR_FLOOR_DB:.0f} dB"
    )


def _judge_by_agreement(found: Agreement) -> Judgment:
    low, high = found.ci
    extent = f"95 % interval {low:.2%} to {high:.2%}"
    share = f"{found.equal} of {found.images} top-1 predictions agree, {extent}"
    if low >= REQUIRED_AGREEMENT:
        return Judgment(Verdict.PASS, share)
    if high < REQUIRED_AGREEMENT:
        return Judgment(Verdict.FAIL, f"{share}; {REQUIRED_AGREEMENT:.1%} is required")
    needed = compute_images_needed(found.share)
    if needed is None:
        remedy = "inspect the worst images; more images will not help"
    else:
        remedy = f"use at least {needed} images (--images, --limit)"
    return Judgment(Verdict.INCONCLUSIVE, f"{share}; too few images to prove {REQUIRED_AGREEMENT:.1%}", remedy)


def _judge_predictions(score: TaskScore | None, predicted: PredictionAgreement) -> Judgment:
    """FAIL where the whole interval of the agreement or of the score's drop is outside its limit; PASS where it is inside.

    With annotations the score's interval decides on PASS, without them that of the agreement.
    """
    (low, high), required = predicted.ci, f"{REQUIRED_AGREEMENT:.1%}"
    agreed = f"{predicted.share:.2%} agreement of predictions, 95 % interval {low:.2%} to {high:.2%}"
    if predicted.images < FEWEST_IMAGES:
        reason = f"{agreed}; {predicted.images} images are too few to prove it"
        return Judgment(Verdict.INCONCLUSIVE, reason, f"use at least {FEWEST_IMAGES} images (--images, --limit)")
    if high < REQUIRED_AGREEMENT:
        return Judgment(Verdict.FAIL, f"{agreed}; {required} is required")
    passed, said, unproven = low >= REQUIRED_AGREEMENT, agreed, f"too few images to prove {required}"
    if score is not None:
        low, high = score.drop_ci
        limit = f"{100 * MAXIMUM_SCORE_CHANGE:g} points"
        said = f"{score.name} drop {100 * score.drop:.2f} points, 95 % interval {100 * low:.2f} to {100 * high:.2f}"
        if max(low, -high) > MAXIMUM_SCORE_CHANGE:
            return Judgment(Verdict.FAIL, f"{said}; a change of at most {limit} is allowed")
        passed, unproven = max(-low, high) <= MAXIMUM_SCORE_CHANGE, f"too few images to prove a change within {limit}"
    if passed:
        return Judgment(Verdict.PASS, f"{said}, {predicted.images} images")
    return Judgment(Verdict.INCONCLUSIVE, f"{said}; {unproven}", "use more images (--images, --limit)")
