"""Launches of the kernels that compute steps: shapes, memory layouts, arguments, and outputs."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, e, gcd, log2, prod
from typing import Any

from optpipe.core import torch
from optpipe.kernels import steps
from optpipe.kernels.tactics import Operands

_RESIDENT = 2
"""Blocks of a persistent kernel per multiprocessor."""
DEPENDENT = True
"""Whether kernels start before the previous one ends (programmatic dependent launch); each waits for it itself."""
AHEAD = True
"""Whether convolutions fetch their weights while they wait."""


def _launch_kernel(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    settings: Mapping[str, int],
    **fixed: Any,
) -> None:
    meta = {key: value for key, value in settings.items() if key != "warps"}
    kernel[grid](
        *arguments,
        **meta,
        **fixed,
        num_warps=settings["warps"],
        num_stages=settings.get("STAGES", 1),
        launch_pdl=DEPENDENT,
    )


def _describe_tiles(tensor: Any, shape: tuple[int, ...], block: tuple[int, ...]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return TensorDescriptor(tensor, list(shape), strides, list(block))


def as_channels_last(tensor: Any, *, flat: bool = False) -> Any:
    """A contiguous tensor (images, height, width, channels), or with `flat` in its own shape; copies only if needed."""
    return (
        tensor.contiguous()
        if flat or tensor.dim() == 2
        else tensor.permute(0, 2, 3, 1).contiguous()
    )


def _get_ending(step: steps.Convolution | steps.Depthwise | steps.Stem) -> dict[str, int]:
    more = (
        {"FLOAT": step.floating, "ADD": step.added} if isinstance(step, steps.Convolution) else {}
    )
    return {**more, "ACTIVATION": steps.ACTIVATIONS.index(step.activation), "HALF": step.half}


def _launch_product(step: steps.Convolution, given: Operands, settings: Mapping[str, int]) -> Any:
    from optpipe.kernels.triton.convolutions import wgmma_product

    output, memory = (
        steps.make_output(step, given.data),
        as_channels_last(given.data, flat=step.flat),
    )
    weight, scale, bias, *_ = given.constants
    channels, outputs = memory.shape[-1], step.outputs
    pixels, depth = memory.numel() // channels, weight.shape[1]
    rows, columns, block = settings["BM"], settings["BN"], settings["BK"]
    across = ceil(outputs / columns)
    tiles = ceil(pixels / rows) * across
    piece = (rows, columns // settings["PARTS"])
    target, other = (
        _describe_tiles(as_channels_last(tensor, flat=step.flat), (pixels, outputs), piece)
        for tensor in _pair_with_added(output, given)
    )
    grid = (
        min(tiles, _RESIDENT * _count_multiprocessors(memory.device))
        if settings["PERSISTENT"]
        else tiles
    )
    arguments = (
        _describe_tiles(memory, (pixels, channels), (rows, block)),
        _describe_tiles(weight, (outputs, depth), (columns, block)),
        weight,
        other,
        target,
        scale,
        bias,
        given.added_scale,
        given.inverse_scale,
        tiles,
        across,
        depth,
        *_count_ahead(weight, columns),
    )
    _launch_kernel(wgmma_product, (grid,), arguments, settings, **_get_ending(step))
    return output


def _count_ahead(weight: Any, columns: int) -> tuple[int, int]:
    """How many weights there are, and how many each column of tiles fetches while it waits."""
    return weight.numel(), columns * weight.shape[1] if AHEAD else 0


def _pair_with_added(output: Any, given: Operands) -> tuple[Any, Any]:
    """The output and the added tensor; without one, a kernel takes its output instead."""
    return output, output if given.added is None else given.added


def _launch_at_once(step: steps.Convolution, given: Operands, settings: Mapping[str, int]) -> Any:
    from optpipe.kernels.triton.gluon import int8_wgmma_product_at_once

    output, memory = (
        steps.make_output(step, given.data),
        as_channels_last(given.data, flat=step.flat),
    )
    weight, scale, bias, *_ = given.constants
    channels, outputs = memory.shape[-1], step.outputs
    pixels, depth = memory.numel() // channels, weight.shape[1]
    rows, columns, block = settings["BM"], settings["BN"], settings["BK"]
    across = ceil(outputs / columns)
    target, other = (
        _describe_swizzled_tiles(
            as_channels_last(tensor, flat=step.flat), (pixels, outputs), (rows, columns)
        )
        for tensor in _pair_with_added(output, given)
    )
    arguments = (
        _describe_swizzled_tiles(memory, (pixels, channels), (rows, block)),
        _describe_swizzled_tiles(weight, (outputs, depth), (columns, block)),
        other,
        target,
        scale,
        bias,
        given.added_scale,
        across,
    )
    grid = (ceil(pixels / rows) * across,)
    ending = {key: value for key, value in _get_ending(step).items() if key != "FLOAT"}
    _launch_kernel(
        int8_wgmma_product_at_once, grid, arguments, settings, BLOCKS=ceil(depth / block), **ending
    )
    return output


def _describe_swizzled_tiles(tensor: Any, shape: tuple[int, ...], block: tuple[int, ...]) -> Any:
    """A TMA descriptor with the Tensor Cores' layout in shared memory."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    width, plain = block[-1] * tensor.element_size(), _describe_tiles(tensor, shape, block)
    swizzle = next(span for span in (128, 64, 32, 0) if span == 0 or width % span == 0)
    layout = NVMMASharedLayout(
        swizzle_byte_width=swizzle, element_bitwidth=8 * tensor.element_size(), rank=len(block)
    )
    return TensorDescriptor(tensor, plain.shape, plain.strides, plain.block_shape, layout)


