"""`build --init` writes a card that can be built: what the model states, and the usual steps for its size."""

import json
import tomllib

import pytest
from PIL import Image

from optpipe.cli.app import app
from optpipe.core.card import Task
from optpipe.core.entries import WeightsRequest
from optpipe.models.sources.resolve import CardSource

NET = """
import torch
from torch import nn
INPUTS = [dict(name="image", min=[1, {channels}, 32, 24], opt=[4, {channels}, 32, 24], max=[8, {channels}, 32, 24])]
make = lambda: nn.Sequential(nn.Flatten(), nn.Linear({channels} * 32 * 24, 3))
"""
VECTOR = """
from torch import nn
INPUTS = [dict(name="x", min=[1, 8], opt=[4, 8], max=[8, 8])]
make = lambda: nn.Linear(8, 3)
"""


def init(folder, text, *more):
    """The exit status, and the card that was written."""
    (folder / "net.py").write_text(text)
    target = folder / "cards" / "net.toml"
    words = ["build", f"{folder / 'net.py'}:make", "--init", str(target), "--json", *map(str, more)]
    with pytest.raises(SystemExit) as ended:
        app([*words, "--workspace", str(folder / "work")])
    return ended.value.code, target


def draw_images(folder):
    for label in ("dog", "cat", "owl"):
        (folder / label).mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(folder / label / "a.png")
    return folder


@pytest.mark.parametrize("channels", [1, 3])
def test_a_card_for_images_has_the_folders_as_labels(tmp_path, capfd, channels):
    images = draw_images(tmp_path / "images")
    status, path = init(tmp_path, NET.format(channels=channels), "--images", images)
    assert status == 0
    assert json.loads(capfd.readouterr().out)["card"] == str(path)

    card = CardSource(path).load(WeightsRequest()).card
    assert card.task is Task.CLASSIFICATION
    assert card.labels == ("cat", "dog", "owl")
    assert card.transform.shape == (channels, 32, 24)
    assert "normalize" in path.read_text(), "what only the training knows is left to the user"


def test_a_card_for_other_inputs_has_no_steps(tmp_path):
    status, path = init(tmp_path, VECTOR)
    assert status == 0
    assert "preprocessing" not in tomllib.loads(path.read_text())
    card = CardSource(path).load(WeightsRequest()).card
    assert card.task is Task.OTHER
    assert [each.name for each in card.inputs] == ["x"]


OUTPUT = """
import torch
from torch import nn
INPUTS = [dict(name="image", min=[1, 3, {0}, {1}], opt=[2, 3, {0}, {1}], max=[2, 3, {0}, {1}])]
make = lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * {0} * {1}, {2} * {3}), nn.Unflatten(1, ({2}, {3})))
"""


@pytest.mark.parametrize(
    ("sizes", "layout", "steps"),
    [
        ((32, 32, 7, 21), "yolov8", ["decode", "resize", "center_crop", "rescale", "pack"]),
        ((32, 32, 63, 8), "yolov5", ["decode", "resize", "center_crop", "rescale", "pack"]),
        ((64, 32, 10, 6), "boxes6", ["decode", "resize", "rescale", "pack"]),
        ((32, 32, 5, 50), None, ["decode", "resize", "center_crop", "rescale", "pack"]),
    ],
    ids=["yolov8", "yolov5", "boxes6 beside a square", "features"],
)
def test_a_card_for_a_detector_has_its_head_and_the_whole_image(tmp_path, sizes, layout, steps):
    status, path = init(tmp_path, OUTPUT.format(*sizes))
    assert status == 0
    card = CardSource(path).load(WeightsRequest()).card
    assert card.head.get("layout") == layout
    assert (card.task is Task.DETECTION) == (layout is not None)
    written = tomllib.loads(path.read_text())["preprocessing"]["steps"]
    assert [each["step"] for each in written] == steps
    assert written[1]["fit"] == ("short" if layout is None else ("long", "exact")[len(steps) == 4])


TOKENS = """
from torch import nn
INPUTS = [dict(name="ids", dtype="int64", min=[1, 4], opt=[4, 8], max=[8, 8], below=50)]
encode = lambda text: [1, *map(len, text.split())]
make = lambda: nn.Sequential(nn.Embedding(50, 4), nn.Flatten(-2), nn.AdaptiveAvgPool1d(3))
"""


def test_a_card_for_tokens_says_how_texts_become_them(tmp_path):
    status, path = init(tmp_path, TOKENS)
    assert status == 0
    assert "tokenizer" not in tomllib.loads(path.read_text())
    text = path.read_text().replace('task = "other"', 'task = "text-classification"')
    text = text.replace('# tokenizer = "tokenizer.json"', 'tokenizer = "../net.py:encode"')
    path.write_text(text.replace("# pad_id", "pad_id"))
    assert CardSource(path).load(WeightsRequest()).card.tokenization.pad_id == 0


def test_images_for_a_model_without_an_image_are_refused(tmp_path, capfd):
    status, path = init(tmp_path, VECTOR, "--images", draw_images(tmp_path / "images"))
    assert status == 2
    assert "takes no images (x 1x8:4x8:8x8)" in capfd.readouterr().err
    assert not path.exists()


def test_a_card_that_is_there_is_not_overwritten(tmp_path, capfd):
    assert init(tmp_path, VECTOR)[0] == 0
    before = (tmp_path / "cards" / "net.toml").read_text()
    assert init(tmp_path, VECTOR)[0] == 2
    assert "already exists; choose another --init" in capfd.readouterr().err
    assert (tmp_path / "cards" / "net.toml").read_text() == before


def test_a_folder_of_images_without_a_card_names_the_way(tmp_path, capfd):
    (tmp_path / "net.py").write_text(NET.format(channels=3))
    words = [
        "build",
        f"{tmp_path / 'net.py'}:make",
        "--precision",
        "int8",
        "--backend",
        "onnxruntime",
    ]
    images = draw_images(tmp_path / "images")
    with pytest.raises(SystemExit) as ended:
        app([*words, "--calibration", str(images), "--workspace", str(tmp_path / "work")])
    assert ended.value.code == 2
    assert "--init CARD.toml" in capfd.readouterr().err
