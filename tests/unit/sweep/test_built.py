"""What a recipe gave is known again only where its name or a file's hash pins the model, in the same environment, and whole."""

from dataclasses import replace

from tests.fakes.entries import artifact_info
from tests.fakes.sweeps import make_recipe

from optpipe.core.entries import ArtifactInfo
from optpipe.core.events import SilentListener
from optpipe.sweep.local import find_built, note_built
from optpipe.workspace.store import Store


def make_artifact(workspace):
    def fill(folder):
        (folder / "model.onnx").write_bytes(b"engine")
        return artifact_info()

    entry, _ = Store(workspace).produce(ArtifactInfo, {"test": 1}, fill, listener=SilentListener())
    return entry


def test_a_network_of_a_library_is_known_again_in_its_environment(tmp_path):
    entry, recipe = make_artifact(tmp_path), make_recipe("resnet18")
    note_built(tmp_path, recipe, "f", entry.id)
    assert find_built(tmp_path, recipe, "f") == entry.id
    assert find_built(tmp_path, recipe, "other") is None
    assert find_built(tmp_path, replace(recipe, seed=1), "f") is None
    entry.file("model.onnx").write_bytes(b"damage")
    assert find_built(tmp_path, recipe, "f") is None


def test_what_nothing_pins_is_built_and_an_onnx_file_counts_by_its_hash(tmp_path):
    entry = make_artifact(tmp_path)
    for model in ("digits", "net.py:make", "card.toml", "hf:bert", "gone.onnx"):
        note_built(tmp_path, make_recipe(model), "f", entry.id)
        assert find_built(tmp_path, make_recipe(model), "f") is None
    known = make_recipe("net.onnx", files={"net.onnx": "1"})
    note_built(tmp_path, known, "f", entry.id)
    assert find_built(tmp_path, known, "f") == entry.id
    assert find_built(tmp_path, make_recipe("net.onnx", files={"net.onnx": "2"}), "f") is None
