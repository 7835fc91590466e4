"""A new score is one class: computed for all models, shown, limited by a policy, judged, and verified without its code."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
from tests.fakes.console import text_of
from tests.fakes.dossiers import edit, examine, seal_anew
from tests.fakes.extensions.optpipe_ranked import Balanced, Brier, Top3

from optpipe.core.errors import BadInputError, MissingError
from optpipe.core.metrics import sampled
from optpipe.core.metrics.sampled import (
    EvaluatedSample,
    Part,
    Rule,
    SampleScore,
    read_score_plugin,
)
from optpipe.core.verdict import Verdict
from optpipe.evaluate.document import document_from_evaluation
from optpipe.evaluate.recompute import read_evaluation
from optpipe.evaluate.result import ScoreRule
from optpipe.evaluate.sampled_scores import PartRecorder, choose_scores, score_parts, state_rules
from optpipe.evaluate.tasks.classification import Classification
from optpipe.models.inputs.sample_set import SetFile
from optpipe.signoff.collect import require_scores
from optpipe.signoff.policy import policy_from_toml
from optpipe.signoff.verify import check_dossier

RNG = np.random.default_rng(5)
TRUTHS = RNG.integers(0, 5, 400).tolist()
LOGITS = RNG.normal(size=(400, 5)) + 2 * np.eye(5)[TRUTHS]


class WordErrors(SampleScore):
    """An error that may exceed its weight: the words of a text."""

    name = "word-errors"
    lower_is_better = True

    def measure(self, sample: EvaluatedSample) -> Part:
        return Part(abs(len(sample.prediction) - sample.truth), weight=sample.truth)


class Raising(Top3):
    def measure(self, sample: EvaluatedSample) -> float:
        raise ZeroDivisionError(f"nothing of {sample.truth}")


class NotANumber(Top3):
    def measure(self, sample: EvaluatedSample) -> float:
        return float("nan")


class TooMuch(Top3):
    def measure(self, sample: EvaluatedSample) -> float:
        return 1.5


class Wordy(Top3):
    def measure(self, sample: EvaluatedSample) -> Any:
        return "right"


class Leaving(Top3):
    def measure(self, sample: EvaluatedSample) -> float:
        raise SystemExit(3)


class Halves(Top3):
    def measure(self, sample: EvaluatedSample) -> Any:
        return Part(0.5, weight=0.5)  # type: ignore[arg-type]


def record(score: SampleScore, logits=LOGITS, truths=TRUTHS) -> PartRecorder:
    """Runs a score over samples in two batches."""
    recorder = PartRecorder([score], Classification(), lambda _: truths)
    best = np.argsort(-logits, axis=1)[:, :5].tolist()
    files = [SetFile(f"{at}.png", "", None) for at in range(len(logits))]
    for start, end in ((0, 300), (300, len(logits))):
        rows = {"logits": logits[start:end]}
        recorder.add_batch(rows, best[start:end], files[start:end], start, 5)
    return recorder


def score(one: SampleScore, source=LOGITS, found=LOGITS):
    before, after = (record(one, each) for each in (source, found))
    rules = state_rules([one])
    return score_parts(rules, before.parts, after.parts, after.withheld, None)[one.name]


def test_top3_is_a_share_with_an_exact_interval():
    right = [truth in np.argsort(-row)[:3] for row, truth in zip(LOGITS, TRUTHS, strict=True)]
    found = score(Top3())
    assert found.value == np.mean(right)
    assert found.drop == 0
    assert found.ci[0] < found.value < found.ci[1]
    assert found.drop_ci[0] < 0 < found.drop_ci[1]


def test_balanced_accuracy_is_the_mean_over_classes_of_the_truths():
    best, truths = LOGITS.argmax(1), np.array(TRUTHS)
    worse = LOGITS.copy()
    worse[truths == 2] = -worse[truths == 2]
    found = score(Balanced(), LOGITS, worse)
    shares = [float((worse.argmax(1) == each)[truths == each].mean()) for each in range(5)]
    assert found.value == pytest.approx(np.mean(shares))
    was = np.mean([float((best == each)[truths == each].mean()) for each in range(5)])
    assert found.drop == pytest.approx(was - np.mean(shares))
    assert found.drop_ci[0] > 0


def test_the_brier_score_of_a_model_that_is_too_sure_rises():
    calibrated, sure = 2 * LOGITS, 20 * LOGITS  # the logarithm of the odds is twice the value
    found = score(Brier(), calibrated, sure)
    apart = np.exp(sure) / np.exp(sure).sum(1, keepdims=True) - np.eye(5)[TRUTHS]
    assert found.value == pytest.approx((apart**2).sum(1).mean() / 2)
    assert found.drop > 0
    assert found.drop_ci[0] > 0


def test_errors_may_exceed_the_words_and_no_score_exceeds_1():
    errors, words = sum(abs(5 - each) for each in TRUTHS), sum(TRUTHS)
    assert errors > words
    assert score(WordErrors()).value == 1
    assert score(WordErrors()).drop == 0


@pytest.mark.parametrize("wrong", [Raising, NotANumber, TooMuch, Wordy, Leaving, Halves])
def test_a_score_that_raises_or_gives_no_part_is_withheld(wrong):
    found = score(wrong())
    assert found.value is None
    assert found.drop_ci is None
    assert "top3" in found.why_not
    assert "0.png" in found.why_not


def test_a_group_that_depends_on_the_prediction_is_no_class():
    class ByPrediction(Balanced):
        def measure(self, sample: EvaluatedSample) -> Part:
            return Part(1.0, group=sample.prediction[0])

    assert "truth alone" in score(ByPrediction(), LOGITS, -LOGITS).why_not


def test_scores_of_nothing_are_withheld():
    class Weightless(Balanced):
        def measure(self, sample: EvaluatedSample) -> Part:
            return Part(0.0, weight=0)

    assert "not defined" in score(Weightless()).why_not


def draw(rule: str, share: float, count: int = 400) -> list[tuple[float, float, float]]:
    right = (np.random.default_rng(1).random(count) < share).astype(float)
    weight = (
        np.random.default_rng(2).integers(1, 9, count) if rule == Rule.RATIO else np.ones(count)
    )
    group = np.random.default_rng(3).integers(0, 6, count)
    value = right * weight
    return [*zip(value.tolist(), weight.tolist(), group.tolist(), strict=True)]


POLICY = "schema = 1\n[scores.own]\n%s\n"


def sign_off(workspace, folder, limits, rule, parts, **how):
    """The criteria of scores, and the dossier, on which the independent verifier agrees."""
    workspace.evaluate(
        workspace.artifact("fp32"), n=len(TRUTHS), sampled={"own": (rule, *parts)}, **how
    )
    found, dossier = workspace.sign_off(POLICY % limits, folder)
    seen, verdict = examine(dossier)
    assert (seen.differs, seen.open, verdict) == ([], [], found.verdict)
    assert check_dossier(dossier).problems == ()
    assert any("what each sample adds to own" in each for each in seen.stated)
    named = {one.name: one for one in found.criteria if one.name.startswith("scores.")}
    return named, dossier


@pytest.mark.slow  # a dossier for each, judged by both verifiers
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("is_error", [False, True])
@pytest.mark.parametrize("groups", [None, [str(at // 2) for at in range(400)]])
def test_a_policy_limits_a_score_and_both_verifiers_agree(
    workspace, tmp_path, rule, is_error, groups
):
    stated = ScoreRule("an own score", rule, is_error, "strangers 1.5")
    parts = draw(rule, 0.9), draw(rule, 0.8)
    limits = 'maximum_drop = "100 points"\nminimum = "0.01%"\nmaximum = "99.99%"'
    named, _ = sign_off(
        workspace, tmp_path / "one", limits, stated, parts, groups=groups, first=1000
    )
    drop, least, most = (
        named[f"scores.own.{key}"] for key in ("maximum_drop", "minimum", "maximum")
    )
    assert drop.verdict is Verdict.PASS
    assert drop.ci[0] < drop.observed < drop.ci[1]
    assert least.observed == most.observed
    lost, _ = workspace.sign_off(POLICY % 'maximum_drop = "0 points"', tmp_path / "two")
    (found,) = (one for one in lost.criteria if one.name == "scores.own.maximum_drop")
    assert found.verdict is (Verdict.PASS if is_error else Verdict.FAIL)


@pytest.mark.slow
def test_a_mean_of_shares_is_judged_exactly(workspace, tmp_path):
    rule = ScoreRule("top-3 accuracy", Rule.RATIO, lower_is_better=False, source="s 1")
    plain = [(float(at % 10 > 0), 1.0, 0.0) for at in range(400)]
    named, _ = sign_off(workspace, tmp_path / "one", 'minimum = "80%"', rule, (plain, plain))
    found = named["scores.own.minimum"]
    assert (found.verdict, found.observed) == (Verdict.PASS, 0.9)
    assert found.ci[0] == pytest.approx(0.866, abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_withheld_score_never_passes(workspace, tmp_path, which):
    rule = ScoreRule("own", Rule.RATIO, lower_is_better=False, source="s 1")
    parts: list[Any] = [draw(Rule.RATIO, 0.9), draw(Rule.RATIO, 0.9)]
    parts[which] = "own raised ValueError"
    named, _ = sign_off(workspace, tmp_path / "one", 'maximum_drop = "100 points"', rule, parts)
    assert named["scores.own.maximum_drop"].verdict is Verdict.INCONCLUSIVE
    assert named["scores.own.maximum_drop"].observed is None
    if which:
        assert "own raised ValueError" in named["scores.own.maximum_drop"].reason


@pytest.mark.slow
@pytest.mark.parametrize(
    "forge",
    [
        lambda part: [part[0] + 2 * part[1], part[1], part[2]],
        lambda part: [float("nan"), part[1], part[2]],
        lambda part: [part[0], part[1] + 0.5, part[2]],
        lambda part: [part[0], -1.0, part[2]],
        lambda part: [part[0], part[1], -1.0],
        lambda part: [part[0], part[1]],
        lambda part: [0.0, part[1], part[2]],
    ],
)
def test_impossible_or_changed_parts_are_refused(workspace, tmp_path, forge):
    rule = ScoreRule("own", Rule.RATIO, lower_is_better=False, source="s 1")
    parts = draw(Rule.RATIO, 0.9), draw(Rule.RATIO, 0.9)
    _, dossier = sign_off(workspace, tmp_path / "one", 'minimum = "1%"', rule, parts)
    (path,) = dossier.glob("runs/*/predictions.parquet")
    table = pl.read_parquet(path)
    column = next(name for name in table.columns if ":part." in name and "source" not in name)
    changed = [forge(part) if at < 200 else part for at, part in enumerate(table[column].to_list())]
    table.with_columns(pl.Series(column, changed, pl.List(pl.Float64))).write_parquet(path)
    seal_anew(dossier)
    assert check_dossier(dossier).problems
    assert examine(dossier)[0].differs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "value"),
    [
        (("sampled",), {}),
        (("sampled", "own", "rule"), "class mean"),
        (("sampled", "own", "lower_is_better"), True),
        (
            ("sampled", "top1"),
            {"title": "", "rule": "ratio", "lower_is_better": False, "source": ""},
        ),
        (("results", 1, "sampled"), {}),
        (("results", 1, "sampled", "own", "value"), 0.99),
        (("results", 1, "sampled", "own", "drop_ci"), [0.0, 0.1]),
    ],
)
def test_forged_statements_about_a_score_are_refused(workspace, tmp_path, steps, value):
    rule = ScoreRule("own", Rule.RATIO, lower_is_better=False, source="s 1")
    parts = draw(Rule.RATIO, 0.9), draw(Rule.RATIO, 0.8)
    _, dossier = sign_off(workspace, tmp_path / "one", 'maximum_drop = "90 pt"', rule, parts)
    (path,) = dossier.glob("runs/*/evaluate.json")
    edit(path, *steps, value=value)
    seal_anew(dossier)
    assert check_dossier(dossier).problems
    assert examine(dossier)[0].differs


def test_evaluate_shows_a_score_in_its_report(workspace):
    rule = ScoreRule("an own score", Rule.RATIO, lower_is_better=False, source="s 1")
    parts = draw(Rule.RATIO, 0.9), draw(Rule.RATIO, 0.8)
    run = workspace.evaluate(workspace.artifact("fp32"), n=400, sampled={"own": (rule, *parts)})
    found = read_evaluation(run)
    shown = text_of(document_from_evaluation(found, {}), width=240)
    assert "an own score" in shown
    assert f"{found.results[1].sampled['own'].value:.2%}" in shown
    assert json.loads((run.path / "evaluate.json").read_text())["sampled"]["own"]["rule"] == "ratio"


@pytest.fixture
def plug_in(monkeypatch):
    def register(plugin):
        one = read_score_plugin(plugin.name, plugin)
        monkeypatch.setitem(sampled.PLUGIN_SCORES, one.name, one)

    return SimpleNamespace(add=register)


def test_a_plug_in_is_chosen_by_its_task_and_replaced_by_an_own_score(plug_in):
    plug_in.add(Top3)
    own = Top3()
    assert [type(each) for each in choose_scores([], "classification")] == [Top3]
    assert choose_scores([], "detection") == []
    assert choose_scores([own], "classification") == [own]
    with pytest.raises(BadInputError, match="two scores"):
        choose_scores([own, Top3()], "classification")
    with pytest.raises(BadInputError, match="the task is detection"):
        choose_scores([own], "detection")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"name": "other"}, "both must be the same"),
        ({"name": "Top3"}, "both must be the same"),
        ({"measure": SampleScore.measure}, "no measure"),
        ({"rule": "median"}, "rules are ratio"),
        ({"tasks": "classification"}, "tasks are"),
        ({"tasks": ("chess",)}, "tasks are"),
    ],
)
def test_a_plug_in_that_breaks_the_contract_is_refused(changes, problem):
    with pytest.raises(BadInputError, match=problem):
        read_score_plugin("top3", type("Broken", (Top3,), changes))


@pytest.mark.parametrize("name", ["top1", "drop", "F1", "mIoU", "Top", "", "agreement", "a b"])
def test_no_score_takes_the_name_of_another_figure(name):
    with pytest.raises(BadInputError, match="name"):
        read_score_plugin(name, type("Named", (Top3,), {"name": name}))


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ('[scores.top3]\nmaximum = "5%"', "better when higher; limit its minimum"),
        ('[scores.top3]\nminimum = "90 ms"', "not a unit"),
        ('[scores.top3]\nminimun = "90%"', "did you mean minimum"),
        ('[scores.top3]\nmaximum_drop = "1 AP"', "write it in points"),
        ("[scores.top3]\nbatch_size = 1", "unknown key"),
        ("[scores.top3]", "sets no limit"),
        ('[scores.AP]\nminimum = "5%"', r"1 AP.*\[accuracy\]"),
        ('[scores."Top 3"]\nminimum = "5%"', "lowercase letters"),
        ("[scores]\ntop3 = 3", "expected a table"),
        ("scores = 3", "expected a table"),
    ],
)
def test_a_wrong_table_is_refused_with_its_place(plug_in, table, problem):
    plug_in.add(Top3)
    with pytest.raises(BadInputError, match=problem):
        policy_from_toml(f"schema = 1\n{table}\n".encode(), "policy.toml")


def test_a_limit_of_a_score_that_nothing_computes_is_refused_first(plug_in, workspace):
    policy = policy_from_toml(b'schema = 1\n[scores.top4]\nminimum = "5%"\n')
    plug_in.add(Top3)
    with pytest.raises(
        MissingError, match="top4, a score that nothing here computes; did you mean top3"
    ):
        require_scores(policy, workspace.store)
    rule = ScoreRule("own", Rule.RATIO, lower_is_better=False, source="s 1")
    parts = draw(Rule.RATIO, 0.9), draw(Rule.RATIO, 0.8)
    workspace.evaluate(workspace.artifact("fp32"), n=400, sampled={"top4": (rule, *parts)})
    require_scores(policy, workspace.store)
