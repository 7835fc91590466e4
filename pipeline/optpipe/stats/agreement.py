"""The differences of two outputs, and their limits."""

from collections.abc import Mapping
from math import log, log10, sqrt
from zlib import crc32

import numpy as np

from optpipe.core.entries import OutputError
from optpipe.core.precision import Precision
from optpipe.stats.means import compute_t_quantile

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

RowErrors = Mapping[str, "np.ndarray"]
"""Each sample's errors: the columns of `compute_row_errors` by name."""


def compute_output_error(name: str, reference: "np.ndarray", got: "np.ndarray") -> OutputError:
    """Error figures in float64; outputs of different shapes, such as two lists of boxes, have the largest error."""
    return (
        pool_errors(name, compute_row_errors(reference, got))
        if reference.shape == got.shape
        else _as_wrong_as_can_be(name)
    )


def compare_rows(reference: "np.ndarray", got: "np.ndarray") -> RowErrors:
    """`compute_row_errors`, and of both the hash of the places of the largest values along the last axis; outputs of different
    shapes have no finite error.
    """
    if reference.shape != got.shape:
        blank = np.zeros_like(reference)
        return {**compare_rows(blank, blank), "finite": np.zeros(len(reference), bool)}
    best = {f"{of}_best": _hash_best(value) for of, value in (("reference", reference), ("output", got))}
    return {**compute_row_errors(reference, got), **best}


def _hash_best(output: "np.ndarray") -> "np.ndarray":
    if not output.size:
        return np.zeros(len(output), np.uint32)
    places = np.argmax(output.reshape(len(output), -1, output.shape[-1] if output.ndim > 1 else 1), axis=-1)
    return np.array([crc32(row.tobytes()) for row in places.astype(np.int64)], np.uint32)


def compute_row_errors(reference: "np.ndarray", got: "np.ndarray") -> "dict[str, np.ndarray]":
    """Per sample (first axis) the sums for `pool_errors`; stored with a proof, they reproduce its figures."""
    count = len(reference) if reference.ndim else 1
    expected, found = (each.astype(np.float64).reshape(count, -1 if each.size else 0) for each in (reference, got))
    with np.errstate(invalid="ignore", over="ignore"):  # `finite` reports it
        difference = np.abs(found - expected)
        return {
            "values": np.full(count, expected.shape[1]),
            "finite": (np.isfinite(found) & np.isfinite(expected)).all(axis=1),
            "reference_square": (expected**2).sum(axis=1),
            "output_square": (found**2).sum(axis=1),
            "difference_square": (difference**2).sum(axis=1),
            "product": (expected * found).sum(axis=1),
            "difference_sum": difference.sum(axis=1),
            "difference_max": difference.max(axis=1, initial=0.0),
        }


def pool_errors(name: str, rows: "Mapping[str, np.ndarray]") -> OutputError:
    """The error figures over all samples together, from their `compute_row_errors`."""
    if not rows["finite"].all():
        return _as_wrong_as_can_be(name)
    norm, distance, length = (sqrt(float(rows[f"{of}_square"].sum())) for of in ("reference", "difference", "output"))
    relative = distance / norm if norm > 0 else (0.0 if distance == 0 else _BIG)
    cosine = float(rows["product"].sum()) / (norm * length) if norm * length > 0 else float(distance == 0)
    return OutputError(
        name=name,
        max_abs=float(rows["difference_max"].max(initial=0.0)),
        mean_abs=float(rows["difference_sum"].sum()) / max(int(rows["values"].sum()), 1),
        relative=relative,
        snr_db=None if relative == 0 else -20 * log10(relative),
        cosine=min(1.0, max(-1.0, cosine)),
        finite=True,
    )


FEWEST_FOR_SNR = 60
"""Samples that the error must be spread over for its interval: the outputs of a few predict little."""


def compute_snr_interval(rows: "Mapping[str, np.ndarray]", confidence: float) -> tuple[float, float] | None:
    """The interval in dB of the pooled signal-to-noise ratio, from the `compute_row_errors` of each sample.

    Samples are drawn, their squares are not: the ratio of two sums with Student's t (Cochran, Sampling Techniques, 3rd ed.,
    2.11) on its logarithm. None if the error is zero, or spread over fewer than FEWEST_FOR_SNR samples.
    """
    noise, signal = (np.asarray(rows[f"{of}_square"], dtype=np.float64) for of in ("difference", "reference"))
    count, total = len(noise), float(noise.sum())
    if total <= 0 or float(signal.sum()) <= 0 or total**2 < FEWEST_FOR_SNR * float(noise @ noise):
        return None
    ratio = total / float(signal.sum())
    error = sqrt(count / (count - 1) * float(np.sum((noise - ratio * signal) ** 2))) / total
    half = 10 / log(10) * compute_t_quantile(0.5 + confidence / 2, count - 1) * error
    snr = -10 * log10(ratio)
    return snr - half, snr + half


def _as_wrong_as_can_be(name: str) -> OutputError:
    return OutputError(name, _BIG, _BIG, _BIG, -_BIG, 0.0, finite=False)


_BIG = 1e30
"""Infinity, which JSON does not have."""


def cut_to_same_rows(reference: "np.ndarray", got: "np.ndarray") -> "tuple[np.ndarray, np.ndarray]":
    """Both cut to their common rows: a fixed batch size may have left out the last few."""
    count = min(len(reference), len(got))
    return reference[:count], got[:count]


def compute_top1_agreement(reference: "np.ndarray", got: "np.ndarray") -> float | None:
    """The share of samples with the same largest class, over (samples, classes) or (samples, classes, 1, 1).

    None if the reference gives all samples the same class, as with random weights: agreement would then prove nothing.
    """
    expected = find_best_classes(reference)
    if np.unique(expected).size < 2:
        return None
    return float(np.mean(expected == find_best_classes(got)))


def compute_top1_accuracy(labels: "np.ndarray", scores: "np.ndarray") -> float:
    """The share of samples whose largest score, over (samples, classes) or (samples, classes, 1, 1), is at their label."""
    return float(np.mean(find_best_classes(scores) == labels))


def find_best_classes(scores: "np.ndarray") -> "np.ndarray":
    """The class with the largest score of each sample, (samples,)."""
    found: np.ndarray = np.argmax(scores.reshape(len(scores), -1), axis=1)
    return found
