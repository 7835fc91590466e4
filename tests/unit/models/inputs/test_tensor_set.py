"""Tensors as data: every form that people have them in, and what does not fit the model."""

import base64
import errno
import json
from typing import Any

import numpy as np
import pytest
from polygraphy.json import save_json
from tests.fakes.small_disk import fill_disk, mount_small_disk

from optpipe.core.card import InputSpec, ModelCard, Task, TensorSpec
from optpipe.core.errors import BadInputError
from optpipe.models.inputs.rows import rows_from_outputs, split_batches
from optpipe.models.inputs.samples import choose_samples, load_sample_inputs, save_pool
from optpipe.models.inputs.tensor_files import holds_tensors
from optpipe.models.inputs.tensor_set import read_tensor_set

X = InputSpec("x", "float32", (1, 3), (2, 3), (8, 3))
STATE = InputSpec("state", "float32", (2, 1, 5), (2, 2, 5), (2, 8, 5), batch=1)
RATE = InputSpec("rate", "int64", (), (), ())
VALUES: dict[str, Any] = {
    "x": np.arange(18, dtype=np.float32).reshape(6, 3),
    "state": np.zeros((2, 6, 5), np.float32),
    "rate": np.array(16000),
}


def npz(folder):
    np.savez(folder / "data.npz", **VALUES)
    return folder / "data.npz"


def npz_by_sample(folder):
    for index in range(6):
        one = {
            "x": VALUES["x"][index : index + 1],
            "state": VALUES["state"][:, index : index + 1],
            "rate": VALUES["rate"],
        }
        np.savez(folder / f"{index}.npz", **one)
    return folder


def npy_by_input(folder):
    for name, values in VALUES.items():
        np.save(folder / f"{name}.npy", values)
    return folder


def list_calls():
    return [
        {
            "x": VALUES["x"][start : start + 3],
            "state": VALUES["state"][:, start : start + 3],
            "rate": VALUES["rate"],
        }
        for start in (0, 3)
    ]


def polygraphy_inputs(folder):
    save_json(list_calls(), str(folder / "inputs.json"))
    return folder / "inputs.json"


def polygraphy_inputs_by_call(folder):
    for number, call in enumerate(list_calls()):
        save_json(call, str(folder / f"{number:010}.json"))
    return folder


@pytest.mark.parametrize(
    "form", [npz, npz_by_sample, npy_by_input, polygraphy_inputs, polygraphy_inputs_by_call]
)
def test_every_form_is_the_same_samples(tmp_path, form) -> None:
    source = form(tmp_path)
    found = read_tensor_set(source, (X, STATE, RATE))
    assert holds_tensors(source)
    rows = [{name: value.copy() for name, value in each.items()} for each in found.batches(4)]
    assert np.array_equal(np.concatenate([each["x"] for each in rows]), VALUES["x"])
    assert {each["state"].shape[1:] for each in rows} == {(2, 5)}
    assert {int(value) for each in rows for value in each["rate"]} == {16000}
    assert len(read_tensor_set(source, (X, STATE, RATE), 3).files) == 3


@pytest.mark.parametrize(("changed", "said"), [
    ({"x": None}, "lacks input 'x'; the model takes x, state, rate"),
    ({"y": np.zeros(3)}, "has the unknown array 'y'"),
    ({"x": VALUES["x"].astype(np.float64)}, r"'x' is float64, and the model takes float32; save it as .astype\('float32'\)"),
    ({"x": VALUES["x"][:, :2].copy()}, "'x' is 6x2, and the model takes 1x3:2x3:8x3"),
    ({"x": VALUES["x"][:5].copy()}, "different numbers of samples: x 5, state 6"),
    ({"rate": np.array([16000])}, "different numbers of samples: x 6, state 6, rate 1"),
    ({"rate": np.zeros((6, 1), np.int64)}, "'rate' is 6x1, and the model takes a single value, or that after an axis"),
    ({"x": VALUES["x"][:0].copy(), "state": VALUES["state"][:, :0].copy()}, "'x' is 0x3"),
    ({"labels": np.zeros(5, np.int64)}, "one integer for each of the 6 samples"),
])  # fmt: skip
def test_what_does_not_fit_is_said_by_name(tmp_path, changed, said) -> None:
    values = {name: value for name, value in {**VALUES, **changed}.items() if value is not None}
    np.savez(tmp_path / "data.npz", **values)
    with pytest.raises(BadInputError, match=said):
        read_tensor_set(tmp_path / "data.npz", (X, STATE, RATE))


