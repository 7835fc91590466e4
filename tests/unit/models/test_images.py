"""Pictures and sets of pictures: found, decoded, drawn, and refused."""

import io
import json
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from optpipe.core.errors import BadInputError
from optpipe.core.transform import CenterCrop, Decode, Pack, Rescale, Resize, Transform
from optpipe.models.inputs.image_set import ImageSet, find_images, find_readable_images, image_set_from_path
from optpipe.models.inputs.images import decode_image, preprocess_batches, preprocess_file
from optpipe.models.inputs.sample_set import format_unreadable, refuse_other_model, refuse_overlap
from optpipe.models.inputs.synthetic import make_synthetic_image
from optpipe.workspace.places import find_shipped_folder

SMALL = Transform((Decode(), Resize((40,)), CenterCrop(32, 32), Rescale(), Pack()))


@pytest.fixture
def folder(tmp_path):
    for name in ("2.jpg", "10.jpg", "1.png"):
        Image.fromarray(make_synthetic_image(48, 64, seed=len(name))).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no picture")
    return tmp_path


def test_pictures_come_in_natural_order_from_linked_folders_too_and_a_limit_says_what_it_left_out(
    folder, tmp_path_factory
):
    elsewhere = tmp_path_factory.mktemp("linked")
    (elsewhere / "cats").symlink_to(folder)
    (elsewhere / "again").symlink_to(elsewhere)
    for place in (folder, elsewhere):
        assert [path.name for path in find_images(place, limit=9).paths] == ["1.png", "2.jpg", "10.jpg"]
    found = find_images(folder, limit=2)
    assert ([path.name for path in found.paths], found.left_out) == (["1.png", "2.jpg"], 1)
    for limit in (0, -1):
        with pytest.raises(BadInputError, match="at least 1"):
            find_images(folder, limit=limit)


def test_unreadable_files_are_named_with_their_reasons(folder):
    (folder / "3.jpg").write_bytes((folder / "2.jpg").read_bytes()[:-400])
    (folder / "4.png").write_bytes(b"")
    found = find_readable_images(folder)
    assert [bad.path.name for bad in found.unreadable] == ["3.jpg", "4.png"]
    assert "truncated" in format_unreadable(found.unreadable)
    assert format_unreadable(found.unreadable, shown=1).endswith("and 1 more")
    assert len(found.paths) == 3


def test_no_folder_a_file_or_an_empty_folder_is_bad_input(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for path, said in (
        (folder / "absent", "no such"),
        (folder / "2.jpg", "is a file"),
        (tmp_path / "empty", "no images"),
    ):
        with pytest.raises(BadInputError, match=said):
            find_images(path)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16"])
def test_every_kind_of_picture_becomes_rgb_as_pillow_converts_it(mode):
    picture = Image.fromarray(make_synthetic_image(20, 30))
    odd = Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30)) if mode == "I;16" else picture.convert(mode)
    encoded = io.BytesIO()
    odd.save(encoded, "TIFF")
    expected = np.asarray(Image.open(io.BytesIO(encoded.getvalue())).convert("RGB"))
    assert np.array_equal(decode_image(encoded.getvalue(), Decode()), expected)


