"""Pictures, sets of pictures and annotated boxes: found, decoded, drawn, and refused."""

import io
import json
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from tests.fakes.odd_images import make_synthetic_image

from optpipe.core.errors import BadInputError
from optpipe.core.transform import CenterCrop, Decode, Pack, Rescale, Resize, Transform
from optpipe.models.inputs.image_set import (
    ImageSet,
    find_images,
    image_set_from_coco,
    image_set_from_path,
    is_coco,
    read_boxes,
    read_image_size,
)
from optpipe.models.inputs.images import decode_image, preprocess_batches, preprocess_file
from optpipe.models.inputs.sample_set import refuse_overlap
from optpipe.models.inputs.task_data import hash_data
from optpipe.workspace.places import find_shipped_folder

SMALL = Transform((Decode(), Resize((40,)), CenterCrop(32, 32), Rescale(), Pack()))


@pytest.fixture
def folder(tmp_path):
    for name in ("2.jpg", "10.jpg", "1.png"):
        Image.fromarray(make_synthetic_image(48, 64, seed=len(name))).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no picture")
    return tmp_path


def test_pictures_come_in_natural_order_from_linked_folders_too(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("linked")
    (elsewhere / "cats").symlink_to(folder)
    (elsewhere / "again").symlink_to(elsewhere)
    for place in (folder, elsewhere):
        assert [path.name for path in find_images(place)] == ["1.png", "2.jpg", "10.jpg"]


def test_no_folder_a_file_or_an_empty_folder_is_bad_input(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for path, why in (
        (folder / "none", "no such"),
        (folder / "2.jpg", "is a file"),
        (tmp_path / "empty", "no images"),
    ):
        with pytest.raises(BadInputError, match=why):
            find_images(path)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16"])
def test_every_kind_of_picture_becomes_rgb_as_pillow_converts_it(mode):
    picture = Image.fromarray(make_synthetic_image(20, 30))
    odd = (
        Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30))
        if mode == "I;16"
        else picture.convert(mode)
    )
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
    paths = find_images(folder)
    made = list(preprocess_batches(paths, SMALL, batch_size=2, threads=2))
    assert [batch.shape for batch in made] == [(2, 3, 32, 32), (1, 3, 32, 32)]
    assert made[0].dtype == np.float32
    assert np.array_equal(
        np.concatenate(made), np.stack([preprocess_file(path, SMALL) for path in paths])
    )


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


def test_a_manifest_that_names_a_picture_twice_is_refused(pets) -> None:
    found, _ = image_set_from_path(pets, 8)
    document = found.to_dict(pets.parent)
    document["files"].append(document["files"][0])
    path = pets.parent / "set.json"
    path.write_text(json.dumps(document))
    with pytest.raises(BadInputError, match="occurs twice"):
        ImageSet.from_manifest(path)


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
    with pytest.raises(
        BadInputError, match="2 of 40 calibration images are also in the validation set other"
    ):
        refuse_overlap(image_set_from_path(pets)[0], image_set_from_path(tmp_path / "other")[0])
    sets = (
        image_set_from_path(DIGITS / name)[0] for name in ("calibration.json", "validation.json")
    )
    refuse_overlap(*sets)


def test_unreadable_files_are_replaced_and_named_until_they_are_too_many(pets) -> None:
    (pets / "cat" / "0.png").write_bytes(b"no picture")
    found, bad = image_set_from_path(pets)
    assert len(found.files) == 39
    assert [path.name for path, _ in bad] == ["0.png"]
    for index in range(1, 8):
        (pets / "cat" / f"{index}.png").write_bytes(b"")
    with pytest.raises(BadInputError, match="8 of 40 images cannot be read; at most 5% allowed"):
        image_set_from_path(pets)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 3}', "\x00"])
def test_what_is_no_manifest(tmp_path, text) -> None:
    (tmp_path / "set.json").write_text(text)
    with pytest.raises(
        BadInputError,
        match=r"not a readable image-set manifest .*\ngive a folder of images, a COCO file, or",
    ):
        image_set_from_path(tmp_path / "set.json")


TRANSFORM = Transform((Decode(), Resize((32, 32), fit="exact"), Rescale(), Pack()))
LABELS = ("cat", "dog")


