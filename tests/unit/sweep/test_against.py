"""A sweep held against an earlier one; builds that are known again."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.entries import artifact_info, put
from tests.fakes.sweeps import make_cell, make_recipe, make_record, make_slot, other_environment

from optpipe.sweep.job import JobState
from optpipe.sweep.local import find_built, note_built
from optpipe.sweep.plan import LEVEL, fill_rows, judge_against, plan_sweep
from optpipe.workspace.store import Store


def judge(pairs, **options):
    """The verdicts of cells whose processes gave these medians before and now."""
    cells = [make_cell(batch=size) for size in range(1, len(pairs) + 1)]
    before = [make_record(cell, run="before", p50_ms=pair[0]) for cell, pair in zip(cells, pairs, strict=True)]
    now = [make_record(cell, run="now", p50_ms=pair[1]) for cell, pair in zip(cells, pairs, strict=True)]
    return judge_records(cells, before, now, **options)


def judge_records(cells, before, now, **options):
    plan = plan_sweep(cells, [make_slot()], {})
    rows = fill_rows(plan, {one.cell.key: one for one in now})
    return judge_against(rows, {one.key: one for one in now}, {one.key: [one] for one in before}, "base", **options)


QUIET = (1.0, 1.001, 0.999, 1.0005, 0.9995)


def scaled(factor, values=QUIET):
    return tuple(factor * each for each in values)


def test_the_three_verdicts():
    noisy = (0.7, 1.0, 1.4, 0.9, 1.2)
    found = judge([(QUIET, QUIET), (QUIET, scaled(1.1)), (QUIET, noisy), (QUIET, scaled(0.9))])
    assert [one.verdict for one in found.cells] == ["PASS", "FAIL", "INCONCLUSIVE", "PASS"]
    assert found.verdict == "FAIL"
    assert "+10.0% exceeds the tolerance of 2.0%" in found.cells[1].reason
    assert judge([(QUIET, scaled(1.1))], tolerance=0.2).verdict == "PASS"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda now: replace(now, state=JobState.INVALID, reason="drift"), "invalid: drift"),
        (lambda now: replace(now, run="before"), "baseline's own run"),
        (lambda now: make_record(now.cell, slot=other_environment(make_slot()), run="now"), "another environment"),
        (lambda now: make_record(now.cell, run="now", p50_ms=(1.0, 1.0)), "fewer than three VALID processes"),
    ],
)
def test_what_cannot_be_compared_is_inconclusive_and_says_why(change, said):
    cell = make_cell()
    found = judge_records([cell], [make_record(cell, run="before")], [change(make_record(cell, run="now"))])
    assert found.verdict == "INCONCLUSIVE"
    assert said in found.cells[0].reason


def test_a_model_that_changed_is_compared_with_what_had_its_name():
    cell = make_cell(files={"model": "1"})
    changed = replace(cell, recipe=replace(cell.recipe, files={"model": "2"}))
    assert changed.key != cell.key
    before, now = make_record(cell, run="before", p50_ms=QUIET), make_record(changed, run="now", p50_ms=QUIET)
    found = judge_records([changed], [before], [now])
    assert found.verdict == "PASS"


def test_a_cell_without_a_baseline_is_inconclusive():
    cell = make_cell()
    assert "not measured in the baseline" in judge_records([cell], [], [make_record(cell, run="now")]).cells[0].reason


@given(st.floats(0.5, 2.0), st.floats(0.0, 0.3), st.floats(0.0, 0.3))
def test_a_wider_tolerance_never_turns_pass_into_fail(factor, small, more):
    narrow, wide = (judge([(QUIET, scaled(factor))], tolerance=each + 0.01) for each in (small, small + more))
    assert not (narrow.verdict == "PASS" and wide.verdict != "PASS")
    assert not (narrow.verdict != "FAIL" and wide.verdict == "FAIL")


@pytest.mark.slow
def test_false_alarms_are_rare_over_all_cells_together():
    """Twenty cells exactly at the tolerance, 150 sweeps: false alarms as often as LEVEL allows, four standard errors granted."""
    draw, alarms, sweeps = np.random.default_rng(5), 0, 150
    for _ in range(sweeps):
        noise = np.exp(0.01 * draw.standard_normal((20, 2, 5)))
        found = judge([(tuple(before), tuple(1.02 * now)) for before, now in noise])
        alarms += found.verdict == "FAIL"
    assert alarms <= sweeps * LEVEL + 4 * (sweeps * LEVEL * (1 - LEVEL)) ** 0.5


def test_a_build_is_known_again_by_its_content_in_its_environment(tmp_path):
    entry = put(Store(tmp_path), artifact_info(), {"test": 1}, files={"model.onnx": b"engine"})
    recipe = make_recipe(files={"model": "1"})
    note_built(tmp_path, recipe, "f", entry.id)
    assert find_built(tmp_path, recipe, "f") == entry.id
    assert find_built(tmp_path, recipe, "other") is None
    assert find_built(tmp_path, replace(recipe, files={"model": "2"}), "f") is None
    unknown = make_recipe()
    note_built(tmp_path, unknown, "f", entry.id)
    assert find_built(tmp_path, unknown, "f") is None
    entry.file("model.onnx").write_bytes(b"damage")
    assert find_built(tmp_path, recipe, "f") is None
