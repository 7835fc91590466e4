"""Made-up photographs, and image files that break pipelines."""

import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from optpipe.models.inputs.samples import make_photograph_noise


def make_synthetic_image(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """An 8-bit RGB image (height, width, 3) with a photograph's spectrum and edges of flat shapes."""
    random = np.random.default_rng(seed)
    levels = 127 + 48 * make_photograph_noise(random, height, width, 3)
    rows, columns = np.ogrid[:height, :width]
    for _ in range(6):
        center, radius = (
            random.uniform(0, 1, 2) * (height, width),
            random.uniform(0.05, 0.25, 2) * (height, width),
        )
        inside = ((rows - center[0]) / max(radius[0], 1)) ** 2 + (
            (columns - center[1]) / max(radius[1], 1)
        ) ** 2 < 1
        levels[inside] = 0.4 * levels[inside] + 0.6 * random.uniform(0, 255, 3)
    return np.ascontiguousarray(np.clip(levels, 0, 255).astype(np.uint8))


_ORIENTATION = 0x0112


def make_edge_case_files() -> Iterator[tuple[str, bytes]]:
    """Names and contents; every decoder must refuse `truncated.jpg`."""
    pixels = make_synthetic_image(231, 309, seed=5)
    image = Image.fromarray(pixels)
    gray = image.convert("L")
    yield "baseline 4:2:0.jpg", _encode(image, "JPEG", quality=90)
    yield "baseline 4:4:4.jpg", _encode(image, "JPEG", quality=90, subsampling=0)
    yield "progressive.jpg", _encode(image, "JPEG", quality=90, progressive=True)
    yield "grayscale.jpg", _encode(gray, "JPEG", quality=90)
    yield "cmyk.jpg", _encode(image.convert("CMYK"), "JPEG", quality=90)
    for orientation in (3, 6):
        exif = Image.Exif()
        exif[_ORIENTATION] = orientation
        yield f"exif orientation {orientation}.jpg", _encode(image, "JPEG", quality=90, exif=exif)
    yield "grayscale.png", _encode(gray, "PNG")
    yield (
        "grayscale 16 bit.png",
        _encode(Image.fromarray(np.asarray(gray).astype(np.uint16) * 3), "PNG"),
    )
    yield "rgb 16 bit.png", _encode_png16(pixels)
    yield "palette.png", _encode(image.convert("P", palette=Image.Palette.ADAPTIVE), "PNG")
    few = image.convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    yield "palette with transparency.png", _encode(few, "PNG", transparency=3)
    alpha = np.dstack(
        [
            pixels,
            np.linspace(0, 255, pixels[:, :, 0].size).reshape(pixels.shape[:2]).astype(np.uint8),
        ]
    )
    yield "rgba.png", _encode(Image.fromarray(alpha), "PNG")
    yield "bilevel.png", _encode(image.convert("1"), "PNG")
    yield "lossy.webp", _encode(image, "WEBP", quality=90)
    yield "lossless with alpha.webp", _encode(Image.fromarray(alpha), "WEBP", lossless=True)
    yield "1×1.jpg", _encode(image.crop((0, 0, 1, 1)), "JPEG")
    yield "1×1.png", _encode(image.crop((0, 0, 1, 1)), "PNG")
    yield (
        "very wide.jpg",
        _encode(Image.fromarray(make_synthetic_image(24, 1900, seed=6)), "JPEG", quality=90),
    )
    yield "very large.jpg", _encode(image.resize((4000, 3000)), "JPEG", quality=90)
    whole = _encode(image, "JPEG", quality=90)
    yield "truncated.jpg", whole[: len(whole) // 2]


def _encode(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _encode_png16(pixels: NDArray[np.uint8]) -> bytes:
    """An RGB PNG of 16 bits per channel, which Pillow reads but does not write (PNG specification, 5 and 11.2)."""
    height, width = pixels.shape[:2]
    deep = pixels.astype(">u2") * 257
    rows = b"".join(b"\0" + deep[row].astype(">u2").tobytes() for row in range(height))
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