def write_coco(folder, boxes, names=("cat", "dog")):
    (folder / "images").mkdir()
    for index in range(2):
        Image.fromarray(np.full((20, 40, 3), index, np.uint8)).save(
            folder / "images" / f"{index}.png"
        )
    document = {
        "images": [
            {"id": index, "file_name": f"{index}.png", "width": 40, "height": 20}
            for index in range(2)
        ],
        "categories": [{"id": index + 5, "name": name} for index, name in enumerate(names)],
        "annotations": [
            {"id": 1 + n, "image_id": 0, "category_id": 6, "bbox": box}
            for n, box in enumerate(boxes)
        ],
    }
    (folder / "annotations.json").write_text(json.dumps(document))
    return image_set_from_path(folder)[0]


def test_a_coco_file_is_a_set(tmp_path) -> None:
    write_coco(tmp_path, [[1, 2, 10, 10]])
    path = tmp_path / "annotations.json"
    assert is_coco(path)
    samples = image_set_from_coco(path, None, 0)
    assert [each.path for each in samples.files] == ["0.png", "1.png"]
    assert len(read_boxes(samples, TRANSFORM, LABELS, 2)[0]) == 1
    (tmp_path / "images" / "1.png").unlink()
    with pytest.raises(BadInputError, match=r"1 of its 2 images are missing \(such as .*1.png\)"):
        image_set_from_coco(path, None, 0)
    (tmp_path / "images" / "1.png").write_bytes(b"")
    with pytest.raises(BadInputError, match=r"1.png: cannot be decoded: not an image format"):
        image_set_from_coco(path, None, 0)


@pytest.mark.parametrize(
    ("boxes", "names", "message"),
    [
        (
            [[30, 2, 20, 10]],
            LABELS,
            r"box \(30, 2, 20, 10\) is empty or outside the image of 40×20 pixels",
        ),
        ([[1, 2, 0, 10]], LABELS, "is empty or outside"),
        ([[float("nan"), 2, 3, 10]], LABELS, "is empty or outside"),
        ([[1, 2, 10, 10]], ("cat", "horse"), "category 'horse' is not one of the model's classes"),
        ([], LABELS, "none of the 2 images has an annotated box"),
        ([["a", 2, 3, 4]], LABELS, "cannot be read as COCO annotations"),
    ],
)
def test_annotations_that_do_not_fit_are_refused(tmp_path, boxes, names, message) -> None:
    samples = write_coco(tmp_path, boxes, names)
    with pytest.raises(BadInputError, match=message):
        read_boxes(samples, TRANSFORM, LABELS, 2)


@pytest.mark.parametrize("whole", [True, False], ids=["a folder", "a COCO file"])
def test_images_of_one_name_in_two_folders_have_their_own_boxes(tmp_path, whole) -> None:
    write_coco(tmp_path, [])
    names = ["left/0.png", "right/0.png"]
    for place, name in enumerate(names):
        (tmp_path / "images" / name).parent.mkdir()
        (tmp_path / "images" / f"{place}.png").rename(tmp_path / "images" / name)
    path = tmp_path / "annotations.json"
    document = json.loads(path.read_text())
    document["images"] = [{"id": place, "file_name": name} for place, name in enumerate(names)]
    document["annotations"] = [
        {"id": place, "image_id": place, "category_id": 5 + place, "bbox": [place, 2, 10, 10]}
        for place in range(2)
    ]
    path.write_text(json.dumps(document))
    samples = image_set_from_path(tmp_path)[0] if whole else image_set_from_coco(path, None, 0)
    found = read_boxes(samples, TRANSFORM, LABELS, 2)
    assert [[(box[0], box[4]) for box in boxes] for boxes in found] == [[(0, 0)], [(1, 1)]]


def test_annotations_of_an_image_that_is_not_listed_are_refused(tmp_path) -> None:
    """An image whose id is shifted by one would have lost its boxes without a word."""
    samples = write_coco(tmp_path, [[1, 2, 10, 10]])
    path = tmp_path / "annotations.json"
    document = json.loads(path.read_text())
    document["annotations"].append(
        {"id": 9, "image_id": 2, "category_id": 5, "bbox": [1, 2, 10, 10]}
    )
    path.write_text(json.dumps(document))
    with pytest.raises(BadInputError, match="annotations of the image id 2,"):
        read_boxes(samples, TRANSFORM, LABELS, 2)


DOUBLED = {
    "an id of two images": ("images", {"id": 0}, "lists the id 0 of images twice"),
    "a file twice": ("images", {"file_name": "0.png"}, "lists the image 0.png twice"),
    "an id of two categories": ("categories", {"id": 5}, "lists the id 5 of categories twice"),
}


