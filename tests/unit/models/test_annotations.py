"""Boxes from COCO and YOLO files; data count by their content."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from optpipe.core.errors import BadInputError
from optpipe.core.transform import Decode, Pack, Rescale, Resize, Transform
from optpipe.models.inputs.annotations import image_set_from_coco, is_coco, read_boxes, read_image_size
from optpipe.models.inputs.image_set import image_set_from_path
from optpipe.models.inputs.images import decode_image
from optpipe.models.inputs.task_data import hash_data

TRANSFORM = Transform((Decode(), Resize((32, 32), fit="exact"), Rescale(), Pack()))
LABELS = ("cat", "dog")


def write_coco(folder, boxes, names=("cat", "dog")):
    (folder / "images").mkdir()
    for index in range(2):
        Image.fromarray(np.full((20, 40, 3), index, np.uint8)).save(folder / "images" / f"{index}.png")
    document = {
        "images": [{"id": index, "file_name": f"{index}.png", "width": 40, "height": 20} for index in range(2)],
        "categories": [{"id": index + 5, "name": name} for index, name in enumerate(names)],
        "annotations": [{"id": 1 + n, "image_id": 0, "category_id": 6, "bbox": box} for n, box in enumerate(boxes)],
    }
    (folder / "annotations.json").write_text(json.dumps(document))
    return image_set_from_path(folder)[0]


def test_coco_by_name(tmp_path) -> None:
    samples = write_coco(tmp_path, [[1, 2, 10, 10]])
    first, second = read_boxes(samples, TRANSFORM, LABELS, 2)
    assert [(one.box, one.label, one.area) for one in first] == [((1, 2, 10, 10), 1, 100)]
    assert second == []


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
        ([[30, 2, 20, 10]], LABELS, r"box \(30, 2, 20, 10\) is empty or outside the image of 40×20 pixels"),
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


def test_crowds_alone_are_nothing_to_judge(tmp_path) -> None:
    samples = write_coco(tmp_path, [[1, 2, 10, 10]])
    path = tmp_path / "annotations.json"
    path.write_text(path.read_text().replace('"bbox"', '"iscrowd": 1, "bbox"'))
    with pytest.raises(BadInputError, match="none of the 2 images has an annotated box other than crowds"):
        read_boxes(samples, TRANSFORM, LABELS, 2)


@pytest.mark.parametrize(("size", "fits"), [((40, 20), True), ((20, 40), True), ((80, 40), False)])
def test_annotations_of_another_size_are_refused_but_not_of_a_turned_image(tmp_path, size, fits) -> None:
    samples, path = write_coco(tmp_path, [[1, 2, 10, 10]]), tmp_path / "annotations.json"
    document = json.loads(path.read_text())
    document["images"][1] |= {"width": size[0], "height": size[1]}
    path.write_text(json.dumps(document))
    if fits:
        assert read_boxes(samples, TRANSFORM, LABELS, 2)
        return
    with pytest.raises(BadInputError, match=r"1\.png is 80×40 pixels there, but the image has 40×20"):
        read_boxes(samples, TRANSFORM, LABELS, 2)


@pytest.mark.parametrize("name", ["turned.jpg", "turned.png", "turned.tif"])
@pytest.mark.parametrize("exif", [False, True])
def test_sizes_are_those_of_the_decoded_image(tmp_path, name, exif) -> None:
    said = Image.Exif()
    said[0x0112] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / name, exif=said)
    transform = replace(TRANSFORM, steps=(Decode(exif=exif), *TRANSFORM.steps[1:]))
    assert read_image_size(tmp_path / name, transform) == decode_image(tmp_path / name, transform.decode).shape[:2]


def test_yolo_labels(tmp_path) -> None:
    samples = write_coco(tmp_path, [])
    (tmp_path / "annotations.json").unlink()
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "0.txt").write_text("1 0.5 0.5 0.25 0.5\n")
    first, second = read_boxes(samples, TRANSFORM, LABELS, 2)
    assert [(one.box, one.label) for one in first] == [((15, 5, 10, 10), 1)]
    assert second == []
    for text, message in (
        ("3 0.5 0.5 0.25 0.5", "class 3, but the model has 2 classes"),
        ("cat 1 2", "line 1: expected"),
    ):
        (tmp_path / "labels" / "0.txt").write_text(text)
        with pytest.raises(BadInputError, match=message):
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
