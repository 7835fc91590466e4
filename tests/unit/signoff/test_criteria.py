"""The laws of judging: loosening never harms, missing evidence never passes, chance passes only at its rate, confidence widens."""

import math
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.measurements import planted

from optpipe.core.files import Files
from optpipe.core.measurement import Reason, Subject
from optpipe.core.metrics.sections import Sense
from optpipe.core.quantity import Dimension
from optpipe.core.records import json_from_record
from optpipe.core.verdict import Blocker, CriterionResult, Observation, Verdict
from optpipe.measure.groups import RecordedMeasurement
from optpipe.models.artifacts.judged_build import JudgedBuild
from optpipe.signoff.audit import judge_audit
from optpipe.signoff.build_evidence import BuildEvidence
from optpipe.signoff.collect import SignoffRequest, collect_evidence
from optpipe.signoff.dossier import read_dossier
from optpipe.signoff.evidence import observe
from optpipe.signoff.judge import decide_overall_verdict, judge_criteria, judge_dossier
from optpipe.signoff.policy import Criterion, policy_from_toml
from optpipe.stats.means import Mean
from optpipe.trace.read import trace_from_sqlite
from optpipe.workspace.seal import seal_folder, store_baseline


def judge_criterion(criterion, found):
    return judge_criteria([(criterion, found)], 0.95)[0]


FINITE = st.floats(-1e9, 1e9, allow_nan=False)
CAP = Blocker("random weights", "give --weights")


@st.composite
def observations(draw):
    low, value, high = sorted((draw(FINITE), draw(FINITE), draw(FINITE)))
    return Observation(value, low, high, blockers=(CAP,) if draw(st.booleans()) else ())


def criterion(sense, threshold):
    return Criterion("latency", "p99", sense, threshold, Dimension.TIME)


@given(
    st.sampled_from([Sense.AT_MOST, Sense.AT_LEAST]),
    st.lists(observations(), max_size=4),
    FINITE,
    FINITE,
)
def test_loosening_never_turns_pass_or_inconclusive_into_fail(sense, found, one, other):
    limits = sorted((one, other), reverse=sense is Sense.AT_LEAST)
    before, after = (judge_criterion(criterion(sense, limit), found).verdict for limit in limits)
    assert not (before is not Verdict.FAIL and after is Verdict.FAIL)
    assert not (before is Verdict.PASS and after is not Verdict.PASS)


@given(observations(), FINITE, st.floats(0, 1e9))
def test_a_wider_interval_never_turns_inconclusive_into_a_verdict(seen, limit, extra):
    wider = Observation(seen.value, seen.low - extra, seen.high + extra, seen.blockers)
    before, after = (
        judge_criterion(criterion(Sense.AT_MOST, limit), [one]).verdict for one in (seen, wider)
    )
    assert after in (before, Verdict.INCONCLUSIVE)


@given(st.lists(observations(), min_size=1, max_size=4), FINITE)
def test_a_cap_or_missing_evidence_never_passes(found, limit):
    capped = [*found, Observation(0.0, 0.0, 0.0, blockers=(CAP,))]
    assert judge_criterion(criterion(Sense.AT_MOST, limit), capped).verdict is not Verdict.PASS
    assert (
        judge_criterion(criterion(Sense.AT_MOST, limit), Blocker("none", "measure")).verdict
        is Verdict.INCONCLUSIVE
    )
    assert judge_criterion(criterion(Sense.AT_MOST, limit), []).verdict is Verdict.INCONCLUSIVE


@given(st.sampled_from([Sense.AT_MOST, Sense.AT_LEAST]), FINITE)
def test_a_figure_that_is_no_number_never_passes_or_fails(sense, limit):
    for low, high in ((math.nan, 1.0), (1.0, math.nan), (math.nan, math.nan)):
        assert (
            judge_criterion(criterion(sense, limit), [Observation(1.0, low, high)]).verdict
            is Verdict.INCONCLUSIVE
        )


@given(st.lists(observations(), min_size=1, max_size=5), FINITE, st.randoms())
def test_the_order_of_observations_does_not_matter_and_all_must_pass(found, limit, random):
    shuffled = random.sample(found, len(found))
    one = criterion(Sense.AT_MOST, limit)
    assert judge_criterion(one, found).verdict is judge_criterion(one, shuffled).verdict
    assert (judge_criterion(one, found).verdict is Verdict.PASS) == all(
        judge_criterion(one, [x]).verdict is Verdict.PASS for x in found
    )


def test_a_foreign_environment_is_inconclusive_not_fail():
    wanted = Criterion("environment", "gpu", Sense.EQUALS, "NVIDIA H200")
    assert judge_criterion(wanted, [Observation("NVIDIA H200")]).verdict is Verdict.PASS
    judged = judge_criterion(wanted, [Observation("none")])
    assert judged.verdict is Verdict.INCONCLUSIVE
    assert judged.reason == "measured on none, but the policy requires NVIDIA H200"
    assert "measure on NVIDIA H200" in (judged.remedy or "")


