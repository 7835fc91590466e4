import json

from optpipe.core.card import card_from_dict
from optpipe.core.events import Silent
from optpipe.core.store import Store
from optpipe.core.transform import CenterCrop, Decode, Pack, Rescale, Resize, Transform
from optpipe.stages.preprocess.artifact import CONFIG, PIPELINE, preprocessing_artifact
from optpipe.stages.preprocess.dali_pipeline import DaliPlan

TRANSFORM = Transform((Decode(), Resize((40,)), CenterCrop(32, 32), Rescale(), Pack()))
CARD = card_from_dict(
    {
        "name": "net",
        "source": "file:net.py",
        "task": "classification",
        "inputs": [
            {"name": "x", "dtype": "float32", "min": [1, 3, 32, 32], "opt": [1, 3, 32, 32], "max": [8, 3, 32, 32]}
        ],
    }
)


def test_the_pipeline_is_stored_as_a_model_of_tritons_dali_backend(tmp_path):
    store = Store(tmp_path)
    entry, cached = preprocessing_artifact(CARD, TRANSFORM, DaliPlan(batch_size=8), "parent", store, Silent())
    assert not cached
    assert entry.manifest.parents == ("parent",)
    assert entry.file(PIPELINE).stat().st_size > 1000
    config = entry.file(CONFIG).read_text()
    assert 'backend: "dali"' in config
    assert "dims: [ 3, 32, 32 ]" in config
    assert "max_batch_size: 8" in config
    assert Transform.from_dict(json.loads(entry.file("transform.json").read_text())) == TRANSFORM


def test_the_same_pipeline_comes_from_the_store_and_another_plan_does_not(tmp_path):
    store = Store(tmp_path)
    first, _ = preprocessing_artifact(CARD, TRANSFORM, DaliPlan(), "parent", store, Silent())
    again, cached = preprocessing_artifact(CARD, TRANSFORM, DaliPlan(), "parent", store, Silent())
    other, _ = preprocessing_artifact(CARD, TRANSFORM, DaliPlan(threads=1), "parent", store, Silent())
    assert cached
    assert first.id == again.id != other.id
