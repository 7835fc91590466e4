"""What a model card says of weights, and whose weights a model has: random ones, or those that a factory sets or draws."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.fakes.graphs import onnx_model

from optpipe.core.card import card_from_file
from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.models.artifacts.model_names import find_stored_source
from optpipe.models.export.exported import Model, export_model
from optpipe.models.sources.modules import (
    draw_neutral_layers,
    hash_module_weights,
    hash_tensors,
    make_with_factory_weights,
    make_with_weights,
    remake_module,
    state_dict_from_file,
)
from optpipe.models.sources.resolve import CardSource
from optpipe.workspace.file_names import CARD as CARD_FILE
from optpipe.workspace.store import Store

CARD = """
name = "flat"
source = "net.py:make"
task = "other"
WEIGHTS
[[inputs]]
name = "x"
dtype = "float32"
min = [1, 3]
opt = [2, 3]
max = [4, 3]
"""


def source(folder, weights):
    (folder / "net.py").write_text("import torch\nmake = lambda: torch.nn.Linear(3, 2)\n")
    (folder / "card.toml").write_text(CARD.replace("WEIGHTS", weights))
    return CardSource(folder / "card.toml")


def test_random_weights_and_other_data_make_another_model(tmp_path):
    cards = "", 'weights = "random"', "data = {train = 'a'}", "data = {train = 'b'}"
    keys = [source(tmp_path, each).collect_identity() for each in cards]
    assert all(keys.count(each) == 1 for each in keys)


@pytest.mark.parametrize(("line", "said"), [
    ('weigths = "net.pt"', "no field 'weigths': did you mean weights?"),
    ("labels = 'ab'", "'labels' must be a list"),
    ("weights = 3", "'weights' must be a string"),
    ("labels = ['a', 2]", r"labels\[1\] is 2, not a string"),
    ("labels = [true, 'b']", r"labels\[0\] is true, not a string"),
    ("labels = [['a'], 'b']", r"labels\[0\] is ..a.., not a string"),
    ("outputs = [{name = 1}]", r"outputs\[0\].name is 1, not a string"),
    ("outputs = ['a']", r"outputs\[0\] must be a table"),
    ("pad_id = true", "'pad_id' must be an integer"),
    ("head = {minimum_score = 1979-05-27}", "values of a model card are strings"),
    ("data = {validation = 3}", "validation must be the path"),
    ("data = {validations = 'a'}", "has no 'validations'; it has train, calibration, validation"),
    ("preprocessing = {steps = [{step = 'resise'}]}", "invalid value 'resise'"),
    pytest.param("labels = ['a', 'b', 'c']", "3 labels, but its first output has 2 classes", marks=pytest.mark.slow),
    pytest.param("outputs = [{name = 'a'}, {name = 'b'}]", "lists outputs a, b, but it has 1", marks=pytest.mark.slow),
])  # fmt: skip
def test_what_is_wrong_in_a_card_is_said(tmp_path, line, said):
    found = source(tmp_path, line)
    text = (tmp_path / "card.toml").read_text().replace("other", "classification")
    (tmp_path / "card.toml").write_text(text)
    with pytest.raises(BadInputError, match=said):
        export_model(Model(found, WeightsRequest()), Store(tmp_path / ".optpipe"), SilentListener())


def test_a_card_anywhere_is_found_again_by_its_name(tmp_path, monkeypatch):
    onnx_model(
        [("Relu", "x", "y")],
        {"x": ["n", 3]},
        {"y": ["n", 3]},
        path=tmp_path / "cards" / "relu.onnx",
    )
    path = tmp_path / "cards" / "two.toml"
    path.write_text('name = "two axes"\ntask = "other"\nsource = "relu.onnx"\n')
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / ".optpipe")
    export_model(
        Model(CardSource(Path("cards/two.toml")), WeightsRequest()), store, SilentListener()
    )
    monkeypatch.chdir(tmp_path / "cards")
    assert find_stored_source("two axes", store) == str(path)
    path.unlink()
    assert find_stored_source("two axes", store) is None


@pytest.mark.slow
def test_outputs_have_the_names_that_the_card_gives(tmp_path):
    found = source(tmp_path, "outputs = [{name = 'scores'}]")
    entry, _ = export_model(
        Model(found, WeightsRequest()), Store(tmp_path / ".optpipe"), SilentListener()
    )
    assert [each.name for each in card_from_file(entry.file(CARD_FILE)).outputs] == ["scores"]


def test_preprocessing_that_does_not_make_the_input_is_refused(tmp_path):
    steps = "preprocessing = {steps = [{step = 'decode'}, {step = 'rescale', divisor = 255.0}, {step = 'pack'}]}"
    text = (
        CARD.replace("WEIGHTS", steps)
        + "\n[[inputs]]\nname = 'y'\nmin = [1]\nopt = [1]\nmax = [1]\n"
    )
    (tmp_path / "card.toml").write_text(text)
    with pytest.raises(BadInputError, match="produces one input, but the model takes x, y"):
        assert CardSource(tmp_path / "card.toml").card


DEFAULT, RANDOM = WeightsRequest(), WeightsRequest("random", 3)


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2)
    )


def trained() -> torch.nn.Module:
    """Statistics as training leaves them."""
    module = network()
    with torch.no_grad():
        for value, tensor in enumerate([*module.parameters(), *module.buffers()]):
            tensor.fill_(value)
    return module


def test_weights_that_a_factory_sets_are_left_alone() -> None:
    module, record = make_with_factory_weights(trained, DEFAULT, "net.py:make")
    assert record.source == "default:net.py:make"
    assert record.trained
    assert record.sha256 == hash_module_weights(module) == hash_module_weights(trained())
    assert not module.training


def test_random_ones_are_found_out_and_the_same_each_time() -> None:
    module, record = make_with_factory_weights(network, DEFAULT, "net.py:make")
    assert (record.source, record.seed) == ("random", 0)
    assert record.drawn == "4 of 9 tensors, first 0.bias"
    assert (
        hash_module_weights(remake_module(network, DEFAULT, record, "net.py:make")) == record.sha256
    )
    assert float(module[1].running_mean.abs().max()) > 0
    assert make_with_weights(network, WeightsRequest("random", 0))[1].sha256 == record.sha256


def test_trained_normalization_below_a_fresh_head_is_kept() -> None:
    backbone = trained()
    statistics = hash_tensors(backbone[1])
    module, record = make_with_factory_weights(
        lambda: torch.nn.Sequential(backbone[1], torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)),
        DEFAULT,
        "net.py:make",
    )
    assert not record.trained
    assert hash_tensors(module[0]) == statistics
    assert float(module[1].running_mean.abs().max()) > 0


@pytest.mark.parametrize(
    "changed",
    [
        {"weight": 0.5},
        {"bias": 0.1},
        {"running_mean": 1.0},
        {"running_var": 2.0},
        {"weight": 0.0},
        {},
    ],
)
def test_only_fresh_normalization_is_drawn(changed: dict[str, float]) -> None:
    norm = torch.nn.BatchNorm2d(4)
    for name, value in changed.items():
        getattr(norm, name).data[-1 if value else slice(None)] = value
    before = hash_tensors(norm)
    drawn = hash_tensors(draw_neutral_layers(norm)) != before
    assert drawn == (
        changed in ({}, {"weight": 0.0})
    )  # a residual branch that begins closed is fresh too


def test_a_layer_of_zeros_is_drawn_and_any_other_is_left() -> None:
    closed, learned = torch.nn.Linear(4, 3), torch.nn.Conv1d(4, 3, 1)
    torch.nn.init.zeros_(closed.weight)
    before = learned.weight.clone()
    draw_neutral_layers(torch.nn.ModuleList([closed, learned]))
    assert closed.weight.any()
    assert torch.equal(learned.weight, before)


def test_random_weights_of_a_factory_that_has_none_are_refused() -> None:
    with pytest.raises(
        BadInputError, match=r"no weight of net.py:make depends on the seed.*\n.*--weights default"
    ):
        make_with_factory_weights(trained, RANDOM, "net.py:make")


def test_weights_that_no_seed_decides_are_refused() -> None:
    def make() -> torch.nn.Module:
        return torch.nn.ParameterList([torch.from_numpy(np.random.default_rng().normal(size=3))])

    with pytest.raises(BadInputError, match="different weights on every call"):
        make_with_factory_weights(make, DEFAULT, "net.py:make")


def test_numpys_and_pythons_generators_are_seeded_and_left_as_they_were() -> None:
    def make() -> torch.nn.Module:
        return torch.nn.ParameterList([torch.tensor([random.random(), np.random.rand()])])

    random.seed(5)
    np.random.seed(5)
    expected = (
        random.random(),
        np.random.rand(),
        float(torch.rand(1, generator=torch.manual_seed(5))),
    )
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    assert make_with_factory_weights(make, DEFAULT, "net.py:make")[1].source == "random"
    assert (random.random(), np.random.rand(), float(torch.rand(1))) == expected


@pytest.mark.parametrize("suffix", ["pt", "pth", "safetensors"])
@pytest.mark.parametrize(
    "content", [b"", b"elephants", b"\x80\x02garbage", b"PK\x03\x04" + b"x" * 99, b"\xff" * 64]
)
def test_what_is_no_weights_file_is_one_line(tmp_path, suffix, content) -> None:
    path = tmp_path / f"net.{suffix}"
    path.write_bytes(content)
    with pytest.raises(
        BadInputError, match=rf"net.{suffix} (cannot be read as weights|is not a state dict)"
    ):
        state_dict_from_file(path)
