"""Slots take the longest works first and divide the last ones."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.sweeps import make_cell

from optpipe.sweep.job import START_S, Task
from optpipe.sweep.plan import sort_tasks, take_task


def make_work(loads, load_s):
    cells = tuple(make_cell(batch=size) for size in range(1, loads + 1))
    return Task(cells[0].recipe, cells[0].kind, cells, load_s)


def run(works, slots, *, divide=True):
    """When the last slot ends if works take as long as expected, and what was run; undivided, the order of `works` is kept."""
    waiting = list(works)
    ends, ran = [0.0] * slots, []
    while waiting:
        ends.sort()
        now, *others = ends
        busy = [end for end in others if end > now]
        work = take_task(waiting, 0, busy, slots, now) if divide else waiting.pop(0)
        ran.append(work)
        ends[0] = now + work.expected_s
    return max(ends), ran


works_of = st.lists(st.builds(make_work, st.integers(1, 12), st.floats(0.1, 60)), min_size=1, max_size=7)


@given(works_of, st.integers(1, 3))
def test_longest_first_ends_within_a_third_of_the_best_order(works, slots):
    best = min(
        max(sum(work.expected_s for work, mine in zip(works, dealt, strict=True) if mine == slot) for slot in dealt)
        for dealt in product(range(slots), repeat=len(works))
    )
    assert run(sort_tasks(works), slots, divide=False)[0] <= best * (4 / 3 - 1 / (3 * slots)) * (1 + 1e-9)


@given(works_of, st.integers(1, 8))
def test_dividing_ends_no_later_than_before_by_more_than_one_load(works, slots):
    whole = sort_tasks(works)
    ended, ran = run(whole, slots)
    longest = START_S + max(work.load_s for work in works)
    for before in (works, whole):
        assert ended <= run(before, slots, divide=False)[0] + longest
    loads = sum(len(work.cells) for work in works)
    together = (sum(work.expected_s for work in works) + START_S * (len(ran) - len(works))) / slots
    assert sum(len(work.cells) for work in ran) == loads
    assert ended <= together + longest


def test_no_gpu_stands_idle_while_another_has_several_loads_left():
    ended, ran = run([make_work(10, 3.0)] * 5, 2)
    assert run([make_work(10, 3.0)] * 5, 2, divide=False)[0] == 105
    assert (ended, [len(work.cells) for work in ran]) == (90.0, [10, 10, 10, 10, 5, 5])


def test_as_many_works_as_slots_stay_whole():
    works = [make_work(10, 3.0)] * 6
    assert [len(work.cells) for work in run(works, 2)[1]] == [10] * 6


def test_the_rest_of_a_work_waits_in_its_place():
    waiting = [make_work(10, 3.0), make_work(1, 2.0)]
    taken = take_task(waiting, 0, [], 4, 0.0)
    assert [len(work.cells) for work in waiting] == [10 - len(taken.cells), 1]
    assert {cell.key for cell in waiting[0].cells}.isdisjoint(cell.key for cell in taken.cells)
