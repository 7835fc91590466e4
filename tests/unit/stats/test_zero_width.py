"""Over every estimator: equal values, one value, and values that are no numbers give no interval of width zero, and no NaN."""

from dataclasses import replace
from math import inf, isfinite, nan

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.measure.test_left_out import make_try

from optpipe.core.load import LoadSpec, Scenario
from optpipe.core.measurement import ProcessFigure
from optpipe.core.metrics.measured import THROUGHPUT
from optpipe.core.metrics.sections import Sense
from optpipe.core.quantity import Dimension, Estimate
from optpipe.core.verdict import Blocker
from optpipe.deploy.live import judge_latencies
from optpipe.deploy.proof import Answer
from optpipe.evaluate.tasks.classification import compute_accuracy
from optpipe.evaluate.tasks.texts import TokenClassification
from optpipe.measure.figures import SampledWindow
from optpipe.measure.groups import ProcessGroup, RecordedMeasurement, compare_groups
from optpipe.models.artifacts.judged_build import JudgedBuild
from optpipe.preprocess.throughput import compute_rate_interval
from optpipe.quantize.recovery.recover import compare_samples
from optpipe.signoff.build_evidence import BuildEvidence
from optpipe.signoff.evidence import observe
from optpipe.signoff.judge import judge_criteria
from optpipe.signoff.policy import Criterion
from optpipe.stats.means import (
    OtherSpeed,
    Scatter,
    compute_mean_interval,
    compute_part_interval,
    compute_ratio_of_sums_interval,
)
from optpipe.stats.paired import (
    Groups,
    Share,
    compare_macro_f1,
    compute_snr_interval,
    figure_from_samples,
    groups_from_names,
    mean_from_samples,
)
from optpipe.stats.percentiles import summary_from_ns
from optpipe.stats.ratio import ratio_from_rounds
from optpipe.stats.stability import compute_variation_interval
from optpipe.trace.against import _compute_interval

COUNTS = st.integers(1, 200)
VALUES = st.sampled_from([0.0, 1e-9, 0.5, 1.0])


def from_share(value, count):
    yield Share(round(value * count), count).interval(0.95)


def from_mean(value, count):
    yield mean_from_samples(np.full(count, value)).interval(0.95)


def from_groups_of_one(value, count):
    groups = groups_from_names([str(at) for at in range(count)])
    yield mean_from_samples(np.full(count, value), groups).interval(0.95)


def from_one_group(value, count):
    groups = Groups(np.zeros(count, np.int64))
    yield mean_from_samples(np.full(count, value), groups).interval(0.95)


def from_drop(value, count):
    yield figure_from_samples(value, np.full(count, value), count, (-1.0, 1.0)).interval(0.95)


def from_one_sample_of_a_class(value, count):
    labels = np.array([0] * count + [1])
    found = labels if value else 1 - labels
    yield compare_macro_f1(labels, labels, found, 2).interval(0.95)


def from_snr(value, count):
    rows = {"difference_square": np.full(count, value), "reference_square": np.ones(count)}
    yield compute_snr_interval(rows, 0.95)


def from_latencies(value, count):
    summary = summary_from_ns(np.full(count, 1e6 * value))
    yield from (each.interval for each in summary.percentiles.values())
    yield compute_variation_interval(np.full(count, value), 0.95)


def from_throughput(value, count):
    ends = np.arange(1, count + 1) * round(1e6 * value + 1)
    frame = pl.DataFrame(
        {"images": np.ones(count, np.int64), "start_ns": ends - ends[0], "end_ns": ends}
    )
    found = THROUGHPUT.compute(SampledWindow(LoadSpec(1), frame, pl.DataFrame()))
    yield found.interval
    yield compute_rate_interval([1e6 * value + 1] * count, 1, 8)


def from_processes(value, count):
    tries = tuple(
        make_try(np.full(700, 1e6 * value + 1), process) for process in range(min(count, 12))
    )
    for name in ("p50", "p90", "p99", "throughput", "cv", "energy", "jitter"):
        figures = {"jitter": ProcessFigure(value, Dimension.NUMBER, "p 1")}
        given = (
            replace(one.measurement, figures=figures, energy_j_per_image=Estimate(value))
            for one in tries
        )
        group = ProcessGroup(
            tuple(
                RecordedMeasurement(one, "r", latencies=each.latencies)
                for one, each in zip(given, tries, strict=True)
            )
        )
        found = group.estimate(name)
        assert found is None or found.low is not None or found.note
        yield None if found is None else found.interval


def from_rounds(value, count):
    yield ratio_from_rounds([value + 1] * (count + 3), [value + 2] * (count + 3)).ci
    yield OtherSpeed(count).widen(value + 1, (value + 1, value + 1), 0.95)[0]


