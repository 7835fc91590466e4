"""Which evaluation a build's accuracy is judged on, and that its text names the data."""

import pytest

from optpipe.evaluate.recompute import observe_accuracy
from optpipe.models.artifacts.facts import judged_build_from_entry

VALIDATION = {"name": "digits/validation", "sha256": "a" * 64}
TRAINING = {"name": "digits/train", "sha256": "b" * 64, "validation": False}


@pytest.fixture
def judge(workspace):
    """Evaluates on each of some sets, the newest last; returns the value and the text of what is judged."""
    entry = workspace.artifact("fp32")

    def observe(*sets):
        runs = [workspace.evaluate(entry, lost, dataset=dataset) for lost, dataset in enumerate(sets)]
        found = observe_accuracy(runs, judged_build_from_entry(entry), 0.95)["drop"]
        return round(1000 * float(found.value)), found.about

    return observe


def test_the_validation_set_goes_before_newer_data_and_is_named(judge) -> None:
    whole = {**VALIDATION, "validation": True}
    assert judge(whole, TRAINING) == (0, "1000 images of digits/validation (aaaaaaaaaaaa)")


def test_the_newest_evaluation_on_the_validation_set_counts_whatever_gave_it(judge) -> None:
    whole, same = ({**VALIDATION, "validation": known} for known in (True, False))
    assert judge(whole, same, TRAINING)[0] == 1
    assert judge(whole, {**whole, "sha256": "c" * 64}, TRAINING) == (
        1,
        "1000 images of digits/validation (cccccccccccc)",
    )


def test_without_it_the_newest_counts_and_is_named(judge) -> None:
    assert judge({**VALIDATION, "validation": False}, TRAINING) == (1, "1000 images of digits/train (bbbbbbbbbbbb)")
