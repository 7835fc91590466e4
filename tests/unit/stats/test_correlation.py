import numpy as np
import pytest

from optpipe.stats.stability import compute_effective_count


def autoregressive(generator, phi, count):
    from scipy.signal import lfilter

    return lfilter([1], [1, -phi], generator.standard_normal(count + 500))[500:]


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9, 0.98])
def test_an_autoregressive_series_is_worth_what_theory_says(phi):
    """n (1 − φ) / (1 + φ), for the mean of a process xₖ = φ xₖ₋₁ + noise."""
    generator = np.random.default_rng(0)
    found = [compute_effective_count(autoregressive(generator, phi, 20_000)) for _ in range(20)]
    assert np.mean(found) == pytest.approx(20_000 * (1 - phi) / (1 + phi), rel=0.1)


def test_it_is_never_worth_more_than_it_has():
    assert compute_effective_count(np.tile([1.0, -1.0], 500)) == 1000
    assert compute_effective_count(np.ones(300)) == 300
    assert compute_effective_count(np.arange(3.0)) == 3


def test_a_shift_or_another_unit_changes_nothing():
    series = autoregressive(np.random.default_rng(1), 0.8, 5000)
    assert compute_effective_count(5 + 1e6 * series) == pytest.approx(compute_effective_count(series))


def test_blocks_of_equal_values_are_worth_one_each():
    blocks = np.repeat(np.random.default_rng(0).integers(0, 2, 40), 100).astype(float)
    assert compute_effective_count(blocks) < 60
