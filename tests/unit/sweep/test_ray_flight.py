"""Clocks of hosts: a difference is seen where it must be one, said once, and decides nothing."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.sweeps import make_cell, make_record, make_slot

from optpipe.sweep.cluster import CLOCKS_S, bound_clock_difference
from optpipe.sweep.fleet import compare_fleet
from optpipe.sweep.plan import fill_rows, judge_against, list_warnings, plan_sweep

seconds = st.floats(0, 1e6)


@given(st.floats(0, 2e9), seconds, seconds, st.floats(-1e6, 1e6))
def test_a_difference_is_never_overstated(sent, there, back, ahead):
    found = bound_clock_difference(sent, sent + there + ahead, sent + there + back)
    assert abs(found) <= abs(ahead) + 1e-3
    assert found * ahead >= 0
    if abs(ahead) > CLOCKS_S + there + back + 1:
        assert found != 0


def rows_of(*records):
    plan = plan_sweep([one.cell for one in records], [make_slot()], {})
    return fill_rows(plan, {one.cell.key: one for one in records})


def on_host(record, host, ahead):
    return replace(record, place=replace(record.place, host=host, clock_ahead_s=ahead))


def test_a_clock_that_is_off_is_said_once_for_each_host():
    records = [make_record(make_cell(batch=size)) for size in (1, 2, 4)]
    rows = rows_of(on_host(records[0], "a", 3600.0), on_host(records[1], "a", 3600.0), on_host(records[2], "b", -60.0))
    assert list_warnings(rows) == [
        f"the clock of host {host} is {said} this host's: the timestamps of its rows are off, durations are not affected"
        for host, said in (("a", "3,600 s ahead of"), ("b", "60 s behind"))
    ]


def test_what_is_answered_does_not_depend_on_the_time_of_day():
    cell = make_cell()
    before, now = make_record(cell, run="before"), make_record(cell, run="now", p50_ms=(1.1, 1.11, 1.09))
    for when in ("1999-01-01T00:00:00", "2099-01-01T00:00:00"):
        other = on_host(replace(now, started_utc=when), "a", 1e9)
        (row,) = plan_sweep([make_cell(batch=8)], [make_slot()], {other.key: [other]})
        assert row.seconds == 12.0
        assert compare_fleet({other.key: [other]}).rows == compare_fleet({now.key: [now]}).rows
        verdicts = [
            judge_against(rows_of(each), {each.key: each}, {before.key: [before]}, "base").cells
            for each in (now, other)
        ]
        assert verdicts[0] == verdicts[1]
