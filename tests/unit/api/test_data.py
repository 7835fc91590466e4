"""Data: drawn once, hashed whatever the order, and what a loader may not yield."""

import random

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import optpipe as op
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.events import SilentListener
from optpipe.models.inputs.tensor_set import read_tensor_set
from optpipe.workspace.store import Store

CARD = ModelCard(
    "net", "memory:net", Task.OTHER, (InputSpec("x", "float32", (1, 3), (8, 3), (64, 3)),)
)
TWO = ModelCard(
    "net",
    "memory:net",
    Task.OTHER,
    (
        InputSpec("x", "float32", (1, 3), (8, 3), (64, 3)),
        InputSpec("t", "float32", (), (), ()),
    ),
)


def rows(count=12, width=3, seed=0):
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def store(data, tmp_path, card=CARD):
    return data.store_for(card, Store(tmp_path), SilentListener())


@given(st.permutations(range(6)))
def test_the_hash_does_not_depend_on_the_order_nor_on_the_batches(order) -> None:
    x, labels = rows(6), np.arange(6)
    whole = op.Data((x, labels))
    batches = [(x[order[start : start + 4]], labels[order[start : start + 4]]) for start in (0, 4)]
    assert op.Data(batches).sha256 == whole.sha256
    assert op.Data((x, labels[::-1].copy())).sha256 != whole.sha256


def test_a_loader_arrays_tensors_a_dataset_and_a_frame_are_one_entry(tmp_path) -> None:
    x, labels = rows(), np.arange(12) % 3
    dataset = TensorDataset(torch.from_numpy(x), torch.from_numpy(labels))
    torch.manual_seed(0)
    sources = [
        (x, labels),
        (torch.from_numpy(x), torch.from_numpy(labels)),
        {"x": x, "labels": labels},
        DataLoader(dataset, batch_size=5, shuffle=True),
        dataset,
        pl.DataFrame(
            {"x": x.tolist(), "labels": labels}, schema_overrides={"x": pl.Array(pl.Float32, 3)}
        ),
        ({"x": x[at : at + 1], "labels": labels[at : at + 1]} for at in range(12)),
        [((x,), labels)],
    ]
    found = [store(op.Data(each), tmp_path) for each in sources]
    arrays: list = [np.load(path) for path, _ in found]
    expected: dict = {
        tuple(row): label for row, label in zip(x.tolist(), labels.tolist(), strict=True)
    }
    for held, (_, stored) in zip(arrays, found, strict=True):
        pairs: dict = {
            tuple(row): label
            for row, label in zip(held["x"].tolist(), held["labels"].tolist(), strict=True)
        }
        assert pairs == expected
        assert [expected[tuple(row)] for row in held["x"].tolist()] == list(stored.truths)
    assert found[0][1].entry.id == found[3][1].entry.id  # positional columns, in another order
    assert found[0][1].entry.id == found[1][1].entry.id


def test_a_draw_leaves_the_random_state_and_takes_the_first_of_a_loader(tmp_path) -> None:
    loader = DataLoader(torch.from_numpy(rows()), batch_size=5, shuffle=True)
    torch.manual_seed(1)
    random.seed(1)
    before = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
    )
    data = op.Data(loader, count=7)
    assert len(data) == 7
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
    )


def test_arrays_are_drawn_at_random_by_a_seed() -> None:
    x = rows(100)
    assert len(op.Data(x, count=10)) == 10
    assert op.Data(x, count=10).sha256 == op.Data(x, count=10).sha256
    assert op.Data(x, count=10).sha256 != op.Data(x, count=10, seed=1).sha256


def test_fewer_samples_than_asked_for_are_a_warning(tmp_path) -> None:
    listener = SilentListener()
    op.Data([rows(4)], count=9).store_for(CARD, Store(tmp_path), listener)
    assert any("only 4" in each for each in listener.warnings)


def test_texts_may_be_truths(tmp_path) -> None:
    _, stored = store(op.Data([(rows(2), ["cat", "dog"])]), tmp_path)
    assert sorted(stored.truths) == ["cat", "dog"]


def test_a_value_that_a_batch_shares_and_other_axes(tmp_path) -> None:
    x = rows(4)
    path, _ = store(op.Data([(x, np.float32(0.5))], axes={1: None}), tmp_path, TWO)
    held = np.load(path)
    assert held["t"].tolist() == [0.5] * 4
    flipped = op.Data([x.T.copy()], axes={0: 1})
    assert sorted(np.load(store(flipped, tmp_path)[0])["x"].tolist()) == sorted(x.tolist())


