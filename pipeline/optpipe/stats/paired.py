"""Figures of independent samples, and differences of two models on the same samples: of outputs, and of scores with intervals."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, inf, log, log10, sqrt
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from optpipe.core.entries import OutputError
from optpipe.core.precision import Precision
from optpipe.stats.means import Interval, compute_t_quantile, compute_t_tail, special

TOLERATED_RELATIVE_ERROR: Mapping[Precision, float] = {
    Precision.FP32: 1e-3,
    Precision.TF32: 1e-2,
    Precision.FP16: 2e-2,
    Precision.BF16: 1e-1,
    Precision.INT8: 10**-0.5,
    Precision.FP8: 10**-0.5,
}
"""Largest relative L2 error of an output, by precision.

The unit roundoff is 6e-8 for FP32, 5e-4 for FP16 and TF32, 4e-3 for BF16; a network of some fifty layers accumulates a few
dozen of them, and FP32 sums have another order. For INT8 and FP8 the limit (an SNR of 10 dB) only shows that the function is the
same: `optpipe evaluate` judges their accuracy on labeled images.
"""
LOW_SNR_DB = 20.0
"""An output below it causes a warning: the error is more than a tenth of it."""

RowErrors = Mapping[str, np.ndarray]
"""Each sample's errors: the columns of `compute_row_errors` by name."""


def compute_output_error(name: str, reference: np.ndarray, got: np.ndarray) -> OutputError:
    """Error figures in float64; outputs of different shapes, such as two lists of boxes, have the largest error."""
    if reference.shape != got.shape:
        return _as_wrong_as_can_be(name)
    return pool_errors(name, compute_row_errors(reference, got))


def compare_rows(reference: np.ndarray, got: np.ndarray) -> RowErrors:
    """`compute_row_errors`, and of both the hash of the places of the largest values along the last axis; outputs of different
    shapes have no finite error.
    """
    if reference.shape != got.shape:
        blank = np.zeros_like(reference)
        return {**compare_rows(blank, blank), "finite": np.zeros(len(reference), bool)}
    best = {
        f"{of}_best": _hash_best(value) for of, value in (("reference", reference), ("output", got))
    }
    return {**compute_row_errors(reference, got), **best}


def _hash_best(output: np.ndarray) -> np.ndarray:
    if not output.size:
        return np.zeros(len(output), np.uint32)
    places = np.argmax(
        output.reshape(len(output), -1, output.shape[-1] if output.ndim > 1 else 1), axis=-1
    )
    return np.array([crc32(row.tobytes()) for row in places.astype(np.int64)], np.uint32)


def compute_row_errors(reference: np.ndarray, got: np.ndarray) -> dict[str, np.ndarray]:
    """Per sample (first axis) the sums for `pool_errors`; stored with a proof, they reproduce its figures."""
    count = len(reference) if reference.ndim else 1
    with np.errstate(invalid="ignore", over="ignore"):  # `finite` reports it
        expected, output = (
            side.astype(np.float64).reshape(count, -1 if side.size else 0)
            for side in (reference, got)
        )
        difference = np.abs(output - expected)
        return {
            "values": np.full(count, expected.shape[1]),
            "finite": (np.isfinite(output) & np.isfinite(expected)).all(axis=1),
            "reference_square": (expected**2).sum(axis=1),
            "output_square": (output**2).sum(axis=1),
            "difference_square": (difference**2).sum(axis=1),
            "product": (expected * output).sum(axis=1),
            "difference_sum": difference.sum(axis=1),
            "difference_max": difference.max(axis=1, initial=0.0),
        }


