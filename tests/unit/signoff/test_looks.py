"""Each kind of evidence spends its looks, and builds that were measured or evaluated together share the error. Both verifiers agree."""

import pytest
from tests.fakes.dossiers import examine

from optpipe.core.metrics.sections import Sense
from optpipe.core.quantity import Dimension
from optpipe.core.verdict import Observation, Verdict
from optpipe.models.artifacts.housekeeping import remove_stored
from optpipe.signoff.judge import judge_criteria
from optpipe.signoff.policy import Criterion
from optpipe.stats.means import Look, Mean

POLICY = """
schema = 1
[[latency]]
p50 = "50 ms"
[accuracy]
maximum_drop = "%s points"
[preprocessing]
minimum_agreement = "90%%"
"""


@pytest.fixture
def judge(workspace, tmp_path):
    """`judge(limit)`: the notes on looks and the criteria by name, on which the independent verifier agrees."""
    count = iter(range(100))

    def make(limit="2", policy=POLICY):
        record, folder = workspace.sign_off(policy % limit, tmp_path / str(next(count)))
        found, verdict = examine(folder)
        assert (found.differs, verdict) == ([], record.verdict)
        note = next(one.message for one in record.notes if one.code == "look")
        return note, {one.name: one for one in record.criteria}

    return make


def find_width(criterion):
    low, high = criterion.ci
    return high - low


@pytest.fixture
def built(workspace):
    entry = workspace.artifact("fp16")
    workspace.bench(entry)
    workspace.preprocess()
    workspace.evaluate(entry)
    return entry


def test_other_samples_are_another_look_at_accuracy_alone(workspace, built, judge):
    note, once = judge()
    assert "accuracy, look 1 (1 set of samples), at 97.5%" in note
    workspace.evaluate(built, first=5000)
    note, twice = judge()
    assert "accuracy, look 2 (2 sets of samples), at 99.17%" in note
    assert "measurements, look 1 " in note
    drop, p50 = "accuracy.maximum_drop", "latency.p50"
    assert find_width(twice[drop]) > find_width(once[drop])
    assert find_width(twice[p50]) == find_width(once[p50])
    workspace.evaluate(built, first=9000)
    assert "accuracy, look 3 (3 sets of samples), at 99.72%" in judge()[0]


def test_the_same_samples_again_are_no_look(workspace, built, judge):
    before = judge()
    workspace.evaluate(built)
    note, after = judge()
    assert (note, after["accuracy.maximum_drop"].ci) == (
        before[0],
        before[1]["accuracy.maximum_drop"].ci,
    )


@pytest.mark.slow
def test_other_images_and_measurements_are_looks_of_their_kind(workspace, built, judge):
    workspace.preprocess(images=700)
    workspace.preprocess(images=700)
    workspace.bench(built, seed=3)
    note, _ = judge()
    assert "measurements, look 2 (2 bench runs of one load)" in note
    assert "preprocessing, look 2 (2 sets of images)" in note
    assert "accuracy, look 1 " in note


@pytest.mark.parametrize("count", [1, 15])
@pytest.mark.slow
def test_builds_that_were_evaluated_together_share_the_error(workspace, built, judge, count):
    _, alone = judge()
    workspace.evaluate(built, beside=[f"{each:012x}" for each in range(count)])
    note, found = judge()
    level = 100 * Look(1, builds=count + 1).compute_confidence(0.95)
    assert f"on which {count + 1} builds were evaluated), at {level:.4g}%" in note
    name = "accuracy.maximum_drop"
    assert find_width(found[name]) > find_width(alone[name])


def of(built):
    return f'{POLICY}[build]\nartifact = "{built.id}"\n'


@pytest.mark.parametrize("apart", [False, True])
def test_builds_that_were_measured_share_the_error(workspace, built, judge, apart):
    """In one run with the judged one, or in a run for each, as by a sweep."""
    _, alone = judge(policy=of(built))
    others = [workspace.artifact("fp16", macs=each) for each in (0.7, 0.8)]
    for each in [[one] for one in others] if apart else [[built, *others]]:
        workspace.bench(*each)
    note, found = judge(policy=of(built))
    runs = 1 if apart else 2
    level = 100 * Look(runs, builds=3).compute_confidence(0.95)
    assert f"of one load, under which 3 builds were measured), at {level:.4g}%" in note
    assert "accuracy, look 1 " in note
    name = "accuracy.maximum_drop"
    assert find_width(found[name]) == find_width(alone[name])


def test_removed_runs_of_other_builds_have_chosen_all_the_same(workspace, built, judge):
    other = workspace.bench(workspace.artifact("fp16", macs=0.7))
    remove_stored(workspace.store, other.name, with_dependents=False)
    assert "under which 2 builds were measured" in judge(policy=of(built))[0]


def test_removed_builds_have_chosen_all_the_same(workspace, built, judge):
    other = workspace.artifact("fp16", macs=0.7)
    workspace.bench(other)
    remove_stored(workspace.store, other.id, with_dependents=True)
    assert "under which 2 builds were measured" in judge(policy=of(built))[0]


