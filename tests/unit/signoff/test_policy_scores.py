"""Limits on a task's own score: `"0.5 AP"`."""

import pytest

from optpipe.core.errors import BadInputError
from optpipe.core.verdict import Missing, Observation
from optpipe.models.artifacts.facts import JudgedBuild
from optpipe.signoff.build_evidence import BuildEvidence
from optpipe.signoff.evidence import observe
from optpipe.signoff.policy import Criterion, policy_from_toml

FIGURES = {
    "AP": Observation(0.58, 0.55, 0.61),
    "drop of AP": Observation(0.002, -0.001, 0.004),
    "drop of AP50": Observation(0.01, 0.005, 0.02),
}
ACCURACY = {**FIGURES, "score": FIGURES["AP"], "drop": FIGURES["drop of AP"]}


def read_criterion(limit: str) -> Criterion:
    (criterion,) = policy_from_toml(f"schema = 1\n[accuracy]\n{limit}\n".encode()).criteria
    return criterion


def observe_limit(limit: str):
    evidence = BuildEvidence(JudgedBuild("m", "a", "onnxruntime", "int8"), accuracy=ACCURACY)
    return observe(read_criterion(limit), evidence)


@pytest.mark.parametrize(
    ("limit", "name", "said", "value"),
    [
        ('maximum_drop = "0.5 AP"', "accuracy.maximum_drop.AP", "at most 0.5 AP", 0.2),
        ('maximum_drop = "0.5 points"', "accuracy.maximum_drop", "at most 0.5 points", 0.2),
        ('maximum_drop = "2 AP50"', "accuracy.maximum_drop.AP50", "at most 2 AP50", 1.0),
        ('minimum_score = "50 AP"', "accuracy.minimum_score.AP", "at least 50 AP", 58.0),
        ('minimum_score = "50 points"', "accuracy.minimum_score", "at least 50 points", 58.0),
    ],
)
def test_a_limit_names_its_score_and_finds_it(limit: str, name: str, said: str, value: float) -> None:
    criterion = read_criterion(limit)
    assert (criterion.name, criterion.limit) == (name, said)
    found = observe_limit(limit)
    assert not isinstance(found, Missing)
    assert found[0].value == pytest.approx(value)


def test_a_score_that_the_task_has_not_is_said() -> None:
    found = observe_limit('maximum_drop = "0.5 mIoU"')
    assert isinstance(found, Missing)
    assert found.reason == "this model's task has no score mIoU; it has AP, AP50"


@pytest.mark.parametrize(
    ("limit", "message"),
    [('minimum_score = "101 AP"', "can never be met"), ('maximum_drop = "0.5 GIoU"', "GIoU is not a unit")],
)
def test_limits_that_cannot_be_meant_are_refused(limit: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        read_criterion(limit)
