"""Too little, equal, or undefined data, in every command that judges: nothing is claimed, and no interval has the width zero.

One process, none that counts, equal samples, groups of one, one group of everything, and scores that are no numbers.
"""

from dataclasses import replace
from math import nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.measure.test_left_out import make_try

from optpipe.core.load import LoadSpec, Scenario
from optpipe.core.metrics.sections import Sense
from optpipe.core.quantity import Dimension
from optpipe.core.verdict import Observation, Verdict
from optpipe.deploy.live import judge_latencies
from optpipe.deploy.proof import Answer
from optpipe.deploy.recheck import judge_recheck
from optpipe.evaluate.tasks.classification import Classification
from optpipe.measure.compare import compare_measurements
from optpipe.measure.race import race_builds
from optpipe.models.artifacts.judged_build import JudgedBuild
from optpipe.preprocess.throughput import ThroughputRecord, compute_speedup
from optpipe.signoff.build_evidence import BuildEvidence
from optpipe.signoff.evidence import observe
from optpipe.signoff.judge import judge_criteria
from optpipe.signoff.policy import Criterion
from optpipe.stats.ratio import SMALLEST_ROUNDS, Change, ratio_from_rounds

METRICS = st.sampled_from(["p50", "p90", "p99"])
LEVELS = st.floats(1e5, 1e9)
RATIOS = st.floats(0.5, 2.0)
BUILD = JudgedBuild("m", "a", "fake", "fp32")


def make_tries(level_ns, valid, left_out=0, artifact="a", run="r"):
    """Processes whose requests all take `level_ns`, and others that were left out."""
    tries = []
    for at in range(valid + left_out):
        codes = ("drift",) if at >= valid else ()
        one = make_try(np.full(700, round(level_ns)), at, *codes, run=run)
        subject = replace(one.measurement.subject, artifact=artifact, model="m")
        tries.append(replace(one, measurement=replace(one.measurement, subject=subject)))
    return tuple(tries)


def judge(criterion, **evidence):
    observed = [(criterion, observe(criterion, BuildEvidence(BUILD, **evidence)))]
    return judge_criteria(observed, 0.95)[0]


def judge_latency(metric, limit_ns, tries):
    criterion = Criterion("latency", metric, Sense.AT_MOST, limit_ns, Dimension.TIME)
    return judge(criterion, measured=tries)


@given(METRICS, LEVELS, LEVELS, st.integers(0, 2), st.integers(0, 5))
def test_a_signoff_of_fewer_than_three_processes_decides_nothing(
    metric, level, limit, valid, left_out
):
    judged = judge_latency(metric, limit, make_tries(level, valid, left_out))
    assert judged.verdict is Verdict.INCONCLUSIVE
    assert judged.reason
    assert judged.ci is None


@given(METRICS, LEVELS, LEVELS, st.integers(3, 6))
def test_a_signoff_of_equal_processes_has_no_interval_of_width_zero(metric, level, limit, count):
    judged = judge_latency(metric, limit, make_tries(level, count))
    assert judged.ci is None or judged.ci[0] < judged.ci[1]
    assert judged.ci is not None or judged.verdict is Verdict.INCONCLUSIVE


@given(LEVELS, RATIOS, st.integers(0, 4), st.integers(0, 4))
def test_a_regression_between_few_or_equal_processes_is_never_exact(level, ratio, mine, theirs):
    criterion = Criterion("regression", "p50", Sense.AT_MOST, 0.03, Dimension.SHARE)
    baseline = make_tries(ratio * level, theirs, 1, artifact="b")
    judged = judge(
        criterion, measured=make_tries(level, mine, 1), baseline=baseline, baseline_name="b"
    )
    assert judged.ci is None or judged.ci[0] < judged.ci[1]
    if min(mine, theirs) < 3:
        assert judged.verdict is Verdict.INCONCLUSIVE
        assert judged.reason


@given(LEVELS, RATIOS, st.integers(0, 2), st.integers(0, 4))
def test_a_comparison_with_fewer_than_three_processes_claims_nothing(level, ratio, mine, theirs):
    measured = [
        *make_tries(level, mine, 1, artifact="a"),
        *make_tries(ratio * level, theirs, 1, artifact="b"),
    ]
    table = compare_measurements(measured)
    assert not any(row.change in ("faster", "slower") or row.dominated_by for row in table.rows)
    assert all(row.speedup is None or row.speedup.interval is None for row in table.rows)