def test_builds_of_another_network_or_load_or_before_since_have_not_chosen(
    workspace, built, judge, tmp_path
):
    workspace.bench(workspace.artifact("fp16", width=4))
    workspace.bench(workspace.artifact("fp16", macs=0.7), batches=(8,))
    assert "builds were measured" not in judge(policy=of(built))[0]
    other = workspace.bench(workspace.artifact("fp16", macs=0.8))
    again = workspace.bench(built)
    assert other.manifest.started_utc < again.manifest.started_utc
    record, folder = workspace.sign_off(
        of(built) % "2", tmp_path / "since", since=again.manifest.started_utc
    )
    found, verdict = examine(folder)
    assert (found.differs, verdict) == ([], record.verdict)
    note = next(one.message for one in record.notes if one.code == "look")
    assert "measurements, look 2 (2 bench runs of one load), at" in note


def test_builds_that_were_evaluated_apart_on_the_same_samples_share_the_error(
    workspace, built, judge
):
    other = workspace.artifact("fp16", macs=0.7)
    workspace.evaluate(other, first=5000)
    assert "builds were evaluated" not in judge(policy=of(built))[0]
    workspace.evaluate(other)
    assert "on which 2 builds were evaluated" in judge(policy=of(built))[0]


@pytest.mark.slow
def test_a_build_on_its_limit_loses_its_pass_when_it_was_the_best_of_many(workspace, built, judge):
    workspace.evaluate(built, lost=2)
    before = judge("0.9")[1]["accuracy.maximum_drop"]
    assert before.verdict is Verdict.PASS
    workspace.evaluate(built, lost=2, beside=[f"{each:012x}" for each in range(15)])
    assert judge("0.9")[1]["accuracy.maximum_drop"].verdict is Verdict.INCONCLUSIVE


def test_a_removed_evaluation_still_counts(workspace, built, judge):
    other = workspace.evaluate(built, first=5000)
    remove_stored(workspace.store, other.name, with_dependents=False)
    assert "accuracy, look 2 " in judge()[0]


NAN = "gives NaN for 10 of 1000 images, unlike the source model: its scores are withheld"


@pytest.mark.parametrize("first", [0, 5000])
def test_a_build_that_failed_last_is_not_judged_by_other_evaluations(
    workspace, built, judge, first
):
    """On the same samples, which an older evaluation has, or on others."""
    drop = "accuracy.maximum_drop"
    assert judge()[1][drop].verdict is Verdict.PASS
    failed = workspace.evaluate(built, first=first, why_not=NAN, failed=True)
    judged = judge()[1][drop]
    assert (judged.verdict, judged.observed) == (Verdict.INCONCLUSIVE, None)
    assert failed.name in judged.reason
    assert "NaN for 10 of 1000" in judged.reason
    assert "evaluate" in judged.remedy
    workspace.evaluate(built, first=9000)
    assert judge()[1][drop].verdict is Verdict.INCONCLUSIVE
    workspace.evaluate(built, first=first)
    assert judge()[1][drop].verdict is Verdict.PASS


def test_a_build_that_this_machine_cannot_run_did_not_fail(workspace, built, judge):
    workspace.evaluate(built, first=5000, why_not="needs a GPU", beside=["0" * 12])
    note, judged = judge()
    assert judged["accuracy.maximum_drop"].verdict is Verdict.PASS
    assert "builds were evaluated" not in note  # the judged evaluation had one build


@pytest.mark.slow
def test_each_baseline_after_the_first_measurement_is_a_look_at_regressions(
    workspace, tmp_path, judge
):
    latency = 'schema = 1\n[[latency]]\np50 = "50 ms"\n'
    workspace.bench(workspace.artifact("fp16"))
    workspace.approve(latency, tmp_path / "first")
    judged = workspace.artifact("fp16", macs=0.96)
    workspace.bench(judged)
    regression = "schema = 1\n[[regression]]\np50 = '%s %%'\n"
    assert "regression, look 1 " in judge("50", regression)[0]
    for name in ("second", "third"):
        workspace.approve(latency, tmp_path / name)
    note, _ = judge("50", regression)
    looks = "1 bench run of one load, under which 2 builds were measured, and 3 baselines"
    assert f"regression, look 3 ({looks}), at 99.79%" in note
    assert "measurements, look 1 " in note


def test_figures_of_different_looks_are_rejected_together():
    """A p-value counts as many times as its look has parts: 0.001 rejects at a first look (2 parts), not at a fifth (30)."""

    def judge_both(look):
        drop = Criterion("accuracy", "maximum_drop", Sense.AT_MOST, 0.0, Dimension.POINTS)
        p50 = Criterion("latency", "p50", Sense.AT_MOST, 10.0, Dimension.TIME)
        seen = Observation(3.1, 0.01, 6.2, tail=Mean(3.1, 1.0, 1e9))
        inside = Observation(9.0, 8.0, 9.9, tail=Mean(9.0, 0.3, 1e9))
        observed = [(drop, [seen]), (p50, [inside])]
        return [one.verdict for one in judge_criteria(observed, 0.95, {"evaluate": look})]

    assert judge_both(Look(1)) == [Verdict.FAIL, Verdict.PASS]
    assert judge_both(Look(5)) == [Verdict.INCONCLUSIVE, Verdict.PASS]
