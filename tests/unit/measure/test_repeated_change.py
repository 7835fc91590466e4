"""A change that all processes repeat while they are measured: it moves the interval, and slow noise does not."""

from math import log
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.signal import lfilter
from tests.unit.measure.test_left_out import make_try

from optpipe.core.metrics.sections import Sense
from optpipe.core.quantity import Dimension
from optpipe.measure.groups import FigureRatio, ProcessGroup, compare_groups
from optpipe.models.artifacts.judged_build import JudgedBuild
from optpipe.signoff.build_evidence import BuildEvidence
from optpipe.signoff.evidence import observe
from optpipe.signoff.judge import judge_criteria
from optpipe.signoff.policy import Criterion
from optpipe.stats.means import OtherSpeed
from optpipe.stats.stability import bound_repeated_change, compute_end_change


def draw_step(generator, at, level=1.03, count=700):
    late = np.arange(count) >= at * count
    return 10e6 * np.exp(0.01 * generator.standard_normal(count)) * np.where(late, 1.0, 1 / level)


def make_group(processes=5, at=0.75, level=1.03, seed=1):
    generator = np.random.default_rng(seed)
    return ProcessGroup(
        tuple(make_try(draw_step(generator, at, level), each) for each in range(processes))
    )


@pytest.mark.parametrize("at", [0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("level", [1.03, 1 / 1.03])
@pytest.mark.parametrize("name", ["p50", "p90", "throughput"])
@pytest.mark.slow
def test_the_interval_holds_the_end_of_a_step_that_all_processes_repeat(at, level, name):
    group = make_group(processes=20, at=at, level=level)
    found = group.estimate(name)
    if name == "p50":
        assert found.low <= 10e6 <= found.high
    ends = compute_end_change(group.valid[0].latencies)
    assert found.high / found.value >= np.exp(abs(ends)) * 0.995
    assert found.value / found.low >= np.exp(abs(ends)) * 0.995
    assert "median" in found.note


@pytest.mark.parametrize("side", [Sense.AT_MOST, Sense.AT_LEAST])
def test_a_build_between_its_start_and_its_end_is_not_decided(side):
    limit = Criterion("latency", "p50", side, 9.9e6, Dimension.TIME)
    for level, verdict in ((1.03, "INCONCLUSIVE"), (1.0, None)):
        group = make_group(processes=20, level=level)
        evidence = BuildEvidence(JudgedBuild("m", "a", "fake", "fp32"), group.tries)
        result = judge_criteria([(limit, observe(limit, evidence))], 0.95)[0]
        assert verdict is None or result.verdict == verdict
        assert ("--set" in (result.remedy or "")) == (level > 1)


def test_a_regression_is_not_decided_by_a_step_of_one_side():
    steady, stepping = make_group(processes=20, level=1.0), make_group(processes=20, seed=2)
    found = compare_groups(stepping, steady, "p50", None)
    assert isinstance(found, FigureRatio)
    assert found.speed.repeated > 0.02
    (low, high), _ = found.interval(0.95)
    assert low < 1 < high
    assert found.p_value > 0.05


def test_few_samples_few_processes_and_constant_ones_repeat_nothing():
    assert compute_end_change(np.ones(63)) is None
    assert compute_end_change(np.zeros(64)) is None
    assert compute_end_change(np.ones(64)) == 0.0
    assert bound_repeated_change([]) == bound_repeated_change([0.1, 0.1]) == 0.0
    assert bound_repeated_change([0.0] * 5) == 0.0
    assert bound_repeated_change([0.1] * 5) == pytest.approx(0.1)
    assert bound_repeated_change([0.1, float("nan"), 0.1]) == 0.0


@pytest.mark.parametrize("processes", [3, 5, 10])
@pytest.mark.slow
def test_slow_noise_is_rarely_a_repeated_change(processes):
    generator, found = np.random.default_rng(54), []
    for _ in range(200):
        noise = 0.02 * generator.standard_normal((processes, 1200)) * (1 - 0.99**2) ** 0.5
        slow = np.exp(lfilter([1], [1, -0.99], noise, axis=1)[:, 500:])
        found.append(bound_repeated_change([compute_end_change(each) for each in slow]) > 0)
    assert np.mean(found) <= 0.03


@given(
    st.lists(
        st.tuples(st.integers(60, 90), st.floats(0.9, 1.1), st.integers(0, 10)),
        min_size=1,
        max_size=6,
    )
)
def test_the_independent_verifier_finds_the_same(verifier, drawn):
    ordered = []
    for count, level, seed in drawn:
        generator = np.random.default_rng(seed)
        ordered.append(np.rint(1e6 * draw_step(generator, 0.8, level, count)).astype(np.int64))
    given_changes = [compute_end_change(each) for each in ordered]
    mine = bound_repeated_change([each for each in given_changes if each is not None])
    tries = [SimpleNamespace(x=pl.Series(each), codes=()) for each in ordered]
    assert verifier.bound_repeated_change(tries) == pytest.approx(mine, rel=1e-9, abs=1e-15)
    low, high = verifier.widen(10.0, 9.9, 10.1, 5, 1, 0.95, log(1.05), 0.0, 0.02)
    widened, _ = OtherSpeed(5, 1, repeated=0.02).widen(10.0, (9.9, 10.1), 0.95)
    assert widened == pytest.approx((low, high))
