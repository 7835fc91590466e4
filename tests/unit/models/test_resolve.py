"""What a model card says of weights."""

from pathlib import Path

import pytest
from tests.fakes.graphs import onnx_model

from optpipe.core.card import card_from_file
from optpipe.core.entries import WeightsRequest, weights_from_text
from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.models.artifacts.lookup import find_stored_source
from optpipe.models.export.exported import export_model
from optpipe.models.export.model import Model
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


@pytest.mark.parametrize("said", ["", 'weights = "default"', 'weights = "random"'])
def test_default_and_random_are_no_files(tmp_path, said):
    found = source(tmp_path, said).load(weights_from_text("default", 0)).weights
    assert (found.source, found.seed) == ("random", 0)  # a factory that loads nothing has random ones either way


def test_random_weights_and_other_data_make_another_model(tmp_path):
    cards = "", 'weights = "random"', "data = {train = 'a'}", "data = {train = 'b'}"
    keys = [source(tmp_path, each).collect_identity() for each in cards]
    assert all(keys.count(each) == 1 for each in keys)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('weigths = "net.pt"', "no field 'weigths': did you mean weights?"),
        ("labels = 'ab'", "'labels' must be a list"),
        ("weights = 3", "'weights' must be a string"),
        ("head = {minimum_score = 1979-05-27}", "values of a model card are texts"),
        ("data = {validation = 3}", "validation must be the path"),
        ("preprocessing = {steps = [{step = 'resise'}]}", "invalid value 'resise'"),
        pytest.param(
            "labels = ['a', 'b', 'c']", "3 labels, but its first output has 2 classes", marks=pytest.mark.slow
        ),
        pytest.param(
            "outputs = [{name = 'a'}, {name = 'b'}]", "lists outputs a, b, but it has 1", marks=pytest.mark.slow
        ),
    ],
)
def test_what_is_wrong_in_a_card_is_said(tmp_path, line, said):
    found = source(tmp_path, line)
    text = (tmp_path / "card.toml").read_text().replace("other", "classification")
    (tmp_path / "card.toml").write_text(text)
    with pytest.raises(BadInputError, match=said):
        export_model(Model(found, WeightsRequest()), Store(tmp_path / ".optpipe"), SilentListener())


def test_a_card_anywhere_is_found_again_by_its_name(tmp_path, monkeypatch):
    onnx_model([("Relu", "x", "y")], {"x": ["n", 3]}, {"y": ["n", 3]}, path=tmp_path / "cards" / "relu.onnx")
    path = tmp_path / "cards" / "two.toml"
    path.write_text('name = "two axes"\ntask = "other"\nsource = "relu.onnx"\n')
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / ".optpipe")
    export_model(Model(CardSource(Path("cards/two.toml")), WeightsRequest()), store, SilentListener())
    monkeypatch.chdir(tmp_path / "cards")
    assert find_stored_source("two axes", store) == str(path)
    path.unlink()
    assert find_stored_source("two axes", store) is None


@pytest.mark.slow
def test_outputs_have_the_names_that_the_card_gives(tmp_path):
    found = source(tmp_path, "outputs = [{name = 'scores'}]")
    entry, _ = export_model(Model(found, WeightsRequest()), Store(tmp_path / ".optpipe"), SilentListener())
    assert [each.name for each in card_from_file(entry.file(CARD_FILE)).outputs] == ["scores"]


def test_preprocessing_that_does_not_make_the_input_is_refused(tmp_path):
    steps = "preprocessing = {steps = [{step = 'decode'}, {step = 'rescale', divisor = 255.0}, {step = 'pack'}]}"
    text = CARD.replace("WEIGHTS", steps) + "\n[[inputs]]\nname = 'y'\nmin = [1]\nopt = [1]\nmax = [1]\n"
    (tmp_path / "card.toml").write_text(text)
    with pytest.raises(BadInputError, match="produces one input, but the model takes x, y"):
        assert CardSource(tmp_path / "card.toml").card
