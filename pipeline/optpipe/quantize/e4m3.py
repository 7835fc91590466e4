"""FP8 numbers with 4 bits of exponent and 3 of mantissa: from 2**-9 to 448, no infinity.

Scales are powers of two: multiplying by them is exact, so NumPy, ONNX Runtime and torch round the same values; and the relative
error of a floating-point number does not depend on its scale. Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
"""

from math import ceil, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = 448.0
_EXPONENTS = (-24, 24)


def get_e4m3() -> Any:
    """NumPy's type of them."""
    import ml_dtypes

    return np.dtype(ml_dtypes.float8_e4m3fn)


def choose_scale(amax: float) -> np.float32:
    """The smallest power of two that brings `amax` to at most LARGEST; never 0."""
    low, high = _EXPONENTS
    exponent = low if amax <= 0 else min(max(ceil(log2(amax / LARGEST)), low), high)
    return np.float32(2.0**exponent)


def round_to_e4m3(values: NDArray[np.float32], scale: np.float32) -> NDArray[Any]:
    """`values / scale`, clamped to what E4M3 holds and rounded half to even."""
    rounded: NDArray[Any] = np.clip(values / scale, -LARGEST, LARGEST).astype(get_e4m3())
    return rounded
