"""The constants of a step in the order of its kernels, and the kernels and settings that can compute it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.kernels import steps
from optpipe.workspace.environment import get_package_version

FEW_TILES, MANY_TILES = 200, 60
"""Numbers of tiles of 64 rows and 128 columns: below the first, smaller tiles are tried, since multiprocessors may be idle; above
the second, larger ones."""
ONCE = 4
"""Most blocks of input channels to copy at once."""
MANY_OUTPUTS = 500_000
"""Outputs of a depthwise convolution above which strips of several outputs are tried."""
_MANY_STRIPS = ((16, 64, 4, 4), (32, 32, 4, 4), (16, 64, 2, 4))
_FEW_STRIPS = ((16, 64, 2, 4), (16, 32, 2, 2))
"""Strips and channels of a tile, outputs of a strip, and warps."""
_MOST_UNROLLED_TAPS = 49
"""Weights of a channel in the largest depthwise kernel whose rows are unrolled: larger ones lack registers and compile slowly."""
_LEAST_LOOPED_TAPS = 9
"""Weights of a channel above which a loop over a depthwise kernel's rows is tried."""
_BLOCK_DEPTHS = (128, 64, 32)
"""Bytes of input channels in a block; Tensor Cores take no fewer than the last."""
_BLOCK_COST = 32
"""Bytes of input channels that take as long as what each block costs beside its own."""
_COPIED = 16
"""TMA copies rows that are a multiple of as many bytes."""
LIBRARIES = (
    "product_by_cublas",
    "convolution_by_cudnn",
    "attention_by_torch",
    "depthwise_by_torch",
)
"""Kernels that are calls of torch."""
_COLUMNS = 256
"""Scales and biases are padded to a multiple of the widest tile."""


@dataclass(frozen=True, slots=True)
class Tactic:
    kernel: str
    settings: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.kernel} " + " ".join(
            f"{key}={value}" for key, value in self.settings.items()
        )


@dataclass(frozen=True, slots=True)
class Operands:
    """The inputs of a step, torch tensors on one device."""

    data: Any
    """INT8, FP16 for a depthwise convolution, FP32 for a stem."""
    added: Any
    """INT8 in the shape of the output, or None."""
    constants: Sequence[Any]
    """In the order of `arrange_convolution`, `arrange_stem`, or `arrange_depthwise`."""
    added_scale: float = 0.0
    inverse_scale: float = 1.0
    """Inverse of an INT8 output's scale."""


def text_from_tactics(chosen: Mapping[int, Tactic]) -> str:
    """`1:max_pool BP=16 warps=4;64:…`, with the batch size before each tactic."""
    return ";".join(f"{size}:{tactic}" for size, tactic in sorted(chosen.items()))


@cache
def tactics_from_text(text: str) -> dict[int, Tactic]:
    tactics = {}
    for part in text.split(";") if text else ():
        size, _, tactic = part.partition(":")
        kernel, *settings = tactic.split(" ")
        pairs = (setting.split("=") for setting in settings if setting)
        tactics[int(size)] = Tactic(kernel, {key: int(value) for key, value in pairs})
    return tactics