def test_exif_turns_the_picture_only_when_the_models_loader_does(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(make_synthetic_image(20, 30)).save(tmp_path / "turned.jpg", exif=exif)
    assert decode_image(tmp_path / "turned.jpg", Decode()).shape == (20, 30, 3)
    assert decode_image(tmp_path / "turned.jpg", Decode(exif=True)).shape == (30, 20, 3)


def test_batches_hold_every_picture_in_order(folder):
    paths = find_images(folder).paths
    made = list(preprocess_batches(paths, SMALL, batch_size=2, threads=2))
    assert [batch.shape for batch in made] == [(2, 3, 32, 32), (1, 3, 32, 32)]
    assert made[0].dtype == np.float32
    assert np.array_equal(np.concatenate(made), np.stack([preprocess_file(path, SMALL) for path in paths]))


DIGITS = find_shipped_folder("calibration") / "digits"


@pytest.fixture
def pets(tmp_path):
    """Thirty cats, ten dogs."""
    rng = np.random.default_rng(0)
    for label, count in (("cat", 30), ("dog", 10)):
        (tmp_path / "set" / label).mkdir(parents=True)
        for index in range(count):
            pixels = rng.integers(0, 255, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "set" / label / f"{index}.png")
    return tmp_path / "set"


def test_a_sample_is_stratified_and_seeded(pets) -> None:
    one, _ = image_set_from_path(pets, 12, seed=3)
    again, _ = image_set_from_path(pets, 12, seed=3)
    other, _ = image_set_from_path(pets, 12, seed=4)
    assert one == again
    assert one.sha256 != other.sha256
    assert Counter(each.label for each in one.files) == {"cat": 9, "dog": 3}
    assert one.labels == ("cat", "dog")


def test_a_manifest_survives_writing_and_notices_changes(pets) -> None:
    found, _ = image_set_from_path(pets, 8)
    path = pets.parent / "set.json"
    path.write_text(json.dumps(found.to_dict(pets.parent)))
    assert ImageSet.from_manifest(path).sha256 == found.sha256
    (found.paths[0]).write_bytes(found.paths[1].read_bytes())
    with pytest.raises(BadInputError, match=r"has changed; draw the set again"):
        image_set_from_path(path)
    value = json.loads(path.read_text())
    value["files"].pop()
    path.write_text(json.dumps(value))
    with pytest.raises(BadInputError, match="list of files was changed"):
        image_set_from_path(path)


def test_validation_images_are_refused_whatever_their_names(pets, tmp_path) -> None:
    for name, source in (("x/new_name.png", "cat/3.png"), ("y/0.png", "dog/1.png")):
        (tmp_path / "other" / name).parent.mkdir(parents=True)
        (tmp_path / "other" / name).write_bytes((pets / source).read_bytes())
    with pytest.raises(BadInputError, match="2 of 40 calibration images are also in the validation set other"):
        refuse_overlap(image_set_from_path(pets)[0], image_set_from_path(tmp_path / "other")[0])
    refuse_overlap(
        image_set_from_path(DIGITS / "calibration.json")[0], image_set_from_path(DIGITS / "validation.json")[0]
    )


def test_unreadable_files_are_replaced_and_named_until_they_are_too_many(pets) -> None:
    (pets / "cat" / "0.png").write_bytes(b"no picture")
    found, bad = image_set_from_path(pets)
    assert len(found.files) == 39
    assert [each.path.name for each in bad] == ["0.png"]
    for index in range(1, 8):
        (pets / "cat" / f"{index}.png").write_bytes(b"")
    with pytest.raises(BadInputError, match="8 of 40 images cannot be read; at most 5 % allowed"):
        image_set_from_path(pets)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 3}', "\x00"])
def test_what_is_no_manifest(tmp_path, text) -> None:
    (tmp_path / "set.json").write_text(text)
    with pytest.raises(
        BadInputError, match=r"not a readable image-set manifest .*\ngive a folder of images, a COCO file, or"
    ):
        image_set_from_path(tmp_path / "set.json")


def test_a_set_for_another_model_or_preprocessing_is_refused(pets) -> None:
    transform = Transform((Decode(), Pack(dtype="uint8")))
    found, _ = image_set_from_path(pets, 8)
    refuse_other_model(found, "resnet50", transform.hash)
    for key, value, said in (
        ("model", "digits", "drawn for model digits, not for resnet50"),
        ("transform_sha256", "0" * 64, "drawn for different preprocessing"),
    ):
        path = pets.parent / f"{key}.json"
        path.write_text(json.dumps(found.to_dict(pets.parent) | {key: value}))
        with pytest.raises(BadInputError, match=said):
            refuse_other_model(ImageSet.from_manifest(path), "resnet50", transform.hash)
