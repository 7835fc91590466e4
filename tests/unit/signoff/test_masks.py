"""Masks of predictions that are no masks, hide bytes, or are bombs: both verifiers refuse each, whatever pixels it has."""

import io
import shutil
import struct
import zlib

import numpy as np
import polars as pl
import pytest
from PIL import Image, PngImagePlugin
from tests.fakes.dossiers import examine, seal_anew
from tests.tiers import leave_to_slow_tier

from optpipe.core.errors import BadInputError
from optpipe.evaluate.tasks import masks
from optpipe.evaluate.tasks.masks import decode_mask, encode_mask
from optpipe.signoff.verify import check_dossier

COUNT, SHAPE = 20, (6, 8)
POLICY = 'schema = 1\n[accuracy]\nminimum_agreement = "1 %"\n'


@pytest.fixture(scope="module")
def honest(make_workspace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("masks")
    workspace = make_workspace(folder / "workspace")
    rng = np.random.default_rng(1)
    drawn = [encode_mask(rng.integers(0, 4, SHAPE).astype(np.uint8)) for _ in range(2 * COUNT)]
    rows = [drawn[:COUNT], drawn[COUNT:], drawn[COUNT:]]
    workspace.evaluate(workspace.artifact(), task="segmentation", rows=rows)
    _, dossier = workspace.sign_off(POLICY, folder / "one")
    assert check_dossier(dossier).problems == ()
    assert examine(dossier)[0].differs == []
    return dossier


def read_pixels(mask):
    return Image.open(io.BytesIO(mask))


def save_as(kind, mode=None, **options):
    def forge(mask):
        target, image = io.BytesIO(), read_pixels(mask)
        (image if mode is None else image.convert(mode)).save(target, kind, **options)
        return target.getvalue()

    return forge


def add_text(mask):
    text = PngImagePlugin.PngInfo()
    text.add_text("note", "x" * 99)
    return save_as("PNG", pnginfo=text)(mask)


def make_chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def write_png(width, height, data, head=b"\x08\0\0\0\0"):
    parts = (b"IHDR", struct.pack(">II", width, height) + head), (b"IDAT", data), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(make_chunk(*part) for part in parts)


def list_rows(mask):
    pixels = np.asarray(read_pixels(mask))
    return b"".join(b"\0" + row.tobytes() for row in pixels)


def declare_more(mask):
    return write_png(2**16, 2**16, zlib.compress(list_rows(mask)))


def inflate_to_more(mask):
    return write_png(SHAPE[1], SHAPE[0], zlib.compress(list_rows(mask) + bytes(2**26), 9))


def filter_rows(mask):
    """Each row as its differences from the row above."""
    pixels = np.asarray(read_pixels(mask))
    lines = np.diff(pixels, axis=0, prepend=np.zeros((1, SHAPE[1]), np.uint8))
    return write_png(
        SHAPE[1], SHAPE[0], zlib.compress(b"".join(b"\2" + line.tobytes() for line in lines))
    )


def damage_checksum(mask):
    return mask[:-20] + bytes([mask[-20] ^ 1]) + mask[-19:]


def transpose(mask):
    return encode_mask(np.asarray(read_pixels(mask)).T)


def keep_one_row(mask):
    """NumPy would compare it with every row."""
    return encode_mask(np.asarray(read_pixels(mask))[:1])


FORGED = {
    "JPEG": save_as("JPEG"),
    "colors": save_as("PNG", "RGB"),
    "palette": save_as("PNG", "P"),
    "16 bits": save_as("PNG", "I;16"),
    "one bit": save_as("PNG", "1"),
    "GIF": save_as("GIF"),
    "a text inside": add_text,
    "bytes behind it": lambda mask: mask + b"<script>",
    "another checksum": damage_checksum,
    "cut off": lambda mask: mask[:-13],
    "nothing": lambda _: b"",
    "no data": lambda _: write_png(SHAPE[1], SHAPE[0], b""),
    "no stream": lambda _: write_png(SHAPE[1], SHAPE[0], b"abc"),
    "fewer pixels": lambda mask: write_png(8, 6, zlib.compress(list_rows(mask)[:-1])),
    "data behind the stream": lambda mask: write_png(8, 6, zlib.compress(list_rows(mask)) + b"x"),
    "interlaced": lambda mask: write_png(8, 6, zlib.compress(list_rows(mask)), b"\x08\0\0\0\1"),
    "no pixel": lambda _: write_png(0, 6, zlib.compress(bytes(6))),
    "declares 4 billion pixels": declare_more,
    "inflates to 64 MiB": inflate_to_more,
    "rows with a filter": filter_rows,
    "transposed": transpose,
    "one row": keep_one_row,
}


@pytest.mark.parametrize(
    "name", leave_to_slow_tier(FORGED, but=("JPEG", "transposed", "declares 4 billion pixels"))
)
@pytest.mark.parametrize("column", ["truth", "source:prediction"])
def test_what_is_no_mask_is_refused_by_both_verifiers(honest, tmp_path, name, column):
    folder = shutil.copytree(honest, tmp_path / "one")
    (path,) = folder.glob("runs/*/predictions.parquet")
    table = pl.read_parquet(path)
    values = table[column].to_list()
    values[3] = FORGED[name](values[3])
    table.with_columns(pl.Series(column, values, table[column].dtype)).write_parquet(path)
    seal_anew(folder)
    (problem, *_) = check_dossier(folder).problems
    assert "mask" in problem
    assert examine(folder)[0].differs


def test_the_pixels_of_all_masks_are_bounded_before_one_is_inflated(honest, tmp_path, monkeypatch):
    """Each mask is allowed by itself, and inflates to a thousand times its bytes."""
    side = 2**13
    packed = zlib.compressobj(9)
    data = b"".join(packed.compress(bytes(side + 1)) for _ in range(side)) + packed.flush()
    largest = write_png(side, side, data)
    folder = shutil.copytree(honest, tmp_path / "one")
    (path,) = folder.glob("runs/*/predictions.parquet")
    pl.read_parquet(path).with_columns(
        pl.when(pl.col(pl.Binary).is_not_null()).then(pl.lit(largest)).name.keep()
    ).write_parquet(path)
    seal_anew(folder)
    monkeypatch.setattr(
        zlib, "decompressobj", None
    )  # both verifiers refuse by what the masks declare
    (problem, *_) = check_dossier(folder).problems
    assert "masks have 4,026,531,840 pixels together; at most 1,073,741,824" in problem
    assert any("too large" in each for each in examine(folder)[0].differs)


def test_masks_of_every_shape_are_read_as_they_were_written():
    rng = np.random.default_rng(0)
    for shape in ((1, 1), (1, 7), (7, 1), (31, 17)):
        mask = rng.integers(0, 256, shape).astype(np.uint8)
        assert np.array_equal(decode_mask(encode_mask(mask)), mask)
        assert np.array_equal(np.asarray(read_pixels(encode_mask(mask))), mask)


def test_a_mask_that_no_dossier_holds_is_refused_when_it_is_made(monkeypatch):
    monkeypatch.setattr(masks, "MAX_PIXELS", 47)
    with pytest.raises(BadInputError, match="48 pixels; at most 47"):
        encode_mask(np.zeros(SHAPE, np.uint8))
