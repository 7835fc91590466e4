"""The audit of `benchmarks/calibration_of_intervals.py` with fewer draws: same simulations, same thresholds, fixed seeds."""

import pytest
from benchmarks import calibration_of_intervals as audit


@pytest.mark.parametrize("part", audit.PARTS)
def test_nothing_errs_more_often_than_it_claims(part):
    rows = audit.simulated([part], scale=0.05)[part]
    assert rows
    assert not [row.text for row in rows if not row.kept]
