import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from optpipe.quantize.ranges import (
    BINS,
    LOWEST,
    compute_edges,
    count_magnitudes,
    count_on_device,
)

finite = hnp.arrays(np.float32, st.integers(0, 300), elements=st.floats(-1e6, 1e6, width=32))


@given(finite)
def test_every_element_is_counted_once(values) -> None:
    assert count_magnitudes(values).total == values.size


@given(finite, finite)
def test_parts_add_up_to_the_whole(one, other) -> None:
    whole = count_magnitudes(np.concatenate([one, other]))
    assert np.array_equal(count_magnitudes(one).counts + count_magnitudes(other).counts, whole.counts)


@given(finite)
def test_order_does_not_matter_and_each_sign_has_its_own_counts(values) -> None:
    assert np.array_equal(count_magnitudes(-values[::-1]).counts, count_magnitudes(values).counts[::-1])


@given(st.floats(2.0**-31, 2.0**60, width=32))
def test_a_value_lies_in_its_bin_which_is_narrow(value) -> None:
    low, high, counts = count_magnitudes(np.array([value], np.float32)).nonzero()
    assert counts.tolist() == [1]
    assert low[0] <= value < high[0]
    assert high[0] / low[0] <= 1 + 1 / 512


def test_edges_rise() -> None:
    assert np.all(np.diff(compute_edges(np.arange(LOWEST, BINS - 512))) > 0)


def test_chunks_do_not_show(monkeypatch) -> None:
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    whole = count_magnitudes(values).counts
    monkeypatch.setattr("optpipe.quantize.ranges._CHUNK", 77)
    assert np.array_equal(count_magnitudes(values).counts, whole)


@given(finite)
def test_counting_on_a_device_is_the_same_but_for_zeros(values) -> None:
    import torch

    counts = torch.zeros(2 * BINS, dtype=torch.int64)
    count_on_device(torch.from_numpy(values), counts)
    expected = count_magnitudes(values).counts.copy()
    expected[:, :LOWEST] = 0
    assert np.array_equal(counts.numpy().reshape(2, BINS), expected)
