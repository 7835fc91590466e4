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
from optpipe.evaluate.tasks import segmentation
from optpipe.evaluate.tasks.segmentation import encode_mask
from optpipe.signoff.verify import check_dossier

COUNT, SHAPE = 20, (6, 8)
POLICY = 'schema = 1\n[accuracy]\nminimum_agreement = "1 %"\n'


@pytest.fixture(scope="module")
def honest(make_workspace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("masks")
    workspace = make_workspace(folder / "workspace")
    rng = np.random.default_rng(1)
    masks = [encode_mask(rng.integers(0, 4, SHAPE).astype(np.uint8)) for _ in range(2 * COUNT)]
    rows = [masks[:COUNT], masks[COUNT:], masks[COUNT:]]
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
    masks = table[column].to_list()
    masks[3] = FORGED[name](masks[3])
    table.with_columns(pl.Series(column, masks, table[column].dtype)).write_parquet(path)
    seal_anew(folder)
    (problem, *_) = check_dossier(folder).problems
    assert "mask" in problem
    assert examine(folder)[0].differs


def test_a_mask_that_no_dossier_holds_is_refused_when_it_is_made(monkeypatch):
    monkeypatch.setattr(segmentation, "MAX_PIXELS", 47)
    with pytest.raises(BadInputError, match="48 pixels; at most 47"):
        encode_mask(np.zeros(SHAPE, np.uint8))