class Breaks(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise ZeroDivisionError("broken sample")
        return torch.zeros(3)


def yield_then_raise():
    yield rows(2)
    raise RuntimeError("no more disk")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ([], "nothing"),
        (iter(()), "nothing"),
        (["a text", "another"], "str"),
        ([None], "NoneType"),
        ([object()], "object"),
        ([rows(2), np.zeros((2, 3), np.float64)], "item 1"),
        ([rows(2), np.zeros((2, 3, 1), np.float32)], "item 1"),
        ([rows(2), (rows(2), np.arange(2))], "other columns"),
        ([(rows(2), np.arange(3))], "different numbers of samples"),
        ([np.float32(1)], "single value"),
        ([rows(0)], "no samples"),
        ([{}], "empty"),
        (yield_then_raise(), "item 1: RuntimeError: no more disk"),
        (DataLoader(Breaks()), "item 2: ZeroDivisionError"),
        (Breaks(), "item 2: ZeroDivisionError"),
        (3, "holds no samples"),
        ((), "empty tuple"),
        ("no/such/folder", "no such file"),
        (pl.DataFrame({"x": [1.0, None]}), "nulls"),
        (pl.DataFrame({"x": [[1.0], [1.0, 2.0]]}), "different lengths"),
        (pl.DataFrame(), "no columns"),
        (pl.DataFrame({"x": [{"a": 1.0}]}), "is Struct"),
        (np.array([1, None], dtype=object), "objects, the first of type int"),
        (np.array([rows(2), rows(3)], dtype=object), "stack samples"),
        ({"x": np.array([None], dtype=object)}, "NoneType"),
        ((np.array(["a", "b"]), np.arange(2)), "texts"),
        (np.array(["2026-01-01"], "M8[D]"), "dates"),
        (np.zeros(2, complex), "complex128"),
        (np.zeros(2, [("a", "f4")]), "records"),
        (torch.zeros(2, 3, device="meta"), "meta device"),
        (torch.zeros(2, 3).to_sparse(), "to_dense"),
        (torch.zeros(2, 3, dtype=torch.complex64), "complex64"),
    ],
)
def test_what_cannot_be_data_is_refused_in_two_lines(source, said) -> None:
    with pytest.raises(op.BadInputError, match=said) as error:
        op.Data(source)
    assert len(str(error.value).splitlines()) <= 2


@pytest.mark.parametrize(
    "options",
    [
        {"count": 0},
        {"count": "5"},
        {"count": 2.5},
        {"count": True},
        {"seed": "a"},
        {"seed": -1},
        {"axes": {0: 2}},
        {"axes": {0: -1}},
        {"axes": {0: "a"}},
        {"axes": {0: None}},
        {"axes": {"absent": 0}},
        {"axes": 1},
    ],
)
def test_options_that_mean_nothing_are_named(options) -> None:
    with pytest.raises(op.BadInputError, match=next(iter(options))) as error:
        op.Data(rows(), **options)
    assert len(str(error.value).splitlines()) <= 2


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("labeled", [True, False])
def test_inputs_that_are_no_numbers_are_refused(value, labeled, tmp_path) -> None:
    x = rows()
    x[3, 1] = value
    data = op.Data((x, np.arange(12))) if labeled else op.Data([x[:6], x[6:]])
    with pytest.raises(op.BadInputError, match="'x' contains NaN or Inf"):
        store(data, tmp_path)
    np.savez(tmp_path / "given.npz", x=x)
    with pytest.raises(op.BadInputError, match="'x' contains NaN or Inf"):
        read_tensor_set(tmp_path / "given.npz", CARD.inputs)


def test_a_mask_that_is_added_may_hold_minus_infinity(tmp_path) -> None:
    mask = np.zeros((4, 3), np.float32)
    mask[1, 2] = -np.inf
    path, _ = store(op.Data(mask), tmp_path)
    with np.load(path) as held:
        assert np.isneginf(held["x"]).sum() == 1


def test_a_truth_that_is_nan_is_refused_and_a_map_may_have_unknown_places(tmp_path) -> None:
    with pytest.raises(op.BadInputError, match="truth of sample 1 is NaN"):
        store(op.Data((rows(2), np.array([1.0, np.nan]))), tmp_path)
    maps = np.array([[1.0, np.nan], [0.0, 2.0]], np.float32)
    _, stored = store(op.Data((rows(2), maps)), tmp_path)
    assert len(stored.truths) == 2


def test_the_loaders_own_exception_is_the_cause() -> None:
    with pytest.raises(op.BadInputError) as error:
        op.Data(yield_then_raise())
    assert isinstance(error.value.__cause__, RuntimeError)
    assert error.value.__cause__.__traceback__.tb_next is not None


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ([rows(2), rows(2, width=4)], "item 1"),
        ([np.zeros((2, 3))], "float64"),
        ([(rows(2), rows(2), rows(2))], "3 columns"),
        ([{"y": rows(2)}], "unknown column 'y'"),
        ([{"labels": np.arange(2)}], "lacks the input 'x'"),
    ],
)
def test_what_the_model_does_not_take_is_refused_by_item(source, said, tmp_path) -> None:
    with pytest.raises(op.BadInputError, match=said):
        store(op.Data(source), tmp_path)
    assert not list((tmp_path / "store").glob("data-*"))


def test_a_path_that_has_changed_is_refused(tmp_path) -> None:
    np.savez(tmp_path / "given.npz", x=rows())
    data = op.Data(tmp_path / "given.npz")
    assert store(data, tmp_path)[0] == tmp_path / "given.npz"
    np.savez(tmp_path / "given.npz", x=rows(seed=1))
    with pytest.raises(op.BadInputError, match="has changed"):
        store(data, tmp_path)