def arrange_convolution(
    weight: NDArray[Any], scale: NDArray[np.float32], bias: NDArray[np.float32]
) -> tuple[NDArray[Any], ...]:
    """The constants of a `Convolution` from INT8 or FP16 weights (outputs, rows, columns, input channels of a group).

    Input channels are zero-padded to what TMA copies, scales and biases to a multiple of the widest tile. With FP16 weights the last
    is the bias in FP16, for cuDNN and cuBLAS.
    """
    deep = np.pad(weight, [(0, 0)] * 3 + [(0, -weight.shape[-1] % (_COPIED // weight.itemsize))])
    spare = -len(scale) % _COLUMNS
    half = () if weight.dtype == np.int8 else (bias.astype(np.float16),)
    return deep.reshape(len(weight), -1), np.pad(scale, (0, spare)), np.pad(bias, (0, spare)), *half


def arrange_stem(
    step: steps.Stem, weight: NDArray[np.float16], bias: NDArray[np.float32]
) -> tuple[NDArray[Any], ...]:
    """The constants of a `Stem` from weights (outputs, channels, kernel, kernel).

    The first is (outputs, cells * cells * numbers of a cell), with (row, column, 4 channels) in a cell.
    """
    cells, lead = step.count_cells()
    kernel, stride = step.kernel[0], step.stride
    padded = np.zeros((step.outputs, 4, stride * cells, stride * cells), np.float16)
    padded[:, : step.channels, lead : lead + kernel, lead : lead + kernel] = weight
    split = padded.reshape(step.outputs, 4, cells, stride, cells, stride)
    return np.ascontiguousarray(split.transpose(0, 2, 4, 3, 5, 1)).reshape(step.outputs, -1), bias


def arrange_depthwise(
    weight: NDArray[np.float16], bias: NDArray[np.float32]
) -> tuple[NDArray[Any], ...]:
    """The constants of a `Depthwise` from weights (channels, 1, rows, columns), which become (rows * columns, channels).

    The last is the weights as given, for torch's convolution.
    """
    return np.ascontiguousarray(weight.reshape(len(weight), -1).T), bias, weight


def _list_depthwise_tactics(
    tiles: Sequence[tuple[int, int, int, int]], *, loop: bool
) -> Iterator[Tactic]:
    for strips, channels, along, warps in tiles:
        tile = {"BP": strips, "BC": channels, "ALONG": along, "warps": warps}
        yield Tactic("fp16_depthwise", tile | ({"LOOP": 1} if loop else {}))


def list_tactics(step: steps.Step, given: Any) -> Iterator[Tactic]:
    match step:
        case steps.Convolution():
            if step.is_product:
                yield from _list_product_tactics(step, given.numel() // step.depth)
            else:
                yield from _list_convolution_tactics(step, given)
            if step.floating and step.is_product:
                yield Tactic("product_by_cublas", {})
            if step.floating and not step.flat and step.depth % (_COPIED // 2) == 0:
                yield Tactic("convolution_by_cudnn", {})  # its weights are not padded
        case steps.Stem():
            for rows, warps, stages in ((128, 4, 2), (128, 4, 3)):
                yield Tactic("fp16_wgmma_stem", {"BM": rows, "STAGES": stages, "warps": warps})
            if step.stride == 2 and _can_overlap():
                yield Tactic("fp16_wgmma_stem_at_once", {"ROWS": 16, "warps": 8})
        case steps.Depthwise():
            many = given.numel() // step.stride**2 > MANY_OUTPUTS
            strips = _MANY_STRIPS if many else _FEW_STRIPS
            taps = prod(step.kernel)
            if taps <= _MOST_UNROLLED_TAPS:
                yield from _list_depthwise_tactics(strips, loop=False)
            if taps > _LEAST_LOOPED_TAPS:
                yield from _list_depthwise_tactics(strips, loop=True)
            if step.half and step.padding[:2] == step.padding[2:]:
                yield Tactic("depthwise_by_torch", {})
        case steps.Attention():
            tiles = (
                ((64, 4), (128, 8), (64, 8))
                if step.padded > 64
                else [(step.padded, warps) for warps in (4, 2, 8)]
            )
            for rows, warps in tiles:
                yield Tactic("wgmma_attention", {"BM": rows, "warps": warps})
            if not step.biased:
                yield Tactic("attention_by_torch", {})
        case steps.Block():
            if step.middle == 64 and step.stride == 1 and _can_overlap():
                yield Tactic("int8_wgmma_block_at_once", {"BN": 128, "warps": 4})
            fits = given.shape[2] % step.stride == given.shape[3] % step.stride == 0
            for box in (
                _list_boxes(given.shape[3] // step.stride, few=step.middle > 64) if fits else ()
            ):
                shape = dict(zip(("BI", "BH", "BW"), box, strict=True))
                yield Tactic(
                    "int8_wgmma_block", {**shape, "BN": step.middle, "STAGES": 3, "warps": 4}
                )
        case steps.MaxPool():
            for pixels, warps in ((16, 4), (32, 4)):
                yield Tactic("max_pool", {"BP": pixels, "warps": warps})


@cache
def _can_overlap() -> bool:
    """Whether this Triton accepts views of shared memory that overlap, with which all rows of a kernel read one copy: 3.8 does not."""
    major, minor, *_ = (get_package_version("triton") or "99.0").split(".")
    return (int(major), int(minor)) < (3, 8)


def _choose_depth(step: steps.Convolution, most: int = _BLOCK_DEPTHS[0]) -> int:
    """Input channels of a block of at most `most` bytes; zeros fill up the last one, whose time counts as a whole one's."""
    size = 2 if step.floating else 1
    return (
        min(
            (block for block in (256, *_BLOCK_DEPTHS) if block <= most),
            key=lambda block: ceil(step.depth * size / block) * (block + _BLOCK_COST),
        )
        // size
    )


def _list_product_tactics(step: steps.Convolution, pixels: int) -> Iterator[Tactic]:
    depth, width, channels = _choose_depth(step), _round_width(step), step.depth
    tiles = _count_tiles(pixels, step)
    if tiles < FEW_TILES:
        deep = _choose_depth(step, 256)
        for (columns,) in _fit_columns(((64,), (16,)), 0, width):
            sizes = {
                "BM": 64,
                "BN": columns,
                "BK": deep,
                "PARTS": 1,
                "STAGES": 1 if channels <= deep else 4,
            }
            yield Tactic("wgmma_product", {**sizes, "PERSISTENT": 0, "warps": 4})
    if channels <= ONCE * depth and step.activation in steps.BEFORE_SCALING and not step.floating:
        for rows, columns, warps in _fit_columns(
            ((64, 128, 4), (64, 64, 4), (128, 64, 4)), 1, width
        ):
            yield Tactic(
                "int8_wgmma_product_at_once",
                {"BM": rows, "BN": columns, "BK": depth, "warps": warps},
            )
    if tiles > MANY_TILES:
        for rows, columns, parts, stages, warps, persistent in _fit_columns(_WIDE_TILES, 1, width):
            copies = (2 if persistent else 1) if channels <= depth else stages
            sizes = {"BM": rows, "BN": columns, "BK": depth, "PARTS": parts, "STAGES": copies}
            yield Tactic("wgmma_product", {**sizes, "PERSISTENT": persistent, "warps": warps})


def _fit_columns(tiles: Sequence[tuple[int, ...]], at: int, width: int) -> list[tuple[int, ...]]:
    """The tiles with at most `width` columns, in entry `at`; if there is none, the first tile with `width` columns."""
    fitting = [tile for tile in tiles if tile[at] <= width]
    return fitting or [(*tiles[0][:at], width, *tiles[0][at + 1 :])]


_WIDE_TILES = (
    (64, 128, 1, 3, 4, 0),
    (64, 128, 1, 4, 4, 0),
    (128, 128, 2, 3, 4, 0),
    (128, 256, 2, 3, 8, 0),
    (256, 64, 1, 3, 8, 1),
    (64, 256, 1, 3, 8, 1),
    (128, 128, 2, 4, 4, 1),
    (256, 128, 2, 3, 8, 1),
)
"""Rows, columns, parts, stages, warps, and whether the kernel is persistent."""


def _count_tiles(pixels: int, step: steps.Convolution) -> int:
    return ceil(pixels / 64) * ceil(step.outputs / 128)


def _round_width(step: steps.Convolution) -> int:
    """Output channels, rounded up to a power of two of at least 16; with groups, the largest power of two that divides a group's."""
    width = step.outputs // step.groups
    return width & -width if step.groups > 1 else max(16, 1 << (width - 1).bit_length())


def _list_convolution_tactics(step: steps.Convolution, given: Any) -> Iterator[Tactic]:
    images, _, height, width = given.shape
    depth, widest = _choose_depth(step), _round_width(step)
    tiles = _count_tiles(images * height * width // step.stride**2, step)
    few, many = tiles < FEW_TILES, tiles > MANY_TILES
    gathered = [*(_FEW_GATHERED if few else ()), *(_MANY_GATHERED if many else ())]
    for rows, columns, warps, stages in _fit_columns(gathered, 1, widest):
        sizes = {
            "BM": rows,
            "BN": columns,
            "BK": depth,
            "PARTS": 1,
            "STAGES": stages,
            "warps": warps,
        }
        yield Tactic("wgmma_convolution_gathered", sizes)
    if height % step.stride or width % step.stride or not step.is_plain:
        return
    if step.stride > 1 and step.depth % depth:  # the last block would reach into the next pixel
        return
    for box in _list_boxes(width // step.stride, few=not many):
        for columns, warps, stages in _fit_columns(
            (*(_FEW_BOXED if few else ()), *(_MANY_BOXED if many else ())), 0, widest
        ):
            shape = dict(zip(("BI", "BH", "BW"), box, strict=True))
            sizes = {**shape, "BN": columns, "BK": depth, "STAGES": stages, "warps": warps}
            yield Tactic("wgmma_convolution_boxes", sizes)


_FEW_GATHERED = ((64, 32, 4, 4), (64, 16, 4, 4), (64, 64, 4, 4))
_MANY_GATHERED = ((64, 128, 4, 3), (128, 128, 4, 3), (64, 64, 4, 3))
"""Rows, columns, warps and stages."""
_FEW_BOXED = ((32, 4, 4), (64, 4, 4))
_MANY_BOXED = ((128, 4, 3), (64, 4, 3), (128, 4, 4))
"""Columns, warps and stages."""


def _list_boxes(width: int, *, few: bool) -> list[tuple[int, int, int]]:
    """Images, rows, and columns of tiles of 64 or 128 pixels that lie mostly inside an image."""
    if width % 8 == 0:
        return [(1, 8, 8)] if few else [(2, 8, 8), (1, 8, 8)]
    if width % 4 == 0:
        return [(1, 16, 4)] if few else [(8, 4, 4), (4, 4, 4)]
    if width > 8:
        return [(2, 2, 16)] if few else [(4, 2, 16), (2, 2, 16)]
    return [(1, 8, 8)] if few else [(2, 8, 8), (1, 8, 8), (16, 1, 8)]
