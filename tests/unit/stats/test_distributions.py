import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.stats.distributions import (
    binomial_cdf,
    binomial_quantile,
    incomplete_beta,
    student_t_quantile,
    student_t_tail,
)

stats = pytest.importorskip("scipy.stats")


@given(st.integers(1, 20_000), st.floats(0.001, 0.999), st.floats(0, 1))
def test_binomial_equals_scipy(trials, probability, where):
    count = int(where * trials)
    assert binomial_cdf(count, trials, probability) == pytest.approx(
        float(stats.binom.cdf(count, trials, probability)), abs=1e-9
    )


@given(st.integers(1, 5_000), st.floats(0.01, 0.99), st.floats(0.001, 0.999))
def test_the_binomial_quantile_is_the_smallest(trials, probability, level):
    found = binomial_quantile(level, trials, probability)
    assert binomial_cdf(found, trials, probability) >= level
    assert binomial_cdf(found - 1, trials, probability) < level


@given(st.floats(0, 50), st.floats(1, 500))
def test_student_equals_scipy(value, freedom):
    assert student_t_tail(value, freedom) == pytest.approx(float(stats.t.sf(value, freedom)), rel=1e-7, abs=1e-12)


@pytest.mark.parametrize(
    ("level", "freedom", "value"), [(0.975, 4, 2.776445), (0.975, 9, 2.262157), (0.9, 30, 1.31042)]
)
def test_student_quantiles_of_the_tables(level, freedom, value):
    assert student_t_quantile(level, freedom) == pytest.approx(value, abs=1e-5)


def test_the_ends_of_the_beta_function():
    assert (incomplete_beta(2, 3, 0.0), incomplete_beta(2, 3, 1.0)) == (0.0, 1.0)


@pytest.mark.parametrize("level", [0.4, 1.0, 5e20, float("inf"), float("nan")])
def test_a_level_that_is_no_probability_ends_at_once(level):
    with pytest.raises(ValueError, match="no quantile"):
        student_t_quantile(level, 9)