def test_the_reason_tells_the_figures_in_full_where_rounding_would_hide_the_difference():
    judged = judge_criterion(
        criterion(Sense.AT_MOST, 15e6), [Observation(16e6, 15.5e6, 17e6, about="batch 8")]
    )
    assert judged.reason == "16.0 ms [15.5, 17.0] exceeds the limit of 15.0 ms"
    assert judged.remedy
    limit = Criterion("size", "maximum", Sense.AT_MOST, 2099.0, Dimension.SIZE)
    assert (
        judge_criterion(limit, [Observation(2100.0, is_exact=True)]).reason
        == "2100 bytes exceeds the limit of 2099 bytes"
    )
    assert (
        judge_criterion(limit, [Observation(2099.0, is_exact=True)]).reason
        == "2.05 KiB is within the limit of 2.05 KiB"
    )


def test_a_waived_criterion_does_not_count():
    failed = judge_criterion(criterion(Sense.AT_MOST, 1.0), [Observation(2.0, is_exact=True)])
    passed = judge_criterion(
        Criterion("size", "maximum", Sense.AT_MOST, 3.0, Dimension.SIZE),
        [Observation(2.0, is_exact=True)],
    )
    assert decide_overall_verdict([failed, passed]) is Verdict.FAIL
    waived = replace(failed, waived="known, ticket 12")
    assert decide_overall_verdict([waived, passed]) is Verdict.PASS
    assert decide_overall_verdict([waived]) is Verdict.INCONCLUSIVE, "nothing left to judge"


def test_fail_over_many_criteria_needs_more_evidence_and_says_so():
    limits = [criterion(Sense.AT_MOST, 10.0) for _ in range(10)]
    seen = [
        Observation(10.1 + 0.1 * (at == 0), 10.01, 10.4, tail=Mean(10.1, 0.04, 4))
        for at in range(10)
    ]
    alone = judge_criterion(limits[0], [seen[1]])
    assert alone.verdict is Verdict.INCONCLUSIVE, (
        "p = 0.03 of Student's t with 4 degrees of freedom"
    )
    sharp = Observation(10.2, 10.1, 10.3, tail=Mean(10.2, 0.036, 4))
    assert judge_criterion(limits[0], [sharp]).verdict is Verdict.FAIL
    together = judge_criteria(
        [(one, [sharp if at == 0 else seen[1]]) for at, one in enumerate(limits)], 0.95
    )
    assert {one.verdict for one in together} == {Verdict.INCONCLUSIVE}
    assert "not clearly enough among the 10 figures judged together" in together[0].reason
    clear = Observation(20.0, 19.0, 21.0, tail=Mean(20.0, 0.4, 4))
    judged = judge_criteria(
        [(one, [clear if at == 0 else seen[1]]) for at, one in enumerate(limits)], 0.95
    )
    assert [one.verdict for one in judged].count(Verdict.FAIL) == 1


def judge_measured(limit, figures):
    evidence = tuple(RecordedMeasurement(one, "r") for one in figures)
    build = BuildEvidence(JudgedBuild("m", "a", "fake", "fp32"), evidence)
    return judge_criteria([(limit, observe(limit, build))], 0.95)[0]


@pytest.mark.parametrize(
    ("processes", "ms", "verdict"),
    [(5, 9.7, "PASS"), (5, 9.8, "INCONCLUSIVE"), (10, 9.8, "PASS"), (10, 9.9, "INCONCLUSIVE"), (20, 9.9, "PASS"),
     (5, 10.3, "FAIL"), (5, 10.2, "INCONCLUSIVE"), (10, 10.2, "FAIL"), (10, 10.1, "INCONCLUSIVE"), (20, 10.1, "FAIL")],
)  # fmt: skip
def test_processes_that_agree_decide_nothing_so_close_to_a_limit_that_a_second_speed_may_lie_beyond(
    processes, ms, verdict
):
    limit = Criterion("latency", "p50", Sense.AT_MOST, 10e6, Dimension.TIME)
    subject = Subject("a", "fake", "fp32", "cpu")
    figures = [
        planted(subject, 1, ms * (1 + 1e-4 * (at % 3)), process=at) for at in range(processes)
    ]
    judged = judge_measured(limit, figures)
    assert judged.verdict == verdict
    assert f"{processes} processes cannot rule out a second speed" in judged.about
    if judged.verdict is Verdict.INCONCLUSIVE:
        assert "once more: optpipe bench a" in judged.remedy


@pytest.mark.parametrize("code", ["drift", "bimodal", "throttled", "loaded-host", "interrupted"])
def test_a_process_that_was_left_out_counts_whatever_the_reason(code):
    """Four agree at 9.6 ms, the fifth ran at 10.8 ms: a build may heat its device or move its clocks itself."""
    limit = Criterion("latency", "p50", Sense.AT_MOST, 10e6, Dimension.TIME)
    figures = [
        planted(Subject("a", "fake", "fp32", "cpu"), 1, 9.6 * (1 + 1e-4 * at), process=at)
        for at in range(4)
    ]
    slow = planted(
        Subject("a", "fake", "fp32", "cpu"),
        1,
        10.8,
        process=4,
        reasons=(Reason(code, "seen", "", True),),
    )
    assert judge_measured(limit, (*figures,)).verdict == "PASS"
    assert judge_measured(limit, (*figures, slow)).verdict == "INCONCLUSIVE"


