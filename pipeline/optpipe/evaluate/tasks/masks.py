"""Masks as a dossier keeps them: PNG files of class indices without filters, so that they inflate to their pixels.

Section 8.1 of docs/dossier-format.md. Pillow writes no gray PNG file without filters, which only a loop over pixels undoes.
"""

import struct
import zlib
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from optpipe.core.errors import BadInputError

MAX_PIXELS = 2**26
"""The largest mask that a dossier holds."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_HEAD, _GRAY = _SIGNATURE + b"\0\0\0\rIHDR", b"\x08\0\0\0\0"
"""How a PNG file begins, and its depth of 8 bits, gray, the only compression and filter method, and no interlacing."""
_SIDES = slice(16, 24)
"""Width and height."""


def encode_mask(mask: NDArray[np.uint8]) -> bytes:
    """A PNG file of class indices (height, width). Raises BadInputError for more than MAX_PIXELS."""
    if mask.size > MAX_PIXELS:
        raise BadInputError(
            f"a mask of {mask.size:,} pixels; at most {MAX_PIXELS:,} are judged",
            remedy="evaluate smaller images",
        )
    height, width = mask.shape
    rows = np.zeros((height, width + 1), np.uint8)  # each row begins with its filter, 0
    rows[:, 1:] = mask
    chunks = (
        (b"IHDR", struct.pack(">II", width, height) + _GRAY),
        (b"IDAT", zlib.compress(rows.tobytes())),
        (b"IEND", b""),
    )
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def decode_mask(data: bytes) -> NDArray[np.uint8]:
    """The class indices (height, width) of a PNG file of `encode_mask`.

    Raises BadInputError for another image, for bytes beside the pixels, and for more than MAX_PIXELS, before it is inflated.
    """
    width, height = measure_mask(data)
    if not 0 < width * height <= MAX_PIXELS:
        _refuse(f"has {width:,}×{height:,} pixels; at most {MAX_PIXELS:,}")
    size, stream = height * (width + 1), zlib.decompressobj()
    try:
        rows = stream.decompress(_join_data(data), size + 1)
    except zlib.error:
        _refuse("cannot be inflated")
    if len(rows) != size or not stream.eof or stream.unused_data:
        _refuse("has other data than its pixels")
    pixels = np.frombuffer(rows, np.uint8).reshape(height, width + 1)
    if pixels[:, 0].any():
        _refuse("has rows with a filter")
    return pixels[:, 1:]


def decode_pair(left: bytes, right: bytes) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Two masks of one sample. Raises BadInputError if they differ in size."""
    first, second = decode_mask(left), decode_mask(right)
    if first.shape != second.shape:
        raise BadInputError(
            f"the masks of a sample have different sizes, {first.shape} and {second.shape}"
        )
    return first, second


def measure_mask(data: bytes) -> tuple[int, int]:
    """Width and height, as a mask declares them. Raises BadInputError for bytes that are none."""
    if data[:16] != _HEAD or data[24:29] != _GRAY:
        _refuse("is not an 8-bit gray PNG file")
    width, height = struct.unpack(">II", data[_SIDES])
    return width, height


def _join_data(data: bytes) -> bytes:
    """The compressed data of all chunks, each of which has its checksum."""
    place, kinds, packed = len(_SIGNATURE), [], []
    while place < len(data):
        end = place + 8 + int.from_bytes(data[place : place + 4])
        if zlib.crc32(data[place + 4 : end]) != int.from_bytes(data[end : end + 4]):
            _refuse("has a chunk with another checksum")
        kinds.append(data[place + 4 : place + 8])
        packed.append(data[place + 8 : end])
        place = end + 4
    if kinds != [b"IHDR", *[b"IDAT"] * (len(kinds) - 2), b"IEND"] or packed[-1]:
        _refuse("has other chunks than its pixels")
    return b"".join(packed[1:])


def _refuse(what: str) -> NoReturn:
    raise BadInputError(f"a mask {what}")
