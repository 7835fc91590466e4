"""Which builds a typed MODEL means."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.entries import artifact_info, put, put_verified
from tests.fakes.graphs import onnx_model

from optpipe.cli.bench import find_pair
from optpipe.cli.options import TargetOptions
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.entries import ModelInfo, WeightsRecord
from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.core.files import hash_file
from optpipe.models.artifacts.changed_source import explain_changed_source
from optpipe.models.artifacts.lookup import find_artifacts
from optpipe.models.artifacts.model_names import find_stored_source
from optpipe.models.artifacts.named import model_from_text
from optpipe.models.sources.onnx_file import hash_onnx_file
from optpipe.signoff.collect import SignoffRequest, find_judged_artifact
from optpipe.signoff.policy import policy_from_toml
from optpipe.workspace.entry import Entry
from optpipe.workspace.file_names import CARD
from optpipe.workspace.store import Store

INPUTS = (InputSpec("x", "float32", (1, 8), (4, 8), (16, 8)),)
CARD_FILE = """name = "mine"
task = "other"
source = "net.py:make"
inputs = [{name = "x", min = [1, 8], opt = [4, 8], max = [16, 8]}]
"""


def built(
    store,
    name,
    source,
    weights="a",
    precision="fp32",
    path=None,
    kind="file",
    content="",
    files=(),
    revision=1,
):
    record = WeightsRecord(kind, weights)
    card = json.dumps(ModelCard(name, source, Task.OTHER, INPUTS).to_dict()).encode()
    file = Path(source.rpartition(":")[0])
    known = files or ([file.name] if file.is_file() else [])
    hashes = {each: hash_file(file.parent / each) for each in known}
    model = {
        "source": {"file": source, "card": name, "made": {"files": hashes}},
        "weights": {"file": weights},
        "batch": None,
        "shapes": {},
    }
    info = ModelInfo(
        name, source, record, simplified=True, own_precision=None, card=path, content=content
    )
    entry = put(store, info, {"revision": revision, "model": model}, files={CARD: card})
    built = artifact_info(model=name, source=source, precision=precision, weights=record)
    return put(store, built, {"of": entry.id, "precision": precision}, (entry,))


def verified(store: Store, artifact: Entry, samples: int) -> Any:
    return put_verified(store, store.find(artifact.manifest.parents[0]), artifact, samples)[0]


def save_relu(path: str) -> None:
    onnx_model([("Relu", "x", "y")], {"x": [4, 8]}, {"y": [4, 8]}, path=Path(path))


def test_a_copy_of_an_onnx_file_is_the_same_model(store: Store) -> None:
    save_relu("copy.onnx")
    first = built(store, "net", "net.onnx", hash_onnx_file(Path("copy.onnx")), kind="embedded")
    built(store, "carded", "net.onnx", hash_onnx_file(Path("copy.onnx")), kind="embedded")
    built(store, "other", "other.onnx", "0" * 64, kind="embedded")
    assert [each.entry.id for each in find_artifacts("copy.onnx", store)] == [first.id]


UNKNOWN = {
    "deadbeef0000": "has the ID deadbeef0000",
    "0123": "has the ID 0123",
    "artifact-beef": "has the ID artifact-beef",
    "beef": "which has builds of net",  # may be a name
    "sub/": "sub/: is a folder\ngive a torchvision name",
    "./full": "./full: is a folder\ngive the file in it: full/net.onnx",
    "./checkpoint": "./checkpoint: is a folder\nhf:./checkpoint is",
    "": "MODEL is empty",
    "nobody/nothing": "give hf:nobody/nothing",
    "./nothing": "./nothing: no such file",
    "nothing.txt": "nothing.txt: no such file",
    "pipe": "pipe: is a pipe, a socket, or a device",
    "weights.pth": "FILE.py:FACTORY --weights weights.pth",
}


@pytest.mark.parametrize("text", UNKNOWN)
def test_what_names_nothing_is_refused_with_a_way_out_that_fits(store: Store, text: str) -> None:
    built(store, "net", "net.py:make")
    for name in ("full", "checkpoint"):
        Path(name).mkdir()
    save_relu("full/net.onnx")
    Path("checkpoint/config.json").write_text("{}")
    Path("weights.pth").write_bytes(b"PK")
    os.mkfifo("pipe")
    said = re.escape(UNKNOWN[text])
    with pytest.raises(BadInputError, match=said):
        find_artifacts(text, store)
    if text != "beef":
        with pytest.raises(BadInputError, match=said):
            model_from_text(text, store)


def test_a_name_of_a_library_is_meant_before_a_folder_of_that_name(store: Store) -> None:
    Path("resnet50").mkdir()
    assert model_from_text("resnet50", store).source.name == "torchvision:resnet50"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    Path("mine.toml").write_text(CARD_FILE)
    Path("other.toml").write_text(CARD_FILE.replace("mine", "digits"))
    return Store(tmp_path / ".optpipe")


@pytest.mark.parametrize(("text", "name"), [
    ("net.py:make", "net.make"), ("./sub/../net.py:make", "net.make"), ("net.make", "net.make"),
    ("sub/net.py:make", None), ("net.py:other", None), ("make", None), ("mine", "mine"), ("mine.toml", "mine"),
    ("other.toml", "digits"), ("resnet50", "resnet50"), ("torchvision:resnet50", "resnet50"), ("light.onnx", "light"),
])  # fmt: skip
def test_a_model_is_known_by_its_name_its_source_and_its_file(
    store: Store, text: str, name: str | None
) -> None:
    if ".py:" in text:
        Path("net.py").write_text("# makes a network")
    for each, source in (
        ("net.make", "net.py:make"),
        ("mine", "net.py:make"),
        ("digits", "digits/digits.py:digits"),
        ("resnet50", "torchvision:resnet50"),
        ("light", "light.onnx"),
    ):
        built(store, each, source)
    wanted = SignoffRequest(text, policy_from_toml(b"schema = 1\n[size]\nmaximum = '1 MiB'\n"))
    if name is None:
        with pytest.raises(BadInputError, match=r"no build of|no such file"):
            find_artifacts(text, store)
        return
    assert [each.card.name for each in find_artifacts(text, store)] == [name]
    assert find_judged_artifact(wanted, store).info.model == name


def test_the_build_that_was_made_or_found_last_is_meant(store: Store) -> None:
    former, later = (
        built(store, "net.make", "net.py:make", revision=revision) for revision in (1, 2)
    )
    assert find_artifacts("net.make", store)[0].entry.id == later.id
    built(store, "net.make", "net.py:make", revision=1)
    assert find_artifacts("net.make", store)[0].entry.id == former.id


POLICY = policy_from_toml(b"schema = 1\n[size]\nmaximum = '1 MiB'\n")


def test_several_models_of_one_name_are_told_apart_by_their_ids(store: Store) -> None:
    builds = {
        name: built(store, "net.make", "net.py:make", name, content=name * 12) for name in "ab"
    }
    for find in (
        lambda: find_artifacts("net.make", store),
        lambda: find_judged_artifact(SignoffRequest("net.make", POLICY), store),
    ):
        with pytest.raises(BadInputError, match=r"2 models in .* are called net.make: aaaa.*bbbb"):
            find()
    for name, each in builds.items():
        assert [one.entry.id for one in find_artifacts(name * 6, store)] == [each.id]
        assert find_artifacts(each.id, store)[0].entry.id == each.id
        judged = SignoffRequest("net.make", POLICY, artifact=each.id)
        assert find_judged_artifact(judged, store).id == each.id


def test_the_same_content_under_one_name_is_one_model(store: Store) -> None:
    for weights in "ab":
        built(store, "net.make", "net.py:make", weights, content="c" * 12)
    assert len(find_artifacts("net.make", store)) == 1


@pytest.mark.parametrize("change", ["the file", "a module", "its weights", "a file is gone"])
def test_a_build_whose_source_has_changed_is_not_meant(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    for folder, text in (("x", "one"), ("y", "two")):
        Path(folder).mkdir()
        Path(folder, "net.py").write_text(text)
        Path(folder, "layers.py").write_text(f"layers of {text}")
        Path(folder, "weights.bin").write_bytes(text.encode())
    monkeypatch.chdir("x")
    mine = built(store, "net.make", "net.py:make", files=("net.py", "layers.py", "weights.bin"))
    monkeypatch.chdir("../y")
    wanted = SignoffRequest("net.py:make", POLICY)
    for find in (
        lambda: find_artifacts("net.py:make", store),
        lambda: find_judged_artifact(wanted, store),
    ):
        with pytest.raises(BadInputError, match=rf"its source is not that of .*{mine.id}"):
            find()
    theirs = built(store, "net.make", "net.py:make", files=("net.py", "layers.py", "weights.bin"))
    for folder, expected in (("x", mine), ("y", theirs)):
        monkeypatch.chdir(tmp_path / folder)
        assert find_artifacts("net.py:make", store)[0].entry.id == expected.id
        assert find_judged_artifact(wanted, store).id == expected.id
    (tmp_path / "y").rename(tmp_path / "moved")
    assert find_artifacts(str(tmp_path / "moved" / "net.py:make"), store)[0].entry.id == theirs.id
    monkeypatch.chdir(tmp_path / "x")
    match change:
        case "the file":
            Path("net.py").write_text("another seed")
        case "a module":
            Path("layers.py").write_text("other layers")
        case "its weights":
            Path("weights.bin").write_bytes(b"retrained")
        case _:
            Path("weights.bin").unlink()
    with pytest.raises(BadInputError, match=r"has changed.*\n.*optpipe build net.py:make"):
        find_artifacts("net.py:make", store)
    with pytest.raises(BadInputError, match="has changed"):
        find_judged_artifact(wanted, store)
    assert find_artifacts(mine.id, store)[0].entry.id == mine.id
    by_id = SignoffRequest("net.py:make", POLICY, artifact=mine.id)
    assert find_judged_artifact(by_id, store).id == mine.id


@pytest.mark.parametrize("kind", ["factory", "onnx"])
def test_a_name_does_not_mean_a_build_whose_source_has_changed(store: Store, kind: str) -> None:
    if kind == "onnx":
        save_relu("net.onnx")
        name, source, weights = "net", "net.onnx", hash_onnx_file(Path("net.onnx"))
    else:
        Path("net.py").write_text("one")
        name, source, weights = "net.make", "net.py:make", "a"
    mine = built(store, name, source, weights, kind="embedded" if kind == "onnx" else "file")
    assert find_artifacts(name, store)[0].entry.id == mine.id
    assert explain_changed_source(mine, store) is None
    if kind == "onnx":
        onnx_model([("Abs", "x", "y")], {"x": [4, 8]}, {"y": [4, 8]}, path=Path("net.onnx"))
    else:
        Path("net.py").write_text("two")
    for find in (
        lambda: find_artifacts(name, store),
        lambda: find_judged_artifact(SignoffRequest(name, POLICY), store),
    ):
        with pytest.raises(BadInputError, match=rf"its source is not that of .*{mine.id}"):
            find()
    assert find_artifacts(mine.id, store)[0].entry.id == mine.id
    judged = SignoffRequest(name, POLICY, artifact=mine.id)
    assert find_judged_artifact(judged, store).id == mine.id
    assert f"is not what {mine.id} was built from" in (explain_changed_source(mine, store) or "")
    Path(source.partition(":")[0]).unlink()
    assert find_artifacts(name, store)[0].entry.id == mine.id, "nothing tells that it changed"


def test_a_name_of_models_in_several_places_is_refused_with_the_places(store: Store) -> None:
    for folder, content in (("x", "a" * 12), ("y", "b" * 12), ("copy", "b" * 12)):
        Path(folder).mkdir()
        Path(folder, "net.py").write_text(content)
        built(store, "net.make", f"{Path.cwd()}/{folder}/net.py:make", content=content)
    with pytest.raises(BadInputError, match=r"called net.make: .*/x/net.py:make, .*/y/net.py"):
        find_stored_source("net.make", store)
    (Path("x") / "net.py").unlink()
    found = find_stored_source("net.make", store)
    assert found is not None, "a copy of the same content is the same model"
    assert found.endswith(("/y/net.py:make", "/copy/net.py:make"))


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("reader", "hf:/srv/models/reader"),
        ("hf:reader", "hf:/srv/models/reader"),
        ("vit_new", "timm:vit_new"),
        ("hf:sub", None),  # a folder that is here
        ("hf:org/reader", None),  # the hub's
        ("resnet18", None),  # torchvision's, though a model of timm is called so
        ("digits", None),  # a card's
        ("net.make", None),
        ("unknown", None),
    ],
)
def test_a_model_of_a_library_is_also_known_by_the_name_that_messages_give_it(
    store, text, source
) -> None:
    stored = {
        "hf:/srv/models/reader": "reader",
        "timm:vit_new": "vit_new",
        "timm:resnet18": "resnet18",
    }
    for place, name in {
        **stored,
        "hf:/srv/sub": "sub",
        "hf:/srv/digits": "digits",
        "net.py:make": "net.make",
    }.items():
        built(store, name, place)
    assert find_stored_source(text, store) == source


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("two axes", "HERE/cards/two.toml"),
        ("light", "cards/light.onnx"),
        ("light.onnx", None),  # a dossier cuts absolute paths alone
        ("cut.make", "HERE/cards/cut.py:make"),
        ("cut.py:make", "HERE/cards/cut.py:make"),
        ("gone", None),
        ("lost", None),
        ("whole", None),  # its file is the card's, which is gone
        ("resnet18", None),  # torchvision's
        ("cards/lost.onnx", None),
        ("mine.toml", None),  # a card that is here
    ],
)
def test_a_model_of_a_file_is_also_known_by_the_name_that_messages_give_it(
    store, text, source
) -> None:
    Path("cards").mkdir()
    for name in ("two.toml", "light.onnx", "cut.py", "whole.onnx", "resnet18.onnx"):
        Path("cards", name).touch()
    built(store, "two axes", "light.onnx", path="cards/two.toml")
    built(store, "gone", "gone.onnx", path="cards/gone.toml")
    built(store, "whole", "cards/whole.onnx", path="cards/gone.toml")
    for name in ("light", "lost", "resnet18"):
        built(store, name, f"cards/{name}.onnx")
    built(store, "cut.make", f"{Path.cwd()}/cards/cut.py:make")
    assert find_stored_source(text, store) == (source and source.replace("HERE", str(Path.cwd())))


def test_an_artifact_keeps_the_reference_that_it_was_verified_on(store: Store) -> None:
    first, second, never = (
        built(store, "digits", "digits.py:make", precision=each)
        for each in ("fp32", "int8", "fp16")
    )
    many = verified(store, first, 800)
    few = verified(store, second, 8)
    found = {each.entry.id: each for each in find_artifacts("digits", store)}
    assert {name: each.reference for name, each in found.items()} == {
        first.id: many,
        second.id: few,
        never.id: few,
    }
    baseline, contender = find_pair(second.id, first.id, TargetOptions(), store, SilentListener())
    assert baseline.reference == contender.reference == many
    verified(store, second, 800)
    assert find_artifacts(second.id, store)[0].reference == many
