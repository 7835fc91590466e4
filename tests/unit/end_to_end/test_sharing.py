import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.end_to_end.sharing import (
    CoreSharing,
    CoreSplit,
    list_core_splits,
    vary_dali_threads,
)

CORES = st.integers(1, 256)


@given(CORES, st.integers(1, 64))
def test_no_division_gives_inference_more_threads_than_cores_and_the_usual_one_is_first(cores, dali):
    found = list_core_splits(cores, dali, {})
    assert found[0] == CoreSplit(1, 0, dali, spinning=True)
    assert len(set(found)) == len(found) <= 5
    assert all(each.streams * max(each.threads, 1) <= cores for each in found)
    assert not any(each.spinning for each in found if each.streams > 1)
    assert cores == 1 or CoreSplit(cores, 1, dali, spinning=False) in found


@given(CORES, st.integers(1, 64), st.booleans())
def test_what_the_user_fixed_stays(cores, threads, spinning):
    assert {(each.streams, each.threads) for each in list_core_splits(cores, 2, {"threads": threads})} == {(1, threads)}
    assert {each.spinning for each in list_core_splits(cores, 2, {"spinning": spinning})} == {spinning}


@given(CORES, st.integers(1, 300))
def test_other_threads_of_dali_change_nothing_else(cores, dali):
    best = CoreSplit(2, 3, dali, spinning=False)
    others = vary_dali_threads(best, cores)
    assert best not in others
    assert {(each.streams, each.threads, each.spinning) for each in others} <= {(2, 3, False)}
    assert all(1 <= each.dali_threads <= cores for each in others)


def test_the_bound_is_all_cores_over_what_an_image_costs():
    division = CoreSplit(2, 1, 2, spinning=False)
    sharing = CoreSharing(
        2, division, {division: 22.0}, 350.0, 24.0, preprocess_s=0.005, inference_s=0.075, whole_s=0.083
    )
    said = sharing.to_dict(whole=22.5, slower=26.0)
    assert said["bound_images_per_s"] == pytest.approx(25.0)
    assert said["bound_of_slower_part"] == pytest.approx(25 / 26)
    assert said["of_bound"] == pytest.approx(0.9)
    assert said["of_slower_part_with_same_threads"] == pytest.approx(22.5 / 24)
    assert said["cpu_ms_per_image"] == pytest.approx({"preprocess": 5.0, "inference": 75.0, "whole": 83.0})
    assert said["tried"] == [{**division.to_dict(), "images_per_s": 22.0}]
    # a part that leaves cores idle alone could be exceeded by neither
    assert sharing.to_dict(whole=22.5, slower=20.0)["bound_of_slower_part"] == 1.0
