"""Data count by their content: what changes a sample or its annotations changes the hash, and moving them does not."""

import shutil

from tests.unit.models.inputs.test_annotations import write_coco

from optpipe.models.inputs.task_data import hash_data


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
