"""Records of jobs: what counts does not depend on the order in which they came; two sweeps never run one job at once."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.sweeps import make_cell, make_record

from optpipe.core.errors import BadInputError
from optpipe.sweep.job import JobState
from optpipe.sweep.ledger import claim_job, keep_backed, list_conflicts, read_job, read_jobs, sort_records, write_job
from optpipe.workspace.entry import MANIFEST

CELL = make_cell()
RECORDS = [
    make_record(CELL, JobState.DONE, run="bench-2", started="2"),
    make_record(CELL, JobState.DONE, run="bench-1", started="1"),
    make_record(CELL, JobState.FAILED, "killed", started="0"),
    make_record(CELL, JobState.INVALID, "drift", started="0"),
]


@given(st.permutations(RECORDS))
def test_the_record_that_counts_is_the_oldest_result_in_any_order(records):
    assert sort_records(records)[0].run == "bench-1"


def test_records_are_read_as_they_were_written_and_one_written_twice_is_one(tmp_path):
    for record in (*RECORDS, *RECORDS):
        write_job(tmp_path, record)
    (found,) = read_jobs(tmp_path).values()
    assert sorted(map(str, found)) == sorted(map(str, RECORDS))
    assert read_job(tmp_path, RECORDS[0].key) == RECORDS[1]
    assert read_job(tmp_path, "0" * 16) is None


def test_verdicts_that_differ_are_a_conflict_and_a_crash_before_a_result_is_none():
    assert list(list_conflicts({"key": RECORDS[:3]})) == []
    assert "done in bench-2, done in bench-1, invalid" in next(list_conflicts({"key": RECORDS}))


def test_a_damaged_record_is_named_with_the_way_out(tmp_path):
    path = write_job(tmp_path, RECORDS[0]) / MANIFEST
    path.write_text(path.read_text()[:-20])
    with pytest.raises(BadInputError, match="delete the folder") as error:
        read_jobs(tmp_path)
    assert str(path) in str(error.value)


def test_a_figure_that_was_changed_in_a_record_is_not_believed(tmp_path):
    path = write_job(tmp_path, RECORDS[0]) / MANIFEST
    content = json.loads(path.read_text())
    content["info"]["group"]["figures"]["p50"]["estimate"]["value"] /= 2
    path.write_text(json.dumps(content))
    with pytest.raises(BadInputError, match="was changed") as error:
        read_jobs(tmp_path)
    assert str(path.parent) in str(error.value)


def test_a_job_is_claimed_once(tmp_path):
    with claim_job(tmp_path, "k") as first, claim_job(tmp_path, "k") as second, claim_job(tmp_path, "other") as third:
        assert (first, second, third) == (True, False, True)
    with claim_job(tmp_path, "k") as again:
        assert again


def test_a_record_whose_run_was_removed_no_longer_counts(tmp_path):
    for record in RECORDS:
        write_job(tmp_path, record)
    (tmp_path / "runs" / "bench-2").mkdir(parents=True)
    (tmp_path / "runs" / "bench-2" / "manifest.json").touch()
    (found,) = keep_backed(tmp_path, read_jobs(tmp_path)).values()
    assert [one.run for one in found] == ["bench-2", None, None]
