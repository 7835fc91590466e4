"""Which pictures are taken, and what they are labelled."""

import json
from dataclasses import dataclass, field

from PIL import Image

from optpipe.core.card import ModelCard, Task
from optpipe.core.events import SilentListener
from optpipe.inputs.synthetic import make_synthetic_image
from optpipe.preprocess.images import choose_images


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
    files = [{"path": name, "label": label} for name, label in listed.items()]
    manifest.write_text(json.dumps({"root": ".", "files": files}))
    card = ModelCard("m", "s", Task.CLASSIFICATION, (), labels=("cat", "dog"), data={"validation": str(manifest)})
    listener = Warned()
    _, labels = choose_images(card, None, 1000, None, listener)
    return labels, listener.texts


def test_the_manifest_says_the_labels_before_the_folders_do(tmp_path):
    assert chosen(tmp_path, {"cat/1.png": "dog", "cat/2.png": "cat", "dog/1.png": "dog"}) == ([1, 0, 1], [])


def test_a_picture_that_the_manifest_does_not_list_has_its_folders_label(tmp_path):
    assert chosen(tmp_path, {"cat/1.png": "cat", "dog/1.png": "dog"}) == ([0, 0, 1], [])


def test_without_a_label_for_each_there_is_no_accuracy(tmp_path):
    labels, warned = chosen(tmp_path, {"cat/1.png": "cat", "cat/2.png": "cat", "dog/1.png": "wolf"})
    assert labels is None
    assert "not labels: wolf" in warned[0]
