"""The audit of `benchmarks/calibration_of_intervals.py` with fewer draws: same simulations, same thresholds, fixed seeds."""

import pytest
from benchmarks import calibration_of_intervals as audit
from benchmarks import calibration_table


@pytest.mark.parametrize("part", audit.PARTS)
def test_nothing_errs_more_often_than_it_claims(part):
    rows = audit.simulated([part], scale=0.05)[part]
    assert rows
    assert not [row.text for row in rows if not row.kept]


def test_the_table_of_the_readme_is_made_from_the_rows_of_a_run():
    about, found = audit.read_rows(calibration_table.ROWS)
    assert set(found) == set(audit.PARTS)
    drawn = calibration_table.make_table(about, found)
    assert drawn in calibration_table.README.read_text(encoding="utf-8")
