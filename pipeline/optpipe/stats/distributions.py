"""Binomial and Student's t distributions by the regularized incomplete beta function.

SciPy gives the same digits (a test holds them together), but importing its statistics takes over a second, and the
machines that measure do not all have it.
"""

from functools import cache
from math import exp, lgamma, log, log1p

_TINY = 1e-300


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function I_x(a, b)."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):
        return 1.0 - incomplete_beta(b, a, 1 - x)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)) / a
    return front / _fraction(a, b, x)


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction DLMF 8.17.22, evaluated by the modified Lentz method (DLMF 3.10.3)."""
    value, numerator, denominator = 1.0, 1.0, 0.0
    for step in range(1, 100_000):
        half = step // 2
        if step % 2:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        denominator = 1.0 / ((1.0 + term * denominator) or _TINY)
        numerator = (1.0 + term / numerator) or _TINY
        value *= numerator * denominator
        if abs(numerator * denominator - 1.0) < 1e-15:
            break
    return value


def binomial_cdf(count: int, trials: int, probability: float) -> float:
    """P(X ≤ count) for X ~ Binomial(trials, probability)."""
    if count < 0:
        return 0.0
    return 1.0 if count >= trials else incomplete_beta(trials - count, count + 1, 1 - probability)


def binomial_quantile(level: float, trials: int, probability: float) -> int:
    """The smallest count with P(X ≤ count) ≥ level."""
    low, high = -1, trials
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if binomial_cdf(middle, trials, probability) >= level else (middle, high)
    return high


def student_t_tail(value: float, freedom: float) -> float:
    """P(T > value) for value ≥ 0."""
    return 0.5 * incomplete_beta(freedom / 2, 0.5, freedom / (freedom + value * value))


@cache
def student_t_quantile(level: float, freedom: float) -> float:
    """The value that T stays below with probability `level`. Raises ValueError for a level outside 0.5 <= level < 1."""
    if not 0.5 <= level < 1:
        raise ValueError(f"no quantile at level {level}: it must be at least 0.5 and under 1")
    low, high = 0.0, 1.0
    while student_t_tail(high, freedom) > 1 - level:
        low, high = high, high * 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_t_tail(middle, freedom) > 1 - level else (low, middle)
    return (low + high) / 2