TRACE = Path(__file__).parents[2] / "golden" / "traces" / "h200-resnet50-fp16-b8.sqlite"
POLICY = """schema = 1
confidence = "%s %%"
[build]
precision = "fp16"
[latency]
p50 = "50 ms"
p99 = "50 ms"
[throughput]
minimum = "1 images/s"
[regression]
p50 = "50 %%"
[memory]
maximum = "900 MiB"
[energy]
maximum = "9 J/image"
[stability]
maximum_cv = "90 %%"
[preprocessing]
minimum_agreement = "1 %%"
minimum_snr = "1 dB"
[precision]
fp16 = "1 %%"
[size]
maximum = "1 MiB"
[tensor_cores]
minimum_share = "1 %%"
"""
EXACT = {"precision.fp16", "size.maximum"}
"""Facts of the built network and of its file: nothing is estimated."""


@pytest.fixture(
    params=[
        pytest.param(False, id="alone"),
        pytest.param(True, id="interleaved", marks=pytest.mark.slow),
    ]
)
def judged(workspace, tmp_path, request):
    entry = workspace.artifact("fp16")
    workspace.bench(entry, count=1500, power=200.0, peaks=2**20)
    workspace.preprocess()
    trace = trace_from_sqlite(TRACE)
    names = pl.col("name").cast(pl.String).str.replace("nvjet_sm90_hsh_128x112", "sgemm_128x112")
    workspace.profile(entry, replace(trace, kernels=trace.kernels.with_columns(names)))

    def judge(confidence):
        folder = tmp_path / str(confidence)
        folder.mkdir()
        policy = policy_from_toml((POLICY % confidence).encode())
        collect_evidence(SignoffRequest("digits", policy), workspace.store, folder)
        return judge_dossier(read_dossier(Files(folder)))[0], folder

    found, folder = judge(95.0)
    (folder / "verdict.json").write_bytes(json_from_record(found))
    seal_folder(folder)
    store_baseline(Files(folder), workspace.path)
    if request.param:
        workspace.pair(entry, entry, peaks=2**20)
    return lambda confidence: {one.name: one for one in judge(confidence)[0].criteria}


@pytest.mark.slow
def test_a_higher_confidence_widens_every_interval_and_nothing_else_does(judged):
    usual, sure = judged(90), judged(99)
    for name, one in usual.items():
        if name.startswith("trust."):
            continue
        assert one.verdict is Verdict.PASS or "in 2 runs" in str(one), f"{name}: {one.reason}"
        assert one.observed == sure[name].observed
        if name in EXACT:
            assert one.ci is None
            continue
        low, high = one.ci
        assert sure[name].ci[0] <= low <= high <= sure[name].ci[1], name
        assert sure[name].ci[1] - sure[name].ci[0] > high - low, name


def audited(ms, share):
    return CriterionResult(
        "latency.p99", Verdict.PASS, "", observed=ms, ci=(ms / (1 + share), ms * (1 + share))
    )


@given(st.floats(1, 1e9), st.floats(0.2, 5), st.floats(0, 0.3), st.floats(0, 0.3))
def test_an_audit_is_symmetric_and_a_wider_interval_only_makes_it_undecided(ms, ratio, one, other):
    limit, before, now = criterion(Sense.AT_MOST, 1.0), audited(ms, one), audited(ms * ratio, other)
    verdict = judge_audit(limit, before, now, ()).verdict
    assert judge_audit(limit, now, before, ()).verdict is verdict
    assert judge_audit(limit, before, audited(ms * ratio, 2 * other), ()).verdict in (
        verdict,
        Verdict.INCONCLUSIVE,
    )
    if one == other == 0.0 and abs(ratio / 1.1 - 1) > 1e-9 and abs(ratio * 1.1 - 1) > 1e-9:
        assert verdict is (Verdict.PASS if 1 / 1.1 < ratio < 1.1 else Verdict.FAIL)
    assert (
        judge_audit(limit, before, now, ("gpu: one and another",)).verdict is Verdict.INCONCLUSIVE
    )


@pytest.mark.parametrize(("points", "verdict"), [(0.3, Verdict.PASS), (0.7, Verdict.FAIL)])
def test_an_audit_compares_scores_on_the_same_data_as_they_are(points, verdict):
    limit = Criterion("accuracy", "maximum_drop", Sense.AT_MOST, 1.0, Dimension.POINTS)
    before, now = (
        CriterionResult("a", Verdict.PASS, "", observed=each, ci=(-9.0, 9.0))
        for each in (0.0, points)
    )
    assert judge_audit(limit, before, now, ()).verdict is verdict
