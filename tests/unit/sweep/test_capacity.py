"""The simulated queue against closed forms, and laws that hold for every load."""

from math import exp, factorial, floor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core.errors import BadInputError
from optpipe.stats.percentiles import count_samples_needed
from optpipe.sweep.fleet import count_gpus_needed, simulate_queue

ONE = {1: 1.0}


@pytest.mark.parametrize("utilization", [0.2, 0.5, 0.8])
def test_the_mean_wait_of_one_server_is_that_of_pollaczek_and_khinchine(utilization):
    """M/D/1: u / (2 (1 − u)) service times at a utilization u; the error is that of ten simulations with other seeds."""
    means = [
        float(simulate_queue(utilization, 1, ONE, requests=20_000, seed=seed)[2_000:].mean()) - 1 for seed in range(10)
    ]
    expected = utilization / (2 * (1 - utilization))
    error = np.std(means, ddof=1) / np.sqrt(len(means))
    assert abs(np.mean(means) - expected) < 4.5 * error


def md1_wait_distribution(rate, wait):
    """P(W ≤ t) of M/D/1 with service time 1 (Erlang 1909; Franx, Operations Research Letters 29, 2001)."""
    terms = ((-rate * (wait - k)) ** k / factorial(k) * exp(rate * (wait - k)) for k in range(floor(wait) + 1))
    return (1 - rate) * sum(terms)


@pytest.mark.parametrize("wait", [0.0, 0.5, 1.5, 3.0])
def test_the_distribution_of_waits_is_erlangs(wait):
    rate, shares = 0.7, []
    for seed in range(10):
        waits = simulate_queue(rate, 1, ONE, requests=20_000, seed=100 + seed)[2_000:] - 1
        shares.append(float(np.mean(waits <= wait + 1e-9)))
    error = np.std(shares, ddof=1) / np.sqrt(len(shares))
    assert abs(np.mean(shares) - md1_wait_distribution(rate, wait)) < 4.5 * error


def test_a_load_that_is_almost_none_takes_the_service_time():
    assert simulate_queue(1e-6, 2, ONE, requests=100).max() == pytest.approx(1.0)


def test_batches_fill_while_the_gpu_is_busy_and_take_what_was_measured():
    heavy = simulate_queue(2.4, 1, {1: 1.0, 4: 1.6}, requests=5_000)
    assert float(np.percentile(heavy, 50)) < 20, "without batches 2.4 requests per service time would queue without end"


def test_the_delay_makes_batches_of_what_comes_within_it():
    found = simulate_queue(0.01, 5, {1: 1.0, 100: 1.0}, requests=500, delay_s=0.5)
    assert found.min() == pytest.approx(1.0, abs=0.5)
    assert found.max() == pytest.approx(1.5)


rates = st.floats(0.1, 6)


@given(rates, st.integers(1, 6), st.integers(0, 5))
def test_more_gpus_never_make_a_request_later(rate, gpus, seed):
    fewer = simulate_queue(rate, gpus, ONE, requests=300, seed=seed)
    more = simulate_queue(rate, gpus + 1, ONE, requests=300, seed=seed)
    assert (more <= fewer + 1e-9).all()


@given(rates, st.integers(0, 3))
def test_the_number_is_the_smallest_that_keeps_the_limit(rate, seed):
    need = count_gpus_needed(rate, ONE, 90, 2.0, seed=seed)
    assert need > rate
    assert need == count_gpus_needed(rate, ONE, 90, 2.0, seed=seed)
    looser = count_gpus_needed(rate, ONE, 90, 4.0, seed=seed)
    assert looser <= need


def test_no_number_of_gpus_makes_one_request_faster():
    assert count_gpus_needed(1.0, ONE, 99, 0.5) is None


def test_a_load_that_is_none_is_refused():
    for rate, gpus in ((0, 1), (-1, 1), (1, 0)):
        with pytest.raises(BadInputError):
            simulate_queue(rate, gpus, ONE, requests=count_samples_needed(90))
