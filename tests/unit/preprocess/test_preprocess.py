"""Which pictures are taken, what a model gives for them, and the pipeline that Triton's DALI backend loads."""

import io
import json
import random
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from PIL import Image
from tests.fakes.graphs import onnx_model
from tests.fakes.mutations import mutate_bytes
from tests.fakes.odd_images import make_edge_case_files, make_synthetic_image

from optpipe.core.card import InputSpec, ModelCard, Task, TensorSpec, card_from_dict
from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.core.files import hash_file
from optpipe.core.transform import CenterCrop, Decode, Normalize, Pack, Rescale, Resize, Transform
from optpipe.models.inputs.image_set import ImageSet
from optpipe.models.inputs.images import decode_image, preprocess_file
from optpipe.models.inputs.sample_set import SetFile
from optpipe.models.inputs.task_data import read_images
from optpipe.preprocess.dali_pipeline import INPUT, PIPELINE, DaliPlan, build_preprocessing_artifact
from optpipe.preprocess.preprocess import choose_images, open_model_function, read_labels
from optpipe.workspace.store import Store


@dataclass
class Warned(SilentListener):
    texts: list[str] = field(default_factory=list)

    def warn(self, text):
        self.texts.append(text)


@pytest.mark.parametrize(
    ("listed", "labels", "warned"),
    [
        ({"cat/1.png": "dog", "cat/2.png": "cat", "dog/1.png": "dog"}, [1, 0, 1], ""),
        ({"cat/1.png": "cat", "cat/2.png": "cat", "dog/1.png": "wolf"}, None, "label 'wolf'"),
    ],
)
def test_the_cards_validation_set_gives_the_labels(tmp_path, listed, labels, warned):
    """Without a label for each there is no accuracy."""
    for name in listed:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(make_synthetic_image(20, 20, 1)).save(tmp_path / name)
    files = tuple(
        SetFile(name, hash_file(tmp_path / name), label) for name, label in listed.items()
    )
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(ImageSet("pictures", tmp_path, 0, files).to_dict(tmp_path)))
    outputs = (TensorSpec("scores", "float32", ("batch", 2)),)
    data = {"validation": str(manifest)}
    card = ModelCard("m", "s", Task.CLASSIFICATION, (), outputs, labels=("cat", "dog"), data=data)
    listener = Warned()
    samples, _ = read_images(choose_images(card), 1000, 0, listener)
    assert read_labels(samples, card, listener) == labels
    assert warned in "".join(listener.texts)


def test_boxes_of_one_image_at_a_time_get_as_many_rows(tmp_path):
    nodes = [
        ("Flatten", "x", "values"),
        ("NonZero", "values", "places"),
        ("Transpose", "places", "boxes"),
    ]
    onnx_model(
        nodes, {"x": [1, 3, 2, 2]}, {"boxes": ("INT64", ["k", 2])}, path=tmp_path / "net.onnx"
    )
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


HALF = Normalize((0.5,) * 3, (0.25,) * 3)
TRANSFORMS = {
    "planes": Transform((Decode(), Resize((40,)), CenterCrop(32, 32), Rescale(), HALF, Pack())),
    "halves": Transform((Decode(), Resize((32, 32), "exact"), Rescale(), Pack("HWC", "float16"))),
    "bytes": Transform((Decode("L"), Resize((32, 32), "exact"), Pack("HWC", "uint8"))),
}
CARD = card_from_dict(
    {
        "name": "net",
        "source": "file:net.py",
        "task": "classification",
        "inputs": [
            {
                "name": "x",
                "dtype": "float32",
                "min": [1, 3, 32, 32],
                "opt": [1, 3, 32, 32],
                "max": [8, 3, 32, 32],
            }
        ],
    }
)
LOADER = """
import json, sys
import numpy as np
from nvidia.dali.pipeline import Pipeline
path, batch, name, out = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
pipeline = Pipeline.deserialize(filename=path, batch_size=batch, num_threads=1, device_id=None)
pipeline.build()
assert pipeline.max_batch_size == batch, pipeline.max_batch_size
for _ in range(pipeline.input_feed_count(name)):
    pipeline.feed_input(name, [np.fromfile(each, np.uint8) for each in sys.argv[5:]])
(output,) = pipeline.run()
np.save(out, np.stack([np.asarray(output[row]) for row in range(len(sys.argv) - 5)]))
print(json.dumps({"optpipe": "optpipe" in sys.modules, "torch": "torch" in sys.modules}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_a_process_with_nothing_but_dali_runs_the_stored_pipeline(tmp_path, kind):
    transform = TRANSFORMS[kind]
    plan, store = DaliPlan(batch_size=8), Store(tmp_path)
    entry, _ = build_preprocessing_artifact(
        CARD, transform, plan, "parent", store, SilentListener()
    )
    assert PIPELINE == "1/model.dali"  # as Triton's DALI backend expects
    every = dict(make_edge_case_files())
    chosen = ["baseline 4:2:0.jpg", "grayscale 16 bit.png", "lossy.webp"]
    for name in chosen:
        (tmp_path / name).write_bytes(every[name])
    arguments = [str(entry.file(PIPELINE)), "8", INPUT, str(tmp_path / "out.npy")]
    done = subprocess.run(
        [sys.executable, "-c", LOADER, *arguments, *(str(tmp_path / name) for name in chosen)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"optpipe": False, "torch": False}
    found = np.load(tmp_path / "out.npy")
    assert (found.shape[1:], str(found.dtype)) == (transform.shape, transform.pack.dtype)
    scale = {"planes": 255 * 0.25, "halves": 255, "bytes": 1}[kind]
    for row, name in enumerate(chosen):
        apart = np.abs(found[row].astype(float) - preprocess_file(every[name], transform)) * scale
        assert apart.max() <= 1.3, name


@pytest.mark.slow
def test_the_same_pipeline_comes_from_the_store_and_another_plan_s_or_model_s_does_not(tmp_path):
    store, transform = Store(tmp_path), TRANSFORMS["planes"]

    def build(plan, model="parent", card=CARD):
        return build_preprocessing_artifact(card, transform, plan, model, store, SilentListener())

    (first, made), (again, cached), (other, _) = (
        build(DaliPlan()),
        build(DaliPlan()),
        build(DaliPlan(threads=1)),
    )
    assert (made, cached) == (False, True)
    assert first.id == again.id != other.id
    assert first.manifest.parents == ("parent",)
    assert Transform.from_dict(json.loads(first.file("transform.json").read_text())) == transform
    entry, _ = build(DaliPlan(), "another", replace(CARD, name="other"))
    assert (entry.info.model, entry.manifest.parents) == ("other", ("another",))
