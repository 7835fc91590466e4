"""Which tuned plan a path from files to predictions takes."""

from dataclasses import replace

import pytest
from tests.fakes.preprocess import preprocess_record

from optpipe.core.records import json_from_record
from optpipe.core.verdict import Verdict
from optpipe.preprocess.dali_pipeline import DaliPlan
from optpipe.preprocess.end_to_end import find_tuned_plan
from optpipe.workspace.file_names import PREPROCESSING
from optpipe.workspace.runs import begin_run, finish_run
from optpipe.workspace.store import Store


@pytest.mark.parametrize(("verdict", "taken"), [("PASS", True), ("INCONCLUSIVE", True), ("FAIL", False)])
def test_a_plan_that_was_shown_to_change_the_predictions_is_not_taken(tmp_path, verdict, taken):
    plan = DaliPlan(threads=7, resize="fused")
    run = begin_run(tmp_path, "preprocess")
    record = replace(preprocess_record(plan), verdict=Verdict(verdict))
    (run.path / PREPROCESSING).write_bytes(json_from_record(record))
    finish_run(run, command="optpipe preprocess digits", model="digits")
    assert find_tuned_plan("digits", Store(tmp_path), gpu=False) == (plan if taken else None)
    assert find_tuned_plan("digits", Store(tmp_path), gpu=True) is None