def test_integers_beyond_the_table_that_they_pick_from_are_refused(tmp_path) -> None:
    ids = InputSpec("ids", "int64", (1, 3), (2, 3), (8, 3), below=50)
    for value in (49, 50, -50, -51):
        np.savez(tmp_path / f"{value}.npz", ids=np.array([[0, 1, value]]))
    assert all(
        len(read_tensor_set(tmp_path / f"{value}.npz", (ids,)).files) == 1 for value in (49, -50)
    )
    for value in (50, -51):
        with pytest.raises(
            BadInputError,
            match=f"'ids' contains {value}, and the model looks it up in a table of 50",
        ):
            read_tensor_set(tmp_path / f"{value}.npz", (ids,))


def test_what_has_no_batch_axis_may_differ_from_sample_to_sample(tmp_path) -> None:
    rates = np.array([8000, 8000, 16000, 16000, 16000, 8000])
    np.savez(tmp_path / "data.npz", **{**VALUES, "rate": rates})
    found = read_tensor_set(tmp_path / "data.npz", (X, STATE, RATE))
    batches = [{*map(int, each["rate"])} for each in found.batches(4)]
    assert batches == [{8000}, {16000}, {8000}]  # what shares a batch shares its rate
    card = ModelCard("net", "net.onnx", Task.OTHER, (X, STATE, RATE))
    rows = load_sample_inputs(card, choose_samples(card, tmp_path / "data.npz"))
    taken = [(int(batch["rate"]), count) for batch, count in split_batches(card, rows)]
    assert taken == [(8000, 2), (16000, 3), (8000, 1)]


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04 not a zip", b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'shape': (1,)}"],
)
def test_files_that_are_none(tmp_path, content) -> None:
    (tmp_path / "data.npz").write_bytes(content)
    with pytest.raises(BadInputError, match="cannot be read as tensors"):
        read_tensor_set(tmp_path / "data.npz", (X,))


def test_pickles_are_not_loaded(tmp_path) -> None:
    np.savez(tmp_path / "x.npz", x=np.array([{"a": 1}], dtype=object))
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object))
    with (tmp_path / "third.npy").open("wb") as file:  # the header of a newer format
        np.lib.format.write_array(file, np.array([{"a": 1}], dtype=object), version=(3, 0))
    for name in ("x.npz", "x.npy", "third.npy"):
        with pytest.raises(BadInputError, match="holds Python objects") as refused:
            read_tensor_set(tmp_path / name, (X,))
        assert "allow_pickle" not in str(refused.value)
        assert "store numbers" in str(refused.value)


def test_an_array_that_polygraphy_cannot_read_gives_no_advice_to_unpickle(tmp_path) -> None:
    texts = (b"", b"\x80\x04.", b"abc", b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'shape': (1,)}")
    for content in texts:
        encoded = base64.b64encode(content).decode()
        record = [{"x": {"array": encoded, "polygraphy_class": "ndarray"}}]
        (tmp_path / "x.json").write_text(json.dumps(record))
        with pytest.raises(BadInputError) as refused:
            read_tensor_set(tmp_path / "x.json", (X,))
        assert "pickle" not in str(refused.value)
        assert len(str(refused.value).splitlines()) <= 2


def test_labels_lie_beside_the_inputs(tmp_path) -> None:
    np.savez(tmp_path / "data.npz", **VALUES, labels=np.array([0, 1, 2, 0, 1, 2]))
    found = read_tensor_set(tmp_path / "data.npz", (X, STATE, RATE))
    assert [each.label for each in found.files] == list("012012")


def test_an_archive_of_hardly_anything_but_zeros_is_refused(tmp_path, monkeypatch) -> None:
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros((1000, 1000), np.float32))
    monkeypatch.setattr("optpipe.models.inputs.tensor_files.TRUSTED_BYTES", 1_000_000)
    with pytest.raises(BadInputError, match=r"has .* KiB and unpacks to 3.81 MiB"):
        read_tensor_set(tmp_path / "bomb.npz", (X,))
    monkeypatch.undo()
    assert (
        len(
            read_tensor_set(
                tmp_path / "bomb.npz", (InputSpec("x", "float32", *[(1, 1000)] * 3),)
            ).files
        )
        == 1000
    )


