"""A pipe, a device or a huge file where a user names a file is refused at once, whatever reads it."""

import io
import os
import struct
import tomllib
import zlib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from optpipe.core.errors import BadInputError, require_existing, require_file
from optpipe.core.files import hash_file, read_user_bytes, read_user_text
from optpipe.core.toml import parse_toml
from optpipe.core.transform import Decode
from optpipe.evaluate.tasks.masks import decode_mask
from optpipe.models.inputs import images
from optpipe.models.inputs.image_set import (
    find_images,
    image_set_from_path,
    is_coco,
    read_image_size,
    read_mask,
)
from optpipe.models.inputs.task_data import hash_data
from optpipe.models.inputs.tensor_files import read_shapes
from optpipe.models.inputs.tensor_set import read_tensor_set
from optpipe.models.inputs.text_set import TextSet, text_set_from_path
from optpipe.models.sources.modules import state_dict_from_file
from optpipe.models.sources.onnx_file import onnx_from_file
from optpipe.models.sources.resolve import CardSource
from optpipe.models.sources.text_tokenizer import read_tokenizer_source
from optpipe.signoff.policy import policy_from_file
from optpipe.sweep.matrix import matrix_from_file
from optpipe.workspace.seal import require_key
from optpipe.workspace.timestamp import _read_roots

DOCUMENTS: dict[str, list[Any]] = {
    "given.toml": [
        read_user_bytes,
        policy_from_file,
        matrix_from_file,
        lambda path: CardSource(path).card,
    ],
    "given.json": [
        image_set_from_path,
        is_coco,
        TextSet.from_manifest,
        hash_data,
        lambda path: read_tokenizer_source(str(path), Path("/")),
    ],
    "given.jsonl": [text_set_from_path],
    "given.npz": [read_shapes, lambda path: read_tensor_set(path, ())],
    "given.safetensors": [state_dict_from_file],
    "given.pt": [state_dict_from_file],
    "given.onnx": [onnx_from_file],
    "given.pem": [require_key, *([_read_roots] if find_spec("rfc3161_client") else [])],
    "given.png": [read_mask, lambda path: images.decode_image(path, Decode())],
}
READERS = [(name, read) for name, reads in DOCUMENTS.items() for read in reads]

REFUSED = r"is a pipe|is too large|is not a zip file|expected the path of"


@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
@pytest.mark.parametrize(("name", "read"), READERS)
def test_no_reader_waits_for_a_special_file(tmp_path, name, read, kind):
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(2**40)
    with pytest.raises(BadInputError, match=REFUSED) as refused:
        read(path)
    assert len(str(refused.value).splitlines()) <= 2


@pytest.mark.parametrize("read", [hash_file, find_images, image_set_from_path, require_file])
def test_a_pipe_is_not_waited_for_where_size_does_not_matter(tmp_path, read):
    os.mkfifo(tmp_path / "given")
    with pytest.raises(BadInputError, match="is a pipe"):
        read(tmp_path / "given")


def test_nested_lines_and_documents_are_refused(tmp_path):
    path = tmp_path / "given.json"
    path.write_text("[" * 200_000)
    for read in (text_set_from_path, TextSet.from_manifest, image_set_from_path):
        with pytest.raises(BadInputError):
            read(path)


def make_declared_png(width, height):
    """A gray PNG of a few hundred bytes that declares its size and holds 1,000 bytes."""
    parts = b"\x89PNG\r\n\x1a\n"
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    for kind, content in (
        (b"IHDR", head),
        (b"IDAT", zlib.compress(bytes(1000))),
        (b"IEND", b""),
    ):
        parts += struct.pack(">I", len(content)) + kind + content
        parts += struct.pack(">I", zlib.crc32(kind + content))
    return parts


@pytest.mark.parametrize("sides", [(12_000, 12_000), (100_000, 100_000), (2**31 - 1, 2**31 - 1)])
def test_declared_pixels_are_bounded_before_decoding(tmp_path, sides):
    transform: Any = SimpleNamespace(decode=Decode())
    path, data = tmp_path / "bomb.png", make_declared_png(*sides)
    path.write_bytes(data)
    readers = (
        lambda: images.decode_image(path, Decode()),
        lambda: images.decode_image(data, Decode()),
        lambda: read_image_size(path, transform),
        lambda: read_mask(path),
        lambda: decode_mask(data),
    )
    for read in readers:
        with pytest.raises(BadInputError, match=r"too many pixels|pixels; at most") as refused:
            read()
        assert len(str(refused.value).splitlines()) == 1
    assert "too many pixels" in images.find_read_error(path)


def make_scanned_jpeg(side, scans):
    """A progressive JPEG that repeats its last scan."""
    target = io.BytesIO()
    Image.new("L", (64, 64)).save(target, "JPEG", progressive=True)
    data = target.getvalue()
    head, last = data.index(b"\xff\xc2"), data.rindex(b"\xff\xda")
    sides = struct.pack(">HH", side, side)
    return data[: head + 5] + sides + data[head + 9 : last] + data[last:-2] * scans + data[-2:]


@pytest.mark.parametrize(("side", "scans", "refused"), [(8000, 5000, True), (64, 50, False)])
def test_scans_of_a_picture_are_bounded_before_decoding(tmp_path, side, scans, refused):
    path = tmp_path / "picture.jpg"
    path.write_bytes(make_scanned_jpeg(side, scans))
    found = images.find_read_error(path)
    assert bool(found and "scans" in found) == refused, found


def test_the_largest_pictures_are_decoded_one_at_a_time(tmp_path, monkeypatch):
    """Small ones need no turn, and large ones give the same pixels."""
    path = tmp_path / "small.png"
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(path)
    small = images.decode_image(path, Decode())
    monkeypatch.setattr(images, "LARGE_PIXELS", 8)
    assert np.array_equal(images.decode_image(path, Decode()), small)


def test_formats_that_start_other_programs_are_not_tried(tmp_path):
    target = io.BytesIO()
    Image.new("RGB", (8, 8)).save(target, "EPS")
    (tmp_path / "picture.jpg").write_bytes(target.getvalue())
    assert "not an image" in images.find_read_error(tmp_path / "picture.jpg")


def test_a_pipe_and_a_folder_are_named_before_anything_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "net.onnx").mkdir()
    require_existing(tmp_path, "data")
    with pytest.raises(BadInputError, match=r"--data .*pipe: is a pipe"):
        require_existing(tmp_path / "pipe", "data")
    with pytest.raises(BadInputError, match=r"net\.onnx: is a folder; give a file"):
        require_file(tmp_path / "net.onnx")
    with pytest.raises(BadInputError, match=r"net\.onnx: is a folder; give a file"):
        matrix_from_file(tmp_path / "net.onnx")


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    path = tmp_path / "card.toml"
    path.write_bytes("name = 'a'\r\n".encode("utf-8-sig"))
    assert read_user_text(path) == "name = 'a'\n"


@pytest.mark.parametrize("key", [".".join("a" * 130_000), "[" + " . ".join(["'a b'"] * 99) + "]"])
def test_a_key_of_many_parts_is_refused_before_it_is_split(key: str) -> None:
    with pytest.raises(tomllib.TOMLDecodeError, match="more than 64 parts"):
        parse_toml(key if key.startswith("[") else f"{key} = 1")


@pytest.mark.parametrize(
    "text", [".".join("a" * 60) + " = 1", f"x = [{'0.5, ' * 999}]", "a" * 9999 + " = 1"]
)
def test_other_keys_and_values_are_taken(text: str) -> None:
    assert parse_toml(text)
