"""Which pictures are taken, what they are labelled, and what a model gives for them."""

import io
import json
import random
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
from PIL import Image
from tests.fakes.graphs import onnx_model
from tests.fakes.mutations import mutate_bytes

from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.core.files import hash_file
from optpipe.core.transform import Decode
from optpipe.models.inputs.image_set import ImageSet
from optpipe.models.inputs.images import decode_image
from optpipe.models.inputs.sample_set import SetFile
from optpipe.models.inputs.synthetic import make_synthetic_image
from optpipe.preprocess.preprocess import choose_images, open_model_function


@dataclass
class Warned(SilentListener):
    texts: list[str] = field(default_factory=list)

    def warn(self, text):
        self.texts.append(text)


def chosen(folder, listed):
    """The labels that are taken for the pictures of `folder`, of which a manifest lists some; and the warnings."""
    for name in ("cat/1.png", "cat/2.png", "dog/1.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        Image.fromarray(make_synthetic_image(20, 20, 1)).save(folder / name)
    manifest = folder / "manifest.json"
    files = tuple(SetFile(name, hash_file(folder / name), label) for name, label in listed.items())
    manifest.write_text(json.dumps(ImageSet("pictures", folder, 0, files).to_dict(folder)))
    card = ModelCard("m", "s", Task.CLASSIFICATION, (), labels=("cat", "dog"), data={"validation": str(manifest)})
    listener = Warned()
    _, labels = choose_images(card, None, 1000, None, listener)
    return labels, listener.texts


@pytest.mark.parametrize(
    ("listed", "labels", "warned"),
    [
        # the manifest before the folders, and the folder's name for what it does not list
        ({"cat/1.png": "dog", "cat/2.png": "cat", "dog/1.png": "dog"}, [1, 0, 1], ""),
        ({"cat/1.png": "cat", "dog/1.png": "dog"}, [0, 0, 1], ""),
        ({"cat/1.png": "cat", "cat/2.png": "cat", "dog/1.png": "wolf"}, None, "not labels: wolf"),
    ],
)
def test_where_the_labels_come_from(tmp_path, listed, labels, warned):
    """Without a label for each there is no accuracy."""
    found, texts = chosen(tmp_path, listed)
    assert found == labels
    assert len(texts) == bool(warned)
    assert warned in "".join(texts)


def test_boxes_of_one_image_at_a_time_get_as_many_rows(tmp_path):
    nodes = [("Flatten", "x", "values"), ("NonZero", "values", "places"), ("Transpose", "places", "boxes")]
    onnx_model(nodes, {"x": [1, 3, 2, 2]}, {"boxes": ("INT64", ["k", 2])}, path=tmp_path / "net.onnx")
    card = ModelCard("m", "s", Task.DETECTION, (InputSpec("x", "float32", *((1, 3, 2, 2),) * 3),))
    images = np.zeros((3, 3, 2, 2), np.float32)
    images[0, 0], images[2, 0, 0] = 1, 1
    with open_model_function(tmp_path / "net.onnx", card, every=True, boxes=True) as infer:
        found = infer(images)["boxes"]
    assert found[:, :, 1].tolist() == [[0, 1, 2, 3], [0, 0, 0, 0], [0, 1, 0, 0]]


def test_a_damaged_png_is_that_files_fault():
    """200 files with changed bytes: each is decoded or refused, with no other error."""
    whole = io.BytesIO()
    Image.fromarray(make_synthetic_image(40, 30)).save(whole, "PNG")
    for seed in range(200):
        with suppress(BadInputError):
            decode_image(mutate_bytes(whole.getvalue(), random.Random(seed)), Decode())
