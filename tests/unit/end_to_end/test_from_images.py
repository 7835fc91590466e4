"""Which tuned plan a path from files to answers takes."""

import pytest

from optpipe.end_to_end.from_images import find_tuned_plan
from optpipe.preprocess.dali.pipeline import DaliPlan
from optpipe.workspace.file_names import PREPROCESSING
from optpipe.workspace.runs import begin_run, finish_run, write_json
from optpipe.workspace.store import Store


@pytest.mark.parametrize(("verdict", "taken"), [("PASS", True), ("INCONCLUSIVE", True), ("FAIL", False)])
def test_a_plan_that_was_shown_to_change_the_answers_is_not_taken(tmp_path, verdict, taken):
    plan = DaliPlan(threads=7, resize="fused")
    run = begin_run(tmp_path, "preprocess")
    write_json(run.path / PREPROCESSING, {"verdict": verdict, "tuned": {"plan": plan.to_dict()}})
    finish_run(run, command="optpipe preprocess digits", details={"model": "digits"})
    assert find_tuned_plan("digits", Store(tmp_path), gpu=False) == (plan if taken else None)
    assert find_tuned_plan("digits", Store(tmp_path), gpu=True) is None