def _count_multiprocessors(device: Any) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _launch_gathered(step: steps.Convolution, given: Operands, settings: Mapping[str, int]) -> Any:
    from optpipe.kernels.triton.convolutions import wgmma_convolution_gathered

    output, memory = steps.make_output(step, given.data), as_channels_last(given.data)
    weight, scale, bias, *_ = given.constants
    images, height, width, channels = memory.shape
    outputs, out_height, out_width = output.shape[1:]
    pixels, depth = images * out_height * out_width, channels // step.groups
    rows, columns = settings["BM"], settings["BN"]
    across = ceil(outputs / columns)
    piece = (rows, columns // settings["PARTS"])
    target, other = (
        _describe_tiles(as_channels_last(tensor), (pixels, outputs), piece)
        for tensor in _pair_with_added(output, given)
    )
    arguments = (
        memory,
        _describe_tiles(weight, tuple(weight.shape), (columns, settings["BK"])),
        weight,
        other,
        target,
        scale,
        bias,
        given.added_scale,
        given.inverse_scale,
        pixels,
        height,
        width,
        out_height,
        out_width,
        across,
        channels,
        outputs // step.groups,
        depth,
        weight.shape[1] // prod(step.kernel),
        *_count_ahead(weight, columns),
    )
    top, left, *_ = step.padding
    fixed = {
        "R": step.kernel[0],
        "S": step.kernel[1],
        "STRIDE": step.stride,
        "DILATION": step.dilation,
    }
    fixed |= {
        "TOP": top,
        "LEFT": left,
        "GROUPED": step.groups > 1,
        "PADDED": depth % settings["BK"] != 0,
    }
    fixed |= _get_ending(step)
    _launch_kernel(
        wgmma_convolution_gathered, (ceil(pixels / rows) * across,), arguments, settings, **fixed
    )
    return output


def _launch_boxes(step: steps.Convolution, given: Operands, settings: Mapping[str, int]) -> Any:
    from optpipe.kernels.triton.convolutions import wgmma_convolution_boxes

    output, memory = steps.make_output(step, given.data), as_channels_last(given.data)
    weight, scale, bias, *_ = given.constants
    images, height, width, channels = memory.shape
    outputs, out_height, out_width = output.shape[1:]
    box = tuple(settings[key] for key in ("BI", "BH", "BW"))
    columns, block, stride = settings["BN"], settings["BK"], step.stride
    groups, down, along = (
        ceil(size / side) for size, side in zip((images, out_height, out_width), box, strict=True)
    )
    across = ceil(outputs / columns)
    shape = (images, out_height, out_width, outputs)
    target, other = (
        _describe_tiles(as_channels_last(tensor), shape, (*box, columns))
        for tensor in _pair_with_added(output, given)
    )
    seen = (images, height // stride, stride, width // stride, stride * channels)
    depth = weight.shape[1] // step.kernel[0] ** 2
    arguments = (
        _describe_tiles(memory, seen, (box[0], box[1], 1, box[2], block)),
        _describe_tiles(weight, tuple(weight.shape), (columns, block)),
        weight,
        other,
        target,
        scale,
        bias,
        given.added_scale,
        given.inverse_scale,
        down,
        along,
        across,
        ceil(depth / block),
        channels,
        depth,
        *_count_ahead(weight, columns),
    )
    fixed = {"R": step.kernel[0], "STRIDE": stride, "PAD": step.padding[0], **_get_ending(step)}
    _launch_kernel(
        wgmma_convolution_boxes, (groups * down * along * across,), arguments, settings, **fixed
    )
    return output


def _launch_stem(step: steps.Stem, given: Operands, settings: Mapping[str, int]) -> Any:
    from optpipe.kernels.triton.images import fp16_wgmma_stem

    output = steps.make_output(step, given.data)
    weight, bias = given.constants
    images, outputs, *size = output.shape
    cells, (spanned, _) = _reorder_cells(step, given, size), step.count_cells()
    _, rows, columns, _ = cells.shape
    pixels, block = images * size[0] * size[1], settings["BM"]
    together = spanned if step.stride == 2 else 1
    arguments = (
        cells,
        _describe_tiles(weight, tuple(weight.shape), (outputs, together * step.cell)),
        _describe_tiles(as_channels_last(output), (pixels, outputs), (block, outputs)),
        bias,
        given.inverse_scale,
        pixels,
        *size,
        rows,
        columns,
    )
    fixed = {"R": spanned, "CELL": step.cell, "TOGETHER": together, "N": outputs}
    fixed |= _get_ending(step)
    _launch_kernel(fp16_wgmma_stem, (ceil(pixels / block),), arguments, settings, **fixed)
    return output


def _reorder_cells(step: steps.Stem, given: Operands, size: Sequence[int]) -> Any:
    """FP16 cells (images, rows, columns, numbers of a cell) for outputs of `size`, rows and columns."""
    from optpipe.kernels.triton.images import fp16_reorder_cells

    image = given.data.contiguous()
    images, channels, height, width = image.shape
    spanned, lead = step.count_cells()
    rows, columns = (side + spanned - 1 for side in size)
    shape, block = (images, rows, columns, step.cell), 2048 // step.cell
    cells = torch.empty(shape, dtype=torch.float16, device=image.device)
    count = images * rows * columns
    ahead = (image, cells, count, height, width, rows, columns, step.padding[0] + lead)
    fixed = {"CHANNELS": channels, "STRIDE": step.stride}
    settings = {"BP": block, "warps": 4}
    _launch_kernel(fp16_reorder_cells, (ceil(count / block),), ahead, settings, **fixed)
    return cells


def _launch_stem_at_once(step: steps.Stem, given: Operands, settings: Mapping[str, int]) -> Any:
    from optpipe.kernels.triton.gluon import fp16_wgmma_stem_at_once

    output = steps.make_output(step, given.data)
    weight, bias = given.constants
    images, outputs, *size = output.shape
    cells, (spanned, _), rows = (
        _reorder_cells(step, given, size),
        step.count_cells(),
        settings["ROWS"],
    )
    more = 1 << (spanned - 2).bit_length() if spanned > 1 else 1
    down, along = ceil(size[0] / rows), ceil(size[1] / 8)
    tiles = images * down * along
    arguments = (
        *(_describe_swizzled_tiles(cells, cells.shape, (1, side, 8, 16)) for side in (rows, more)),
        _describe_swizzled_tiles(weight, tuple(weight.shape), (outputs, 16)),
        _describe_swizzled_tiles(
            as_channels_last(output), (images, *size, outputs), (1, rows, 8, outputs)
        ),
        bias,
        given.inverse_scale,
        tiles,
    )
    fixed = {
        "DOWN": down,
        "ALONG": along,
        "R": spanned,
        "MORE": more,
        "N": outputs,
        **_get_ending(step),
    }
    grid = min(tiles, _RESIDENT * _count_multiprocessors(output.device))
    _launch_kernel(fp16_wgmma_stem_at_once, (grid,), arguments, settings, **fixed)
    return output


def split_block(step: steps.Block, output: Any, given: Any) -> tuple[Any, ...]:
    """Views of the outputs of a block's second and third convolution, (images, channels, height, width)."""
    images, _, height, width = given.shape
    size = images, height // step.stride, width // step.stride
    first = images * size[1] * size[2] * step.wide
    parts = (output[:first], step.wide), (output[first:], step.following)
    return tuple(
        part.view(*size, channels).permute(0, 3, 1, 2) for part, channels in parts if channels
    )


def _launch_block(step: steps.Block, given: Operands, settings: Mapping[str, int]) -> Any:
    from optpipe.kernels.triton.convolutions import int8_wgmma_block
    from optpipe.kernels.triton.gluon import int8_wgmma_block_at_once

    output, memory = steps.make_output(step, given.data), as_channels_last(given.data)
    w, scale, bias, w3, scale3, bias3, *third = given.constants
    w1, scale1, bias1 = third or (w3, scale3, bias3)  # not read
    wide, *last = (as_channels_last(part) for part in split_block(step, output, given.data))
    images, height, width, _ = wide.shape
    stride, middle, columns = step.stride, step.middle, settings["BN"]
    after, more = (last[0], step.following) if last else (wide, columns)
    at_once = "BI" not in settings
    box = (1, 8, 8) if at_once else tuple(settings[key] for key in ("BI", "BH", "BW"))
    describe = _describe_swizzled_tiles if at_once else _describe_tiles
    down, along = ceil(height / box[1]), ceil(width / box[2])
    tiles = ceil(images / box[0]) * down * along
    behind = (
        scale,
        bias,
        describe(w3, tuple(w3.shape), (columns, middle)),
        scale3,
        bias3,
        describe(as_channels_last(given.added), tuple(wide.shape), (*box, columns)),
        given.added_scale,
        describe(wide, tuple(wide.shape), (*box, columns)),
        describe(w1, tuple(w1.shape), (more, columns)),
        scale1,
        bias1,
        describe(after, tuple(after.shape), (*box, more)),
    )
    fixed = {"MID": middle, "NEXT": step.following}
    weights = describe(w, tuple(w.shape), (middle, middle))
    if at_once:
        fixed |= {"DOWN": down, "ALONG": along, "WIDE": step.wide}
        data = (describe(memory, tuple(memory.shape), (1, rows, 8, middle)) for rows in (8, 2))
        grid = min(tiles, _RESIDENT * _count_multiprocessors(output.device))
        _launch_kernel(
            int8_wgmma_block_at_once, (grid,), (*data, weights, *behind, tiles), settings, **fixed
        )
        return output
    seen = (images, height, stride, width, stride * middle)
    pixels = describe(memory, seen, (box[0], box[1], 1, box[2], middle))
    arguments = (pixels, weights, *behind, down, along, step.wide)
    _launch_kernel(int8_wgmma_block, (tiles,), arguments, settings, STRIDE=stride, **fixed)
    return output


def _launch_depthwise(step: steps.Depthwise, given: Operands, settings: Mapping[str, int]) -> Any:
    from optpipe.kernels.triton.images import fp16_depthwise

    output, memory = steps.make_output(step, given.data), as_channels_last(given.data)
    weight, bias, _ = given.constants
    images, height, width, channels = memory.shape
    outputs, *size = output.shape[1:]
    strips = images * size[0] * ceil(size[1] / settings["ALONG"])
    arguments = (
        memory,
        weight,
        as_channels_last(output),
        bias,
        given.inverse_scale,
        strips,
        height,
        width,
        *size,
        channels,
        outputs,
    )
    top, left, *_ = step.padding
    fixed = {
        "R": step.kernel[0],
        "S": step.kernel[1],
        "STRIDE": step.stride,
        "TOP": top,
        "LEFT": left,
    }
    fixed |= {"ALIGN": gcd(16, channels, outputs), **_get_ending(step)}
    grid = (ceil(strips / settings["BP"]), ceil(outputs / settings["BC"]))
    _launch_kernel(fp16_depthwise, grid, arguments, settings, **fixed)
    return output


def _activate(step: steps.Convolution | steps.Depthwise, value: Any) -> Any:
    return getattr(torch.nn.functional, step.activation)(value) if step.activation else value


def _launch_depthwise_by_torch(step: steps.Depthwise, given: Operands, _: Mapping[str, int]) -> Any:
    _, bias, weight = given.constants
    value = torch.nn.functional.conv2d(
        given.data, weight, bias.half(), step.stride, step.padding[:2], groups=step.channels
    )
    return _activate(step, value)


def _launch_convolution_by_cudnn(
    step: steps.Convolution, given: Operands, _: Mapping[str, int]
) -> Any:
    """cuDNN's kernel for convolution, bias, addition, and ReLU, or its convolution and torch's other activations."""
    assert given.added is None or given.added_scale == 1, given.added_scale
    weight, _, _, bias = given.constants
    kernel = weight.view(step.outputs, *step.kernel, step.depth).permute(0, 3, 1, 2)
    stride, dilation = [step.stride] * 2, [step.dilation] * 2
    data, padding = given.data, list(step.padding[:2])
    if step.activation == "relu" and given.added is not None:
        return torch.ops.aten.cudnn_convolution_add_relu(
            data, kernel, given.added, 1.0, bias, stride, padding, dilation, step.groups
        )
    if step.activation == "relu":
        return torch.ops.aten.cudnn_convolution_relu(
            data, kernel, bias, stride, padding, dilation, step.groups
        )
    value = torch.nn.functional.conv2d(data, kernel, bias, stride, padding, dilation, step.groups)
    value = value if given.added is None else value + given.added
    return _activate(step, value)


def _launch_product_by_cublas(
    step: steps.Convolution, given: Operands, _: Mapping[str, int]
) -> Any:
    """cuBLAS's product with a bias and ReLU, and torch's addition and other activations."""
    weight, _scale, _bias, bias = given.constants
    data = as_channels_last(given.data, flat=step.flat)
    rows, matrix = data.view(-1, step.depth), weight[:, : step.depth].t()
    if step.activation == "relu" and given.added is None:
        value = torch.ops.aten._addmm_activation(bias, rows, matrix)
    else:
        value = torch.addmm(bias, rows, matrix)
        if given.added is not None:
            value += as_channels_last(given.added, flat=step.flat).view_as(value)
        value = _activate(step, value)
    value = value.view(*data.shape[:-1], step.outputs)
    return value if step.flat else value.permute(0, 3, 1, 2)


def _launch_attention(step: steps.Attention, given: Operands, settings: Mapping[str, int]) -> Any:
    from optpipe.kernels.triton.attention import wgmma_attention

    output, memory = steps.make_output(step, given.data), given.data.contiguous()
    bias, sequences = given.constants[0] if step.biased else memory, len(memory)
    mask, strides = memory, (0, 0, 0, 0)
    if given.added is not None:
        mask = given.added.expand(sequences, step.heads, step.tokens, step.tokens)
        mask, strides = mask.view(torch.uint8) if mask.dtype == torch.bool else mask, mask.stride()
    factors = step.scale * log2(e), given.inverse_scale
    arguments = (memory, bias, mask, output, *factors, len(bias), step.tokens, *strides)
    fixed = {"H": step.heads, "D": step.outputs // step.heads, "P": step.padded}
    fixed |= {"BIASED": step.biased, "MASK": 0 if given.added is None else mask.element_size()}
    fixed["END"] = 0 if step.half else 1 + step.e4m3
    grid = ceil(step.tokens / settings["BM"]) * sequences * step.heads
    _launch_kernel(wgmma_attention, (grid,), arguments, settings, **fixed)
    return output


def _launch_attention_by_torch(step: steps.Attention, given: Operands, _: Mapping[str, int]) -> Any:
    output, apart = (
        steps.make_output(step, given.data),
        given.data.half().unflatten(-1, (3, step.heads, -1)),
    )
    parts = apart.permute(2, 0, 3, 1, 4)
    heads = torch.nn.functional.scaled_dot_product_attention(*parts, given.added, scale=step.scale)
    value = heads.transpose(1, 2).flatten(2).contiguous()
    if step.half:
        return value
    from optpipe.kernels.triton.attention import fp16_quantize

    count, block = value.numel(), 2048
    arguments = (value, output, given.inverse_scale, count)
    _launch_kernel(
        fp16_quantize,
        (ceil(count / block),),
        arguments,
        {"warps": 4},
        END=1 + step.e4m3,
        BLOCK=block,
    )
    return output


def _launch_max_pool(step: steps.MaxPool, given: Operands, settings: Mapping[str, int]) -> Any:
    from optpipe.kernels.triton.images import max_pool

    output = steps.make_output(step, given.data)
    images, _, height, width = given.data.shape
    channels, *size = output.shape[1:]
    memory, target = (as_channels_last(tensor) for tensor in (given.data, output))
    words = channels
    if not step.floating:
        memory, target, words = memory.view(torch.int32), target.view(torch.int32), channels // 4
    pixels, block = (
        images * size[0] * size[1],
        min(64 if step.floating else 16, 1 << (words - 1).bit_length()),
    )
    grid = (ceil(pixels / settings["BP"]), ceil(words / block))
    fixed = {
        "BC": block,
        "R": step.kernel[0],
        "STRIDE": step.stride,
        "PAD": step.padding[0],
        "FLOAT": step.floating,
    }
    _launch_kernel(
        max_pool, grid, (memory, target, pixels, height, width, *size, words), settings, **fixed
    )
    return output


LAUNCHERS: dict[str, Callable[[Any, Operands, Mapping[str, int]], Any]] = {
    "convolution_by_cudnn": _launch_convolution_by_cudnn,
    "product_by_cublas": _launch_product_by_cublas,
    "attention_by_torch": _launch_attention_by_torch,
    "depthwise_by_torch": _launch_depthwise_by_torch,
    "wgmma_attention": _launch_attention,
    "fp16_depthwise": _launch_depthwise,
    "fp16_wgmma_stem": _launch_stem,
    "fp16_wgmma_stem_at_once": _launch_stem_at_once,
    "int8_wgmma_block": _launch_block,
    "int8_wgmma_block_at_once": _launch_block,
    "wgmma_convolution_boxes": _launch_boxes,
    "wgmma_convolution_gathered": _launch_gathered,
    "max_pool": _launch_max_pool,
    "wgmma_product": _launch_product,
    "int8_wgmma_product_at_once": _launch_at_once,
}
"""By kernel: from a step, its operands, and a tactic's settings to the output."""
