"""What `bench --slo` answers, and that an INVALID measurement answers nothing."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.measurements import planted

from optpipe.core.measurement import Reason, Subject
from optpipe.measure.search import Slo, combine_limits, find_largest_inside, judge_limit

SLO = Slo(99.0, 5e6)


def found(batch, latency_ms, *codes):
    reasons = [Reason(code, code, "remedy", invalidates=True) for code in codes]
    return planted(Subject("a", "fake", "fp32", "cpu"), batch, latency_ms, reasons=reasons, id=f"m{batch}")


@pytest.mark.parametrize(
    ("measurements", "inside", "met", "batch"),
    [
        ([found(1, 1.0), found(8, 4.0), found(64, 30.0)], True, True, 8),
        ([found(1, 1.0), found(8, 4.0, "drift"), found(64, 30.0)], True, True, 1),
        ([found(1, 1.0, "drift"), found(8, 4.0, "drift")], True, None, 8),
        ([found(1, 6.0)], False, False, 1),
        ([found(1, 6.0, "loaded-host")], False, None, 1),
        ([found(1, 6.0, "falling-behind")], False, False, 1),
        ([found(1, 6.0, "falling-behind", "loaded-host")], False, None, 1),
        ([], False, None, None),
    ],
)
def test_only_a_valid_measurement_says_whether_a_limit_is_met(measurements, inside, met, batch):
    limit = judge_limit("a", "ort", SLO, measurements, find_largest_inside(measurements, SLO))
    assert (limit.inside, limit.met, limit.batch_size) == (inside, met, batch)


def test_one_build_that_meets_the_limit_is_enough_and_doubt_comes_before_failure():
    def met(*answers):
        limits: list[Any] = [SimpleNamespace(met=answer) for answer in answers]
        return combine_limits(SLO, limits).met

    assert (met(False, None, True), met(False, None), met(False, False), met()) == (True, None, False, None)
