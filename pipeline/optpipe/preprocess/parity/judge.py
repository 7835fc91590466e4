"""Whether the model's answers stay the same: PASS, FAIL, or not enough evidence."""

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from optpipe.core.verdict import Verdict
from optpipe.stats.paired import (
    CONFIDENCE,
    Interval,
    normal_quantile,
    share_interval,
)

if TYPE_CHECKING:
    import numpy as np

AGREEMENT = 0.995
"""Share of equal top-1 answers that a replacement of preprocessing must keep."""
SNR_FLOOR_DB = 50.0
"""Error of the outputs where answers prove nothing: 0.3 % of their norm.

ResNet-50 with random weights: 90 dB with exact arithmetic, 67 dB with DALI's own resize, 30 dB without antialiasing.
"""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Equal top-1 answers out of `images`, with Wilson's 95 % interval."""

    equal: int
    images: int

    @property
    def interval(self) -> Interval:
        """The 95 % interval of the share."""
        return share_interval(self.equal, self.images)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "share": self.equal / self.images,
            "equal": self.equal,
            "images": self.images,
            "ci": self.interval.to_list(),
        }


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict with its reason, and what to do about it."""

    verdict: Verdict
    reason: str
    remedy: str | None = None


def agreement(reference: "np.ndarray", got: "np.ndarray") -> Agreement | None:
    """Top-1 agreement of two lists of classes; None where the reference answers one class for every image."""
    import numpy as np

    if np.unique(reference).size < 2:
        return None
    return Agreement(int(np.count_nonzero(reference == got)), len(reference))


def images_needed(share: float = 1.0) -> int | None:
    """How many images with this share of equal answers lift the interval's lower end to AGREEMENT; None where none do.

    Wilson's lower end, solved for the count.
    """
    if share <= AGREEMENT:
        return None
    needed = normal_quantile(CONFIDENCE) ** 2 * AGREEMENT * (1 - AGREEMENT) / (share - AGREEMENT) ** 2
    return ceil(needed)


def judged(
    found: Agreement | None,
    snr_db: float | None,
    *,
    finite: bool,
    trained: bool,
    classifies: bool,
    refused: int,
    blind: bool = False,
) -> Judgement:
    """The verdict on a derived pipeline; `snr_db` is None where the outputs are equal to the bit.

    `blind` is a model that answers other pictures alike to the bit, as one whose last layer is zero does.
    """
    if refused:
        return Judgement(
            Verdict.FAIL,
            f"DALI cannot decode {refused} image(s) that the model's own loader reads",
            "convert or remove them",
        )
    if not finite:
        return Judgement(Verdict.FAIL, "the model's outputs are not finite")
    snr = "equal to the bit" if snr_db is None else f"SNR {snr_db:.1f} dB"
    if trained and found is not None:
        return _by_agreement(found)
    if snr_db is not None and snr_db < SNR_FLOOR_DB:
        return Judgement(Verdict.FAIL, f"outputs differ: {snr}, the floor is {SNR_FLOOR_DB:.0f} dB")
    if blind:
        return Judgement(
            Verdict.INCONCLUSIVE,
            "the model's outputs are the same for every image, so that they are equal proves nothing",
            "give trained weights with --weights",
        )
    if not classifies:
        return Judgement(
            Verdict.PASS, f"no classifier, so judged by the outputs' error: {snr}, floor {SNR_FLOOR_DB:.0f} dB"
        )
    if trained:
        return Judgement(
            Verdict.INCONCLUSIVE,
            f"the model answers every image alike ({snr}), so agreement proves nothing",
            "give images of several classes with --images",
        )
    return Judgement(
        Verdict.PASS, f"weights are random, so judged by the outputs' error: {snr}, floor {SNR_FLOOR_DB:.0f} dB"
    )


def _by_agreement(found: Agreement) -> Judgement:
    interval = found.interval
    extent = f"95 % interval {interval.low:.2%} to {interval.high:.2%}"
    share = f"{found.equal} of {found.images} top-1 answers agree, {extent}"
    if interval.low >= AGREEMENT:
        return Judgement(Verdict.PASS, share)
    if interval.high < AGREEMENT:
        return Judgement(Verdict.FAIL, f"{share}; {AGREEMENT:.1%} is wanted")
    needed = images_needed(found.equal / found.images)
    if needed is None:
        remedy = "look at the worst images; where so many answers differ, more images prove no equality"
    else:
        remedy = f"give at least {needed} images (--images, --limit)"
    return Judgement(Verdict.INCONCLUSIVE, f"{share}; too few to prove {AGREEMENT:.1%}", remedy)
