"""An estimate without an interval decides nothing: no limit is met or broken by it, whoever asks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.measurements import planted
from tests.unit.measure.test_search import measurement

from optpipe.core.comparison import Goal
from optpipe.core.measurement import Subject
from optpipe.core.metrics.sections import Sense
from optpipe.core.quantity import Dimension, Estimate
from optpipe.core.verdict import Observation, Verdict
from optpipe.measure.compare import compare_measurements
from optpipe.measure.groups import RecordedMeasurement
from optpipe.measure.int8_notes import check_int8_speed
from optpipe.measure.search import Slo, find_largest_inside, judge_limit
from optpipe.signoff.judge import judge_criteria
from optpipe.signoff.policy import Criterion

VALUES = st.floats(1e-3, 1e12)
BOUNDS = st.sampled_from([(None, None), (0.0, None), (None, 1e13)])
"""One bound alone is no interval either: it is worth nothing on the other side."""


def strip_intervals(found):
    """The measurement with every figure as it is, and no interval."""
    latency = found.latency_ns
    bare = {
        name: Estimate(each.value, note="withheld") for name, each in latency.percentiles.items()
    }
    rate = found.throughput_images_per_s
    return replace(
        found,
        latency_ns=replace(latency, percentiles=bare),
        throughput_images_per_s=None if rate is None else Estimate(rate.value),
    )


@given(VALUES, VALUES)
def test_an_estimate_without_an_interval_is_on_no_side_of_any_limit(value, limit):
    bare = Estimate(value)
    assert bare.interval is None
    assert not bare.is_at_most(limit)
    assert not bare.is_above(limit)


@given(VALUES, VALUES, st.sampled_from([Sense.AT_MOST, Sense.AT_LEAST]), BOUNDS)
def test_no_criterion_is_decided_without_an_interval(value, limit, sense, bounds):
    criterion = Criterion("latency", "p99", sense, limit, Dimension.TIME)
    judged = judge_criteria([(criterion, [Observation(value, *bounds)])], 0.95)[0]
    assert judged.verdict is Verdict.INCONCLUSIVE
    assert judged.ci is None


@given(VALUES, VALUES, st.sampled_from([Sense.AT_MOST, Sense.AT_LEAST]))
def test_a_withheld_figure_never_turns_the_verdict_of_others_into_a_pass(value, limit, sense):
    criterion = Criterion("latency", "p99", sense, limit, Dimension.TIME)
    others = [Observation(limit, limit, limit), Observation(value)]
    assert judge_criteria([(criterion, others)], 0.95)[0].verdict is not Verdict.PASS


@given(VALUES, VALUES)
def test_an_exact_figure_needs_none(value, limit):
    criterion = Criterion("size", "maximum", Sense.AT_MOST, limit, Dimension.SIZE)
    judged = judge_criteria([(criterion, [Observation(value, is_exact=True)])], 0.95)[0]
    assert judged.verdict is (Verdict.PASS if value <= limit else Verdict.FAIL)


@given(st.floats(0.5, 50), st.floats(0.5, 50))
def test_a_batch_or_rate_is_not_inside_a_limit_by_its_value_alone(latency_ms, limit_ms):
    slo, bare = Slo(99.0, 1e6 * limit_ms), strip_intervals(measurement(4, latency_ms))
    assert not slo.is_met_by(bare)
    assert slo.explain_not_judged(bare) == "p99 has no interval: withheld"
    judged = judge_limit("a", "b", slo, [bare], find_largest_inside([bare], slo))
    assert judged.met is None


def test_a_comparison_names_no_best_build_for_a_limit_without_an_interval():
    one = strip_intervals(measurement(4, 5.0))
    table = compare_measurements([RecordedMeasurement(one, "r")], slo=Slo(99.0, 100e6))
    assert set(table.best.values()) == {None}
    assert "has no interval" in table.best_reason[Goal.LATENCY]


@pytest.mark.parametrize("bare", ["int8", "fp16", "both"])
def test_int8_is_not_called_faster_by_values_alone(bare):
    def at(precision, rate):
        ci = (None, None) if bare in (precision, "both") else (0.99 * rate, 1.01 * rate)
        one = planted(Subject("a", "fake", precision, "cpu", model="m"), 1, 10.0)
        return replace(one, throughput_images_per_s=Estimate(rate, *ci))

    found = check_int8_speed(at("int8", 500.0), [at("fp16", 100.0)])
    assert found is not None
    assert "but not both have an interval" in found.message