def test_an_archive_that_would_fill_the_memory_is_refused_before_it_is_read(
    tmp_path, monkeypatch
) -> None:
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros((1000, 1000), np.float32))
    monkeypatch.setattr("optpipe.models.inputs.tensor_files.get_memory_bytes", lambda: 7_000_000)
    with pytest.raises(
        BadInputError, match=r"unpacks to 3.81 MiB, more than half of this machine's memory"
    ):
        read_tensor_set(tmp_path / "bomb.npz", (X,))


def test_an_array_with_holes_counts_whole(tmp_path, monkeypatch) -> None:
    values = np.lib.format.open_memmap(
        tmp_path / "holes.npy", mode="w+", dtype=np.float32, shape=(1000, 1000)
    )
    del values
    monkeypatch.setattr("optpipe.models.inputs.tensor_files.get_memory_bytes", lambda: 7_000_000)
    with pytest.raises(BadInputError, match="more than half of this machine's memory"):
        read_tensor_set(tmp_path / "holes.npy", (X,))


def test_an_output_without_its_axis_is_one_sample_and_no_more() -> None:
    spec = TensorSpec("y", "float32", ("batch",))
    assert rows_from_outputs([spec], {"y": np.array(3.0)}, 1)["y"].shape == (1,)
    with pytest.raises(
        BadInputError,
        match="'y' is a single value for a whole batch: leave it out, or give --batch 1",
    ):
        rows_from_outputs([spec], {"y": np.array(3.0)}, 2)


def test_a_full_disk_is_said_with_its_error_number(tmp_path):
    with mount_small_disk(tmp_path / "disk") as disk:
        fill_disk(disk, leave_bytes=40960)
        with pytest.raises(OSError, match="No space left") as refused:
            save_pool(disk / "pool", "input", {"x": np.zeros(1 << 20, np.uint8)})
    assert refused.value.errno == errno.ENOSPC


def test_an_array_alone_is_that_of_the_only_input(tmp_path) -> None:
    np.save(tmp_path / "all.npy", VALUES["x"])
    assert len(read_tensor_set(tmp_path / "all.npy", (X,)).files) == 6
    with pytest.raises(BadInputError, match=r"3 inputs; give a folder with x.npy, state.npy, rate"):
        read_tensor_set(tmp_path / "all.npy", (X, STATE, RATE))


def test_truths_may_be_an_array_beside_those_of_the_inputs(tmp_path) -> None:
    npy_by_input(tmp_path)
    np.save(tmp_path / "labels.npy", np.array([0, 1, 2, 0, 1, 2]))
    labels = [each.label for each in read_tensor_set(tmp_path, (X, STATE, RATE)).files]
    assert labels == ["0", "1", "2", "0", "1", "2"]


def test_other_files_make_no_tensors_of_a_folder(tmp_path) -> None:
    np.save(tmp_path / "embedding.npy", np.zeros(3))
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "annotations.json").write_text('{"images": []}')
    assert not holds_tensors(tmp_path)


def write_damaged_npy(folder):
    np.save(folder / "x.npy", VALUES["x"])
    (folder / "x.npy").write_bytes((folder / "x.npy").read_bytes()[:-4])
    return folder / "x.npy"


def write_large_header(folder):
    with (folder / "x.npy").open("wb") as file:
        described = {"descr": "<f4", "fortran_order": False, "shape": (1 << 38, 3)}
        np.lib.format.write_array_header_1_0(file, described)
    return folder / "x.npy"


def write_objects(folder):
    np.save(folder / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return folder / "x.npy"


def write_text(content):
    def write(folder):
        (folder / "x.json").write_text(content)
        return folder / "x.json"

    return write


@pytest.mark.parametrize(
    "write",
    [
        write_damaged_npy,
        write_large_header,
        write_objects,
        write_text('[{"x": {"array": "k05VTQ==", "polygraphy_class": "ndarray"}}]'),
        write_text('[{"x": {"array": "", "polygraphy_class": "ndar'),
        write_text('[{"x": {"array": "", "polygraphy_class": "Nothing"}}]'),
        write_text('[1, 2, "polygraphy_class"]'),
        write_text('"polygraphy_class"'),
        write_text("[" * 100_000 + '"polygraphy_class"'),
    ],
)
def test_damaged_files_are_one_message_that_names_them(tmp_path, write, capfd) -> None:
    source = write(tmp_path)
    with pytest.raises(BadInputError) as refused:
        read_tensor_set(source, (X,))
    assert str(source) in str(refused.value)
    assert len(str(refused.value).splitlines()) <= 2
    assert capfd.readouterr() == ("", "")
