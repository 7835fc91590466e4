import json
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from optpipe.core.errors import BadInputError
from optpipe.core.transform import Decode, Pack, Transform
from optpipe.models.inputs.image_set import ImageSet, image_set_from_path
from optpipe.models.inputs.sample_set import refuse_other_model, refuse_overlap
from optpipe.workspace.shipped import find_shipped_folder

DIGITS = find_shipped_folder("calibration") / "digits"


@pytest.fixture
def folder(tmp_path):
    """Thirty cats, ten dogs."""
    rng = np.random.default_rng(0)
    for label, count in (("cat", 30), ("dog", 10)):
        (tmp_path / "set" / label).mkdir(parents=True)
        for index in range(count):
            pixels = rng.integers(0, 255, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "set" / label / f"{index}.png")
    return tmp_path / "set"


def test_a_sample_is_stratified_and_seeded(folder) -> None:
    one, _ = image_set_from_path(folder, 12, seed=3)
    again, _ = image_set_from_path(folder, 12, seed=3)
    other, _ = image_set_from_path(folder, 12, seed=4)
    assert one == again
    assert one.sha256 != other.sha256
    assert Counter(each.label for each in one.files) == {"cat": 9, "dog": 3}
    assert one.labels == ("cat", "dog")


def test_loose_pictures_have_no_labels() -> None:
    found, bad = image_set_from_path(find_shipped_folder("calibration") / "samples", 4)
    assert len(found.files) == 4
    assert {each.label for each in found.files} == {None}
    assert not bad


def test_a_manifest_survives_writing_and_notices_changes(folder) -> None:
    found, _ = image_set_from_path(folder, 8)
    path = folder.parent / "set.json"
    path.write_text(json.dumps(found.to_dict(folder.parent)))
    assert ImageSet.from_manifest(path).sha256 == found.sha256
    (found.paths[0]).write_bytes(found.paths[1].read_bytes())
    with pytest.raises(BadInputError, match=r"has changed; draw the set again"):
        image_set_from_path(path)
    value = json.loads(path.read_text())
    value["files"].pop()
    path.write_text(json.dumps(value))
    with pytest.raises(BadInputError, match="list of files was changed"):
        image_set_from_path(path)


def test_shipped_sets_are_whole_and_can_be_sampled() -> None:
    found, _ = image_set_from_path(DIGITS / "calibration.json")
    assert len(found.files) == 500
    few, _ = image_set_from_path(DIGITS / "calibration.json", 50)
    assert set(Counter(each.label for each in few.files).values()) == {5}


def test_validation_images_are_refused_whatever_their_names(folder, tmp_path) -> None:
    (tmp_path / "other" / "x").mkdir(parents=True)
    (tmp_path / "other" / "y").mkdir(parents=True)
    (tmp_path / "other" / "x" / "new_name.png").write_bytes((folder / "cat" / "3.png").read_bytes())
    (tmp_path / "other" / "y" / "0.png").write_bytes((folder / "dog" / "1.png").read_bytes())
    with pytest.raises(BadInputError, match="2 of 40 calibration images are also in the validation set other"):
        refuse_overlap(image_set_from_path(folder)[0], image_set_from_path(tmp_path / "other")[0])
    refuse_overlap(
        image_set_from_path(DIGITS / "calibration.json")[0], image_set_from_path(DIGITS / "validation.json")[0]
    )


def test_unreadable_files_are_replaced_and_named_until_they_are_too_many(folder) -> None:
    (folder / "cat" / "0.png").write_bytes(b"no picture")
    found, bad = image_set_from_path(folder)
    assert len(found.files) == 39
    assert [each.path.name for each in bad] == ["0.png"]
    for index in range(1, 8):
        (folder / "cat" / f"{index}.png").write_bytes(b"")
    with pytest.raises(BadInputError, match="8 of 40 images cannot be read; at most 5 % allowed"):
        image_set_from_path(folder)


def test_linked_folders_give_pictures_and_what_is_none(folder, tmp_path_factory) -> None:
    linking = tmp_path_factory.mktemp("linking")
    (folder / "cat" / "notes.txt").write_text("no picture")
    (linking / "all").symlink_to(folder)
    found, bad = image_set_from_path(linking)
    assert len(found.files) == 40
    assert [each.path for each in bad] == [linking / "all" / "cat" / "notes.txt"]


def test_empty_folder(tmp_path) -> None:
    with pytest.raises(BadInputError, match="no images in this folder"):
        image_set_from_path(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 3}', "\x00"])
def test_what_is_no_manifest(tmp_path, text) -> None:
    (tmp_path / "set.json").write_text(text)
    with pytest.raises(
        BadInputError, match=r"not a readable image-set manifest .*\ngive a folder of images, a COCO file, or"
    ):
        image_set_from_path(tmp_path / "set.json")


def test_a_set_for_another_model_or_preprocessing_is_refused(folder) -> None:
    transform = Transform((Decode(), Pack(dtype="uint8")))
    found, _ = image_set_from_path(folder, 8)
    refuse_other_model(found, "resnet50", transform.hash)
    value = {**found.to_dict(folder.parent), "model": "digits"}
    (folder.parent / "a.json").write_text(json.dumps(value))
    with pytest.raises(BadInputError, match="drawn for model digits, not for resnet50"):
        refuse_other_model(ImageSet.from_manifest(folder.parent / "a.json"), "resnet50", transform.hash)
    value = {**found.to_dict(folder.parent), "transform_sha256": "0" * 64}
    (folder.parent / "b.json").write_text(json.dumps(value))
    with pytest.raises(BadInputError, match="drawn for different preprocessing"):
        refuse_other_model(ImageSet.from_manifest(folder.parent / "b.json"), "resnet50", transform.hash)
