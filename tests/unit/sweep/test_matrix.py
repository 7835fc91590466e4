"""The matrix: each cell once, whatever the order of the lists; what cannot be meant is refused before anything runs."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.entries import put
from tests.fakes.graphs import onnx_model

from optpipe.core.entries import ModelInfo, WeightsRecord
from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.core.load import Scenario
from optpipe.sweep.job import CPU, Matrix
from optpipe.sweep.matrix import (
    add_contents,
    cells_from_matrix,
    find_obstacle,
    matrix_from_file,
    resolve_models,
)
from optpipe.sweep.plan import select_shard, shard_from_text
from optpipe.workspace.store import Store

ORT: dict[str, Any] = {"models": ("digits",), "backends": ("onnxruntime",)}


@given(
    st.permutations(["fp32", "fp16", "int8"]),
    st.permutations([1, 8, 32]),
    st.permutations(["a.onnx", "b.onnx"]),
)
def test_cells_are_those_of_the_matrix_in_any_order(precisions, batches, models):
    def list_keys(models, precisions, batches):
        matrix = Matrix(
            models=models, precisions=precisions, backends=("onnxruntime",), batches=batches
        )
        return [cell.key for cell in cells_from_matrix(matrix, (CPU,))]

    keys = list_keys(tuple(models), tuple(precisions), tuple(batches))
    assert len(keys) == 18
    assert set(keys) == set(list_keys(("a.onnx", "b.onnx"), ("fp32", "fp16", "int8"), (1, 8, 32)))


def test_a_cell_named_twice_is_one_and_options_of_another_backend_make_none():
    matrix = Matrix(
        models=("digits", "digits"),
        precisions=("fp32",),
        backends=("onnxruntime",),
        batches=(1, 1),
        options=((), ("inductor.max_autotune=true",), ("onnxruntime.threads=1",)),
    )
    cells = cells_from_matrix(matrix, (CPU, CPU))
    assert [cell.options for cell in cells] == [(), ("onnxruntime.threads=1",)]


def test_every_rate_is_a_cell_of_the_server_scenario_alone():
    scenarios = (Scenario.SERVER, Scenario.OFFLINE)
    matrix = Matrix(**ORT, precisions=("fp32",), scenarios=scenarios, rates=(10, 20), streams=2)
    loads = [cell.load for cell in cells_from_matrix(matrix, (CPU,))]
    assert [(load.scenario, load.rate_per_s, load.streams) for load in loads] == [
        ("server", 10, 1),
        ("server", 20, 1),
        ("offline", None, 2),
    ]


def test_a_cell_counts_by_the_content_of_its_model_and_data_not_by_their_names(tmp_path):
    card = b'name = "m"\ntask = "other"\nsource = "net.onnx"\n[data]\ncalibration = "own"\n'
    nets = [
        onnx_model([("Add", "x w", "y")], {"x": [1]}, {"y": [1]}, w=[value]).SerializeToString()
        for value in (1.0, 2.0)
    ]

    def key(folder, changes=(), precision="int8", model="card.toml", **given):
        made = {
            "net.onnx": nets[0],
            "card.toml": card,
            "own/a.npz": b"1",
            "given/a.npz": b"9",
        } | dict(changes)
        for name, content in made.items():
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_bytes(content)
        named: Any = {name: str(tmp_path / folder / value) for name, value in given.items()}
        source = str(tmp_path / folder / model)
        matrix = Matrix(
            models=(source,), precisions=(precision,), backends=("onnxruntime",), **named
        )
        (cell,) = add_contents(cells_from_matrix(matrix, (CPU,)), SilentListener())
        return cell.key

    assert key("a") == key("a")
    assert key("b", model="net.onnx", calibration="given") == key(
        "c", model="net.onnx", calibration="given"
    )
    assert key("a", calibration="given") != key("a")
    changes = (
        {"net.onnx": nets[1]},
        {"card.toml": card.replace(b"other", b"embedding")},
        {"own/a.npz": b"2"},
    )
    keys = [key("a", each) for each in ({}, *changes)]
    assert len(set(keys)) == 4
    assert key("a", changes[2], "fp32") == key("a", precision="fp32"), "nothing is calibrated"
    assert key("a", {"given/a.npz": b"2"}, calibration="given") != key("a", calibration="given")
    assert key("a", {"net.onnx": b""}) not in keys, "what cannot be read"


def test_a_stored_model_is_swept_by_its_file(tmp_path, monkeypatch):
    store = Store(tmp_path / ".optpipe")
    path = tmp_path / "light_one.onnx"
    path.touch()
    info = ModelInfo(
        "light_one", str(path), WeightsRecord("embedded", ""), simplified=True, own_precision=None
    )
    put(store, info, {})
    monkeypatch.chdir(store.workspace)
    assert resolve_models(Matrix(models=("light_one", "digits")), store, local=True).models == (
        str(path),
        "digits",
    )
    assert resolve_models(Matrix(models=("theirs.onnx",)), store, local=False).models == (
        "theirs.onnx",
    )
    with pytest.raises(BadInputError, match="no such file"):
        resolve_models(Matrix(models=("theirs.onnx",)), store, local=True)


def test_what_no_machine_can_do_is_known_before_it_runs():
    cell = cells_from_matrix(Matrix(**ORT), (CPU,))[0]
    assert find_obstacle(cell) == "onnxruntime has no fp16 kernels on cpu, only fp32, int8"
    assert find_obstacle(cells_from_matrix(Matrix(**ORT), ("NVIDIA H200",))[0]) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"models": ()}, "no model to sweep"),
        ({"batches": (0,)}, "must be at least 1"),
        ({"batches": ()}, "empty list of batches"),
        ({"scenarios": (Scenario.SERVER,)}, "requires rates"),
        ({"options": (("threads=1",),)}, "expected BACKEND.KEY=VALUE"),
        ({"precisions": ("fp7",)}, "fp7"),
        ({"backends": ("nope",)}, "--backend nope: choose from auto"),
        ({"profile": "8:1"}, "--profile 8:1: expected one size"),
        ({"percentile": 100.0}, "percentile 100: expected a number"),
        ({"min_seconds": 0.0}, "times must be positive"),
        ({"max_seconds": float("inf")}, "times must be positive and finite"),
        ({"max_cv": 0.0}, "max_cv 0: must be positive"),
        ({"weights": "nope.pt"}, "--weights nope.pt: no such file"),
        ({"calibration": "nope"}, "--calibration nope: no such file"),
        ({"batches": tuple(range(1, 200_000))}, "the limit is 100,000"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes, said):
    with pytest.raises(BadInputError, match=said):
        cells_from_matrix(Matrix(**{**ORT, "precisions": ("fp32",), **changes}), (CPU,))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('models = ["digits"]\nbatch = [1]', "batch"),
        ('models = "digits"', "models"),
        ('models = ["digits"]\nscenarios = ["fast"]', "scenarios"),
        ("models = [", "cannot be read as a sweep matrix"),
        ("\x00", "cannot be read as a sweep matrix"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path, text, said):
    path = tmp_path / "matrix.toml"
    path.write_text(text)
    with pytest.raises(BadInputError, match=said) as error:
        matrix_from_file(path)
    assert str(path) in str(error.value)


@given(st.integers(1, 40), st.integers(1, 12))
def test_shards_are_a_partition(count, parts):
    cells: Any = tuple(range(count))
    found = [each for part in range(1, parts + 1) for each in select_shard(cells, (part, parts))]
    assert tuple(found) == cells


@pytest.mark.parametrize("text", ["0/2", "3/2", "a/b", "1", "1/0", "-1/2"])
def test_a_shard_is_one_of_n(text):
    with pytest.raises(BadInputError, match="expected I/N"):
        shard_from_text(text)
