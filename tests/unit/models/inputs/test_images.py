import io

import numpy as np
import pytest
from PIL import Image

from optpipe.core.errors import BadInputError
from optpipe.core.transform import (
    CenterCrop,
    Decode,
    Pack,
    Rescale,
    Resize,
    Transform,
)
from optpipe.models.inputs.images import (
    decode_image,
    find_images,
    find_readable_images,
    format_unreadable,
    preprocess_batches,
    preprocess_file,
)
from optpipe.models.inputs.synthetic import make_synthetic_image

SMALL = Transform((Decode(), Resize((40,)), CenterCrop(32, 32), Rescale(), Pack()))


@pytest.fixture
def folder(tmp_path):
    for name in ("2.jpg", "10.jpg", "1.png"):
        Image.fromarray(make_synthetic_image(48, 64, seed=len(name))).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no picture")
    return tmp_path


def test_pictures_come_in_natural_order_and_other_files_do_not_come(folder):
    assert [path.name for path in find_images(folder).paths] == ["1.png", "2.jpg", "10.jpg"]


def test_linked_folders_are_searched_too_and_a_loop_ends(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("linked")
    (elsewhere / "cats").symlink_to(folder)
    (elsewhere / "again").symlink_to(elsewhere)
    assert [path.name for path in find_images(elsewhere).paths] == ["1.png", "2.jpg", "10.jpg"]


def test_a_limit_says_what_it_left_out(folder):
    found = find_images(folder, limit=2)
    assert ([path.name for path in found.paths], found.left_out) == (["1.png", "2.jpg"], 1)
    assert [path.name for path in find_images(folder, limit=9).paths] == ["1.png", "2.jpg", "10.jpg"]


def test_unreadable_files_are_named_with_their_reasons(folder):
    (folder / "3.jpg").write_bytes((folder / "2.jpg").read_bytes()[:-400])
    (folder / "4.png").write_bytes(b"")
    found = find_readable_images(folder)
    assert [bad.path.name for bad in found.unreadable] == ["3.jpg", "4.png"]
    assert "truncated" in format_unreadable(found.unreadable)
    assert format_unreadable(found.unreadable, shown=1).endswith("and 1 more")
    assert len(found.paths) == 3


def test_too_many_unreadable_files_end_it(folder):
    (folder / "3.jpg").write_bytes(b"not a jpeg")
    with pytest.raises(BadInputError, match=r"1 of 4 images cannot be read; at most 0 allowed.*\n3.jpg \(not an image"):
        find_readable_images(folder, max_unreadable=0)


def test_a_folder_where_nothing_can_be_read_is_bad_input(tmp_path):
    (tmp_path / "3.jpg").write_bytes(b"not a jpeg")
    with pytest.raises(BadInputError, match="1 of 1 images cannot be read"):
        find_readable_images(tmp_path)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_bad_input(folder, limit):
    with pytest.raises(BadInputError, match="at least 1"):
        find_images(folder, limit=limit)


def test_no_folder_a_file_or_an_empty_folder_is_bad_input(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for path, said in (
        (folder / "absent", "no such"),
        (folder / "2.jpg", "is a file"),
        (tmp_path / "empty", "no images"),
    ):
        with pytest.raises(BadInputError, match=said):
            find_images(path)


def test_a_truncated_file_is_named_when_decoded(folder):
    (folder / "3.jpg").write_bytes((folder / "2.jpg").read_bytes()[:-400])
    with pytest.raises(BadInputError, match=r"3\.jpg: cannot be decoded: .*truncated"):
        decode_image(folder / "3.jpg", Decode())


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


def test_channels_are_those_of_the_step(folder):
    rgb = decode_image(folder / "1.png", Decode())
    assert np.array_equal(decode_image(folder / "1.png", Decode("BGR")), rgb[:, :, ::-1])
    assert decode_image(folder / "1.png", Decode("L")).shape == (48, 64, 1)


def test_batches_hold_every_picture_in_order(folder):
    paths = find_images(folder).paths
    made = list(preprocess_batches(paths, SMALL, batch_size=2, threads=2))
    assert [batch.shape for batch in made] == [(2, 3, 32, 32), (1, 3, 32, 32)]
    assert made[0].dtype == np.float32
    assert np.array_equal(np.concatenate(made), np.stack([preprocess_file(path, SMALL) for path in paths]))


def test_batches_need_one_size_and_a_positive_count(folder):
    with pytest.raises(BadInputError, match="different sizes"):
        next(preprocess_batches(find_images(folder).paths, Transform((Decode(), Resize((40,)), Pack())), 2))
    with pytest.raises(BadInputError, match="at least 1"):
        next(preprocess_batches(find_images(folder).paths, SMALL, 0))
