"""What a model card says of weights."""

import pytest

from optpipe.core.weights import weights_from_text
from optpipe.sources.card_file import CardSource

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


def test_random_weights_make_another_model(tmp_path):
    assert source(tmp_path, "").identity() != source(tmp_path, 'weights = "random"').identity()
