"""Batch sizes of the CUDA graphs that answer requests."""

from hypothesis import given
from hypothesis import strategies as st

from optpipe.deploy.session_process import list_captured_sizes


@given(st.integers(1, 300))
def test_every_batch_has_a_graph_of_less_than_twice_its_size(largest):
    sizes = list_captured_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for count in range(1, largest + 1):
        assert count <= next(each for each in sizes if each >= count) < 2 * count or count == 1