@given(LEVELS, RATIOS, st.integers(SMALLEST_ROUNDS, 20))
def test_equal_rounds_of_a_comparison_claim_nothing(level, ratio, count):
    found = ratio_from_rounds([level] * count, [ratio * level] * count)
    assert not found.is_known
    assert found.change is Change.NO_DIFFERENCE
    assert found.p_value == 1
    assert found.ci[0] < ratio < found.ci[1]
    verdict, reasons = judge_recheck([], found, 10, 1e-3, 0.05)
    assert verdict is Verdict.INCONCLUSIVE
    assert "no interval" in reasons[0]


@given(LEVELS, RATIOS)
def test_dali_is_not_called_faster_by_equal_rounds(level, ratio):
    def rates(images_per_s):
        repeats = (images_per_s,) * SMALLEST_ROUNDS
        return ThroughputRecord("dali", None, None, images_per_s, None, 1, repeats, None)

    assert compute_speedup(rates(level), rates(ratio * level))[1] is None


@given(RATIOS.filter(lambda ratio: abs(ratio - 1) > 1e-6), st.integers(0, 2**32))
def test_a_race_of_equal_rounds_chooses_the_faster_and_claims_nothing(ratio, seed):
    times = {"a": 1e6, "b": 1e6 * ratio}
    race = race_builds(["a", "b"], [1], lambda name, _: {1: times[name]}, seed)[1]
    assert race.winner == min(times, key=times.__getitem__)
    assert [each.change for each in race.ratios.values()] == [Change.NO_DIFFERENCE]
    assert all("no interval" in str(each) for each in race.ratios.values())


def test_a_build_without_a_time_in_some_round_cannot_win():
    race = race_builds(["a", "b"], [1], lambda name, _: {1: 1e6} if name == "a" else {}, 0)[1]
    assert race.winner == "a"
    assert not race.ratios


@given(st.integers(1, 3000), st.floats(1e5, 1e8), st.floats(1e5, 1e8), st.booleans())
def test_a_live_check_of_equal_or_few_answers_decides_nothing(count, latency, limit, paced):
    due = np.arange(count) * 1e9
    answers = [Answer(int(at), int(at + round(latency))) for at in due]
    load = LoadSpec(1, Scenario.SERVER, rate_per_s=1.0) if paced else LoadSpec(1)
    limits = [Criterion("latency", "p99", Sense.AT_MOST, limit, Dimension.TIME)]
    (judged,) = judge_latencies(answers, limits, load, 1.0)
    assert judged.verdict is Verdict.INCONCLUSIVE
    assert judged.ci is None
    assert judged.reason


def observe_classes(labels, source, found, groups=None):
    task = Classification() if groups is None else Classification().with_groups(groups)
    before, after = ([[int(each)] for each in side] for side in (source, found))
    return task.observe([int(each) for each in labels], before, after, 0.95, "about")


@given(st.integers(1, 60), st.sampled_from(["drop", "score"]))
def test_equal_predictions_of_few_samples_have_wide_intervals(count, name):
    labels = np.arange(count) % 2
    seen = observe_classes(labels, labels, labels).get(name)
    if seen is not None:
        assert seen.low < seen.high
        assert count >= 20 or name == "score" or (seen.low, seen.high) == (-1, 1)


@given(st.integers(20, 200), st.integers(0, 2**32))
def test_groups_of_one_are_independent_samples_and_one_group_shows_nothing(count, seed):
    generator = np.random.default_rng(seed)
    labels, found = generator.integers(0, 3, count), generator.integers(0, 3, count)
    alone = observe_classes(labels, labels, found, [str(at) for at in range(count)])
    whole = observe_classes(labels, labels, found, ["all"] * count)
    plain = observe_classes(labels, labels, found)
    for name, seen in plain.items():
        assert (alone[name].low, alone[name].high) == (seen.low, seen.high)
        assert whole[name].high - whole[name].low == (2 if name.startswith("drop") else 1)


@pytest.mark.parametrize("sense", [Sense.AT_MOST, Sense.AT_LEAST])
@given(limit=st.floats(-100, 100))
def test_a_score_that_is_no_number_decides_nothing(sense, limit):
    criterion = Criterion("accuracy", "minimum_score", sense, limit, Dimension.POINTS)
    for seen in (Observation(nan), Observation(nan, nan, nan), Observation(0.5, nan, 1.0)):
        judged = judge_criteria([(criterion, [seen])], 0.95)[0]
        assert judged.verdict is Verdict.INCONCLUSIVE
