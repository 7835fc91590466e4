"""What ships as `digits`: the card, the images and the weights belong together."""

import hashlib
import importlib.util
import json
import tomllib
from typing import Any

import numpy as np
import pytest

from optpipe.workspace.places import find_shipped_folder

SPLITS = ("train", "calibration", "validation")
DATA = find_shipped_folder("calibration") / "digits"
CARD = tomllib.loads((find_shipped_folder("models") / "digits.toml").read_text(encoding="utf-8"))


def manifest(split: str) -> Any:
    return json.loads((DATA / f"{split}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def script():
    path = find_shipped_folder("models") / "digits" / "digits.py"
    spec = importlib.util.spec_from_file_location("digits", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("split", SPLITS)
def test_manifest_and_files_agree(split) -> None:
    listed = manifest(split)
    hashes = {
        f["path"]: hashlib.sha256((DATA / split / f["path"]).read_bytes()).hexdigest()
        for f in listed["files"]
    }
    assert hashes == {f["path"]: f["sha256"] for f in listed["files"]}
    assert {p.relative_to(DATA / split).as_posix() for p in (DATA / split).rglob("*.png")} == set(
        hashes
    )
    listing = "".join(f"{f['sha256']}  {f['path']}\n" for f in listed["files"])
    assert listed["sha256"] == hashlib.sha256(listing.encode()).hexdigest()
    assert listed["count"] == len(hashes)


def test_splits_are_disjoint_by_content_and_stratified() -> None:
    files = {split: manifest(split)["files"] for split in SPLITS}
    hashes = [f["sha256"] for members in files.values() for f in members]
    assert len(set(hashes)) == len(hashes) == 1797
    for members in files.values():
        counts = np.bincount([int(f["label"]) for f in members])
        assert counts.max() / len(members) < 0.105
        assert counts.min() / len(members) > 0.095


def test_card_names_what_is_there() -> None:
    weights = find_shipped_folder("models") / CARD["weights"]
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == CARD["weights_sha256"]
    assert weights.stat().st_size < 1_000_000
    for split in SPLITS:
        assert (find_shipped_folder("models") / CARD["data"][split]).resolve() == (
            DATA / f"{split}.json"
        ).resolve()


@pytest.mark.slow
def test_validation_accuracy_is_what_the_training_reported(script) -> None:
    import torch
    from safetensors.torch import load_file

    model = script.digits()
    model.load_state_dict(load_file(find_shipped_folder("models") / CARD["weights"]))
    model.eval()
    images, labels = script.load("validation")
    with torch.inference_mode():
        correct = int((model(images).argmax(1) == labels).sum())
    reported = json.loads(
        (find_shipped_folder("models") / "digits" / "training.json").read_text(encoding="utf-8")
    )
    assert correct / 800 >= 0.98
    assert abs(correct / 800 - reported["validation_accuracy"]) <= 1.5 / 800
