"""Scores besides a task's own, in Python and by a plug-in: from a module in memory to a verdict that both verifiers judge."""

from typing import Any

import numpy as np
import pytest
import torch

import optpipe as op
from optpipe.core.errors import BadInputError
from optpipe.core.metrics.sampled import EvaluatedSample, SampleScore
from tests.fakes.dossiers import examine
from tests.fakes.extensions.optpipe_ranked import Balanced, Brier, Top3
from tests.fakes.extensions.word_errors import WORDS, WordErrors

pytestmark = pytest.mark.slow
UNTIMED = {"trust.environment": "nothing is timed"}


class Failing(Top3):
    name = "failing"

    def measure(self, sample: EvaluatedSample) -> float:
        raise KeyError("nothing")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Any:
    torch.manual_seed(0)
    net, inputs = torch.nn.Linear(8, 6), torch.randn(300, 8)
    workspace = op.Workspace(tmp_path_factory.mktemp("scores"), listener=op.Listener())
    model = op.Model(
        net, example=inputs[:2], task="classification", trained=True, workspace=workspace
    )
    with torch.no_grad():
        labels = net(inputs).argmax(1)
    labels[:15] = (labels[:15] + 1) % 6
    return model.build("fp32", backend="onnxruntime", device="cpu"), op.Data((inputs, labels))


def test_scores_in_python_are_evaluated_limited_and_verified(built) -> None:
    builds, held = built
    margin = op.Metric(
        lambda outputs, label: float(outputs[label] > 0), range=(0, 1), name="positive"
    )
    own: list[SampleScore | op.Metric] = [Top3(), Balanced(), Brier(), margin, Failing()]
    scored = builds.evaluate(held, scores=own)
    frame = scored.frame().filter(build="onnxruntime fp32")
    assert set(frame["score"]) == {"top1", *(each.name for each in own)}
    values = {row["score"]: row for row in frame.iter_rows(named=True)}
    assert values["top1"]["value"] == 0.95
    assert values["top3"]["value"] >= 0.95
    assert values["balanced"]["low"] < values["balanced"]["value"] < values["balanced"]["high"]
    assert values["top3"]["drop"] == 0
    assert values["brier"]["drop"] == pytest.approx(0, abs=1e-6)
    assert "KeyError" in values["failing"]["why_not"]
    assert "balanced accuracy" in str(scored)

    policy = op.Policy(
        scores={
            "top3": {"maximum_drop": "20 points", "minimum": "80%"},
            "balanced": {"maximum_drop": "60 points"},
            "brier": {"maximum": "90%"},
            "positive": {"minimum": "1%"},
        }
    )
    verdict = builds["fp32"].signoff(policy, evaluation=scored, waive=UNTIMED, figures=False)
    assert str(verdict.record.verdict) == "PASS", verdict.reasons
    found, again = examine(verdict.dossier.path)
    assert (found.differs, found.open, str(again)) == ([], [], "PASS")
    verdict.dossier.verify()

    withheld = op.Policy(scores={"failing": {"maximum_drop": "50 points"}})
    other = builds["fp32"].signoff(withheld, evaluation=scored, waive=UNTIMED, figures=False)
    assert str(other.record.verdict) == "INCONCLUSIVE"
    assert "KeyError" in str(other)


def test_a_sign_off_takes_scores_with_its_data(built) -> None:
    builds, held = built
    policy = op.Policy(scores={"top3": {"minimum": "80%"}})
    verdict = builds["fp32"].signoff(
        policy, data=held, scores=[Top3()], waive=UNTIMED, figures=False
    )
    assert verdict.require_pass().criteria[-1].name == "scores.top3.minimum"
    again = builds["fp32"].signoff(policy, waive=UNTIMED, figures=False)
    assert again.dossier.path == verdict.dossier.path


def test_scores_that_a_sign_off_cannot_use_are_refused(built) -> None:
    builds, held = built
    build, policy = builds["fp32"], op.Policy(scores={"brier": {"maximum": "90%"}})
    with pytest.raises(BadInputError, match=r"no score has that name\ngive it: scores="):
        build.signoff(policy, data=held, scores=[Top3()])
    with pytest.raises(BadInputError, match="expected a list"):
        build.signoff(policy, data=held, scores="brier")
    scored = builds.evaluate(held, scores=[Brier()])
    for given in ({"scores": [Brier()]}, {"data": held}, {"data": np.zeros((64, 8))}):
        with pytest.raises(BadInputError, match="and evaluation exclude each other"):
            build.signoff(policy, evaluation=scored, **given)
    with pytest.raises(BadInputError, match=r"what builds\.evaluate\(data\) returns"):
        build.signoff(policy, evaluation=scored.frame())


class Speech(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        return self.linear(frames)


def test_a_word_error_rate_on_texts(tmp_path) -> None:
    torch.manual_seed(1)
    net, frames = Speech(), torch.randn(200, 5, 8)
    with torch.no_grad():
        texts = [" ".join(WORDS[word] for word in row) for row in net(frames).argmax(-1)]
    texts[:20] = ["north north north"] * 20
    model = op.Model(net, example=frames[:2], trained=True, workspace=tmp_path)
    build = model.build("fp32", backend="onnxruntime", device="cpu")["fp32"]
    exact = op.Metric(
        lambda outputs, text: float([WORDS[word] for word in outputs.argmax(-1)] == text.split()),
        range=(0, 1),
        name="exact",
    )
    verdict = build.signoff(
        op.Policy(scores={"word-errors": {"maximum": "50%", "maximum_drop": "10 points"}}),
        data=(frames, texts),
        metric=exact,
        scores=[WordErrors()],
        waive=UNTIMED,
        figures=False,
    )
    verdict.require_pass()
    found, again = examine(verdict.dossier.path)
    assert (found.differs, found.open, str(again)) == ([], [], "PASS")


@pytest.mark.parametrize(
    ("text", "said", "errors"),
    [
        ("north east", "north east", 0),
        ("north east", "north", 1),
        ("north", "north east south", 2),
        ("north east south", "south north east", 2),
    ],
)
def test_word_errors_are_the_fewest_edits(text, said, errors) -> None:
    outputs = {"words": np.eye(4)[[WORDS.index(word) for word in said.split()]]}
    part = WordErrors().measure(EvaluatedSample(outputs, None, text))
    assert part == (errors, len(text.split()), 0)


@pytest.mark.parametrize(
    ("scores", "problem"),
    [
        ([Top3], r"give an instance: Top3\(\)"),
        (Top3(), "expected a list"),
        ("top3", "expected a list"),
        ([3], "int is not a score"),
        ([max], "is not a score"),
        ([Top3(), Top3()], "two scores"),
        ([op.Metric(np.mean, range=(0, 1), name="top1")], "cannot name a score"),
        ([type("Odd", (Top3,), {"rule": "median"})()], "rules are"),
        ([type("Boxes", (Top3,), {"tasks": ("detection",)})()], "the task is classification"),
    ],
)
def test_what_is_no_score_is_refused(built, scores, problem) -> None:
    builds, held = built
    with pytest.raises(BadInputError, match=problem):
        builds.evaluate(held, scores=scores)