@pytest.mark.parametrize(("part", "change", "said"), DOUBLED.values(), ids=DOUBLED)
def test_what_a_coco_file_lists_twice_is_refused(tmp_path, part, change, said) -> None:
    samples, path = write_coco(tmp_path, [[1, 2, 10, 10]]), tmp_path / "annotations.json"
    document = json.loads(path.read_text())
    document[part][1] |= change
    path.write_text(json.dumps(document))
    with pytest.raises(BadInputError, match=said):
        read_boxes(samples, TRANSFORM, LABELS, 2)


def test_categories_are_never_guessed_where_they_do_not_fit(tmp_path) -> None:
    samples = write_coco(tmp_path, [[1, 2, 10, 10]])
    with pytest.raises(BadInputError, match="2 categories, but the model has 80 classes\nname its"):
        read_boxes(samples, TRANSFORM, (), 80)
    with pytest.raises(BadInputError, match="category 'dog' names several"):
        read_boxes(samples, TRANSFORM, ("dog", "cat", "dog"), 3)
    assert read_boxes(samples, TRANSFORM, (), 2)[0][0][4] == 1


def test_crowds_alone_are_nothing_to_judge(tmp_path) -> None:
    samples = write_coco(tmp_path, [[1, 2, 10, 10]])
    path = tmp_path / "annotations.json"
    path.write_text(path.read_text().replace('"bbox"', '"iscrowd": 1, "bbox"'))
    with pytest.raises(
        BadInputError, match="none of the 2 images has an annotated box other than crowds"
    ):
        read_boxes(samples, TRANSFORM, LABELS, 2)


@pytest.mark.parametrize(("size", "fits"), [((40, 20), True), ((20, 40), True), ((80, 40), False)])
def test_annotations_of_another_size_are_refused_but_not_of_a_turned_image(
    tmp_path, size, fits
) -> None:
    samples, path = write_coco(tmp_path, [[1, 2, 10, 10]]), tmp_path / "annotations.json"
    document = json.loads(path.read_text())
    document["images"][1] |= {"width": size[0], "height": size[1]}
    path.write_text(json.dumps(document))
    if fits:
        assert read_boxes(samples, TRANSFORM, LABELS, 2)
        return
    with pytest.raises(
        BadInputError, match=r"1\.png is 80×40 pixels there, but the image has 40×20"
    ):
        read_boxes(samples, TRANSFORM, LABELS, 2)


@pytest.mark.parametrize("name", ["turned.jpg", "turned.png", "turned.tif"])
@pytest.mark.parametrize("exif", [False, True])
def test_sizes_are_those_of_the_decoded_image(tmp_path, name, exif) -> None:
    said = Image.Exif()
    said[0x0112] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / name, exif=said)
    transform = replace(TRANSFORM, steps=(Decode(exif=exif), *TRANSFORM.steps[1:]))
    assert (
        read_image_size(tmp_path / name, transform)
        == decode_image(tmp_path / name, transform.decode).shape[:2]
    )


def test_yolo_labels(tmp_path) -> None:
    samples = write_coco(tmp_path, [])
    (tmp_path / "annotations.json").unlink()
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "0.txt").write_text("1 0.5 0.5 0.25 0.5\n")
    first, second = read_boxes(samples, TRANSFORM, LABELS, 2)
    assert first == [(15, 5, 10, 10, 1, 100, False)]
    assert second == []
    for text, said in (
        ("3 0.5 0.5 0.25 0.5", "class 3, but the model has 2 classes"),
        ("cat 1 2", "line 1: expected"),
    ):
        (tmp_path / "labels" / "0.txt").write_text(text)
        with pytest.raises(BadInputError, match=said):
            read_boxes(samples, TRANSFORM, LABELS, 2)


def test_a_folder_and_a_coco_file_count_by_all_that_they_hold(tmp_path) -> None:
    folder = tmp_path / "first"
    folder.mkdir()
    write_coco(folder, [[1, 2, 10, 10]])
    moved = shutil.copytree(folder, tmp_path / "second")
    for name in (".", "annotations.json"):
        before = hash_data(folder / name)
        assert hash_data(moved / name) == before
        for file in ("annotations.json", "images/1.png"):
            content = (moved / file).read_bytes()
            (moved / file).write_bytes(content + b" ")
            assert hash_data(moved / name) != before
            (moved / file).write_bytes(content)