def from_windows(value, count):
    yield compute_mean_interval([value] * count, 0.95)
    yield compute_ratio_of_sums_interval(np.full(count, value), np.ones(count))
    yield compute_part_interval([round(100 * value)] * count, [100] * count, 0.95)


def from_profiles(value, count):
    before, after = np.full(count, value), np.full(count, value + 1)
    rows = _compute_interval(before, before), _compute_interval(before, after)
    yield from (*rows, compare_samples(before, after, 0.95)[1])


def from_two_builds(value, count):
    """Of whole nanoseconds, as a clock gives them."""
    first = round(1e6 * value) + 1
    sides = [
        ProcessGroup(
            tuple(make_try(np.full(700, level), at, run=run) for at in range(min(count, 12)))
        )
        for run, level in (("r", first), ("r", first + 1), ("s", first + 1))
    ]
    for one, other in ((0, 0), (0, 1), (0, 2)):
        for name in ("p50", "p99", "throughput", "cv"):
            found = compare_groups(sides[one], sides[other], name, Scatter(0.0, 5))
            yield None if isinstance(found, str) else found.interval(0.95)[0]


def from_requests(value, count):
    answers = [Answer(10**7 * at, 10**7 * at + round(1e6 * value) + 1) for at in range(count)]
    limits = [
        Criterion("latency", name, Sense.AT_MOST, 5e6, Dimension.TIME) for name in ("p50", "p99")
    ]
    for load in (LoadSpec(1), LoadSpec(1, Scenario.SERVER, rate_per_s=100.0)):
        for judged in judge_latencies(answers, limits, load, 100.0):
            assert judged.ci or judged.verdict == "INCONCLUSIVE"
            assert judged.ci or judged.reason
            yield judged.ci


def from_answers(value, count):
    """Scores whose samples are all right or all wrong; alone, in one group, and each in its own."""
    labels = np.arange(count) % 3
    found = labels if value < 1 else (labels + 1) % 3
    best = np.stack([(found + at) % 7 for at in range(5)], axis=1)
    tagged = [[f"B-{label}"] for label in found]
    for groups in (None, Groups(np.zeros(count, np.int64)), Groups(np.arange(count))):
        one = compute_accuracy(best, best, labels, top5=True, groups=groups)
        yield from (one.top1_ci, one.top5_ci, one.macro_f1_ci, one.macro_f1_drop_ci, one.drop_ci)
        task = TokenClassification() if groups is None else TokenClassification().grouped_by(groups)
        scored = task.score_predictions([[f"B-{label}"] for label in labels], tagged, tagged)
        yield from (each for score in scored.scores for each in (score.ci, score.drop_ci))
        yield from (each for score in scored.classes for each in (score.ci, score.drop_ci))


ESTIMATORS = [
    from_rounds, from_windows, from_profiles, from_two_builds, from_requests, from_answers,
    from_share, from_mean, from_groups_of_one, from_one_group, from_drop, from_one_sample_of_a_class, from_snr, from_latencies,
    from_throughput, from_processes,
]  # fmt: skip


@pytest.mark.parametrize("estimate", ESTIMATORS)
@given(value=VALUES, count=COUNTS)
def test_equal_values_have_no_interval_of_width_zero(estimate, value, count):
    for bounds in estimate(value, count):
        if bounds is not None:
            low, high = bounds
            assert isfinite(low)
            assert isfinite(high)
            assert low < high


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("estimate", [from_mean, from_groups_of_one, from_one_group, from_drop])
def test_scores_that_are_no_numbers_span_their_range(estimate, bad):
    for low, high in estimate(bad, 40):
        assert (low, high) in ((0, 1), (-1, 1))


def judge_memory(peaks, limit):
    tries = tuple(
        RecordedMeasurement(
            replace(make_try(np.ones(0), at).measurement, host_peak_bytes=peak), "r"
        )
        for at, peak in enumerate(peaks)
    )
    criterion = Criterion("memory", "maximum", Sense.AT_MOST, limit, Dimension.SIZE)
    evidence = BuildEvidence(JudgedBuild("m", "a", "fake", "fp32"), tries)
    found = observe(criterion, evidence)
    assert not isinstance(found, Blocker)
    (seen,) = found
    return seen, judge_criteria([(criterion, [seen])], 0.95)[0].verdict


def test_equal_peaks_of_memory_allow_for_one_more_step():
    seen, verdict = judge_memory([10 * 2**20] * 5, 10 * 2**20)
    assert seen.low < seen.high
    assert verdict == "INCONCLUSIVE"
    assert judge_memory([10 * 2**20] * 5, 13 * 2**20)[1] == "PASS"
