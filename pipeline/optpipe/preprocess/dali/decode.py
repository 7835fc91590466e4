"""Decoding as DALI operators that give the pixels of Pillow, whatever the file is.

Only whole JPEG files go to the GPU's decoders; what is not one by its first or last bytes goes to the CPU's, which are the
libraries that Pillow uses. What had to be found out on a GPU:

- A transparent palette PNG keeps other colours there, and a truncated JPEG is filled up where Pillow refuses it. A whole
  JPEG ends with its end-of-image marker; one with bytes behind it is decoded by the CPU, which costs time and no pixels.
- Pillow clips 16-bit grayscale at 255 where DALI scales it to 8 bits.
- The hardware JPEG decoder is the limit of a pipeline that is otherwise tuned, while the CPU idles: it can take a share.
"""

from pathlib import Path
from typing import Any

from optpipe.core.transform import Decode
from optpipe.preprocess.dali.graph import GraphImage, Node

SHARE_PARTS = 16
"""The parts in which the CPU's share is counted: of this many files in a row it takes the same number each time.

Taken by the files' sizes, so that every batch had another number for the GPU, a share halved the rate on an H200; whether
that was the cause has not been measured.
"""


def decode_on_cpu(encoded: Node, step: Decode, *, edge_cases: bool) -> GraphImage:
    """Decodes to 8 bits on the CPU.

    `edge_cases` adds a branch for 16-bit grayscale PNG: a Python `if` on a graph node, which DALI rewrites under
    `enable_conditionals`.
    """
    pixels = _decode_pixels_on_cpu(encoded, _get_decode_settings(step), edge_cases=edge_cases)
    return GraphImage(pixels, _read_sides(encoded, step))


def decode_mixed(
    encoded: Node, step: Decode, options: dict[str, Any], *, edge_cases: bool, cpu_share: tuple[Node, float] | None
) -> GraphImage:
    """Decodes to 8 bits on the GPU, and by the CPU what is not a whole JPEG (`edge_cases`) and a share of the rest, by their index.

    `options` are nvJPEG's. Needs `enable_conditionals` unless both are off.
    """
    from nvidia.dali import fn

    settings = _get_decode_settings(step)
    if not edge_cases and cpu_share is None:
        pixels = fn.decoders.image(encoded, device="mixed", **settings, **options)
        return GraphImage(pixels, _read_sides(encoded, step))
    for_gpu = _is_for_gpu(encoded, edge_cases=edge_cases, cpu_share=cpu_share)
    if for_gpu:
        pixels = fn.decoders.image(encoded, device="mixed", **settings, **options)
    else:
        pixels = _decode_pixels_on_cpu(encoded, settings, edge_cases=edge_cases).gpu()
    return GraphImage(pixels, _read_sides(encoded, step))


def is_edge_case(path: Path, decode: str) -> bool:
    """Whether a file needs the branch for edge cases when decoding on the `cpu` or `mixed`, by its first and last bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(28)
        file.seek(max(0, size - 2))
        tail = file.read(2)
    if decode == "cpu":
        return head[:4] == b"\x89PNG" and head[24:28] == b"\x10\0\0\0"
    return head[:3] != b"\xff\xd8\xff" or tail != b"\xff\xd9"


def _is_for_gpu(encoded: Node, *, edge_cases: bool, cpu_share: tuple[Node, float] | None) -> Node:
    from nvidia.dali import fn, types

    own = None
    if cpu_share is not None:
        index, share = cpu_share
        own = (index[0] & (SHARE_PARTS - 1)) >= round(share * SHARE_PARTS)
        if not edge_cases:
            return own
    size = fn.cast(encoded.shape()[0], dtype=types.INT32)
    # ITU-T T.81, table B.1: a file starts with SOI (FF D8) and another marker, and ends with EOI (FF D9)
    whole = ((_read_number(encoded, [0], 4) & 0xFFFFFF) == 0xFFD8FF) & (_read_number(encoded, size - 2, 2) == 0xD9FF)
    return whole if own is None else whole & own


def _decode_pixels_on_cpu(encoded: Node, settings: dict[str, Any], *, edge_cases: bool) -> Node:
    from nvidia.dali import fn, math, types

    if not edge_cases:
        return fn.decoders.image(encoded, device="cpu", **settings)
    # PNG specification, 5.2 and 11.2.1: the signature; bytes 24 to 27 are depth 16, grayscale, and two zeros
    wide_gray = (_read_number(encoded, [0], 4) == 0x474E5089) & (_read_number(encoded, [24], 4) == 16)
    if wide_gray:
        levels = fn.decoders.image(encoded, device="cpu", dtype=types.UINT16, **settings)
        pixels = fn.cast(math.min(levels, 255), dtype=types.UINT8)
    else:
        pixels = fn.decoders.image(encoded, device="cpu", **settings)
    return pixels


def _get_decode_settings(step: Decode) -> dict[str, Any]:
    from nvidia.dali import types

    kinds = {"RGB": types.RGB, "BGR": types.BGR, "L": types.GRAY}
    return {"output_type": kinds[step.channels], "adjust_orientation": step.exif}


def _read_sides(encoded: Node, step: Decode) -> Node:
    from nvidia.dali import fn, types

    return fn.peek_image_shape(encoded, adjust_orientation=step.exif, dtype=types.INT32)[0:2]


def _read_number(encoded: Node, start: Any, count: int) -> Node:
    """`count` bytes of a file (2 or 4) as a little-endian number; 0 beyond its end."""
    from nvidia.dali import fn, types

    some = fn.slice(encoded, start=start, shape=[count], axes=[0], out_of_bounds_policy="pad")
    return fn.reinterpret(some, dtype=types.UINT32 if count == 4 else types.UINT16, shape=[])
