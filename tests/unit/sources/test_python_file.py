"""What a Python file says of the model that its factory makes."""

import pytest

from optpipe.core.transform import CenterCrop, Resize
from optpipe.core.weights import weights_from_text
from optpipe.errors import BadInputError
from optpipe.sources.python_file import PythonFileSource
from optpipe.stages.preprocess.stage import image_transform

FILE = """
import torch
from torchvision.transforms import v2
INPUTS = [{"name": "x", "dtype": "float32", "min": [1, 3, 16, 16], "opt": [2, 3, 16, 16], "max": [4, 3, 16, 16]}]
TRANSFORM = v2.Compose([v2.Resize(20), STEP, v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])
make = lambda: torch.nn.Flatten()
"""


def card(folder, step):
    (folder / "net.py").write_text(FILE.replace("STEP", step))
    return PythonFileSource(folder / "net.py", "make").load(weights_from_text("default", 0)).card


def test_its_compose_is_the_preprocessing(tmp_path):
    transform = image_transform(card(tmp_path, "v2.CenterCrop(16)"))
    assert transform.geometry == (Resize((20,)), CenterCrop(16, 16))


def test_a_step_that_cannot_be_translated_is_named(tmp_path):
    with pytest.raises(BadInputError, match=r"step 2, Pad cannot be translated\n.*preprocessing\.steps"):
        card(tmp_path, "v2.Pad(2)")


def test_pictures_of_another_size_than_the_input_are_refused(tmp_path):
    with pytest.raises(BadInputError, match=r"makes float32 of 3×12×12 .CHW., its input x takes float32, 1x3x16x16"):
        image_transform(card(tmp_path, "v2.CenterCrop(12)"))


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("def make(): raise RuntimeError('boom')", "net.py:make raised RuntimeError: boom"),
        ("def make(): return 1", "net.py:make returned int, not a torch.nn.Module"),
        ("def make(size): return size", "net.py:make raised TypeError: .*size"),
    ],
)
def test_a_factory_that_gives_no_model_is_one_line(tmp_path, factory, said):
    (tmp_path / "net.py").write_text(f"INPUTS = [dict(name='x', min=[1], opt=[1], max=[1])]\n{factory}")
    with pytest.raises(BadInputError, match=said):
        PythonFileSource(tmp_path / "net.py", "make").load(weights_from_text("default", 0))