def pool_errors(name: str, rows: Mapping[str, np.ndarray]) -> OutputError:
    """The error figures over all samples together, from their `compute_row_errors`."""
    if not rows["finite"].all():
        return _as_wrong_as_can_be(name)
    norm, distance, length = (
        sqrt(float(rows[f"{of}_square"].sum())) for of in ("reference", "difference", "output")
    )
    relative = distance / norm if norm > 0 else (0.0 if distance == 0 else _BIG)
    cosine = (
        float(rows["product"].sum()) / (norm * length)
        if norm * length > 0
        else float(distance == 0)
    )
    return OutputError(
        name=name,
        max_abs=float(rows["difference_max"].max(initial=0.0)),
        mean_abs=float(rows["difference_sum"].sum()) / max(int(rows["values"].sum()), 1),
        relative=relative,
        snr_db=None if relative == 0 else -20 * log10(relative),
        cosine=min(1.0, max(-1.0, cosine)),
        finite=True,
    )


_BLOCK, _MASKED, _FP16_LARGEST = 1 << 16, 1e9, 65503.0
_SUMS = (
    "values", "reference_square", "output_square", "difference_square", "product", "difference_sum", "difference_max",
)  # fmt: skip


def sum_errors(expected: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """The sums for `pool_sums` in FP32, (blocks that fit a cache, sums).

    A value beyond 1e9 is a mask's, and equals FP16's largest value or more with its sign.
    """
    if expected.shape != actual.shape:
        return np.full((1, len(_SUMS)), np.nan)
    sums = []
    whole = [np.ascontiguousarray(side, np.float32).reshape(-1) for side in (expected, actual)]
    for at in range(0, whole[0].size, _BLOCK):
        reference, output = (side[at : at + _BLOCK] for side in whole)
        with np.errstate(invalid="ignore", over="ignore"):
            if not reference @ reference < _MASKED**2:
                masked = (
                    (np.abs(reference) > _MASKED)
                    & (np.abs(output) > _FP16_LARGEST)
                    & (np.sign(reference) == np.sign(output))
                )
                reference, output = (
                    np.where(masked, np.float32(0), side) for side in (reference, output)
                )
            apart = output - reference
            pairs = ((reference, reference), (output, output), (apart, apart), (reference, output))
            products = [float(left @ right) for left, right in pairs]
            np.abs(apart, out=apart)
            sums.append([reference.size, *products, float(apart.sum()), float(apart.max())])
    return np.array(sums).reshape(-1, len(_SUMS))


def pool_sums(name: str, sums: np.ndarray) -> OutputError:
    return pool_errors(
        name, {**dict(zip(_SUMS, sums.T, strict=True)), "finite": np.isfinite(sums).all(axis=1)}
    )


FEWEST_FOR_SNR = 60
"""Samples that the error must be spread over for its interval: the outputs of a few predict little."""


LARGEST_NOISE = 100.0
"""Largest assumed noise power of a sample that was not drawn, as a multiple of the mean: 20 dB worse than the others.

Samples with more noise that are too rare to be drawn cannot be excluded by any number of samples (Bahadur & Savage, Annals of
Mathematical Statistics 27, 1956: an unbounded mean has no interval)."""


SMALLEST_NOISE = 1e-6
"""The lower bound of the noise, as a multiple of what was measured, where no bound is known: 60 dB better."""


def compute_snr_interval(rows: Mapping[str, np.ndarray], confidence: float) -> Interval | None:
    """The interval in dB of the pooled signal-to-noise ratio, from the `compute_row_errors` of each sample.

    Samples are drawn, their squares are not: the ratio of two sums with Student's t (Cochran, Sampling Techniques, 3rd ed.,
    2.11) on its logarithm. The lower bound is also that of the noise as a `SampledFigure` with an effect of LARGEST_NOISE, so
    that samples with much noise that happened not to be drawn are not excluded. The upper bound is that of samples like the most
    influential one that was drawn: where the power of the outputs differs much, few samples have most of it.

    None if the error is zero or not finite, or spread over fewer than FEWEST_FOR_SNR samples.

    >>> rows = {"difference_square": np.ones(1000), "reference_square": np.full(1000, 1e4)}
    >>> [round(bound, 2) for bound in compute_snr_interval(rows, 0.95)]
    [38.33, 40.02]
    """
    noise, signal = (
        np.asarray(rows[f"{of}_square"], dtype=np.float64) for of in ("difference", "reference")
    )
    count, total = len(noise), float(noise.sum())
    power = float(signal.sum())
    if not (0 < total < inf and 0 < power < inf):  # NaN is not between them
        return None
    if total**2 < FEWEST_FOR_SNR * float(noise @ noise):
        return None
    ratio = total / power
    apart = (noise - ratio * signal) / total
    error = sqrt(count / (count - 1) * float(np.sum(apart**2)))
    half = 10 / log(10) * compute_t_quantile(0.5 + confidence / 2, count - 1) * error
    influences, limits = count * apart, (SMALLEST_NOISE, inf)
    largest = max(1.0, float(np.abs(influences).max()))
    _, most = figure_from_samples(1.0, influences, count, limits, LARGEST_NOISE).interval(
        confidence
    )
    least, _ = figure_from_samples(1.0, influences, count, limits, largest).interval(confidence)
    snr = -10 * log10(ratio)
    return snr - max(half, 10 * log10(most)), snr + max(half, -10 * log10(least))


def _as_wrong_as_can_be(name: str) -> OutputError:
    return OutputError(name, _BIG, _BIG, _BIG, -_BIG, 0.0, finite=False)


_BIG = 1e30
"""Infinity, which JSON does not have."""


def compute_top1_agreement(reference: np.ndarray, got: np.ndarray) -> float | None:
    """The share of samples with the same largest class, over (samples, classes) or (samples, classes, 1, 1).

    None if the reference gives all samples the same class, as with random weights: agreement would then prove nothing.
    """
    expected = find_best_classes(reference)
    return (
        None if np.unique(expected).size < 2 else float(np.mean(expected == find_best_classes(got)))
    )


def compute_top1_accuracy(labels: np.ndarray, scores: np.ndarray) -> float:
    """The share of samples whose largest score, over (samples, classes) or (samples, classes, 1, 1), is at their label."""
    return float(np.mean(find_best_classes(scores) == labels))


def find_best_classes(scores: np.ndarray) -> np.ndarray:
    """The class with the largest score of each sample, (samples,)."""
    return np.asarray(np.argmax(scores.reshape(len(scores), -1), axis=1))


CONFIDENCE = 0.95


def compute_share_interval(hits: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """The exact interval of a share (Clopper & Pearson, Biometrika 26, 1934). Raises ValueError for no samples."""
    if n < 1:
        raise ValueError("no samples, no share")
    tail = (1 - confidence) / 2
    low = float(special.betaincinv(hits, n - hits + 1, tail)) if hits > 0 else 0.0
    high = float(special.betaincinv(hits + 1, n - hits, 1 - tail)) if hits < n else 1.0
    return low, high


@dataclass(frozen=True, slots=True)
class Share:
    """`hits` of `n` independent samples."""

    hits: int
    n: int

    @property
    def value(self) -> float:
        return self.hits / self.n

    def interval(self, confidence: float) -> Interval:
        return compute_share_interval(self.hits, self.n, confidence)

    def resize(self, n: int) -> "Share":
        """The share of `n` samples like these; misses are spread evenly over them."""
        return Share(floor(self.hits * n / self.n), n)

    def compute_p_value_above(self, limit: float) -> float:
        """The probability of at least as many hits if the true share is `limit`."""
        return Share(self.n - self.hits, self.n).compute_p_value_below(1 - limit)

    def compute_p_value_below(self, limit: float) -> float:
        """The exact binomial probability of at most as many hits if the true share is `limit`."""
        return float(special.bdtr(self.hits, self.n, limit))


FEWEST_SAMPLES = 20
"""Fewer give no interval: it spans the whole range of the figure."""
PSEUDO_SAMPLES = 3
"""Assumed samples of full effect: models that never differ on few samples are not proven equal. With three, a build on its limit
passes or fails in at most 2.5% of draws at 95%, however rarely and unequally the two models differ (by enumeration; with two, 2.9%).
"""


@dataclass(frozen=True, slots=True)
class SampledFigure:
    """A score of samples or a difference of two scores, by each sample's contribution: their mean, or nearly.

    Student's t with Johnson's correction for skewness (Journal of the American Statistical Association 73, 1978) and PSEUDO_SAMPLES:
    an interval is never empty, and holds whether few samples differ or all do.
    """

    value: float
    samples: int
    freedom: int
    squares: float
    """Sum of squared deviations of the contributions; infinite if they are unknown."""
    cubes: float
    """Sum of cubed deviations."""
    effect: float
    """The change by one lost sample, times the number of samples."""
    limits: tuple[float, float]

    def interval(self, confidence: float) -> Interval:
        """Two-sided, inside the limits."""
        low, high = (
            self._find_bound(side, compute_t_quantile(0.5 + confidence / 2, self.freedom))
            for side in (-1, 1)
        )
        return max(self.limits[0], low), min(self.limits[1], high)

    def compute_p_value_above(self, limit: float) -> float:
        """The probability of a figure at least this far above `limit` if `limit` is the truth."""
        return self._compute_p_value(-1, self.value - limit)

    def compute_p_value_below(self, limit: float) -> float:
        """The probability of a figure at least this far below `limit` if `limit` is the truth."""
        return self._compute_p_value(1, limit - self.value)

    def resize(self, n: int) -> "SampledFigure":
        """The figure of `n` samples like these."""
        times = n / self.samples
        freedom = max(1, round((self.freedom + 1) * times) - 1)
        return replace(
            self, samples=n, freedom=freedom, squares=self.squares * times, cubes=self.cubes * times
        )

    def _error_and_lean(self, side: int) -> tuple[float, float]:
        """The standard error of the sum over samples, and a third of its skewness towards `side`."""
        count, effect = self.freedom + 1, self.effect
        error = sqrt(self.squares * count / self.freedom + PSEUDO_SAMPLES * effect**2)
        return error, (side * self.cubes + effect**3) / (self.squares + effect**2) / 3

    def _find_bound(self, side: int, quantile: float) -> float:
        error, lean = self._error_and_lean(side)
        if lean < 0:  # beyond this the parabola would turn back
            quantile = min(quantile, error / (-2 * lean))
        return self.value + side * (quantile * error + quantile**2 * lean) / self.samples

    def _compute_p_value(self, side: int, distance: float) -> float:
        """The probability of the quantile that puts the bound of `side` at the limit."""
        if self.squares == inf:
            return 0.5
        error, lean = self._error_and_lean(side)
        gap = self.samples * distance
        root = sqrt(max(error**2 + 4 * lean * gap, 0.0)) if gap > 0 else error
        return compute_t_tail(2 * gap / (error + root), self.freedom)


@dataclass(frozen=True, eq=False)
class Groups:
    """Samples that share a source, such as a clip, a patient, or a document: only the sources are independent.

    Sums over groups replace samples (the ratio estimator over clusters: Cochran, Sampling Techniques, 3rd ed., 9A.1; for paired shares:
    Donner & Klar, Design and Analysis of Cluster Randomization Trials, 2000).

    >>> groups = Groups(np.array([0, 0, 1, 1]))
    >>> groups.count, groups.size
    (2, 2.0)
    """

    members: NDArray[np.int64]
    """The group of each sample (samples,), from 0 without gaps."""

    @property
    def count(self) -> int:
        return int(self.members.max()) + 1

    @property
    def size(self) -> float:
        """The number of samples in the group of a typical sample: what a lost group takes along."""
        return float(np.mean(np.bincount(self.members)[self.members]))

    def add_up(self, parts: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sums over groups (groups, ...) of the deviations of `parts` (samples, ...) from their mean."""
        sums = np.zeros((self.count, *parts.shape[1:]))
        np.add.at(sums, self.members, parts - parts.mean(axis=0))
        return sums


def groups_from_names(names: Sequence[str | None]) -> Groups | None:
    """None without names, and if every sample is alone in its group, since it is independent of all others then."""
    if not names or None in names:
        return None
    known = list(dict.fromkeys(names))
    places = {name: place for place, name in enumerate(known)}
    return None if len(known) == len(names) else Groups(np.array([places[name] for name in names]))


def figure_from_samples(
    value: float,
    parts: NDArray[np.float64],
    samples: int,
    limits: tuple[float, float],
    effect: float = 1.0,
    groups: Groups | None = None,
) -> SampledFigure:
    """The figure `value` of `samples` with the contributions `parts` (samples,) of samples, added up over `groups` if they have any.

    A lost sample changes the sum by `effect`. Too few parts, or parts that are not finite, give an interval that spans `limits`.
    """
    if groups is not None:
        parts, effect = groups.add_up(parts), effect * groups.size
    if len(parts) < FEWEST_SAMPLES or not np.isfinite(parts).all():
        return SampledFigure(value, samples, FEWEST_SAMPLES, inf, 0.0, effect, limits)
    apart = parts - parts.mean()
    squares, cubes = float(np.sum(apart**2)), float(np.sum(apart**3))
    return SampledFigure(value, samples, len(parts) - 1, squares, cubes, effect, limits)


NO_CLASS = frozenset({"", "N/A", "__background__"})
"""Labels of outputs that stand for no class, as torchvision's detectors have them."""


def find_absent_classes(labels: Sequence[str], occurring: Container[int]) -> list[int]:
    """The classes with `labels` that are not among the `occurring` classes of the truths; those called as NO_CLASS do not exist.

    >>> find_absent_classes(["__background__", "cat", "N/A", "toaster"], {1})
    [3]
    """
    return [
        place
        for place, label in enumerate(labels)
        if place not in occurring and label not in NO_CLASS
    ]


def bound_absent_effect(samples: int, occurring: int, absent: int) -> float:
    """The change of a mean over classes, times the number of samples, by a lost class that does not occur; 0 if all occur.

    No sample shows what became of such a class. It counts as one with a single sample, which was lost: with PSEUDO_SAMPLES, the
    interval allows for the loss of three such classes.
    """
    return samples / (occurring + absent) if absent else 0.0


def find_largest_effect(amounts: NDArray[np.float64]) -> float:
    """The change of a mean over classes, times the number of samples, by one wholly lost sample of the class that feels it most.

    `amounts` (classes, samples) say how much of each class's truth a sample has: pixels, objects, entities. A lost sample j takes
    the share w of each class's truth, and changes the mean over K classes by the sum of its w, over K: its influence (Hampel et
    al., Robust Statistics, 1986). A class's typical sample is weighted by its amounts, so that a class is worth Kish's effective
    number of samples (Survey Sampling, 1965). At least 1; 1 if no class occurs.

    >>> find_largest_effect(np.array([[1.0] * 98 + [0.0] * 2, [0.0] * 98 + [1.0] * 2]))
    25.0
    """
    totals = amounts.sum(axis=1)
    there = totals > 0
    if not there.any():
        return 1.0
    shares = amounts[there] / totals[there][:, None]
    influence = amounts.shape[1] * shares.mean(axis=0)
    return max(1.0, float((shares @ influence).max()))


MAX_SAMPLES_SUGGESTED = 10_000_000


def count_samples_to_decide(
    figure: Share | SampledFigure,
    limit: float,
    confidence: float = CONFIDENCE,
    *,
    at_least: bool = True,
) -> int | None:
    """The number of samples like those of `figure` that puts its whole interval on the right side of `limit`.

    None if the figure is not on that side, or for more than MAX_SAMPLES_SUGGESTED.
    """

    def decides(n: int) -> bool:
        low, high = figure.resize(n).interval(confidence)
        return low >= limit if at_least else high <= limit

    if figure.value <= limit if at_least else figure.value >= limit:
        return None
    low, high = 0, figure.n if isinstance(figure, Share) else figure.samples
    while not decides(high):
        if high > MAX_SAMPLES_SUGGESTED:
            return None
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high


def mean_from_samples(
    values: NDArray[np.float64], groups: Groups | None = None
) -> Share | SampledFigure:
    """The mean of `values` (samples,) from 0 to 1; an exact share if each is 0 or 1 and independent of the others."""
    if groups is not None:
        return figure_from_samples(
            float(values.mean()), values, len(values), (0.0, 1.0), groups=groups
        )
    if np.isin(values, (0.0, 1.0)).all():
        return Share(int(values.sum()), len(values))
    return figure_from_samples(float(values.mean()), values, len(values), (0.0, 1.0))


def compute_macro_f1(
    labels: NDArray[np.int64], predicted: NDArray[np.int64], classes: int
) -> float:
    """The mean over occurring classes of the harmonic mean of precision and recall; arrays of shape (samples,)."""
    hits = np.bincount(labels[labels == predicted], minlength=classes)
    sizes = _sizes(labels, predicted, classes)
    there = sizes > 0
    return float(np.mean(2 * hits[there] / sizes[there])) if there.any() else 0.0


def measure_macro_f1(
    labels: NDArray[np.int64],
    predicted: NDArray[np.int64],
    classes: int,
    groups: Groups | None = None,
) -> SampledFigure:
    """The macro F1 by the delta method (Takahashi et al., Applied Intelligence 52, 2022); arrays of shape (samples,)."""
    value, parts = (
        compute_macro_f1(labels, predicted, classes),
        _influence(labels, predicted, classes),
    )
    effect = _find_macro_f1_effect(labels, classes)
    return figure_from_samples(value, parts, len(labels), (0.0, 1.0), effect, groups)


def compare_macro_f1(
    labels: NDArray[np.int64],
    first: NDArray[np.int64],
    second: NDArray[np.int64],
    classes: int,
    groups: Groups | None = None,
) -> SampledFigure:
    """The first's macro F1 less the second's, as `measure_macro_f1`."""
    apart = _influence(labels, first, classes) - _influence(labels, second, classes)
    effect = _find_macro_f1_effect(labels, classes)
    value = compute_macro_f1(labels, first, classes) - compute_macro_f1(labels, second, classes)
    return figure_from_samples(value, apart, len(labels), (-1.0, 1.0), effect, groups)


def _find_macro_f1_effect(labels: NDArray[np.int64], classes: int) -> float:
    """The effect of a lost sample of the rarest class that occurs (`find_largest_effect`)."""
    known = np.bincount(labels, minlength=classes)
    there = known[known > 0]
    return max(1.0, len(labels) / (there.size * int(there.min()))) if there.size else 1.0


def _sizes(
    labels: NDArray[np.int64], predicted: NDArray[np.int64], classes: int
) -> NDArray[np.int64]:
    """Per class, the number of its labels plus the number of its predictions."""
    return np.asarray(
        np.bincount(labels, minlength=classes) + np.bincount(predicted, minlength=classes)
    )


def _influence(
    labels: NDArray[np.int64], predicted: NDArray[np.int64], classes: int
) -> NDArray[np.float64]:
    """Each sample's contribution to n times the macro F1 (samples,): its derivative by the sample's weight."""
    hit, n = labels == predicted, len(labels)
    sizes = _sizes(labels, predicted, classes)
    there = np.maximum(sizes, 1)
    scores = 2 * np.bincount(labels[hit], minlength=classes) / there
    weight = n / there / max(int(np.count_nonzero(sizes)), 1)
    weighted = scores * weight
    return np.asarray(2 * hit * weight[labels] - weighted[labels] - weighted[predicted])
